"""One stream: prompt, rounds, stops, and caches handed back exact."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import mlx.core as mx

from .adaptive import Pace
from .drafters import Drafts
from .drafters.base import DrafterState
from .memory import Watch
from .round import Proposal, Round, RoundState, StepDown, drafting
from .shaping import (
    Controller,
    Decision,
    RowShaper,
    apply_mask,
    block_masks,
    check_forced,
    is_token,
)
from .state import cached_tokens, newest
from .targets import TargetOutput
from .targets.vision_prompt import PromptPart, VisionPrompt
from .telemetry import Telemetry

MIN_BUCKET = 256
MAX_RESERVED = 1024  # tokens of a stream that get their cache slots at the start
MIN_PAUSE, MAX_PAUSE = 16, 1024  # plain tokens behind a first and a repeated failure
MERGED = 256  # plain tokens that the drafter gets at once


class UnusableLogits(RuntimeError):
    """The model gave NaN, +inf or nothing to choose from. The cache is intact."""


@dataclass(frozen=True)
class Step:
    """One emitted token.

    Args:
        token (int): Its id.
        from_draft (bool): Whether the drafter proposed it.
        source (callable): Gives ``row``.
        forced (bool): Whether a controller forced it.
    """

    token: int
    from_draft: bool
    source: Callable[[], mx.array]
    forced: bool = False

    @cached_property
    def row(self) -> mx.array:
        """``(V,)``, the target's logits that it was taken from, after processors."""
        return self.source()

    @cached_property
    def logprobs(self) -> mx.array:
        """``(V,)``, the log-softmax of ``row``: before temperature and filters."""
        return self.row - mx.logsumexp(self.row)


@dataclass
class _Pending:
    """A round that is built, perhaps submitted, and not yet read.

    Without ``counts`` the host decides, or makes masks for it: ``proposal`` then has
    the drafts, and ``state`` is not committed yet. ``state`` is here until the round is
    submitted.
    """

    state: RoundState | None
    logits: mx.array
    counts: mx.array | None = None
    proposal: Proposal | None = None
    masks: mx.array | None = None  # (1, T, W), of the rows
    given: int = 0  # drafts that were forced, not proposed
    fed: int = 1  # rows in front of the drafts; 0 when they are in the caches


@dataclass
class _Block:
    """The tokens of one round, and how many of them the caller has taken."""

    length: int  # tokens in the caches in front of the round
    fed: int
    accepted: int
    tokens: list[int]
    row: Callable[[int], mx.array]
    given: int = 0
    seconds: float = 0.0
    due: int = 0  # tokens for the caller, up to where it is cut
    kept: int = 0

    @property
    def unfed(self) -> list[int]:
        """The taken token that no forward has seen, if there is one."""
        return self.tokens[-1:] if self.kept == self.accepted + 1 > 0 else []

    @property
    def cached(self) -> int:
        """How many of the taken tokens the round has put into the caches."""
        return self.kept - len(self.unfed)


@dataclass(frozen=True)
class Turn:
    """A stream at rest: what its drafter knows of the caches, which are given back.

    A stale one costs acceptance only: drafts never change the distribution.
    """

    length: int  # tokens in the caches
    tokens: mx.array  # (N,), the known ones of them, to the newest
    draft_state: DrafterState | None  # None: lost, or made from the tokens alone
    hidden: mx.array | None  # (1, 1, H), the row of the newest token


@dataclass(frozen=True)
class Quantisation:
    """Plain keys and values become quantised ones once ``start`` tokens are cached."""

    bits: int
    group_size: int
    start: int


# Caches of streams that are not closed.
_TAKEN: WeakSet[Any] = WeakSet()


def refuse_taken(caches: Sequence[Any]) -> None:
    """Raises ValueError if a stream that is not closed has any of ``caches``."""
    for i, cache in enumerate(caches):
        if cache in _TAKEN:
            raise ValueError(
                f"Prompt cache entry {i} belongs to a stream that is still open. "
                "Close that one first."
            )


def bucket(length: int) -> int:
    """The smallest of 256, 384, 512, 768, 1024, ... that holds ``length``."""
    size = MIN_BUCKET
    while size < length:
        size = size // 2 * 3 if size & (size - 1) == 0 else size // 3 * 4
    return size


class Stream:
    """The state and the loop of one stream.

    It is either running, with the caches taken apart in ``_state``, or at rest, with
    the caches whole and ``_turn`` beside them. ``_unfed`` then has the emitted tokens
    that are not in the caches yet. What keeps it from running, such as a drafter that
    fails, makes it decode plainly at rest for a while.
    """

    def __init__(
        self,
        find_round: Callable[[int, list[Any]], Round],
        pace: Pace,
        prompt: mx.array,
        images: VisionPrompt | None,
        caches: list[Any],
        shaper: RowShaper | None,
        controller: Controller | None,
        params: dict[str, mx.array],
        draft_params: dict[str, mx.array],
        turns: WeakKeyDictionary[Any, Turn] | None,
        *,
        max_tokens: int,
        stop_tokens: Collection[int],
        keys: mx.array,
        prefill_step_size: int,
        progress: Callable[[int, int], None] | None,
        quantisation: Quantisation | None = None,
        memory: Watch | None = None,
    ):
        mx.eval(prompt, keys)  # another thread may iterate
        self.telemetry = Telemetry()
        self._find_round, self._pace = find_round, pace
        self._round = find_round(max(pace.depth, 1), caches)
        self._target, self._drafter = self._round.target, self._round.drafter
        self._prompt, self._images, self._caches = prompt, images, caches
        self.prompt_left = prompt.size  # tokens that are not in the caches
        self._quantisation = quantisation
        self._shaper, self._controller = shaper, controller
        self._params, self._draft_params = params, draft_params
        self._turns = turns
        self._max_tokens = math.inf if max_tokens == -1 else max_tokens
        self._stop_tokens = frozenset(stop_tokens)
        self._keys = keys
        self._prefill_step_size = prefill_step_size
        self._progress = progress or (lambda done, total: None)
        self._traced = True
        self._masked = False  # whether the controller did when rounds began
        if shaper is not None and shaper.always:
            self.telemetry.fallback = "split round: processors or sampler on the host"

        self._memory, self._watched = memory, 0  # up to this capacity
        self._capacity = self._attended = 0
        self._most = math.inf  # tokens that need room at its limit
        self._turn: Turn | None = None  # at rest
        self._loose: list[tuple[mx.array, mx.array | None]] = []  # not in it yet
        self._plain_left, self._pause_for = 0, MIN_PAUSE  # tokens
        self._unfed: list[int] = []
        self._state: RoundState | None = None  # running: the newest state
        self._replayable: list | None = None  # leaves of the block behind it
        self._rows: mx.array | None = None  # the hidden rows of that block
        self._committed = False  # whether that state is, of the round in flight
        self._block: _Block | None = None
        self._length = 0  # tokens in the caches in front of the pending round
        self._tokens = prompt  # in the caches when the stream last began to run
        self._taken: list[int] = []  # since then
        self._last = -1  # the newest of all
        self._earlier = 0  # of those in the caches, tokens of earlier streams
        self._read_at = 0.0  # when the host last read the device

    def run(self) -> Iterator[Step | None]:
        """Its steps; None between two chunks of the prompt."""
        with self._owner():
            yield from self._decode()

    @contextmanager
    def _owner(self) -> Iterator[None]:
        """Keeps other streams off the caches."""
        plain = list(self._caches)  # quantised ones may take their places
        refuse_taken(plain)
        _TAKEN.update(plain)
        try:
            yield
        finally:
            _TAKEN.difference_update([*plain, *self._caches])

    def _decode(self) -> Iterator[Step | None]:
        try:
            logits = yield from self._prefill()
            while True:
                yield from self._force()
                if self._ended:
                    return
                if self._unfed:
                    logits = self._feed_unfed()
                pending = None
                if self._pace.depth and not self._plain_left:
                    self._round = self._find_round(self._pace.depth, self._caches)
                    pending = self._adopt(logits)
                if pending is None:
                    logits = yield from self._plain(logits)
                else:
                    found = yield from self._rounds(pending)
                    logits = logits if found is None else found
                if self._ended:
                    return
                if self._state is not None:
                    self._pause()
        finally:
            try:
                with self.telemetry.phase("close"):
                    self._close()
            except BaseException:
                self._close()  # a passing failure must not keep the caches
                raise
            self._pace.end(self.telemetry.emitted - 1)

    def _rounds(self, pending: _Pending) -> Generator[Step, None, mx.array | None]:
        """Emits rounds until the stream ends, its controller forces tokens, another
        depth is due, or no round can be made.

        Returns the logits behind the newest token, if it is in the caches.
        """
        while True:
            self._heed(self._length + 2 * self._round.width)
            if pending.counts is None and not self._host_decides:
                pending = self._mask(pending)
            # The next round is built while this one runs, and submitted once this
            # one is known not to be the last. The first token waits for neither.
            first = not pending.fed
            builds = self._builds_ahead and not first
            ahead = self._build(unread=True) if builds else None
            try:
                block = self._read(pending)
            except StepDown as error:
                return self._stepped_down(error, pending)
            logits = pending.logits
            try:
                last = self._cut(block)
                if block.fed and not block.given:
                    accepted = min(block.accepted, block.due)
                    self._pace.add(accepted, block.due, block.seconds)
                last = (
                    last
                    or self._length >= self._limit
                    or self._pace.depth != self._round.depth
                )
                if first:
                    mx.eval(self._state)  # the caller may go on in another thread
                    yield from self._emit(block)
                if not last:
                    given = self._given
                    if given:
                        ahead = None  # it drafts where nothing is left to choose
                    if ahead is None and not self._plain_left:
                        ahead = self._build(unread=False, given=given)
                    last = ahead is None or not self._submit(ahead)
                    pending = ahead
            except Exception:  # an error of what is behind the block
                yield from self._emit(block)
                raise
            del ahead
            yield from self._emit(block)
            if last:
                return self._row_behind(block, logits)

    def _stepped_down(self, error: StepDown, pending) -> mx.array | None:
        """Steps down; the logits behind the newest token, if a round has them."""
        self._step_down(error)
        flagged = self._block is not None and self._block.accepted < 0
        return pending.logits[:, :1] if flagged else None

    def _emit(self, block: _Block) -> Iterator[Step]:
        """The tokens of a block, up to its cut, that the caller has not taken yet."""
        for i in range(block.kept, block.due):
            forced = i < block.given
            drafted = i < block.accepted and not forced
            step = self._take(block.tokens[i], drafted, partial(block.row, i), forced)
            self.telemetry.round_tokens += block.fed and not forced
            block.kept = i + 1
            yield step

    def _row_behind(self, block: _Block, logits: mx.array) -> mx.array | None:
        """Cut in the middle, a block has the row behind its last token."""
        return None if block.unfed else logits[:, block.kept :][:, :1]

    def _plain(self, logits: mx.array) -> Generator[Step, None, mx.array]:
        """Decodes without drafts, one token ahead, until there are to be rounds.

        Returns the logits behind the newest token, which is in the caches.
        """
        self._masked = self._masks
        token, row = self._draw(logits)
        while True:
            self._heed(self._cached + self._round.width)
            marks = [a.mark_step(c) for a, c in self._parts]
            before = len(self._loose)
            try:
                logits = self._forward(token)
                in_step = self._masked or self._host_decides
                ahead = None if in_step else self._draw(logits)
                self._start(logits if ahead is None else ahead[0])
                with self.telemetry.phase("wait"):
                    value = token.item()
                if value < 0:
                    raise self._unusable(self._cached - 1)
                self._count_plain()
                if self._controller is not None:
                    self._controller.accept(value)
                step = self._take(value, False, row)
            except BaseException:
                del self._loose[before:]
                for (adapter, cache), mark in zip(self._parts, marks, strict=True):
                    adapter.rewind_step(cache, mark)
                raise
            yield step
            self._plain_left = max(self._plain_left - 1, 0)
            rounds = self._pace.depth and not self._plain_left
            if self._ended or rounds or (self._controller is not None and self._turned):
                self._merge()
                return logits
            if len(self._loose) >= MERGED:
                self._merge()
                mx.clear_cache()
            self._quantise()
            token, row = ahead or self._draw(logits)

    def _start(self, result: mx.array) -> None:
        """Starts a plain step, with all that the next one needs.

        What is left lazy belongs to this thread, and the caller may go on in another.
        """
        caches = [a.arrays(c) for a, c in self._parts]
        mx.async_eval(result, self._loose[-1], self._keys, caches)

    def _count_plain(self) -> None:
        seconds = self._since_read()
        self.telemetry.count_depth(0)
        if not self._pace.depth:
            self._pace.add(0, 1, seconds)

    def _since_read(self) -> float:
        """Seconds since the host read the device before."""
        before, self._read_at = self._read_at, time.perf_counter()
        return self._read_at - before

    def _force(self) -> Iterator[Step]:
        """Emits what the controller forces. It is fed afterwards, all at once."""
        vocab, due = self._target.vocab_size, self._due
        while due:
            token = check_forced(due[0], vocab)
            self._controller.accept(token)
            self._unfed.append(token)
            yield self._take(token, False, partial(_certain, token, vocab), True)
            if self._ended:
                return
            due = self._controller.forced()

    @property
    def _due(self) -> Sequence[int]:
        """The forced tokens that are worth a forward of their own."""
        if self._controller is None:
            return ()
        forced = self._controller.forced()
        if not self._masks:
            return forced
        # A short text is given to the rounds in place of drafts, which need not end;
        # but one that cannot be is an error behind its last good token.
        # Where the host decides, masks alone force it: a processor sees every row.
        vocab, most = self._target.vocab_size, 2 * self._own_width
        given = len(forced) <= most and all(is_token(x, vocab) for x in forced)
        return () if given or self._always else forced

    @property
    def _own_width(self) -> int:
        """Of its rounds; a batch's may be wider than a row's own."""
        return self._round.width

    @property
    def _given(self) -> list[int]:
        """The forced tokens that stand in the next block."""
        if "given" not in self._state:
            return []
        return self._forced(self._round.depth)

    def _forced(self, most: int) -> list[int]:
        """The next forced tokens, no more than ``most``."""
        vocab = self._target.vocab_size
        return [check_forced(x, vocab) for x in self._controller.forced()[:most]]

    def _take(
        self, token: int, from_draft: bool, row: Callable, forced: bool = False
    ) -> Step:
        self._taken.append(token)
        self.telemetry.emitted += 1
        self._last = token
        return Step(token, from_draft, row, forced)

    @property
    def stopped(self) -> bool:
        """Whether the newest token is one that it ends with."""
        return self.telemetry.emitted > 0 and self._last in self._stop_tokens

    @property
    def _ended(self) -> bool:
        return self.telemetry.emitted >= self._max_tokens or self.stopped

    def _cut(self, block: _Block) -> bool:
        """Cuts a block behind a stop or the limit, or in front of a forced token;
        whether one was met. What the controller has read is due, also if it fails."""
        controller = self._controller
        room = self._max_tokens - self.telemetry.emitted
        for token in block.tokens:
            if controller is not None:
                controller.accept(token)
            block.due += 1
            if token in self._stop_tokens or block.due >= room:
                return True
            if controller is not None and self._turned:
                return True
        return False

    @property
    def _turned(self) -> bool:
        """Whether the controller forces a token, or begins or ends to mask them."""
        return self._masks != self._masked or bool(self._due)

    @property
    def _host_decides(self) -> bool:
        """Whether the next block needs the host's processors, sampler or bias."""
        if self._shaper is None:
            return False
        return self._always or self._free < self._round.width

    @property
    def _host_has_part(self) -> bool:
        """Whether it decides, or makes masks for the next block."""
        return self._masked or self._host_decides

    @property
    def _always(self) -> bool:
        """Whether it needs the host's processors or sampler."""
        return self._shaper is not None and self._shaper.always

    @property
    def _masks(self) -> bool:
        """Whether the controller masks the next token."""
        return getattr(self._controller, "masks", False)

    @property
    def _builds_ahead(self) -> bool:
        # Where the host decides only near the horizon, neither round may reach it.
        near = self._shaper is not None and (
            self._always or self._free < 2 * self._round.width
        )
        more = self.telemetry.emitted + 1 < self._max_tokens
        same = self._pace.depth == self._round.depth
        return self._traced and more and same and not near

    @property
    def _cached(self) -> int:
        """Tokens in the caches at rest."""
        return self._turn.length + len(self._loose)

    @property
    def _parts(self):
        return list(zip(self._round.adapters, self._caches, strict=True))

    @property
    def _limit(self) -> float:
        """Cached tokens at which the caches that are apart have to be quantised."""
        if self._quantisation is None:
            return math.inf
        waits = any(hasattr(cache, "to_quantized") for cache in self._caches)
        return self._quantisation.start if waits else math.inf

    @property
    def _free(self) -> float:
        """How many of the next tokens are certainly the model's own choice."""
        return math.inf if self._controller is None else self._controller.horizon()

    # At rest

    def feed(self) -> None:
        """Feeds the prompt and emits nothing."""
        with self._owner():
            try:
                for _ in self._prefill(apart=0):
                    pass
            finally:
                self._close()

    def _prefill(self, apart: int = 1) -> Generator[None, None, mx.array | None]:
        """Feeds the prompt, its last token on its own; the logits of the last row.

        Yields between two chunks.
        """
        with self.telemetry.phase("prefill"):
            total = self._prompt.size
            self._turn = self._begin(total)
            self._earlier = self._turn.tokens.size
            self._progress(0, total)
        done, logits = 0, None
        while total - done > apart:
            count = min(self._prefill_step_size, total - done - apart)
            with self.telemetry.phase("prefill"):
                logits = self._feed(*self._piece(done, done + count))
                mx.clear_cache()
                done += count
                self.prompt_left = total - done
                self._progress(done, total)
            if total - done > apart:
                yield
        if apart:
            with self.telemetry.phase("prefill"):
                logits = self._feed(*self._piece(total - 1, total))
                mx.eval(logits)
                self.prompt_left = 0
                self._progress(total, total)
        self._images = None
        return logits

    def _piece(self, start: int, stop: int) -> tuple[mx.array, PromptPart | None]:
        part = self._images and self._images.part(start, stop)
        return self._prompt[start:stop], part

    def _begin(self, total: int) -> Turn:
        """The turn in front of the prompt, an earlier one's if it left the caches."""
        cached = cached_tokens(self._caches)
        turn = self._turns.get(self._caches[0]) if self._turns else None
        if cached is None and self._round.coupled:
            turn = None  # or the coins would depend on what was decoded before
        if turn is not None and cached is None:
            cached = turn.length
        cached = cached or 0
        reserved = int(min(self._max_tokens, MAX_RESERVED))
        spare = 2 * (self._pace.max_depth + 1)
        self._capacity = bucket(cached + total + reserved + spare)
        self._most = cached + total + self._max_tokens + spare
        if self._memory is not None:
            self._watched = self._capacity
            args = cached + total, self._prefill_step_size
            self._bound(self._memory.start(*self._wanted, *args))
        if turn is not None and turn.length == cached:
            state = turn.draft_state
            if state is not None:
                state = self._try_draft(self._drafter.grow, state, self._capacity)
            return replace(turn, draft_state=state)
        state = None
        if self._follows:
            start = self._prompt[None, :0]
            state = self._try_draft(self._drafter.begin, start, self._capacity)
        return Turn(cached, self._prompt[:0], state, None)

    def _heed(self, length: int) -> None:
        """Asks the memory policy before rounds of ``length`` tokens need more room."""
        if self._memory is None or bucket(length) <= self._watched:
            return
        if not self._pace.max_depth:
            return  # no rounds any more
        self._watched = self._wider(bucket(length))
        self._bound(self._memory.grow(*self._wanted))

    @property
    def _wanted(self) -> tuple[int, int]:
        """The room to ask for, and the depth."""
        return self._watched, self._pace.max_depth

    def _bound(self, choice: tuple[int, str | None]) -> None:
        """Keeps to the depth that memory allows."""
        depth, reason = choice
        if reason is not None:
            self.telemetry.fallback = reason
            self.telemetry.step_downs += not depth
            self._pace.limit(depth)

    @property
    def _follows(self) -> bool:
        """Whether the drafter is given the target's hidden rows."""
        return self._drafter.needs_hidden and self._pace.max_depth > 0

    @property
    def _resumes(self) -> bool:
        """Whether the drafter goes on from a state that is behind."""
        return hasattr(self._drafter, "resume")

    def _feed(self, tokens: mx.array, part: PromptPart | None = None) -> mx.array:
        """Feeds tokens through the caches in one forward; the last row's logits."""
        self._merge()
        marks = [a.mark(c) for a, c in self._parts]
        try:
            out = self._read_rows(tokens, part)
            self._turn, self._unfed = self._extended(tokens, out.hidden, part), []
        except BaseException:
            for (adapter, cache), mark in zip(self._parts, marks, strict=True):
                adapter.rewind(cache, mark)
            raise
        del marks  # or the next write would copy what they hold
        self._quantise()
        self._evaluate()
        return out.logits[:, -1:]

    def _evaluate(self) -> None:
        """What is left lazy belongs to this thread, and the caller may go on in another
        one."""
        turn = self._turn
        mx.eval([a.arrays(c) for a, c in self._parts], turn.tokens, turn.hidden)
        if turn.draft_state is not None and (
            self._try_draft(_evaluated, turn.draft_state) is None
        ):
            self._turn = replace(turn, draft_state=None)

    def _read_rows(self, tokens: mx.array, part: PromptPart | None) -> TargetOutput:
        """A forward of tokens through the caches."""
        images = () if part is None else (part,)
        return self._target.prefill(tokens[None], self._caches, *images)

    def _extended(
        self, tokens: mx.array, hidden: mx.array | None, part: PromptPart | None = None
    ) -> Turn:
        """The turn with ``tokens`` ``(N,)`` behind it and ``hidden`` ``(1, N, H)``."""
        turn = self._turn
        length = turn.length + tokens.size
        known = mx.concatenate([turn.tokens, tokens])
        if not self._follows:
            return Turn(
                length, known, turn.draft_state if self._resumes else None, None
            )
        if hidden is None:
            self._step_down("the model gave no hidden rows")
            return Turn(length, known, None, None)
        state = turn.draft_state
        if state is not None:
            state = self._try_draft(
                self._drafted, state, turn.hidden, tokens[None], hidden, length, part
            )
        return Turn(length, known, state, hidden[:, -1:])

    def _drafted(self, state, before, tokens, hidden, length, part):
        """The drafter's state behind tokens; it gets each with the row before it."""
        rows, images = hidden[:, :-1], ()
        if part is not None and getattr(self._drafter, "reads_images", False):
            images = (part.pairs(skip=int(before is None)),)
        if before is None:
            tokens = tokens[:, 1:]
        else:
            rows = mx.concatenate([before, rows], axis=1)
        state = self._reserve(state, length)
        if not tokens.shape[1]:
            return state
        return self._drafter.prefill(state, tokens, rows, bucket(length), *images)

    def _try_draft(self, call: Callable, *args):
        """What a call of the drafter gives; None, and a step down, if it fails."""
        try:
            with drafting():
                return call(*args)
        except StepDown as error:
            self._step_down(error)
            return None

    def _step_down(self, reason: StepDown | str) -> None:
        """Plain decoding from here on, at first for a few tokens, later for more."""
        self.telemetry.fallback = f"plain decoding for a while: {reason}"
        self.telemetry.step_downs += 1
        self._plain_left = self._pause_for
        self._pause_for = min(2 * self._pause_for, MAX_PAUSE)

    def _forward(self, token: mx.array) -> mx.array:
        """Feeds one token, still on the device, ``(1,)``; its logits ``(1, 1, V)``.

        A token of -1, which is none, reads the last row of the embedding: it is taken
        back as soon as it is read.
        """
        step = getattr(self._target, "step", self._target.prefill)
        out = step(token[None], self._caches)
        self.telemetry.target_calls += 1
        self._loose.append((token, out.hidden))
        return out.logits

    def _draw(self, logits: mx.array) -> tuple[mx.array, Callable[[], mx.array]]:
        """The token behind logits, ``(1,)``, -1 if there is none, and its row."""
        position = mx.array([self._cached], mx.int32)
        proposal = self._round.no_drafts(self._keys, position)
        self._keys = proposal.keys
        if not self._host_decides:
            state, masks = {"params": self._params}, None
            if self._masks:
                vocab = self._target.vocab_size
                masks = mx.array(block_masks(self._controller, [], vocab))
            tokens, _, _ = self._round.accept(state, proposal, logits, masks)
            return tokens[:, 0], partial(masked_row, logits, masks, 0)
        history = [self._turn.tokens[self._earlier :], *(t for t, _ in self._loose)]
        decision = self._shaper.decide(
            mx.concatenate(history), logits, None, proposal.uniforms, self._free
        )
        if decision.accepted < 0:
            return mx.array([-1]), partial(masked_row, logits, None, 0)
        row = partial(decided_row, decision.logits, 0)
        return mx.array(decision.tokens, mx.int32), row

    def _merge(self) -> None:
        """Puts the tokens of plain steps into the turn."""
        if self._loose:
            tokens, hidden = zip(*self._loose, strict=True)
            rows = hidden[-1]
            if all(row is not None for row in hidden):
                rows = mx.concatenate(hidden, axis=1)
            elif self._drafter.needs_hidden:  # the drafter starts anew
                self._turn = replace(self._turn, draft_state=None)
            self._turn, self._loose = self._extended(mx.concatenate(tokens), rows), []
            self._evaluate()

    def _quantise(self) -> None:
        """Quantises the caches that have grown to the limit, as ``mlx_lm`` does."""
        if self._quantisation is None or self._limit > self._cached:
            return
        how = self._quantisation
        for i, cache in enumerate(self._caches):
            if hasattr(cache, "to_quantized"):
                self._caches[i] = cache.to_quantized(how.group_size, how.bits)
        _TAKEN.update(self._caches)
        self._round = self._find_round(self._round.depth, self._caches)

    def _feed_unfed(self) -> mx.array:
        logits = self._feed(mx.array(self._unfed, mx.int32))
        self.telemetry.target_calls += 1
        return logits

    def _wider(self, length: int) -> int:
        """Room for ``length`` tokens and as many again, if they may come."""
        return bucket(min(2 * length, self._most))

    def _reserve(self, draft_state, length: int):
        if bucket(length) > self._capacity:
            self._capacity = self._wider(length)
            draft_state = self._drafter.grow(draft_state, self._capacity)
        return draft_state

    def _adopt(self, logits: mx.array) -> _Pending | None:
        """Takes the caches apart; the token behind the last row is pending.

        None, and a step down, if the drafter is not ready.
        """
        turn, draft_state = self._turn, self._turn.draft_state
        if self._drafter.needs_hidden and turn.hidden is None:
            self._step_down("the model gave no hidden rows")
            return None
        mx.eval(logits)
        if draft_state is None or self._resumes:
            self._capacity = max(self._capacity, bucket(turn.length))
            room = turn.tokens[None], self._capacity
            draft_state = (
                self._try_draft(self._drafter.begin, *room)
                if draft_state is None
                else self._try_draft(self._drafter.resume, draft_state, *room)
            )
            if draft_state is None:
                return None
        state, proposal = self._round.begin(
            [a.adopt(c, self._round.width, self._capacity) for a, c in self._parts],
            turn.length,
            draft_state,
            turn.hidden,
            self._keys,
            self._params,
            self._draft_params,
            None if self._limit == math.inf else self._limit,
        )
        self._masked = self._masks
        if self._masked and not self._always:
            state["given"] = self._place([])
        pending = _Pending(state, logits, proposal=proposal, fed=0)
        pending = self._settle(pending, self._host_has_part)
        self._length, self._tokens, self._taken = turn.length, turn.tokens, []
        self._turn, self._block, self._state = None, None, pending.state
        for adapter, cache in self._parts:
            adapter.clear(cache)
        pending.state = None
        return pending

    def _pause(self) -> None:
        """Puts into the caches what the caller has taken, but for ``_unfed``.

        It can be repeated until the state is given up.
        """
        block = self._block or _Block(self._length, 0, -1, [], None)
        state, behind, rows = self._state, self._replayable, self._rows
        steps = block.fed + block.cached
        for i, (adapter, cache) in enumerate(self._parts):
            leaves = newest(behind and behind[i], state["leaves"][i])
            adapter.release(
                cache, leaves, block.length + steps, mx.array([steps], mx.int32)
            )
        unfed = block.unfed
        taken = mx.array(self._taken[: len(self._taken) - len(unfed)], mx.int32)
        tokens = mx.concatenate([self._tokens, taken])
        drafts = None
        if self._resumes and "draft" in state:
            drafts = self._try_draft(self._drafter.trim, state["draft"], tokens.size)
        turn = Turn(block.length + steps, tokens, drafts, None)
        self._keys = state.get("keys", self._keys)
        self._turn, self._unfed, self._taken = turn, unfed, []
        self._state = self._replayable = self._rows = self._block = None
        leaves = state["leaves"] = None
        if not (self._follows and "draft" in state):
            rows = None
        elif behind is None:
            rows = state["hidden"]
        if rows is not None:
            kept = self._kept if behind is None else self._kept_of_later
            draft_state = self._try_draft(kept, state, block, rows)
            hidden = rows[:, block.cached :][:, :1]
            self._turn = replace(turn, draft_state=draft_state, hidden=hidden)
        self._quantise()
        self._evaluate()

    def _kept(self, state: RoundState, block: _Block, rows: mx.array):
        """The drafter's state behind the tokens of a block that are in the caches."""
        if not block.cached:
            return state["draft"]
        return self._drafter.prefill(
            state["draft"],
            mx.array([block.tokens[: block.cached]], mx.int32),
            rows[:, : block.cached],
            min(bucket(self._length + self._round.width), self._capacity),
        )

    def _kept_of_later(self, state: RoundState, block: _Block, rows: mx.array):
        """The same once a later round was submitted, which took the whole block if it
        was committed."""
        if not self._committed:
            return self._kept(state, block, rows)
        if not hasattr(self._drafter, "rewind"):
            return None
        surplus = block.accepted + 1 - block.cached
        return _evaluated(self._drafter.rewind(state["draft"], surplus))

    def _close(self) -> None:
        if self._turns is None:
            return  # nobody else has the caches
        if self._state is not None:
            self._pause()
        if self._turn is None:
            return
        self._merge()
        if self._unfed:
            self._feed_unfed()
        self._evaluate()
        known = not self._drafter.needs_hidden or self._turn.draft_state is not None
        if known:
            self._turns[self._caches[0]] = self._turn
        else:
            self._turns.pop(self._caches[0], None)

    # One round

    def _build(self, *, unread: bool, given: Sequence[int] = ()) -> _Pending | None:
        """The graph of the next round; ``unread`` when the last is still running.

        None if only an eager round would do and the last is unread, or behind a step
        down.
        """
        with self.telemetry.phase("build"):
            host = self._host_has_part  # an error of a controller is no step down
            try:
                known = self._length + (self._round.width if unread else 0)
                self._state, self._attended = self._fit(known + self._round.width)
                if "given" in self._state:
                    self._state = {**self._state, "given": self._place(given)}
                pending = self._build_traced(host) if self._traced else None
                pending = pending or (None if unread else self._build_eager(host))
                if pending is not None:
                    pending.given = len(given)
                return pending
            except Exception as error:
                self._step_down(error)
                return None

    def _place(self, given: Sequence[int]) -> mx.array:
        """Given tokens as the round takes them, ``(1, K)``."""
        spare = self._round.depth - len(given)
        return mx.array([[*given, *[-1] * spare]], mx.int32)

    def _build_traced(self, host: bool) -> _Pending | None:
        """The compiled round, None if the model cannot be traced."""
        try:
            if not host:
                state, result = self._round(self._state, self._attended)
                return _Pending(state, result.logits, result.counts)
            proposal, state, logits = self._round.halves(self._state, self._attended)
            return _Pending(state, logits, proposal=proposal)
        except StepDown:
            raise
        except Exception as error:
            if self._round.traces:
                raise
            self._traced = False
            self.telemetry.fallback = f"eager round: {error}"
            return None

    def _build_eager(self, host: bool) -> _Pending:
        proposal, state, logits = self._round.halves(
            self._state, self._attended, self._length
        )
        return self._settle(_Pending(state, logits, proposal=proposal), host)

    def _settle(self, pending: _Pending, host: bool) -> _Pending:
        """Accepts and commits on the device, unless the host has to do with it."""
        if host:
            return pending
        tokens, accepted, _ = self._round.accept(
            pending.state, pending.proposal, pending.logits
        )
        state, counts = self._round.commit(
            pending.state, pending.proposal, tokens, accepted
        )
        return replace(pending, state=state, counts=counts, proposal=None)

    def _fit(self, length: int) -> tuple[RoundState, int]:
        """The state with room for ``length`` tokens, and the prefix to attend."""
        state, attended = self._state, bucket(length)
        if attended > self._capacity:
            self._capacity = self._wider(attended)
            state = self._round.grow(state, self._capacity)
        return state, attended

    def _submit(self, pending: _Pending) -> bool:
        """Starts a round. False, and a step down, if that fails."""
        self._replayable = [
            adapter.replayable(leaves)
            for adapter, leaves in zip(
                self._round.adapters, self._state["leaves"], strict=True
            )
        ]
        self._rows = self._state["hidden"] if self._follows else None
        self._committed = pending.counts is not None
        # The graph becomes the one owner of the old buffers and writes in place.
        self._state, pending.state = pending.state, None
        self.telemetry.target_calls += 1
        self.telemetry.draft_calls += self._drafter.forwards(self._round.depth)
        with self.telemetry.phase("submit"):
            try:
                if self._masked:
                    mx.async_eval(pending.proposal)  # the host reads the drafts first
                mx.async_eval(
                    pending.counts, pending.logits, pending.proposal, self._state
                )
                return True
            except Exception as error:
                self._step_down(error)
                return False

    def _mask(self, pending: _Pending) -> _Pending:
        """Makes the masks of a block while the target runs, and accepts under them."""
        proposal = pending.proposal
        with self.telemetry.phase("mask"):
            drafts = Drafts(*proposal.drafts).tokens.tolist()[0]
            masks = block_masks(self._controller, drafts, self._target.vocab_size)
        masks = mx.array(masks)
        self._state, counts = self._round.finish(
            self._state, proposal, pending.logits, masks
        )
        self._committed = True
        mx.async_eval(counts, self._state)
        return replace(pending, counts=counts, proposal=None, masks=masks)

    def _read(self, pending: _Pending) -> _Block:
        """Waits for a round: the one point where the host reads the device."""
        fed = pending.fed
        if pending.counts is not None:
            with self.telemetry.phase("wait"):
                accepted, drafted, *tokens = _read_counts(pending.counts)
            row = partial(masked_row, pending.logits, pending.masks)
        else:
            with self.telemetry.phase("shape"):
                decision, drafted = self._decide(pending)
            accepted, tokens = decision.accepted, decision.tokens
            row = partial(decided_row, decision.logits)
        return self._note(fed, pending.given, accepted, drafted, tokens, row)

    def _note(self, fed, given, accepted, drafted, tokens, row) -> _Block:
        """Counts a round that was read."""
        given = max(min(given, drafted), 0)
        block = _Block(self._length, fed, accepted, tokens[: accepted + 1], row, given)
        self._block, self._replayable, self._rows = block, None, None
        if accepted < 0 and not fed:
            raise self._unusable(block.length)
        if accepted < 0:  # of the model or of the drafter: plain decoding will tell
            raise StepDown("unusable logits")
        self._length += fed + accepted
        block.seconds = self._since_read()
        if fed:
            self.telemetry.count_depth(self.round_depth)
            self.telemetry.count_round(drafted - given, accepted - given)
        return block

    @property
    def round_depth(self) -> int:
        return self._round.depth

    def _unusable(self, position: int) -> UnusableLogits:
        return UnusableLogits(
            "The logits of the model have NaN, +inf or nothing to choose from, for "
            f"position {position}. The prompt cache holds every emitted token."
        )

    def _decide(self, pending: _Pending) -> tuple[Decision, int]:
        """Lets the host choose the tokens of a block and commits them."""
        decision, drafted = self._decision(pending.proposal, pending.logits)
        tokens = mx.array([decision.tokens], mx.int32)
        self._state, _ = self._round.commit(
            self._state,
            pending.proposal,
            tokens,
            mx.array([decision.accepted], mx.int32),
        )
        self._committed = True
        return decision, drafted

    def _decision(self, proposal: Proposal, logits: mx.array) -> tuple[Decision, int]:
        """What the host chooses of a block, and how many tokens were drafted."""
        drafts = Drafts(*proposal.drafts)
        tokens = [self._tokens[self._earlier :], mx.array(self._taken, mx.int32)]
        decision = self._shaper.decide(
            mx.concatenate(tokens), logits, drafts, proposal.uniforms, self._free
        )
        drafted = drafts.tokens.shape[1]
        return decision, drafted if drafts.lengths is None else drafts.lengths.item()


def _read_counts(counts: mx.array) -> list[int]:
    try:
        return counts.tolist()[0]
    except Exception as error:
        raise StepDown(f"a round failed: {error}") from error


def _evaluated(draft_state):
    mx.eval(draft_state)
    return draft_state


def masked_row(logits: mx.array, masks: mx.array | None, i: int) -> mx.array:
    return logits[0, i] if masks is None else apply_mask(masks[0, i], logits[0, i])


def decided_row(rows: list[mx.array], i: int) -> mx.array:
    return rows[i][0]


def _certain(token: int, vocab_size: int) -> mx.array:
    """The row of a forced token: nothing else was allowed."""
    return mx.where(mx.arange(vocab_size) == token, 0.0, -mx.inf)
