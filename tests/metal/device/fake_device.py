"""Loads the extension that runs on the fake device."""

import ctypes
import importlib.util
from dataclasses import dataclass

import mlx.core  # noqa: F401  The extension needs it loaded.


@dataclass(frozen=True)
class Dispatch:
    """What the host code encoded for one kernel."""

    kernel: str
    grid: tuple[int, ...]  # threadgroups
    threads: int
    reads: frozenset[int]  # buffer indices
    writes: frozenset[int]
    constants: dict[int, int]  # bytes by index

    @classmethod
    def parse(cls, line):
        fields = [[int(n) for n in field.split()] for field in line.split(":")[1:]]
        grid, threads, reads, writes, constants = fields
        return cls(
            line.split(":")[0],
            tuple(grid),
            *threads,
            frozenset(reads),
            frozenset(writes),
            dict(zip(constants[::2], constants[1::2], strict=True)),
        )


class FakeDevice:
    """``ops`` holds the four ops; ``emulator`` is a library of the kernels."""

    def __init__(self, extension, emulator, name="fake._ext"):
        spec = importlib.util.spec_from_file_location(name, extension)
        self.ops = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.ops)
        self._library = ctypes.CDLL(str(extension))
        self._library.fake_device_log.restype = ctypes.c_char_p
        self._emulator = str(emulator).encode()
        self.configure()

    def configure(self, max_threads=1024, seed=0, fault=""):
        """The limit of every pipeline, the order of threads (0: as they come), and what
        to break in every dispatch: see ``inject`` in fake_device.cpp.
        """
        self._library.fake_device(
            self._emulator, max_threads, ctypes.c_uint64(seed), fault.encode()
        )

    def dispatches(self):
        """Those since the last call."""
        log = self._library.fake_device_log().decode()
        return [Dispatch.parse(line) for line in log.splitlines()]
