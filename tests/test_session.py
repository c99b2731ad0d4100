"""Sessions: typed turns, caches over turns, tools, cancellation. Stock BLAS."""

import json
import random
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from tiny import tiny_llama

import mlx_mtp
from mlx_mtp import NGramDrafter, make_sampler
from mlx_mtp.grammar import GrammarError, UnsupportedToolProtocol
from mlx_mtp.loops import PlainLoop, SpeculativeLoop
from mlx_mtp.reasoning import (
    Call,
    CannotDisableReasoning,
    End,
    InsufficientTokens,
    ReasoningConfig,
    ReasoningDelta,
    ReasoningEnd,
    ReasoningError,
    ReasoningStart,
    ResponseDelta,
    TemplateError,
    ToolCall,
    UnknownEffort,
    UnknownFamily,
    family,
)
from mlx_mtp.session import Session
from mlx_mtp.speculative import Step
from mlx_mtp.thinking import MissingCapability

QUESTION = "What is 57 + 68?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
PRODUCT = "What is 37 * 48?"
CALL = Call("calculator", {"expression": "37*48"}, "call00000")
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}
NGRAM = NGramDrafter()
MODES = [None, "auto", NGRAM]


def parts(reply):
    return reply.text, reply.reasoning, reply.tool_calls, reply.finish_reason


def cold(session, message, **options):
    """A fresh session's turn over the same conversation."""
    fresh = Session(
        session._model,
        session._tokenizer,
        tools=session._tools,
        mtp=session.mtp,
        sampler=session.sampler,
        max_tokens=session._max_tokens,
    )
    fresh.messages = [dict(message) for message in session.messages]
    fresh._call_numbers = iter(range(session.calls, 99))
    return fresh.respond(message, **options)


def make(demo, mtp="auto", sampler=None, **kwargs):
    session = Session(*demo, mtp=mtp, sampler=sampler, **kwargs)
    session.mtp, session.sampler, session.calls = mtp, sampler, 0
    return session


def conversation(session, *turns):
    """Every turn equals that of a fresh session; the replies."""
    replies = []
    for message, options in turns:
        expected = cold(session, message, **options)
        reply = session.respond(message, **options)
        assert parts(reply) == parts(expected)
        usage = expected.usage
        assert reply.usage.prompt_tokens == usage.prompt_tokens
        assert reply.usage.completion_tokens == usage.completion_tokens
        assert reply.usage.reasoning_tokens == usage.reasoning_tokens
        assert usage.cached_tokens == 0
        offsets = {getattr(c, "offset", None) for c in session._caches}
        assert offsets <= {None, len(session._cached)}
        session.calls += len(reply.tool_calls)
        replies.append(reply)
    return replies


# Turns


@pytest.mark.parametrize("mtp", MODES)
def test_every_turn_equals_a_fresh_session_over_the_same_messages(demo, mtp):
    session = make(demo, mtp, system="Answer briefly.")
    replies = conversation(
        session,
        (QUESTION, {"thinking_budget": 12}),
        ("What is 12 * 3?", {"thinking": False}),
        (QUESTION, {"max_tokens": 9}),
        ("Hello!", {}),
    )
    assert replies[0].usage.reasoning_tokens == 12
    assert replies[1].reasoning == "" and "36" in replies[1].text
    assert replies[2].finish_reason == "length"
    roles = ["system"] + ["user", "assistant"] * 4
    assert [m["role"] for m in session.messages] == roles


def test_cached_tokens_reach_up_to_the_last_users_message(demo):
    """The template drops earlier thoughts, so nothing behind it can be kept."""
    tokenizer = demo[1]
    session = make(demo)
    session.respond("What is 1 + 2?")
    for message in ("Hello!", "What is 2 + 2?"):
        kept = tokenizer.apply_chat_template(session.messages[:-1])
        assert session.respond(message).usage.cached_tokens == len(kept)


def test_without_thoughts_everything_is_kept(demo):
    """A template that shows thoughts again needs no mark either."""
    model, tokenizer = mlx_mtp.load("demo")
    inner = tokenizer._tokenizer
    inner.chat_template = inner.chat_template.replace(
        "loop.index0 > ns.last_user and reasoning", "reasoning"
    )
    session = make((model, tokenizer))
    first = session.respond(QUESTION).usage
    second = session.respond("What is 1 + 2?").usage
    assert second.cached_tokens == first.prompt_tokens + first.completion_tokens
    conversation(session, ("Hello!", {}))


def test_caches_that_went_back_hold_the_same_numbers(demo):
    for mtp in ("auto", None):
        session, fresh = make(demo, mtp), make(demo, mtp)
        session.respond(QUESTION)
        fresh.messages = list(session.messages)
        for s in (session, fresh):
            s.respond("What is 1 + 2?", max_tokens=5)
        assert session.usage.cached_tokens > fresh.usage.cached_tokens == 0
        assert session._cached == fresh._cached
        size = len(session._cached)
        for a, b in zip(session._caches, fresh._caches, strict=True):
            if hasattr(a, "offset"):
                assert a.offset == b.offset == size
                a, b = ([x.keys[:, :, :size], x.values[:, :, :size]] for x in (a, b))
            else:
                a, b = a.cache, b.cache
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, atol=2e-4)


def test_the_drafters_state_comes_back_with_the_caches(demo):
    """As many rounds as with a cold prompt, so its context is whole, also behind a
    turn that was cancelled."""
    session = make(demo)
    session.respond(QUESTION)
    for message, cancelled in (("What is 12 * 3?", 0), ("Hello!", 7), ("Why?", 3)):
        if cancelled:
            for _ in session.stream(QUESTION):
                if session.usage.completion_tokens >= cancelled:
                    session.cancel()
            assert session.reply.finish_reason == "cancelled"
        expected = cold(session, message).usage
        usage = session.respond(message).usage
        assert usage.accepted_drafts == expected.accepted_drafts
        assert usage.rejected_drafts == expected.rejected_drafts


@pytest.mark.parametrize("mtp", [None, NGRAM])
@pytest.mark.parametrize("window", [None, 40, 4096])
def test_models_of_attention_and_of_sliding_windows(demo, mtp, window):
    """Random weights: what counts is that warm and cold caches agree."""
    if window is None:
        model = tiny_llama(vocab=4096)
    else:
        mx.random.seed(4)
        model = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=64,
                num_hidden_layers=2,
                intermediate_size=128,
                num_attention_heads=4,
                rms_norm_eps=1e-6,
                vocab_size=4096,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=window,
            )
        )
        mx.eval(model.parameters())
    session = make((model, demo[1]), mtp, max_tokens=12)
    kind = SpeculativeLoop if mtp else PlainLoop
    assert isinstance(session._loop, kind)
    _, second, third = conversation(
        session, (QUESTION, {}), ("Again.", {}), ("And again.", {})
    )
    assert second.usage.cached_tokens > 0
    assert third.usage.cached_tokens > 0


@pytest.mark.parametrize("mtp", ["auto", None])
@pytest.mark.parametrize("sampler", [make_sampler(4.0), mlx_lm_sampler(4.0)])
def test_a_seed_fixes_a_turn_whatever_came_before(demo, mtp, sampler):
    session = make(demo, mtp, sampler, max_tokens=30)
    texts = []
    for seed in (1, 2, 1):
        session.reset()
        texts.append(parts(session.respond(QUESTION, seed=seed)))
    assert texts[0] == texts[2] != texts[1]


def test_usage_counts_every_token_once(demo):
    for mtp in MODES:
        session = make(demo, mtp)
        usage = session.respond(QUESTION, thinking_budget=9).usage
        made = session._tokenizer.encode(
            f"{session.reply.reasoning}</think>\n\n{session.reply.text}<|im_end|>"
        )
        assert usage.completion_tokens == len(made)
        assert usage.reasoning_tokens == 9
        drafted = sum(t.drafted for t in usage.telemetry)
        assert usage.accepted_drafts + usage.rejected_drafts == drafted
        assert (drafted > 0) == (mtp is not None)


# Events


def kinds(events):
    """Event types without repetition."""
    names = [type(event) for event in events]
    return [a for a, b in zip(names, [None, *names], strict=False) if a is not b]


def test_events_come_in_order_and_while_the_model_decodes(demo):
    session = make(demo)
    stream = session.stream(QUESTION)
    assert session.messages == [] and session.usage.completion_tokens == 0
    first = next(stream)
    assert first == ReasoningStart(primed=True)
    next(stream)
    assert 0 < session.usage.completion_tokens < 10
    events = [first, *stream]
    assert kinds(events) == [
        ReasoningStart,
        ReasoningDelta,
        ReasoningEnd,
        ResponseDelta,
        End,
    ] or kinds(events)[-2:] == [ResponseDelta, End]
    text = "".join(e.text for e in events if isinstance(e, ResponseDelta))
    assert text == session.reply.text == "The sum is 125."


def test_a_budget_of_nothing_and_one_beyond_any_limit(demo):
    free = parts(make(demo).respond(QUESTION))
    for mtp in MODES:
        session = make(demo, mtp)
        none = session.respond(QUESTION, thinking_budget=0)
        assert none.reasoning == "" and none.usage.reasoning_tokens == 0
        assert none.text and none.finish_reason == "stop"
        session.reset()
        huge = session.respond(QUESTION, thinking_budget=1 << 40, max_tokens=-1)
        assert parts(huge) == free


def test_a_cut_thought_says_so(demo):
    for mtp in MODES:
        events = list(make(demo, mtp).stream(QUESTION, thinking_budget=5))
        (end,) = (e for e in events if isinstance(e, ReasoningEnd))
        assert end.cause == "forced"


@pytest.mark.parametrize("mtp", MODES)
def test_case_38_the_prompt_says_where_a_stream_starts(demo, mtp):
    session = make(demo, mtp)
    cut = session.respond(QUESTION, max_tokens=6)
    assert cut.reasoning and cut.text == "" and cut.finish_reason == "length"
    session.reset()
    off = session.respond(QUESTION, thinking=False)
    assert off.text and off.reasoning == "" and off.finish_reason == "stop"


# Tools


@pytest.mark.parametrize(
    ("mtp", "options"),
    [
        (None, {"tool_choice": "required", "thinking_budget": 6}),
        ("auto", {}),
        ("auto", {"tool_choice": {"name": "calculator"}, "thinking": False}),
        (NGRAM, {"tool_choice": "required"}),
    ],
)
def test_a_call_its_result_and_the_next_question(demo, mtp, options):
    session = make(demo, mtp, tools=TOOLS, capabilities={"reasoning", "tools"})
    (asked,) = conversation(session, (PRODUCT, options))
    assert asked.tool_calls == (CALL,) and asked.finish_reason == "tool_calls"
    assert asked.text == "" and not asked.rejected
    assert bool(asked.reasoning) == options.get("thinking", True)
    session.add_tool_result(asked.tool_calls[0], 1776)
    answer, last = conversation(session, (None, {}), ("Hello!", {"max_tokens": 20}))
    # The thought behind the question is dropped; without one the result stays too.
    kept = session.messages[: 1 if asked.reasoning else 3]
    shown = demo[1].apply_chat_template(kept, tools=TOOLS)
    assert last.usage.cached_tokens == len(shown)
    assert "1776" in answer.text
    if "thinking_budget" not in options and "thinking" not in options:
        # The thought of this question is shown again: nothing is fed twice.
        used = asked.usage.prompt_tokens + asked.usage.completion_tokens
        assert answer.usage.cached_tokens == used


def test_calls_can_be_parallel(demo):
    session = make(demo, tools=TOOLS)
    question = "What is 12+5 and what is 7*8?"
    for choice in ("auto", "required"):
        session.reset()
        reply = session.respond(question, tool_choice=choice)
        expressions = [call.arguments["expression"] for call in reply.tool_calls]
        assert expressions == ["12+5", "7*8"]
        assert len({call.id for call in reply.tool_calls}) == 2
    for call in reply.tool_calls:
        session.add_tool_result(call, {"é": 1})
    contents = [m["content"] for m in session.messages[-2:]]
    assert contents == ['{"é": 1}'] * 2
    with pytest.raises(ValueError, match="open calls of the last turn: none"):
        session.add_tool_result(reply.tool_calls[0], "1")


def test_required_calls_are_valid_even_where_the_model_would_not_call(demo):
    session = make(demo, tools=TOOLS, max_tokens=90)
    for question in ("Hello!", "What does house mean?"):
        for options in ({"thinking": False}, {"thinking_budget": 3}):
            session.reset()
            reply = session.respond(question, tool_choice="required", **options)
            if reply.finish_reason == "length":
                continue  # an endless string
            assert not reply.rejected and reply.text == ""
            for call in reply.tool_calls:
                assert call.name == "calculator"
                assert type(call.arguments["expression"]) is str
            assert reply.tool_calls


def test_tools_can_be_hidden(demo):
    session = make(demo, tools=TOOLS)
    hidden = session.respond(PRODUCT, tool_choice="none")
    assert not hidden.tool_calls and "Split" in hidden.reasoning
    assert hidden.usage.prompt_tokens < 40


CUTS = [{"thinking": False}, *({"thinking_budget": n} for n in range(5))]


@pytest.fixture(scope="module")
def plain_sums(demo):
    session = make(demo, None)
    return [sums(session, options) for options in CUTS]


def sums(session, options):
    session.reset()
    reply = session.respond(QUESTION, response_format=SUM, **options)
    assert 0 <= json.loads(reply.text)["sum"] <= 999
    assert reply.finish_reason == "stop"
    return parts(reply)


@pytest.mark.parametrize("mtp", [1, 2, 3, 4, NGRAM])
def test_case_20_json_behind_a_thought_cut_at_every_offset(demo, plain_sums, mtp):
    session = make(demo, mtp)
    assert [sums(session, options) for options in CUTS] == plain_sums


def test_what_follows_a_cut_thought_is_written_once(demo):
    """Qwen3's own transition ends with two newlines, and so does the lead."""
    session = make(demo, reasoning="qwen3")
    sums(session, {"thinking_budget": 3})
    text = demo[1].decode(session._cached)
    assert text.count("</think>\n\n{") == 1 and "now.\n</think>" in text


def test_json_behind_a_thought_that_ends_by_itself(demo):
    reply = make(demo).respond(QUESTION, response_format=SUM)
    assert "Result: 125" in reply.reasoning and json.loads(reply.text)


@pytest.mark.parametrize("text", ["<|im_end|>", "</think>", "<tool_call>"])
def test_json_may_hold_the_text_of_a_control_token(demo, text):
    schema = {
        "type": "object",
        "properties": {"tag": {"enum": [text]}, "n": {"type": "integer"}},
        "required": ["tag", "n"],
        "additionalProperties": False,
    }
    replies = []
    for mtp in (None, "auto"):
        session = make(demo, mtp, max_tokens=90)
        session.respond(QUESTION, response_format=schema, thinking_budget=5)
        replies.append(parts(session.reply))
        assert json.loads(session.reply.text)["tag"] == text
        assert session.reply.finish_reason == "stop" and not session.reply.rejected
    assert replies[0] == replies[1]


def test_a_phase_of_its_own_costs_no_second_prefill(demo):
    """The tokens that are fed are the prompt's and the emitted ones, each once."""
    session = make(demo, tools=TOOLS)
    fed = []
    target = session._loop.decoder.target
    prefill = target.prefill
    try:
        target.prefill = lambda tokens, caches: (
            fed.append(tokens.size),
            prefill(tokens, caches),
        )[1]
        reply = session.respond(PRODUCT, tool_choice="required")
    finally:
        del target.prefill
    usage = reply.usage
    assert sum(fed) < usage.prompt_tokens + 30
    assert session._cached[: usage.prompt_tokens] and len(session._cached) == (
        usage.prompt_tokens + usage.completion_tokens
    )


# Scripted streams


class ScriptLoop:
    """Emits scripts in turn, and keeps the prompts that it was given."""

    def __init__(self, *scripts):
        self.scripts, self.prompts, self.seeds = list(scripts), [], []

    def make_cache(self):
        return [object()]

    def feed(self, tokens, caches, *, progress):
        progress(0, len(tokens))

    def snapshot(self, caches):
        return None

    def restore(self, caches, snapshot, surplus):
        return True

    def stream(self, prompt, caches, *, max_tokens, **options):
        self.prompts.append(list(prompt))
        self.seeds.append(options["seed"])
        for token in self.scripts.pop(0)[:max_tokens]:
            yield Step(token, False, None)


def scripted(demo, *texts, **kwargs):
    session = make(demo, tools=TOOLS, **kwargs)
    encode = session._vocabulary.encode
    session._loop = ScriptLoop(*map(encode, texts))
    return session


JSON = '{"name": "calculator", "arguments": {"expression": "1"}}'


def test_case_23_a_call_ends_an_open_thought(demo):
    session = scripted(demo, f"need data <tool_call>\n{JSON}\n</tool_call><|im_end|>")
    reply = session.respond("x")
    assert reply.reasoning == "need data" and reply.text == ""
    assert reply.tool_calls == (Call("calculator", {"expression": "1"}, "call00000"),)
    assert reply.finish_reason == "tool_calls"


def test_an_opener_that_the_model_wrote_is_not_written_again(demo):
    behind = JSON.removeprefix('{"name":') + "\n</tool_call><|im_end|>"
    for thought, written in (
        ("need data<tool_call>", '\n{"name":'),
        ("need data\n</think>", '\n\n<tool_call>\n{"name":'),
    ):
        session = scripted(demo, thought, behind)
        reply = session.respond("x", tool_choice="required")
        assert [call.name for call in reply.tool_calls] == ["calculator"]
        assert reply.reasoning == "need data" and reply.text == ""
        assert session._loop.prompts[1] == session._vocabulary.encode(written)


def test_an_opener_that_is_all_there_is_to_write(demo):
    """Nothing is left to begin the call's stream with: the turn is read anew."""
    config = ReasoningConfig(
        "<think>", "</think>", tools="mistral", implicit_ends=("[TOOL_CALLS]",)
    )
    call = 'calculator[ARGS]{"expression": "1"}<|im_end|>'
    session = scripted(demo, "need data[TOOL_CALLS]", call, reasoning=config)
    reply = session.respond("x", tool_choice="required")
    assert [call.name for call in reply.tool_calls] == ["calculator"]
    assert reply.reasoning == "need data" and reply.text == ""
    first, second = session._loop.prompts
    encode = session._vocabulary.encode
    assert second == first + encode("need data[TOOL_CALLS]")
    whole = second + encode(call)
    assert session._cached[-len(whole) :] == whole


def test_a_call_instead_of_an_answer_goes_on_as_it_is(demo):
    session = scripted(demo, f"<tool_call>\n{JSON}\n</tool_call><|im_end|>")
    reply = session.respond("x", response_format=SUM)
    assert reply.tool_calls and reply.text == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "calculator", "arg\n</tool_call>', "malformed"),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', "undeclared"),
        ("<tool_call>\n{}\n</tool_call>", "missing_name"),
    ],
)
def test_calls_that_cannot_be_used_are_reported_and_not_lost(demo, text, reason):
    session = scripted(demo, f"hm\n</think>\n\n{text}<|im_end|>")
    reply = session.respond("x")
    assert [r.reason for r in reply.rejected] == [reason]
    assert reply.text == text and reply.finish_reason == "stop"
    assert not reply.tool_calls


def test_a_thought_that_never_ends_makes_no_call(demo):
    for script, reason in (("hm <|im_end|>", "stop"), ("hm " * 99, "length")):
        session = scripted(demo, script, max_tokens=20)
        reply = session.respond("x", tool_choice="required")
        assert reply.finish_reason == reason and not reply.tool_calls
        assert reply.reasoning.startswith("hm")


def test_the_limit_holds_over_both_phases(demo):
    size = len(make(demo)._vocabulary.encode("need data\n</think>"))
    for limit in range(size, size + 14):
        session = scripted(demo, "need data\n</think>", "x" * 99, max_tokens=limit)
        reply = session.respond("x", tool_choice="required")
        assert reply.finish_reason == "length"
        assert size <= reply.usage.completion_tokens <= limit
        assert reply.reasoning == "need data"


def test_streams_of_one_turn_draw_independently(demo):
    session = scripted(demo, "a\n</think>", JSON[8:] + "<|im_end|>")
    session.respond("x", tool_choice="required", seed=7)
    assert session._loop.seeds == [7, 8]
    session = scripted(demo, "a\n</think>", JSON[8:] + "<|im_end|>")
    session.respond("x", tool_choice="required", seed=2**64 - 1)
    assert session._loop.seeds == [2**64 - 1, 0]


def test_a_family_that_opens_its_thoughts_itself_gets_one_opened(demo):
    """Qwen3's prompts end in front of <think>."""
    model, tokenizer = mlx_mtp.load("demo")
    inner = tokenizer._tokenizer
    inner.chat_template = inner.chat_template.replace("{{- '<think>\\n' }}", "")
    session = scripted((model, tokenizer), "hm</think>", JSON[8:])
    reply = session.respond("x", tool_choice="required")
    start = session._vocabulary.encode("<think>")
    assert session._loop.prompts[0][-1:] == start
    assert reply.reasoning == "hm"
    session = scripted((model, tokenizer), JSON[8:])
    session.respond("x", tool_choice="required", thinking=False)
    assert start[0] not in session._loop.prompts[0][-8:-3]


def test_case_39_characters_over_several_tokens_stay_whole(demo):
    text = "naïve 🙂🙃 写 end"
    session = scripted(demo, f"{text}\n</think>\n\n{text}<|im_end|>")
    events = list(session.stream("x"))
    assert session.reply.text == session.reply.reasoning == text
    assert "\ufffd" not in "".join(event.text for event in events)


# Cancellation


def test_a_cancelled_turn_ends_at_once_and_the_next_one_is_right(demo):
    rng = random.Random(5)
    session = make(demo)
    for _ in range(20):
        wanted = rng.randint(1, 12)
        for _ in session.stream(QUESTION):
            if session.usage.completion_tokens >= wanted:
                session.cancel()
                emitted = session.usage.completion_tokens
        assert session.usage.completion_tokens <= emitted + session._loop.decoder.depth
        assert session.reply.finish_reason == "cancelled"
        if rng.random() < 0.5:
            session.reset()
    conversation(session, ("What is 12 * 3?", {}))


def test_cancel_from_another_thread_and_in_the_prompt(demo):
    session = make(demo, max_tokens=-1)
    started = threading.Event()
    feed = session._loop.feed

    def slow_feed(tokens, caches, *, progress):
        feed(tokens[:3], caches, progress=progress)
        started.set()
        cancelled.wait(20)
        feed(tokens[3:], caches, progress=progress)

    session._loop.feed = slow_feed
    cancelled = threading.Event()
    replies = []
    worker = threading.Thread(target=lambda: replies.append(session.respond(QUESTION)))
    worker.start()
    assert started.wait(20)
    with pytest.raises(RuntimeError, match="running"):
        session.respond("x")
    with pytest.raises(RuntimeError, match="running"):
        session.reset()
    session.cancel()
    cancelled.set()
    worker.join(20)
    assert replies[0].finish_reason == "cancelled"
    assert session.messages == [] and session.usage.completion_tokens == 0
    session._loop.feed = feed
    conversation(session, (QUESTION, {}))


def test_a_turn_cancelled_as_its_thought_ends_makes_no_call(demo):
    session = make(demo, tools=TOOLS)
    for event in session.stream(PRODUCT, tool_choice="required", thinking_budget=6):
        if isinstance(event, ReasoningEnd):
            session.cancel()
    assert session.reply.finish_reason == "cancelled"
    assert session.reply.reasoning and not session.reply.tool_calls
    conversation(session, (PRODUCT, {"tool_choice": "required"}))


def test_two_sessions_of_one_model_do_not_mix(demo):
    """Token by token in turns, one of them abandoned halfway; and in two threads."""
    questions = (QUESTION, "What is 12 * 3?")
    expected = [parts(make(demo).respond(question)) for question in questions]
    sessions = [make(demo) for _ in questions]
    abandoned = make(demo).stream(QUESTION)
    next(abandoned)
    streams = [s.stream(q) for s, q in zip(sessions, questions, strict=True)]
    while streams:
        streams = [s for s in streams if next(s, None) is not None]
    assert [parts(session.reply) for session in sessions] == expected
    del abandoned
    replies = {}

    def answer(i):
        for _ in range(2):
            sessions[i].reset()
            replies[i] = parts(sessions[i].respond(questions[i]))

    threads = [threading.Thread(target=answer, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [replies[i] for i in range(2)] == expected


def test_a_closed_iterator_keeps_what_came(demo):
    session = make(demo)
    for count in range(1, 6):
        stream = session.stream(QUESTION, thinking=False)
        for _ in range(count):
            next(stream)
        stream.close()
        assert session.reply.finish_reason == "cancelled"
        assert session.messages[-1]["content"] == session.reply.text
    conversation(session, ("What is 12 * 3?", {}))


def test_a_turn_has_ended_when_its_end_is_given_out(demo):
    session = scripted(demo, "hm\n</think>\n\na<|im_end|>", "b</think>c<|im_end|>")
    stream = session.stream("x")
    for event in stream:
        if isinstance(event, End):
            break
    assert session.respond("y").reasoning == "b"
    assert next(stream, None) is None
    assert [m["content"] for m in session.messages] == ["x", "a", "y", "c"]


def test_a_turn_can_be_cancelled_before_its_first_event(demo):
    session = make(demo)
    for prompt in (QUESTION, "Hello!"):
        session.cancel()  # ends nothing: no turn is there
        stream = session.stream(prompt)
        session.cancel()
        assert [e.reason for e in stream if isinstance(e, End)] == ["cancelled"]
        assert session.messages == [] and session.usage.completion_tokens == 0
    assert session.respond(QUESTION, max_tokens=5).finish_reason == "length"


def test_a_prompt_that_fails_halfway_leaves_no_trace(demo):
    session = make(demo)
    feed = session._loop.feed

    def failing(tokens, caches, *, progress):
        feed(tokens[:3], caches, progress=progress)
        raise ZeroDivisionError

    session._loop.feed = failing
    with pytest.raises(ZeroDivisionError):
        session.respond("What is 12 * 3?")
    session._loop.feed = feed
    conversation(session, ("What is 12 * 3?", {}))


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(demo):
    session = make(demo)
    session.respond(QUESTION)
    before = list(session.messages)
    stream = session._loop.stream

    def failing(*args, **kwargs):
        for i, step in enumerate(stream(*args, **kwargs)):
            if i == 7:
                raise ZeroDivisionError
            yield step

    session._loop.stream = failing
    with pytest.raises(ZeroDivisionError):
        session.respond("What is 12 * 3?")
    assert session.messages == before
    session._loop.stream = stream
    conversation(session, ("What is 12 * 3?", {}))


def test_a_turn_that_was_planned_before_another_is_refused(demo):
    session = make(demo)
    early = session.stream(QUESTION)
    session.respond("Hello!")
    with pytest.raises(RuntimeError, match="gone on"):
        next(early)


# Refusals


def without(demo, *cuts):
    """The demo with another chat template."""
    model, tokenizer = mlx_mtp.load("demo")
    inner = tokenizer._tokenizer
    for old, new in cuts:
        assert old in inner.chat_template
        inner.chat_template = inner.chat_template.replace(old, new)
    return model, tokenizer


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_capability_that_the_model_lacks_is_refused(demo):
    model, tokenizer = mlx_mtp.load("demo")
    tokenizer._tokenizer.chat_template = PLAIN
    for kwargs, missing in (
        ({"capabilities": ["reasoning"]}, "reasoning"),
        ({"capabilities": {"tools"}}, "tools"),
        ({"tools": TOOLS}, "tools"),
    ):
        with pytest.raises(MissingCapability) as raised:
            Session(model, tokenizer, **kwargs)
        assert raised.value.capability == missing
    session = make((model, tokenizer), max_tokens=5)
    assert session.respond("Hi").reasoning == ""
    for options in ({"thinking": True}, {"effort": "low"}, {"thinking_budget": 3}):
        with pytest.raises(MissingCapability):
            session.stream("Hi", **options)
    with pytest.raises(ValueError, match="of reasoning, tools but has 'vision'"):
        Session(*demo, capabilities={"vision"})


def test_a_model_that_always_thinks_cannot_be_told_not_to(demo):
    model, tokenizer = without(demo, ("enable_thinking is false", "false"))
    session = make((model, tokenizer))
    with pytest.raises(CannotDisableReasoning):
        session.stream("Hi", thinking=False)
    assert session.respond(QUESTION, thinking_budget=0).reasoning == ""


def test_the_family_can_be_given(demo):
    assert make(demo, reasoning="qwen3")._config == family("qwen3")
    with pytest.raises(UnknownFamily):
        make(demo, reasoning="qwen33")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"effort": "high"}, UnknownEffort),
        ({"thinking_budget": -1}, ValueError),
        ({"thinking_budget": 10, "max_tokens": 10}, InsufficientTokens),
        ({"answer_reserve": 60, "max_tokens": 10}, InsufficientTokens),
        ({"max_tokens": 0}, ValueError),
        ({"max_tokens": 1.5}, TypeError),
        ({"tool_choice": "maybe"}, ValueError),
        ({"tool_choice": "required", "response_format": SUM}, ValueError),
        ({"tool_choice": {"name": "other"}}, ValueError),
        ({"tool_choice": {}}, ValueError),
        ({"tool_choice": {"function": "calculator"}}, ValueError),
        ({"response_format": {"type": "strin"}}, GrammarError),
        ({"thinking": "off"}, TypeError),
        ({"seed": "x"}, ValueError),
        ({"seed": -1}, ValueError),
    ],
)
def test_bad_turns_are_refused_before_any_token(demo, options, error):
    session = make(demo, tools=TOOLS)
    with pytest.raises(error):
        session.stream("Hi", **options)
    assert session.messages == []
    assert session.respond(QUESTION).tool_calls


def test_other_refusals(demo, monkeypatch):
    for tools in ({"name": "f"}, [{"function": {}}], [TOOLS[0], TOOLS[0]]):
        with pytest.raises(ReasoningError, match="tool"):
            make(demo, tools=tools)
    for mtp in MODES:
        with pytest.raises(TypeError, match="sampler must be callable"):
            make(demo, mtp, sampler="hot")
    session = make(demo, capabilities="reasoning")
    with pytest.raises(ValueError, match="nothing to answer"):
        session.respond()
    session.messages = [{}]
    with pytest.raises(ValueError, match=r"messages\[0\] must be a dict with a role"):
        session.stream("Hi")
    session.reset()
    with pytest.raises(TypeError, match="message must be a str"):
        session.stream(["Hi"])
    with pytest.raises(ValueError, match="the session has none"):
        session.stream("Hi", tool_choice="required")
    with pytest.raises(ValueError, match="max_tokens"):
        make(demo, max_tokens=-2)
    with pytest.raises(ValueError, match="chat template"):
        tokenizer = SimpleNamespace(chat_template=None)
        Session._find_config(SimpleNamespace(_tokenizer=tokenizer), None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="pip install"):
        session.stream("Hi", response_format=SUM)


def test_a_template_that_raises_is_named(demo):
    session = make(demo)
    session.messages = [{"role": "user", "content": "a"}]
    session._tokenizer._tokenizer, inner = (
        mlx_mtp.load("demo")[1]._tokenizer,
        session._tokenizer._tokenizer,
    )
    try:
        session._tokenizer._tokenizer.chat_template = (
            "{{ raise_exception('roles must alternate') }}"
        )
        with pytest.raises(TemplateError, match="roles must alternate"):
            session.stream("b")
    finally:
        session._tokenizer._tokenizer = inner


def test_calls_of_a_protocol_without_grammar_can_only_be_asked_for(demo):
    session = make(demo, tools=TOOLS, reasoning=family("glm"))
    with pytest.raises(UnsupportedToolProtocol):
        session.stream("Hi", tool_choice="required")


def test_the_examples_of_the_page_run(capsys):
    page = Path(__file__).parents[1] / "docs" / "session.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert code.count("assert") == 4
    exec(compile(code, str(page), "exec"), {})
    assert "Result: 125\n\nThe sum is 125." in capsys.readouterr().out


def test_events_are_those_of_the_reasoning_package(demo):
    session = make(demo, tools=TOOLS)
    (call,) = (e for e in session.stream(PRODUCT) if isinstance(e, ToolCall))
    assert call.name == "calculator" and call.id == "call00000"
    session.add_tool_result(call, "1776")
    assert session.messages[-1]["tool_call_id"] == call.id
