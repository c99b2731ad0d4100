"""Random streams: nothing raises, nothing is lost, cuts change nothing."""

import random
import time

import pytest
from reasoning_support import (
    REAL,
    Pieces,
    by_text,
    by_token,
    controls,
    cut,
    garbage,
    plain,
)
from test_reasoning_tools import ONE, TOOLS

import mlx_mtp.reasoning as r

# Of each of three tests: a minute in all, ten in .ci/full.
SECONDS = [20, pytest.param(200, marks=pytest.mark.slow)]
NAMES = list(r.FAMILIES)


def rounds(seconds, seed):
    """Numbered random sources until the time is up."""
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        yield random.Random(f"{seed} {number}")
    assert number > 100


@pytest.mark.parametrize("seconds", SECONDS)
def test_random_streams_of_text_and_tokens(seconds):
    for source in rounds(seconds, "stream"):
        config = r.family(source.choice(NAMES))
        text = garbage(config, source, source.randrange(1, 14))
        kwargs = {
            "primed": source.random() < 0.5,
            "trim": source.random() < 0.5,
            "tools": source.choice([None, TOOLS, []]),
        }
        expected = by_text(config, [text], **kwargs)
        cuts = [source.randrange(len(text) + 1) for _ in range(source.randrange(9))]
        case = (config.family, kwargs, text, cuts)
        assert by_text(config, cut(text, cuts), **kwargs) == expected, case
        assert by_text(config, text, **kwargs) == expected, case
        pieces = Pieces()
        tokens = pieces.spell(text, cuts)
        spelled = by_token(config, pieces.vocabulary, tokens, **kwargs)
        assert plain(spelled) == expected, case
        pieces = Pieces(controls(config))
        tokens = by_token(config, pieces.vocabulary, pieces.encode(text), **kwargs)
        if not kwargs["trim"]:
            for events in (expected, tokens):
                assert "".join(event.text for event in events) == text, case


@pytest.mark.parametrize("seconds", SECONDS)
def test_random_tokens_of_real_vocabularies(seconds):
    vocabularies = [make() for make in REAL.values()]
    for source in rounds(seconds, "tokens"):
        vocabulary = source.choice(vocabularies)
        config = r.family(source.choice(["qwen3", "qwen3_5", "granite", "glm"]))
        own = [vocabulary.controls[text] for text in vocabulary.controls]
        tokens = [
            source.choice(own)
            if source.random() < 0.3
            else source.randrange(vocabulary.size)
            for _ in range(source.randrange(60))
        ]
        primed = source.random() < 0.5
        limit = source.choice([None, 0, 1, 7])
        budget = r.ThinkingBudget(
            config, vocabulary, limit, primed=primed, transition=r.Transition()
        )
        emitter = r.ReasoningEmitter(config, vocabulary, primed=primed, trim=False)
        out, events = [], []
        for token in tokens:
            mark = budget.checkpoint()
            budget.accept(token)
            budget.restore(mark)
            for due in [*budget.forced(), token]:
                events += emitter.push(due)
                budget.accept(due)
                out.append(due)
            assert emitter.inside == budget.inside
        events += emitter.finish()
        data = b"".join(map(vocabulary.piece, out))
        assert "".join(event.text for event in events) == data.decode(errors="replace")
        assert limit is None or budget.spent <= limit + 3


@pytest.mark.parametrize("seconds", SECONDS)
def test_damaged_tool_calls(seconds):
    protocols = list(ONE)
    for source in rounds(seconds, "tools"):
        protocol = source.choice(protocols)
        text = list(ONE[protocol])
        for _ in range(source.randrange(1, 6)):
            at = source.randrange(len(text))
            other = source.choice(ONE[source.choice(protocols)])
            kind = source.randrange(3)
            text[at : at + (kind > 0)] = [other] if kind < 2 else []
        try:
            calls = r.parse_tool_calls("".join(text), protocol, TOOLS)
        except r.ToolCallError as error:
            assert error.reason
        else:
            assert all(type(call.arguments) is dict for call in calls)
            assert all(call.name in ("weather", "time") for call in calls)
