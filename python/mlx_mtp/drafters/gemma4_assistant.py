"""The assistant of a Gemma 4 model: a small decoder without keys of its own.

Its layers only have queries. They attend to the target's keys and values, sliding ones
to its last sliding layer and full ones to its last full layer, and every draft of a
round is made from one position, that of the newest token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..heads.output import HeadRows, project
from .base import DraftContext, DrafterMismatch, Drafts
from .vocabulary import VocabularyPart, spread

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class AssistantConfig:
    """Shape of an assistant, under the names of its checkpoint's config."""

    backbone_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    head_dim: int
    vocab_size: int
    layer_types: tuple[str, ...]
    rope_parameters: dict[str, dict[str, Any]]
    global_head_dim: int | None = None
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> AssistantConfig:
        """Reads a ``config.json``; what is missing or unknown here is a ValueError."""
        values = {**(config.get("text_config") or {}), **config}
        for name in ("enable_moe_block", "hidden_size_per_layer_input"):
            if values.get(name):
                raise ValueError(
                    f"A Gemma 4 assistant with {name} {values[name]} is not supported."
                )
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        try:
            config = cls(
                **{**known, "layer_types": tuple(known.get("layer_types", ()))}
            )
        except TypeError as error:
            raise ValueError(
                f"The config of the Gemma 4 assistant is incomplete: {error}."
            ) from None
        config._check()
        return config

    def _check(self) -> None:
        if not self.layer_types or {*self.layer_types} - {SLIDING, FULL}:
            raise ValueError(
                f"The layer_types of a Gemma 4 assistant are {SLIDING} and {FULL} but "
                f"the config has {list(self.layer_types)}."
            )
        size, centroids = self.vocab_size, self.num_centroids
        if self.use_ordered_embeddings and (
            size % centroids or not 0 < self.centroid_intermediate_top_k <= centroids
        ):
            raise ValueError(
                f"{centroids} centroids, {self.centroid_intermediate_top_k} of them "
                f"active, do not fit a vocabulary of {size}."
            )

    def head_dim_of(self, kind: str) -> int:
        """Width of a head in layers of this kind of attention."""
        return (kind == FULL and self.global_head_dim) or self.head_dim


class Rotation:
    """Rotary position embedding; a proportional one rotates a part of the pairs."""

    def __init__(self, dims: int, parameters: dict[str, Any]):
        base, rotated = parameters.get("rope_theta", 10000.0), dims
        if parameters.get("rope_type") == "proportional":
            rotated = int(dims * parameters.get("partial_rotary_factor", 1.0))
        exponents = mx.arange(0, rotated, 2, dtype=mx.float32) / dims
        frequencies = parameters.get("factor", 1.0) * base**exponents
        still = mx.full(((dims - rotated) // 2,), mx.inf)
        self.dims, self.frequencies = dims, mx.concatenate([frequencies, still])

    def __call__(self, x: mx.array, position: mx.array) -> mx.array:
        return mx.fast.rope(
            x,
            self.dims,
            traditional=False,
            base=None,
            scale=1.0,
            offset=position,
            freqs=self.frequencies,
        )


class Attention(nn.Module):
    """Queries over keys and values that are given."""

    def __init__(self, config: AssistantConfig, kind: str):
        super().__init__()
        self.heads, head_dim = config.num_attention_heads, config.head_dim_of(kind)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self._rotate = Rotation(head_dim, config.rope_parameters.get(kind, {}))

    def __call__(self, x, memory, position):
        keys, values, mask = memory
        q = self.q_norm(self.q_proj(x).reshape(x.shape[0], self.heads, 1, -1))
        q = self._rotate(q, position)
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=1.0, mask=mask
        )
        return self.o_proj(out.reshape(x.shape[0], -1))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x):
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer on rows ``(B, H)``."""

    def __init__(self, config: AssistantConfig, kind: str):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, kind)
        self.mlp = MLP(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x, memory, position):
        y = self.self_attn(self.input_layernorm(x), memory, position)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return (x + self.post_feedforward_layernorm(y)) * self.layer_scalar


class Trunk(nn.Module):
    def __init__(self, config: AssistantConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, kind) for kind in config.layer_types]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class OrderedHead(nn.Module):
    """Finds the tokens worth a logit: those of the clusters that fit best."""

    def __init__(self, config: AssistantConfig):
        super().__init__()
        self.active = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.arange(config.vocab_size, dtype=mx.int32)

    def __call__(self, x: mx.array) -> mx.array:
        """The candidates of rows ``(B, H)``, ``(B, S)``."""
        scores = self.centroids(x)
        best = mx.argpartition(scores, kth=-self.active, axis=-1)[:, -self.active :]
        clusters = self.token_ordering.reshape(scores.shape[-1], -1)
        return clusters[best].reshape(x.shape[0], -1)


class Gemma4Assistant(nn.Module):
    """The weights of an assistant, under the names of its checkpoint."""

    def __init__(self, config: AssistantConfig):
        super().__init__()
        self.config = config
        width, backbone = config.hidden_size, config.backbone_hidden_size
        self.model = Trunk(config)
        self.pre_projection = nn.Linear(2 * backbone, width, bias=False)
        self.post_projection = nn.Linear(width, backbone, bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.use_ordered_embeddings:
            self.masked_embedding = OrderedHead(config)

    def __call__(self, embedded, hidden, memory: dict[str, tuple], position):
        """One step: rows ``(B, H)`` for ``logits``, and the next step's ``hidden``.

        Args:
            embedded (array): ``(B, backbone)``, the target's embedding of the token.
            hidden (array): ``(B, backbone)``, the target's row that predicted it, or
                what the step before gave.
            memory: Keys, values and mask by kind of attention.
            position (array): ``(B,)``, of the newest token.
        """
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        kinds = self.config.layer_types
        for kind, layer in zip(kinds, self.model.layers, strict=True):
            x = layer(x, memory[kind], position)
        x = self.model.norm(x)
        return x, self.post_projection(x)

    @property
    def output(self) -> nn.Module:
        """What projects rows to logits."""
        return self.lm_head if "lm_head" in self else self.model.embed_tokens

    def logits(self, x: mx.array) -> mx.array:
        """Logits ``(B, V)`` of rows ``(B, H)``, -inf outside of the active clusters."""
        if "masked_embedding" not in self:
            return project(self.output, x)
        ids = self.masked_embedding(x)
        logits = HeadRows(self.output, ids)(x[:, None])[:, 0]
        return spread(logits, ids, self.config.vocab_size)


class Gemma4AssistantDrafter:
    """Drafts with a Gemma 4 assistant on its target's own caches, past their windows.

    It has no state: a round gives it the target's newest hidden row, and the keys and
    values of all accepted tokens, of which sliding layers see the newest window.

    Args:
        assistant (Gemma4Assistant): The weights.
        target (Target): The model that it drafts for.
        vocabulary (optional): Ids of the tokens that it may propose, see
            ``draft_vocabulary``. Not with ordered embeddings, which choose themselves.
    """

    name = "gemma4_assistant"
    max_depth = 16
    needs_hidden = True
    needs_shared_kv = True
    greedy_only = False

    def __init__(
        self,
        assistant: Gemma4Assistant,
        target,
        vocabulary: Iterable[int] | None = None,
    ):
        self.assistant, self.target, self._part = assistant, target, None
        if vocabulary is None:
            return
        if "masked_embedding" in assistant:
            raise ValueError(
                "This Gemma 4 assistant has ordered embeddings, which choose what it "
                "may propose; it takes no draft vocabulary."
            )
        self._part = VocabularyPart(vocabulary, target.vocab_size, [assistant.output])

    def check(self, target):
        config, shared = self.assistant.config, getattr(target, "shared_kv", None) or {}
        sizes = [
            ("hidden size", config.backbone_hidden_size, target.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
        ]
        for kind in sorted(set(config.layer_types)):
            if kind not in shared:
                raise DrafterMismatch(
                    f"The Gemma 4 assistant reads keys of {kind} but the target, a "
                    f"{type(target).__name__}, shares none."
                )
            theirs, heads = shared[kind], config.num_attention_heads
            head_dim = config.head_dim_of(kind)
            sizes.append((f"{kind} head size", head_dim, theirs.head_dim))
            if heads % theirs.heads:
                raise DrafterMismatch(
                    f"The Gemma 4 assistant has {heads} query heads, which cannot "
                    f"share the {theirs.heads} {kind} heads of the target."
                )
        for what, ours, theirs in sizes:
            if ours != theirs:
                raise DrafterMismatch(
                    f"The Gemma 4 assistant is for a {what} of {ours} but the target "
                    f"has {theirs}."
                )

    def weights(self):
        return self.assistant.parameters(), self._part.weights() if self._part else []

    def forwards(self, depth):
        return depth

    def begin(self, prompt, capacity):
        return ()

    def prefill(self, state, following, hidden, attended):
        return state

    def grow(self, state, capacity):
        return state

    def rewind(self, state, count):
        return state

    def propose(self, state, context: DraftContext):
        newest = mx.maximum(context.count - 1, 0)[:, None]
        token = context.tokens[:, -1]
        hidden = mx.take_along_axis(context.hidden, newest[..., None], axis=1)[:, 0]
        memory, position = self._read(context.shared_kv)
        tokens, rows, stats = [], [], []
        for i in range(context.depth):
            embedded = self.target.embed(token)
            x, hidden = self.assistant(embedded, hidden, memory, position)
            logits = self._part.logits if self._part else self.assistant.logits
            row = logits(x)
            token, stat = context.draw(row, i)
            tokens.append(token)
            rows.append(row)
            stats.append(stat)
        return Drafts.stack(tokens, rows, stats), state

    def _read(self, views):
        """Keys, values and mask by kind of attention; the newest token's position."""
        config = self.assistant.config
        windows = {SLIDING: config.sliding_window}
        memory = {
            kind: views[kind].read(windows.get(kind))
            for kind in dict.fromkeys(config.layer_types)
        }
        return memory, views[config.layer_types[0]].offset + 1
