"""What ``mlx-mtp tune`` concludes from its measurements, and the profile it keeps."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import blas
from .loading import find_model

RESAMPLES = 2000
DRIFT = 0.1  # of plain decoding between the first third and the last
FOLDER = Path("~/.cache/mlx-mtp/profiles").expanduser()


@dataclass(frozen=True)
class Measurement:
    """One decoded stream. Arms of one ``turn`` of a ``case`` ran close together.

    Args:
        depth (int): 0 is plain ``mlx_lm``.
        case (str): Prompt and temperature.
        turn (int): The how-manieth time.
        tps (float): Tokens by the seconds from the request to the last of them.
        tokens_per_round, acceptance (float): As in ``Telemetry``.
        round_seconds (float, optional): Seconds of a round; None without any.
    """

    depth: int
    case: str
    turn: int
    tps: float
    tokens_per_round: float = 1.0
    acceptance: float = 0.0
    round_seconds: float | None = None


@dataclass(frozen=True)
class Arm:
    """One depth against plain decoding.

    ``ratio`` is the geometric mean over pairs of the same case and turn, ``low`` and
    ``high`` its 95 % interval by bootstrap over these pairs. ``refused`` says why the
    depth is not to be used.
    """

    depth: int
    tps: float
    ratio: float
    low: float
    high: float
    tokens_per_round: float
    acceptance: float
    refused: str | None


@dataclass(frozen=True)
class Verdict:
    """``depth`` is the one to use, 0 for plain decoding; ``costs`` seconds a round."""

    depth: int
    plain_tps: float
    arms: list[Arm]
    costs: dict[int, float]
    warnings: list[str] = field(default_factory=list)


def judge(measurements: Sequence[Measurement]) -> Verdict:
    """The depth that pays most, if one certainly pays.

    A depth is refused unless the whole interval of its ratio is above 1, when none of
    its drafts was accepted, and when it claims to be faster than its tokens a round
    allow: then something else on the machine disturbed the measurement.

    Raises:
        ValueError: A depth has no stream of plain decoding beside it, or no answer is
            longer than one token, so that nothing could be drafted.
    """
    plain = {(m.case, m.turn): m.tps for m in measurements if m.depth == 0}
    costs = _costs(measurements)
    if not plain or not costs:
        missing = "more than one token" if plain else "plain decoding (depth 0)"
        raise ValueError(
            f"[judge] measurements must have answers of {missing} but have none. "
            "Measure it beside every depth, on prompts with longer answers."
        )
    depths = sorted({m.depth for m in measurements} - {0})
    by_depth = {d: [m for m in measurements if m.depth == d] for d in depths}
    arms = [_arm(depth, by_depth[depth], plain) for depth in depths]
    paying = [arm for arm in arms if arm.refused is None]
    best = max(paying, key=lambda arm: arm.ratio).depth if paying else 0
    warnings = _drift(measurements)
    if best and best == depths[-1] and len(depths) > 1:
        warnings.append(f"Depth {best} is the deepest that was tried; try deeper ones.")
    return Verdict(best, statistics.median(plain.values()), arms, costs, warnings)


def _arm(depth, runs, plain) -> Arm:
    pairs = [m for m in runs if (m.case, m.turn) in plain]
    if not pairs:
        raise ValueError(
            f"[judge] depth {depth} must have streams of the same case and turn as "
            "plain decoding but has none."
        )
    ratio, low, high = paired_ratio([(m.tps, plain[m.case, m.turn]) for m in pairs])
    drafted = [m for m in runs if m.round_seconds is not None]
    per_round = statistics.mean([m.tokens_per_round for m in drafted] or [1.0])
    acceptance = statistics.mean([m.acceptance for m in drafted] or [0.0])
    refused = None
    if acceptance == 0:
        refused = "no draft was accepted"
    elif low <= 1:
        refused = "not certainly faster than plain decoding"
    elif low > per_round:
        refused = "faster than its tokens a round allow: the measurement is disturbed"
    return Arm(
        depth,
        statistics.median(m.tps for m in runs),
        ratio,
        low,
        high,
        per_round,
        acceptance,
        refused,
    )


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The geometric mean of a / b over pairs, and its 95 % interval by bootstrap."""
    logs = np.log([a / b for a, b in pairs])
    means = np.random.default_rng(0).choice(logs, (RESAMPLES, logs.size)).mean(axis=1)
    ratio, low, high = np.exp([logs.mean(), *np.quantile(means, [0.025, 0.975])])
    return float(ratio), float(low), float(high)


def _costs(measurements) -> dict[int, float]:
    """The median seconds of a round by depth, where there was one."""
    found = defaultdict(list)
    for m in measurements:
        if m.round_seconds is not None:
            found[m.depth].append(m.round_seconds)
    return {depth: statistics.median(seconds) for depth, seconds in found.items()}


def _drift(measurements) -> list[str]:
    """A warning when plain decoding changes its speed over the turns, case by case."""
    by_case = defaultdict(list)
    for m in sorted(measurements, key=lambda m: m.turn):
        if m.depth == 0:
            by_case[m.case].append(m.tps)
    changes = []
    for tps in by_case.values():
        third = max(1, len(tps) // 3)
        first, last = statistics.median(tps[:third]), statistics.median(tps[-third:])
        changes.append(last / first - 1)
    change = statistics.median(changes)
    if abs(change) <= DRIFT:
        return []
    return [
        f"Plain decoding changed its speed by {change:+.0%} during the measurement: "
        "the machine heats up or does something else. Let it rest and measure again."
    ]


def profile_path(model: str, drafter: str) -> Path:
    """Where the profile of a model, drafter and machine is kept."""
    folder = find_model(model)
    digest = hashlib.sha256()
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    info = mx.device_info(mx.default_device())
    chip = info.get("device_name") or platform.processor() or platform.machine()
    digest.update(f"{drafter} {chip} {mx.__version__} {blas.blas_name()}".encode())
    return FOLDER / f"{digest.hexdigest()[:16]}.json"


def save_profile(path: Path, verdict: Verdict) -> None:
    """Keeps a verdict in place of an earlier one: also that no depth pays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    costs = {str(depth): seconds for depth, seconds in verdict.costs.items()}
    path.write_text(json.dumps({"depth": verdict.depth, "costs": costs}) + "\n")


def load_profile(path: Path) -> tuple[int, dict[int, float]] | None:
    """Depth and seconds a round by depth; None without a profile."""
    try:
        profile = json.loads(path.read_text())
        return int(profile["depth"]), {
            int(depth): float(seconds) for depth, seconds in profile["costs"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
