"""Arms in turns over prompts, and what their runs say."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..tuning import paired_ratio
from .arms import Arm, Run
from .energy import Joules

PLAIN = "mlx_lm"  # the arm that the others are compared with


@dataclass(frozen=True)
class Case:
    """The prompts of one set at one temperature."""

    prompt_set: str
    prompts: Sequence[list[int]]
    temperature: float


def measure(
    arms: Mapping[str, Arm],
    cases: Sequence[Case],
    *,
    max_tokens: int,
    repeats: int,
    rivals: Mapping[str, str] | None = None,
    track: Callable[[Sequence], Iterable] = iter,
) -> Iterator[dict]:
    """Yields a row for every case and arm.

    All arms decode a prompt before the next prompt comes, in turned order every other
    time; the first turn of a case warms up and does not count.

    Args:
        rivals: The arm that another one is compared with beside plain decoding.
    """
    joules = Joules()
    jobs = [(c, t, p) for c in cases for t in range(-1, repeats) for p in c.prompts]
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for i, (case, turn, prompt) in enumerate(track(jobs)):
        for name in list(arms) if turn % 2 else list(arms)[::-1]:
            before = joules.read()
            run = arms[name](prompt, case.temperature, max_tokens, turn + 1)
            run.joules = joules.since(before)
            if turn >= 0:
                runs[name].append(run)
        if i + 1 == len(jobs) or jobs[i + 1][0] is not case:
            yield from _rows(case, runs, rivals or {})
            runs = {name: [] for name in arms}


def _rows(case: Case, runs: Mapping[str, list[Run]], rivals) -> Iterator[dict]:
    for name, measured in runs.items():
        tps = [run.tps for run in measured]
        rival = rivals.get(name)
        yield {
            "prompt_set": case.prompt_set,
            "prompt_tokens": statistics.median(map(len, case.prompts)),
            "temperature": case.temperature,
            "arm": name,
            "streams": len(tps),
            "tps": statistics.median(tps),
            "spread": spread(tps),
            "ratio": _ratio(measured, runs[PLAIN]),
            "rival": rival,
            "ratio_to_rival": rival and _ratio(measured, runs[rival]),
            "cpu_s_a_token": statistics.median(
                run.cpu / run.tokens for run in measured
            ),
            "first_token_s": statistics.median(run.first for run in measured),
            "peak_gb": max(run.peak_bytes for run in measured) / 1e9,
            "joules_a_token": _joules(measured),
            **_speculation(measured),
        }


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, float]:
    pairs = [(a.tps, b.tps) for a, b in zip(runs, others, strict=True)]
    return dict(zip(("mean", "low", "high"), paired_ratio(pairs), strict=True))


def _joules(runs: Sequence[Run]) -> float | None:
    if any(run.joules is None for run in runs):
        return None
    return sum(run.joules for run in runs) / sum(run.tokens for run in runs)


def _speculation(runs: Sequence[Run]) -> dict:
    """Over all streams, each weighted by its rounds."""
    counts = [run.mtp for run in runs if run.mtp is not None and run.mtp.rounds]
    if not counts:
        return {"tokens_a_round": None, "acceptance": []}
    longest = max(len(x.reached_at) for x in counts)
    reached, accepted = (
        [sum(x[i] for x in lists if i < len(x)) for i in range(longest)]
        for lists in zip(*((x.reached_at, x.accepted_at) for x in counts), strict=True)
    )
    return {
        "tokens_a_round": sum(x.round_tokens for x in counts)
        / sum(x.rounds for x in counts),
        "acceptance": [a / r for a, r in zip(accepted, reached, strict=True)],
    }


def spread(values: Sequence[float]) -> float:
    """The interquartile range over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle
