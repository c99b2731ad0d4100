"""One speculative round as a pure function of arrays.

draft -> verify -> accept -> commit. Nothing here reads a value on the host: offsets,
accepted counts and random keys are arrays, so a round is compiled once a shape and
the next one can be built while this one runs. Everything is batched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from .drafters import DraftContext, Drafts
from .ops import sample, verify_coupled, verify_draft
from .recorded import Recorded
from .sampling import FilterOrder, round_uniforms, split_keys, uniforms
from .state import Adapter, Leaves, Position
from .state.base import pad
from .targets.stepping import weights_transposed

RoundState = dict[str, Any]


class StepDown(RuntimeError):
    """There can be no round now; plain decoding can go on. The message says why."""


@contextmanager
def drafting() -> Iterator[None]:
    """Within, a failure of the drafter is a StepDown."""
    try:
        yield
    except Exception as error:
        raise StepDown(f"the drafter failed: {error}") from error


class Proposal(NamedTuple):
    """A drafted block before the target has seen it."""

    drafts: Drafts
    draft_state: Any
    # (B, K + 2): coins and the final draw; or (B,), where a coupled block begins
    uniforms: mx.array | None
    keys: mx.array


class RoundResult(NamedTuple):
    """What the host may read of a round.

    Args:
        counts (array): ``(B, T + 2)`` int32: accepted, drafted and the T tokens, as
            one array for one transfer.
        logprobs (array): ``(B, T)`` float32, as ``ops.verify_draft`` gives them.
        logits (array): ``(B, T, V)``, the target's rows.
    """

    counts: mx.array
    logprobs: mx.array
    logits: mx.array


class Round:
    """The round of one target, drafter and depth.

    Args:
        target, drafter: See their protocols.
        depth (int): K, the drafts of a round. 0 drafts nothing but keeps the drafter
            up to date.
        adapters: Of the caches, as ``classify`` gives them. Default: the target's.
        greedy (bool): Every draw is an argmax; no random numbers are made.
        coupled (bool): Noise belongs to positions, see ``ops.verify_coupled``; the
            keys are the seeds of the streams and stay as they are.
        filter_order, draft_filter_order (str): See ``SamplingParams``.

    A round takes the state that one of another depth has left, if both have the same
    adapters. ``traces`` counts how often the target was traced: once for each shape of
    the state and each attended length. It is 0 if the target cannot be traced.
    """

    def __init__(
        self,
        target,
        drafter,
        depth: int,
        adapters: Sequence[Adapter] | None = None,
        *,
        greedy: bool,
        coupled: bool = False,
        filter_order: FilterOrder = "temperature_first",
        draft_filter_order: FilterOrder | None = None,
    ):
        self.target, self.drafter, self.depth = target, drafter, depth
        self.adapters = target.adapters if adapters is None else adapters
        self.greedy, self.coupled = greedy, coupled and not greedy
        self.filter_order = filter_order
        self.draft_filter_order = draft_filter_order or filter_order
        self.width = depth + 1  # T, the tokens of a round
        self.traces = 0
        self._compiled: dict[tuple[str, int], Any] = {}
        self._constants: dict[int, tuple[mx.array, mx.array]] = {}

    @property
    def way(self) -> tuple:
        """How it draws tokens: greedy, coupled, and both filter orders."""
        orders = self.filter_order, self.draft_filter_order
        return self.greedy, self.coupled, *orders

    def begin(
        self,
        leaves: Sequence[Leaves],
        length: int,
        draft_state,
        hidden: mx.array | None,
        keys: mx.array,
        params: dict[str, mx.array],
        draft_params: dict[str, mx.array],
        limit: int | None = None,
    ) -> tuple[RoundState, Proposal]:
        """Streams whose prompt is cached, and the empty proposal for its last row.

        ``accept`` and ``commit`` of that proposal draw the first token.

        Args:
            leaves: Adopted caches, one tuple an adapter.
            length: Tokens in the caches.
            hidden: ``(B, 1, H)``, the prompt's last row.
            keys: ``(B, 2)``, one key a stream.
            params, draft_params: ``SamplingParams.arrays``.
            limit (int, optional): No round keeps rows in the caches beyond this many.
        """
        batch = keys.shape[0]
        state = {
            "leaves": list(leaves),
            "offset": mx.full((batch,), length, mx.int32),
            "draft": draft_state,
            "params": params,
            "draft_params": draft_params,
        }
        if limit is not None:
            state["limit"] = mx.full((batch,), limit, mx.int32)
        if self.drafter.needs_hidden:
            state["hidden"] = pad(hidden, self.width, axis=1)
        return state, self.no_drafts(keys, state["offset"], draft_state)

    def no_drafts(self, keys, position, draft_state=None) -> Proposal:
        """The empty proposal: ``accept`` draws a row's one token, at ``position``."""
        keys, coins = self.first_draw(keys, position)
        drafts = self._nothing(keys.shape[0])[1]
        return Proposal(Drafts(drafts), draft_state, coins, keys)

    def _nothing(self, batch: int) -> tuple[mx.array, mx.array]:
        """Coins that decide nothing, and no drafts; made once."""
        if batch not in self._constants:
            arrays = mx.zeros((batch, 2)), mx.zeros((batch, 0), mx.int32)
            mx.eval(arrays)
            self._constants[batch] = arrays
        return self._constants[batch]

    def first_draw(self, keys: mx.array, position: mx.array):
        """The next keys, and what draws a row without drafts at ``position``."""
        if self.greedy:
            return keys, None
        if self.coupled:
            return keys, position
        keys, now = split_keys(keys)
        return keys, uniforms(now, 2)

    def __call__(
        self, state: RoundState, attended: int
    ) -> tuple[RoundState, RoundResult]:
        """One round over the first ``attended`` slots, compiled."""
        return self._call("whole", self.whole, attended, state)

    def whole(self, state, attended, offset=None):
        """The round as a plain function; see ``verify`` for ``offset``."""
        proposal = self.draft(state, attended)
        verified, logits = self.verify(state, proposal, attended, offset)
        tokens, accepted, logprobs = self.accept(state, proposal, logits)
        state, counts = self.commit(verified, proposal, tokens, accepted)
        return state, RoundResult(counts, logprobs, logits)

    def halves(self, state, attended, offset=None):
        """A round up to the target's logits; ``accept`` and ``commit`` are yours."""
        proposal = Proposal(*self._call("draft", self.draft, attended, state))
        if offset is None:
            verified, logits = self._call(
                "verify", self.verify, attended, state, proposal
            )
        else:
            verified, logits = self.verify(state, proposal, attended, offset)
        return proposal, verified, logits

    def draft(self, state, attended) -> Proposal:
        """Proposes a block. ``state["given"]``, ``(B, K)``, has tokens that stand in it
        whatever the drafter says, and -1 in the other places."""
        draw, coins, keys = self.drawing(state)
        given = state.get("given")

        def place(logits, i):
            tokens, stats = draw(logits, i)
            return mx.where(given[:, i] < 0, tokens, given[:, i]), stats

        context = DraftContext(
            state["tokens"],
            state["count"],
            state.get("hidden"),
            attended,
            max(self.depth, 1),
            draw if given is None else place,
            self._shared_kv(state, attended) if self.drafter.needs_shared_kv else None,
        )
        with drafting():
            drafts, draft_state = self.drafter.propose(state["draft"], context)
        if given is not None:
            drafts = _place(given, drafts)
        if not self.depth:
            drafts = Drafts(drafts.tokens[:, :0])
        if "limit" in state:
            room = state["limit"] - state["offset"] - 1
            lengths = self.depth if drafts.lengths is None else drafts.lengths
            drafts = drafts._replace(lengths=mx.minimum(lengths, room))
        return Proposal(drafts, draft_state, coins, keys)

    def drawing(self, state):
        """What draws the drafts, as in ``DraftContext``; the coins; the next keys."""
        keys, draws, depth = state["keys"], None, max(self.depth, 1)
        coins = state["offset"] + 1 if self.coupled else None
        if not (self.greedy or self.coupled):
            keys, now = split_keys(keys)
            # Draft draws, coins and the final draw are disjoint columns.
            draws = round_uniforms(now, depth)
            coins = draws[:, 2 * depth if self.depth else -2 :]
        return partial(self._draw, state, draws), coins, keys

    def _draw(self, state, draws, logits, i):
        """``draw`` of a DraftContext; ``draws`` are the uniforms, if it takes any."""
        options = {
            **state["draft_params"],
            "filter_order": self.draft_filter_order,
        }
        if self.greedy:
            return mx.argmax(logits, axis=-1).astype(mx.int32), None
        if not self.coupled:
            return sample(logits, draws[:, 2 * i : 2 * i + 2], **options)
        tokens, _, _ = verify_coupled(
            logits[:, None],
            mx.zeros((logits.shape[0], 0), mx.int32),
            seed=state["keys"],
            position=state["offset"] + 1 + i,
            **options,
        )
        return tokens[:, 0], None

    def _shared_kv(self, state, attended):
        """Views of the target's keys and values, at the newest row that they hold."""
        position = Position(state["offset"] - 1, state["steps"], attended)
        return {
            kind: self.adapters[source.entry].view(
                state["leaves"][source.entry], position
            )
            for kind, source in self.target.shared_kv.items()
        }

    def verify(self, state, proposal, attended, offset=None):
        """The target's forward over the newest token and the drafts.

        Args:
            offset (int, optional): The cache's length as a host integer, for models
                that cannot be traced with a device offset.
        """
        newest = state["tokens"][:, -1:]
        rows = mx.concatenate([newest, Drafts(*proposal.drafts).tokens], axis=1)
        known = rows.astype(mx.uint32) < self.target.vocab_size
        rows = mx.where(known, rows, newest)
        position = Position(
            state["offset"] if offset is None else offset,
            state["steps"],
            attended if offset is None else offset + self.width,
        )
        views = [
            adapter.view(leaves, position)
            for adapter, leaves in zip(self.adapters, state["leaves"], strict=True)
        ]
        out = self.target.forward(rows, views)
        verified = {
            **state,
            "leaves": [
                adapter.collect(view)
                for adapter, view in zip(self.adapters, views, strict=True)
            ],
        }
        if "hidden" in state:
            if out.hidden is None:
                raise StepDown("the model gave no hidden rows")
            verified["hidden"] = out.hidden
        if offset is None:
            self.traces += 1
        return verified, out.logits

    def finish(self, state, proposal, logits, allowed):
        """``accept`` under masks and ``commit``, compiled: the state and its counts."""
        return self._call("finish", self._finish, 0, state, proposal, logits, allowed)

    def _finish(self, state, proposal, logits, allowed, attended):
        proposal = Proposal(*proposal)
        tokens, accepted, _ = self.accept(state, proposal, logits, allowed)
        return self.commit(state, proposal, tokens, accepted)

    def accept(self, state, proposal, logits, allowed=None):
        """Exact acceptance: tokens and logprobs ``(B, T)``, accepted ``(B,)``.

        Args:
            allowed (array, optional): Masks ``(B, T, ceil(V / 32))`` uint32.
        """
        drafts, batch = Drafts(*proposal.drafts), logits.shape[0]
        coins = proposal.uniforms
        if self.coupled:
            return verify_coupled(
                logits,
                drafts.tokens,
                seed=proposal.keys,
                position=coins,
                draft_lengths=drafts.lengths,
                **state["params"],
                filter_order=self.filter_order,
                allowed=allowed,
            )
        if coins is None:
            depth = drafts.tokens.shape[1]
            coins = mx.zeros((batch, depth + 2)) if depth else self._nothing(batch)[0]
        return verify_draft(
            logits,
            drafts.tokens,
            drafts.logits,
            uniforms=coins,
            draft_stats=drafts.stats,
            draft_lengths=drafts.lengths,
            **state["params"],
            filter_order=self.filter_order,
            allowed=allowed,
        )

    def commit(self, verified, proposal, tokens, accepted):
        """The next state, and counts as in RoundResult.

        A flagged row (accepted -1) keeps its caches as they were.
        """
        drafts, count = Drafts(*proposal.drafts), accepted + 1
        depth = drafts.tokens.shape[1]
        # In front of the first commit the prompt's last row is in the caches already.
        steps = count if "count" in verified else mx.zeros_like(count)
        spare = self.width - tokens.shape[1]
        if spare:
            tokens = mx.pad(tokens, [(0, 0), (0, spare)], constant_values=mx.array(-1))
        newest = mx.take_along_axis(tokens, mx.maximum(accepted, 0)[:, None], axis=1)
        state = {
            **verified,
            "offset": verified["offset"] + steps,
            "steps": steps,
            "draft": proposal.draft_state,
            # What stands behind them is embedded too, so it must be a token in use.
            "tokens": mx.where(tokens < 0, mx.maximum(newest, 0), tokens),
            "count": count,
            "keys": proposal.keys,
        }
        lengths = drafts.lengths
        if lengths is None:
            lengths = mx.full(accepted.shape, depth, mx.int32)
        counts = mx.concatenate([accepted[:, None], lengths[:, None], tokens], axis=1)
        return state, counts

    def grow(self, state: RoundState, capacity: int) -> RoundState:
        """The same state with room for ``capacity`` tokens."""
        with drafting():
            draft_state = self.drafter.grow(state["draft"], capacity)
        return {
            **state,
            "leaves": [
                adapter.grow(leaves, capacity)
                for adapter, leaves in zip(self.adapters, state["leaves"], strict=True)
            ],
            "draft": draft_state,
        }

    def _call(self, name, function, attended, *args):
        key = (name, attended)
        if key not in self._compiled:
            self._compiled[key] = compiled(function, attended)
        return self._compiled[key](*args)


def compiled(function, attended: int):
    """A part of a round, compiled and recorded for a prefix of this length."""

    def traced(*args):
        with weights_transposed():
            return function(*args, attended)

    return Recorded(mx.compile(traced))


def _place(given: mx.array, drafts: Drafts) -> Drafts:
    """The drafts with given tokens ``(B, K)`` in them, as the point masses they are."""
    free = given < 0
    tokens, logits, stats, lengths = drafts
    tokens = mx.where(free, tokens, given)
    if logits is not None:
        points = mx.arange(logits.shape[-1]) == given[..., None]
        points = mx.where(points, 0.0, -mx.inf).astype(logits.dtype)
        logits = mx.where(free[..., None], logits, points)
    if stats is not None:
        # The log of their sum is 0, and so is their threshold.
        stats = mx.where(free[..., None], stats, mx.array([0.0, 0.0, 1.0]))
    if lengths is not None:
        count = (~free).sum(axis=1).astype(lengths.dtype)
        lengths = mx.where(count > 0, count, lengths)
    return Drafts(tokens, logits, stats, lengths)


def stack_states(states: Sequence[RoundState]) -> RoundState:
    """Rows of several streams as one batch. All must have the same shapes."""
    first = states[0]
    if isinstance(first, dict):
        return {key: stack_states([s[key] for s in states]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(stack_states(x) for x in zip(*states, strict=True))
    return mx.concatenate(list(states), axis=0)
