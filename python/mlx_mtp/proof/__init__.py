"""Proof, on a user's model and machine, that speculation changes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from . import statistics
from .checks import (
    ALPHA,
    Result,
    Size,
    Subject,
    Track,
    acceptance,
    control,
    enumerated,
    greedy,
    same_tokens,
    sampled,
    widths,
)

CHECKS = (greedy, widths, sampled, enumerated, acceptance, control)
__all__ = [
    "ALPHA",
    "CHECKS",
    "Report",
    "Result",
    "Size",
    "Subject",
    "same_tokens",
    "verify",
]


@dataclass(frozen=True)
class Report:
    """The results of all checks.

    Args:
        results (list[Result]): One a check.
        adjusted (dict[str, float]): Holm's p-value of every test.
    """

    results: list[Result]
    adjusted: dict[str, float]

    @property
    def differs(self) -> bool:
        return not all(result.ok for result in self.results if not result.control)

    @property
    def power(self) -> bool:
        """Whether a planted fault was found; if not, nothing is proved."""
        return all(result.ok for result in self.results if result.control)

    @property
    def ok(self) -> bool:
        return self.power and not self.differs

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "ok": self.ok,
            "differs": self.differs,
            "power": self.power,
            "alpha": ALPHA,
            "results": [asdict(result) for result in self.results],
            "adjusted": self.adjusted,
        }


def verify(
    subject: Subject,
    size: Size | None = None,
    track: Track = lambda jobs, label: jobs,
) -> Report:
    """Runs every check.

    A result with p-values fails when one of them is below ``ALPHA`` after Holm's
    correction over all of them, so a right build fails one run in a thousand.

    Args:
        subject: What is proved.
        size (Size, optional): How much is computed.
        track (callable, optional): ``track(jobs, label)`` iterates over ``jobs`` and
            may show how far it is.
    """
    size = size or Size()
    results = [result for check in CHECKS for result in check(subject, size, track)]
    names, p_values = [], []
    for result in results:
        names += [(result, f"{result.name}: {test}") for test in result.p_values]
        p_values += result.p_values.values()
    adjusted = {}
    for (result, name), p in zip(names, statistics.holm(p_values), strict=True):
        adjusted[name] = p
        if p < ALPHA:
            result.ok = False
    return Report(results, adjusted)
