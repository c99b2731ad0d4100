"""The heads of the families that are built in, one row each, and those refused."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from .module import Block, HeadConfig, Layer
from .registry import Entry, Registry
from .spec import QWEN, HeadSpec


def _qwen(m, args, config, index):
    """Layers of ``Layer``, for what that has for chained steps."""
    shape = HeadConfig.from_dict({"intermediate_size": 0, **config})
    attention = getattr(m, "Attention", None) or m.Qwen3NextAttention
    experts = getattr(m, "SparseMoeBlock", None) or m.Qwen3NextSparseMoeBlock
    return [
        Layer(
            shape,
            experts(args) if args.num_experts else None,
            attention(args).rope,  # scaled as the trunk's
        )
        for _ in range(shape.mtp_num_hidden_layers)
    ]


def _appended(name):
    """The family's own layer, numbered as if it came behind the trunk's."""
    return lambda m, args, config, index: [
        getattr(m, name)(args, args.num_hidden_layers + index)
    ]


APPENDED = (
    (r"model\.layers\.{layer}\.enorm\.", "pre_fc_norm_embedding."),
    (r"model\.layers\.{layer}\.hnorm\.", "pre_fc_norm_hidden."),
    (r"model\.layers\.{layer}\.eh_proj\.", "fc."),
    (r"model\.layers\.{layer}\.shared_head\.norm\.", "norm."),
    (r"model\.layers\.{layer}\.final_layernorm\.", "norm."),
    (r"model\.layers\.{layer}\.shared_head\.(head|output)\.", None),
    (r"model\.layers\.{layer}\.embed_tokens\.", None),
    (r"model\.layers\.{layer}\.", "layers.0."),
)

DENSE = replace(QWEN, layers=_qwen)
QWEN_MOE = replace(DENSE, family="Qwen3.5 MoE")
QWEN_NEXT = replace(
    QWEN_MOE,
    family="Qwen3-Next",
    module="qwen3_next",
    source="vLLM and SGLang qwen3_next_mtp",
)
DEEPSEEK = HeadSpec(
    "DeepSeek V3",
    "deepseek_v3",
    _appended("DeepseekV3DecoderLayer"),
    APPENDED,
    source="SGLang deepseek_nextn, vLLM deepseek_mtp, arXiv:2412.19437",
)
GLM = HeadSpec(
    "GLM-4 MoE",
    "glm4_moe",
    _appended("DecoderLayer"),
    APPENDED,
    source="SGLang glm4_moe_nextn, vLLM glm4_moe_mtp",
)
GLM_LITE = HeadSpec(
    "GLM-4 MoE Lite",
    "glm4_moe_lite",
    _appended("Glm4MoeLiteDecoderLayer"),
    APPENDED,
    source="vLLM glm4_moe_lite_mtp",
)
MIMO = HeadSpec(
    "MiMo",
    "mimo",
    lambda m, args, config, index: [m.TransformerBlock(args)],
    (
        (r"model\.mtp_layers\.{index}\.token_layernorm\.", "pre_fc_norm_embedding."),
        (r"model\.mtp_layers\.{index}\.hidden_layernorm\.", "pre_fc_norm_hidden."),
        (r"model\.mtp_layers\.{index}\.input_proj\.", "fc."),
        (r"model\.mtp_layers\.{index}\.final_layernorm\.", "norm."),
        (r"model\.mtp_layers\.{index}\.", "layers.0."),
    ),
    order=("hidden", "embedding"),
    source="vLLM mimo_mtp",
)


def _nemotron(m, args, config, index):
    pattern = config.get("mtp_hybrid_override_pattern") or "*E"
    if set(pattern) - {"*", "E", "-"}:
        raise ValueError(f"An MTP head of the pattern {pattern} is not supported.")
    return [m.NemotronHBlock(args, kind) for kind in pattern]


def _longcat(m, args, config, index):
    attention, mlp = m.LongcatFlashMLA(args), m.LongcatFlashMLP(args)
    return [Block(attention, mlp, args.hidden_size, args.rms_norm_eps)]


def _exaone(m, args, config, index):
    """Dense; its attention is of a kind of its own, or as the trunk's first."""
    kind = (config.get("mtp_layer_types") or args.layer_types)[0]
    return [
        m.DecoderLayer(
            replace(
                args,
                layer_types=[kind, *args.layer_types[1:]],
                is_moe_layer=[False] * len(args.is_moe_layer),
            ),
            0,
        )
    ]


def _sparse(m, args, config, index):
    """GLM's module has DeepSeek's layers."""
    home = import_module("mlx_lm.models.deepseek_v32")
    return [home.DeepseekV32DecoderLayer(args, args.num_hidden_layers + index)]


DEEPSEEK_V32 = HeadSpec(
    "DeepSeek V3.2",
    "deepseek_v32",
    _sparse,
    APPENDED,
    source="vLLM deepseek_mtp",
)
GLM_DSA = replace(DEEPSEEK_V32, family="GLM MoE DSA", module="glm_moe_dsa")
STEP = HeadSpec(
    "Step 3.5",
    "step3p5",
    _appended("Step3p5DecoderLayer"),
    (
        *APPENDED[:4],
        (r"model\.layers\.{layer}\.shared_head\.(head|output)\.", "lm_head."),
        (r"model\.layers\.{layer}\.embed_tokens\.", None),
        (r"model\.layers\.{layer}\.(transformer\.)?", "layers.0."),
    ),
    hidden="pre",
    norm_offset=True,
    own=("output",),
    count="num_nextn_predict_layers",
    converter="",
    source="SGLang and vLLM step3p5_mtp",
)
MIMO_V2 = HeadSpec(
    "MiMo V2",
    "mimo_v2_flash",
    lambda m, args, config, index: [m.DecoderLayer(args, False, True)],
    (
        (r"mtp\.layers\.0\.enorm\.", "pre_fc_norm_embedding."),
        (r"mtp\.layers\.0\.hnorm\.", "pre_fc_norm_hidden."),
        (r"mtp\.layers\.0\.eh_proj\.", "fc."),
        (r"mtp\.layers\.0\.final_layernorm\.", "norm."),
        (
            r"mtp\.layers\.0\.pre_mlp_layernorm\.",
            "layers.0.post_attention_layernorm.",
        ),
        (r"mtp\.layers\.0\.", "layers.0."),
        (r"mtp\.layers\.\d+\.", None),
    ),
    hidden="pre",
    eps="layernorm_epsilon",
    source="SGLang mimo_v2_flash_nextn, vLLM mimo_v2_mtp",
)
EXAONE = HeadSpec(
    "EXAONE MoE",
    "exaone_moe",
    _exaone,
    ((r"mtp\.", ""),),
    converter="",
    source="vLLM exaone_moe_mtp",
)
NEMOTRON = HeadSpec(
    "Nemotron-H",
    "nemotron_h",
    _nemotron,
    (
        (r"mtp\.layers\.\d+\.enorm\.", "pre_fc_norm_embedding."),
        (r"mtp\.layers\.\d+\.hnorm\.", "pre_fc_norm_hidden."),
        (r"mtp\.layers\.\d+\.eh_proj\.", "fc."),
        (r"mtp\.layers\.\d+\.final_layernorm\.", "norm."),
        (r"mtp\.layers\.", "layers."),
    ),
    trunk="backbone",
    eps="layer_norm_epsilon",
    source="vLLM nemotron_h_mtp",
)
ERNIE = HeadSpec(
    "ERNIE 4.5 MoE",
    "ernie4_5_moe",
    # A number in front of the first layer with experts: the head is dense.
    lambda m, args, config, index: [m.Ernie4_5_DecoderLayer(args, -1)],
    (
        (r"model\.mtp_emb_norm\.{index}\.", "pre_fc_norm_embedding."),
        (r"model\.mtp_hidden_norm\.{index}\.", "pre_fc_norm_hidden."),
        (r"model\.mtp_linear_proj\.{index}\.", "fc."),
        (r"model\.mtp_block\.{index}\.", "layers.0."),
    ),
    borrowed=((r"model\.norm\.", "norm."),),
    source="FastDeploy ernie4_5_mtp, vLLM ernie_mtp",
)
LONGCAT = HeadSpec(
    "LongCat Flash",
    "longcat_flash",
    _longcat,
    (
        (r"mtp\.layers\.0\.enorm\.m\.", "pre_fc_norm_embedding."),
        (r"mtp\.layers\.0\.hnorm\.m\.", "pre_fc_norm_hidden."),
        (r"mtp\.layers\.0\.eh_proj\.", "fc."),
        (r"mtp\.layers\.0\.transformer_layer\.", "layers.0."),
        (r"mtp\.layers\.0\.", "layers.0."),
        (r"mtp\.norm\.", "norm."),
        (r"mtp\.embed_tokens\.", "embed_tokens."),
    ),
    own=("embedding",),
    converter="deepseek_v3",
    source="vLLM longcat_flash_mtp",
)
BAILING = HeadSpec(
    "Bailing hybrid",
    "bailing_hybrid",
    _appended("DecoderLayer"),
    APPENDED,
    source="vLLM bailing_moe_mtp, SGLang bailing_moe_nextn",
)

BAILING_MOE = replace(
    BAILING,
    family="Bailing MoE",
    module="bailing_moe",
    layers=_appended("BailingMoeDecoderLayer"),
    source="SGLang bailing_moe_nextn",
)

_UNKNOWN = "no description of its head was found"
REFUSED = {
    "deepseek_v41": "its head, with hyper-connections, is not built yet",
    "bailing_moe_v3": _UNKNOWN,
    "kimi_linear": _UNKNOWN,
    "kimi_k3": _UNKNOWN,
}

HEADS: Registry[HeadSpec] = Registry("MTP head")


def _has_experts(config) -> bool:
    return bool(config.get("num_experts"))


for _types, _spec, _when in (
    (("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), DENSE, None),
    (
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        QWEN_MOE,
        _has_experts,
    ),
    (("qwen3_next",), QWEN_NEXT, None),
    (("deepseek_v3",), DEEPSEEK, None),
    (("deepseek_v32",), DEEPSEEK_V32, None),
    (("glm_moe_dsa",), GLM_DSA, None),
    (("glm4_moe",), GLM, None),
    (("glm4_moe_lite",), GLM_LITE, None),
    (("mimo",), MIMO, None),
    (("mimo_v2_flash",), MIMO_V2, None),
    (("step3p5",), STEP, None),
    (("exaone_moe",), EXAONE, None),
    (("nemotron_h",), NEMOTRON, None),
    (("ernie4_5_moe",), ERNIE, None),
    (("longcat_flash",), LONGCAT, None),
    (("bailing_hybrid",), BAILING, None),
    (("bailing_moe",), BAILING_MOE, None),
):
    for _type in _types:
        HEADS.register(Entry(_type, _spec, _spec.family, _when))
