"""Qwen3.5, 3.6 and Qwen3-Next: full attention and Gated DeltaNet layers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from ..heads.output import project
from ..ops import gated_delta_replay
from ..state import GatedDeltaAdapter, GatedDeltaView, KVAdapter
from .base import TargetOutput


class Qwen35Target:
    """A Qwen3.5 or Qwen3-Next text model, dense or MoE.

    A round walks the layers here, so that the inputs of every recurrence are at hand
    for the rollback and nothing in the model is touched. So do a plain step and, where
    ``mlx_lm`` has no kernel for the recurrence, a prompt: as one op it is faster.
    """

    projects = True

    def __init__(self, model, head_spec=None):
        self.head_spec = head_spec
        text = getattr(model, "language_model", model)
        self.model, self.text, self.trunk = model, text, text.model
        self.vocab_size = text.args.vocab_size
        self.hidden_size = text.args.hidden_size
        self.adapters = [
            GatedDeltaAdapter(layer.linear_attn.num_k_heads)
            if layer.is_linear
            else KVAdapter()
            for layer in self.trunk.layers
        ]

    def make_cache(self):
        return self.model.make_cache()

    def weights(self):
        return self.model.parameters()

    def embed(self, tokens):
        return self.trunk.embed_tokens(tokens)

    @property
    def output(self):
        tied = self.text.args.tie_word_embeddings
        return self.trunk.embed_tokens if tied else self.text.lm_head

    def logits(self, hidden):
        return project(self.output, hidden)

    def prefill(self, tokens, caches):
        has_kernel = mx.metal.is_available() and mx.default_device() == mx.gpu
        return (self._by_model if has_kernel else self._by_op)(tokens, caches)

    def step(self, tokens, caches):
        """As ``prefill``, of one row ``(1, 1)``."""
        return self._by_op(tokens, caches)

    def _by_model(self, tokens, caches):
        hidden = self.trunk(tokens, cache=caches)
        return TargetOutput(self.logits(hidden), hidden)

    def _by_op(self, tokens, caches, attend=None):
        pairs = list(zip(self.trunk.layers, caches, strict=True))
        if any(layer.is_linear and c.left_padding is not None for layer, c in pairs):
            return self._by_model(tokens, caches)
        views = [
            self._view(layer.linear_attn, c, tokens) if layer.is_linear else c
            for layer, c in pairs
        ]
        out = self._walk(tokens, views, attend)
        for (layer, cache), view in zip(pairs, views, strict=True):
            if layer.is_linear:
                cache[0], cache[1] = view.window_after(), view.after
                cache.advance(tokens.shape[1])
        return out

    def _view(self, net, cache, tokens):
        """The cache of a layer, empty or not, for rows ``(B, T)``."""
        window, state = cache.cache
        if state is None:
            batch, dtype = tokens.shape[0], self.embed(tokens[:, :1]).dtype
            window = mx.zeros((batch, net.conv_kernel_size - 1, net.conv_dim), dtype)
            state = mx.zeros((batch, net.num_v_heads, net.head_v_dim, net.head_k_dim))
        return GatedDeltaView(state, window, cache.lengths)

    def forward(self, tokens, views):
        return self._walk(tokens, views)

    def _walk(self, tokens, views, attend=None):
        """A forward; ``attend(layer, x, mask, view)`` stands for the attention."""
        batch, width = tokens.shape
        x, mask = self.embed(tokens.reshape(-1)), None  # rows (B * T, H)
        for layer, view in zip(self.trunk.layers, views, strict=True):
            y = layer.input_layernorm(x)
            if layer.is_linear:
                y = _gated_delta_net(layer.linear_attn, y, view)
            else:
                if mask is None:
                    mask = view.make_mask(width, return_array=False, window_size=None)
                args = y.reshape(batch, width, -1), mask, view
                net = layer.self_attn
                y = net(*args) if attend is None else attend(net, *args)
            x = x + y.reshape(x.shape)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden = self.trunk.norm(x)
        logits = self.logits(hidden)
        return TargetOutput(
            logits.reshape(batch, width, -1), hidden.reshape(batch, width, -1)
        )


def _gated_delta_net(net, x: mx.array, view) -> mx.array:
    """The layer of ``mlx_lm`` on rows ``(B * T, H)``, with its recurrence as one op."""
    batch = view.state.shape[0]
    value_shape = (batch, -1, net.num_v_heads, net.head_v_dim)
    key_shape = (batch, -1, net.num_k_heads, net.head_k_dim)
    per_head = (batch, -1, net.num_v_heads)
    qkv, z, b, a = _projections(net, x, batch)
    z, beta = z.reshape(value_shape), mx.sigmoid(b).reshape(per_head)
    g = compute_g(net.A_log, a, net.dt_bias).reshape(per_head)
    conv_input = mx.concatenate([view.window, qkv], axis=1)
    q, k, v = mx.split(
        nn.silu(net.conv1d(conv_input)), [net.key_dim, 2 * net.key_dim], axis=-1
    )
    q, k = normalize_qk(
        q.reshape(key_shape),
        k.reshape(key_shape),
        inv_scale=net.head_k_dim**-0.5,
        eps=1e-6,
    )
    v = v.reshape(value_shape)
    steps = view.steps(v.shape[1])
    view.after, y = gated_delta_replay(view.state, k, v, g, beta, steps, q=q)
    view.inputs = (conv_input, k, v, g, beta)
    return net.out_proj(net.norm(y, z).reshape(x.shape[0], -1))


def _projections(net, x: mx.array, batch: int):
    """Rows ``(B * T, H)`` as the input of the convolution ``(B, T, C)``, z, b and a."""
    if "in_proj_qkv" in net:
        qkv = net.in_proj_qkv(x).reshape(batch, -1, net.conv_dim)
        return qkv, net.in_proj_z(x), net.in_proj_b(x), net.in_proj_a(x)
    qkvz, ba = (y(x) for y in (net.in_proj_qkvz, net.in_proj_ba))
    q, k, v, z, b, a = net.fix_query_key_value_ordering(
        *(y.reshape(batch, -1, y.shape[-1]) for y in (qkvz, ba))
    )
    parts = [y.reshape(*y.shape[:2], -1) for y in (q, k, v)]
    return mx.concatenate(parts, axis=-1), z, b, a
