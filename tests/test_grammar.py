"""Grammars of tool calls and answers: what they allow, and that they can look ahead."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

import mlx_mtp
from mlx_mtp.grammar import (
    FORMATS,
    Grammar,
    GrammarError,
    GrammarMatcher,
    UnsupportedToolProtocol,
    call_grammar,
    load_vocabulary,
)
from mlx_mtp.reasoning import (
    PROTOCOLS,
    ReasoningConfig,
    Vocabulary,
    family,
    split,
)

pytest.importorskip("llguidance")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "convert",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "digits": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["m", "km"]},
                },
                "required": ["text"],
            },
        },
    },
    {"name": "now"},
]
ARGUMENTS = {"text": 'a "b" <c> é🙂', "digits": 12, "unit": "km"}
END = 4089  # <|im_end|> of the demo
CLOSE = 4093  # </tool_call>


@pytest.fixture(scope="module")
def vocabulary(demo):
    return Vocabulary.from_tokenizer(demo[1])


@pytest.fixture(scope="module")
def tokens_of(demo):
    return load_vocabulary(demo[1])


def ids_of(words):
    """The ids that a mask allows."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def matcher_of(grammar, tokens_of, ids=(), fast_forward=False):
    """A matcher behind these tokens."""
    grammar = replace(grammar, fast_forward=fast_forward)
    matcher = GrammarMatcher(grammar, tokens_of)
    for token in ids:
        matcher.accept(token)
    return matcher


def after(grammar, tokens_of, ids):
    """What may follow these tokens."""
    return ids_of(matcher_of(grammar, tokens_of, ids).mask())


def accepts(grammar, tokens_of, ids):
    """Whether the grammar allows these tokens, one by one, and then the end."""
    matcher = matcher_of(grammar, tokens_of)
    for token in [*ids, END]:
        if token not in ids_of(matcher.mask()):
            return False
        matcher.accept(token)
    return True


def written(protocol, *calls):
    """Calls as a model of the protocol writes them, without the opener."""
    row = FORMATS[protocol]

    def arguments(values):
        if not row.tags:
            return json.dumps(values, ensure_ascii=False)
        return "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n"
            for key, value in values.items()
        )

    parts = [row.name + n + row.arguments + arguments(a) + row.end for n, a in calls]
    return (row.joiner or "").join(parts) + row.closer


@pytest.mark.parametrize("protocol", FORMATS)
def test_what_a_grammar_accepts_is_parsed_as_the_same_calls(
    protocol, vocabulary, tokens_of
):
    grammar = call_grammar(protocol, TOOLS, vocabulary)
    calls = [("convert", ARGUMENTS)]
    if FORMATS[protocol].joiner is not None:
        calls.append(("now", {}))
    text = written(protocol, *calls)
    assert accepts(grammar, tokens_of, vocabulary.encode(text))
    config = ReasoningConfig("", "", tools=protocol)
    if protocol == "harmony":
        config = family("gpt_oss")
    parts = split(grammar.opener + text, config, tools=TOOLS)
    assert [(call.name, call.arguments) for call in parts.tool_calls] == calls
    assert not parts.rejected and not parts.response


@pytest.mark.parametrize("protocol", FORMATS)
@pytest.mark.parametrize(
    "call",
    [
        ("other", {}),
        ("convert", {}),
        ("convert", {"text": "x", "digits": "many"}),
        ("convert", {"text": "x", "unit": "mm"}),
        ("convert", {"text": "x", "more": 1}),
        ("now", {"x": 1}),
    ],
)
def test_calls_that_do_not_fit_are_not_accepted(protocol, call, vocabulary, tokens_of):
    grammar = call_grammar(protocol, TOOLS, vocabulary)
    text = written(protocol, call)
    assert not accepts(grammar, tokens_of, vocabulary.encode(text))


def tagged(schema):
    """A tool whose one argument has this schema."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return [{"name": "f", "parameters": parameters}]


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        ({"type": "string", "const": "k"}, {"k": "k"}, ["", "kk", '"k"']),
        ({"type": "string", "pattern": "^[0-9/]{3}$"}, {"1/3": "1/3"}, ["12", "1234"]),
        ({"type": "string", "pattern": "b+"}, {"abbc": "abbc"}, ["ac"]),
        (
            {"type": "string", "minLength": 2, "maxLength": 3},
            {"12": "12", "é🙂\n": "é🙂\n"},
            ["a", "abcd"],
        ),
        (
            {"type": "string", "format": "date"},
            {"2024-12-31": "2024-12-31"},
            ["2024-02-31"],
        ),
        ({"enum": ["ab", "c", 3, None]}, {"ab": "ab", "3": 3, "null": None}, ['"ab"']),
        ({"type": ["string", "null"]}, {"ab": "ab", "null": None}, []),
        (
            {"type": ["string", "null"], "pattern": "^a$"},
            {"a": "a", "null": None},
            ["b"],
        ),
        (
            {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
            {"12": "12", "null": None},
            ["123"],
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"1": 1}, ["a", '"a"']),
        ({}, {"ab": "ab", "[1]": [1]}, []),
        (
            {"type": "string"},
            {"a\n</b>\n": "a\n</b>\n"},
            ["a</parameter>b", "</function>"],
        ),
    ],
)
def test_arguments_in_tags_fit_their_schema(
    schema, fits, others, vocabulary, tokens_of
):
    tools = tagged(schema)
    grammar = call_grammar("qwen_xml", tools, vocabulary)
    config = ReasoningConfig("", "", tools="qwen_xml")
    for text, value in fits.items():
        call = written("qwen_xml", ("f", {"x": text}))
        assert accepts(grammar, tokens_of, vocabulary.encode(call)), text
        (parsed,) = split(grammar.opener + call, config, tools=tools).tool_calls
        assert parsed.arguments == {"x": value}
    for text in others:
        call = written("qwen_xml", ("f", {"x": text}))
        assert not accepts(grammar, tokens_of, vocabulary.encode(call)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["12"]},
        {"type": "string", "enum": [1]},
        {"type": "string", "enum": []},
        {"const": "a</parameter>b"},
        {"type": "string", "format": "color"},
        {"$ref": "#/$defs/a"},
        {"type": "string", "not": {"const": "a"}},
        {"anyOf": [{"enum": ["a"]}, {"type": "integer"}]},
        False,
    ],
)
def test_schemas_that_tags_cannot_keep_are_refused(schema, vocabulary):
    with pytest.raises(GrammarError, match="Parameter 'x' of 'f'"):
        call_grammar("qwen_xml", tagged(schema), vocabulary)


def test_tags_that_would_not_be_read_back_are_refused(vocabulary):
    for change in (
        {"name": "a>b"},
        {"parameters": {"properties": {"a b>": {}}}},
        {"parameters": {"required": ["y"]}},
        {"parameters": {"anyOf": [{"required": ["x"]}]}},
    ):
        with pytest.raises(GrammarError, match="tag"):
            call_grammar("qwen_xml", [{**tagged({})[0], **change}], vocabulary)


def test_one_tool_can_be_named(vocabulary, tokens_of):
    grammar = call_grammar("hermes", TOOLS, vocabulary, "now")
    now, convert = (
        vocabulary.encode(written("hermes", call))
        for call in (("now", {}), ("convert", ARGUMENTS))
    )
    assert accepts(grammar, tokens_of, now)
    assert not accepts(grammar, tokens_of, convert)
    with pytest.raises(ValueError, match="'other', declared tools are: convert, now"):
        call_grammar("hermes", TOOLS, vocabulary, "other")


def test_no_control_token_stands_inside_of_a_string(vocabulary, tokens_of):
    grammar = call_grammar("hermes", TOOLS, vocabulary)
    start = vocabulary.encode(' "convert", "arguments": {"text": "a')
    inside = after(grammar, tokens_of, start)
    assert len(inside) > 3000
    assert inside.isdisjoint(vocabulary.controls.values())


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(
    "text",
    ["a<|im_end|>b", "</think>", "<tool_call>", "<|im_end|>", "é<think><think>🙂"],
)
def test_the_text_of_a_control_token_is_spelt_with_others(
    text, fast_forward, vocabulary, tokens_of
):
    grammar = Grammar.json_schema({"enum": [{"tag": text, "n": 1}]})
    matcher = matcher_of(grammar, tokens_of, (), fast_forward)
    ids = []
    while END not in (allowed := ids_of(matcher.mask())):
        ids.append(min(allowed))
        matcher.accept(ids[-1])
    written = b"".join(map(vocabulary.piece, ids)).decode()
    assert json.loads(written) == {"tag": text, "n": 1}
    assert set(vocabulary.controls.values()).isdisjoint(ids)


def test_added_tokens_of_any_shape_are_no_text():
    _, tokenizer = mlx_mtp.load("demo")
    tokenizer._tokenizer.add_tokens(["[CALL]"])
    grammar = Grammar.json_schema({"type": "string"})
    start = tokenizer.encode('"a')
    inside = after(grammar, load_vocabulary(tokenizer), start)
    assert len(inside) > 3000 and 4096 not in inside


def test_only_an_end_token_or_another_call_follows(vocabulary, tokens_of, demo):
    one = vocabulary.encode(written("hermes", ("now", {})))
    grammar = call_grammar("hermes", TOOLS, vocabulary)
    newline = vocabulary.encode("\n")
    ends = demo[1].eos_token_ids
    assert after(grammar, tokens_of, one) == {*ends, *newline}
    assert (
        after(
            Grammar.json_schema({"const": True}), tokens_of, vocabulary.encode("true")
        )
        == ends
    )


def test_looking_ahead_and_back_changes_nothing(vocabulary, tokens_of):
    """Drafts right, wrong from slot i on, and behind the end."""
    grammar = call_grammar("hermes", TOOLS, vocabulary)
    ids = [*vocabulary.encode(written("hermes", ("convert", ARGUMENTS))), END]
    for fast_forward in (False, True):
        alone = matcher_of(grammar, tokens_of, (), fast_forward)
        expected = []
        for token in ids:
            expected.append((ids_of(alone.mask()), tuple(alone.forced())))
            alone.accept(token)
        matcher = matcher_of(grammar, tokens_of, (), fast_forward)
        for at in range(len(ids)):
            for wrong in (0, 1, 3, 5):
                drafts = (ids + [7] * 6)[at : at + 5]
                drafts[wrong:] = [CLOSE] * (5 - wrong)
                mark = matcher.checkpoint()
                for i in range(6):
                    now = ids_of(matcher.mask()), tuple(matcher.forced())
                    if ids[at : at + i] == drafts[:i] and at + i < len(ids):
                        assert now == expected[at + i]
                    matcher.accept([*drafts, 7][i])
                matcher.restore(mark)
            matcher.accept(ids[at])


@pytest.mark.parametrize("token", [-5, 4096, 10**6])
def test_a_token_that_the_tokenizer_does_not_have_does_not_fit(tokens_of, token):
    matcher = GrammarMatcher(Grammar.json_schema({"type": "object"}), tokens_of)
    mark, mask = matcher.checkpoint(), matcher.mask().copy()
    matcher.accept(token)
    assert not matcher.forced() and matcher.mask().any()
    matcher.restore(mark)
    assert (matcher.mask() == mask).all()


def test_a_json_answer_is_compact_and_fits_its_schema(vocabulary, tokens_of):
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    grammar = Grammar.json_schema(schema)
    for text, fits in (
        ('{"sum": 1, "ok": true}', True),
        ('{"sum": -12}', True),
        ('{"sum":1}', False),
        ('{"ok": true}', False),
        ('{"sum": 1.5}', False),
        ('{"sum": 1} ', False),
    ):
        assert accepts(grammar, tokens_of, vocabulary.encode(text)) == fits


# Refusals


@pytest.mark.parametrize("protocol", [*sorted(set(PROTOCOLS) - set(FORMATS)), "new"])
def test_protocols_without_a_grammar_are_refused(protocol, vocabulary):
    with pytest.raises(UnsupportedToolProtocol, match="auto") as raised:
        call_grammar(protocol, TOOLS, vocabulary)
    assert raised.value.protocol == protocol


@pytest.mark.parametrize("schema", [{"type": "strin"}, {"not": {}}, False])
def test_schemas_that_cannot_be_met_are_refused(schema, tokens_of):
    with pytest.raises(GrammarError, match="not supported"):
        GrammarMatcher(Grammar.json_schema(schema), tokens_of)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex("a(b"), "regex parse error: error: unclosed group"),
        (lambda: Grammar.json_schema({"$ref": "#"}), "No text fits"),
        (lambda: Grammar.json_schema({"enum": {1}}), "schema is no JSON: Object of"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "schema is no JSON"),
        (lambda: Grammar.regex("a\ud800"), "pattern has no UTF-8 form"),
        (lambda: Grammar('start: "\ud800"'), "source has no UTF-8 form"),
        (lambda: Grammar('start: "a"', opener="\ud800"), "opener has no UTF-8 form"),
    ],
)
def test_the_reason_is_in_the_error(make, message, tokens_of):
    with pytest.raises(GrammarError, match=message):
        GrammarMatcher(make(), tokens_of)
    with pytest.raises(TypeError, match="pattern must be a str but is a int"):
        Grammar.regex(5)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(TypeError, match="fast tokenizer"):
        load_vocabulary(object())


def test_without_llguidance_the_command_to_install_it_is_named(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'mlx-mtp\[tools\]'"):
        load_vocabulary(demo[1])
