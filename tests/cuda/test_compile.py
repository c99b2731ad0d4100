"""Every kernel compiles for NVIDIA GPUs, with NVRTC and no GPU."""

import ctypes
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))

import machine  # noqa: E402

LIBRARY = "libnvrtc.so.13"


@pytest.fixture(scope="module")
def texts():
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        load_from_package()
    return machine.kernel_texts()


def load_from_package():
    """NVRTC of the package nvidia-cuda-nvrtc, which lies in no path of the loader."""
    spec = find_spec("nvidia")
    found = [
        path
        for folder in (spec.submodule_search_locations if spec else ())
        for pattern in ("libnvrtc-builtins.so.13*", "libnvrtc.so.13*")
        for path in Path(folder).glob(f"cu13/lib/{pattern}")
    ]
    if not found:
        pytest.skip(
            "THE KERNELS ARE NOT COMPILED FOR CUDA: it needs "
            "pip install 'nvidia-cuda-nvrtc==13.*'"
        )
    # The builtins come first: NVRTC asks for them by name.
    for path in found:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def kernels():
    """The names that the .metal files instantiate."""
    for path in sorted((machine.ROOT / "metal").glob("*.metal")):
        text = path.read_text().replace("\\\n", " ")
        for name, suffix in re.findall(r'"(\w+)"(?: #name(?: "(\w+)")?)?', text):
            if not name.endswith("_"):
                yield name
                continue
            for dtype in ("float32", "float16", "bfloat16"):
                yield name + dtype + suffix


def test_every_kernel_is_listed():
    names = list(kernels())
    assert len(names) == len(set(names)) == 4 + 9 + 9 + 12 + 18


@pytest.mark.parametrize("name", list(kernels()))
def test_compiles(texts, name):
    code = machine.compile_kernel(texts, name)
    assert name.encode() in code


def test_a_kernel_with_a_mistake_does_not_compile(texts):
    wrong = {**texts, "commit_rows": texts["commit_rows"].replace("clamp", "clmap")}
    with pytest.raises(RuntimeError, match="error"):
        machine.compile_kernel(wrong, "commit_rows_8")
