"""The MTP head as a module: one implementation, which a ``HeadSpec`` describes.

Row i joins the target's hidden row i with the embedding of token i + 1 and predicts
token i + 2. Its decoder layers are those of Qwen3.5, written here, or the family's own
from ``mlx_lm``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .rotation import rotated
from .spec import QWEN, HeadSpec

SLIDES = ("is_sliding", "is_sliding_window")  # as the layers of mlx_lm say it


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a Qwen head, under the names of the checkpoint's text config."""

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

    def __init__(self, config: HeadConfig, rope: nn.Module | None = None):
        super().__init__()
        self.heads, self.kv_heads = (
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.rope = rope or nn.RoPE(
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

    def __call__(self, x: mx.array, memory) -> mx.array:
        """Rows ``(B * T, H)`` that attend to ``memory`` and each other."""
        batch = memory.batch
        q, gate = mx.split(
            self.q_proj(x).reshape(batch, -1, self.heads, 2 * self.head_dim), 2, axis=-1
        )
        kv_shape = (batch, -1, self.kv_heads, self.head_dim)
        k, v = self.k_proj(x).reshape(kv_shape), self.v_proj(x).reshape(kv_shape)
        q, k = (
            rotated(self.rope, x.transpose(0, 2, 1, 3), memory)
            for x in (self.q_norm(q), self.k_norm(k))
        )
        out = memory.attend(q, k, v.transpose(0, 2, 1, 3), self.scale)
        out = out.transpose(0, 2, 1, 3).reshape(x.shape[0], -1)
        return self.o_proj(out * mx.sigmoid(gate.reshape(out.shape)))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer of Qwen3.5 on rows ``(B * T, H)``.

    Args:
        config (HeadConfig): Its shape.
        mlp (Module, optional): In place of a dense MLP, such as a mixture of experts.
        rope (Module, optional): In place of a plain rotation.
    """

    def __init__(
        self,
        config: HeadConfig,
        mlp: nn.Module | None = None,
        rope: nn.Module | None = None,
    ):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, rope)
        self.mlp = mlp or MLP(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array, memory) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Block(nn.Module):
    """A decoder layer of given parts, called as those of ``mlx_lm``."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int, eps: float):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x, mask, cache):
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPHead(nn.Module):
    """The head's weights, under the names of Qwen's, whatever the family.

    Args:
        config: Gives ``hidden_size``, ``vocab_size`` and ``rms_norm_eps``; a
            ``HeadConfig`` if there are no ``layers``.
        spec (HeadSpec): Which family's head this is. Default: dense Qwen3.5.
        layers (list, optional): Decoder layers, called as ``layer(rows (B, T, H),
            mask, cache)``.
        more (sequence): The modules of a chain behind this one: module j makes
            draft j + 1, from the output of module j - 1.
    """

    def __init__(
        self, config, spec: HeadSpec | None = None, layers: list | None = None, more=()
    ):
        super().__init__()
        self.config, self.spec = config, spec or QWEN
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = layers or [
            Layer(config) for _ in range(config.mtp_num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(width, eps=eps)
        if "embedding" in self.spec.own or getattr(
            config, "mtp_use_dedicated_embeddings", False
        ):
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if "output" in self.spec.own:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if more:
            self.more = list(more)

    @property
    def chain(self) -> list[MTPHead]:
        """This module and those behind it."""
        return [self, *(self.more if "more" in self else ())]

    @property
    def dtype(self) -> mx.Dtype:
        """That of the rows: norms are never quantised."""
        return self.pre_fc_norm_hidden.weight.dtype

    def __call__(self, embedded, hidden, memories: list):
        """Runs T rows of every sequence; the arguments and the result ``(B * T, H)``.

        ``memories`` has one entry a layer, and gets the keys and values of the rows.
        The result is what a chained step reads in place of a hidden row.
        """
        halves = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        if self.spec.order == ("hidden", "embedding"):
            halves.reverse()
        x = self.fc(mx.concatenate(halves, axis=-1))
        for layer, memory in zip(self.layers, memories, strict=True):
            x = self._run(layer, x, memory)
        return x if self.spec.hidden == "pre" else self.norm(x)

    def logits(self, out: mx.array, target, projection=None) -> mx.array:
        """What the rows of a call predict, ``(..., V)``, by ``projection`` if given."""
        if self.spec.hidden == "pre":
            out = self.norm(out)
        if projection is not None:
            return projection(out)
        return self.lm_head(out) if "lm_head" in self else target.logits(out)

    def output(self, target) -> nn.Module | None:
        """The layer that makes the logits, the head's own or the target's, if known."""
        return self.lm_head if "lm_head" in self else getattr(target, "output", None)

    def embed(self, tokens: mx.array, target) -> mx.array:
        """Input embeddings ``(..., H)``, the head's own or the target's."""
        owner = self.embed_tokens if "embed_tokens" in self else target.embed
        return owner(tokens)

    def kv_shapes(self) -> list[list[tuple[int, int, int, int]]]:
        """Heads and width of the keys, then of the values, of each cache of each layer.

        Builds a forward and computes nothing.
        """
        recorders = [_Recorder() for _ in self.layers]
        x = mx.zeros((1, self.config.hidden_size), self.dtype)
        for layer, recorder in zip(self.layers, recorders, strict=True):
            self._run(layer, x, recorder)
        return [recorder.shapes() for recorder in recorders]

    def _run(self, layer, x, memory):
        if isinstance(layer, Layer):
            return layer(x, memory)
        rows = x.reshape(memory.batch, -1, x.shape[-1])
        slides = any(getattr(layer, name, False) for name in SLIDES)
        window = self.config.window if slides else None
        mask = memory.make_mask(rows.shape[1], return_array=True, window_size=window)
        return layer(rows, mask, memory).reshape(x.shape)


class _Recorder:
    """Stands in for a memory and sees what shape of keys and values it would hold."""

    batch, offset, shape = 1, 0, None

    def __init__(self):
        self.parts: list[_Recorder] = []

    def __getitem__(self, i: int) -> _Recorder:
        """A cache of several: the layers that have such take them by their number."""
        while len(self.parts) <= i:
            self.parts.append(_Recorder())
        return self.parts[i]

    def shapes(self) -> list:
        parts = self.parts or [self]
        return [part.shape for part in parts if part.shape is not None]

    def make_mask(self, width, return_array=False, window_size=None):
        return mx.ones((width, width), mx.bool_)

    def update_and_fetch(self, keys, values):
        self.shape = (*keys.shape[1::2], *values.shape[1::2])
        self.keys, self.values = keys, values
        return keys, values

    def attend(self, q, k, v, scale):
        self.update_and_fetch(k, v)
        return q
