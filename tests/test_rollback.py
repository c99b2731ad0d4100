"""Whatever is accepted and wherever a stream ends, its caches are those of a run that
was fed exactly the prompt and the emitted tokens, bit for bit.
"""

from itertools import islice, product

import mlx.core as mx
import numpy as np
import pytest
from batches import Forces, LooksAhead, read
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import DEPTH, PLAN, PROMPT, Plain
from tiny import emitted, plain_tokens, random_prompt, start_row

from mlx_mtp.batch import BatchIterator
from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.generation import plain_stream
from mlx_mtp.loops import PlainLoop
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder, UnusableLogits

ENDS = range(1, 18)  # with PLAN: every slot of several rounds


@pytest.fixture(scope="module", params=["qwen", "llama"])
def plain(request):
    return Plain(request.getfixturevalue(request.param))


@settings(max_examples=16, deadline=None, derandomize=True)
@given(plan=st.lists(st.integers(0, DEPTH), min_size=13, max_size=18))
def test_state_after_every_round_equals_a_fresh_run(plain, plan):
    """Recurrent state, convolution window, keys, values and next logits."""
    plain.drafter.plan = plan
    state, _ = start_row(plain.round, PROMPT, 256)
    plain.drafter.plan = PLAN
    length = len(PROMPT)
    for accepts in plan:
        state, result = plain.round(state, 256)
        length += 1 + accepts
        assert emitted(result.counts)[0] == plain.fed[length - accepts : length + 1]
        caches = plain.target.make_cache()
        for adapter, cache, leaves in zip(
            plain.target.adapters, caches, state["leaves"], strict=True
        ):
            adapter.release(cache, leaves, length, state["steps"])
        plain.check(caches, length)


def row_by_row(tokens, logits):
    return logits


WAYS = {"compiled": [], "row by row": [row_by_row], "look ahead": [LooksAhead()]}


@pytest.mark.parametrize("way", WAYS)
def test_closing_anywhere_leaves_prompt_and_taken_tokens(plain, way):
    for taken in ENDS:
        caches = plain.target.make_cache()
        steps = plain.decoder.stream(PROMPT, caches=caches, processors=WAYS[way])
        tokens = [step.token for step in islice(steps, taken)]
        assert all(entry.empty() for entry in caches)
        steps.close()
        steps.close()
        assert tokens == plain.tokens[:taken]
        plain.check(caches, len(PROMPT) + taken)


def test_closing_before_the_first_token_touches_nothing(plain):
    caches = plain.target.make_cache()
    plain.decoder.stream(PROMPT, caches=caches).close()
    assert all(entry.empty() for entry in caches)


def test_leaving_the_context_or_dropping_the_iterator_closes(plain):
    caches = plain.target.make_cache()
    with plain.decoder.stream(PROMPT, caches=caches) as steps:
        next(steps)
    plain.check(caches, len(PROMPT) + 1)
    caches = plain.target.make_cache()
    steps = plain.decoder.stream(PROMPT, caches=caches)
    next(steps)
    del steps
    plain.check(caches, len(PROMPT) + 1)


@pytest.mark.parametrize("way", WAYS)
def test_max_tokens_in_any_slot_ends_there(plain, way):
    for limit in ENDS:
        caches, theirs = plain.target.make_cache(), plain.target.make_cache()
        steps = plain.decoder.stream(
            PROMPT, max_tokens=limit, caches=caches, processors=WAYS[way]
        )
        assert [step.token for step in steps] == plain.tokens[:limit]
        plain_tokens(plain.model, PROMPT, limit, theirs)
        for ours, other in zip(caches, theirs, strict=True):
            assert getattr(ours, "offset", None) == getattr(other, "offset", None)
        plain.check(caches, len(PROMPT) + limit)


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_token_in_any_slot_ends_there(plain, way):
    """Accepted, corrected and bonus; one of two ends, of which the other is absent."""
    never = next(i for i in range(128) if i not in plain.tokens)
    slots = 0
    for taken in ENDS:
        end = plain.tokens[taken - 1]
        if end in plain.tokens[: taken - 1]:
            continue
        caches = plain.target.make_cache()
        steps = plain.decoder.stream(
            PROMPT, stop_tokens={never, end}, caches=caches, processors=WAYS[way]
        )
        assert [step.token for step in steps] == plain.tokens[:taken]
        plain.check(caches, len(PROMPT) + taken)
        slots += 1
    assert slots >= 5


@pytest.mark.parametrize("drafter", ["ngram", "head"])
def test_a_second_turn_on_the_same_cache_equals_mlx_lm(qwen_head, drafter):
    target, model = qwen_head.target, qwen_head.target.model
    drafter = NGramDrafter() if drafter == "ngram" else qwen_head.drafter
    decoder = SpeculativeDecoder(target, drafter, 3)
    more = random_prompt(7, 128, 8)
    for first in (1, 5, 6):
        ours, theirs = target.make_cache(), target.make_cache()
        for prompt, count in ((PROMPT, first), (more, 24), (more[:1], 9)):
            steps = decoder.stream(prompt, max_tokens=count, caches=ours)
            tokens = [step.token for step in steps]
            assert tokens == plain_tokens(model, prompt, count, theirs)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_an_error_in_a_processor_leaves_the_emitted_tokens(plain, looks_ahead):
    class Breaks(LooksAhead if looks_ahead else object):
        def __init__(self, calls):
            self.calls = calls

        def __call__(self, tokens, logits):
            self.calls -= 1
            if self.calls < 0:
                raise ZeroDivisionError("broken")
            return logits

    for calls in (0, 1, 3, 4, 9):
        caches, tokens = plain.target.make_cache(), []
        steps = plain.decoder.stream(PROMPT, caches=caches, processors=[Breaks(calls)])
        with pytest.raises(ZeroDivisionError, match="broken"):
            for step in steps:
                tokens.append(step.token)
        assert tokens == plain.tokens[: len(tokens)]
        assert bool(tokens) == bool(calls)
        plain.check(caches, len(PROMPT) + len(tokens))


class Controller:
    """Forces two tokens now and then and has a bias, but all of it comes anyway."""

    biases = True

    def __init__(self, tokens):
        self.tokens, self.count = tokens, 0

    def accept(self, token):
        self.count += 1

    def forced(self):
        return self.tokens[self.count : self.count + 2] if self.count % 5 == 0 else []

    def horizon(self):
        return -self.count % 5

    def bias(self):
        return {1: 0.0}

    def checkpoint(self):
        return self.count

    def restore(self, mark):
        self.count = mark


class Masking(Controller):
    biases, masks = False, True

    def mask(self):
        return np.full(4, 0xFFFFFFFF, np.uint32)


METHODS = ["accept", "forced", "horizon", "bias", "checkpoint", "restore", "mask"]


@pytest.mark.parametrize("name", ["sampler", "progress", *METHODS])
def test_an_error_in_what_a_caller_passes_leaves_the_emitted_tokens(plain, name):
    """A callback, a sampler and every method of a controller, in any of their calls."""

    def breaks(call, method):
        calls = iter(range(10**6))

        def broken(*args):
            if next(calls) == call:
                raise ZeroDivisionError("broken")
            return method(*args)

        return broken

    lengths = set()
    for call in (0, 1, 2, 5, 8):
        controller = (Masking if name == "mask" else Controller)(plain.tokens)
        own = {
            "sampler": lambda row: mx.argmax(row, axis=-1),
            "progress": lambda done, total: None,
        }
        if name in own:
            options = {name: breaks(call, own[name]), "prefill_step_size": 1}
        else:
            setattr(controller, name, breaks(call, getattr(controller, name)))
            options = {"controller": controller}
        caches, tokens = plain.target.make_cache(), []
        steps = plain.decoder.stream(PROMPT, max_tokens=40, caches=caches, **options)
        with pytest.raises(ZeroDivisionError, match="broken"):
            for step in steps:
                tokens.append(step.token)
        assert tokens == plain.tokens[: len(tokens)]
        if name not in ("mask", "restore"):  # it is ahead
            assert len(tokens) == controller.count or name in own
        held = len(PROMPT) + len(tokens)
        if name == "progress":  # in the middle of the prompt
            assert not tokens
            held = max(getattr(entry, "offset", 0) for entry in caches)
            assert held == min(call, len(PROMPT) - 1)
        if held in plain.states:
            plain.check(caches, held)
        lengths.add(held)
        again = plain.decoder.stream(PROMPT, max_tokens=9)
        assert [step.token for step in again] == plain.tokens[:9]
    assert len(lengths) > 1


class ForcesNone(Forces):
    """Forces a text behind its fifth token whose last token no model has; fails there
    without one. Its masks allow nothing else."""

    def __init__(self, text, masks):
        super().__init__()
        self.text, self.masks = text, masks

    def forced(self):
        if self.count < 5:
            return []
        return self.text[self.count - 5 :] if self.text else 1 / 0

    def mask(self):
        allowed = np.full(4, 0xFFFFFFFF if self.count < 5 else 0, np.uint32)
        if self.count == 5 and len(self.text) > 1:
            allowed[0] = 1 << self.text[0]
        return allowed


def alone(decoder, **more):
    return lambda **options: decoder.stream(PROMPT, **options, **more)


def with_mlx_lm(plain):
    known = {"processors": [], "stop_tokens": (), "progress": lambda *_: None}
    known |= {"seed": None, "max_tokens": 40}
    loop = PlainLoop(plain.model, None)
    return lambda **options: loop.stream(PROMPT, **{**known, **options})


def in_a_batch(plain):
    def steps_of(**options):
        batch = BatchIterator(plain.decoder)
        batch.add(PROMPT, max_tokens=40)
        row = batch.add(PROMPT, **options)
        steps, ends = read(batch)
        yield from steps[row]
        raise ends[row].error

    return steps_of


LOOPS = {
    "1": lambda plain: alone(plain.decoder.with_depth(1)),
    "4": lambda plain: alone(plain.decoder),
    "adaptive": lambda plain: alone(plain.decoder.with_depth("adaptive")),
    "plain": lambda plain: alone(plain.decoder, _make=plain_stream),
    "batch": in_a_batch,
    "mlx_lm": with_mlx_lm,
}
DRAWS = {
    "greedy": {},
    "sampled": {"params": SamplingParams(1.0), "seed": 3},
    "coupled": {"params": SamplingParams(1.0), "seed": 3, "coupled": True},
}


def unchanged(tokens, logits):
    return logits


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draws", DRAWS)
def test_no_token_in_front_of_an_impossible_one_is_lost(plain, draws, loop):
    """The fifth is the last of a block at depth 1, and the first of one at depth 4."""
    if loop == "mlx_lm" and draws != "greedy":
        return  # its sampler draws
    stream = LOOPS[loop](plain)
    for text in ([999], [3, 999], [3, -1], ["a"], []):
        for masks, hosts in product((False, True), ({}, {"processors": [unchanged]})):
            caches, tokens, good = plain.target.make_cache(), [], text[:-1]
            options = {**DRAWS[draws], **hosts, "controller": ForcesNone(text, masks)}
            with pytest.raises((ValueError, TypeError, ZeroDivisionError)):
                for step in stream(caches=caches, **options):
                    tokens.append(step.token)
            assert len(tokens) == 5 + len(good) and tokens[5:] == good
            if draws == "greedy":
                assert tokens[:5] == plain.tokens[:5]
                if not good:
                    plain.check(caches, len(PROMPT) + 5)


@pytest.mark.parametrize("way", WAYS)
def test_unusable_logits_raise_and_leave_the_emitted_tokens(plain, way):
    """NaN behind a token that is accepted in any slot of a block."""

    class Poisoned(type(plain.target)):
        def forward(self, tokens, views):
            return self.poison(tokens, super().forward(tokens, views))

        def prefill(self, tokens, caches):
            return self.poison(tokens, super().prefill(tokens, caches))

        step = prefill

        def poison(self, tokens, out):
            bad = (tokens == self.bad)[..., None]
            return out._replace(logits=mx.where(bad, mx.nan, out.logits))

    for place in ENDS[:8]:
        target = Poisoned(plain.model)
        target.bad = plain.tokens[place]
        if target.bad in plain.tokens[:place]:
            continue
        decoder = SpeculativeDecoder(target, plain.drafter, DEPTH)
        caches, tokens = target.make_cache(), []
        steps = decoder.stream(PROMPT, caches=caches, processors=WAYS[way])
        with pytest.raises(UnusableLogits) as error:
            for step in steps:
                tokens.append(step.token)
        assert f"position {len(PROMPT) + len(tokens)}." in str(error.value)
        assert tokens == plain.tokens[: len(tokens)]
        plain.check(caches, len(PROMPT) + len(tokens))
        with pytest.raises(StopIteration):
            next(steps)
