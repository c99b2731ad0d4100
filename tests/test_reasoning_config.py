"""Configs, families and how one checkpoint is resolved."""

import dataclasses
from types import SimpleNamespace

import jinja2
import pytest

import mlx_mtp.reasoning as r

FLAG = r.PromptStrategy.flag


def config(strategy, **fields):
    return r.ReasoningConfig("<think>", "</think>", strategy=strategy, **fields)


# Prompt strategies


def test_flag_on_and_off_set_the_argument():
    assert config(FLAG()).template_kwargs(True) == {"enable_thinking": True}
    assert config(FLAG()).template_kwargs(False) == {"enable_thinking": False}


@pytest.mark.parametrize("default", [True, False])
def test_flag_unspecified_takes_the_default(default):
    kwargs = config(FLAG(default_on=default)).template_kwargs()
    assert kwargs == {"enable_thinking": default}


def test_flag_with_another_key_and_other_values():
    strategy = FLAG("thinking_mode", on="enabled", off="disabled")
    assert config(strategy).template_kwargs(True) == {"thinking_mode": "enabled"}
    assert config(strategy).template_kwargs(False) == {"thinking_mode": "disabled"}


@pytest.mark.parametrize("strategy", [r.ALWAYS, r.PromptStrategy()])
def test_always_and_none_inject_nothing_and_cannot_be_turned_off(strategy):
    assert config(strategy).template_kwargs(True) == {}
    assert config(strategy).template_kwargs() == {}
    with pytest.raises(r.CannotDisableReasoning, match="budget of 0"):
        config(strategy).template_kwargs(False)


def test_an_unknown_kind_of_strategy_is_refused():
    with pytest.raises(ValueError, match=r"\[PromptStrategy\] kind must be"):
        r.PromptStrategy("sometimes")


def test_efforts_add_their_arguments_and_unknown_ones_are_refused():
    gpt_oss = r.family("gpt_oss")
    assert gpt_oss.template_kwargs(effort="high") == {"reasoning_effort": "high"}
    with pytest.raises(r.UnknownEffort, match="low, medium, high"):
        gpt_oss.template_kwargs(effort="max")
    with pytest.raises(r.UnknownEffort, match="none"):
        r.family("qwen3").template_kwargs(effort="high")


def test_configs_are_equal_by_their_fields():
    assert config(FLAG()) == config(FLAG())
    assert config(FLAG()) != config(FLAG(default_on=False))
    assert config(FLAG()) != config(FLAG(), implicit_ends=("<tool_call>",))


def test_bad_configs_are_refused():
    with pytest.raises(TypeError, match="delimiters must be str but one is int"):
        r.ReasoningConfig("<think>", 7)
    with pytest.raises(r.ReasoningError, match="must differ"):
        r.ReasoningConfig("---", "---")
    with pytest.raises(r.ReasoningError, match=r"tools must be one of .* 'nope'"):
        r.ReasoningConfig("<think>", "</think>", tools="nope")


# Families

WANTED = """qwen3 qwen3_5 deepseek_r1 deepseek_v3 deepseek_v3_2 gemma4 mistral glm
kimi_k2 kimi_k3 minimax_m2 granite hunyuan seed_oss nemotron cohere olmo3
gpt_oss""".split()


def test_the_main_families_have_rows_with_a_source():
    assert set(WANTED) <= set(r.FAMILIES)
    for name, row in r.FAMILIES.items():
        assert row.config.family == name
        assert row.config.start and row.config.end and row.source


def test_a_model_type_belongs_to_one_row_and_tool_openers_end_a_thought():
    types = [t for row in r.FAMILIES.values() for t in row.model_types]
    assert len(types) == len(set(types))
    for row in r.FAMILIES.values():
        if row.config.frame is None:
            spans = r.PROTOCOLS[row.config.tools or "none"].spans
            assert {opener for opener, _ in spans} <= set(row.config.implicit_ends)


def test_only_qwen3_and_harmony_have_a_transition():
    with_text = [n for n, row in r.FAMILIES.items() if row.config.transition]
    assert with_text == ["qwen3", "gpt_oss"]


def test_qwen_and_deepseek_rows_have_the_known_values():
    qwen = r.family("qwen3")
    assert (qwen.start, qwen.end) == ("<think>", "</think>")
    assert qwen.strategy == FLAG("enable_thinking", default_on=True)
    assert qwen.implicit_ends == ("<tool_call>",)
    assert r.family("qwen3_5").transition is None
    assert r.family("deepseek_r1").strategy == r.ALWAYS


def test_an_unknown_family_is_an_error_that_lists_the_known_ones():
    with pytest.raises(r.UnknownFamily, match=r"qwen3, .* but is 'qwen9'"):
        r.family("qwen9")


# The prompt


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>a<tool_call>", False),
        ("<|im_start|>assistant\n<think>\n  \n\n \n", True),
        ("<|im_start|>assistant\n<think>" + "long thought " * 500, True),
        ("<|im_start|>user\nSay <think><|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("no turn at all <think>", True),
        ("", False),
    ],
)
def test_the_rendered_prompt_says_whether_a_thought_is_open(prompt, opens):
    assert r.family("qwen3").prompt_opens(prompt) is opens


def test_custom_and_empty_delimiters_in_a_prompt():
    custom = r.ReasoningConfig("◁think▷", "◁/think▷")
    assert custom.prompt_opens("x ◁think▷\n") and not custom.prompt_opens("<think>")
    assert not r.ReasoningConfig("", "</think>").prompt_opens("<think>")


# Resolution. The templates keep what matters of the real ones: the end of the prompt
# and which arguments change it.

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
STRIP = "{# content.split('</think>') <think> #}"
HERMES = "{% if tools %}<tool_call>{% endif %}"
TEMPLATES = {
    "qwen3": CHATML
    + "{% if enable_thinking is defined and enable_thinking is false %}"
    + "<think>\n\n</think>\n\n{% endif %}{% endif %}"
    + HERMES,
    "qwen3.5": CHATML
    + "{% if enable_thinking is defined and enable_thinking is false %}"
    + "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}",
    "qwen3-thinking": CHATML + "<think>\n{% endif %}" + STRIP,
    "instruct": CHATML + "{% endif %}" + HERMES,
    "deepseek-v3": "{{ messages[0].content }}<｜Assistant｜>",
    "deepseek-v3.1": "{% if not thinking is defined %}{% set thinking = false %}"
    "{% endif %}{{ messages[0].content }}<｜Assistant｜>"
    "{% if thinking %}<think>{% else %}</think>{% endif %}",
    "r1": "<｜User｜>{{ messages[0].content }}<｜Assistant｜><think>\n" + STRIP,
    "glm": "<|user|>{{ messages[0].content }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking }}"
    "<|assistant|>{{ '<think></think>' if enable_thinking is defined and "
    "not enable_thinking }}{# <arg_key> #}",
    "kimi-thinking": "<|im_assistant|>assistant<|im_middle|>" + STRIP,
    "gemma4": "{{ '<|think|>' if enable_thinking is defined and enable_thinking }}"
    "<|turn>model\n{{ '' if enable_thinking | default(false) else "
    "'<|channel>thought\n<channel|>' }}",
    "granite": "{% if thinking %}Here is my thought process: Here is my response:"
    "{% endif %}<|start_of_role|>assistant<|end_of_role|>",
    "gpt-oss": "Reasoning: {{ reasoning_effort | default('medium') }}"
    "{# <|channel|>analysis<|message|> <|end|> <|call|> #}<|start|>assistant",
    "seed": "{% if thinking_budget is defined and thinking_budget == 0 %}no thinking"
    "{% endif %}<seed:bos>assistant\n{# <seed:think></seed:think> #}",
    "kimi-k3": "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking_effort is defined and thinking_effort not in ['low', 'high'] %}"
    "{{ 1 / 0 }}{% endif %}{{ thinking_effort }}"
    '<|open|>message role="assistant"<|sep|>'
    "<|open|>{{ 'think' if thinking else 'response' }}<|sep|>"
    "{# <|open|>think<|sep|> <|close|>think<|sep|> #}",
}


def template(name_or_source):
    source = TEMPLATES.get(name_or_source, name_or_source)
    compiled = jinja2.Environment().from_string(source)

    def render(**kwargs):
        messages = [{"role": "user", "content": "Hi"}]
        return compiled.render(messages=messages, add_generation_prompt=True, **kwargs)

    return r.ChatTemplate(source, render)


@pytest.mark.parametrize(
    ("name", "model_type", "kind", "default_on", "opens"),
    [
        ("qwen3", "qwen3", "flag", True, False),
        ("qwen3.5", "qwen3_5", "flag", True, True),
        ("qwen3.5", None, "flag", True, True),
        ("qwen3-thinking", "qwen3", "always", None, True),
        ("deepseek-v3.1", "deepseek_v3", "flag", False, True),
        ("r1", "deepseek_v3", "always", None, True),
        ("r1", "qwen2", "always", None, True),
        ("glm", "glm4_moe", "flag", True, False),
        ("kimi-thinking", "kimi_k2", "none", None, False),
        ("gemma4", "gemma4", "flag", False, False),
        ("granite", "granite", "flag", False, False),
        ("gpt-oss", "gpt_oss", "always", None, False),
        ("seed", "seed_oss", "flag", True, False),
        ("kimi-k3", None, "flag", True, True),
    ],
)
def test_the_template_decides_on_switch_default_and_opening(
    name, model_type, kind, default_on, opens
):
    found = r.resolve(model_type=model_type, template=template(name))
    assert found.strategy.kind == kind
    if default_on is not None:
        assert found.strategy.default_on is default_on
    assert found.opens is opens


@pytest.mark.parametrize("name", ["instruct", "deepseek-v3"])
@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3", None])
def test_a_template_without_thoughts_resolves_to_nothing(name, model_type):
    assert r.resolve(model_type=model_type, template=template(name)) is None


def test_a_pair_that_many_families_share_takes_its_tool_calls_from_the_template():
    found = r.resolve(template=template(TEMPLATES["qwen3.5"] + HERMES))
    assert (found.family, found.tools) == ("", "hermes")
    assert found.implicit_ends == ("<tool_call>",)
    assert r.resolve(template=template("gemma4")).family == "gemma4"


def test_efforts_are_those_the_template_tells_apart_and_accepts():
    found = r.resolve(template=template("kimi-k3"))
    assert list(found.efforts) == ["low", "high"]


def test_the_transition_stays_with_the_family():
    found = r.resolve(model_type="qwen3", template=template("qwen3-thinking"))
    assert found.transition == r.family("qwen3").transition


def test_a_name_alone_is_no_reason():
    for name in ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-R1", "Qwen/QwQ-32B"):
        assert r.resolve(model_id=name) is None


def test_without_a_template_the_model_type_decides():
    assert r.resolve(model_type="qwen3") == r.family("qwen3")
    assert r.resolve(model_type="llama") is None
    assert r.resolve() is None


def test_an_explicit_value_beats_everything():
    registry = r.Registry()
    registry.register(lambda model: r.family("glm"))
    mine = config(r.ALWAYS)
    args = {"model_type": "qwen3", "registry": registry}
    assert r.resolve(mine, template=template("qwen3"), **args) is mine
    assert r.resolve("gemma4", **args) == r.family("gemma4")
    with pytest.raises(r.UnknownFamily):
        r.resolve("nope", **args)


def test_the_latest_resolver_wins_defers_and_may_call_back():
    registry = r.Registry()
    registry.register(lambda model: r.family("glm"))
    registry.register(
        lambda model: r.family("mimo") if model.model_type == "mine" else None
    )
    seen = []

    def nested(model):
        seen.append(model.model_id)
        if model.model_id == "outer":
            return r.resolve(model_type="mine", model_id="inner", registry=registry)
        return None

    registry.register(nested)
    assert r.resolve(model_id="outer", registry=registry) == r.family("mimo")
    assert seen == ["outer", "inner"]
    assert r.resolve(model_type="x", registry=registry) == r.family("glm")
    assert r.resolve(model_type="x", registry=r.Registry()) is None


def test_a_template_that_raises_is_a_typed_error():
    with pytest.raises(r.TemplateError, match="fails on one user message"):
        r.resolve(model_type="qwen3", template=template("{{ 1 / 0 }}"))


def test_a_config_survives_replace_and_compares_by_value():
    found = r.resolve(model_type="qwen3", template=template("qwen3"))
    assert dataclasses.replace(found) == found


class FakeTokenizer:
    """A transformers tokenizer with these pieces; the last is a special token."""

    def __init__(self, pieces):
        self.pieces = pieces
        added = SimpleNamespace(content=pieces[-1], special=False)
        self.added_tokens_decoder = {len(pieces) - 1: added}
        self.all_special_ids = [len(pieces) - 1]

    def __len__(self):
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids):
        return (
            self.pieces[ids] if isinstance(ids, int) else [self.pieces[i] for i in ids]
        )

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return list(range(len(self.pieces)))

    def decode(self, ids):
        return self.pieces[ids[0]].upper()


def test_vocabularies_of_the_three_kinds_of_tokenizers():
    def read(*pieces):
        vocabulary = r.Vocabulary.from_tokenizer(FakeTokenizer([*pieces, "</s>"]))
        assert (
            vocabulary.special == {len(pieces)} and vocabulary.size == len(pieces) + 1
        )
        return vocabulary, [vocabulary.piece(i) for i in range(len(pieces) + 1)]

    vocabulary, pieces = read("▁a", "<0xC3>", "<0xzz", "é▁b")
    assert pieces == [b" a", b"\xc3", b"<0xzz", "é b".encode(), b"</s>"]
    assert vocabulary.strip_space
    vocabulary, pieces = read("Ġa", "Ã", "Ċ", "语")
    assert pieces == [b" a", b"\xc3", b"\n", "语".encode(), b"</s>"]
    assert not vocabulary.strip_space
    assert read("a", "b")[1] == [b"A", b"B", b"</s>"]


def test_the_demo_tokenizer_resolves_to_a_switchable_config_that_opens():
    transformers = pytest.importorskip("transformers")
    from reasoning_support import DEMO

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(DEMO)
    found = r.resolve(
        model_type="qwen3_5", template=r.ChatTemplate.from_tokenizer(tokenizer)
    )
    assert found.family == "qwen3_5"
    assert found.strategy == FLAG()
    assert found.opens is True
    vocabulary = r.Vocabulary.from_tokenizer(tokenizer)
    ids = vocabulary.encode("naïve 🙂 <think>x</think>")
    assert b"".join(map(vocabulary.piece, ids)).decode() == "naïve 🙂 <think>x</think>"
    assert vocabulary.controls["<think>"] in ids
    assert vocabulary.controls["<|im_end|>"] in vocabulary.special
    assert vocabulary.piece(10**6) == b""


def test_mlx_lms_wrapper_of_a_tokenizer_gives_the_same():
    """The wrapper sets the switch by itself; the template's default must show."""
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")
    from reasoning_support import DEMO

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(DEMO)
    tokenizer.chat_template = TEMPLATES["gemma4"]
    wrapper = utils.TokenizerWrapper(tokenizer)
    found = r.resolve(template=r.ChatTemplate.from_tokenizer(wrapper))
    assert found.strategy.default_on is False
    plain = r.Vocabulary.from_tokenizer(tokenizer)
    wrapped = r.Vocabulary.from_tokenizer(wrapper)
    assert wrapped.controls == plain.controls and wrapped.special == plain.special
    assert wrapped.encode("<think>a") == plain.encode("<think>a")
    tokenizer.chat_template = None
    assert r.ChatTemplate.from_tokenizer(tokenizer) is None
