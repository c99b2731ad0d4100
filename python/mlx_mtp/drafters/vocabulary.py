"""Drafts from a part of the vocabulary: the rest of the output head is not read.

A token outside has draft probability 0. It can still be emitted, as a correction or a
bonus, so the distribution stays the target's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..heads.output import HeadRows


class VocabularyPart:
    """Output projections over a part of the vocabulary.

    Args:
        ids: The tokens of the part.
        size (int): V.
        heads: The projections; their rows are copied, once if they are the same.
    """

    def __init__(self, ids: Iterable[int], size: int, heads: Sequence[nn.Module]):
        self.ids, self.size = check_vocabulary(ids, size), size
        parts = {id(head): HeadRows(head, self.ids) for head in heads}
        self._heads = [parts[id(head)] for head in heads]
        mx.eval(self.weights())  # a compiled round has them as constants

    def weights(self) -> list:
        """The tree of arrays that ``logits`` reads."""
        return [head.parameters() for head in self._heads]

    def logits(self, rows: mx.array, head: int = 0) -> mx.array:
        """Logits ``(..., V)`` of rows ``(..., H)``, -inf outside of the part."""
        return spread(self._heads[head](rows), self.ids, self.size)


def spread(logits: mx.array, ids: mx.array, size: int) -> mx.array:
    """Logits ``(..., S)`` of ``ids`` as rows ``(..., size)``, -inf elsewhere.

    ``ids`` is ``(S,)``, or one set a row.
    """
    rows = mx.full((*logits.shape[:-1], size), -mx.inf, logits.dtype)
    return mx.put_along_axis(rows, mx.broadcast_to(ids, logits.shape), logits, axis=-1)


def check_vocabulary(ids: Iterable[int], size: int) -> mx.array:
    """The ids of a draft vocabulary in order, each once, as ``(S,)`` int32.

    Raises:
        ValueError: There are none, or one is outside of ``[0, size)``.
    """
    ids = sorted({int(i) for i in ids})
    if not ids:
        raise ValueError("A draft vocabulary needs at least one token id.")
    if ids[0] < 0 or ids[-1] >= size:
        raise ValueError(
            f"A draft vocabulary has token id {ids[0] if ids[0] < 0 else ids[-1]}, "
            f"outside of the vocabulary of {size}."
        )
    return mx.array(ids, mx.int32)


def draft_vocabulary(
    tokenizer, size: int, counts: Mapping[int, float] | str | Path | None = None
) -> list[int]:
    """The ids of the ``size`` most frequent tokens, for the drafters' ``vocabulary``.

    The tokens that end a text are always among them.

    Args:
        tokenizer: Gives ``get_vocab()`` and ``eos_token_ids``.
        size (int): How many, at least one; all of them if there are fewer.
        counts (dict or path, optional): How often each id occurs, or a JSON file of
            an object ``{"id": count}``; ids that it lacks come last. Without counts a
            lower id is taken to be more frequent, as in vocabularies made by merges.
            Equal counts go by id.

    Returns:
        list: Ids in ascending order.

    Raises:
        ValueError: ``size`` is not positive, or the file is no such object.

    Example:
        >>> ids = draft_vocabulary(tokenizer, 32768)
        >>> MTPHeadDrafter(head, target, vocabulary=ids)
    """
    if not isinstance(size, Integral) or size < 1:
        raise ValueError(
            f"The size of a draft vocabulary must be positive but is {size}."
        )
    known = set(tokenizer.get_vocab().values())
    counts = _read_counts(counts)
    ranked = sorted(known, key=lambda i: (-counts.get(i, 0), i))
    ends = sorted(known.intersection(tokenizer.eos_token_ids))[:size]
    others = [i for i in ranked if i not in ends]
    return sorted([*ends, *others[: size - len(ends)]])


def _read_counts(counts) -> dict[int, float]:
    if counts is None or isinstance(counts, Mapping):
        return dict(counts or {})
    try:
        return {
            int(i): float(n) for i, n in json.loads(Path(counts).read_text()).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{counts} must be a JSON object {{"id": count}}: {error}.'
        ) from error
