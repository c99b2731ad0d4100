"""The logits processors of mlx_lm in a form that looks ahead over a block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import mlx.core as mx
from mlx_lm import sample_utils

from .shaping import add_bias


class _Stateless:
    """A processor without memory: its row depends on the tokens before it alone."""

    def __init__(self, function):
        self.function = function

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return self.function(tokens, logits)

    def checkpoint(self) -> None:
        """Nothing to remember."""

    def restore(self, mark: None) -> None:
        """Nothing to go back to."""


def _biased(bias, tokens: mx.array, logits: mx.array) -> mx.array:
    return add_bias(bias, logits)


class MinTokens:
    """Forbids the end tokens until ``count`` tokens have been emitted.

    It serves one stream.
    """

    def __init__(self, count: int, end_tokens: Collection[int]):
        if count < 0:
            raise ValueError(f"min_tokens must not be negative but is {count}.")
        self.count, self.end_tokens = count, sorted(end_tokens)
        self.prompt: int | None = None  # its tokens, known from the first call

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self.prompt is None:
            self.prompt = tokens.size
        if tokens.size - self.prompt < self.count:
            # A tokenizer may have more tokens than the model has logits.
            size = logits.shape[-1]
            if ends := [token for token in self.end_tokens if 0 <= token < size]:
                logits[:, mx.array(ends, mx.int32)] = -mx.inf
        return logits

    def checkpoint(self) -> int | None:
        return self.prompt

    def restore(self, mark: int | None) -> None:
        self.prompt = mark


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
    min_tokens: int = 0,
    end_tokens: Collection[int] = (),
) -> list:
    """As ``mlx_lm.sample_utils.make_logits_processors``, with one host read a block.

    Every position gets the logits that plain decoding would give it. Make new ones for
    every stream.

    Args:
        logit_bias (dict, optional): By token id; an id that the model has no logit of
            is a ValueError at the first row.
        min_tokens (int): No token of ``end_tokens`` comes before so many others.
        end_tokens: Usually ``tokenizer.eos_token_ids``.
    """
    made = sample_utils.make_logits_processors(
        None,
        repetition_penalty,
        repetition_context_size,
        presence_penalty,
        presence_context_size,
        frequency_penalty,
        frequency_context_size,
    )
    out: list = [_Stateless(function) for function in made]
    if logit_bias:
        out.insert(0, _Stateless(partial(_biased, dict(logit_bias))))
    if min_tokens:
        out.append(MinTokens(min_tokens, end_tokens))
    return out
