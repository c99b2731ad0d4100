"""What a stream has read: caches at rest, and what its drafter knows of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import mlx.core as mx

from .adaptive import Pace
from .drafters.base import DrafterState
from .memory import Watch
from .prefixes import CachedPrefix
from .round import Round, StepDown, drafting
from .state import Leaves, cached_tokens
from .targets import TargetOutput
from .targets.vision_prompt import PromptPart, VisionPrompt
from .telemetry import Telemetry

MIN_BUCKET = 256
MAX_RESERVED = 1024  # tokens of a stream that get their cache slots at the start
MIN_PAUSE, MAX_PAUSE = 16, 1024  # plain tokens behind a first and a repeated failure
MERGED = 256  # plain tokens that the drafter gets at once


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


class Context:
    """The prompt and the tokens that a stream has read.

    At rest the caches are whole and ``prefix`` is beside them; tokens of plain steps
    are ``loose`` until the drafter gets them, and ``unfed`` are emitted tokens that are
    not in the caches yet. While rounds run the caches are empty.

    ``prefixes`` has what streams left beside their caches; None if these caches are
    nobody else's. ``joint`` gives what was read of the prompt with those of others.
    """

    def __init__(
        self,
        find_round: Callable[[int, list[Any]], Round],
        pace: Pace,
        prompt: mx.array,
        images: VisionPrompt | None,
        caches: list[Any],
        prefixes: WeakKeyDictionary[Any, CachedPrefix] | None,
        *,
        max_tokens: int,
        prefill_step_size: int,
        progress: Callable[[int, int], None] | None,
        quantisation: Quantisation | None = None,
        memory: Watch | None = None,
    ):
        self._find_round = find_round
        self.prompt, self._images, self.caches = prompt, images, caches
        self.use_pace(pace)
        self.target, self.drafter = self.round.target, self.round.drafter
        self.prompt_left = prompt.size  # tokens that are not in the caches
        self.joint: Callable[[list[Any]], TargetOutput] | None = None
        self.prefixes, self.telemetry = prefixes, Telemetry()
        self.max_tokens = math.inf if max_tokens == -1 else max_tokens
        self._prefill_step_size = prefill_step_size
        self._progress = progress or (lambda done, total: None)
        self.quantisation, self.memory = quantisation, memory
        self._watched = 0  # the capacity that memory allows
        self.capacity = 0
        self.most = math.inf  # tokens that need room at its limit
        self.prefix: CachedPrefix | None = None
        self.loose: list[tuple[mx.array, mx.array | None]] = []
        self.unfed: list[int] = []
        self.earlier = 0  # known tokens of earlier streams
        self.plain_left = 0  # tokens until rounds are tried again
        self._pause_for = MIN_PAUSE

    def use_pace(self, pace: Pace) -> None:
        """Has its rounds at another pace; before anything is read."""
        self.pace = pace
        self.use_depth(max(pace.depth, 1))

    def use_depth(self, depth: int) -> Round:
        """The round of a depth, and the adapters for it."""
        self.round = self._find_round(depth, self.caches)
        return self.round

    @contextmanager
    def owner(self) -> Iterator[None]:
        """Keeps other streams off the caches."""
        plain = list(self.caches)  # quantised ones may take their places
        refuse_taken(plain)
        _TAKEN.update(plain)
        try:
            yield
        finally:
            _TAKEN.difference_update([*plain, *self.caches])

    @property
    def length(self) -> int:
        """Tokens in the caches."""
        return self.prefix.length + len(self.loose)

    @property
    def history(self) -> mx.array:
        """``(N,)``, the tokens of this stream in the caches."""
        tokens = [self.prefix.tokens[self.earlier :], *(t for t, _ in self.loose)]
        return mx.concatenate(tokens)

    @property
    def parts(self):
        """Each cache with its adapter."""
        return list(zip(self.round.adapters, self.caches, strict=True))

    @property
    def follows(self) -> bool:
        """Whether the drafter is given the target's hidden rows."""
        return self.drafter.needs_hidden and self.pace.max_depth > 0

    @property
    def resumes(self) -> bool:
        """Whether the drafter goes on from a state that is behind."""
        return hasattr(self.drafter, "resume")

    @property
    def limit(self) -> float:
        """Cached tokens at which the caches that are apart have to be quantised."""
        if self.quantisation is None:
            return math.inf
        waits = any(hasattr(cache, "to_quantized") for cache in self.caches)
        return self.quantisation.start if waits else math.inf

    # Prompt

    @property
    def prompt_is_new(self) -> bool:
        """Whether the whole prompt can be read at once, into empty caches."""
        fits = self.prompt.size <= self._prefill_step_size and self._images is None
        return fits and self.prefix is None and not cached_tokens(self.caches)

    def feed_prompt(self) -> None:
        """Feeds the prompt for a later stream."""
        with self.owner():
            try:
                for _ in self.read_prompt(apart=0):
                    pass
            finally:
                self.close()

    def read_prompt(self, apart: int = 1) -> Generator[None, None, mx.array | None]:
        """Feeds the prompt, its last token on its own; the logits of the last row.

        Yields between two chunks.
        """
        if self.joint is not None and self.prompt_is_new:
            apart = 0
        else:
            self.joint = None
        with self.telemetry.phase("prefill"):
            total = self.prompt.size
            self.prefix = self._begin(total)
            self.earlier = self.prefix.tokens.size
            self._progress(0, total)
        done, logits = 0, None
        while total - done > apart:
            count = min(self._prefill_step_size, total - done - apart)
            with self.telemetry.phase("prefill"):
                logits = self.feed(*self._piece(done, done + count))
                mx.clear_cache()
                done += count
                self.prompt_left = total - done
                self._progress(done, total)
            if total - done > apart:
                yield
        if apart:
            with self.telemetry.phase("prefill"):
                logits = self.feed(*self._piece(total - 1, total))
                mx.eval(logits)
                self.prompt_left = 0
                self._progress(total, total)
        self._images = None
        return logits

    def _piece(self, start: int, stop: int) -> tuple[mx.array, PromptPart | None]:
        part = self._images and self._images.part(start, stop)
        return self.prompt[start:stop], part

    def _begin(self, total: int) -> CachedPrefix:
        """The prefix in front of the prompt, as an earlier stream left it."""
        cached = cached_tokens(self.caches)
        prefix = self.prefixes.get(self.caches[0]) if self.prefixes else None
        if cached is None and self.round.coupled:
            prefix = None  # or the coins would depend on what was decoded before
        if prefix is not None and cached is None:
            cached = prefix.length
        cached = cached or 0
        reserved = int(min(self.max_tokens, MAX_RESERVED))
        spare = 2 * (self.pace.max_depth + 1)
        self.capacity = bucket(cached + total + reserved + spare)
        self.most = cached + total + self.max_tokens + spare
        if self.memory is not None:
            self._watched = self.capacity
            wanted = self._watched, self.pace.max_depth
            args = cached + total, self._prefill_step_size
            self._bound(self.memory.start(*wanted, *args))
        if prefix is not None and prefix.length == cached:
            state = prefix.draft_state
            if state is not None:
                state = self.try_draft(self.drafter.grow, state, self.capacity)
            return replace(prefix, draft_state=state)
        state = None
        if self.follows:
            start = self.prompt[None, :0]
            state = self.try_draft(self.drafter.begin, start, self.capacity)
        return CachedPrefix(cached, self.prompt[:0], state, None)

    # Memory

    def heed(self, length: int) -> None:
        """Asks the memory policy before rounds of ``length`` tokens need more room."""
        if self.memory is None or bucket(length) <= self._watched:
            return
        if not self.pace.max_depth:
            return  # no rounds any more
        self._watched = self.wider(bucket(length))
        self._bound(self.memory.grow(self._watched, self.pace.max_depth))

    def _bound(self, choice: tuple[int, str | None]) -> None:
        """Keeps to the depth that memory allows."""
        depth, reason = choice
        if reason is not None:
            self.telemetry.fallback = reason
            self.telemetry.step_downs += not depth
            self.pace.limit(depth)

    def wider(self, length: int) -> int:
        """Room for ``length`` tokens and as many again, if they may come."""
        return bucket(min(2 * length, self.most))

    # Tokens

    def feed(self, tokens: mx.array, part: PromptPart | None = None) -> mx.array:
        """Feeds tokens through the caches in one forward; the last row's logits."""
        self.merge()
        marks = [a.mark(c) for a, c in self.parts]
        try:
            out = self._forward(tokens, part)
            self.prefix, self.unfed = self._extended(tokens, out.hidden, part), []
        except BaseException:
            for (adapter, cache), mark in zip(self.parts, marks, strict=True):
                adapter.rewind(cache, mark)
            raise
        del marks  # or the next write would copy what they hold
        self.quantise()
        self.evaluate()
        return out.logits[:, -1:]

    def feed_unfed(self) -> mx.array:
        """Feeds the emitted tokens that are not in the caches, as ``feed``."""
        logits = self.feed(mx.array(self.unfed, mx.int32))
        self.telemetry.target_calls += 1
        return logits

    def _forward(self, tokens: mx.array, part: PromptPart | None) -> TargetOutput:
        """A forward of tokens through the caches."""
        if self.joint is not None:
            take, self.joint = self.joint, None
            return take(self.caches)
        images = () if part is None else (part,)
        return self.target.prefill(tokens[None], self.caches, *images)

    def evaluate(self) -> None:
        """What is left lazy belongs to this thread, and the caller may go on in another
        one."""
        prefix = self.prefix
        mx.eval([a.arrays(c) for a, c in self.parts], prefix.tokens, prefix.hidden)
        if prefix.draft_state is not None and (
            self.try_draft(evaluated, prefix.draft_state) is None
        ):
            self.prefix = replace(prefix, draft_state=None)

    def quantise(self) -> None:
        """Quantises the caches that have grown to the limit, as ``mlx_lm`` does."""
        if self.quantisation is None or self.limit > self.length:
            return
        how = self.quantisation
        for i, cache in enumerate(self.caches):
            if hasattr(cache, "to_quantized"):
                self.caches[i] = cache.to_quantized(how.group_size, how.bits)
        _TAKEN.update(self.caches)
        self.use_depth(self.round.depth)

    # Plain steps

    def mark_step(self) -> tuple[int, list[Any]]:
        """What ``rewind_step`` needs to take the next step back."""
        return len(self.loose), [a.mark_step(c) for a, c in self.parts]

    def step(self, token: mx.array) -> mx.array:
        """Feeds one token, still on the device, ``(1,)``; its logits ``(1, 1, V)``.

        A token of -1, which is none, reads the last row of the embedding: it is taken
        back as soon as it is read.
        """
        step = getattr(self.target, "step", self.target.prefill)
        out = step(token[None], self.caches)
        self.telemetry.target_calls += 1
        self.loose.append((token, out.hidden))
        return out.logits

    def start_step(self, *needed: mx.array) -> None:
        """Starts a step, with all that the next one needs; see ``evaluate``."""
        caches = [a.arrays(c) for a, c in self.parts]
        mx.async_eval(needed, self.loose[-1], caches)

    def rewind_step(self, mark: tuple[int, list[Any]]) -> None:
        before, marks = mark
        del self.loose[before:]
        for (adapter, cache), mark in zip(self.parts, marks, strict=True):
            adapter.rewind_step(cache, mark)

    def end_step(self) -> None:
        """Once a step is read: the drafter gets many at once."""
        if len(self.loose) >= MERGED:
            self.merge()
            mx.clear_cache()
        self.quantise()

    def merge(self) -> None:
        """Puts the tokens of plain steps into the prefix."""
        if not self.loose:
            return
        tokens, hidden = zip(*self.loose, strict=True)
        rows = hidden[-1]
        if all(row is not None for row in hidden):
            rows = mx.concatenate(hidden, axis=1)
        elif self.drafter.needs_hidden:  # the drafter starts anew
            self.prefix = replace(self.prefix, draft_state=None)
        self.prefix, self.loose = self._extended(mx.concatenate(tokens), rows), []
        self.evaluate()

    # Drafter

    def _extended(
        self, tokens: mx.array, hidden: mx.array | None, part: PromptPart | None = None
    ) -> CachedPrefix:
        """The prefix and ``tokens`` ``(N,)``, which gave ``hidden`` ``(1, N, H)``."""
        prefix = self.prefix
        length = prefix.length + tokens.size
        known = mx.concatenate([prefix.tokens, tokens])
        if not self.follows:
            state = prefix.draft_state if self.resumes else None
            return CachedPrefix(length, known, state, None)
        if hidden is None:
            self.step_down("the model gave no hidden rows")
            return CachedPrefix(length, known, None, None)
        state = prefix.draft_state
        if state is not None:
            state = self.try_draft(
                self._drafted, state, prefix.hidden, tokens[None], hidden, length, part
            )
        return CachedPrefix(length, known, state, hidden[:, -1:])

    def _drafted(self, state, before, tokens, hidden, length, part):
        """The drafter's state behind tokens; it gets each with the row before it."""
        rows, images = hidden[:, :-1], ()
        if part is not None and getattr(self.drafter, "reads_images", False):
            images = (part.pairs(skip=int(before is None)),)
        if before is None:
            tokens = tokens[:, 1:]
        else:
            rows = mx.concatenate([before, rows], axis=1)
        if bucket(length) > self.capacity:
            self.capacity = self.wider(length)
            state = self.drafter.grow(state, self.capacity)
        if not tokens.shape[1]:
            return state
        return self.drafter.prefill(state, tokens, rows, bucket(length), *images)

    def try_draft(self, call: Callable, *args):
        """What a call of the drafter gives; None, and a step down, if it fails."""
        try:
            with drafting():
                return call(*args)
        except StepDown as error:
            self.step_down(error)
            return None

    def step_down(self, reason: StepDown | str) -> None:
        """Plain decoding from here on, at first for a few tokens, later for more."""
        self.telemetry.fallback = f"plain decoding for a while: {reason}"
        self.telemetry.step_downs += 1
        self.plain_left = self._pause_for
        self._pause_for = min(2 * self._pause_for, MAX_PAUSE)

    # Rounds and the end

    def ready_drafter(self) -> DrafterState | None:
        """The drafter's state for rounds from here on; None, and a step down, if it
        has none."""
        prefix, state = self.prefix, self.prefix.draft_state
        if self.drafter.needs_hidden and prefix.hidden is None:
            self.step_down("the model gave no hidden rows")
            return None
        if state is not None and not self.resumes:
            return state
        self.capacity = max(self.capacity, bucket(prefix.length))
        room = prefix.tokens[None], self.capacity
        if state is None:
            return self.try_draft(self.drafter.begin, *room)
        return self.try_draft(self.drafter.resume, state, *room)

    def adopt(self) -> list[Leaves]:
        """The arrays of the caches, for rounds."""
        return [a.adopt(c, self.round.width, self.capacity) for a, c in self.parts]

    def clear(self) -> None:
        """Empties the caches once rounds have their arrays."""
        self.prefix = None
        for adapter, cache in self.parts:
            adapter.clear(cache)

    def release(self, leaves: Iterable[Leaves], length: int, steps: int) -> None:
        """Fills the caches with ``length`` tokens, of which the newest leaves have
        ``steps`` of their own."""
        count = mx.array([steps], mx.int32)
        for (adapter, cache), x in zip(self.parts, leaves, strict=True):
            adapter.release(cache, x, length, count)

    def close(self) -> None:
        """Leaves all that was emitted in the caches, and what is known beside them."""
        if self.prefix is None:
            return
        self.merge()
        if self.unfed:
            self.feed_unfed()
        self.evaluate()
        if self.drafter.needs_hidden and self.prefix.draft_state is None:
            self.prefixes.pop(self.caches[0], None)
        else:
            self.prefixes[self.caches[0]] = self.prefix


def evaluated(draft_state: DrafterState) -> DrafterState:
    mx.eval(draft_state)
    return draft_state
