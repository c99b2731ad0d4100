"""The known thinking families, as data.

A row says how a family marks its thoughts. What one checkpoint of the family does with
its switch is decided by its chat template, see `resolve.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import (
    ALWAYS,
    Frame,
    PromptStrategy,
    ReasoningConfig,
    Transition,
)
from .errors import ReasoningError


class UnknownFamily(ReasoningError):
    """No row has this name."""

    def __init__(self, name: str):
        self.name = name
        super().__init__(
            f"[reasoning] family must be one of {', '.join(FAMILIES)} but is {name!r}. "
            "Pass a ReasoningConfig for any other model."
        )


@dataclass(frozen=True)
class Family:
    """One row.

    Attributes:
        config: What `family(name)` gives.
        model_types: `model_type` values of config.json that belong to the row.
        source: Where the row comes from.
        checked: The real tokenizer it was tried on, empty if none.
    """

    config: ReasoningConfig
    model_types: tuple[str, ...]
    source: str
    checked: str = ""


# Qwen's own text for a budget that is used up; the space after the newlines is theirs.
QWEN_TRANSITION = Transition(
    "\n\n Considering the limited time by the user, I have to give the solution based "
    "on the thinking directly now.\n",
    "\n\n",
)

flag = PromptStrategy.flag
_TOOL = ("<tool_call>",)
_CHATML = "<|im_start|>assistant"


def _think(**fields) -> ReasoningConfig:
    return ReasoningConfig("<think>", "</think>", **fields)


_ROWS = (
    Family(
        _think(
            family="qwen3",
            strategy=flag(),
            implicit_ends=_TOOL,
            tools="hermes",
            transition=QWEN_TRANSITION,
            opens=False,
            turn=_CHATML,
        ),
        ("qwen3", "qwen3_moe"),
        "Qwen3 chat template; Qwen3 docs, thinking_budget.md",
        "Qwen3",
    ),
    Family(
        _think(
            family="qwen3_5",
            strategy=flag(),
            implicit_ends=_TOOL,
            tools="qwen_xml",
            opens=True,
            turn=_CHATML,
        ),
        ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
        "vLLM qwen3 reasoning parser; the embedded demo model has this layout",
        "Qwen3.5, demo",
    ),
    Family(
        _think(
            family="qwen3_next",
            strategy=flag(),
            implicit_ends=_TOOL,
            tools="hermes",
            turn=_CHATML,
        ),
        ("qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
        "vLLM qwen3 reasoning parser",
        "Qwen3",
    ),
    Family(
        _think(
            family="deepseek_r1",
            strategy=ALWAYS,
            tools="deepseek",
            implicit_ends=("<｜tool▁calls▁begin｜>",),
            opens=True,
            turn="<｜Assistant｜>",
        ),
        (),
        "DeepSeek R1 chat template; vLLM deepseek_r1 reasoning parser",
        "DeepSeek V4",
    ),
    Family(
        _think(
            family="deepseek_v3",
            strategy=flag("thinking", default_on=False),
            tools="deepseek",
            implicit_ends=("<｜tool▁calls▁begin｜>",),
            opens=True,
            turn="<｜Assistant｜>",
        ),
        ("deepseek_v3",),
        "DeepSeek V3.1 chat template",
        "DeepSeek V4",
    ),
    Family(
        _think(
            family="deepseek_v3_2",
            strategy=flag("thinking", default_on=False),
            tools="dsml",
            implicit_ends=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
            opens=True,
            turn="<｜Assistant｜>",
        ),
        ("deepseek_v32", "deepseek_v4"),
        "DeepSeek V3.2 encoding_dsv32.py; vLLM deepseek_v3 and v4 parsers",
        "DeepSeek V4",
    ),
    Family(
        _think(
            family="glm",
            strategy=flag(),
            implicit_ends=_TOOL,
            tools="glm",
            turn="<|assistant|>",
        ),
        ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa"),
        "GLM 4.5 and 4.6 chat templates; SGLang glm45 detector",
    ),
    Family(
        _think(
            family="kimi_k2",
            strategy=flag("thinking"),
            tools="kimi",
            implicit_ends=("<|tool_calls_section_begin|>",),
            turn="<|im_assistant|>assistant<|im_middle|>",
        ),
        ("kimi_k2", "kimi_k25"),
        "Kimi K2 Thinking chat template; vLLM kimi_k2 reasoning parser",
    ),
    Family(
        ReasoningConfig("◁think▷", "◁/think▷", family="kimi_vl"),
        ("kimi_vl",),
        "SGLang kimi detector",
    ),
    Family(
        ReasoningConfig(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            family="kimi_k3",
            strategy=flag("thinking"),
            tools="kimi_k3",
            implicit_ends=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
            wrappers=(
                ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
                ("", "<|close|>message<|sep|>"),
            ),
            efforts={
                level: {"thinking_effort": level}
                for level in ("low", "medium", "high", "max")
            },
            opens=True,
            turn='<|open|>message role="assistant"<|sep|>',
        ),
        ("kimi_k3",),
        "Kimi K3 chat template; vLLM kimi_k3 reasoning parser",
    ),
    Family(
        ReasoningConfig(
            "<|channel|>analysis<|message|>",
            "<|end|>",
            family="gpt_oss",
            strategy=ALWAYS,
            tools="harmony",
            # The protocol's own step from a thought to the answer.
            transition=Transition("", "<|start|>assistant<|channel|>final<|message|>"),
            efforts={
                level: {"reasoning_effort": level}
                for level in ("low", "medium", "high")
            },
            opens=False,
            turn="<|start|>assistant",
            frame=Frame(
                ("<|start|>", "<|channel|>"),
                "<|message|>",
                ("<|end|>", "<|call|>", "<|return|>"),
            ),
        ),
        ("gpt_oss",),
        "openai/harmony docs/format.md",
        "gpt-oss",
    ),
    Family(
        ReasoningConfig(
            "<|channel>thought",
            "<channel|>",
            family="gemma4",
            strategy=flag(default_on=False),
            tools="gemma",
            implicit_ends=("<|tool_call>",),
            opens=False,
            turn="<|turn>model",
        ),
        ("gemma4", "gemma4_text"),
        "Gemma 4 chat template; vLLM gemma4 reasoning parser",
    ),
    Family(
        ReasoningConfig(
            "[THINK]",
            "[/THINK]",
            family="mistral",
            strategy=flag("reasoning_effort", default_on=False, on="high", off="none"),
            tools="mistral",
            implicit_ends=("[TOOL_CALLS]",),
            opens=False,
            turn="[/INST]",
        ),
        ("mistral3", "ministral3", "mistral4"),
        "mistral-common; vLLM mistral reasoning parser",
    ),
    Family(
        _think(
            family="minimax_m2",
            strategy=ALWAYS,
            tools="minimax",
            implicit_ends=("<minimax:tool_call>",),
            opens=True,
            turn="]~b]ai",
        ),
        ("minimax", "minimax_m2"),
        "MiniMax M2 chat template; vLLM minimax_m2 reasoning parser",
    ),
    Family(
        ReasoningConfig(
            "<mm:think>",
            "</mm:think>",
            family="minimax_m3",
            strategy=flag("thinking_mode", on="enabled", off="disabled"),
            turn="]~b]ai",
        ),
        ("minimax_m3",),
        "vLLM minimax_m3 reasoning parser",
    ),
    Family(
        ReasoningConfig(
            "<seed:think>",
            "</seed:think>",
            family="seed_oss",
            strategy=flag("thinking_budget", on=-1, off=0),
            tools="seed",
            implicit_ends=("<seed:tool_call>",),
            opens=False,
            turn="<seed:bos>assistant",
        ),
        ("seed_oss",),
        "Seed-OSS chat template",
    ),
    Family(
        _think(
            family="nemotron",
            strategy=flag(),
            implicit_ends=_TOOL,
            tools="qwen_xml",
            opens=True,
            turn=_CHATML,
        ),
        ("nemotron_h",),
        "vLLM nemotron_v3 reasoning parser",
    ),
    Family(
        ReasoningConfig(
            "Here is my thought process:",
            "Here is my response:",
            family="granite",
            strategy=flag("thinking", default_on=False),
            other_starts=("Here's my thought process:",),
            other_ends=("Here's my response:",),
            tools="granite",
            implicit_ends=("<|tool_call|>",),
            opens=False,
            turn="<|start_of_role|>assistant<|end_of_role|>",
        ),
        ("granite", "granitemoe"),
        "vLLM granite reasoning parser (Granite 3.2 and 3.3)",
    ),
    Family(
        _think(
            family="granite4",
            strategy=flag(),
            implicit_ends=_TOOL,
            tools="hermes",
            turn="<|start_of_role|>assistant<|end_of_role|>",
        ),
        ("granitemoehybrid",),
        "vLLM granite_thinking reasoning parser (Granite 4.2)",
    ),
    Family(
        _think(
            family="hunyuan",
            strategy=flag(),
            wrappers=(("<answer>", "</answer>"),),
            tools="hunyuan",
            implicit_ends=("<tool_calls>",),
        ),
        ("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        "vLLM hunyuan_a13b reasoning parser",
    ),
    Family(
        _think(
            family="ernie",
            wrappers=(("<response>", "</response>"),),
            opens=True,
        ),
        ("ernie4_5_moe",),
        "vLLM ernie45 reasoning parser",
    ),
    Family(
        ReasoningConfig(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            family="cohere",
            strategy=flag("reasoning"),
            wrappers=(
                ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
                ("<|START_TEXT|>", "<|END_TEXT|>"),
            ),
            tools="cohere",
            implicit_ends=(
                "<|START_ACTION|>",
                "<|START_RESPONSE|>",
                "<|START_TEXT|>",
            ),
            turn="<|CHATBOT_TOKEN|>",
        ),
        ("cohere2", "cohere2_vision"),
        "Command R7B chat template; vLLM cohere_command reasoning parser",
    ),
    Family(
        _think(
            family="olmo3",
            strategy=ALWAYS,
            tools="olmo",
            implicit_ends=("<function_calls>",),
            turn=_CHATML,
        ),
        ("olmo3",),
        "vLLM olmo3 reasoning parser; delimiters are ordinary text",
    ),
    Family(
        _think(family="step3", strategy=ALWAYS, opens=True, turn=_CHATML),
        ("step3", "step3p5"),
        "vLLM step3 and step3p5 reasoning parsers",
    ),
    Family(
        _think(
            family="mimo",
            strategy=flag(default_on=False),
            implicit_ends=_TOOL,
            tools="qwen_xml",
            turn=_CHATML,
        ),
        ("mimo", "mimo_v2_flash"),
        "SGLang mimo detector",
    ),
    Family(
        ReasoningConfig(
            "<longcat_think>",
            "</longcat_think>",
            family="longcat",
        ),
        ("longcat_flash", "longcat_flash_ngram"),
        "mlx_lm tokenizer_utils.py",
    ),
    Family(
        ReasoningConfig(
            "<|think:start|>",
            "<|think:end|>",
            family="solar_open",
            strategy=ALWAYS,
            implicit_ends=("<|tool_call:start|>",),
            opens=True,
        ),
        ("solar_open", "solar_open2"),
        "vLLM solar_open2 reasoning parser",
    ),
    Family(
        ReasoningConfig("<|inner_prefix|>", "<|inner_suffix|>", family="apertus"),
        ("apertus",),
        "SGLang apertus detector",
    ),
)

FAMILIES: dict[str, Family] = {row.config.family: row for row in _ROWS}


def family(name: str) -> ReasoningConfig:
    """The config of a family.

    Raises:
        UnknownFamily: There is no such row.

    Example:
        >>> family("qwen3").end
        '</think>'
    """
    if name not in FAMILIES:
        raise UnknownFamily(name)
    return FAMILIES[name].config


def family_of(model_type: str | None) -> ReasoningConfig | None:
    """The config of the family a `model_type` belongs to, None if there is none."""
    for row in FAMILIES.values():
        if model_type in row.model_types:
            return row.config
    return None
