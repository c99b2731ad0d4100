"""Random models of ``mlx_lm`` families, as small as their code allows."""

from importlib import import_module
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
_MAMBA2 = {"conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True}

CONFIGS = {
    # Sliding and chunked windows of 16
    "llama": {
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "layer_types": _SLIDING,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4": {
        "text_config": {
            **_COMMON,
            "model_type": "llama4",
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    # Recurrent states
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        **_MAMBA2,
        "num_heads": 8,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": 4,
    },
    "nemotron_h": {
        **_MAMBA2,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
    },
    "falcon_h1": {
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
    },
    "granitemoehybrid": {
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "lfm2": {
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}


def family_config(name: str, **more) -> dict:
    """What ``config.json`` has of ``CONFIGS[name]``."""
    return {**_COMMON, **CONFIGS[name], "model_type": name, **more}


def tiny_family(name: str, seed: int = 0, **more):
    """The model of ``CONFIGS[name]``, its weights drawn so that its logits differ."""
    module = import_module(f"mlx_lm.models.{name}")
    config = family_config(name, **more)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_lively, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _lively(x: mx.array) -> mx.array:
    """Weights large enough that the newest token is not all that counts."""
    if x.ndim < 2:
        return x
    return 1.5 * x.shape[-1] ** -0.5 * mx.random.normal(x.shape)


class WindowModel(nn.Module):
    """Attention layers with caches of any class, each with a mask of its own.

    Args:
        caches: Makes the cache of each layer.
    """

    model_type = "window"

    def __init__(self, *caches, vocab=96, hidden=64, heads=2, seed=0):
        super().__init__()
        mx.random.seed(seed)
        self.args = SimpleNamespace(vocab_size=vocab)
        self.heads, self._make = heads, caches
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = [nn.Linear(hidden, 4 * hidden, bias=False) for _ in caches]
        self.rope = nn.RoPE(hidden // heads)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.update(tree_map(_lively, self.parameters()))
        mx.eval(self.parameters())

    def make_cache(self):
        return [make() for make in self._make]

    def __call__(self, tokens, cache):
        x = self.embed(tokens)
        for layer, c in zip(self.layers, cache, strict=True):
            mask = create_attention_mask(x, c)
            q, k, v, gate = (
                y.reshape(*tokens.shape, self.heads, -1).swapaxes(1, 2)
                for y in mx.split(layer(mx.fast.rms_norm(x, None, 1e-6)), 4, axis=-1)
            )
            q, k = self.rope(q, offset=c.offset), self.rope(k, offset=c.offset)
            k, v = c.update_and_fetch(k, v)
            y = scaled_dot_product_attention(q, k, v, cache=c, scale=1.0, mask=mask)
            x = x + (y * nn.sigmoid(gate)).swapaxes(1, 2).reshape(x.shape)
        return self.head(mx.fast.rms_norm(x, None, 1e-6))
