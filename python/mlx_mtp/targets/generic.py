"""Any mlx_lm model, through its public call."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from ..state import (
    KVAdapter,
    ListAdapter,
    SteppedAdapter,
    SteppedView,
    UnsupportedCache,
    check_stepped,
)
from .base import TargetOutput
from .stepping import find_steppers, stepping


class _ArraysView(SteppedView, ArraysCache):
    """Some models ask whether their cache is an ``ArraysCache``."""


class GenericTarget:
    """A model used through its public call. It gives no hidden rows.

    Recurrent layers are fed the rows of a block one by one, so they cost as much as in
    plain decoding; the others are fed whole blocks.
    """

    hidden_size = None

    def __init__(self, model):
        self.model = model
        args = model.args
        config = getattr(args, "text_config", None) or args
        config = config if isinstance(config, dict) else vars(config)
        self.vocab_size = config["vocab_size"]
        self._adapters = [_expected(cache) for cache in self.make_cache()]
        self._steppers: set = set()
        self._refusal: str | None = None
        if any(map(_is_recurrent, self._adapters)):
            self._probe()

    @property
    def adapters(self):
        if self._refusal is not None:
            raise UnsupportedCache(self._refusal)
        return self._adapters

    def make_cache(self):
        return make_prompt_cache(self.model)

    def prefill(self, tokens, caches):
        return TargetOutput(self.model(tokens, cache=caches))

    def forward(self, tokens, views):
        if not self._steppers:
            return self.prefill(tokens, views)
        with stepping(self._steppers):
            return self.prefill(tokens, views)

    def weights(self):
        return self.model.parameters()

    def embed(self, tokens: mx.array) -> mx.array:
        raise NotImplementedError(
            "[GenericTarget] The embedding of this model is not known; drafters that "
            "share it need a target adapter for its family."
        )

    logits = embed

    def _probe(self) -> None:
        """Finds the recurrent layers and sees if rows can be fed one by one.

        Builds two forwards and computes nothing.
        """
        tokens = mx.zeros((1, 2), mx.int32)
        views = [_probe_view(cache) for cache in self.make_cache()]
        self._steppers = find_steppers(self.model, tokens, views)
        views = [_probe_view(cache) for cache in self.make_cache()]
        self.forward(tokens, views)
        try:
            for view in views:
                for part in getattr(view, "caches", [view]):
                    if isinstance(part, SteppedView):
                        check_stepped(part, tokens.shape[1])
        except UnsupportedCache as error:
            self._refusal = str(error)


def _expected(cache):
    """The adapter of a cache of the model's own."""
    if isinstance(cache, ArraysCache):
        return SteppedAdapter(_ArraysView)
    if isinstance(cache, CacheList):
        return ListAdapter(tuple(map(_expected, cache.caches)))
    return KVAdapter()


def _is_recurrent(adapter) -> bool:
    parts = getattr(adapter, "parts", [adapter])
    return any(isinstance(part, SteppedAdapter) for part in parts)


def _probe_view(cache):
    if isinstance(cache, ArraysCache):
        return _ArraysView([None] * len(cache.cache))
    if isinstance(cache, CacheList):
        return CacheList(*map(_probe_view, cache.caches))
    return cache
