"""Any mlx_lm model whose state is plain KV caches."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..state import KVAdapter
from .base import TargetOutput


class GenericTarget:
    """A model used through its public call. It gives no hidden rows."""

    hidden_size = None

    def __init__(self, model):
        self.model = model
        args = model.args
        config = getattr(args, "text_config", None) or vars(args)
        self.vocab_size = config["vocab_size"]
        self.adapters = [KVAdapter() for _ in make_prompt_cache(model)]

    def make_cache(self):
        return make_prompt_cache(self.model)

    def prefill(self, tokens, caches):
        return TargetOutput(self.model(tokens, cache=caches))

    forward = prefill

    def weights(self):
        return self.model.parameters()

    def embed(self, tokens: mx.array) -> mx.array:
        raise NotImplementedError(
            "[GenericTarget] The embedding of this model is not known; drafters that "
            "share it need a target adapter for its family."
        )

    logits = embed
