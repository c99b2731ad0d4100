"""Which BLAS multiplies on a Linux CPU, and how to get a fast one.

MLX's Linux CPU wheel ships the reference BLAS, which multiplies a block of rows no
faster than one row after the other: speculation then gains nothing. An OpenBLAS that
is loaded before MLX takes its place. This module imports nothing of MLX.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from pathlib import Path

HINT = (
    "MLX multiplies with the reference BLAS here, about 30 times slower than OpenBLAS "
    "on a block of rows. Debian and Ubuntu: apt install libopenblas0-pthread"
)


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def load_openblas(threads: int | None = None) -> bool:
    """Puts the system's OpenBLAS in front of MLX's BLAS; True if that worked.

    Call it before MLX is imported: later it has no effect, and False is returned. It
    does nothing off Linux, where MLX uses Accelerate.

    Args:
        threads (int, optional): Threads of OpenBLAS. Default: its own choice.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    found = ctypes.util.find_library("openblas")
    for name in filter(None, (found, "libopenblas.so.0", "libopenblas.so")):
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if threads is not None:
            library.openblas_set_num_threads(threads)
        return True
    return False


def blas_name() -> str:
    """``accelerate``, ``reference``, or the file of the BLAS loaded in front of it."""
    if sys.platform == "darwin":
        return "accelerate"
    if (file := _blas_file()) is None:
        return "reference"
    return Path(file).name or "unknown"


def openblas() -> list[str]:
    """Path and threads of the OpenBLAS in front of MLX's BLAS; empty if there is none.

    Another process loads the same one with them.
    """
    file = None if sys.platform == "darwin" else _blas_file()
    if not file:
        return []
    try:
        threads = ctypes.CDLL(file).openblas_get_num_threads()
    except (OSError, AttributeError):
        return []
    return [file, str(threads)]


def _blas_file() -> str | None:
    """The file of the BLAS in front; empty if unknown, None if there is none."""
    process = ctypes.CDLL(None)
    try:
        symbol = process.cblas_sgemm
    except AttributeError:
        return None
    info, address = _SymbolInfo(), ctypes.cast(symbol, ctypes.c_void_p)
    return info.file.decode() if process.dladdr(address, ctypes.byref(info)) else ""
