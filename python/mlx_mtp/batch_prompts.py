"""Prompts of several newcomers of a batch, read in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from .state import Adapter
from .targets import TargetOutput

FORWARD = 32  # one more forward costs about as much as so many tokens

T = TypeVar("T")


def joint_groups(rows: Sequence[T], length: Callable[[T], int]) -> list[list[T]]:
    """Rows of prompts that are worth reading together: padding costs less than another
    forward. Those that are read best by themselves are left out."""
    groups: list[list[T]] = []
    for row in sorted(rows, key=length):
        group = groups[-1] if groups else []
        if group and len(group) * (length(row) - length(group[-1])) < FORWARD:
            group.append(row)
        else:
            groups.append([row])
    return [group for group in groups if len(group) > 1]


class JointPrompts:
    """Whole prompts, padded on the right, behind one forward through empty caches.

    A row attends to nothing behind it and recurrent states stop at each length, so
    every row is what its prompt gives alone.

    Args:
        target (Target): The model.
        adapters: Of its caches; all of them are ``joint``.
        prompts: ``(P,)`` token ids each.
    """

    def __init__(self, target, adapters: Sequence[Adapter], prompts: list[mx.array]):
        self._adapters = adapters
        self._lengths = [prompt.size for prompt in prompts]
        width, ends = max(self._lengths), mx.array(self._lengths) - 1
        # Padded with a token in use: the embedding of any other may be NaN.
        tokens = [mx.pad(x, (0, width - x.size), mode="edge") for x in prompts]
        self._caches = target.make_cache()
        if width > min(self._lengths):
            for adapter, cache in self._parts():
                adapter.set_lengths(cache, self._lengths)
        out = target.prefill(mx.stack(tokens), self._caches)
        projects = getattr(target, "projects", False)
        rows = out.hidden if projects else out.logits
        last = mx.take_along_axis(rows, ends[:, None, None], axis=1)
        self._logits = target.logits(last) if projects else last
        self._hidden = out.hidden
        arrays = [a.arrays(c) for a, c in self._parts()]
        mx.eval(self._logits, self._hidden, arrays)

    def take(self, row: int, caches: Sequence[Any]) -> TargetOutput:
        """Fills a row's own caches; its hidden rows and the logits of the last one."""
        length, at = self._lengths[row], slice(row, row + 1)
        for (adapter, cache), into in zip(self._parts(), caches, strict=True):
            adapter.take_row(cache, row, length, into)
        hidden = None if self._hidden is None else self._hidden[at, :length]
        return TargetOutput(self._logits[at], hidden)

    def _parts(self):
        return zip(self._adapters, self._caches, strict=True)
