"""Builds .metal files for the emulator and runs their kernels on NumPy arrays."""

import ctypes
import os
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SANITIZERS = {
    "address": ["-fsanitize=address"],
    "undefined": [
        "-fsanitize=undefined,float-cast-overflow",
        "-fno-sanitize-recover=all",
    ],
    "thread": ["-fsanitize=thread"],
}
ENGINE = {"address": ["-DWITH_ASAN"], "thread": ["-DWITH_TSAN"]}


def clang():
    """The newest clang++ on this machine, None if there is none."""
    names = ["clang++", *(f"clang++-{n}" for n in range(22, 15, -1))]
    return next((path for name in names if (path := shutil.which(name))), None)


def build(
    sources,
    out,
    include=(),
    sanitize=None,
    flags=(),
    link=("-shared",),
    engine=HERE / "engine.cpp",
):
    """Compiles .metal (and C++) files and the engine to a library or program.

    ``engine`` may be an object file that an earlier build with the same sanitizer left
    beside its result.
    """
    instrument = SANITIZERS.get(sanitize, [])
    options = ["-std=c++17", "-g1", "-fPIC", "-march=x86-64-v3"]
    # Kernels read several small values at once.
    options += ["-O1" if sanitize else "-O2", "-fno-strict-aliasing"]
    options += ["-Wall", "-Wno-unknown-attributes", *flags]
    options += [f"-I{path}" for path in [HERE, HERE / "run", *include]]
    out = Path(out)

    def compile(source):
        if source.suffix == ".o":
            return source
        own = ENGINE.get(sanitize, []) if source == HERE / "engine.cpp" else instrument
        target = out.with_name(f"{out.stem}.{source.stem}.o")
        _run([clang(), *options, *own, "-x", "c++", "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile, map(Path, [engine, *sources])))
    _run([clang(), *instrument, *link, *objects, "-o", out])
    return out


def _run(command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(done.stderr)


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
        size = ctypes.c_uint32 * 3
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


class Recorder:
    """Stands in for an ``Emulator`` and keeps its launches for ``replay``.

    Without an emulator the launches are only kept, and outputs keep their values.
    """

    def __init__(self, emulator=None):
        self._emulator = emulator
        self._records = []
        self._known = {}

    def launch(self, kernel, grid, threads, buffers, seed=0):
        pad = (1, 1, 1)
        sizes = [*(*grid, *pad)[:3], *(*threads, *pad)[:3]]
        name = kernel.encode()
        record = struct.pack("<I", len(name)) + name
        record += struct.pack("<6IQI", *sizes, seed, len(buffers))
        for index, x in buffers.items():
            record += struct.pack("<I", index) + self._buffer(x)
        self._records.append(record)
        if self._emulator:
            self._emulator.launch(kernel, grid, threads, buffers, seed)

    def _buffer(self, x):
        if not isinstance(x, np.ndarray):
            x = np.frombuffer(x, np.uint8)
        low, high = np.lib.array_utils.byte_bounds(x)
        first = low not in self._known
        # Keeps x alive, so that its address stays its own.
        number, _ = self._known.setdefault(low, (len(self._known), x))
        head = struct.pack("<3Q", number, x.ctypes.data - low, high - low)
        return head + ctypes.string_at(low, high - low) if first else head

    def save(self, path):
        count = struct.pack("<I", len(self._records))
        Path(path).write_bytes(count + b"".join(self._records))


def replay(program, recording, timeout=300):
    """Runs a recording. Returns what the sanitizer or the emulator said, or ''."""
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "TSAN_OPTIONS": "halt_on_error=1:symbolize=0",
    }
    done = subprocess.run(
        [program, recording],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    return done.stderr or (f"exit code {done.returncode}" if done.returncode else "")


def build_replay(sources, out, **options):
    return build([HERE / "replay.cpp", *sources], out, link=(), **options)
