"""Show versions, machine, BLAS, and what a model folder offers."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import version

import mlx.core as mx

from .. import __version__, blas
from ..loading import inspect_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="Folder or Hub id.")
    parser.add_argument("--json", action="store_true", help="One JSON object.")


def run(args: argparse.Namespace) -> int:
    report = {**environment(), "model": inspect_model(args.model)}
    if args.json:
        print(json.dumps(report))
        return 0
    for title, values in report.items():
        print(title)
        for name, value in values.items():
            print(f"  {name}: {value}")
    if report["machine"]["blas"] == "reference":
        print(blas.HINT)
    return 0


def environment() -> dict[str, dict]:
    """Versions and machine."""
    return {"versions": _versions(), "machine": _machine()}


def _versions() -> dict[str, str]:
    names = ("mlx", "mlx-lm", "numpy")
    return {
        "mlx-mtp": __version__,
        **{name: version(name) for name in names},
        "python": platform.python_version(),
    }


def _machine() -> dict[str, object]:
    device = mx.default_device()
    details = mx.device_info(device)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type.name,
        "chip": details.get("device_name") or platform.processor() or "unknown",
        "memory_gb": _gigabytes(details),
        "blas": blas.blas_name(),
    }


def _gigabytes(details: dict) -> float:
    size = details.get("memory_size") or details.get("total_memory")
    if not size:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(size / 1e9, 1)
