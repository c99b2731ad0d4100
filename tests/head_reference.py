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


def attend(q, k, v, scale, window=None, sinks=None):
    """``q`` ``(T, heads, D)`` to ``k`` and ``v`` ``(T, kv heads, D)``, causally."""
    heads, groups = q.shape[1], k.shape[1]
    k, v = (np.repeat(x, heads // groups, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale
    rows, slots = np.ogrid[: len(q), : len(k)]
    seen = slots <= rows
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
        q = self.linear(f"{name}.q_a_proj", x)
        q = self.linear(f"{name}.q_b_proj", self.norm(f"{name}.q_a_layernorm", q, eps))
        q = q.reshape(len(x), heads, -1)
        kv = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        latent, k_pe = kv[:, :-turned], kv[:, None, -turned:]
        latent = self.norm(f"{name}.kv_a_layernorm", latent, eps)
        q, latent = self.scaled(q, latent)
        kv = self.linear(f"{name}.kv_b_proj", latent).reshape(len(x), heads, -1)
        q_pe = rope(q[..., nope:], turned, c["rope_theta"], True)
        k_pe = np.repeat(rope(k_pe, turned, c["rope_theta"], True), heads, axis=1)
        q = np.concatenate([q[..., :nope], q_pe], axis=-1)
        k = np.concatenate([kv[..., :nope], k_pe], axis=-1)
        return attend(q, k, kv[..., nope:], q.shape[-1] ** -0.5)

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
