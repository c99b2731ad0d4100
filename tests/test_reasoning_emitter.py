"""The router of thoughts, answers and tool calls."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reasoning_support import (
    REAL,
    THINK,
    Pieces,
    by_text,
    by_token,
    controls,
    cut,
    merged,
    plain,
)
from test_reasoning_tools import ONE, TOOLS, TWO

import mlx_mtp.reasoning as r

TAGGED = r.ReasoningConfig("<think>", "</think>", implicit_ends=("<tool_call>",))
QWEN = r.family("qwen3")
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def both(text, config=THINK, **kwargs):
    """(reasoning, response), the same in one piece, in any two and by character."""
    whole = by_text(config, [text], **kwargs)
    assert by_text(config, text, **kwargs) == whole
    for at in range(1, len(text)):
        assert by_text(config, [text[:at], text[at:]], **kwargs) == whole
    split = r.collect(whole)
    assert split == r.split(text, config, **kwargs)
    return split.reasoning, split.response


def causes(text, config=THINK, reason="stop", **kwargs):
    events = by_text(config, [text], reason, **kwargs)
    return [event.cause for event in events if isinstance(event, r.ReasoningEnd)]


# Basic routing


def test_a_clean_block_has_start_end_and_both_texts():
    assert by_text(THINK, ["<think>why</think>so"]) == [
        r.ReasoningStart("<think>"),
        r.ReasoningDelta("why"),
        r.ReasoningEnd("</think>", "canonical"),
        r.ResponseDelta("so"),
        r.End(),
    ]


def test_plain_text_is_all_response_to_the_last_space():
    assert both("Just an answer, a < b. \n") == ("", "Just an answer, a < b. \n")


def test_an_empty_block_has_events_but_no_text():
    assert by_text(THINK, ["<think></think>answer"]) == [
        r.ReasoningStart("<think>"),
        r.ReasoningEnd("</think>", "canonical"),
        r.ResponseDelta("answer"),
        r.End(),
    ]


def test_two_blocks_with_text_between():
    text = "<think>a</think>mid\n<think>b</think>end"
    assert both(text) == ("ab", "midend")


def test_line_starts_and_code_are_known_between_plain_tokens():
    spelled = Pieces()
    word = spelled.id(b"word")
    tokens = [*spelled.spell("<think>a</think>\n"), word, word]
    tokens += spelled.spell(" <think> <think>")
    events = by_token(THINK, spelled.vocabulary, tokens)
    assert r.collect(events).response == "wordword <think> <think>"
    pieces = Pieces(controls(THINK))
    word = pieces.id(b"word")
    tokens = [*pieces.encode("<think>a</think>"), word, word]
    tokens += [ord("`"), word, *pieces.encode("` <think>b")]
    assert r.collect(by_token(THINK, pieces.vocabulary, tokens)).reasoning == "ab"


def test_a_second_thought_in_the_middle_of_a_line_needs_the_control_token():
    text = "<think>a</think>mid<think>b</think>end"
    pieces = Pieces(controls(THINK))
    events = by_token(THINK, pieces.vocabulary, pieces.encode(text))
    assert r.collect(events).reasoning == "ab"
    assert r.collect(events).response == "midend"
    assert both(text) == ("a", "mid<think>b</think>end")


def test_a_primed_stream_begins_inside():
    assert by_text(THINK, ["hm</think>yes"], primed=True)[0] == r.ReasoningStart(
        primed=True
    )
    assert both("hm</think>yes", primed=True) == ("hm", "yes")


def test_a_primed_stream_that_never_closes_is_all_reasoning():
    assert both("and so on", primed=True) == ("and so on", "")
    assert causes("and so on", primed=True) == ["eos"]
    assert causes("and so on", primed=True, reason="length") == ["limit"]
    assert by_text(THINK, [], primed=True) == [
        r.ReasoningStart(primed=True),
        r.ReasoningEnd(cause="eos"),
        r.End(),
    ]


def test_a_near_miss_is_text():
    assert both("<thinkers> and </think2> <foo>x <") == (
        "",
        "<thinkers> and </think2> <foo>x <",
    )
    assert both("<think>a </thinker></think>b") == ("a </thinker>", "b")


def test_a_nested_opener_is_reasoning():
    assert both("<think>a<think>b</think>c") == ("a<think>b", "c")


def test_a_nested_control_token_is_reasoning_after_any_text():
    pieces = Pieces(controls(THINK))
    tokens = pieces.encode("ww</think>\n<think>w<think>v</think>x")
    events = by_token(THINK, pieces.vocabulary, tokens, primed=True)
    assert r.collect(events).reasoning == "www<think>v"


def test_an_echoed_opener_of_a_primed_thought_is_framing():
    events = by_text(THINK, ["\n<think>\nhm</think>yes"], primed=True)
    assert r.Framing("<think>") in events
    assert r.collect(events).reasoning == "hm"


def test_a_stray_closer_is_text_but_a_repeated_one_is_framing():
    assert both("a</think>b") == ("", "a</think>b")
    assert both("<think>a</think>\n</think>b</think>") == ("a", "b</think>")


def test_custom_delimiters_leave_other_tags_alone():
    custom = r.ReasoningConfig("◁think▷", "◁/think▷")
    assert both("◁think▷<think>a◁/think▷</think>b", custom) == ("<think>a", "</think>b")


def test_the_first_complete_delimiter_wins_and_the_longest_at_equal_ends():
    config = r.ReasoningConfig("<t>", "</t>", other_ends=("<x></t>", "</t>!"))
    assert both("<t>a<x></t>!b", config) == ("a", "!b")


def test_empty_delimiters_never_match():
    assert both("<think>a</think>", r.ReasoningConfig("", "")) == (
        "",
        "<think>a</think>",
    )


def test_the_end_of_a_thought_is_latched():
    emitter = r.ReasoningEmitter(TAGGED, primed=True)
    assert emitter.inside and not emitter.closed
    emitter.push_text("a<tool_call>")
    assert not emitter.inside and emitter.closed
    emitter.push_text("\n<think>")
    assert emitter.inside and emitter.closed
    empty = r.ReasoningEmitter(THINK)
    empty.push_text("<think></think>")
    assert empty.closed


# White space


def test_template_newlines_are_trimmed_on_both_sides():
    assert both("<think>\nwhy\n</think>\n\nso\n") == ("why", "so\n")


def test_white_space_is_trimmed_however_it_is_cut():
    for text in ("<think>\n\n", "a\n", " \n</think>", "\n", "b"):
        assert by_text(THINK, ["<think>\n\na\n \n</think>\nb"]) == by_text(
            THINK, ["<think>", "\n", "\na\n", " \n</think>", "\n", "b"]
        ), text


def test_without_trimming_all_events_together_are_the_stream():
    text = (
        " <think>\n a \n</think>\n\n```\n  b\n" + CALL + "\n<tool_call>x</tool_call> "
    )
    events = by_text(QWEN, [text], trim=False)
    assert "".join(event.text for event in events) == text
    split = r.collect(events)
    assert (split.reasoning, split.response) == (
        "\n a \n",
        " \n\n```\n  b\n" + CALL + "\n<tool_call>x</tool_call> ",
    )


def test_endless_white_space_is_not_held_for_ever():
    emitter = r.ReasoningEmitter(THINK)
    emitter.push_text("a")
    got = sum(len(e.text) for _ in range(50) for e in emitter.push_text("\n" * 100))
    assert got > 3000


# Literal tags (the peers misroute these)


def test_a_literal_opener_in_an_answer_stays_text():
    for text in (
        "Use the <think> tag to open and </think> to close.",
        "<think>a</think>Use <think> like this.",
        "<think>a</think>Use `<think>` like this.\n",
        "<think>a</think>```\n<think>\nx\n</think>\n```\nDone.",
        "<think>a</think>~ ``a ` <think>`` b",
    ):
        answer = text.removeprefix("<think>a</think>")
        assert both(text) == ("a" if answer != text else "", answer)


def test_a_spelled_opener_is_text_where_a_control_token_exists():
    pieces = Pieces(controls(THINK))
    for spelled in ("Use <think> so.", "\n<think> at the start", "</think>"):
        tokens = pieces.encode("<think>a</think>") + pieces.spell(spelled)
        split = r.collect(by_token(THINK, pieces.vocabulary, tokens, trim=False))
        assert (split.reasoning, split.response) == ("a", spelled)
    inside = [*pieces.encode("<think>"), *pieces.spell("not </think> yet")]
    inside += pieces.encode("</think>") + pieces.spell("b")
    split = r.collect(by_token(THINK, pieces.vocabulary, inside))
    assert (split.reasoning, split.response) == ("not </think> yet", "b")


@pytest.mark.parametrize(
    "span", ["`{}`", "``{} ` ``", "```\n{}\n```", "````md\n```\n{}"]
)
def test_a_control_token_in_a_code_span_or_fence_is_text(span):
    pieces = Pieces(controls(THINK))
    text = "<think>a</think>See " + "\n" * ("```" in span) + span.format("<think>")
    split = r.collect(
        by_token(THINK, pieces.vocabulary, pieces.encode(text), trim=False)
    )
    assert split.reasoning == "a"
    assert "<think>" in split.response


@pytest.mark.parametrize(
    "before", ["an ` apostrophe\n", "``` closed ```\n", "```\nx\n```\n"]
)
def test_a_thought_after_closed_code_is_a_thought(before):
    text = f"<think>a</think>{before}<think>b</think>c"
    assert both(text, trim=False)[0] == "ab"


# Implicit ends and tool calls


def test_an_implicit_end_stays_in_the_response_without_a_protocol():
    text = 'why <tool_call>{"a":1}</tool_call>'
    assert both(text, TAGGED, primed=True) == ("why", '<tool_call>{"a":1}</tool_call>')
    assert causes(text, TAGGED, primed=True) == ["implicit"]
    assert both("<think>a<tool_", TAGGED) == ("a<tool_", "")


@pytest.mark.parametrize("protocol", ONE)
def test_a_call_of_each_protocol_ends_a_thought_and_leaves_no_text(protocol):
    config = next(
        (row.config for row in r.FAMILIES.values() if row.config.tools == protocol),
        None,
    )
    if config is None:
        openers = tuple(opener for opener, _ in r.PROTOCOLS[protocol].spans)
        config = r.ReasoningConfig(
            "<think>", "</think>", tools=protocol, implicit_ends=openers
        )
    if config.frame is not None:
        text = (
            "<|channel|>analysis<|message|>need data <|start|>assistant" + ONE[protocol]
        )
    else:
        text = config.start + "need data " + ONE[protocol]
    whole = by_text(config, [text], tools=TOOLS)
    assert whole == by_text(config, text, tools=TOOLS)
    split = r.collect(whole)
    assert (split.reasoning, split.response) == ("need data", "")
    (call,) = split.tool_calls
    assert call == r.parse_tool_calls(ONE[protocol], protocol, TOOLS)[0]
    assert whole[-1].reason == "tool_calls"
    assert causes(text, config, tools=TOOLS) == ["implicit"]


def test_case_4_closer_and_call_in_any_cut():
    text = "ab.</think>" + CALL
    expected = by_text(QWEN, [text], primed=True)
    assert r.collect(expected) == r.Split(
        "ab.", "", (r.Call("f", {"x": 1}),), (), open=False
    )
    for a, b in itertools.combinations(range(len(text) + 1), 2):
        assert by_text(QWEN, [text[:a], text[a:b], text[b:]], primed=True) == expected
    assert both("<foo>x", QWEN) == ("", "<foo>x")
    assert r.collect(by_text(QWEN, ["<", "foo", ">x"])).response == "<foo>x"


def test_case_23_a_call_without_the_closing_tag_is_a_call():
    text = "need data " + CALL
    events = by_text(QWEN, text, primed=True, trim=False)
    assert r.collect(events).reasoning == "need data "
    assert len(r.collect(events).tool_calls) == 1
    assert events[-1].reason == "tool_calls"


def test_case_23_an_unparsable_call_is_reported_and_goes_to_the_response():
    split = r.split("need data <tool_call>{oops</tool_call> sorry", QWEN, primed=True)
    assert split.reasoning == "need data"
    assert split.response == "<tool_call>{oops</tool_call>sorry"
    assert [event.reason for event in split.rejected] == ["malformed"]


def test_case_23_tools_do_not_stop_streaming():
    emitter = r.ReasoningEmitter(QWEN, tools=TOOLS)
    sizes = [len(emitter.push_text(word)) for word in ("one ", "two ", "three ", "x")]
    assert sizes == [1, 1, 1, 1]


def test_parallel_calls_and_text_around_them():
    text = f"First. {CALL}\n{CALL}\nLast."
    split = r.split(text, QWEN)
    assert split.response == "First.Last."
    assert [call.arguments for call in split.tool_calls] == [{"x": 1}] * 2
    for protocol, section in TWO.items():
        config = r.ReasoningConfig("<think>", "</think>", tools=protocol)
        split = r.split("Hi " + section, config, tools=TOOLS)
        assert [call.name for call in split.tool_calls] == ["weather", "time"]
        assert split.response == "Hi"


def test_a_new_opener_ends_a_call_that_has_no_closing_delimiter():
    config = r.family("mistral")
    split = r.split('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', config)
    assert [(c.name, c.arguments) for c in split.tool_calls] == [
        ("f", {"a": 1}),
        ("g", {}),
    ]


def test_incomplete_and_undeclared_calls_are_rejected_with_a_reason():
    def reasons(text, finish="stop", tools=None):
        events = by_text(QWEN, [text], finish, tools=tools)
        split = r.collect(events)
        assert split.response == text and events[-1].reason == finish
        return [event.reason for event in split.rejected]

    assert reasons('<tool_call>{"name": "f", "arg') == ["malformed"]
    assert reasons('<tool_call>{"name": "f", "arg', "length") == ["incomplete"]
    assert reasons(CALL, tools=TOOLS) == ["undeclared"]
    assert reasons(CALL, tools=[]) == ["undeclared"]
    complete = CALL.removesuffix("</tool_call>")
    assert len(r.split(complete, QWEN).tool_calls) == 1


def test_a_model_that_calls_tools_but_does_not_think():
    config = r.ReasoningConfig("", "", tools="hermes")
    split = r.split(f"<think>a</think> {CALL}", config)
    assert (split.reasoning, split.response) == ("", "<think>a</think>")
    assert len(split.tool_calls) == 1


def test_a_call_shown_in_code_is_text():
    text = f"Write\n```\n{CALL}\n```\nor `{CALL}`."
    split = r.split(text, QWEN)
    assert (split.response, split.tool_calls) == (text, ())


def test_a_bare_call_counts_only_with_tools_and_a_bare_answer_is_no_error():
    config = r.ReasoningConfig("<think>", "</think>", tools="llama")
    call = json.dumps({"name": "time", "parameters": {}})
    assert r.split(call, config, tools=TOOLS).tool_calls == (r.Call("time", {}),)
    assert r.split(call, config).response == call
    person = '{"name": "Ada", "age": 36}'
    split = r.split(person, config, tools=TOOLS)
    assert (split.response, split.rejected) == (person, ())
    assert r.split(f"It is {call}", config, tools=TOOLS).response == f"It is {call}"


def test_a_call_that_never_ends_does_not_grow_without_limit():
    emitter = r.ReasoningEmitter(QWEN)
    emitter.push_text("<tool_call>")
    events = [e for _ in range(12) for e in emitter.push_text("x" * 100_000)]
    rejected = [e.reason for e in events if isinstance(e, r.RejectedToolCall)]
    assert rejected == ["too_long"]
    emitter.push_text("</tool_call>")
    events += [e for e in emitter.push_text(CALL) if isinstance(e, r.ToolCall)]
    text = "".join(event.text for event in events)
    assert text == "<tool_call>" + "x" * 1_200_000 + CALL


# Answer wrappers


def test_wrappers_of_an_answer_are_framing():
    hunyuan, cohere = r.family("hunyuan"), r.family("cohere")
    assert both("<think>\na\n</think>\n<answer>\nb\n</answer>", hunyuan) == ("a", "b")
    assert both("<think>a</think>b <answer> c </answer>", hunyuan) == (
        "a",
        "b <answer> c </answer>",
    )
    text = "a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>"
    assert both(text, cohere, primed=True) == ("a", "b")
    assert both("a<|START_RESPONSE|>b<|END_RESPONSE|>", cohere, primed=True) == (
        "a",
        "b",
    )


def test_kimi_k3_closes_its_message():
    text = (
        "a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"
        "<|close|>message<|sep|>"
    )
    assert both(text, r.family("kimi_k3"), primed=True) == ("a", "b")


# Harmony

HARMONY = r.family("gpt_oss")
ANALYSIS = "<|channel|>analysis<|message|>think<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>answer<|return|>"


def test_harmony_analysis_and_final():
    assert both(ANALYSIS + FINAL, HARMONY) == ("think", "answer")
    assert causes(ANALYSIS + FINAL, HARMONY) == ["canonical"]


def test_harmony_calls_in_every_form_of_header():
    body = '<|message|>{"x": 1}<|call|>'
    for header in (
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json",
        "<|start|>assistant to=functions.f<|channel|>commentary json",
        "<|start|>assistant<|channel|>commentary to=f",
    ):
        split = r.split(ANALYSIS + header + body, HARMONY)
        assert split.tool_calls == (r.Call("f", {"x": 1}),)
        assert split.response == ""


def test_harmony_analysis_stays_private_whoever_it_is_for():
    text = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert r.split(text, HARMONY).reasoning == "print(1)"


def test_harmony_commentary_without_a_recipient_is_response():
    text = "<|channel|>commentary<|message|>I will look<|end|>"
    assert both(text, HARMONY) == ("", "I will look")
    odd = "<|channel|>commentary goto=f<|message|>hm<|end|>"
    assert both(odd, HARMONY) == ("", "hm")


def test_harmony_an_open_frame_ends_at_the_next_header():
    text = "<|channel|>analysis<|message|>think" + FINAL
    assert both(text, HARMONY) == ("think", "answer")
    assert causes(text, HARMONY) == ["implicit"]


def test_harmony_bad_calls_are_rejected():
    start = (
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    )
    for name, body, reason in (
        ("nope", "{}", "undeclared"),
        ("time", "[1]", "invalid_arguments"),
        ("time", "{", "malformed"),
    ):
        text = start.format(name, body)
        split = r.split(text, HARMONY, tools=TOOLS)
        assert [event.reason for event in split.rejected] == [reason]


def test_harmony_a_call_whose_closing_token_ended_the_stream_is_a_call():
    """<|call|> is an end token, which a driver may keep to itself."""
    text = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    events = by_text(HARMONY, [text])
    assert r.collect(events).tool_calls == (r.Call("f", {}),)
    assert events[-1].reason == "tool_calls"
    (rejected,) = r.collect(by_text(HARMONY, [text[:-1]], "length")).rejected
    assert rejected.reason == "incomplete"


def test_harmony_unframed_text_is_response_and_finish_loses_nothing():
    assert both("hello", HARMONY) == ("", "hello")
    events = by_text(HARMONY, ["<|channel|>ana"], trim=False)
    assert "".join(event.text for event in events) == "<|channel|>ana"


def test_harmony_control_text_that_is_only_spelled_is_no_boundary():
    pieces = Pieces(controls(HARMONY))
    tokens = pieces.encode("<|channel|>analysis<|message|>")
    tokens += pieces.spell("say <|end|> now") + pieces.encode("<|end|>" + FINAL)
    split = r.collect(by_token(HARMONY, pieces.vocabulary, tokens))
    assert (split.reasoning, split.response) == ("say <|end|> now", "answer")


def test_harmony_a_header_without_end_is_text_again():
    text = "<|channel|>" + "x" * 3000 + "y"
    events = by_text(HARMONY, text, trim=False)
    assert "".join(event.text for event in events) == text
    assert r.collect(events).response.endswith("xy")
    for size in (1, 7, 1000, 1024, 5000):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        assert by_text(HARMONY, chunks, trim=False) == events
    late = "<|channel|>" + "x" * 1020 + "<|channel|>analysis<|message|>a<|end|>b"
    assert by_text(HARMONY, [late]) == by_text(HARMONY, late)


# Tokens


def test_thought_tokens_from_opener_to_closer():
    """What a think-then-call driver needs: where the thought ends, to the token."""
    pieces = Pieces(controls(THINK))
    tokens = pieces.encode("<think>ab</think>cd")
    scanner = r.Scanner(THINK, vocabulary=pieces.vocabulary)
    inside = []
    for token in tokens:
        scanner.accept(token)
        inside.append((scanner.inside, scanner.closed))
    assert inside == [(True, False)] * 3 + [(False, True)] * 3


def test_a_closer_over_two_tokens_ends_on_the_second():
    pieces = Pieces()
    scanner = r.Scanner(THINK, vocabulary=pieces.vocabulary, primed=True)
    scanner.accept(pieces.id(b"a.</thi"))
    assert not scanner.closed
    scanner.accept(pieces.id(b"nk>\n\nb"))
    assert scanner.closed


def test_a_whole_block_in_one_token_closes():
    pieces = Pieces()
    scanner = r.Scanner(THINK, vocabulary=pieces.vocabulary)
    scanner.accept(pieces.id(b"<think></think>"))
    assert scanner.closed and not scanner.inside


def test_words_and_spaces_that_are_added_tokens_do_not_hide_a_spelled_delimiter():
    config = r.family("granite")
    pieces = Pieces([" ", "my", "thought"])
    tokens = pieces.spell("Here is my thought process:a Here is my response:b")
    split = r.collect(by_token(config, pieces.vocabulary, tokens))
    assert (split.reasoning, split.response) == ("a", "b")


def test_the_longest_control_token_makes_the_delimiter():
    config = r.ReasoningConfig("<|c|>think", "<|e|>")
    pieces = Pieces(["<|c|>", "<|c|>think", "<|e|>"])
    tokens = [pieces.controls["<|c|>think"], ord("a"), *pieces.encode("<|e|>b")]
    split = r.collect(by_token(config, pieces.vocabulary, tokens))
    assert (split.reasoning, split.response) == ("a", "b")


def test_a_stream_that_never_opens_is_response():
    pieces = Pieces(controls(THINK))
    scanner = r.Scanner(THINK, vocabulary=pieces.vocabulary)
    for token in pieces.encode("hello"):
        scanner.accept(token)
    assert not scanner.opened and not scanner.closed and not scanner.leading


def test_special_tokens_are_framing_and_other_added_tokens_are_text():
    pieces = Pieces([*controls(THINK), "<extra>"], special=["<|im_end|>"])
    tokens = pieces.encode("<think>a</think>b<extra>c<|im_end|>")
    events = by_token(THINK, pieces.vocabulary, tokens)
    assert r.collect(events).response == "b<extra>c"
    assert r.Framing("<|im_end|>") in events


def test_a_forced_closer_is_told_apart():
    pieces = Pieces(controls(THINK))
    emitter = r.ReasoningEmitter(THINK, pieces.vocabulary, primed=True)
    events = emitter.push(ord("a"))
    for token in pieces.encode("\n</think>\n"):
        events += emitter.push(token, forced=True)
    events += emitter.push(ord("b")) + emitter.finish()
    assert merged(events) == [
        r.ReasoningStart(primed=True),
        r.ReasoningDelta("a"),
        r.ReasoningEnd("</think>", "forced"),
        r.ResponseDelta("b"),
        r.End(reasoning_tokens=1),
    ]


def test_reasoning_tokens_are_those_of_thoughts_without_delimiters():
    pieces = Pieces()  # delimiters of several tokens
    tokens = pieces.spell("x\n<think>abc< d</think>efg")
    events = by_token(THINK, pieces.vocabulary, tokens)
    assert events[-1].reasoning_tokens == len("abc< d")


@pytest.mark.parametrize("size", range(1, 5))
def test_case_20_a_grammar_gets_only_the_tokens_after_the_thought(size):
    pieces = Pieces(controls(THINK))
    tokens = pieces.encode("a.</think>\n\n{}")
    scanner = r.Scanner(THINK, vocabulary=pieces.vocabulary, primed=True)
    matched = []
    for at in range(0, len(tokens), size):
        for token in tokens[at : at + size]:
            if scanner.closed:
                matched.append(token)
            scanner.accept(token)
    assert pieces.text(matched) == "\n\n{}"


def test_a_stream_is_of_tokens_or_of_text():
    with pytest.raises(r.ReasoningError, match="needs a vocabulary"):
        r.ReasoningEmitter(THINK).push(1)
    with pytest.raises(r.ReasoningError, match="use push"):
        r.ReasoningEmitter(THINK, Pieces().vocabulary).push_text("a")


# Unicode


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize("tail", [" next", "</think> next", ""])
def test_case_39_a_character_over_several_tokens(cuts, tail):
    pieces = Pieces()
    emoji = "🙂"
    tokens = pieces.spell("a") + pieces.spell(emoji, cuts) + pieces.spell(tail)
    emitters = [r.ReasoningEmitter(THINK, pieces.vocabulary, primed=True) for _ in "ab"]
    out: list[list] = [[], []]
    for token in tokens:  # two interleaved streams do not mix
        for events, emitter in zip(out, emitters, strict=True):
            events += emitter.push(token)
    for events, emitter in zip(out, emitters, strict=True):
        events += emitter.finish()
        assert all("\ufffd" not in event.text for event in events)
        assert (
            merged(events)[:-1]
            == by_text(THINK, ["a" + emoji + tail], primed=True)[:-1]
        )


def test_case_39_a_character_that_is_cut_off_is_one_replacement_character():
    pieces = Pieces()
    for size in (1, 2, 3):
        tokens = pieces.spell("a") + list("🙂".encode()[:size])
        assert (
            r.collect(by_token(THINK, pieces.vocabulary, tokens)).response == "a\ufffd"
        )


def test_a_character_cut_off_by_a_delimiter_is_one_replacement_character():
    pieces = Pieces(controls(THINK))
    tokens = [ord("a"), 0xF0, 0x9F, *pieces.encode("</think>b")]
    split = r.collect(by_token(THINK, pieces.vocabulary, tokens, primed=True))
    assert (split.reasoning, split.response) == ("a\ufffd", "b")


@pytest.mark.parametrize(
    "cluster", ["e\u0301", "👍🏽", "👩\u200d🚀", "🇩🇪", "ก\u0e33"[:1] + "\u0e31"]
)
def test_a_delta_never_splits_a_character_and_its_marks(cluster):
    text = f"<think>x{cluster}y{cluster}</think>{cluster}z{cluster}"
    emitter = r.ReasoningEmitter(THINK)
    events = [event for char in text for event in emitter.push_text(char)]
    events += emitter.finish()
    pieces = Pieces(controls(THINK))
    emitter = r.ReasoningEmitter(THINK, pieces.vocabulary)
    whole = pieces.id(cluster.encode())
    for token in [*pieces.encode("<think>x"), whole, whole, *pieces.spell("a b")]:
        events += emitter.push(token)
    for event in events:
        if isinstance(event, r.ReasoningDelta | r.ResponseDelta):
            assert event.text.replace(cluster, "").isascii(), event


def test_a_sentencepiece_stream_loses_its_first_space_only():
    pieces = Pieces()
    pieces.vocabulary.strip_space = True
    tokens = [pieces.id(b" Hi"), pieces.id(b" there")]
    events = by_token(THINK, pieces.vocabulary, tokens, trim=False)
    assert r.collect(events).response == "Hi there"


# Start states (case 38)


@pytest.mark.parametrize("thought", ["hm", ""])
@pytest.mark.parametrize("opened", ["<think>\n", "", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("closes", [True, False])
def test_case_38_the_prompt_decides_where_a_stream_begins(opened, closes, thought):
    turn = "<|im_start|>assistant\n"
    primed = QWEN.prompt_opens(turn + opened)
    assert primed == (opened == "<think>\n")
    text = thought + ("</think>yes" if closes and primed else "")
    split = r.split(text, QWEN, primed=primed)
    assert split == r.collect(by_text(QWEN, text, primed=primed))
    if primed:
        assert split.reasoning == thought
        assert split.response == ("yes" if closes else "")
        assert split.open is not closes
    else:
        assert (split.reasoning, split.response) == ("", thought)


# Every cut, every family

SAMPLES = [
    (name, row.config, primed)
    for name, row in r.FAMILIES.items()
    for primed in (False, True)
]


def sample(config, primed):
    """A thought, an answer and a tool call as the family writes them."""
    if config.frame is not None:
        thought = "think|ing <|" if primed else ANALYSIS
        end = config.end if primed else ""
        return thought + end + FINAL.removesuffix("<|return|>") + ONE["harmony"]
    open_, close = config.wrappers[0] if config.wrappers else ("", "")
    start = "" if primed else config.start
    return (
        f"{start}\nfirst < {config.end[:3]} 🙂e\u0301 {config.start}\n{config.end}\n\n"
        f"{open_}answer `{config.start}` {config.end[:-1]}{close}"
        + ONE.get(config.tools, "")
    )


@pytest.mark.parametrize(("name", "config", "primed"), SAMPLES)
def test_every_single_cut_gives_the_same_events(name, config, primed):
    text = sample(config, primed)
    kwargs = {"primed": primed, "tools": TOOLS}
    expected = by_text(config, [text], **kwargs)
    assert len(r.collect(expected).tool_calls) == (config.tools in ONE)
    for at in range(1, len(text)):
        assert by_text(config, [text[:at], text[at:]], **kwargs) == expected
    assert by_text(config, text, **kwargs) == expected


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
@example(SAMPLES[0], [1, 2, 3], True)
def test_any_cut_into_pieces_and_tokens_gives_the_same_events(which, cuts, trim):
    _, config, primed = which
    text = sample(config, primed)
    kwargs = {"primed": primed, "trim": trim, "tools": TOOLS}
    expected = by_text(config, [text], **kwargs)
    assert by_text(config, cut(text, cuts), **kwargs) == expected
    pieces = Pieces()
    tokens = pieces.spell(text, cuts)
    assert plain(by_token(config, pieces.vocabulary, tokens, **kwargs)) == expected
    if not trim:
        assert "".join(event.text for event in expected) == text


@pytest.mark.parametrize("name", REAL)
@settings(deadline=None, max_examples=60)
@given(text=st.text(st.sampled_from('ab <>/`\n"{}é🙂\u0301th:'), max_size=60))
def test_real_vocabularies_route_as_text_does(name, text):
    vocabulary = REAL[name]()
    stream = f"<think>\n{text}\n</think>\n\n{text}\n{CALL}"
    tokens = vocabulary.encode(stream)
    decoded = b"".join(map(vocabulary.piece, tokens)).decode()
    assert plain(by_token(QWEN, vocabulary, tokens, trim=False)) == by_text(
        QWEN, [decoded], trim=False
    )
