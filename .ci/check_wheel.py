"""Checks what is in wheels: ``check_wheel.py FILE...``, or ``--installed``.

Needs the package lief.
"""

import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import lief

ROOT = Path(__file__).parents[1]
PARTS = (
    "mlx_mtp/__init__.py",
    "mlx_mtp/_build.py",
    "mlx_mtp/_ext.pyi",
    "mlx_mtp/py.typed",
    "mlx_mtp/include/mlx_mtp/ops.h",
    "mlx_mtp/demo/config.json",
    "mlx_mtp/demo/model.safetensors",
    "mlx_mtp/demo/tokenizer.json",
)
MAX_BYTES = 20e6
BINARY = (".so", ".dylib", ".dll", ".a", ".metallib")


def files_of_wheel(path):
    """The contents of a wheel by name."""
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def files_of_installed():
    return {
        str(file): file.locate().read_bytes()
        for file in distribution("mlx-mtp").files
        if file.locate().is_file() and "__pycache__" not in file.parts
    }


def problems(files):
    """What is wrong with the files of a wheel, in words."""
    found = [f"{part} is missing" for part in PARTS if part not in files]
    if not any(name.endswith("dist-info/licenses/LICENSE") for name in files):
        found.append("the licence is missing")
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        found.append(f"{size / 1e6:.1f} MB are more than {MAX_BYTES / 1e6:.0f}")
    binaries = [name for name in files if name.endswith(BINARY)]
    extensions = [name for name in binaries if name.startswith("mlx_mtp/_ext.")]
    if len(extensions) != 1 or binaries != extensions:
        found.append(f"the only binary must be mlx_mtp/_ext but there are {binaries}")
    for name in extensions:
        found += problems_of_binary(files[name])
    return found


def problems_of_binary(data):
    """What is wrong with the extension."""
    binary = lief.parse(data)
    found = []
    if isinstance(binary, lief.MachO.Binary):
        paths = [command.path for command in binary.rpaths]
        libraries = [library.name for library in binary.libraries]
        expected, libmlx = "@loader_path/../mlx/lib", "@rpath/libmlx.dylib"
        found += missing_kernels(data)
    else:
        dynamic = binary.dynamic_entries
        paths = [
            e.runpath for e in dynamic if e.tag == lief.ELF.DynamicEntry.TAG.RUNPATH
        ]
        libraries, libmlx = list(binary.libraries), "libmlx.so"
        expected = "$ORIGIN/../mlx/lib"
    if paths != [expected]:
        found.append(f"the library path must be {expected} but is {paths}")
    if libmlx not in libraries:
        found.append(f"{libmlx} must be linked but only {libraries} are")
    return found


def missing_kernels(data):
    """Kernel text that the binary does not carry."""
    return [
        f"no text of {path.name}"
        for path in sorted((ROOT / "metal").glob("*.metal"))
        if path.read_bytes().rpartition(b'.h"\n')[2] not in data
    ]


def main(args):
    """Returns 1 when something is wrong."""
    if args == ["--installed"]:
        wheels = {"the installed package": files_of_installed()}
    else:
        wheels = {path: files_of_wheel(path) for path in args}
    failed = False
    for name, files in wheels.items():
        found = problems(files)
        failed |= bool(found)
        print(f"{name}: {'; '.join(found) or 'ok'}")
    return int(failed or not wheels)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
