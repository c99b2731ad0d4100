"""A prompt with images, as its target reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np


class PlaceholderMismatch(ValueError):
    """A prompt whose placeholders are not those that its images take."""


class PromptPart(NamedTuple):
    """N tokens of a prompt with images.

    Args:
        embeds (array): ``(1, N, H)``, what the model reads in place of embeddings.
        shift (array): ``(3, 1, N + 1)`` int32, how far the positions of the token in
            front of the part, and of its own, are from where text would be.
        delta (array): ``(1,)`` int32, how far those of text behind the part are.
    """

    embeds: mx.array
    shift: mx.array
    delta: mx.array

    def pairs(self, skip: int) -> PromptPart:
        """For rows that each join a token's hidden row with the token behind it: the
        embeddings of these, the shifts of those; without the first ``skip``."""
        shift = self.shift[..., skip:-1]
        return self._replace(embeds=self.embeds[:, skip:], shift=shift)


@dataclass(frozen=True, eq=False)
class VisionPrompt:
    """A prompt with images, for ``stream_generate`` and decoders in place of token ids.

    What is in the caches in front of it shifts its positions, so it may be any turn.

    Args:
        tokens (array): ``(P,)`` int32, with a placeholder for each image feature.
        embeds (array): ``(1, P, H)``, their embeddings, the features in their places.
        positions (array): ``(3, P)`` int32 of NumPy, along time, height and width, from
            0.

    Raises:
        TypeError: An array is none, or of another kind of dtype.
        ValueError: A shape is another one, or a position is negative.
    """

    tokens: mx.array
    embeds: mx.array
    positions: np.ndarray

    def __post_init__(self):
        size = getattr(self.tokens, "size", 0)
        width = getattr(self.embeds, "shape", ())[-1:]
        for name, module, kind, shape in (
            ("tokens", mx, "integer", (size,)),
            ("embeds", mx, "floating", (1, size, *width)),
            ("positions", np, "integer", (3, size)),
        ):
            x, array = getattr(self, name), type(module.array(0))
            if not isinstance(x, array) or not module.issubdtype(
                x.dtype, getattr(module, kind)
            ):
                raise TypeError(
                    f"[VisionPrompt] {name} must be a {module.__name__} array of "
                    f"{kind} dtype but is {getattr(x, 'dtype', type(x))}."
                )
            if tuple(x.shape) != shape:
                raise ValueError(
                    f"[VisionPrompt] {name} must have shape {shape} but has shape "
                    f"{tuple(x.shape)}."
                )
        if self.positions.min(initial=0) < 0:
            raise ValueError("[VisionPrompt] positions must not be negative.")

    def __len__(self) -> int:
        return self.tokens.size

    @classmethod
    def of(cls, model, **inputs: Any) -> VisionPrompt:
        """Runs the vision tower of a model over what its processor made of a prompt.

        Args:
            model: A model of ``mlx_vlm``, of a family with a vision target.
            inputs: What ``mlx_vlm.prepare_inputs`` gives for one prompt.

        Raises:
            PlaceholderMismatch: A block of placeholders is not as long as its image
                has features, or there are images or placeholders alone.
            UnsupportedHead: The family has no target.
            TypeError: An input is no array, or of another kind of dtype.
            ValueError: There are several prompts, a shape or a grid does not fit, or
                the model takes no images.

        Example:
            >>> inputs = mlx_vlm.prepare_inputs(processor, ["cat.png"], prompts=text)
            >>> prompt = VisionPrompt.of(model, **inputs)
            >>> for response in stream_generate(model, processor, prompt):
            ...     print(response.text, end="")
        """
        from . import as_target

        target = as_target(model)
        if not hasattr(target, "read"):
            raise ValueError(
                f"[VisionPrompt] A {type(target).__name__} takes no images."
            )
        return target.read(**inputs)

    def part(self, start: int, stop: int) -> PromptPart:
        """The tokens from ``start`` to ``stop``, without the latter."""
        before = self._delta(start)
        places = np.arange(start - 1, stop)
        shift = np.zeros((3, stop - start + 1), np.int32)
        known = places >= 0
        shift[:, known] = self.positions[:, places[known]] - places[known] - before
        return PromptPart(
            self.embeds[:, start:stop],
            mx.array(shift)[:, None],
            mx.array([self._delta(stop) - before], mx.int32),
        )

    def _delta(self, length: int) -> int:
        """How far text behind the first tokens is from where their slots end."""
        if not length:
            return 0
        return int(self.positions[:, :length].max()) + 1 - length
