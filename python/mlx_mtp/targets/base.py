"""The target protocol: what a round asks of the model that is sped up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ..state import Adapter


class TargetOutput(NamedTuple):
    """One forward, both lazy: what nobody reads is not computed.

    Args:
        logits (array): ``(B, T, V)``.
        hidden (array, optional): ``(B, T, H)``, the rows that ``logits`` came from,
            or those before the final norm where the family's heads read these.
    """

    logits: mx.array
    hidden: mx.array | None = None


class SharedKV(NamedTuple):
    """Keys and values of a target that drafters may read.

    Args:
        entry (int): The prompt cache entry that holds them.
        heads (int): Heads of the keys.
        head_dim (int): Width of a head.
    """

    entry: int
    heads: int
    head_dim: int


class Target(Protocol):
    """A causal model whose state can be rolled back.

    Attributes:
        vocab_size: V.
        hidden_size: H, ``None`` if it gives no hidden rows.
        adapters: One state adapter for each entry of a prompt cache.
        shared_kv (optional): A dict of ``SharedKV`` by kind of attention, for drafters
            that attend to them.
        axes (optional): ``(D / 2,)``, the axis of an image that each frequency of the
            rotation turns with. Such a target has a method ``read`` that makes a
            ``VisionPrompt`` of a processor's outputs, and its ``prefill`` takes a
            ``PromptPart`` as a third argument.
        output (optional): The layer that makes ``logits``, a linear layer or an
            embedding, for drafts from a part of the vocabulary.
        step (optional): ``prefill`` of one row of one stream, made faster.
        projects (optional): Whether ``logits(out.hidden)`` are ``out.logits``, so that
            those of a few rows can be had alone.
    """

    vocab_size: int
    hidden_size: int | None
    adapters: Sequence[Adapter]

    def make_cache(self) -> list[Any]:
        """A new prompt cache."""

    def prefill(self, tokens: mx.array, caches: Sequence[Any]) -> TargetOutput:
        """Feeds ``tokens`` ``(B, T)`` through the model's own caches."""

    def forward(self, tokens: mx.array, views: Sequence[Any]) -> TargetOutput:
        """Feeds ``tokens`` ``(B, T)`` through the views of a round."""

    def weights(self) -> Any:
        """The tree of arrays that its forwards read."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Input embeddings ``(..., H)``, for drafters that share them."""

    def logits(self, hidden: mx.array) -> mx.array:
        """The output projection of hidden rows, for drafters that share it."""
