"""The MTP head of Qwen3.5-architecture checkpoints, chained to any depth.

The head is one or more full-attention decoder layers. Row i joins the target's
hidden row i with the embedding of token i + 1 and predicts token i + 2; chained
steps feed the head's own output back in place of the hidden row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..state import KVView
from .base import DraftContext, DrafterMismatch, Drafts


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head, under the names of the checkpoint's text config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100000.0
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    mtp_num_hidden_layers: int = 1
    mtp_use_dedicated_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> HeadConfig:
        """Reads a text config; a missing size is a ValueError that names it."""
        values = {**config, **(config.get("rope_parameters") or {})}
        values.setdefault(
            "head_dim",
            values.get("hidden_size", 0) // values.get("num_attention_heads", 1),
        )
        values["mtp_num_hidden_layers"] = max(
            values.get("mtp_num_hidden_layers") or 1, 1
        )
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(
                f"The config of the MTP head is incomplete: {error}."
            ) from None


class Attention(nn.Module):
    """Gated attention with normalised queries and keys and partial rotation."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.heads, self.kv_heads = (
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.rope = nn.RoPE(
            int(config.head_dim * config.partial_rotary_factor),
            traditional=False,
            base=config.rope_theta,
        )
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, 2 * self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def project(self, x: mx.array, offset: mx.array):
        """Rotated queries, keys, values ``(B, heads, T, D)`` and the gate."""
        batch, width, _ = x.shape
        q, gate = mx.split(
            self.q_proj(x).reshape(batch, width, self.heads, -1), 2, axis=-1
        )
        k = self.k_proj(x).reshape(batch, width, self.kv_heads, -1)
        v = self.v_proj(x).reshape(batch, width, self.kv_heads, -1)
        q = self.rope(self.q_norm(q).transpose(0, 2, 1, 3), offset=offset)
        k = self.rope(self.k_norm(k).transpose(0, 2, 1, 3), offset=offset)
        return q, k, v.transpose(0, 2, 1, 3), gate.reshape(batch, width, -1)

    def finish(self, out: mx.array, gate: mx.array) -> mx.array:
        batch, _, width, _ = out.shape
        out = out.transpose(0, 2, 1, 3).reshape(batch, width, -1)
        return self.o_proj(out * mx.sigmoid(gate))

    def __call__(self, x: mx.array, view: KVView) -> mx.array:
        q, k, v, gate = self.project(x, view.offset)
        mask = view.make_mask(x.shape[1])
        k, v = view.update_and_fetch(k, v)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return self.finish(out, gate)

    def chain(self, x: mx.array, view: KVView, step: int, tail: list) -> mx.array:
        """One tentative row at ``view.offset + step``.

        Its key and value go to ``tail`` and the committed slots are only read: a
        second write to them in one evaluation would copy the whole buffer.
        """
        q, k, v, gate = self.project(x, view.offset + step)
        tail.append((k, v))
        tail_k, tail_v = (
            mx.concatenate(rows, axis=2) for rows in zip(*tail, strict=True)
        )
        keys, values = view.prefix(view.attended)
        batch = x.shape[0]
        q = q.reshape(batch, self.kv_heads, -1, self.head_dim) * self.scale
        committed = mx.arange(view.attended) < view.offset[:, None, None, None]
        scores = mx.concatenate(
            [
                mx.where(committed, q @ keys.swapaxes(2, 3), -mx.inf),
                q @ tail_k.swapaxes(2, 3),
            ],
            axis=-1,
        )
        weights = mx.softmax(scores, axis=-1, precise=True)
        head, rest = mx.split(weights, [view.attended], axis=-1)
        out = head @ values + rest @ tail_v
        return self.finish(out.reshape(batch, self.heads, 1, -1), gate)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: HeadConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array, attend) -> mx.array:
        x = x + attend(self.self_attn, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPHead(nn.Module):
    """The head's weights, named as in the checkpoint under ``mtp.``."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [Layer(config) for _ in range(config.mtp_num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=eps)
        if config.mtp_use_dedicated_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)

    def join(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        return self.fc(
            mx.concatenate(
                [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)],
                axis=-1,
            )
        )

    def __call__(self, embedded, hidden, views: list[KVView]) -> mx.array:
        """Commits T rows ``(B, T, H)`` to ``views`` and gives their outputs."""
        x = self.join(embedded, hidden)
        for layer, view in zip(self.layers, views, strict=True):
            x = layer(x, lambda attn, y, view=view: attn(y, view))
        return self.norm(x)

    def chain(self, embedded, hidden, views, step: int, tails: list[list]) -> mx.array:
        """One tentative row ``(B, 1, H)`` behind the committed ones."""
        x = self.join(embedded, hidden)
        for layer, view, tail in zip(self.layers, views, tails, strict=True):
            x = layer(
                x,
                lambda attn, y, view=view, tail=tail: attn.chain(y, view, step, tail),
            )
        return self.norm(x)


class MTPHeadDrafter:
    """Drafts with a checkpoint's own MTP head, depth K by chaining.

    Its state is the head's keys and values over rows made from the target's hidden
    rows only: what a chained step wrote from the head's own output is dropped.

    Args:
        head (MTPHead): The weights.
        target: The target whose embedding and output projection the head shares.
    """

    name = "mtp"
    max_depth = 32
    needs_hidden = True
    needs_shared_kv = False
    greedy_only = False

    def __init__(self, head: MTPHead, target):
        self.head, self.target = head, target

    def check(self, target):
        config = self.head.config
        for what, ours, theirs in (
            ("hidden size", config.hidden_size, target.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise DrafterMismatch(
                    f"The MTP head has {what} {ours} but the target has {theirs}."
                )

    def begin(self, prompt, capacity):
        config = self.head.config
        batch, dtype = prompt.shape[0], self.head.norm.weight.dtype
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        buffers = [
            (mx.zeros(shape, dtype), mx.zeros(shape, dtype)) for _ in self.head.layers
        ]
        return buffers, mx.zeros((batch,), mx.int32)

    def weights(self):
        return self.head.parameters()

    def forwards(self, depth):
        return depth

    def prefill(self, state, following, hidden, attended):
        _, offset = state
        views = self._views(state, attended)
        self.head(self._embed(following), hidden, views)
        return self._collect(views), offset + following.shape[1]

    def grow(self, state, capacity):
        buffers, offset = state
        pad = [(0, 0), (0, 0), (0, max(capacity - buffers[0][0].shape[2], 0)), (0, 0)]
        return [tuple(mx.pad(x, pad) for x in pair) for pair in buffers], offset

    def propose(self, state, context: DraftContext):
        _, offset = state
        views = self._views(state, context.attended)
        out = self.head(self._embed(context.tokens), context.hidden, views)
        row = (context.count - 1)[:, None, None]
        out = mx.take_along_axis(out, mx.maximum(row, 0), axis=1)
        offset = offset + context.count
        buffers = self._collect(views)
        for view in views:
            view.offset = offset

        tokens, logits, stats = [], [], []
        tails: list[list] = [[] for _ in views]
        for i in range(context.depth):
            if i:
                embedded = self._embed(tokens[-1][:, None])
                out = self.head.chain(embedded, out, views, i - 1, tails)
            row = self.target.logits(out)[:, 0]
            token, stat = context.draw(row, i)
            tokens.append(token)
            logits.append(row)
            stats.append(stat)
        drafts = Drafts(mx.stack(tokens, axis=1))
        if stats[0] is not None:
            drafts = drafts._replace(
                logits=mx.stack(logits, axis=1), stats=mx.stack(stats, axis=1)
            )
        return drafts, (buffers, offset)

    def _embed(self, tokens):
        tokens = mx.maximum(tokens, 0)  # unused slots hold -1
        if "embed_tokens" in self.head:
            return self.head.embed_tokens(tokens)
        return self.target.embed(tokens)

    def _views(self, state, attended):
        buffers, offset = state
        return [KVView(k, v, offset, attended) for k, v in buffers]

    def _collect(self, views):
        return [(view.keys, view.values) for view in views]
