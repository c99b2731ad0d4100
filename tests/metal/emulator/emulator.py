"""Builds .metal files for the emulator and runs their kernels on NumPy arrays."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SANITIZERS = {
    "address": ["-O1", "-fsanitize=address", "-fno-omit-frame-pointer"],
    "undefined": ["-O1", "-fsanitize=undefined,float-cast-overflow"],
    "thread": ["-O1", "-fsanitize=thread"],
}


def clang():
    """The newest clang++ on this machine, None if there is none."""
    names = ["clang++", *(f"clang++-{n}" for n in range(22, 15, -1))]
    return next((path for name in names if (path := shutil.which(name))), None)


def build(sources, out, include=(), sanitize=None, flags=()):
    """Compiles .metal files and the engine to a shared library."""
    options = SANITIZERS[sanitize] if sanitize else ["-O2"]
    if sanitize == "undefined":
        options = [*options, "-fno-sanitize-recover=all"]
    command = [
        clang(),
        *options,
        *flags,
        "-std=c++17",
        "-g1",
        "-fPIC",
        "-shared",
        "-march=x86-64-v3",
        # Kernels read several small values at once.
        "-fno-strict-aliasing",
        "-Wall",
        "-Wno-unknown-attributes",
        *(f"-I{path}" for path in [HERE, HERE / "run", *include]),
        "-x",
        "c++",
        HERE / "engine.cpp",
        *sources,
        "-o",
        out,
    ]
    subprocess.run(list(map(str, command)), check=True)
    return out


class Emulator:
    """The kernels of a shared library that ``build`` made."""

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        self._launch = self._library.emulator_launch
        self._launch.restype = ctypes.c_char_p
        self._library.emulator_threadgroup_bytes.restype = ctypes.c_size_t
        self._library.emulator_kernels.restype = ctypes.POINTER(ctypes.c_char_p)

    def kernels(self):
        names = self._library.emulator_kernels()
        count = next(i for i in range(10**6) if names[i] is None)
        return [names[i].decode() for i in range(count)]

    def threadgroup_bytes(self):
        """Threadgroup memory that the last kernel declared."""
        return self._library.emulator_threadgroup_bytes()

    def launch(self, kernel, grid, threads, buffers, seed=0):
        """Runs ``kernel``. ``buffers`` maps an index to an array or a ctypes struct.

        Raises RuntimeError when the kernel does something that is not allowed.
        """
        pointers = (ctypes.c_void_p * 31)()
        for index, x in buffers.items():
            pointers[index] = (
                x.ctypes.data if isinstance(x, np.ndarray) else ctypes.addressof(x)
            )
        size = (ctypes.c_uint32 * 3)
        pad = (1, 1, 1)
        error = self._launch(
            kernel.encode(),
            size(*(*grid, *pad)[:3]),
            size(*(*threads, *pad)[:3]),
            pointers,
            31,
            ctypes.c_uint64(seed),
        )
        if error:
            raise RuntimeError(f"{kernel}: {error.decode()}")
