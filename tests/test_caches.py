"""Every class of cache: what speculation leaves in it is what plain decoding does.

The reference is the model itself with its own caches, fed one token at a time.
"""

from functools import partial

import mlx.core as mx
import pytest
from families import CONFIGS, WindowModel, tiny_family
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from tiny import ScriptedDrafter, plain_tokens, random_prompt

from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.state import (
    KVAdapter,
    RotatingAdapter,
    SteppedView,
    UnsupportedCache,
    check_stepped,
    classify,
)
from mlx_mtp.targets import as_target
from mlx_mtp.targets.stepping import find_steppers, stepping

VOCAB, DEPTH = 96, 3
Rotating, Quantized = RotatingKVCache, partial(QuantizedKVCache, 32, 8)


class Case:
    """A model, its greedy stream behind a prompt, and the logits of every token."""

    def __init__(self, model, length=9, tokens=440, **options):
        self.model, self.target, self.options = model, as_target(model), options
        self.prompt = random_prompt(length, VOCAB, length)
        self.tokens, self.rows = [], []
        steps = generate_step(
            mx.array(self.prompt),
            model,
            max_tokens=tokens,
            prompt_cache=self.target.make_cache(),
            **options,
        )
        for token, row in steps:
            self.tokens.append(token)
            self.rows.append(row)
        self.drafter = ScriptedDrafter(self.tokens, VOCAB)
        self.decoder = SpeculativeDecoder(self.target, self.drafter, DEPTH)

    def check(self, plan, tokens, fallback=None):
        """``tokens`` of a stream that accepts by ``plan``, and the caches it leaves."""
        self.drafter.plan = plan
        caches = self.target.make_cache()
        steps = self.decoder.stream(
            self.prompt, max_tokens=-1, caches=caches, **self.options
        )
        for i in range(tokens):
            step = next(steps)
            assert step.token == self.tokens[i]
            assert mx.allclose(step.logprobs, self.rows[i], rtol=0, atol=1e-3)
        steps.close()
        assert (steps.telemetry.fallback or "None").startswith(str(fallback))
        assert all(not entry.empty() for entry in caches)
        fed = mx.array(self.tokens[tokens : tokens + 1])
        rest = generate_step(fed, self.model, max_tokens=12, prompt_cache=caches)
        for i, (token, row) in enumerate(rest, tokens + 1):
            assert token == self.tokens[i]
            assert mx.allclose(row, self.rows[i], rtol=0, atol=1e-3)
        return steps.telemetry


CACHES = {
    "plain": [KVCache] * 2,
    "concatenated": [ConcatenateKVCache] * 2,
    "quantised": [Quantized] * 2,
    "batch of one": [lambda: BatchKVCache([0])] * 2,
    "rotating batch of one": [lambda: BatchRotatingKVCache(16, [0])] * 2,
    "window 8": [partial(Rotating, 8)] * 2,
    "window 64": [partial(Rotating, 64)] * 2,
    "window 12 that keeps 4": [partial(Rotating, 12, 4)] * 2,
    "windows of many sizes": [partial(Rotating, 8), KVCache, partial(Rotating, 21, 2)],
    "mixed classes": [Quantized, partial(Rotating, 33), ConcatenateKVCache],
}
PLANS = st.lists(st.integers(0, DEPTH), min_size=5, max_size=40)


@pytest.fixture(scope="module", params=CACHES)
def case(request):
    return Case(WindowModel(*CACHES[request.param]))


def random_plan(seed, rounds=200):
    """Accepted drafts by round, 0.9 on average."""
    draws = mx.random.randint(0, DEPTH + 1, (2, rounds), key=mx.random.key(seed))
    return mx.min(draws, axis=0).tolist()


def test_two_hundred_rounds_leave_what_plain_decoding_does(case):
    assert case.check(random_plan(1), 420).rounds > 200


@settings(max_examples=6, deadline=None, derandomize=True)
@given(plan=PLANS, tokens=st.integers(1, 90))
def test_any_acceptance_and_any_end(case, plan, tokens):
    case.check(plan, tokens)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 17, 40])
def test_prompts_below_at_and_beyond_the_windows(length):
    case = Case(WindowModel(*CACHES["windows of many sizes"]), length, 60)
    case.check(random_plan(length, 20), 40)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(window=st.integers(5, 64), keep=st.integers(0, 4), plan=PLANS)
def test_windows_of_any_size(window, keep, plan):
    makers = [partial(Rotating, window, keep), partial(Rotating, window // 2 + 4, keep)]
    Case(WindowModel(*makers), tokens=120).check(plan, 100)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(plan=st.lists(st.integers(0, DEPTH), min_size=8, max_size=20))
def test_case_24_drafts_go_on_past_a_window_that_stays_bounded(plan):
    """Window 16, prompt 10: token by token plain decoding, and the cache gets back its
    last 16 rows."""
    case = Case(WindowModel(*[partial(Rotating, 16)] * 2), 10, 80)
    telemetry = case.check([*plan, DEPTH], 60)
    assert telemetry.depths.keys() == {DEPTH} and telemetry.step_downs == 0
    assert telemetry.rounds > 60 / (DEPTH + 1) - 2
    caches = case.target.make_cache()
    steps = case.decoder.stream(case.prompt, max_tokens=-1, caches=caches)
    for _ in range(50):
        next(steps)
    steps.close()
    assert caches[0].keys.shape[2] <= 16 and caches[0].offset == 10 + 50
    width = DEPTH + 1
    ring = RotatingAdapter.of(caches[0], width).adopt(caches[0], width, 512)
    assert {x.shape[2] for x in ring} == {16 + 2 * width - 1}


# Quantisation in the middle of a stream


@settings(max_examples=8, deadline=None, derandomize=True)
@given(start=st.integers(0, 60), plan=PLANS)
def test_quantisation_begins_exactly_where_mlx_lm_has_it(start, plan):
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    case = Case(WindowModel(KVCache, KVCache), tokens=80, **options)
    other = Case(WindowModel(KVCache, KVCache), tokens=80)
    assert case.tokens != other.tokens  # four bits are seen
    telemetry = case.check(plan, 60)
    assert telemetry.accepted or not any(plan)


def test_a_window_is_not_quantised():
    decoder = Case(WindowModel(partial(Rotating, 8)), tokens=1).decoder
    with pytest.raises(ValueError, match="entry 0 is a RotatingKVCache"):
        decoder.stream([1, 2], kv_bits=8)
    for bad in ({"kv_group_size": 0}, {"quantized_kv_start": -1}):
        with pytest.raises(ValueError, match="kv_group_size 32, 64 or 128"):
            decoder.stream([1, 2], kv_bits=8, **bad)


# Families


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(family):
    fallback = "eager round" if family == "llama4" else None
    case = Case(tiny_family(family))
    assert case.check(random_plan(2), 420, fallback).rounds > 200


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_past_the_window_mlx_lms_own_speculation_goes_wrong(family):
    """It cannot trim a ring that has wrapped, and does not notice."""
    model, draft = tiny_family(family), tiny_family(family, seed=1)
    prompt = random_prompt(9, VOCAB, 1)
    plain = plain_tokens(model, prompt, 60)
    theirs = speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=3, max_tokens=60
    )
    theirs = [token for token, *_ in theirs]
    assert theirs[:5] == plain[:5] and theirs != plain  # a window of 16
    decoder = SpeculativeDecoder(
        as_target(model), ScriptedDrafter(plain, VOCAB, [0, 1, 0, 2]), DEPTH
    )
    assert [step.token for step in decoder.stream(prompt, max_tokens=60)] == plain


# Refusals


class StrangeCache(KVCache):
    pass


def test_an_unknown_cache_is_refused_untouched():
    decoder = Case(WindowModel(KVCache, StrangeCache), tokens=1).decoder
    caches = decoder.target.make_cache()
    with pytest.raises(UnsupportedCache, match="entry 1 is a StrangeCache"):
        decoder.stream([1, 2], caches=caches)
    assert all(entry.empty() for entry in caches)


def test_a_batch_of_rows_is_refused():
    case = Case(WindowModel(KVCache), tokens=1)
    for entry in (BatchKVCache([0, 1]), BatchRotatingKVCache(8, [0, 0])):
        with pytest.raises(UnsupportedCache, match="entry 0 holds padded batch rows"):
            classify([entry], case.target.adapters)


# Recurrent layers, row by row


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("nemotron_h", {"NemotronHMamba2Mixer"}),
        ("lfm2", {"ShortConv"}),
        ("rwkv7", {"Rwkv7TimeMixing", "Rwkv7ChannelMixing"}),
    ],
)
def test_only_the_innermost_recurrent_modules_are_stepped(family, modules):
    """So that the rest of the model is read once a block."""
    model = tiny_family(family)
    classes = {type(m) for m in model.modules()}
    before = {c: c.__call__ for c in classes}
    views = [
        SteppedView([None] * len(c.cache)) if hasattr(c, "cache") else c
        for c in model.make_cache()
    ]
    found = find_steppers(model, mx.array([[1, 2]]), views)
    assert {c.__name__ for c in found} == modules
    with pytest.raises(ZeroDivisionError), stepping(found):
        assert all(c.__call__ is not before[c] for c in found)
        raise ZeroDivisionError
    assert all(c.__call__ is before[c] for c in classes)


def test_a_state_that_is_not_given_row_by_row_is_refused():
    view = SteppedView([None, None])
    for value in (mx.zeros((1, 1)), mx.ones((1, 1))):
        view[0] = value
    with pytest.raises(UnsupportedCache, match=r"2 rows gave \[2, 0\] states"):
        check_stepped(view, 2)


@pytest.mark.parametrize("make", [BatchKVCache, partial(BatchRotatingKVCache, 8)])
def test_the_padding_of_a_batch_row_is_left_out(make):
    cache, twin = make([2]), KVCache()
    x = mx.random.normal((1, 2, 7, 4), key=mx.random.key(1))
    cache.update_and_fetch(x, x)
    twin.update_and_fetch(x[:, :, 2:], x[:, :, 2:])
    (adapter,) = classify([cache], [KVAdapter()], 2)
    leaves = adapter.adopt(cache, 2, 16)
    adapter.clear(cache)
    assert cache.empty()
    adapter.release(cache, leaves, 5, mx.array([0]))
    assert cache.offset.tolist() == [5] and cache.left_padding.tolist() == [0]
    for entry in (cache, twin):
        entry.update_and_fetch(x[:, :, :2], x[:, :, :2])
    assert mx.array_equal(cache.keys_and_values()[0], twin.keys_and_values()[0])
