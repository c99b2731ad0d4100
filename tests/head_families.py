"""Tiny checkpoints with MTP heads, in the form in which Hugging Face has them."""

import json
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import head_reference as ref
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v32, qwen3_5, qwen3_next

from mlx_mtp.loading import DEMO

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
SIGMOID = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
INDEXER = {
    "index_head_dim": 24,
    "index_n_heads": 12,  # scores of zero, which tie, are rare
    "index_topk": 6,
    "indexer_rope_interleave": False,
}
GATED_DELTA = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
SOFTMAX = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
PARTIAL = {"partial_rotary_factor": 0.25, "rope_theta": 10000.0}


@dataclass(frozen=True)
class Tiny:
    """One family.

    Args:
        config (dict): Its ``config.json``, beside ``COMMON``.
        reference: The class of ``head_reference``.
        layers (callable): ``layers(module, args, n)``: ``mlx_lm`` layers with the
            shapes of the head's, by the beginning of their raw names.
        norms (str): Names of the head's norms, ``projection`` of its joint.
    """

    config: dict
    reference: type
    layers: object
    norms: tuple[str, ...]
    projection: str
    more: object = None  # further tensors of the head, by name
    zero_centred: bool = False
    pre: str = ""  # the trunk's final norm, for heads that read what is before it


def appended(layer, final="shared_head.norm", copies=True):
    """A family whose head is one more layer behind the trunk's two."""
    start = "model.layers.2."
    norms = tuple(start + name for name in ("enorm", "hnorm", final))
    more = {
        start + "embed_tokens.weight": (96, 64),
        start + "shared_head.head.weight": (96, 64),
    }
    return {
        "layers": lambda m, args: {start: getattr(m, layer)(args, 2)},
        "norms": norms,
        "projection": start + "eh_proj",
        "more": more if copies else None,
    }


def _qwen_layers(m, args):
    args.full_attention_interval = 1
    layer = qwen3_5.DecoderLayer
    if args.model_type == "qwen3_next":
        layer = qwen3_next.Qwen3NextDecoderLayer
    return {"mtp.layers.0.": layer(args, 0)}


QWEN = {
    "reference": ref.Qwen,
    "layers": _qwen_layers,
    "norms": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "projection": "mtp.fc",
    "zero_centred": True,
}
MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "final_layernorm")

FAMILIES = {
    "qwen3_5": Tiny({**GATED_DELTA, "rope_parameters": PARTIAL}, **QWEN),
    "qwen3_5_moe": Tiny({**GATED_DELTA, **SOFTMAX, "rope_parameters": PARTIAL}, **QWEN),
    "qwen3_next": Tiny({**GATED_DELTA, **SOFTMAX, **PARTIAL}, **QWEN),
    "deepseek_v3": Tiny(
        {**MLA, **SIGMOID, "num_key_value_heads": 4},
        ref.DeepSeek,
        **appended("DeepseekV3DecoderLayer"),
    ),
    "deepseek_v32": Tiny(
        {**MLA, **SIGMOID, **INDEXER, "num_key_value_heads": 4},
        ref.Sparse,
        **appended("DeepseekV32DecoderLayer"),
    ),
    "glm_moe_dsa": Tiny(
        {
            **MLA,
            **SIGMOID,
            **INDEXER,
            "num_key_value_heads": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "indexer_rope_interleave": True,
        },
        ref.Sparse,
        **(
            appended("")
            | {
                "layers": lambda m, args: {
                    "model.layers.2.": deepseek_v32.DeepseekV32DecoderLayer(args, 2)
                }
            }
        ),
    ),
    "glm4_moe": Tiny(
        {
            **SIGMOID,
            "attention_bias": True,
            "rope_scaling": None,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
        ref.Glm,
        **appended("DecoderLayer"),
    ),
    "glm4_moe_lite": Tiny(
        {**MLA, **SIGMOID, "num_key_value_heads": 4},
        ref.DeepSeek,
        **appended("Glm4MoeLiteDecoderLayer"),
    ),
    "mimo": Tiny(
        {"num_nextn_predict_layers": 1},
        ref.MiMo,
        lambda m, args: {"model.mtp_layers.0.": m.TransformerBlock(args)},
        tuple(f"model.mtp_layers.0.{name}" for name in MIMO_NAMES),
        "model.mtp_layers.0.input_proj",
    ),
    "mimo_v2_flash": Tiny(
        {
            **SIGMOID,
            "n_shared_experts": None,
            "n_group": 1,
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 5000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "swa_v_head_dim": 12,
            "v_head_dim": 12,
            "partial_rotary_factor": 0.5,
            "attention_value_scale": 0.7,
        },
        ref.MiMoV2,
        lambda m, args: {"model.mtp.layers.0.": m.DecoderLayer(args, False, True)},
        tuple(
            f"model.mtp.layers.0.{name}"
            for name in ("enorm", "hnorm", "final_layernorm")
        ),
        "model.mtp.layers.0.eh_proj",
        {"model.mtp.layers.1.eh_proj.weight": (64, 128)},
        pre="model.norm",
    ),
    "step3p5": Tiny(
        {
            "num_attention_groups": 2,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full"],
            "sliding_window": 4,
            "attention_other_setting": {
                "num_attention_heads": 2,
                "num_attention_groups": 1,
            },
            "rope_theta": [1e4, 2e4, 3e4, 4e4, 5e4],
            "partial_rotary_factors": [1.0, 0.5, 0.5, 1.0, 0.5],
            "moe_layers_enum": "1",
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "num_nextn_predict_layers": 3,
        },
        ref.Step,
        lambda m, args: {
            f"model.layers.{i}.transformer.": m.Step3p5DecoderLayer(args, i)
            for i in (2, 3, 4)
        },
        tuple(
            f"model.layers.{i}.{name}"
            for i in (2, 3, 4)
            for name in ("enorm", "hnorm", "shared_head.norm")
        ),
        "",
        {
            f"model.layers.{i}.{name}.weight": shape
            for i in (2, 3, 4)
            for name, shape in {
                "eh_proj": (64, 128),
                "shared_head.output": (96, 64),
            }.items()
        },
        zero_centred=True,
        pre="model.norm",
    ),
    "exaone_moe": Tiny(
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "is_moe_layer": [False, True],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
        },
        ref.Exaone,
        lambda m, args: {"mtp.layers.0.": m.DecoderLayer(args, 0)},
        QWEN["norms"],
        "mtp.fc",
    ),
    "nemotron_h": Tiny(
        {
            **SIGMOID,
            "hybrid_override_pattern": ["M", "*", "E"],
            "mtp_hybrid_override_pattern": "*E",
            "moe_shared_expert_intermediate_size": 32,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
        },
        ref.Nemotron,
        lambda m, args: {
            f"mtp.layers.{i}.": m.NemotronHBlock(args, kind)
            for i, kind in enumerate("*E")
        },
        ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"),
        "mtp.layers.0.eh_proj",
    ),
    "ernie4_5_moe": Tiny(
        {
            "use_bias": False,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
        ref.Ernie,
        lambda m, args: {"model.mtp_block.0.": m.Ernie4_5_DecoderLayer(args, 0)},
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
        "model.mtp_linear_proj.0",
    ),
    "longcat_flash": Tiny(
        {
            **MLA,
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "ffn_hidden_size": 96,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "num_layers": 2,
            "routed_scaling_factor": 1.5,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
        ref.LongCat,
        lambda m, args: {
            "model.mtp.layers.0.self_attn.": m.LongcatFlashMLA(args),
            "model.mtp.layers.0.transformer_layer.mlp.": m.LongcatFlashMLP(args),
        },
        (
            "model.mtp.layers.0.enorm.m",
            "model.mtp.layers.0.hnorm.m",
            "model.mtp.layers.0.input_layernorm",
            "model.mtp.layers.0.post_attention_layernorm",
            "model.mtp.norm",
        ),
        "model.mtp.layers.0.eh_proj",
        {"model.mtp.embed_tokens.weight": (96, 64)},
    ),
    "bailing_hybrid": Tiny(
        {
            **MLA,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "layer_group_size": 2,
            "group_norm_size": 2,
            "routed_scaling_factor": 1.5,
        },
        ref.Bailing,
        **appended("DecoderLayer", "final_layernorm", copies=False),
    ),
    "bailing_moe": Tiny(
        {
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
        ref.BailingMoe,
        **appended("BailingMoeDecoderLayer", "final_layernorm", copies=False),
    ),
}


# Names of mlx_lm's that are not the checkpoint's
RENAMED = {
    "mimo_v2_flash": {"mtp.layers.0.post_attention_": "mtp.layers.0.pre_mlp_"},
    "exaone_moe": {"mlp.gate.e_score": "mlp.e_score"},
    "bailing_hybrid": {"mlp.gate.gate_proj": "mlp.gate"},
    "bailing_moe": {"mlp.gate.gate_proj": "mlp.gate"},
    "nemotron_h": {"fc1": "up_proj", "fc2": "down_proj"},
    "step3p5": {
        "mlp.switch_mlp.": "moe.",
        "mlp.gate.gate.": "moe.gate.",
        "mlp.gate.router_bias": "moe.router_bias",
        "mlp.share_expert.": "share_expert.",
    },
}


def full_config(family):
    return {**COMMON, **FAMILIES[family].config, "model_type": family}


def tiny_checkpoint(family, folder: Path, seed=0):
    """Writes a random checkpoint with a head and returns its reference."""
    tiny, config = FAMILIES[family], full_config(family)
    module = import_module(f"mlx_lm.models.{family}")
    arguments = module.ModelArgs
    if family.startswith("qwen3_5"):
        arguments = qwen3_5.TextModelArgs
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    tensors = raw(model, config, "")
    for start, layer in tiny.layers(module, arguments.from_dict(config)).items():
        tensors |= raw(layer, config, start)
    shapes = {f"{name}.weight": (64,) for name in tiny.norms}
    if tiny.projection:
        shapes[f"{tiny.projection}.weight"] = (64, 128)
    tensors |= {name: mx.zeros(s) for name, s in (shapes | (tiny.more or {})).items()}
    tensors = {name: lively(name, x, tiny) for name, x in tensors.items()}
    folder.mkdir(exist_ok=True)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    arrays = {name: np.array(x, np.float64) for name, x in tensors.items()}
    return SimpleNamespace(
        reference=tiny.reference(arrays, config), config=config, raw=arrays
    )


def lively(name, x, tiny):
    """Values that matter: gains near 1, weights that keep the scale of rows."""
    if "A_log" in name or "dt_bias" in name:
        return x
    noise = mx.random.normal(x.shape)
    if x.ndim == 1 and ("norm" in name or name.endswith(".D")):
        off = tiny.zero_centred and "linear_attn" not in name
        return 0.2 * noise + (0 if off else 1)
    return (0.1 if x.ndim == 1 else 1.2 * x.shape[-1] ** -0.5) * noise


def raw(module, config, start):
    """Parameters of an mlx_lm module under the names and shapes of the original."""
    flat = dict(tree_flatten(module.parameters()))
    done = {}
    for name in flat:
        for plain, x in _raw(name, flat, config).items():
            plain = start + plain
            for ours, original in RENAMED.get(config["model_type"], {}).items():
                plain = plain.replace(ours, original)
            done[plain] = x
    return done


def _raw(name, flat, config):
    x, plain = flat[name], name.removeprefix("language_model.")
    if "switch_mlp." in plain and config["model_type"] != "step3p5":
        return _experts(plain, flat, name, config)
    if "unembed_out" in plain:
        return {}
    if "embed_q" in plain:
        values = flat[name.replace("embed_q", "unembed_out")]
        both = mx.concatenate([x.swapaxes(-1, -2), values], axis=1)
        name = plain.replace("embed_q", "kv_b_proj")
        return {name: both.reshape(-1, both.shape[-1])}
    if "conv1d.weight" in plain:
        x = x.moveaxis(1, 2)
    return {plain: x}


def _experts(plain, flat, name, config):
    x = flat[name]
    if config["model_type"] != "qwen3_5_moe":
        begin, end = plain.split("switch_mlp.")
        return {f"{begin}experts.{e}.{end}": x[e] for e in range(len(x))}
    begin = plain[: plain.index("switch_mlp.")] + "experts."
    if "down_proj" in plain:
        return {begin + "down_proj": x}
    if "up_proj" in plain:
        return {}
    up = flat[name.replace("gate_proj", "up_proj")]
    return {begin + "gate_up_proj": mx.concatenate([x, up], axis=-2)}
