"""Tiny Gemma 4 models and assistants in raw convention, and an assistant in NumPy."""

import json

import mlx.core as mx
import numpy as np
from families import CONFIGS
from mlx_lm.models.cache import KVCache

SLIDING, FULL = "sliding_attention", "full_attention"
TARGET = CONFIGS["gemma4_text"]
WINDOW = TARGET["sliding_window"]
BACKBONE, WIDTH, HEADS, VOCAB = 64, 32, 4, 96
HEAD_DIM = {SLIDING: 16, FULL: TARGET["global_head_dim"]}
ORDERED = {
    "use_ordered_embeddings": True,
    "num_centroids": 12,
    "centroid_intermediate_top_k": 3,
}


def assistant_config(vocab=VOCAB, **more):
    """A ``config.json`` as Google's: three sliding layers and a full one."""
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": BACKBONE,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM[SLIDING],
            "global_head_dim": HEAD_DIM[FULL],
            "vocab_size": vocab,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "rms_norm_eps": 1e-6,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": 1000000.0,
                    "partial_rotary_factor": 0.25,
                },
            },
        },
        **more,
    }


def assistant_tensors(config, seed=7):
    """Raw tensors, named by hand."""
    rng = np.random.default_rng(seed)
    text = config["text_config"]
    inner, vocab = text["intermediate_size"], text["vocab_size"]

    def matrix(rows, columns):
        x = rng.normal(0, 1.5 * columns**-0.5, (rows, columns))
        return x.astype(np.float32)

    def gain(size):
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": 4 * matrix(vocab, WIDTH),
        "model.norm.weight": gain(WIDTH),
        "pre_projection.weight": matrix(WIDTH, 2 * BACKBONE),
        "post_projection.weight": matrix(BACKBONE, WIDTH),
    }
    # A tied head is stored too now and then.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 4 * matrix(vocab, WIDTH)
    if config.get("use_ordered_embeddings"):
        centroids = config["num_centroids"]
        tensors["masked_embedding.centroids.weight"] = matrix(centroids, WIDTH)
        tensors["masked_embedding.token_ordering"] = rng.permutation(vocab)
    for i, kind in enumerate(text["layer_types"]):
        layer = {
            "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM[kind], WIDTH),
            "self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD_DIM[kind]),
            "self_attn.q_norm.weight": gain(HEAD_DIM[kind]),
            "mlp.gate_proj.weight": matrix(inner, WIDTH),
            "mlp.up_proj.weight": matrix(inner, WIDTH),
            "mlp.down_proj.weight": matrix(WIDTH, inner),
            "input_layernorm.weight": gain(WIDTH),
            "post_attention_layernorm.weight": gain(WIDTH),
            "pre_feedforward_layernorm.weight": gain(WIDTH),
            "post_feedforward_layernorm.weight": gain(WIDTH),
            "layer_scalar": gain(1),
        }
        tensors |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    return tensors


def save_assistant(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(x) for name, x in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


class Reference:
    """An assistant's forward in float64, from the published description."""

    def __init__(self, config, tensors):
        self.config, self.text = config, config["text_config"]
        self.t = {name: np.float64(x) for name, x in tensors.items()}

    def step(self, embedded, hidden, memory, position):
        """One draft: logits by token id, and what the next step reads for ``hidden``.

        ``memory`` has keys and values ``(heads, rows, width)`` by kind of attention.
        """
        x = self.t["pre_projection.weight"] @ np.concatenate([embedded, hidden])
        for i, kind in enumerate(self.text["layer_types"]):
            layer = f"model.layers.{i}."
            y = self.norm(x, layer + "input_layernorm")
            y = self.attend(layer, kind, y, *memory[kind], position)
            x = x + self.norm(y, layer + "post_attention_layernorm")
            y = self.norm(x, layer + "pre_feedforward_layernorm")
            gate = self.linear(layer + "mlp.gate_proj", y)
            cubic = gate + 0.044715 * gate**3
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * cubic))
            y = gate * self.linear(layer + "mlp.up_proj", y)
            y = self.linear(layer + "mlp.down_proj", y)
            x = x + self.norm(y, layer + "post_feedforward_layernorm")
            x = x * self.t[layer + "layer_scalar"]
        x = self.norm(x, "model.norm")
        return self.logits(x), self.linear("post_projection", x)

    def attend(self, layer, kind, x, keys, values, position):
        q = self.linear(layer + "self_attn.q_proj", x).reshape(HEADS, -1)
        q = self.norm(q, layer + "self_attn.q_norm")
        q = self.rotate(q, self.text["rope_parameters"][kind], position)
        shared = HEADS // len(keys)
        out = []
        for head in range(HEADS):
            scores = keys[head // shared] @ q[head]  # not scaled
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ values[head // shared])
        return self.linear(layer + "self_attn.o_proj", np.concatenate(out))

    def rotate(self, q, rope, position):
        size = q.shape[1]
        pairs = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        out = q.copy()
        for i in range(pairs):
            angle = position * rope["rope_theta"] ** (-2 * i / size)
            a, b = q[:, i], q[:, i + size // 2]
            out[:, i] = a * np.cos(angle) - b * np.sin(angle)
            out[:, i + size // 2] = a * np.sin(angle) + b * np.cos(angle)
        return out

    def logits(self, x):
        tied = self.config["tie_word_embeddings"]
        rows = self.t["model.embed_tokens.weight" if tied else "lm_head.weight"]
        if not self.config.get("use_ordered_embeddings"):
            return rows @ x
        scores = self.linear("masked_embedding.centroids", x)
        best = np.argsort(scores)[-self.config["centroid_intermediate_top_k"] :]
        order = self.t["masked_embedding.token_ordering"].astype(int)
        ids = order.reshape(len(scores), -1)[best].ravel()
        logits = np.full(len(rows), -np.inf)
        logits[ids] = rows[ids] @ x
        return logits

    def linear(self, name, x):
        return self.t[name + ".weight"] @ x

    def norm(self, x, name):
        scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
        return x / scale * self.t[name + ".weight"]

    def drafts(self, model, tokens, depth):
        """Greedy drafts behind ``tokens``, the last of which is not cached yet."""
        hidden, memory = whole_context(model, tokens[:-1])
        token, out = tokens[-1], []
        for _ in range(depth):
            table = model.model.embed_tokens.weight
            embedded = np.float64(table[token]) * BACKBONE**0.5
            logits, hidden = self.step(embedded, hidden, memory, len(tokens) - 1)
            token = int(logits.argmax())
            out.append(token)
        return out


def whole_context(model, tokens):
    """The last hidden row behind ``tokens``, and the keys and values of the last layer
    of each kind that has them: of all tokens, or of the window's."""
    caches = [KVCache() for _ in model.make_cache()]
    hidden = model.model(mx.array([tokens]), cache=caches)[0, -1]
    memory = {}
    for i, cache in enumerate(caches):  # later layers win
        kind = model.args.layer_types[i]
        first = max(len(tokens) - WINDOW, 0) if kind == SLIDING else 0
        memory[kind] = [
            np.float64(x[0])[:, first : len(tokens)] for x in (cache.keys, cache.values)
        ]
    return np.float64(hidden), memory
