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

    def __call__(self, x: mx.array, memory: KVView | Tail) -> mx.array:
        """Rows ``(B * T, H)`` that attend to ``memory`` and each other."""
        batch = memory.batch
        q, gate = mx.split(
            self.q_proj(x).reshape(batch, -1, self.heads, 2 * self.head_dim), 2, axis=-1
        )
        kv_shape = (batch, -1, self.kv_heads, self.head_dim)
        k, v = self.k_proj(x).reshape(kv_shape), self.v_proj(x).reshape(kv_shape)
        q = self.rope(self.q_norm(q).transpose(0, 2, 1, 3), offset=memory.offset)
        k = self.rope(self.k_norm(k).transpose(0, 2, 1, 3), offset=memory.offset)
        out = memory.attend(q, k, v.transpose(0, 2, 1, 3), self.scale)
        out = out.transpose(0, 2, 1, 3).reshape(x.shape[0], -1)
        return self.o_proj(out * mx.sigmoid(gate.reshape(out.shape)))


class Tail:
    """Keys and values of the tentative rows of one layer, behind its committed ones.

    The committed slots are only read: a second write to them in one evaluation would
    copy the whole buffer.
    """

    def __init__(self, view: KVView, offset: mx.array, committed: mx.array):
        self.batch, self.offset, self.committed = view.batch, offset, committed
        self.keys, self.values = view.prefix(view.attended)
        self.new_keys = self.new_values = None

    def attend(self, q, k, v, scale: float) -> mx.array:
        """Attention of one more row: ``q`` ``(B, heads, 1, D)``."""
        self.offset = self.offset + 1
        if self.new_keys is not None:
            k = mx.concatenate([self.new_keys, k], axis=2)
            v = mx.concatenate([self.new_values, v], axis=2)
        self.new_keys, self.new_values = k, v
        rows = q.reshape(*k.shape[:2], -1, q.shape[-1]) * scale
        old = mx.where(self.committed, rows @ self.keys.swapaxes(2, 3), -mx.inf)
        scores = mx.concatenate([old, rows @ k.swapaxes(2, 3)], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        old, new = mx.split(weights, [self.keys.shape[2]], axis=-1)
        return (old @ self.values + new @ v).reshape(q.shape)


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

    def __call__(self, x: mx.array, memory: KVView | Tail) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), memory)
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

    def __call__(self, embedded, hidden, memories: list[KVView] | list[Tail]):
        """Runs T rows of every sequence; the arguments and the result ``(B * T, H)``.

        ``memories`` has one entry a layer, and gets the keys and values of the rows.
        """
        embedded = self.pre_fc_norm_embedding(embedded)
        hidden = self.pre_fc_norm_hidden(hidden)
        x = self.fc(mx.concatenate([embedded, hidden], axis=-1))
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, memory)
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
        self._commit(following, hidden, views)
        return self._collect(views), offset + following.shape[1]

    def grow(self, state, capacity):
        buffers, offset = state
        pad = [(0, 0), (0, 0), (0, max(capacity - buffers[0][0].shape[2], 0)), (0, 0)]
        return [tuple(mx.pad(x, pad) for x in pair) for pair in buffers], offset

    def propose(self, state, context: DraftContext):
        _, offset = state
        views = self._views(state, context.attended)
        out = self._commit(context.tokens, context.hidden, views)
        newest = mx.maximum(context.count - 1, 0)[:, None, None]
        out = mx.take_along_axis(out, newest, axis=1)[:, 0]
        offset = offset + context.count
        committed = mx.arange(context.attended) < offset[:, None, None, None]
        tails = [Tail(view, offset, committed) for view in views]

        tokens, logits, stats = [], [], []
        for i in range(context.depth):
            if i:
                out = self.head(self._embed(tokens[-1]), out, tails)
            row = self.target.logits(out)
            token, stat = context.draw(row, i)
            tokens.append(token)
            logits.append(row)
            stats.append(stat)
        drafts = Drafts(mx.stack(tokens, axis=1))
        if stats[0] is not None:
            drafts = drafts._replace(
                logits=mx.stack(logits, axis=1), stats=mx.stack(stats, axis=1)
            )
        return drafts, (self._collect(views), offset)

    def _commit(self, tokens, hidden, views):
        """Rows ``(B, T)`` with the target's hidden rows, and their outputs."""
        tokens = mx.maximum(tokens, 0)  # unused slots hold -1
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = self.head(self._embed(tokens.reshape(-1)), rows, views)
        return out.reshape(hidden.shape)

    def _embed(self, tokens):
        if "embed_tokens" in self.head:
            return self.head.embed_tokens(tokens)
        return self.target.embed(tokens)

    def _views(self, state, attended):
        buffers, offset = state
        return [KVView(k, v, offset, attended) for k, v in buffers]

    def _collect(self, views):
        return [(view.keys, view.values) for view in views]
