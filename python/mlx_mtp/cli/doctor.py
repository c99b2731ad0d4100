"""Check every op on this machine's GPU, and time it.

With a GPU, every op and dtype is compared with the CPU path. Without one, the CPU path
is compared with float64 NumPy. Paste the output into a bug report.
"""

from __future__ import annotations

import argparse
import platform
import sys

import mlx.core as mx

from .. import __version__
from . import doctor_checks, doctor_speed

ROW = "{:<19}{:<10}{:>6}{:>6}{:>10}{:>10}{:>9}{:>10}  {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-speed", action="store_true", help="Check only.")


def run(args: argparse.Namespace) -> int:
    """Returns 1 when any result is wrong or an op fails."""
    chosen = device()
    print("\n".join(_machine(chosen)))
    print(
        ROW.format(
            *("op", "dtype", "rows", "near", "error"),
            *("first ms", "ms", "composed", ""),
        )
    )
    failures = 0
    for op, check in doctor_checks.CHECKS.items():
        for dtype in doctor_checks.DTYPES:
            failures += not _line(op, check, dtype, chosen, not args.no_speed)
    total = len(doctor_checks.CHECKS) * len(doctor_checks.DTYPES)
    print(f"{total - failures} of {total} right")
    return 1 if failures else 0


def device() -> mx.Device:
    """The one to check."""
    return mx.Device(mx.gpu if mx.is_available(mx.gpu) else mx.cpu)


def _machine(device: mx.Device) -> list[str]:
    info = mx.device_info(device)
    chip = info.get("device_name") or platform.processor() or platform.machine()
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else ""
    against = (
        "GPU against the CPU path"
        if device == mx.Device(mx.gpu)
        else "No GPU that MLX can use: the CPU path against NumPy"
    )
    return [
        "mlx-mtp doctor",
        f"mlx-mtp {__version__}, mlx {mx.__version__}, "
        f"Python {platform.python_version()}",
        f"{system or platform.platform()}, {platform.machine()}, {chip}",
        f"{against}. near: a decision within 1e-5 of a tie. composed: MLX's own ops.",
    ]


def _line(op, check, dtype, device, timed) -> bool:
    """Prints what was found for one op and dtype. Returns whether it is right."""
    tally = doctor_checks.Tally(device)
    speed = ("-", "-", "-")
    try:
        check(tally, dtype)
        if timed:
            speed = [f"{x * 1e3:.3g}" for x in doctor_speed.times(op, dtype, device)]
    except (RuntimeError, ValueError) as error:
        tally.mismatches.append(" ".join(str(error).split()))
    verdict = "WRONG: " + tally.mismatches[0] if tally.mismatches else "ok"
    name = str(dtype).removeprefix("mlx.core.")
    print(
        ROW.format(
            op, name, tally.rows, tally.near, f"{tally.error:.1e}", *speed, verdict
        ),
        flush=True,
    )
    return not tally.mismatches
