"""Stop strings, penalties and log-probabilities under speculation."""

import itertools

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from plain import closeness

from mlx_mtp import make_logits_processors, make_sampler, stream_generate
from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.stops import StopStrings


@pytest.fixture(scope="module")
def prompt(demo):
    _, tokenizer = demo
    message = {"role": "user", "content": "What is 57 + 68?"}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True)


@pytest.fixture(scope="module")
def text(demo, prompt):
    return mlx_lm.generate(*demo, prompt, max_tokens=100)


def cuts(text, most):
    """Every way of cutting a text into up to ``most`` pieces."""
    for n in range(most):
        for places in itertools.combinations(range(1, len(text)), n):
            edges = [0, *places, len(text)]
            yield [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("foo STOP bar", "STOP", "foo "),
        ("aab", ["ab"], "a"),
        ("abcabd", ["abd", "zz"], "abc"),
        ("xENDy", ["ND", "END"], "x"),
        ("no stop S", ["STOP"], "no stop S"),
        ("ein Käse 🙂!", ["🙂"], "ein Käse "),
        ("anything", [], "anything"),
    ],
)
def test_a_text_ends_in_front_of_a_stop_however_it_is_cut(text, stops, expected):
    for pieces in cuts(text, 4):
        found, shown, met = StopStrings(stops), "", False
        for piece in pieces:
            more, met = found.push(piece)
            shown += more
            assert expected.startswith(shown)
            if met:
                break
        shown += "" if met else found.finish()
        assert shown == expected and met == (expected != text), pieces


def test_only_what_may_become_a_stop_is_held_back():
    stops = StopStrings(["STOP", "TOM"])
    shown = [stops.push(x)[0] for x in ("a S", "T", "O", "X", " TO", "M")]
    assert shown == ["a ", "", "", "STOX", " ", ""]


@pytest.mark.parametrize("mtp", [None, 1, 4, NGramDrafter()], ids=str)
@pytest.mark.parametrize("stop", ["write", ["carry 1\n", "5 2"], "Result: 12", "zzz"])
def test_streams_end_at_a_stop_in_any_block(demo, prompt, text, mtp, stop):
    model, tokenizer = demo
    stops = [stop] if isinstance(stop, str) else stop
    ends = [i for s in stops if (i := text.find(s)) >= 0]
    expected = text[: min(ends)] if ends else text
    caches = make_prompt_cache(model)
    responses = list(
        stream_generate(*demo, prompt, 100, mtp=mtp, stop=stop, prompt_cache=caches)
    )
    assert "".join(r.text for r in responses) == expected
    last = responses[-1]
    assert last.finish_reason == "stop"
    assert [r.finish_reason for r in responses[:-1]] == [None] * (len(responses) - 1)
    assert last.generation_tokens == len(responses)
    # The completing token is the last of ids, log-probabilities and cache.
    ids = [r.token for r in responses]
    if ends:
        assert tokenizer.decode(ids[:-1]).find(stops[0]) < 0
        assert any(s in tokenizer.decode(ids) for s in stops)
    if mtp is not None:
        assert max(c.offset for c in caches if hasattr(c, "offset")) == (
            len(prompt) + len(ids)
        )


def test_bad_stops_are_refused(demo, prompt):
    for bad, error in (([""], ValueError), ([1], TypeError)):
        with pytest.raises(error, match="stop"):
            next(stream_generate(*demo, prompt, stop=bad))


@pytest.fixture(scope="module")
def bare(demo):
    """A text that may go on in many ways."""
    return demo[1].encode("The house is ")


PENALTIES = (
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0, "presence_context_size": 30},
    {"frequency_penalty": 0.8},
    {"logit_bias": {21: 4.0, 15: -100.0}},
    {"logit_bias": {5: 1.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
)


def tokens_of(demo, prompt, mtp, processors, **options):
    responses = stream_generate(
        *demo, prompt, 40, mtp=mtp, logits_processors=processors, **options
    )
    return [r.token for r in responses]


@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_penalties_give_the_tokens_of_plain_decoding(demo, bare, settings):
    plain = mlx_lm.sample_utils.make_logits_processors(**settings)
    expected = tokens_of(demo, bare, None, plain)
    free = tokens_of(demo, bare, None, None)
    assert expected != free
    for mtp in (1, 4, NGramDrafter()):
        ours = make_logits_processors(**settings)
        assert tokens_of(demo, bare, mtp, ours) == expected


def test_penalised_samples_are_those_of_plain_sampling(demo, bare):
    """Coupled, so that every token can be compared."""
    options = {"sampler": make_sampler(1.5, coupled=True), "seed": 3}
    settings = PENALTIES[-1]
    expected = tokens_of(
        demo, bare, None, make_logits_processors(**settings), **options
    )
    for mtp in (2, 5):
        ours = make_logits_processors(**settings)
        assert tokens_of(demo, bare, mtp, ours, **options) == expected


@pytest.mark.parametrize("least", [0, 1, 5, 12])
def test_no_end_comes_before_the_least_length(demo, least):
    _, tokenizer = demo
    message = {"role": "user", "content": "Hello!"}
    prompt = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, enable_thinking=False
    )
    ends = tokenizer.eos_token_ids
    end = min(ends)
    # The end is what comes wherever it may.
    settings = {"logit_bias": {end: 50.0}, "min_tokens": least, "end_tokens": ends}
    for mtp in (None, 1, 3, NGramDrafter()):
        tokens = tokens_of(demo, prompt, mtp, make_logits_processors(**settings))
        assert tokens.index(end) == least == len(tokens) - 1
    with pytest.raises(ValueError, match="min_tokens"):
        make_logits_processors(min_tokens=-1)


def test_tokens_that_the_model_has_no_logit_of():
    """A write behind the end of a row would be unchecked."""
    tokens, row = mx.array([1, 2]), mx.zeros((1, 8))
    (least,) = make_logits_processors(min_tokens=3, end_tokens=[-1, 5, 8, 10**6])
    assert mx.isinf(least(tokens, row)).tolist() == [[i == 5 for i in range(8)]]
    for token in (8, -1, 10**6):
        (bias,) = make_logits_processors(logit_bias={2: 1.0, token: 1.0})
        with pytest.raises(ValueError, match="model's are 0 to 7"):
            bias(tokens, row)


@pytest.mark.parametrize("processed", [False, True])
def test_top_logprobs_are_those_of_plain_decoding(demo, prompt, processed):
    processors = make_logits_processors(repetition_penalty=1.3) if processed else None
    options = {"logits_processors": processors}
    atol = closeness(1e-4, 0.1)  # the logits are float16 on a GPU
    found = [
        [(r.token, r.top_logprobs(5), r.logprobs) for r in responses]
        for responses in (
            stream_generate(*demo, prompt, 30, mtp=mtp, **options) for mtp in (None, 3)
        )
    ]
    for (token, expected, plain), (same, top, row) in zip(*found, strict=True):
        assert token == same == top[0][0]
        ids, values = zip(*top, strict=True)
        # On a GPU two that are as close may change places.
        assert mx.default_device() != mx.cpu or ids == tuple(i for i, _ in expected)
        np.testing.assert_allclose(values, [plain[i].item() for i in ids], atol=atol)
        np.testing.assert_allclose(values, [x for _, x in expected], atol=atol)
        assert row[ids[3]].item() == values[3]


def test_ties_of_top_logprobs_are_in_order_of_ids(demo, prompt):
    response = next(stream_generate(*demo, prompt, 5))
    response.logprobs = mx.array([0.0, 2.0, -mx.inf, 2.0])
    assert response.top_logprobs(3) == [(1, 2.0), (3, 2.0), (0, 0.0)]
    assert response.top_logprobs(0) == []
    with pytest.raises(ValueError, match="n must"):
        response.top_logprobs(-1)
