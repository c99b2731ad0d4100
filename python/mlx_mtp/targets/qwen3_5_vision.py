"""Qwen3.5 and 3.6 of ``mlx_vlm``, whose positions have three axes."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_vlm.models import cache as vlm_cache

from ..state import DeltaAdapter, UnsupportedCache
from .base import TargetOutput
from .qwen3_5 import Qwen35Target
from .vision_inputs import check_ids, check_images
from .vision_prompt import PromptPart, VisionPrompt

LENT = ("KVCache", "QuantizedKVCache", "ArraysCache")
FIELDS = ("keys", "values", "offset", "group_size", "bits")


class Qwen35VisionTarget(Qwen35Target):
    """A Qwen3.5 model of ``mlx_vlm``, dense or MoE.

    The vision tower, the positions of a prompt and its forward are ``mlx_vlm``'s own.
    Its prompt cache is made of ``mlx_lm``'s classes, whose arrays are lent to
    ``mlx_vlm`` for a forward. It has one entry more than the model has layers: the
    distance from cache slots to positions.
    """

    def __init__(self, model, head_spec=None):
        super().__init__(model, head_spec)
        self.adapters.append(DeltaAdapter())
        self._attention = self.trunk.fa_idx
        rotary = self.trunk.layers[self._attention].self_attn.rotary_emb
        self.axes = rotary.position_selector  # of each frequency

    def make_cache(self):
        layers = self.trunk.layers
        caches = [ArraysCache(2) if x.is_linear else KVCache() for x in layers]
        return [*caches, ArraysCache(1)]

    def read(self, input_ids, pixel_values=None, attention_mask=None, **inputs):
        """The prompt that ``mlx_vlm``'s processor made, see ``VisionPrompt.of``."""
        ids = check_ids(input_ids, attention_mask, self.vocab_size)
        inputs = {"pixel_values": pixel_values, **inputs}
        inputs = check_images(ids, inputs, self.model.config)
        out = self.model.get_input_embeddings(ids, **inputs)
        shape = (3, 1, ids.shape[1])
        positions = np.broadcast_to(np.array(out.position_ids), shape)[:, 0]
        tokens, embeds = ids[0].astype(mx.int32), out.inputs_embeds
        mx.eval(tokens, embeds)  # the stream may be in another thread
        return VisionPrompt(tokens, embeds, positions)

    def prefill(self, tokens, caches, part: PromptPart | None = None):
        *caches, distance = caches
        offset, delta = caches[self._attention].offset, distance[0]
        if not offset:
            delta = mx.zeros((tokens.shape[0],), mx.int32)
        elif delta is None:
            raise ValueError(
                f"The prompt cache holds {offset} tokens but not their distance to "
                "positions, which is its last entry: see as_target(model).make_cache()."
            )
        positions = _positions(offset, delta, tokens.shape[1])
        embeds = None
        if part is not None:
            embeds, positions = part.embeds, positions + part.shift[..., 1:]
            delta = delta + part.delta
        lent = [_lend(cache) for cache in caches]
        hidden = self.trunk(
            tokens, inputs_embeds=embeds, cache=lent, position_ids=positions
        )
        for cache, other in zip(caches, lent, strict=True):
            _copy(other, cache)
        distance[0] = delta
        return TargetOutput(self.logits(hidden), hidden)

    def step(self, tokens, caches):
        *caches, distance = caches
        offset = caches[self._attention].offset
        return self._by_op(tokens, caches, self._at(offset, distance[0], tokens))

    def forward(self, tokens, views):
        *views, distance = views
        offset = views[self._attention].offset
        return self._walk(tokens, views, self._at(offset, distance.delta, tokens))

    def _at(self, offset, delta, tokens):
        positions = _positions(offset, delta, tokens.shape[1])
        return partial(_attend, positions=positions)


def _positions(offset, delta: mx.array, width: int) -> mx.array:
    """Those of text ``(3, B, T)``, the same along every axis."""
    positions = (offset + delta)[:, None] + mx.arange(width)
    return mx.broadcast_to(positions, (3, *positions.shape))


def _attend(net, x: mx.array, mask, view, positions: mx.array) -> mx.array:
    """The layer of ``mlx_vlm``, at positions that are on the device."""
    batch, width, _ = x.shape
    q, gate = mx.split(
        net.q_proj(x).reshape(batch, width, net.num_attention_heads, -1), 2, axis=-1
    )
    kv_shape = (batch, width, net.num_key_value_heads, -1)
    k, v = net.k_proj(x).reshape(kv_shape), net.v_proj(x).reshape(kv_shape)
    q, k = net.q_norm(q).transpose(0, 2, 1, 3), net.k_norm(k).transpose(0, 2, 1, 3)
    q, k = net.rotary_emb.apply_rotary(q, k, positions)
    k, v = view.update_and_fetch(k, v.transpose(0, 2, 1, 3))
    out = scaled_dot_product_attention(q, k, v, cache=view, scale=net.scale, mask=mask)
    out = out.transpose(0, 2, 1, 3).reshape(batch, width, -1)
    return net.o_proj(out * mx.sigmoid(gate.reshape(batch, width, -1)))


def _lend(cache):
    """The cache of ``mlx_vlm`` that holds what one of ``mlx_lm`` holds."""
    name = type(cache).__name__
    if name not in LENT:
        raise UnsupportedCache(
            f"A {name} cannot be used with images; {', '.join(LENT)} can."
        )
    kind = getattr(vlm_cache, name)
    lent = kind.__new__(kind)
    _copy(cache, lent)
    return lent


def _copy(cache, other) -> None:
    if hasattr(cache, "cache"):
        other.cache = list(cache.cache)
        return
    for name in FIELDS:
        if hasattr(cache, name):
            setattr(other, name, getattr(cache, name))
