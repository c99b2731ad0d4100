"""What the benchmarks share: BLAS first, a header, alternating arms, JSON.

Import this before MLX: ``start`` chooses the BLAS.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

from mlx_mtp import blas

PACKAGES = ("mlx-mtp", "mlx", "mlx-lm", "numpy", "mtplx")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    p = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    p.add_argument("--quick", action="store_true", help="less of all, under 60 s")
    p.add_argument(
        "--blas",
        choices=("openblas", "wheel"),
        default="openblas",
        help="on Linux: the system's OpenBLAS, or what MLX's wheel brings",
    )
    p.add_argument("--device", choices=("cpu", "gpu"), help="MLX's choice if not given")
    p.add_argument("--threads", type=int, default=1, help="threads of OpenBLAS")
    return p


def start(args: argparse.Namespace) -> dict:
    """Loads the BLAS and gives the header of the results."""
    if args.blas == "openblas":
        blas.load_openblas(args.threads)
    import mlx.core as mx

    if args.device:
        mx.set_default_device(mx.Device(getattr(mx, args.device)))
    return {
        "versions": {n: v for n in PACKAGES if (v := _version(n)) is not None},
        "python": platform.python_version(),
        "machine": _machine(),
        "commit": _commit(),
        "backend": mx.default_device().type.name,
        "blas": blas.blas_name(),
        "blas_threads": args.threads,
        "quick": args.quick,
    }


def show_header(header: dict) -> None:
    machine = header["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in header["versions"].items())
    print(f"{versions}; commit {header['commit']}")
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"{header['backend']}, {header['blas']}, {header['blas_threads']} thread"
    )


def alternate(
    arms: dict[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = perf_counter,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Seconds of every call. The arms take turns of so many calls, in reverse order
    every other time.

    An arm has to evaluate what it computes. ``clock=time.thread_time`` counts the
    calling thread's own work only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(repeats):
        names = list(arms) if i % 2 == 0 else list(arms)[::-1]
        for name in [n for n in names for _ in range(calls)]:
            begin = clock()
            result = arms[name]()
            seconds[name].append(clock() - begin)
            del result  # freeing it is not counted
    return seconds


def median(values) -> float:
    return statistics.median(values)


def spread(values) -> float:
    """The interquartile range over the median: 0.1 is +-5 % for the middle half."""
    return iqr(values) / statistics.median(values)


def iqr(values) -> float:
    """How far the middle half of the values reaches."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def write(path: Path | None, header: dict, rows: list[dict]) -> None:
    """The results as JSON. ``None`` writes nothing."""
    write_json(path, {"header": header, "rows": rows})


def write_json(path: Path | None, results: dict) -> None:
    """``results`` with numbers of 4 digits. ``None`` writes nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(results), indent=1) + "\n")


def _rounded(x):
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_rounded(value) for value in x]
    return x


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine() -> dict:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cores": os.cpu_count(),
    }


def _commit() -> str | None:
    """The short commit of this checkout, with ``+`` when files differ from it."""
    folder = Path(__file__).parent

    def git(*command):
        return subprocess.run(
            ("git", *command), cwd=folder, capture_output=True, text=True, check=False
        ).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    paths = ("--", "..", ":!results")
    changed = git("status", "--porcelain", "--untracked-files=no", *paths)
    return (commit + ("+" if changed else "")) or None
