"""Show versions, machine, BLAS, and what a model folder offers."""

from __future__ import annotations

import argparse
import json
import platform
from functools import partial
from importlib.metadata import version

import mlx.core as mx
from mlx_lm.utils import get_total_parameters

from .. import __version__, blas, memory, tuning
from ..context import bucket
from ..drafters import MTPHeadDrafter
from ..generation import DEFAULT_DEPTH
from ..loading import inspect_model, load
from ..targets import as_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="Folder or Hub id.")
    parser.add_argument("--json", action="store_true", help="One JSON object.")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="What decoding takes, and what this machine is good for.",
    )
    parser.add_argument(
        "--context", type=int, default=4096, help="Tokens to plan memory for."
    )
    parser.add_argument(
        "--budget-gb", type=float, help="In place of what the machine has."
    )


def run(args: argparse.Namespace) -> int:
    report = {**environment(), "model": inspect_model(args.model)}
    if args.memory:
        report |= _memory(args)
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


def _memory(args: argparse.Namespace) -> dict[str, dict]:
    """The plan for one stream of the model, and recommendations."""
    size = None if args.budget_gb is None else int(args.budget_gb * 1e9)
    policy = memory.MemoryPolicy(size, "shrink", args.context)
    model, _ = load(args.model, lazy=True)
    depth, plan = _plan(model, policy, args.model)
    dtype = memory.best_dtype()
    parts = {**vars(plan), "total": plan.total}
    return {
        "memory": {
            "budget_gb": round(policy.limit / 1e9, 3),
            "context": args.context,
            **{f"{name}_gb": round(size / 1e9, 3) for name, size in parts.items()},
            "fits": plan.total <= policy.limit,
        },
        "recommended": {
            "depth": depth,
            "bits": memory.best_bits(get_total_parameters(model), policy.limit),
            "dtype": str(dtype).removeprefix("mlx.core."),
            "resident_models": policy.limit // plan.total,
            "largest_model": {
                "4 bits": memory.largest_model(4, policy.limit),
                "8 bits": memory.largest_model(8, policy.limit),
                "unquantised": memory.largest_model(8 * dtype.size, policy.limit),
            },
        },
    }


def _plan(model, policy, name: str) -> tuple[int, memory.MemoryPlan]:
    """The depth to use, the tuned one if it fits, and what a stream then takes."""
    target, head = as_target(model), model.mtp_head
    drafter = head and MTPHeadDrafter(head.head, target)
    footprint = memory.Footprint(target, drafter)
    plan = partial(footprint.plan, bucket(policy.context), prompt=policy.context)
    depth = 0
    if drafter:
        profile = tuning.load_profile(tuning.profile_path(name, "mtp"))
        depth = profile[0] if profile else DEFAULT_DEPTH
    depth, _ = policy.choose(plan, depth, f"{policy.context} tokens")
    return depth, plan(depth)


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
        "memory_gb": round(memory.system_memory() / 1e9, 1),
        "blas": blas.blas_name(),
    }
