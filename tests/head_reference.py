"""The forward of MTP heads in NumPy, from a checkpoint's raw tensors.

Written from the papers and the published implementations; nothing of the package or
of mlx_lm is used. Rows are ``(T, H)``, float64.
"""

import numpy as np


def rms(x, gain, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rope(x, dims, theta, interleaved=False):
    """``x`` ``(T, heads, D)`` at positions 0, 1, ...; its first ``dims`` turn."""
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(0, dims, 2) / dims))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned, rest = x[..., :dims], x[..., dims:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        pairs = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        turned = pairs.reshape(turned.shape)
    else:
        a, b = np.split(turned, 2, axis=-1)
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return np.concatenate([turned, rest], axis=-1)


def attend(q, k, v, scale, window=None, sinks=None, seen=True):
    """``q`` ``(T, heads, D)`` to ``k`` and ``v`` ``(T, kv heads, D)``, causally."""
    heads, groups = q.shape[1], k.shape[1]
    k, v = (np.repeat(x, heads // groups, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale
    rows, slots = np.ogrid[: len(q), : len(k)]
    seen = seen & (slots <= rows)
    if window is not None:
        seen &= rows < slots + window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        weights = softmax(np.concatenate([scores, column], axis=-1))[..., :-1]
    else:
        weights = softmax(scores)
    return np.einsum("hts,shd->thd", weights, v)


class Reference:
    """A head of one family.

    Args:
        raw (dict): NumPy arrays by their names in the checkpoint.
        config (dict): The checkpoint's.
    """

    zero_centred = False
    interleaved = False

    def __init__(self, raw, config):
        self.raw, self.c = raw, config
        self.eps = config.get("rms_norm_eps", 1e-6)

    def gain(self, name):
        return self.raw[name + ".weight"] + (1 if self.zero_centred else 0)

    def norm(self, name, x, eps=None):
        return rms(x, self.gain(name), eps or self.eps)

    def linear(self, name, x):
        y = x @ self.raw[name + ".weight"].T
        return y + self.raw[name + ".bias"] if name + ".bias" in self.raw else y

    def mlp(self, name, x):
        gate = silu(self.linear(f"{name}.gate_proj", x))
        return self.linear(
            f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x)
        )

    def experts(self, name, x, chosen, weights):
        """The sum of the chosen experts ``(T, k)`` by their weights."""
        rows = []
        for row, experts, w in zip(x, chosen, weights, strict=True):
            parts = [self.expert(f"{name}.experts", e, row) for e in experts]
            rows.append(sum(a * b for a, b in zip(w, parts, strict=True)))
        return np.stack(rows)

    def expert(self, name, e, row):
        return self.mlp(f"{name}.{e}", row)

    def routed(self, scores, bias, top, groups, top_groups, scale, normed):
        """DeepSeek's choice: by groups, biased; weights without the bias."""
        biased = scores + bias
        if groups > 1:
            split = biased.reshape(len(scores), groups, -1)
            best = np.sort(split, axis=-1)[..., -2:].sum(-1)
            keep = np.argsort(-best, axis=-1)[:, :top_groups]
            kept = np.zeros(split.shape, bool)
            np.put_along_axis(kept, keep[..., None], True, axis=1)
            biased = np.where(kept, split, 0).reshape(scores.shape)
        chosen = np.argsort(-biased, axis=-1)[:, :top]
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if normed:
            weights = weights / weights.sum(-1, keepdims=True)
        return chosen, weights * scale

    def gqa(self, name, x, dims, heads=None, groups=None, window=None):
        c = self.c
        heads = heads or c["num_attention_heads"]
        groups = groups or c["num_key_value_heads"]
        q = self.linear(f"{name}.q_proj", x).reshape(len(x), heads, -1)
        k = self.linear(f"{name}.k_proj", x).reshape(len(x), groups, -1)
        v = self.linear(f"{name}.v_proj", x).reshape(len(x), groups, -1)
        if f"{name}.q_norm.weight" in self.raw:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if dims:
            q, k = (rope(y, dims, c["rope_theta"], self.interleaved) for y in (q, k))
        return attend(q, k, v, q.shape[-1] ** -0.5, window)

    def mla(self, name, x, eps=1e-6):
        """Multi-head latent attention, its latents expanded."""
        c, heads = self.c, self.c["num_attention_heads"]
        nope, turned = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        low = self.linear(f"{name}.q_a_proj", x)
        low = self.norm(f"{name}.q_a_layernorm", low, eps)
        q = self.linear(f"{name}.q_b_proj", low).reshape(len(x), heads, -1)
        kv = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        latent, k_pe = kv[:, :-turned], kv[:, None, -turned:]
        latent = self.norm(f"{name}.kv_a_layernorm", latent, eps)
        q, latent = self.scaled(q, latent)
        kv = self.linear(f"{name}.kv_b_proj", latent).reshape(len(x), heads, -1)
        q_pe = rope(q[..., nope:], turned, c["rope_theta"], True)
        k_pe = np.repeat(rope(k_pe, turned, c["rope_theta"], True), heads, axis=1)
        q = np.concatenate([q[..., :nope], q_pe], axis=-1)
        k = np.concatenate([kv[..., :nope], k_pe], axis=-1)
        seen = self.scores_mask(name, x, low)
        return attend(q, k, kv[..., nope:], q.shape[-1] ** -0.5, seen=seen)

    def scores_mask(self, name, x, latent_q):
        return True

    def scaled(self, q, latent):
        return q, latent

    def layer(self, name, x):
        y = self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        x = x + y
        y = self.norm(f"{name}.post_attention_layernorm", x)
        return x + self.feed_forward(f"{name}.mlp", y)

    def attention(self, name, x):
        y = self.gqa(name, x, self.c["head_dim"])
        return self.linear(f"{name}.o_proj", y.reshape(len(x), -1))

    def feed_forward(self, name, x):
        return self.mlp(name, x)

    def embed(self, tokens):
        return self.raw["model.embed_tokens.weight"][tokens]

    def output(self, x, index=0):
        return x @ self.raw["lm_head.weight"].T

    def rows(self, tokens, hidden, index=0):
        """What a chained step reads, from all rows; and what they predict."""
        raise NotImplementedError


class Appended(Reference):
    """A layer behind the trunk's with enorm, hnorm and eh_proj."""

    final = "shared_head.norm"

    def rows(self, tokens, hidden, index=0):
        name = f"model.layers.{self.c['num_hidden_layers'] + index}"
        e = self.norm(f"{name}.enorm", self.embed(tokens))
        h = self.norm(f"{name}.hnorm", hidden)
        x = self.linear(f"{name}.eh_proj", np.concatenate([e, h], axis=-1))
        x = self.norm(f"{name}.{self.final}", self.layer(name, x))
        return x, self.output(x, index)


class Sigmoid:
    """The router of DeepSeek V3, also GLM's."""

    def feed_forward(self, name, x):
        c = self.c
        chosen, weights = self.routed(
            sigmoid(x @ self.raw[f"{name}.gate.weight"].T),
            self.raw[f"{name}.gate.e_score_correction_bias"],
            c["num_experts_per_tok"],
            c["n_group"],
            c["topk_group"],
            c["routed_scaling_factor"],
            c["norm_topk_prob"],
        )
        y = self.experts(name, x, chosen, weights)
        return y + self.mlp(f"{name}.shared_experts", x)


class DeepSeek(Sigmoid, Appended):
    def attention(self, name, x):
        return self.linear(f"{name}.o_proj", self.mla(name, x).reshape(len(x), -1))


class Sparse(DeepSeek):
    """Attention to the rows that an indexer scores highest, as DeepSeek V3.2."""

    def scores_mask(self, name, x, latent_q):
        c, name = self.c, f"{name}.indexer"
        heads, top = c["index_n_heads"], c["index_topk"]
        q = self.linear(f"{name}.wq_b", latent_q).reshape(len(x), heads, -1)
        k = self.linear(f"{name}.wk", x)
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-5)
        k = k * self.raw[f"{name}.k_norm.weight"] + self.raw[f"{name}.k_norm.bias"]
        turn = c["qk_rope_head_dim"], c["rope_theta"], c["indexer_rope_interleave"]
        q, k = rope(q, *turn), rope(k[:, None], *turn)[:, 0]
        w = self.linear(f"{name}.weights_proj", x) * heads**-0.5 * q.shape[-1] ** -0.5
        scores = np.einsum("thd,sd->ths", q, k)
        scores = (np.maximum(scores, 0) * w[..., None]).sum(1)
        causal = np.tril(np.ones(scores.shape, bool))
        scores = np.where(causal, scores, -np.inf)
        kth = np.sort(scores, axis=-1)[:, ::-1][:, min(top, len(x)) - 1]
        return causal & (scores >= kth[:, None])


class Glm(Sigmoid, Appended):
    def attention(self, name, x):
        dims = int(self.c["head_dim"] * self.c["partial_rotary_factor"])
        y = self.gqa(name, x, dims).reshape(len(x), -1)
        return self.linear(f"{name}.o_proj", y)


class MiMo(Reference):
    """Hidden half first; a Qwen2 layer."""

    def rows(self, tokens, hidden, index=0):
        name = f"model.mtp_layers.{index}"
        e = self.norm(f"{name}.token_layernorm", self.embed(tokens))
        h = self.norm(f"{name}.hidden_layernorm", hidden)
        x = self.linear(f"{name}.input_proj", np.concatenate([h, e], axis=-1))
        x = self.norm(f"{name}.final_layernorm", self.layer(name, x))
        return x, self.output(x)

    def attention(self, name, x):
        c = self.c
        y = self.gqa(name, x, c["hidden_size"] // c["num_attention_heads"])
        return self.linear(f"{name}.o_proj", y.reshape(len(x), -1))


class Qwen(Reference):
    """Gated attention; gains stored less 1."""

    zero_centred = True

    def rows(self, tokens, hidden, index=0):
        e = self.norm("mtp.pre_fc_norm_embedding", self.embed(tokens))
        h = self.norm("mtp.pre_fc_norm_hidden", hidden)
        x = self.linear("mtp.fc", np.concatenate([e, h], axis=-1))
        x = self.norm("mtp.norm", self.layer("mtp.layers.0", x))
        return x, self.output(x)

    def attention(self, name, x):
        c, d = self.c, self.c["head_dim"]
        heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
        both = self.linear(f"{name}.q_proj", x).reshape(len(x), heads, 2 * d)
        q, gate = both[..., :d], both[..., d:]
        k = self.linear(f"{name}.k_proj", x).reshape(len(x), groups, d)
        v = self.linear(f"{name}.v_proj", x).reshape(len(x), groups, d)
        q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        rotary = c.get("rope_parameters", c)
        dims = int(d * rotary["partial_rotary_factor"])
        q, k = (rope(y, dims, rotary["rope_theta"]) for y in (q, k))
        y = attend(q, k, v, d**-0.5) * sigmoid(gate)
        return self.linear(f"{name}.o_proj", y.reshape(len(x), -1))

    def feed_forward(self, name, x):
        if f"{name}.gate.weight" not in self.raw:
            return self.mlp(name, x)
        scores = softmax(x @ self.raw[f"{name}.gate.weight"].T)
        chosen = np.argsort(-scores, axis=-1)[:, : self.c["num_experts_per_tok"]]
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if self.c.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdims=True)
        shared = sigmoid(self.linear(f"{name}.shared_expert_gate", x))
        shared = shared * self.mlp(f"{name}.shared_expert", x)
        return self.experts(name, x, chosen, weights) + shared

    def expert(self, name, e, row):
        if f"{name}.gate_up_proj" not in self.raw:
            return super().expert(name, e, row)
        gate, up = np.split(self.raw[f"{name}.gate_up_proj"][e] @ row, 2)
        return self.raw[f"{name}.down_proj"][e] @ (silu(gate) * up)


class Step(Appended):
    """Three heads in a chain, each fed what is before the norm of the one before."""

    zero_centred = True

    def rows(self, tokens, hidden, index=0):
        name = f"model.layers.{self.c['num_hidden_layers'] + index}"
        self.number = self.c["num_hidden_layers"] + index
        e = self.norm(f"{name}.enorm", self.embed(tokens))
        h = self.norm(f"{name}.hnorm", hidden)
        x = self.linear(f"{name}.eh_proj", np.concatenate([e, h], axis=-1))
        x = self.layer(f"{name}.transformer", x)
        y = self.norm(f"{name}.shared_head.norm", x)
        return x, self.linear(f"{name}.shared_head.output", y)

    def attention(self, name, x):
        c, d, i = self.c, self.c["head_dim"], self.number
        slides = c["layer_types"][i] == "sliding_attention"
        sizes = c["attention_other_setting"] if slides else c
        heads = sizes["num_attention_heads"]
        groups = sizes["num_attention_groups"]
        q = self.linear(f"{name}.q_proj", x).reshape(len(x), heads, d)
        k = self.linear(f"{name}.k_proj", x).reshape(len(x), groups, d)
        v = self.linear(f"{name}.v_proj", x).reshape(len(x), groups, d)
        q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        dims = int(d * c["partial_rotary_factors"][i])
        q, k = (rope(y, dims, c["rope_theta"][i]) for y in (q, k))
        y = attend(q, k, v, d**-0.5, c["sliding_window"] if slides else None)
        y = y * sigmoid(self.linear(f"{name}.g_proj", x))[..., None]
        return self.linear(f"{name}.o_proj", y.reshape(len(x), -1))


class MiMoV2(Reference):
    """Sliding attention with sinks, other widths of values, scaled values."""

    def rows(self, tokens, hidden, index=0):
        name = "model.mtp.layers.0"
        e = self.norm(f"{name}.enorm", self.embed(tokens))
        h = self.norm(f"{name}.hnorm", hidden)
        x = self.linear(f"{name}.eh_proj", np.concatenate([e, h], axis=-1))
        y = self.norm(f"{name}.input_layernorm", x)
        x = x + self.attention(f"{name}.self_attn", y)
        x = x + self.mlp(f"{name}.mlp", self.norm(f"{name}.pre_mlp_layernorm", x))
        return x, self.output(self.norm(f"{name}.final_layernorm", x))

    def attention(self, name, x):
        c, d = self.c, self.c["swa_head_dim"]
        heads, groups = c["swa_num_attention_heads"], c["swa_num_key_value_heads"]
        q = self.linear(f"{name}.q_proj", x).reshape(len(x), heads, d)
        k = self.linear(f"{name}.k_proj", x).reshape(len(x), groups, d)
        v = self.linear(f"{name}.v_proj", x).reshape(len(x), groups, -1)
        dims = int(d * c["partial_rotary_factor"])
        q, k = (rope(y, dims, c["swa_rope_theta"]) for y in (q, k))
        sinks = self.raw[f"{name}.attention_sink_bias"]
        v = v * c["attention_value_scale"]
        y = attend(q, k, v, d**-0.5, c["sliding_window_size"], sinks)
        return self.linear(f"{name}.o_proj", y.reshape(len(x), -1))


class Exaone(Reference):
    """A dense layer with a window, under Qwen's names; plain gains."""

    def rows(self, tokens, hidden, index=0):
        e = self.norm("mtp.pre_fc_norm_embedding", self.embed(tokens))
        h = self.norm("mtp.pre_fc_norm_hidden", hidden)
        x = self.linear("mtp.fc", np.concatenate([e, h], axis=-1))
        x = self.norm("mtp.norm", self.layer("mtp.layers.0", x))
        return x, self.output(x)

    def attention(self, name, x):
        y = self.gqa(name, x, self.c["head_dim"], window=self.c["sliding_window"])
        return self.linear(f"{name}.o_proj", y.reshape(len(x), -1))


class Nemotron(Reference):
    """Attention without positions, then experts with squared ReLU, one norm each."""

    def rows(self, tokens, hidden, index=0):
        first, last = "mtp.layers.0", "mtp.layers.1"
        e = self.norm(f"{first}.enorm", self.raw["backbone.embeddings.weight"][tokens])
        h = self.norm(f"{first}.hnorm", hidden)
        x = self.linear(f"{first}.eh_proj", np.concatenate([e, h], axis=-1))
        y = self.gqa(f"{first}.mixer", self.norm(f"{first}.norm", x), 0)
        x = x + self.linear(f"{first}.mixer.o_proj", y.reshape(len(x), -1))
        x = x + self.feed_forward(f"{last}.mixer", self.norm(f"{last}.norm", x))
        x = self.norm(f"{last}.final_layernorm", x)
        return x, self.output(x)

    feed_forward = Sigmoid.feed_forward

    def mlp(self, name, x):
        y = np.maximum(self.linear(f"{name}.up_proj", x), 0) ** 2
        return self.linear(f"{name}.down_proj", y)


class Ernie(Reference):
    """Behind the layer comes the trunk's own final norm; pairs turn in place."""

    interleaved = True

    def rows(self, tokens, hidden, index=0):
        e = self.norm("model.mtp_emb_norm.0", self.embed(tokens))
        h = self.norm("model.mtp_hidden_norm.0", hidden)
        x = self.linear("model.mtp_linear_proj.0", np.concatenate([e, h], axis=-1))
        x = self.norm("model.norm", self.layer("model.mtp_block.0", x))
        return x, self.output(x)


class LongCat(Reference):
    """One dense layer with latent attention and an embedding of its own."""

    def rows(self, tokens, hidden, index=0):
        name = "model.mtp.layers.0"
        embedded = self.raw["model.mtp.embed_tokens.weight"][tokens]
        e = self.norm(f"{name}.enorm.m", embedded)
        h = self.norm(f"{name}.hnorm.m", hidden)
        x = self.linear(f"{name}.eh_proj", np.concatenate([e, h], axis=-1))
        y = self.mla(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x), 1e-5)
        x = x + self.linear(f"{name}.self_attn.o_proj", y.reshape(len(x), -1))
        y = self.norm(f"{name}.post_attention_layernorm", x)
        x = x + self.mlp(f"{name}.transformer_layer.mlp", y)
        x = self.norm("model.mtp.norm", x)
        return x, self.output(x)

    def scaled(self, q, latent):
        c = self.c
        ranks = (c["hidden_size"] / c[f"{k}_lora_rank"] for k in ("q", "kv"))
        a, b = (rank**0.5 for rank in ranks)
        return q * a, latent * b


class Bailing(Appended):
    final = "final_layernorm"

    def embed(self, tokens):
        return self.raw["model.word_embeddings.weight"][tokens]

    def attention(self, name, x):
        return self.mla(name, x, self.eps)

    def layer(self, name, x):
        y = self.norm(f"{name}.input_layernorm", x)
        y = self.attention(f"{name}.attention", y).reshape(len(x), -1)
        x = x + self.linear(f"{name}.attention.dense", y)
        y = self.norm(f"{name}.post_attention_layernorm", x)
        return x + self.feed_forward(f"{name}.mlp", y)

    def feed_forward(self, name, x):
        c = self.c
        chosen, weights = self.routed(
            sigmoid(x @ self.raw[f"{name}.gate.weight"].T),
            self.raw[f"{name}.gate.expert_bias"],
            c["num_experts_per_tok"],
            c["n_group"],
            c["topk_group"],
            c["routed_scaling_factor"],
            True,
        )
        y = self.experts(name, x, chosen, weights)
        return y + self.mlp(f"{name}.shared_experts", x)


class BailingMoe(Bailing):
    """Grouped attention from one fused projection."""

    def attention(self, name, x):
        c, heads = self.c, self.c["num_attention_heads"]
        groups, d = c["num_key_value_heads"], c["hidden_size"] // heads
        qkv = self.linear(f"{name}.query_key_value", x).reshape(len(x), -1, d)
        q, k, v = np.split(qkv, [heads, heads + groups], axis=1)
        q = self.norm(f"{name}.query_layernorm", q)
        k = self.norm(f"{name}.key_layernorm", k)
        dims = int(d * c["partial_rotary_factor"])
        q, k = (rope(y, dims, c["rope_theta"]) for y in (q, k))
        return attend(q, k, v, d**-0.5)
