"""The drafter protocol: what a round asks of anything that proposes tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

DrafterState = Any  # a tree of arrays, owned by the loop


class DrafterMismatch(ValueError):
    """A drafter and a target that do not fit. The message names what differs."""


class Drafts(NamedTuple):
    """The proposals of one round.

    Args:
        tokens (array): ``(B, K)`` int32.
        logits (array, optional): ``(B, K, V)``, the rows that the tokens were drawn
            from. ``None`` for point masses, such as copied tokens.
        stats (array, optional): ``(B, K, 3)`` float32, as ``ops.sample`` gives them.
        lengths (array, optional): ``(B,)`` int32, how many of the K tokens are
            proposals. ``None`` is K.
    """

    tokens: mx.array
    logits: mx.array | None = None
    stats: mx.array | None = None
    lengths: mx.array | None = None

    @classmethod
    def stack(
        cls,
        tokens: Sequence[mx.array],
        rows: Sequence[mx.array],
        stats: Sequence[mx.array | None],
    ) -> Drafts:
        """The proposals of K draws, from rows ``(B, V)``."""
        tokens = mx.stack(list(tokens), axis=1)
        if stats[0] is None:
            return cls(tokens)
        return cls(tokens, mx.stack(list(rows), axis=1), mx.stack(list(stats), axis=1))


@dataclass(frozen=True)
class DraftContext:
    """Everything a drafter gets for one round, all of it arrays of the last round.

    Args:
        tokens (array): ``(B, T)`` int32, the tokens emitted, newest at ``count - 1``
            and again behind it.
        count (array): ``(B,)`` int32, how many they are.
        hidden (array, optional): ``(B, T, H)``, the target's hidden rows; row i is
            the one that predicted ``tokens[:, i]``.
        attended (int): Static bound of the cache slots in use.
        depth (int): K, how many tokens to propose.
        draw (callable): ``draw(logits (B, V), i)`` draws the token of slot i from the
            stream's draft distribution: tokens ``(B,)`` and stats ``(B, 3)`` or None.
        shared_kv (dict, optional): The target's keys and values by kind of attention:
            views whose ``offset`` is the position in front of the newest token.
    """

    tokens: mx.array
    count: mx.array
    hidden: mx.array | None
    attended: int
    depth: int
    draw: Callable[[mx.array, int], tuple[mx.array, mx.array | None]]
    shared_kv: Mapping[str, Any] | None = None


class Drafter(Protocol):
    """Proposes the next K tokens of each sequence.

    A drafter holds weights and settings only. What belongs to one stream is a tree
    of arrays that the loop owns and passes in.

    Attributes:
        name: For telemetry and messages.
        max_depth: The largest K it is good for.
        needs_hidden: Whether it reads the target's hidden rows.
        needs_shared_kv: Whether it attends to the target's keys and values.
        greedy_only: Whether its proposals are points, never draws.
        rewind (optional): ``rewind(state, count)`` is the state without its newest
            ``count`` tokens, or None. Without it a stream that its caller closes in
            the middle starts the drafter anew at the next turn.
        resume (optional): ``resume(state, tokens (1, N), capacity)`` is what ``begin``
            gives for these tokens, from the state behind the first of them. For
            drafters that read tokens alone, where that is dear.
        trim (with ``resume``): ``trim(state, length)`` is the state behind at most the
            first ``length`` tokens, or None.
        reads_images (optional): Whether ``prefill`` takes one argument more for a
            prompt with images, what ``PromptPart.pairs`` gives.
    """

    name: str
    max_depth: int
    needs_hidden: bool
    needs_shared_kv: bool
    greedy_only: bool

    def check(self, target: Any) -> None:
        """Raises DrafterMismatch when it cannot draft for ``target``."""

    def weights(self) -> Any:
        """The tree of arrays that its forwards read, beside those of the target."""

    def forwards(self, depth: int) -> int:
        """Forwards of its own that one round of ``depth`` drafts costs."""

    def begin(self, prompt: mx.array, capacity: int) -> DrafterState:
        """The state of new streams over ``prompt`` ``(B, P)``."""

    def prefill(
        self,
        state: DrafterState,
        following: mx.array,
        hidden: mx.array | None,
        attended: int,
    ) -> DrafterState:
        """Takes prompt rows: ``hidden`` ``(B, N, H)`` and the tokens after each.

        ``attended`` bounds the slots in use with these rows.
        """

    def propose(
        self, state: DrafterState, context: DraftContext
    ) -> tuple[Drafts, DrafterState]:
        """Commits the last round's tokens to its state and drafts the next ones."""

    def grow(self, state: DrafterState, capacity: int) -> DrafterState:
        """The same state with room for ``capacity`` tokens."""
