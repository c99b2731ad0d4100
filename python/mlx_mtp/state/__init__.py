"""Device state of a stream: adopt a user's caches, give them back exact.

A round must not know on the host how many drafts were accepted. So every cache
becomes a tuple of arrays (its leaves) that a round maps to new leaves from device
offsets alone, and the model sees a view of them that behaves like its own cache.
One adapter a cache class; caches are recognised by class name, so that this package
does not import the one that defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .base import Adapter, Leaves, Position, UnsupportedCache
from .compound import ListAdapter, newest
from .kv import BatchAdapter, ConcatenateAdapter, KVAdapter, KVView, QuantizedAdapter
from .positions import DeltaAdapter
from .recurrent import (
    GatedDeltaAdapter,
    GatedDeltaView,
    SteppedAdapter,
    SteppedView,
    check_stepped,
)
from .window import BatchRotatingAdapter, ChunkedAdapter, RotatingAdapter

__all__ = [
    "Adapter",
    "DeltaAdapter",
    "GatedDeltaAdapter",
    "GatedDeltaView",
    "KVAdapter",
    "KVView",
    "Leaves",
    "ListAdapter",
    "Position",
    "RotatingAdapter",
    "SteppedAdapter",
    "SteppedView",
    "UnsupportedCache",
    "cached_tokens",
    "check_stepped",
    "classify",
    "newest",
]

KV_ADAPTERS = {
    adapter.cache_class: adapter
    for adapter in (
        KVAdapter,
        ConcatenateAdapter,
        QuantizedAdapter,
        RotatingAdapter,
        ChunkedAdapter,
        BatchAdapter,
        BatchRotatingAdapter,
    )
}


def classify(
    caches: Sequence[Any], expected: Sequence[Adapter], width: int = 1
) -> tuple[Adapter, ...]:
    """The adapter of every cache, decided before any of them is touched.

    Args:
        caches: One cache a layer, as the model made them.
        expected: The adapters of the target's layers. Where it is one of keys and
            values, a cache of any class of these will do.
        width: Rows of a round.

    Raises:
        UnsupportedCache: A cache is not of a class that its layer can take.
        ValueError: There are too few caches or too many.
    """
    if len(caches) != len(expected):
        raise ValueError(
            f"The prompt cache has {len(caches)} entries but the model has "
            f"{len(expected)} layers with state."
        )
    return tuple(
        _classify(cache, adapter, width, f"Prompt cache entry {i}")
        for i, (cache, adapter) in enumerate(zip(caches, expected, strict=True))
    )


def _classify(cache, expected: Adapter, width: int, where: str) -> Adapter:
    name = type(cache).__name__
    adapter = KV_ADAPTERS.get(name) if isinstance(expected, KVAdapter) else None
    if adapter is None and name != expected.cache_class:
        raise UnsupportedCache(
            f"{where} is a {name}, which cannot be rolled back to the accepted drafts; "
            f"{expected.cache_class} can."
        )
    padding = getattr(cache, "left_padding", None)
    padded = padding is not None and (adapter is None or padding.size != 1)
    if padded or getattr(cache, "lengths", None) is not None:
        raise UnsupportedCache(
            f"{where} holds padded batch rows; give each row a cache of its own."
        )
    if adapter is not None:
        return adapter.of(cache, width)
    if not isinstance(expected, ListAdapter):
        return expected
    if len(cache.caches) != len(expected.parts):
        raise UnsupportedCache(
            f"{where} has {len(cache.caches)} parts in place of {len(expected.parts)}."
        )
    return ListAdapter(
        tuple(
            _classify(part, adapter, width, f"{where}, part {i},")
            for i, (part, adapter) in enumerate(
                zip(cache.caches, expected.parts, strict=True)
            )
        )
    )


def cached_tokens(caches: Sequence[Any]) -> int | None:
    """Tokens in the caches, None where none of them counts."""
    counts = []
    for cache in caches:
        if hasattr(cache, "caches"):
            counts.append(cached_tokens(cache.caches))
        elif hasattr(cache, "offset"):
            offset = cache.offset
            counts.append(offset.item() if isinstance(offset, mx.array) else offset)
    return max((n for n in counts if n is not None), default=None)
