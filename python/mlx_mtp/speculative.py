"""The one driver: prompt, rounds, stops, and caches handed back exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from .drafters import Drafts
from .drafters.base import DrafterState
from .round import Proposal, Round, RoundState
from .sampling import SamplingParams, stream_key
from .shaping import Decision, Processor, RowShaper, Sampler
from .state import classify
from .telemetry import Telemetry

MIN_BUCKET = 256
MAX_RESERVED = 1024  # tokens of a stream that get their cache slots at the start


class UnusableLogits(RuntimeError):
    """The model gave NaN, +inf or nothing to choose from. The cache is intact."""


@dataclass(frozen=True)
class Step:
    """One emitted token.

    Args:
        token (int): Its id.
        from_draft (bool): Whether the drafter proposed it.
        row (array): ``(1, V)``, the target's logits that it was taken from, after
            processors. Lazy.
    """

    token: int
    from_draft: bool
    row: mx.array

    @cached_property
    def logprobs(self) -> mx.array:
        """``(V,)``, the log-softmax of ``row``: before temperature and filters."""
        row = self.row[0]
        return row - mx.logsumexp(row)


@dataclass
class _Pending:
    """A round that is built, perhaps submitted, and not yet read.

    Without ``counts`` the host decides: ``proposal`` then has the drafts, and
    ``state`` is not committed yet. ``state`` is here until the round is submitted.
    """

    state: RoundState | None
    logits: mx.array
    counts: mx.array | None = None
    proposal: Proposal | None = None


@dataclass
class _Block:
    """The tokens of one round, and how many of them the caller has taken."""

    length: int  # tokens in the cache in front of the round
    fed: int  # rows of the round in front of its drafts: 1, or 0 for the prompt
    accepted: int
    tokens: list[int]
    row: Callable[[int], mx.array]
    kept: int = 0

    @property
    def steps(self) -> int:
        """Rows of the round that stay in the cache if the stream ends here."""
        return self.fed + min(self.kept, max(self.accepted, 0))

    @property
    def unfed(self) -> list[int]:
        """The taken token that no forward has seen, if there is one."""
        return self.tokens[-1:] if self.kept == self.accepted + 1 > 0 else []


@dataclass(frozen=True)
class _Turn:
    """What a drafter knows of a cache that was given back.

    A stale one costs acceptance only: drafts never change the distribution.
    """

    tokens: mx.array  # (N,), everything in the cache
    draft_state: DrafterState
    hidden: mx.array | None  # (1, 1, H), the row of the newest token


def bucket(length: int) -> int:
    """The smallest of 256, 384, 512, 768, 1024, ... that holds ``length``."""
    size = MIN_BUCKET
    while size < length:
        size = size // 2 * 3 if size & (size - 1) == 0 else size // 3 * 4
    return size


class SpeculativeDecoder:
    """Speculative decoding of one target by one drafter, at one depth.

    It holds the compiled rounds, so make it once and decode many streams with it,
    from any thread. When a prompt cache comes back for the next turn, so does the
    drafter's state; it is dropped with the cache.

    Args:
        target (Target): The model.
        drafter (Drafter): Proposes tokens.
        depth (int): Drafts a round, 1 to ``drafter.max_depth``.

    Raises:
        ValueError: The depth is out of range.
        DrafterMismatch: The drafter does not fit the target.
    """

    def __init__(self, target, drafter, depth: int = 3):
        if not 1 <= depth <= drafter.max_depth:
            raise ValueError(
                f"depth must be in [1, {drafter.max_depth}] for the {drafter.name} "
                f"drafter but is {depth}."
            )
        drafter.check(target)
        self.target, self.drafter, self.depth = target, drafter, depth
        self._rounds: dict[tuple, Round] = {}
        self._turns: WeakKeyDictionary[Any, _Turn] = WeakKeyDictionary()

    def stream(
        self,
        prompt: mx.array | Sequence[int],
        *,
        max_tokens: int = 256,
        params: SamplingParams | None = None,
        draft_params: SamplingParams | None = None,
        sampler: Sampler | None = None,
        processors: Sequence[Processor] = (),
        stop_tokens: Collection[int] = (),
        caches: list[Any] | None = None,
        seed: int | None = None,
        prefill_step_size: int = 2048,
        progress: Callable[[int, int], None] | None = None,
    ) -> SpeculativeIterator:
        """Decodes one stream; iterate over the result for ``Step`` objects.

        The tokens have the target's distribution exactly. A block that holds a stop
        token or reaches ``max_tokens`` ends there.

        Args:
            prompt: ``(P,)`` token ids, at least one.
            max_tokens (int): Tokens to emit. -1 is no limit.
            params (SamplingParams, optional): Default greedy.
            draft_params (SamplingParams, optional): The drafts' own distribution;
                it changes the speed only. Default ``params``.
            sampler (callable, optional): Draws from log-probabilities ``(1, V)`` in
                place of ``params``; accepts a draft that equals its draw.
            processors: ``processor(tokens (N,), logits (1, V)) -> logits``.
            stop_tokens: The stream ends with the first of these, which is emitted.
            caches: A prompt cache of the model, updated in place.
            seed (int, optional): Fixes the stream, alone or in any batch.
            prefill_step_size (int): Prompt tokens a forward.
            progress (callable, optional): ``progress(done, total)`` prompt tokens.

        Raises:
            ValueError: An argument is out of range.
            UnsupportedCache: A cache cannot be rolled back; nothing was written.
            UnusableLogits: While iterating, the model gave unusable logits.
        """
        if max_tokens == 0 or max_tokens < -1:
            raise ValueError(
                f"max_tokens must be positive, or -1 for no limit, but is {max_tokens}."
            )
        if prefill_step_size < 1:
            raise ValueError(
                f"prefill_step_size must be positive but is {prefill_step_size}."
            )
        params = params or SamplingParams()
        arrays = params.arrays(1)
        order = params.filter_order
        shaper = None
        if processors or sampler is not None:
            shaper = RowShaper(processors, sampler, {**arrays, "filter_order": order})
        turns = None if caches is None else self._turns
        caches = self.target.make_cache() if caches is None else caches
        classify(caches, self.target.adapters)
        greedy = params.greedy or sampler is not None
        stream = _Stream(
            self._round(greedy, order),
            _check_prompt(prompt, self.target.vocab_size),
            caches,
            shaper,
            arrays,
            (draft_params or params).arrays(1),
            turns,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            seed=seed,
            prefill_step_size=prefill_step_size,
            progress=progress,
        )
        return SpeculativeIterator(stream)

    def _round(self, greedy: bool, order) -> Round:
        key = (greedy, order)
        if key not in self._rounds:
            self._rounds[key] = Round(
                self.target,
                self.drafter,
                self.depth,
                greedy=greedy,
                filter_order=order,
            )
        return self._rounds[key]


def speculative_step(
    prompt, target, drafter, *, depth: int = 3, **options
) -> SpeculativeIterator:
    """Decodes one stream without ``mlx_lm``.

    The same as ``SpeculativeDecoder(target, drafter, depth).stream(prompt,
    **options)``; keep the decoder to reuse its compiled rounds.

    Example:
        >>> for step in speculative_step(prompt, target, NGramDrafter(), depth=4):
        ...     print(step.token, step.from_draft)
    """
    return SpeculativeDecoder(target, drafter, depth).stream(prompt, **options)


class SpeculativeIterator(Iterator[Step]):
    """One stream in progress, made by ``SpeculativeDecoder.stream``.

    ``telemetry`` is live. The end of the stream, an error, ``close()`` or dropping
    the iterator puts the caches back: they hold the prompt and every emitted token,
    as ``mlx_lm`` leaves them. While the stream runs they are empty.
    """

    def __init__(self, stream: _Stream):
        self.telemetry = stream.telemetry
        # Nothing in the stream refers to this object, so dropping it closes the
        # generator at once.
        self._steps = stream.run()

    def __next__(self) -> Step:
        return next(self._steps)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Ends the stream where the caller is and gives the caches back."""
        self._steps.close()


class _Stream:
    """The state and the loop of one stream."""

    def __init__(
        self,
        round_: Round,
        prompt: mx.array,
        caches: list[Any],
        shaper: RowShaper | None,
        params: dict[str, mx.array],
        draft_params: dict[str, mx.array],
        turns: WeakKeyDictionary[Any, _Turn] | None,
        *,
        max_tokens: int,
        stop_tokens: Collection[int],
        seed: int | None,
        prefill_step_size: int,
        progress: Callable[[int, int], None] | None,
    ):
        self.telemetry = Telemetry()
        self._round, self._target = round_, round_.target
        self._drafter, self._adapters = round_.drafter, round_.target.adapters
        self._prompt, self._caches, self._shaper = prompt, caches, shaper
        self._params, self._draft_params = params, draft_params
        self._turns = turns
        self._max_tokens = math.inf if max_tokens == -1 else max_tokens
        self._stop_tokens = frozenset(stop_tokens)
        self._keys = stream_key(seed)
        self._prefill_step_size = prefill_step_size
        self._progress = progress or (lambda done, total: None)
        self._traced = True
        if shaper is not None:
            self.telemetry.fallback = "split round: processors or sampler on the host"

        self._history = prompt  # grows for the host's processors only
        self._earlier: mx.array | None = None  # tokens of earlier turns, if known
        self._taken: list[int] = []
        self._length = 0  # tokens in the cache in front of the pending round
        self._capacity = self._attended = 0
        self._state: RoundState | None = None  # the newest; None until adopted
        self._replayable: list | None = None  # leaves of the block behind it
        self._block: _Block | None = None

    def run(self) -> Iterator[Step]:
        try:
            pending = self._prefill()
            while True:
                # The next round is built while this one runs, and submitted once
                # this one is known not to be the last.
                ahead = self._build(unread=True) if self._builds_ahead else None
                block = self._read(pending)
                tokens, finished = self._cut(block.tokens)
                if not finished:
                    pending = self._submit(ahead or self._build(unread=False))
                del ahead
                for i, token in enumerate(tokens):
                    block.kept = i + 1
                    self._taken.append(token)
                    self.telemetry.emitted += 1
                    yield Step(token, i < block.accepted, block.row(i))
                if finished:
                    return
        finally:
            with self.telemetry.phase("close"):
                self._give_back()

    @property
    def _builds_ahead(self) -> bool:
        return self._shaper is None and self._traced

    def _cut(self, tokens: list[int]) -> tuple[list[int], bool]:
        """The tokens up to a stop or the limit, and whether there was one."""
        room = self._max_tokens - self.telemetry.emitted
        for i, token in enumerate(tokens):
            if token in self._stop_tokens or i + 1 >= room:
                return tokens[: i + 1], True
        return tokens, False

    # The prompt

    def _prefill(self) -> _Pending:
        """Feeds the prompt and adopts the caches; the first token is pending."""
        with self.telemetry.phase("prefill"):
            total = self._prompt.size
            cached = _cached_tokens(self._caches)
            self._length = cached + total
            reserved = int(min(self._max_tokens, MAX_RESERVED))
            self._capacity = bucket(self._length + reserved + 2 * self._round.width)
            draft_state = self._begin_draft(cached)
            done = 0
            self._progress(done, total)
            while total - done > 1:
                count = min(self._prefill_step_size, total - done - 1)
                draft_state = self._prefill_chunk(done, count, draft_state)
                done += count
                self._progress(done, total)
            out = self._target.prefill(self._prompt[None, -1:], self._caches)
            logits, hidden = out.logits[:, -1:], out.hidden
            if hidden is not None:
                hidden = hidden[:, -1:]
            mx.eval(logits, hidden, self._cache_arrays())
            self._progress(total, total)
            leaves = [
                adapter.adopt(cache, self._round.width, self._capacity)
                for adapter, cache in zip(self._adapters, self._caches, strict=True)
            ]
            state, proposal = self._round.begin(
                leaves,
                self._length,
                draft_state,
                hidden,
                self._keys,
                self._params,
                self._draft_params,
            )
            pending = self._settle(_Pending(state, logits, proposal=proposal))
            self._state, pending.state = pending.state, None
            return pending

    def _begin_draft(self, cached: int) -> DrafterState:
        """The drafter's state, resumed if the caches are those of an earlier turn."""
        turn = self._turns.get(self._caches[0]) if self._turns and cached else None
        if turn is None or turn.tokens.size != cached:
            return self._drafter.begin(self._prompt[None], self._capacity)
        self._earlier = turn.tokens
        if turn.hidden is None:
            tokens = mx.concatenate([turn.tokens, self._prompt])
            return self._drafter.begin(tokens[None], self._capacity)
        return self._drafter.prefill(
            self._drafter.grow(turn.draft_state, self._capacity),
            self._prompt[None, :1],
            turn.hidden,
            bucket(cached),
        )

    def _prefill_chunk(self, start: int, count: int, draft_state):
        rows = self._prompt[None, start : start + count + 1]
        out = self._target.prefill(rows[:, :-1], self._caches)
        if self._drafter.needs_hidden:
            draft_state = self._drafter.prefill(
                draft_state,
                rows[:, 1:],
                out.hidden,
                bucket(self._length - self._prompt.size + start + count),
            )
        mx.eval(self._cache_arrays(), draft_state)
        mx.clear_cache()
        return draft_state

    # One round

    def _build(self, *, unread: bool) -> _Pending:
        """The graph of the next round; ``unread`` when the last is still running."""
        with self.telemetry.phase("build"):
            known = self._length + (self._round.width if unread else 0)
            self._state, self._attended = self._fit(known + self._round.width)
            if not self._traced:
                return self._build_eager()
            try:
                return self._build_traced(self._state, self._attended)
            except Exception as error:
                if self._round.traces:
                    raise
                self._traced = False
                self.telemetry.fallback = f"eager round: {error}"
                return None if unread else self._build_eager()

    def _build_traced(self, state, attended) -> _Pending:
        if self._shaper is None:
            state, result = self._round(state, attended)
            return _Pending(state, result.logits, result.counts)
        proposal, state, logits = self._round.halves(state, attended)
        return _Pending(state, logits, proposal=proposal)

    def _build_eager(self) -> _Pending:
        proposal, state, logits = self._round.halves(
            self._state, self._attended, self._length
        )
        return self._settle(_Pending(state, logits, proposal=proposal))

    def _settle(self, pending: _Pending) -> _Pending:
        """Accepts and commits on the device, unless the host decides."""
        if self._shaper is not None:
            return pending
        tokens, accepted, _ = self._round.accept(
            pending.state, pending.proposal, pending.logits
        )
        state, counts = self._round.commit(
            pending.state, pending.proposal, tokens, accepted
        )
        return _Pending(state, pending.logits, counts)

    def _fit(self, length: int) -> tuple[RoundState, int]:
        """The state with room for ``length`` tokens, and the prefix to attend."""
        state, attended = self._state, bucket(length)
        if attended > self._capacity:
            self._capacity = bucket(2 * attended)
            state = self._round.grow(state, self._capacity)
        return state, attended

    def _submit(self, pending: _Pending) -> _Pending:
        self._replayable = [
            adapter.replayable(leaves)
            for adapter, leaves in zip(
                self._adapters, self._state["leaves"], strict=True
            )
        ]
        # The graph becomes the one owner of the old buffers and writes in place.
        self._state, pending.state = pending.state, None
        with self.telemetry.phase("submit"):
            mx.async_eval(pending.counts, pending.logits, pending.proposal, self._state)
        return pending

    def _read(self, pending: _Pending) -> _Block:
        """Waits for a round: the one point where the host reads the device."""
        fed = 0 if self._block is None else 1
        if pending.counts is not None:
            with self.telemetry.phase("wait"):
                accepted, drafted, *tokens = pending.counts.tolist()[0]
            row = partial(_row, pending.logits)
        else:
            with self.telemetry.phase("shape"):
                decision, drafted = self._decide(pending)
            accepted, tokens = decision.accepted, decision.tokens
            row = decision.logits.__getitem__
        block = _Block(self._length, fed, accepted, tokens[: accepted + 1], row)
        self._block, self._replayable = block, None
        if accepted < 0:
            raise UnusableLogits(
                "The logits of the model or of the drafter have NaN, +inf or nothing "
                f"to choose from, in the round for position {block.length + fed}. The "
                "prompt cache holds every emitted token."
            )
        self._length += fed + accepted
        if fed:
            calls = self._drafter.forwards(self._round.depth)
            self.telemetry.count_round(drafted, accepted, calls)
        return block

    def _decide(self, pending: _Pending) -> tuple[Decision, int]:
        """Lets the host choose the tokens of a block and commits them."""
        proposal = pending.proposal
        drafts = Drafts(*proposal.drafts)
        decision = self._shaper.decide(
            self._history, pending.logits, drafts, proposal.uniforms
        )
        tokens = mx.array([decision.tokens], mx.int32)
        self._state, _ = self._round.commit(
            self._state, proposal, tokens, mx.array([decision.accepted], mx.int32)
        )
        self._history = mx.concatenate([self._history, tokens[0]])
        drafted = drafts.tokens.shape[1]
        return decision, drafted if drafts.lengths is None else drafts.lengths.item()

    # The end

    def _give_back(self) -> None:
        """Puts into the caches the prompt and what the caller has taken."""
        if self._state is None:
            return
        length, steps, unfed = self._length, 0, []
        if self._block is not None:
            length = self._block.length + self._block.steps
            steps, unfed = self._block.steps, self._block.unfed
        state, behind = self._state, self._replayable
        self._state = self._replayable = None
        for i, (adapter, cache) in enumerate(
            zip(self._adapters, self._caches, strict=True)
        ):
            leaves = (behind and behind[i]) or state["leaves"][i]
            adapter.release(cache, leaves, length, mx.array([steps], mx.int32))
        leaves = state["leaves"] = None
        mx.eval(self._cache_arrays())
        hidden = None
        if self._drafter.needs_hidden:
            hidden = state["hidden"][:, max(steps - 1, 0) :][:, :1]
        if unfed:
            out = self._target.prefill(mx.array([unfed], mx.int32), self._caches)
            mx.eval(self._cache_arrays(), out.hidden)
            hidden = out.hidden if self._drafter.needs_hidden else None
            self.telemetry.target_calls += 1
        # Once a later round has been submitted the rows of this one are gone.
        if self._turns is not None and behind is None:
            self._remember(state, hidden)

    def _remember(self, state: RoundState, hidden: mx.array | None) -> None:
        """Keeps the drafter's state for a next turn with the same caches."""
        draft_state, taken = state["draft"], mx.array(self._taken, mx.int32)
        kept = self._block.kept if self._block is not None else 0
        if hidden is not None and kept:
            draft_state = self._drafter.prefill(
                draft_state,
                taken[None, -kept:],
                state["hidden"][:, :kept],
                min(bucket(self._length + self._round.width), self._capacity),
            )
        parts = [] if self._earlier is None else [self._earlier]
        tokens = mx.concatenate([*parts, self._prompt, taken])
        mx.eval(draft_state, hidden, tokens)
        self._turns[self._caches[0]] = _Turn(tokens, draft_state, hidden)

    def _cache_arrays(self):
        return [
            adapter.arrays(cache)
            for adapter, cache in zip(self._adapters, self._caches, strict=True)
        ]


def _row(logits: mx.array, i: int) -> mx.array:
    return logits[:, i]


def _cached_tokens(caches: Sequence[Any]) -> int:
    """Tokens that a prompt cache already holds."""
    return max((getattr(cache, "offset", 0) for cache in caches), default=0)


def _check_prompt(prompt, vocab_size: int) -> mx.array:
    prompt = mx.array(prompt)
    if prompt.ndim != 1 or prompt.size == 0:
        raise ValueError(
            "prompt must hold at least one token id, with shape (P,), but has shape "
            f"{prompt.shape}."
        )
    if not mx.issubdtype(prompt.dtype, mx.integer):
        raise TypeError(f"prompt must hold integer token ids but has {prompt.dtype}.")
    low, high = mx.min(prompt).item(), mx.max(prompt).item()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"prompt has token id {low if low < 0 else high}, outside of the "
            f"vocabulary of {vocab_size}."
        )
    return prompt.astype(mx.int32)
