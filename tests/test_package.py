"""What is installed, and what happens when it meets another mlx."""

import ctypes
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import mlx_mtp
from mlx_mtp import _ext, ops

ROOT = Path(__file__).parents[1]
DISTRIBUTION = distribution("mlx-mtp")
EDITABLE = "editable" in (DISTRIBUTION.read_text("direct_url.json") or "")
built_wheel = pytest.mark.skipif(EDITABLE, reason="needs an install that is no link")


def run(*command, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


@built_wheel
def test_wheel_has_all_its_parts_and_no_mlx():
    files = {str(file): file for file in DISTRIBUTION.files}
    for part in (
        f"mlx_mtp/{Path(_ext.__file__).name}",
        "mlx_mtp/_ext.pyi",
        "mlx_mtp/py.typed",
        "mlx_mtp/include/mlx_mtp/ops.h",
        "mlx_mtp/demo/model.safetensors",
        "mlx_mtp/demo/tokenizer.json",
        f"mlx_mtp-{mlx_mtp.__version__}.dist-info/licenses/LICENSE",
    ):
        assert part in files
    assert not any("libmlx" in name for name in files)
    assert sum(file.size or 0 for file in files.values()) < 20e6


@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
def test_libmlx_is_found_beside_the_package_only():
    binary = Path(_ext.__file__).read_bytes()
    assert b"\0$ORIGIN/../mlx/lib\0" in binary
    alone = run(sys.executable, "-c", "import mlx_mtp._ext", cwd="/")
    assert alone.returncode == 0, alone.stderr


def test_one_set_of_nanobind_internals():
    """With two, mx.array would be a foreign type to the extension."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.restype = ctypes.py_object
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    names = api.PyInterpreterState_GetDict(api.PyInterpreterState_Get())
    assert len([name for name in names if "_mlx__" in str(name)]) == 1


def test_another_mlx_is_refused_before_the_extension_loads():
    code = """
import sys
import mlx_mtp._build as build
build.mlx_version = "0.1.2"
try:
    import mlx_mtp.ops
except ImportError as error:
    print(error)
print("mlx_mtp._ext" in sys.modules)
"""
    message, loaded = run(sys.executable, "-c", code).stdout.splitlines()
    assert "built for mlx 0.1.2" in message
    assert 'pip install "mlx==0.1.2"' in message
    assert loaded == "False"


def test_stub_has_true_types():
    stub = Path(_ext.__file__).with_name("_ext.pyi").read_text()
    for op in ops.__all__:
        assert f"def {op}(" in stub
    assert "mlx::core" not in stub and "mlx.core.array" in stub


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_cpp_example_builds_and_runs(tmp_path):
    configure = ["-S", ROOT / "examples/cpp", "-B", tmp_path]
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (
        ["cmake", *configure, *options],
        ["cmake", "--build", tmp_path, "-j2"],
    ):
        built = run(*command)
        assert built.returncode == 0, built.stdout + built.stderr
    out = run(tmp_path / "engine").stdout
    assert "array([[3, 1, 4, -1]]" in out
    assert "accepted array([2]" in out
    assert "rows array(3," in out


def test_versions_agree():
    assert mlx_mtp.__version__ == DISTRIBUTION.version
    pins = [r for r in DISTRIBUTION.requires if r.startswith(("mlx==", "mlx-cpu=="))]
    assert len(pins) == 2
    from mlx_mtp import _build

    assert all(f"=={_build.mlx_version}" in pin for pin in pins)
