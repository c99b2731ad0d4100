"""How many drafts the next round should have, from what earlier rounds gave and cost.

A round of depth K emits ``1 + a1 + a1 a2 + ...`` tokens, with ``ai`` the acceptance
at position i, and takes ``c(K)`` seconds; depth 0 is plain decoding. The policy goes
to the depth with the most tokens a second. It reads nothing of a round that has not
ended, so the tokens keep their distribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from operator import mul
from statistics import fmean
from typing import Protocol

KEPT = 16  # newest measurements of a cost
FEW = 4  # from as many on they tell a change; a known cost counts as so many
STALE = 400  # rounds after which a cost may have changed
FORGET = 0.97  # a round's weight against the next one's
ANOTHER_TEXT, LONG_AGO = 0.9, 0.3  # what the weight of earlier rounds shrinks to
NEAR = 32  # tokens of a stream, from which on its end is far away
PRIOR = (0.8, 2.0)  # acceptance before anything is known, and its weight in rounds
START = 3  # the first depth, when no cost is known
GAIN = 1.05  # another depth has to be this much better
PATIENCE = 3  # rounds in a row
SETTLE = 2  # rounds of a new depth that do not count: they compile
PROBE = 4  # rounds with drafts that interrupt plain decoding
WAIT, MAX_WAIT = 48, 512  # plain tokens in front of such a probe
TRIAL = 3  # rounds of a batch that tell of a depth, though the first one compiles
LOST = 0.1  # rounds that a batch may lose at a depth before it goes to a better one
IDLE = 1  # rounds that a slot of a batch is empty between two streams
HOPE = 1.2  # plain rounds are off the line by up to so much: the first draft costs more
WEIGHTS = 16  # a guess: to read the weights takes as long as so many rows


class Pace(Protocol):
    """Says how many drafts the next round of a stream has.

    Attributes:
        depth: That number; 0 is plain decoding.
        max_depth: The largest it may be.
    """

    depth: int
    max_depth: int

    def add(self, accepted: int, emitted: int, seconds: float) -> None:
        """Takes a round of ``depth`` drafts, or a token of plain decoding.

        Args:
            accepted: Its drafts that were accepted and emitted.
            emitted: Its tokens: one more, but where the round was cut short.
            seconds: What it took.
        """

    def end(self, tokens: int) -> None:
        """The stream ends with so many tokens behind its first."""

    def limit(self, depth: int) -> None:
        """Goes no deeper than this from now on."""


class FixedDepth:
    """The same depth for every round."""

    def __init__(self, depth: int):
        self.depth = self.max_depth = depth

    def add(self, accepted: int, emitted: int, seconds: float) -> None:
        """Changes nothing."""

    def end(self, tokens: int) -> None:
        """Changes nothing."""

    def limit(self, depth: int) -> None:
        """Goes no deeper than this from now on."""
        self.depth = self.max_depth = min(self.depth, depth)


class Costs:
    """Seconds of a round by depth: the lower quartile of the newest, as what disturbs a
    round makes it slower; a line through other depths where there is none.

    When a depth becomes slower or faster, the others are taken to do so as well. One
    that was not used for long is at most what that line says, so that it is tried again
    should its measurement have been a bad one.

    Args:
        known (dict, optional): Seconds by depth, as ``mlx-mtp tune`` measured them.
        guess (callable, optional): ``guess(depth)``, where less than two are known.
    """

    def __init__(
        self,
        known: Mapping[int, float] | None = None,
        guess: Callable[[int], float] | None = None,
    ):
        self._guess = guess
        self._seconds: dict[int, deque[float]] = {}
        self._age: dict[int, int] = {}  # of the newest, in rounds of other depths
        for depth, seconds in (known or {}).items():
            if depth < 0 or not 0 < seconds < inf:
                raise ValueError(
                    "costs must be positive seconds by depth but "
                    f"{depth} has {seconds}."
                )
            self._seconds[int(depth)] = deque([seconds] * FEW, KEPT)
            self._age[int(depth)] = 0

    def add(self, depth: int, seconds: float) -> None:
        if not self._fresh(depth):
            self._seconds[depth] = deque(maxlen=KEPT)
        values = self._seconds[depth]
        before = self.measured(depth) if len(values) >= FEW else None
        values.append(seconds)
        self._age[depth] = 0
        change = 1.0 if before is None else self.measured(depth) / before
        for other in self._seconds.keys() - {depth}:
            self._age[other] += 1
            if change != 1.0:
                scaled = (change * x for x in self._seconds[other])
                self._seconds[other] = deque(scaled, KEPT)

    def __contains__(self, depth: int) -> bool:
        return depth in self._seconds

    def __iter__(self) -> Iterator[int]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __call__(self, depth: int) -> float:
        # Plain decoding is off the line, and a probe of it is long.
        if self._fresh(depth) or (depth == 0 and depth in self):
            return self.measured(depth)
        line = self._line(depth)
        return min(line, self.measured(depth)) if depth in self else line

    def _fresh(self, depth: int) -> bool:
        return self._age.get(depth, STALE) < STALE

    def _line(self, depth: int) -> float:
        """Through the two measured depths that are nearest, plain decoding last."""
        known = sorted(set(self._seconds) - {depth})
        near = sorted(known, key=lambda d: (d == 0, abs(d - depth)))[:2]
        values = [self.measured(d) for d in near]
        if not near:
            return 1.0 if self._guess is None else self._guess(depth)
        if len(near) == 1 and self._guess is not None:
            return values[0] * self._guess(depth) / self._guess(near[0])
        if len(near) == 1:
            return values[0] * (1 + 0.1 * (depth - near[0]) / (1 + near[0]))
        slope = max((values[1] - values[0]) / (near[1] - near[0]), 0.0)
        return max(values[0] + slope * (depth - near[0]), 1e-9)

    def measured(self, depth: int) -> float:
        """The lower quartile."""
        values = sorted(self._seconds[depth])
        return values[(len(values) - 1) // 4]


class Acceptance:
    """Acceptance by position, the newest rounds first, and how long streams are.

    Args:
        idle (int): Rounds between two streams, ``IDLE`` for batches.
    """

    def __init__(self, idle: int = 0):
        self._idle = idle
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._lengths: deque[int] = deque(maxlen=KEPT)  # of the newest streams
        self._sums: list[float] = []  # tokens of a round by depth
        self._shares: dict[int, float] = {}

    def add(
        self, depth: int, accepted: int, emitted: int | None = None, share: float = 1.0
    ) -> None:
        """Takes a round, or that of a row that is this share of one.

        A slot without a draft counts as one that was rejected. A round tells nothing of
        slots behind the end of a stream, and makes none older that it does not have.
        """
        reached = accepted + 1 if emitted is None else emitted
        for counts, n in ((self._reached, reached), (self._accepted, accepted)):
            counts.extend([0.0] * (depth - len(counts)))
            for i in range(depth):
                counts[i] = FORGET**share * counts[i] + (i < n)
        self._sums = []

    def end(self, tokens: int) -> None:
        """Takes the tokens of a stream but its first, which needs no round."""
        if tokens > 0:
            self._lengths.append(tokens)
            self._shares = {}

    def fade(self, share: float) -> None:
        """Makes what is known count less."""
        self._reached = [share * x for x in self._reached]
        self._accepted = [share * x for x in self._accepted]
        self._sums = []

    def rates(self, depth: int) -> list[float]:
        """By position, of drafts whose predecessors were accepted; the prior is the
        position in front."""
        (rate, weight), rates = PRIOR, []
        spare = [0.0] * max(depth - len(self._reached), 0)
        counts = zip(self._reached + spare, self._accepted + spare, strict=True)
        for reached, accepted in counts:
            rate = (accepted + weight * rate) / (reached + weight)
            rates.append(rate)
        return rates[:depth]

    def tokens(self, depth: int) -> float:
        """Expected tokens of a round; those behind the end of a stream do not count."""
        if len(self._sums) <= depth:
            chain = accumulate(self.rates(depth + KEPT), mul, initial=1.0)
            self._sums = list(accumulate(chain))
        if depth not in self._shares:
            self._shares[depth] = self._share(depth)
        return self._shares[depth] * self._sums[depth]

    def _share(self, depth: int) -> float:
        """Of a round's tokens, those that are not behind the end of a stream: one of n
        tokens takes a whole number of rounds."""
        if not self._lengths:
            return 1.0
        chain = [*accumulate(self.rates(depth), mul, initial=1.0), 0.0]
        emits = [a - b for a, b in pairwise(chain)]  # 1, 2, ... tokens
        rounds = [0.0]  # expected for 0, 1, ... tokens
        for n in range(min(max(self._lengths), NEAR)):
            rounds.append(1 + sum(map(mul, emits, rounds[n::-1])))
        full = self._sums[depth]
        spent = (rounds[min(n, NEAR)] + max(n - NEAR, 0) / full for n in self._lengths)
        idle = self._idle * len(self._lengths)
        return sum(self._lengths) / (sum(spent) + idle) / full


class AdaptiveDepth:
    """The depth of the rounds of one stream.

    Args:
        costs (Costs): Of the model and machine; shared by streams, and kept up to date.
        max_depth (int): The deepest it may choose.
        min_depth (int): 1 if the stream cannot be decoded plainly.
        acceptance (Acceptance, optional): Of earlier streams; kept up to date.

    ``depth`` is what the next round should have. Call ``add`` after every round.
    """

    def __init__(
        self,
        costs: Costs,
        max_depth: int,
        min_depth: int = 0,
        acceptance: Acceptance | None = None,
    ):
        self.costs, self.acceptance = costs, acceptance or Acceptance()
        self.acceptance.fade(ANOTHER_TEXT)
        self.max_depth, self.min_depth = max_depth, min_depth
        self.depth = self._first()
        self._rounds = self._better = 0  # at this depth; of those in favour of another
        self._known = self.depth in costs  # whether its cost was
        self._wait = WAIT

    def add(self, accepted: int, emitted: int, seconds: float) -> None:
        """Takes one round, see ``Pace``."""
        self._rounds += 1
        if self.depth:
            self.acceptance.add(self.depth, accepted, emitted)
        if self._rounds > SETTLE:
            self.costs.add(self.depth, seconds)
        self._choose()

    def end(self, tokens: int) -> None:
        """The stream ends with so many tokens behind its first."""
        self.acceptance.end(tokens)

    def limit(self, depth: int) -> None:
        """Goes no deeper than this from now on."""
        self.max_depth = min(self.max_depth, depth)
        self.min_depth = min(self.min_depth, depth)
        if self.depth > depth:
            self._move(depth)

    def _choose(self) -> None:
        if self.depth == 0:
            if not self._measured:
                if self._rounds >= SETTLE + PROBE:
                    self._move(min(START, self.max_depth))
            elif self._rounds >= self._wait:
                self.acceptance.fade(LONG_AGO)
                self._move(self._best(first=1))
            return
        best = self._best()
        if self._rounds < (PATIENCE if self._known else SETTLE + PROBE):
            return
        gain = self._rate(best) / self._rate(self.depth)
        self._better = self._better + 1 if gain > GAIN else 0
        if self._better >= PATIENCE:
            if best == 0:
                self._wait = min(2 * self._wait, MAX_WAIT)
            self._move(best)
        elif self._rounds > 4 * PROBE:
            self._wait = WAIT  # drafts pay here

    def _first(self) -> int:
        # The cost of plain decoding comes first: everything is compared with it.
        return self.min_depth if self.min_depth not in self.costs else self._best()

    @property
    def _measured(self) -> bool:
        """Whether a round with drafts was ever measured."""
        return any(depth in self.costs for depth in range(1, self.max_depth + 1))

    def _best(self, first: int | None = None) -> int:
        first = self.min_depth if first is None else first
        return max(range(first, self.max_depth + 1), key=self._rate)

    def _rate(self, depth: int) -> float:
        return self.acceptance.tokens(depth) / self.costs(depth)

    def _move(self, depth: int) -> None:
        self.depth, self._rounds, self._better = depth, 0, 0
        self._known = depth in self.costs


class BatchCosts:
    """``Costs`` by the number of slots of a batch. What was not measured with one is
    guessed from the others, by a line over the rows that a round verifies.

    Args:
        known (dict, optional): Seconds by depth of rounds with one slot.
    """

    def __init__(self, known: Mapping[int, float] | None = None):
        self._by_slots = {1: Costs(known, partial(self._guess, 1))}

    def __getitem__(self, slots: int) -> Costs:
        if slots not in self._by_slots:
            self._by_slots[slots] = Costs(guess=partial(self._guess, slots))
        return self._by_slots[slots]

    def _guess(self, slots: int, depth: int) -> float:
        """Seconds, or in a unit of its own if nothing was measured."""
        points = [
            (n * (known + 1), costs.measured(known))
            for n, costs in self._by_slots.items()
            for known in costs
        ]
        rows = slots * (depth + 1)
        if len({x for x, _ in points}) < 2:
            x, y = points[0] if points else (slots, 1.0)
            return y * (WEIGHTS + rows) / (WEIGHTS + x)
        x, y = (fmean(values) for values in zip(*points, strict=True))
        slope = sum((a - x) * (b - y) for a, b in points)
        slope /= sum((a - x) ** 2 for a, _ in points)
        return y + min(max(slope, 0.0), y / x) * (rows - x)


class BatchDepth(AdaptiveDepth):
    """The depth of the rounds of a batch, with costs for each number of its slots.

    The more rows, the less of a round is reading weights, and the dearer are drafts
    that are rejected: a wide batch may be fastest without any. It begins with the depth
    that is best by what is known of other batches, and tries one that may be better for
    a few rounds.

    Args:
        costs (BatchCosts): Kept up to date.
        max_depth (int): The deepest it may choose.
        acceptance (Acceptance, optional): Of earlier batches; kept up to date.
    """

    def __init__(
        self,
        costs: BatchCosts,
        max_depth: int,
        acceptance: Acceptance | None = None,
    ):
        self._by_slots, self._slots = costs, 1
        super().__init__(costs[1], max_depth, 0, acceptance or Acceptance(IDLE))

    def set_slots(self, slots: int) -> None:
        """The next round has so many."""
        if slots != self._slots:
            self._slots, self.costs = slots, self._by_slots[slots]
            self._move(self._first())

    def add_rows(self, accepted: Sequence[int], seconds: float) -> None:
        """Takes one round of a batch: what each of its rows accepted."""
        self._rounds += 1
        if self.depth:
            for count in accepted:
                self.acceptance.add(self.depth, count, share=1 / len(accepted))
        self.costs.add(self.depth, seconds)
        self._choose()

    def _first(self) -> int:
        """The best by guesses, which may be far off for deep rounds."""
        best = self._best()
        return best if len(self.costs) > 1 else min(best, START)

    def _rate(self, depth: int) -> float:
        rate = super()._rate(depth)
        return rate if depth or 0 in self.costs else HOPE * rate

    def _choose(self) -> None:
        if self._rounds < TRIAL:
            return
        if len(self.costs) < 2 and self.max_depth:
            # Two make a line for all others.
            others = set(range(self.max_depth + 1)) - {self.depth}
            self._move(max(others, key=self._rate))
            return
        if self.depth == 0 and self._rounds % self._wait == 0:
            self.acceptance.fade(LONG_AGO)  # the texts may be others now
            self._wait = min(2 * self._wait, MAX_WAIT)
        best = self._best()
        gain = self._rate(best) / self._rate(self.depth)
        self._better = self._better + gain - 1 if best != self.depth else 0
        if self._better > LOST:
            self._move(best)
        elif self.depth and self._rounds > 4 * PROBE:
            self._wait = WAIT
