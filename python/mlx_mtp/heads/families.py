"""The heads of the families that are built in, one row each, and those refused."""

from __future__ import annotations

from dataclasses import replace

from .module import HeadConfig, Layer
from .registry import Entry, Registry
from .spec import QWEN, HeadSpec


def _qwen(m, args, config, index):
    """Dense layers, with what ``Layer`` has of its own for chained steps."""
    shape = HeadConfig.from_dict(config)
    return [Layer(shape) for _ in range(shape.mtp_num_hidden_layers)]


def _qwen_moe(m, args, config, index):
    shape = HeadConfig.from_dict({"intermediate_size": 0, **config})
    block = getattr(m, "SparseMoeBlock", None) or m.Qwen3NextSparseMoeBlock
    return [Layer(shape, block(args)) for _ in range(shape.mtp_num_hidden_layers)]


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
QWEN_MOE = replace(QWEN, family="Qwen3.5 MoE", layers=_qwen_moe)
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
    source="arXiv:2412.19437, vLLM deepseek_mtp, SGLang deepseek_nextn",
)
GLM = HeadSpec(
    "GLM-4 MoE",
    "glm4_moe",
    _appended("DecoderLayer"),
    APPENDED,
    source="vLLM glm4_moe_mtp, SGLang glm4_moe_nextn",
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
    (("glm4_moe",), GLM, None),
    (("glm4_moe_lite",), GLM_LITE, None),
    (("mimo",), MIMO, None),
):
    for _type in _types:
        HEADS.register(Entry(_type, _spec, _spec.family, _when))
