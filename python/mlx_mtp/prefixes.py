"""What prompt caches hold and a drafter knows of it, also in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from .drafters import Drafter
from .drafters.base import DrafterState


@dataclass(frozen=True)
class CachedPrefix:
    """What the caches of a stream at rest hold, and its drafter knows of it.

    A stale one costs acceptance only: drafts never change the distribution.
    """

    length: int  # tokens in the caches
    tokens: mx.array  # (N,), the known ones of them, to the newest
    draft_state: DrafterState | None  # None: lost, or made from the tokens alone
    hidden: mx.array | None  # (1, 1, H), the row of the newest token


def save_prefix(file: str, prefix: CachedPrefix | None, drafter: Drafter) -> None:
    """Writes a prefix; without one, an earlier file is removed."""
    if prefix is None:
        Path(file).unlink(missing_ok=True)
        return
    arrays = {"tokens": prefix.tokens}
    if prefix.hidden is not None:
        arrays["hidden"] = prefix.hidden
    if prefix.draft_state is not None and drafter.needs_hidden:
        leaves = tree_flatten(prefix.draft_state)
        arrays |= {f"state.{i}": x for i, (_, x) in enumerate(leaves)}
    metadata = {"drafter": drafter.name, "length": str(prefix.length)}
    mx.save_safetensors(file, arrays, metadata)


def load_prefix(file: str, drafter: Drafter) -> CachedPrefix | None:
    """Reads a prefix; None if there is no file, or it is of another drafter."""
    if not Path(file).exists():
        return None
    arrays, metadata = mx.load(file, return_metadata=True)
    mx.eval(arrays)  # another thread may go on
    if metadata.get("drafter") != drafter.name:
        return None
    tokens, state = arrays["tokens"], None
    if drafter.needs_hidden:
        state = _state(arrays, drafter.begin(tokens[None, :0], 1))
        if state is None:
            return None
    return CachedPrefix(int(metadata["length"]), tokens, state, arrays.get("hidden"))


def _state(arrays: dict[str, mx.array], like: DrafterState) -> DrafterState | None:
    """Arrays in the form of a state; None if they are of another one.

    A state may have any length along one axis of its arrays.
    """
    shapes = [x for _, x in tree_flatten(like)]
    found = [arrays.get(f"state.{i}") for i in range(len(shapes))]
    for x, wanted in zip(found, shapes, strict=True):
        if x is None or x.dtype != wanted.dtype or x.ndim != wanted.ndim:
            return None
        pairs = zip(x.shape, wanted.shape, strict=True)
        if sum(a != b for a, b in pairs) > 1:
            return None
    leaves = iter(found)
    return tree_map(lambda _: next(leaves), like)
