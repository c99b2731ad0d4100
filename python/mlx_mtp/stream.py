"""One stream: its rounds and plain steps, and where they end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import mlx.core as mx

from .context import Context, bucket, evaluated
from .drafters import Drafts
from .prefixes import CachedPrefix
from .round import Proposal, RoundState, StepDown
from .shaping import Decision, HostSide, apply_mask, check_forced
from .state import newest


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


class Stream:
    """The state and the loop of one stream.

    It is either running, with the caches taken apart in ``_state``, or at rest, with
    the caches whole in ``context``; ``_adopt`` and ``_pause`` lead there and back. What
    keeps it from running, such as a drafter that fails, makes it decode plainly at rest
    for a while.
    """

    def __init__(
        self,
        context: Context,
        host: HostSide,
        params: dict[str, mx.array],
        draft_params: dict[str, mx.array],
        *,
        stop_tokens: Collection[int],
        keys: mx.array,
    ):
        mx.eval(context.prompt, keys)  # another thread may iterate
        self.context, self.host = context, host
        self.telemetry, self._drafter = context.telemetry, context.drafter
        self._pace = context.pace
        self._round = context.round  # of the rounds that run or have run
        self._params, self._draft_params = params, draft_params
        self._max_tokens = context.max_tokens
        self._stop_tokens = frozenset(stop_tokens)
        self._keys = keys
        self._traced = True
        if host.always:
            self.telemetry.fallback = "split round: processors or sampler on the host"

        self._state: RoundState | None = None  # running: the newest state
        self._replayable: list | None = None  # leaves of the block behind it
        self._rows: mx.array | None = None  # the hidden rows of that block
        self._committed = False  # whether that state is, of the round in flight
        self._block: _Block | None = None
        self._length = 0  # tokens in the caches in front of the pending round
        self._attended = 0
        self._tokens = context.prompt  # in the caches when the stream last began to run
        self._taken: list[int] = []  # since then
        self._last = -1  # the newest of all
        self._read_at = 0.0  # when the host last read the device

    def run(self) -> Iterator[Step | None]:
        """Its steps; None between two chunks of the prompt."""
        with self.context.owner():
            yield from self._decode()

    def _decode(self) -> Iterator[Step | None]:
        context = self.context
        try:
            logits = yield from context.read_prompt()
            while True:
                yield from self._force()
                if self._ended:
                    return
                if context.unfed:
                    logits = context.feed_unfed()
                pending = None
                if self._pace.depth and not context.plain_left:
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
        context = self.context
        while True:
            context.heed(self._length + 2 * self._round.width)
            if pending.counts is None and not self.host.decides(self._round.width):
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
                    or self._length >= context.limit
                    or self._pace.depth != self._round.depth
                )
                if first:
                    mx.eval(self._state)  # the caller may go on in another thread
                    yield from self._emit(block)
                if not last:
                    given = self.host.given(self._round.depth)
                    if given:
                        ahead = None  # it drafts where nothing is left to choose
                    if ahead is None and not context.plain_left:
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
        self.context.step_down(error)
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
        context, host = self.context, self.host
        controller = host.controller
        host.begin()
        token, row = self._draw(logits)
        while True:
            context.heed(context.length + self._round.width)
            mark = context.mark_step()
            try:
                logits = context.step(token)
                in_step = host.has_part(self._round.width)
                ahead = None if in_step else self._draw(logits)
                context.start_step(logits if ahead is None else ahead[0], self._keys)
                with self.telemetry.phase("wait"):
                    value = token.item()
                if value < 0:
                    raise self._unusable(context.length - 1)
                self._count_plain()
                if controller is not None:
                    controller.accept(value)
                step = self._take(value, False, row)
            except BaseException:
                context.rewind_step(mark)
                raise
            yield step
            context.plain_left = max(context.plain_left - 1, 0)
            last = self._ended or (self._pace.depth and not context.plain_left)
            if last or (controller is not None and host.turned(self._own_width)):
                context.merge()
                return logits
            context.end_step()
            token, row = ahead or self._draw(logits)

    def _draw(self, logits: mx.array) -> tuple[mx.array, Callable[[], mx.array]]:
        """The token behind logits, ``(1,)``, -1 if there is none, and its row."""
        position = mx.array([self.context.length], mx.int32)
        proposal = self._round.no_drafts(self._keys, position)
        self._keys = proposal.keys
        host = self.host
        if not host.decides(self._round.width):
            state, masks = {"params": self._params}, None
            if host.masks:
                masks = mx.array(host.block_masks([]))
            tokens, _, _ = self._round.accept(state, proposal, logits, masks)
            return tokens[:, 0], partial(masked_row, logits, masks, 0)
        drafts, coins = Drafts(*proposal.drafts), proposal.uniforms
        decision, _ = host.decide(self.context.history, logits, drafts, coins)
        if decision.accepted < 0:
            return mx.array([-1]), partial(masked_row, logits, None, 0)
        row = partial(decided_row, decision.logits, 0)
        return mx.array(decision.tokens, mx.int32), row

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
        host, vocab = self.host, self.host.vocab_size
        due = host.due(self._own_width)
        while due:
            token = check_forced(due[0], vocab)
            host.controller.accept(token)
            self.context.unfed.append(token)
            yield self._take(token, False, partial(_certain, token, vocab), True)
            if self._ended:
                return
            due = host.controller.forced()

    @property
    def _own_width(self) -> int:
        """Of its rounds; a batch's may be wider than a row's own."""
        return self._round.width

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
        controller = self.host.controller
        room = self._max_tokens - self.telemetry.emitted
        for token in block.tokens:
            if controller is not None:
                controller.accept(token)
            block.due += 1
            if token in self._stop_tokens or block.due >= room:
                return True
            if controller is not None and self.host.turned(self._own_width):
                return True
        return False

    @property
    def _builds_ahead(self) -> bool:
        # Where the host decides only near the horizon, neither round may reach it.
        near = self.host.decides(2 * self._round.width)
        more = self.telemetry.emitted + 1 < self._max_tokens
        same = self._pace.depth == self._round.depth
        return self._traced and more and same and not near

    # To rounds and back to rest

    def _adopt(self, logits: mx.array) -> _Pending | None:
        """Takes the caches apart; the token behind the last row is pending.

        None, and a step down, if the drafter is not ready.
        """
        context, host = self.context, self.host
        self._round = context.use_depth(self._pace.depth)
        mx.eval(logits)
        draft_state = context.ready_drafter()
        if draft_state is None:
            return None
        prefix = context.prefix
        state, proposal = self._round.begin(
            context.adopt(),
            prefix.length,
            draft_state,
            prefix.hidden,
            self._keys,
            self._params,
            self._draft_params,
            None if context.limit == math.inf else context.limit,
        )
        host.begin()
        if host.places:
            state["given"] = self._place([])
        pending = _Pending(state, logits, proposal=proposal, fed=0)
        pending = self._settle(pending, host.has_part(self._round.width))
        self._length, self._tokens, self._taken = prefix.length, prefix.tokens, []
        self._block, self._state, pending.state = None, pending.state, None
        context.clear()
        return pending

    def _pause(self) -> None:
        """Puts into the caches what the caller has taken, but for what is unfed.

        It can be repeated until the state is given up.
        """
        context = self.context
        block = self._block or _Block(self._length, 0, -1, [], None)
        state, behind, rows = self._state, self._replayable, self._rows
        steps = block.fed + block.cached
        context.release(newest(behind, state["leaves"]), block.length + steps, steps)
        unfed = block.unfed
        taken = mx.array(self._taken[: len(self._taken) - len(unfed)], mx.int32)
        tokens = mx.concatenate([self._tokens, taken])
        drafts = None
        if context.resumes and "draft" in state:
            drafts = context.try_draft(self._drafter.trim, state["draft"], tokens.size)
        prefix = CachedPrefix(block.length + steps, tokens, drafts, None)
        self._keys = state.get("keys", self._keys)
        context.prefix, context.unfed, self._taken = prefix, unfed, []
        self._state = self._replayable = self._rows = self._block = None
        state["leaves"] = None
        if not (context.follows and "draft" in state):
            rows = None
        elif behind is None:
            rows = state["hidden"]
        if rows is not None:
            kept = self._kept if behind is None else self._kept_of_later
            draft_state = context.try_draft(kept, state, block, rows)
            hidden = rows[:, block.cached :][:, :1]
            context.prefix = replace(prefix, draft_state=draft_state, hidden=hidden)
        context.quantise()
        context.evaluate()

    def _kept(self, state: RoundState, block: _Block, rows: mx.array):
        """The drafter's state behind the tokens of a block that are in the caches."""
        if not block.cached:
            return state["draft"]
        return self._drafter.prefill(
            state["draft"],
            mx.array([block.tokens[: block.cached]], mx.int32),
            rows[:, : block.cached],
            min(bucket(self._length + self._round.width), self.context.capacity),
        )

    def _kept_of_later(self, state: RoundState, block: _Block, rows: mx.array):
        """The same once a later round was submitted, which took the whole block if it
        was committed."""
        if not self._committed:
            return self._kept(state, block, rows)
        if not hasattr(self._drafter, "rewind"):
            return None
        surplus = block.accepted + 1 - block.cached
        return evaluated(self._drafter.rewind(state["draft"], surplus))

    def _close(self) -> None:
        if self.context.prefixes is None:
            return  # nobody else has the caches
        if self._state is not None:
            self._pause()
        self.context.close()

    # One round

    def _build(self, *, unread: bool, given: Sequence[int] = ()) -> _Pending | None:
        """The graph of the next round; ``unread`` when the last is still running.

        None if only an eager round would do and the last is unread, or behind a step
        down.
        """
        with self.telemetry.phase("build"):
            # An error of a controller is no step down.
            host = self.host.has_part(self._round.width)
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
                self.context.step_down(error)
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
        if attended > self.context.capacity:
            self.context.capacity = self.context.wider(attended)
            state = self._round.grow(state, self.context.capacity)
        return state, attended

    def _submit(self, pending: _Pending) -> bool:
        """Starts a round. False, and a step down, if that fails."""
        self._replayable = [
            adapter.replayable(leaves)
            for adapter, leaves in zip(
                self._round.adapters, self._state["leaves"], strict=True
            )
        ]
        self._rows = self._state["hidden"] if self.context.follows else None
        self._committed = pending.counts is not None
        # The graph becomes the one owner of the old buffers and writes in place.
        self._state, pending.state = pending.state, None
        self.telemetry.target_calls += 1
        self.telemetry.draft_calls += self._drafter.forwards(self._round.depth)
        with self.telemetry.phase("submit"):
            try:
                if self.host.masked:
                    mx.async_eval(pending.proposal)  # the host reads the drafts first
                mx.async_eval(
                    pending.counts, pending.logits, pending.proposal, self._state
                )
                return True
            except Exception as error:
                self.context.step_down(error)
                return False

    def _mask(self, pending: _Pending) -> _Pending:
        """Makes the masks of a block while the target runs, and accepts under them."""
        proposal = pending.proposal
        with self.telemetry.phase("mask"):
            drafts = Drafts(*proposal.drafts).tokens.tolist()[0]
            masks = mx.array(self.host.block_masks(drafts))
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
        tokens = [self._tokens[self.context.earlier :], mx.array(self._taken, mx.int32)]
        drafts, coins = Drafts(*proposal.drafts), proposal.uniforms
        return self.host.decide(mx.concatenate(tokens), logits, drafts, coins)


def _read_counts(counts: mx.array) -> list[int]:
    try:
        return counts.tolist()[0]
    except Exception as error:
        raise StepDown(f"a round failed: {error}") from error


def masked_row(logits: mx.array, masks: mx.array | None, i: int) -> mx.array:
    return logits[0, i] if masks is None else apply_mask(masks[0, i], logits[0, i])


def decided_row(rows: list[mx.array], i: int) -> mx.array:
    return rows[i][0]


def _certain(token: int, vocab_size: int) -> mx.array:
    """The row of a forced token: nothing else was allowed."""
    return mx.where(mx.arange(vocab_size) == token, 0.0, -mx.inf)
