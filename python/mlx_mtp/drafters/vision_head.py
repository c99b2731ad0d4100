"""Drafting with an MTP head behind images, at the positions of their target."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from ..heads import MTPHead
from ..heads.rotation import Shift
from .mtp_head import MTPHeadDrafter


def head_drafter(
    head: MTPHead, target, vocabulary: Iterable[int] | None = None
) -> MTPHeadDrafter:
    """The drafter with a head for a target, be it one of text or of images."""
    kind = VisionHeadDrafter if hasattr(target, "axes") else MTPHeadDrafter
    return kind(head, target, vocabulary)


class VisionHeadDrafter(MTPHeadDrafter):
    """An ``MTPHeadDrafter`` whose rows are rotated as those of a vision target.

    Rows of a prompt with images read the features of these and have their positions
    along three axes. Its state has one array more: how far the positions of text are
    from its slots, ``(B,)``.
    """

    reads_images = True

    def begin(self, prompt, capacity):
        delta = mx.zeros((prompt.shape[0],), mx.int32)
        return *super().begin(prompt, capacity), delta

    def prefill(self, state, following, hidden, attended, part=None):
        *state, delta = state
        shift, embeds = delta, None
        if part is not None:
            shift, embeds = delta[:, None] + part.shift, part.embeds
            delta = delta + part.delta
        shift = Shift(shift, self.target.axes)
        state = super().prefill(state, following, hidden, attended, shift, embeds)
        return *state, delta

    def rewind(self, state, count):
        *state, delta = state
        state = super().rewind(state, count)
        return None if state is None else (*state, delta)

    def propose(self, state, context):
        *state, delta = state
        shift = Shift(delta, self.target.axes)
        drafts, state = super().propose(state, context, shift)
        return drafts, (*state, delta)
