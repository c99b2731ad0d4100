"""Many streams at once: one forward of the target a round, with a row for each.

A row is a stream as in ``stream``: alone while it reads its prompt or is fed forced
tokens, and in a slot of the batch for its rounds. Nothing moves when others join or
leave, and every row has its own offset, so nothing is padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from .adaptive import BatchDepth, FixedDepth
from .batch_prompts import JointPrompts, joint_groups
from .batch_round import BatchRound
from .context import MIN_BUCKET, Context, bucket
from .drafters import Drafts
from .round import Proposal, Round, RoundState, StepDown
from .sampling import SamplingParams, stream_key
from .shaping import Decision
from .speculative import MAX_ADAPTIVE, SpeculativeDecoder, check_depth
from .state import classify
from .state.base import pad
from .stream import Step, Stream, decided_row, masked_row

READY = object()  # a row yields it where it waits for its part of a round
CONTROLS = ("active", "most", "way", "given")  # what the host says each round


class Share(NamedTuple):
    """A row's part of a round that was read."""

    accepted: int
    drafted: int
    tokens: list[int]
    row: Callable[[int], mx.array]
    rows: mx.array  # (S, T, V), of the whole batch
    slot: int
    given: int
    depth: int

    @property
    def logits(self) -> mx.array:
        return self.rows[self.slot : self.slot + 1]


class Row(Stream):
    """A stream whose rounds are those of a batch.

    While it has a slot its state is there, and ``_state`` is empty.
    """

    def __init__(self, batch: BatchIterator, depth: int, context, *args, **options):
        context.use_pace(FixedDepth(batch.width - 1))
        super().__init__(context, *args, **options)
        self.batch, self.depth = batch, depth
        self._depth_read = depth  # of the newest round that was read
        self.slot: int | None = None
        self._submitted: object = None  # the block in front of the newest round

    def _rounds(self, pending):
        if pending.counts is None and not self.host_decides:
            pending = self._mask(pending)
        while True:
            try:
                block = self._read(pending)
            except StepDown as error:
                return self._stepped_down(error, pending)
            try:
                last = self._cut(block)
            except Exception:
                yield from self._emit(block)
                raise
            yield from self._emit(block)
            if last:
                return self._row_behind(block, pending.logits)
            try:
                pending = yield READY
            except StepDown as error:
                self.context.step_down(error)
                return None

    def _read(self, pending):
        if not isinstance(pending, Share):
            return super()._read(pending)
        self._depth_read = min(self.depth, pending.depth)
        self.telemetry.target_calls += 1
        self.telemetry.draft_calls += self._drafter.forwards(self._depth_read)
        accepted, drafted, tokens, row, _, _, given, _ = pending
        return self._note(1, given, accepted, drafted, tokens, row)

    def _pause(self):
        if self.slot is not None:
            unread = self._block is self._submitted
            self._state, *behind = self.batch.take(self.slot, unread)
            self._replayable, self._rows = behind
            self._committed = self.batch.committed
            self.context.capacity = self.batch.capacity
            self.slot = None
        super()._pause()

    # What the batch asks

    def sit(self, slot: int) -> None:
        """Takes a slot: the state is there from now on."""
        self.slot, self._state = slot, {}

    def submit(self) -> None:
        """Notes that a round begins, whose share is not read yet."""
        self._submitted = self._block

    @property
    def joined(self) -> bool:
        """Whether its caches are taken apart."""
        return self._state is not None

    @property
    def state(self) -> RoundState:
        """The state to put into a slot."""
        return {k: v for k, v in self._state.items() if k not in CONTROLS}

    @property
    def length(self) -> int:
        """Tokens in the caches in front of the next round."""
        return self._length

    @property
    def round_depth(self) -> int:
        return self._depth_read

    @property
    def _own_width(self) -> int:
        return self.depth + 1

    @property
    def way(self) -> tuple:
        """How its tokens are drawn: arguments of a round."""
        return self._round.way

    @property
    def given(self) -> list[int]:
        """Forced tokens of the next round, if it is as deep as the row may have it."""
        return self.host.given(self.depth)

    @property
    def host_decides(self) -> bool:
        return self.host.decides(self._round.width)

    @property
    def masked(self) -> bool:
        """Whether its next round needs masks."""
        return self.host.masked and not self.host_decides

    @property
    def builds_ahead(self) -> bool:
        return self._builds_ahead and not self.host.masked

    def decide(self, proposal: Proposal, logits: mx.array) -> tuple[Decision, int]:
        """What its host side chooses of a block, and how many were drafted."""
        if self._round.greedy:  # whatever the rest of the batch draws with
            proposal = proposal._replace(uniforms=None)
        return self._decision(proposal, logits)

    @property
    def find_part(self) -> Callable[[tuple, int], Round]:
        """Gives the round of a way and a depth for caches such as this one's."""
        return lambda way, depth: self.batch.decoder.round_of(
            way, depth, self.context.caches, self.batch.width
        )


@dataclass
class BatchOutput:
    """What one request got from one turn of a batch.

    Args:
        id (int): As ``BatchIterator.add`` gave it.
        steps (list[Step]): Its new tokens, in order; there may be none. A step keeps
            the logits of its round, of all rows, until it is dropped.
        finish (str, optional): Why it ended: ``"stop"``, ``"length"`` or ``"error"``.
        error (Exception, optional): That of ``"error"``.
    """

    id: int
    steps: list[Step] = field(default_factory=list)
    finish: str | None = None
    error: Exception | None = None


@dataclass(eq=False)
class _Request:
    id: int
    stream: Stream
    steps: Any  # the generator of the stream
    reads_prompt: bool = True

    @property
    def slot(self) -> int | None:
        return getattr(self.stream, "slot", None)

    @property
    def in_batch(self) -> bool:
        """Whether the stream is in the middle of rounds of the batch."""
        return isinstance(self.stream, Row) and self.stream.joined


@dataclass
class _Pending:
    """A round of the batch. Without ``counts`` the host has to do with it."""

    round: BatchRound
    state: RoundState | None
    logits: mx.array
    requests: dict[int, _Request]  # by slot
    given: dict[int, int]
    parts: dict[int, int]
    hosts: set[int]  # slots whose host decides
    masked: set[int]
    counts: mx.array | None = None
    proposal: Proposal | None = None


class BatchIterator(Iterator[list[BatchOutput]]):
    """Decodes many requests together.

    Requests may be added and removed between any two turns. A turn reads the round in
    flight, takes pieces of prompts, and starts the next round. Each request has its own
    parameters, seed, processors, controller, stops and depth, and the tokens that it
    would have alone; another height of a matrix product may round otherwise, so ties
    within rounding may fall to another token. One that fails ends alone. An adaptive
    decoder chooses one depth for the whole batch, round by round; the tokens of a
    sampled row then depend on time, as those of a stream do. What no batch can have,
    such as ``kv_bits``, a ``memory`` policy of one request and models that cannot be
    traced, is decoded in turns beside it.

    It belongs to the thread that made it; see ``Scheduler`` for several threads.

    Args:
        decoder (SpeculativeDecoder): Its depth is the deepest of any row.
        max_rows (int): Requests at a time.
        prefill_step_size (int): Prompt tokens of a turn, about; of a request, at most.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> batch = BatchIterator(SpeculativeDecoder(target, drafter, 3))
        >>> ids = [batch.add(prompt, max_tokens=64) for prompt in prompts]
        >>> for outputs in batch:
        ...     for out in outputs:
        ...         print(out.id, [step.token for step in out.steps], out.finish)
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        max_rows: int = 32,
        prefill_step_size: int = 512,
    ):
        if max_rows < 1 or prefill_step_size < 1:
            raise ValueError(
                "max_rows and prefill_step_size must be positive but are "
                f"{max_rows} and {prefill_step_size}."
            )
        self.decoder, self.max_rows = decoder, max_rows
        self.prefill_step_size = prefill_step_size
        self._adaptive = decoder.depth == "adaptive"
        if self._adaptive:
            deepest = min(MAX_ADAPTIVE, decoder.drafter.max_depth)
            known = decoder.batch_costs, deepest, decoder.batch_acceptance
            self._pace = BatchDepth(*known)
        else:
            self._pace = FixedDepth(decoder.depth)
        self.width = self._pace.max_depth + 1
        self.rounds = self.row_rounds = 0  # read, and rows that they had in all
        self.capacity = 0  # tokens that a slot has room for
        self._adapters = classify(
            decoder.target.make_cache(), decoder.target.adapters, self.width
        )
        self._reads_jointly = all(getattr(a, "joint", False) for a in self._adapters)
        self._alone = self._probe()
        self._requests: dict[int, _Request] = {}
        self._outputs: dict[int, BatchOutput] = {}
        self._running: _Request | None = None
        self._next_id, self._fed = 0, -1  # the id that was fed last
        self._slots: list[_Request | None] = []
        self._state: RoundState | None = None
        self._replayable: list | None = None  # leaves behind the round in flight
        self._rows: mx.array | None = None  # and hidden rows
        self._pending: _Pending | None = None
        self._rounds: dict[tuple, BatchRound] = {}
        self._checked: set[tuple] = set()  # those that have the weights of now
        self._stale = False  # whether a round built ahead is of another state
        self._read_at: float | None = None  # None: a turn did more than a round

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def slots(self) -> int:
        """How many there are, in use or not."""
        return len(self._slots)

    @property
    def depth(self) -> int:
        """Drafts of the next round."""
        return self._pace.depth

    def add(self, prompt, *, depth: int | None = None, **options) -> int:
        """Adds a request, which begins with the next turn.

        Args:
            prompt: ``(P,)`` token ids, at least one; or a ``VisionPrompt``.
            depth (int, optional): Its drafts a round, no more than the batch's.
            options: As in ``SpeculativeDecoder.stream``.

        Returns:
            int: An id of its own.

        Raises:
            RuntimeError: There are ``max_rows`` requests already.
            TypeError, ValueError, UnsupportedCache: As in
                ``SpeculativeDecoder.stream``.
        """
        if len(self) >= self.max_rows:
            raise RuntimeError(f"The batch has its {self.max_rows} requests already.")
        if depth is not None:
            check_depth(depth, self.decoder.drafter)
            if depth > self.width - 1:
                raise ValueError(
                    f"depth must be at most {self.width - 1}, that of the batch, but "
                    f"is {depth}."
                )
        options.setdefault("prefill_step_size", self.prefill_step_size)
        found = self.decoder.stream(prompt, _make=partial(self._make, depth), **options)
        self._checked.clear()  # with a stream the decoder notices new weights
        id_ = self._next_id
        self._next_id += 1
        self._requests[id_] = _Request(id_, found.stream, found.steps)
        return id_

    def remove(self, id: int) -> bool:
        """Ends a request; False if there is none of this id. Callbacks of a request may
        end others, and itself by raising.

        A cache of the caller's holds its prompt and every token of it that was in an
        output.

        Raises:
            RuntimeError: Called by a callback of the request itself.
        """
        request = self._requests.get(id)
        if request is None:
            return False
        if request is self._running:
            raise RuntimeError(
                "[BatchIterator] A callback cannot remove its own request. Raise an "
                "exception there to end it."
            )
        del self._requests[id]
        try:
            self._leave(request)
        except BaseException:
            self._leave(request)  # a passing failure must not keep the caches
            raise
        finally:
            self._tidy()
        return True

    def telemetry(self, id: int):
        """The live ``Telemetry`` of a request."""
        return self._requests[id].stream.telemetry

    def close(self) -> None:
        """Ends every request."""
        for id_ in list(self._requests):
            self.remove(id_)
        self._tidy()

    def __next__(self) -> list[BatchOutput]:
        """One turn; it may have no news. It ends when there is no request."""
        if not self._requests:
            raise StopIteration
        self._outputs, self._stale = {}, False
        at_rest = [r for r in self._requests.values() if not r.in_batch]
        ahead = self._build(unread=True) if self._builds_ahead else None
        for request, share in self._read():
            self._advance(request, share)
        self._replayable = self._rows = None
        for request in at_rest:
            if not request.reads_prompt:
                self._advance(request)
        self._read_prompts()
        if at_rest or self._stale:
            self._read_at = None
        self._tidy()
        if self._seated:
            if ahead is None or self._stale:
                ahead = None
                ahead = self._build(unread=False)
            if ahead is not None:
                self._submit(ahead)
        return list(self._outputs.values())

    # Requests

    def _read_prompts(self) -> None:
        """Feeds pieces of prompts, newcomers in turn, until it was enough."""
        reading = [r for r in self._requests.values() if r.reads_prompt]
        reading.sort(key=lambda r: (r.id <= self._fed, r.id))
        room, some = self.prefill_step_size, []
        for request in reading:
            if room <= 0:
                break
            some.append(request)
            room -= min(request.stream.context.prompt_left, self.prefill_step_size)
            self._fed = request.id
        streams = [request.stream for request in some]
        new = [x for x in streams if isinstance(x, Row) and x.context.prompt_is_new]
        if self._reads_jointly:
            for rows in joint_groups(new, lambda row: row.context.prompt_left):
                self._read_together(rows)
        for request in some:
            self._advance(request)

    def _read_together(self, rows: list[Row]) -> None:
        """Reads new prompts in one forward. If that fails, each is read by itself."""
        with suppress(Exception), ExitStack() as stack:
            for row in rows:
                stack.enter_context(row.telemetry.phase("prefill"))
            prompts = [row.context.prompt for row in rows]
            joint = JointPrompts(self.decoder.target, self._adapters, prompts)
            for i, row in enumerate(rows):
                row.context.joint = partial(joint.take, i)

    def _make(self, depth, context: Context, *args, **options) -> Stream:
        """A row, or a stream of its own where it cannot be one."""
        reason, deepest = self._alone, self.width - 1
        if context.quantisation is not None:
            reason = "keys and values that are quantised on the way"
        elif context.memory is not None:
            reason = "a memory policy of its own"
        elif self._adapters != classify(
            context.caches, self.decoder.target.adapters, self.width
        ):
            reason = "caches of another class"
        if reason is None:
            return Row(self, depth or deepest, context, *args, **options)
        if depth is not None:
            context.use_pace(FixedDepth(depth))
        stream = Stream(context, *args, **options)
        stream.telemetry.fallback = f"beside the batch: {reason}"
        return stream

    def _advance(self, request: _Request, share=None, error=None) -> None:
        """Runs a request to where it waits: for a round, or for its next turn."""
        if request.id not in self._requests:
            return  # a callback of another one removed it
        steps, out = request.steps, None
        before, self._running = self._running, request
        try:
            item = steps.throw(error) if error is not None else steps.send(share)
            while item is not None:
                if item is READY:
                    if request.slot is None:
                        self._seat(request)
                    return
                request.reads_prompt = False
                out = out or self._output(request)
                out.steps.append(item)
                if not (request.in_batch or item.forced):
                    return
                item = next(steps)
        except StopIteration:
            stops = request.stream.stopped
            self._end(request, "stop" if stops else "length")
        except Exception as failure:
            self._end(request, "error", failure)
        finally:
            self._running = before

    def _output(self, request: _Request) -> BatchOutput:
        return self._outputs.setdefault(request.id, BatchOutput(request.id))

    def _end(self, request: _Request, finish: str, error=None) -> None:
        out = self._output(request)
        out.finish, out.error = finish, error
        del self._requests[request.id]
        try:
            self._leave(request)
        except Exception as failure:
            out.finish, out.error = "error", error or failure
            self._leave(request)  # a passing failure must not keep the caches
        if isinstance(request.stream, Row):
            self._pace.end(request.stream.telemetry.emitted - 1)

    def _leave(self, request: _Request) -> None:
        """Closes the stream, which takes its state back, and frees its slot."""
        request.steps.close()
        if request.slot is not None:
            self._slots[request.slot] = None
            request.stream.slot = None

    # Slots

    @property
    def _seated(self) -> dict[int, _Request]:
        return {i: r for i, r in enumerate(self._slots) if r is not None}

    def _seat(self, request: _Request) -> None:
        row = request.stream
        if None not in self._slots:
            self._slots += [None] * max(len(self._slots), 1)
        slot, state = self._slots.index(None), row.state
        self._reserve(row.context.capacity, row)
        round_ = row.find_part(row.way, self.width - 1)
        if row.context.capacity < self.capacity:
            state = round_.grow(state, self.capacity)
        if self._state is None:
            self._state = state
        spare = len(self._slots) - len(self._state["offset"])
        # The newest token is the last one, so it stands in the new places as well.
        tokens = self._state["tokens"]
        more = state["tokens"].shape[1] - tokens.shape[1]
        tokens = mx.pad(tokens, [(0, 0), (0, more)], mode="edge")
        batch = {**self._state, "tokens": tokens}
        batch = tree_map(partial(_with_room, spare), batch, state)
        at = mx.array([slot])
        self._state = tree_map(partial(_write, at), batch, state)
        row.sit(slot)
        self._slots[slot], self._stale = request, True

    def take(self, slot: int, unread: bool) -> tuple[RoundState, list | None, Any]:
        """Copies of the state of a row, which leaves its slot, and of the leaves and
        hidden rows behind it if the row has not read the newest round."""
        at = mx.array([slot])
        behind = (self._replayable, self._rows) if unread else (None, None)
        state, *behind = tree_map(
            lambda x: None if x is None else mx.take(x, at, axis=0),
            (self._state, *behind),
        )
        try:
            mx.eval(state, behind)
        except Exception:  # the drafter's must not keep the caches
            state = {key: state[key] for key in ("leaves", "keys")}
        self._slots[slot] = None
        return state, *behind

    @property
    def committed(self) -> bool:
        """Whether the newest state is that behind its round."""
        return self._pending is None or self._pending.counts is not None

    def _reserve(self, capacity: int, row: Row) -> None:
        """Makes room in all slots, by the round of any row."""
        if capacity <= self.capacity:
            return
        self.capacity, self._stale = capacity, True
        if self._state is not None:
            round_ = row.find_part(row.way, self.width - 1)
            self._state = round_.grow(self._state, capacity)

    def _tidy(self) -> None:
        """Gives up slots that nobody needs."""
        open_ = self._requests.values()
        self._slots = [request if request in open_ else None for request in self._slots]
        used = max(self._seated, default=-1) + 1
        if not used:
            self._slots, self._state, self._pending = [], None, None
            self._replayable = self._rows = None
            self.capacity = 0
            return
        size = len(self._slots)
        while size >= 4 * used:
            size //= 2
        if size < len(self._slots) and self._pending is None:
            self._slots = self._slots[:size]
            self._state = tree_map(lambda x: x[:size], self._state)
            self._stale = True

    # Rounds

    @property
    def _builds_ahead(self) -> bool:
        waits = self._pending is not None and self._pending.counts is not None
        return waits and all(self._answers("builds_ahead").values())

    def _answers(self, name: str) -> dict[int, Any]:
        """What the own code of each row says, by slot. It ends rows where it fails."""
        rows = self._seated.items()
        found = {i: self._ask(r, getattr, r.stream, name) for i, r in rows}
        return {i: x for i, x in found.items() if x is not None}

    def _build(self, unread: bool) -> _Pending | None:
        """The graph of the next round; ``unread`` when the last is still running."""
        try:
            return self._built(unread)
        except Exception as error:
            if not unread:
                self._fail(error)
            return None

    def _built(self, unread: bool) -> _Pending | None:
        placed, hosts, masked = map(self._answers, ("given", "host_decides", "masked"))
        seated = self._seated
        if not seated:
            self._tidy()
            return None
        rows = {i: request.stream for i, request in seated.items()}
        ways = sorted({row.way for row in rows.values()})
        if len(ways) > 1:
            ways = [way for way in ways if not way[0]]
        row = next(iter(rows.values()))
        length = max(row.length for row in rows.values())
        attended = bucket(length + self.width * (1 + unread))
        if attended > self.capacity:
            most = max(row.context.most for row in rows.values())
            self._reserve(bucket(min(2 * attended, most)), row)
        if self._adaptive:
            self._pace.set_slots(len(self._slots))
        depth = min(self.depth, max(row.depth for row in rows.values()))
        round_ = self._round(depth, ways, row)
        given = {i: placed[i][:depth] for i in rows}
        parts = {i: ways.index(r.way) if r.way in ways else 0 for i, r in rows.items()}
        state = {**self._state, **self._controls(rows, depth, given, parts, len(ways))}
        pending = _Pending(
            round_,
            state,
            None,
            seated,
            {i: len(x) for i, x in given.items()},
            parts,
            {i for i in rows if hosts[i]},
            {i for i in rows if masked[i]},
        )
        if pending.hosts or pending.masked:
            halves = round_.halves(state, attended)
            pending.proposal, pending.state, pending.logits = halves
        else:
            pending.state, result = round_(state, attended)
            pending.logits, pending.counts = result.logits, result.counts
        return pending

    def _round(self, depth: int, ways: list[tuple], row: Row) -> BatchRound:
        key = (depth, *ways)
        if key not in self._checked:
            parts = [row.find_part(way, depth) for way in ways]
            if key not in self._rounds or self._rounds[key].parts != parts:
                self._rounds[key] = BatchRound(parts)
            self._checked.add(key)
        return self._rounds[key]

    def _controls(self, rows, depth, given, parts, ways) -> dict[str, mx.array]:
        """What the host says about each slot."""
        slots = range(len(self._slots))
        controls = {
            "active": mx.array([i in rows for i in slots]),
            "most": mx.array([rows[i].depth if i in rows else 0 for i in slots]),
        }
        if ways > 1:
            controls["way"] = mx.array([parts.get(i, 0) for i in slots])
        if depth and any(row.host.places for row in rows.values()):
            placed = [given.get(i, []) for i in slots]
            placed = [[*x, *[-1] * (depth - len(x))] for x in placed]
            controls["given"] = mx.array(placed, mx.int32)
        return controls

    def _submit(self, pending: _Pending) -> None:
        adapters, leaves = pending.round.adapters, self._state["leaves"]
        self._replayable = [
            a.replayable(x) for a, x in zip(adapters, leaves, strict=True)
        ]
        self._rows = self._state.get("hidden")
        del leaves
        for request in pending.requests.values():
            if request.slot is not None:
                request.stream.submit()
        # The graph becomes the one owner of the old buffers and writes in place.
        self._state, pending.state = pending.state, None
        self._pending = pending
        try:
            if pending.proposal is not None:
                mx.async_eval(pending.proposal)  # the host reads the drafts first
            mx.async_eval(pending.counts, pending.logits, pending.proposal, self._state)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Every row goes on alone for a while, as a stream does behind an error."""
        for request in self._seated.values():
            self._advance(request, error=StepDown(f"a round failed: {error}"))
        self._pending = None
        self._tidy()

    def _read(self) -> list[tuple[_Request, Share]]:
        """Waits for the round in flight, and gives every row its part."""
        pending, decided = self._pending, {}
        if pending is None:
            return []
        try:
            if pending.counts is None:
                rows, masks, decided = self._settle(pending)
            else:
                rows, masks = pending.counts.tolist(), None
        except Exception as error:
            self._fail(error)
            return []
        self._pending = None
        self._state = {k: x for k, x in self._state.items() if k not in CONTROLS}
        self.rounds += 1
        self._measure(pending, [rows[slot][0] for slot in pending.requests])
        shares = []
        for slot, request in pending.requests.items():
            if self._slots[slot] is not request:
                continue
            self.row_rounds += 1
            accepted, drafted, *tokens = rows[slot]
            row = partial(_row, pending.logits, masks, slot)
            if slot in decided:
                row = partial(decided_row, decided[slot].logits)
            place = pending.logits, slot, pending.given.get(slot, 0)
            share = Share(accepted, drafted, tokens, row, *place, pending.round.depth)
            shares.append((request, share))
        return shares

    def _measure(self, pending: _Pending, accepted: list[int]) -> None:
        """Tells an adaptive depth what a round gave and took, if a turn was no more."""
        before, self._read_at = self._read_at, time.perf_counter()
        if self._adaptive and before and pending.round.depth == self.depth:
            seconds = self._read_at - before
            self._pace.add_rows(accepted, seconds)

    # Rows that need the host

    def _settle(self, pending: _Pending):
        """Accepts a block under masks, and lets the host of a row decide.

        Returns rows as in ``RoundResult.counts``, masks, and decisions by slot.
        """
        round_, proposal = pending.round, Proposal(*pending.proposal)
        masks = self._masks(pending)
        hosts = self._alive(pending, pending.hosts)
        if not hosts:
            self._state, counts = round_.finish(
                self._state, proposal, pending.logits, masks
            )
            pending.counts = counts
            mx.async_eval(counts, self._state)
            return counts.tolist(), masks, {}
        tokens, accepted, _ = round_.accept(
            self._state, proposal, pending.logits, masks
        )
        tokens, accepted = np.array(tokens), np.array(accepted)
        decided, drafted = {}, {}
        for slot, request in hosts.items():
            own = round_.row(proposal, slot, pending.parts[slot])
            logits = pending.logits[slot : slot + 1]
            found = self._ask(request, request.stream.decide, own, logits)
            if found is None:
                continue
            decided[slot], drafted[slot] = found
            accepted[slot] = decided[slot].accepted
            tokens[slot] = -1
            tokens[slot, : accepted[slot] + 1] = decided[slot].tokens
        self._state, counts = round_.commit(
            self._state, proposal, mx.array(tokens), mx.array(accepted)
        )
        pending.counts = counts
        mx.async_eval(counts, self._state)
        rows = counts.tolist()
        for slot, count in drafted.items():
            rows[slot][1] = count
        return rows, masks, decided

    def _masks(self, pending: _Pending) -> mx.array | None:
        """Masks ``(S, T, W)`` of a block, made while the target runs."""
        masked = self._alive(pending, pending.masked)
        if not masked:
            return None
        drafts = Drafts(*pending.proposal[0]).tokens.tolist()
        vocab, width = self.decoder.target.vocab_size, len(drafts[0]) + 1
        shape = (len(drafts), width, (vocab + 31) // 32)
        masks = np.full(shape, 0xFFFFFFFF, np.uint32)
        for slot, request in masked.items():
            own = self._ask(request, request.stream.host.block_masks, drafts[slot])
            if own is not None:
                masks[slot] = own[0]
        return mx.array(masks)

    def _alive(self, pending: _Pending, slots: set[int]) -> dict[int, _Request]:
        """The rows of a round in these slots that still are there."""
        rows = pending.requests
        return {i: rows[i] for i in sorted(slots) if self._slots[i] is rows[i]}

    def _ask(self, request: _Request, call: Callable, *args):
        """What a row's own code says; None, and the end of the row, if it fails."""
        try:
            return call(*args)
        except Exception as error:
            self._advance(request, error=error)
            return None

    def _probe(self) -> str | None:
        """Why rounds with device offsets cannot be made, if so. Computes nothing."""
        target, drafter = self.decoder.target, self.decoder.drafter
        caches, tokens = target.make_cache(), mx.zeros((1, 1), mx.int32)
        params = SamplingParams()
        order = params.filter_order
        way = (True, False, order, order)
        round_ = self.decoder.round_of(way, self.width - 1, caches, self.width)
        try:
            out = target.prefill(tokens, caches)
            pairs = zip(self._adapters, caches, strict=True)
            state, proposal = round_.begin(
                [a.adopt(c, self.width, MIN_BUCKET) for a, c in pairs],
                1,
                drafter.begin(tokens, MIN_BUCKET),
                out.hidden,
                stream_key(0),
                params.arrays(1),
                params.arrays(1),
            )
            chosen, accepted, _ = round_.accept(state, proposal, out.logits)
            state, _ = round_.commit(state, proposal, chosen, accepted)
            round_(state, MIN_BUCKET)
        except Exception as error:
            return f"no round can be traced ({error})"
        return None


def _row(logits: mx.array, masks: mx.array | None, slot: int, i: int) -> mx.array:
    """Row i of a slot, under its masks."""
    masks = None if masks is None else masks[slot : slot + 1]
    return masked_row(logits[slot : slot + 1], masks, i)


def _with_room(spare: int, x: mx.array, row: mx.array) -> mx.array:
    """``x`` with ``spare`` more slots, each with room for ``row``."""
    return _pad(x, (x.shape[0] + spare, *row.shape[1:]))


def _pad(x: mx.array, shape: Sequence[int]) -> mx.array:
    """``x`` with zeros behind it along every axis, up to ``shape``."""
    for axis, size in enumerate(shape):
        x = pad(x, size, axis)
    return x


def _write(slot: mx.array, x: mx.array, row: mx.array) -> mx.array:
    row = _pad(row, (1, *x.shape[1:]))
    return mx.slice_update(x, row, slot, axes=(0,))
