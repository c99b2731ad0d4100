"""Sampling parameters of a stream and the uniforms that its draws consume."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import mlx.core as mx

FLOAT32_MAX = 3.4028234e38
FLOAT32_TINY = 1.1754944e-38

FilterOrder = Literal["temperature_first", "temperature_last"]


@dataclass(frozen=True)
class SamplingParams:
    """The shaped distribution that a stream is drawn from.

    ``temperature_first`` (Hugging Face, vLLM) divides by the temperature, then
    filters by ``top_k``, ``top_p`` and ``min_p`` in this order;
    ``temperature_last`` (``mlx_lm``) filters the row at temperature 1 by ``top_p``,
    ``min_p`` and ``top_k``, then divides. Ties at a threshold are all kept.

    Args:
        temperature (float): 0 is greedy: the argmax, lowest id on ties.
        top_k (int): Keep the k largest logits. 0 is off.
        top_p (float): Keep the smallest set with this mass. 1 is off.
        min_p (float): Keep tokens with at least this fraction of the largest
            probability. 0 is off.
        filter_order (str): ``temperature_first`` or ``temperature_last``.

    Raises:
        ValueError: A value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filter_order: FilterOrder = "temperature_first"

    def __post_init__(self):
        if not 0 <= self.temperature <= FLOAT32_MAX:
            raise ValueError(
                "temperature must be at least 0 and finite in float32 but is "
                f"{self.temperature}."
            )
        if not 0 <= self.top_k < 2**31 or int(self.top_k) != self.top_k:
            raise ValueError(
                f"top_k must be an integer in [0, 2**31) but is {self.top_k}."
            )
        if not FLOAT32_TINY <= self.top_p <= 1:
            raise ValueError(
                f"top_p must be in (0, 1], in float32, but is {self.top_p}."
            )
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1] but is {self.min_p}.")
        if self.filter_order not in ("temperature_first", "temperature_last"):
            raise ValueError(
                "filter_order must be 'temperature_first' or 'temperature_last' "
                f"but is {self.filter_order!r}."
            )

    @property
    def greedy(self) -> bool:
        """Whether every draw is the argmax."""
        return self.temperature == 0

    def arrays(self, batch: int) -> dict[str, mx.array]:
        """The numeric parameters as arrays of shape ``(batch,)``."""
        return {
            "temperature": mx.array([self.temperature] * batch, mx.float32),
            "top_k": mx.array([self.top_k] * batch, mx.int32),
            "top_p": mx.array([self.top_p] * batch, mx.float32),
            "min_p": mx.array([self.min_p] * batch, mx.float32),
        }


def stream_key(seed: int | None = None) -> mx.array:
    """The key of one stream, ``(1, 2)`` uint32.

    Without a seed it comes from MLX's global state, so that ``mx.random.seed``
    makes a program reproducible.
    """
    check_seed(seed)
    if seed is None:
        return mx.random.randint(0, 2**31 - 1, (1, 2)).astype(mx.uint32)
    return mx.random.key(seed)[None]


def check_seed(seed: int | None) -> None:
    """Raises ValueError unless ``seed`` is None or an int in [0, 2**64)."""
    if seed is None or (isinstance(seed, Integral) and 0 <= seed < 2**64):
        return
    raise ValueError(f"seed must be an integer in [0, 2**64) but is {seed!r}.")


def split_keys(keys: mx.array) -> tuple[mx.array, mx.array]:
    """Splits each key of ``keys`` ``(B, 2)``: the next keys and the ones to use now."""
    pairs = mx.vmap(mx.random.split)(keys)  # (B, 2, 2)
    return pairs[:, 0], pairs[:, 1]


def uniforms(keys: mx.array, count: int) -> mx.array:
    """``count`` uniforms in [0, 1) for each key: ``(B, 2) -> (B, count)`` float32.

    A row depends on its own key alone, so a stream draws the same numbers in every
    batch and every slot.
    """
    return mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))(keys)


def round_uniforms(keys: mx.array, depth: int) -> mx.array:
    """The uniforms of a round of K drafts for each key, ``(B, 3 K + 2)`` float32.

    Two for the draw of each draft, then a coin each, then two for the final draw. A
    slot has the same ones at every depth of 1 to 8, of 9 to 16 and so on, so that a
    stream may share the deeper rounds of a batch.
    """
    slots = -(-depth // 8) * 8
    drawn = uniforms(keys, 3 * slots + 2)
    final, rest = mx.split(drawn[:, : 3 * depth + 2], [2], axis=1)
    rest = rest.reshape(-1, depth, 3)
    draws, coins = rest[..., :2].reshape(-1, 2 * depth), rest[..., 2]
    return mx.concatenate([draws, coins, final], axis=1)
