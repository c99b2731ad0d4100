"""The driver: what it emits, counts, refuses and leaves behind."""

import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.sample_utils import make_logits_processors
from tiny import (
    ScriptedDrafter,
    StatelessDrafter,
    TableDrafter,
    TableTarget,
    plain_tokens,
    random_head,
    random_prompt,
    tiny_llama,
)

from mlx_mtp.drafters import DrafterMismatch, Drafts, NGramDrafter
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import (
    SpeculativeDecoder,
    UnusableLogits,
    bucket,
    speculative_step,
)
from mlx_mtp.state import UnsupportedCache
from mlx_mtp.targets import GenericTarget, as_target

PROMPT = random_prompt(9, 128, 11)


@pytest.fixture(scope="module")
def truth(qwen):
    return plain_tokens(qwen, PROMPT, 420)


@pytest.fixture(scope="module")
def scripted(qwen, truth):
    """A decoder whose drafts are right in a ragged way; depth 4."""
    drafter = ScriptedDrafter(truth, 128, [4, 1, 0, 3, 2])
    return SpeculativeDecoder(as_target(qwen), drafter, 4)


def tokens_of(steps):
    return [step.token for step in steps]


# Greedy equals mlx_lm


def test_growth_and_bucket_borders_never_change_tokens(scripted, truth):
    """420 tokens: attended 256, 384, 512, and more slots than were reserved."""
    steps = scripted.stream(PROMPT, max_tokens=-1)
    assert [next(steps).token for _ in range(420)] == truth
    steps.close()
    steps = scripted.stream(PROMPT, max_tokens=420)
    assert tokens_of(steps) == truth
