"""Counters of one speculative stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Telemetry:
    """What a stream did. Counters only grow.

    Args:
        rounds (int): Draft-verify-accept rounds read by the host.
        drafted (int): Tokens proposed by the drafter.
        accepted (int): Proposed tokens that the target accepted.
        emitted (int): Tokens handed to the caller. Those of a round behind a stop
            are not.
        round_tokens (int): Emitted tokens that rounds gave: all but the one behind
            the prompt and forced ones.
        target_calls (int): Forwards of the target after the prompt, one of a round
            that was submitted and not read included.
        draft_calls (int): Forwards of the drafter in these.
        reached_at, accepted_at (list[int]): By position in the block: rounds whose
            drafts before it were all accepted, and those that accepted it too.
        depths (dict[int, int]): Rounds by depth; 0 is tokens of plain decoding.
        seconds (dict[str, float]): Host wall time by phase: ``prefill``; ``build``
            (graph of the next round); ``submit`` (its hand-over, which waits on a
            CPU); ``wait`` (for the round being read); ``shape`` (host-side processors
            and samplers); ``mask`` (of a grammar, with the wait for the drafts);
            ``close``.
        step_downs (int): How often the stream went on without drafts for a while.
        fallback (str | None): Why the stream did not speculate, or not in one
            compiled round; of step downs the newest reason.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    round_tokens: int = 0
    target_calls: int = 0
    draft_calls: int = 0
    step_downs: int = 0
    reached_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fallback: str | None = None

    @property
    def rejected(self) -> int:
        """drafted - accepted: the rejected drafts and those behind them."""
        return self.drafted - self.accepted

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """round_tokens / rounds."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """accepted_at / reached_at for each position."""
        return [a / r for a, r in zip(self.accepted_at, self.reached_at, strict=True)]

    def count_round(self, drafted: int, accepted: int) -> None:
        """Counts one round of ``drafted`` proposals that was read."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        reached = min(drafted, accepted + 1)
        for counts, n in ((self.reached_at, reached), (self.accepted_at, accepted)):
            counts.extend([0] * (reached - len(counts)))
            for i in range(n):
                counts[i] += 1

    def count_depth(self, depth: int) -> None:
        """Counts one round of this depth, or one token of plain decoding."""
        self.depths[depth] = self.depths.get(depth, 0) + 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall time of a block to ``seconds[name]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed

    def to_dict(self) -> dict:
        """Counters and rates as plain values for JSON."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "emitted": self.emitted,
            "round_tokens": self.round_tokens,
            "target_calls": self.target_calls,
            "draft_calls": self.draft_calls,
            "step_downs": self.step_downs,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_by_position": self.acceptance_by_position,
            "reached_at": list(self.reached_at),
            "accepted_at": list(self.accepted_at),
            "depths": dict(sorted(self.depths.items())),
            "seconds": dict(self.seconds),
            "fallback": self.fallback,
        }
