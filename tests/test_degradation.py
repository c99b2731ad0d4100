"""What goes wrong beside the model costs drafts, never tokens or the caches."""

import mlx.core as mx
import numpy as np
import pytest
from faults import campaign, make_suts
from plain import DEPTH, PROMPT, Plain
from tiny import ScriptedDrafter, random_head, tiny_qwen

from mlx_mtp import stream
from mlx_mtp.context import MIN_PAUSE
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder, UnusableLogits
from mlx_mtp.targets import Qwen35Target, as_target


class Broken(Exception):
    pass


class FailingDrafter:
    """A drafter of which a method fails now and then.

    Args:
        method: Its name.
        calls: The numbers of the calls that fail, from 0.
    """

    def __init__(self, drafter, method, calls=(0,)):
        self.drafter, self.method, self.calls, self.count = drafter, method, calls, 0

    def __getattr__(self, name):
        value = getattr(self.drafter, name)
        return self.fails(value) if name == self.method else value

    def fails(self, method):
        def call(*args):
            self.count += 1
            if self.count - 1 in self.calls:
                raise Broken("no memory")
            return method(*args)

        return call


@pytest.fixture(scope="module", params=["qwen", "llama"])
def plain(request):
    return Plain(request.getfixturevalue(request.param))


def check(plain, target, drafter, tokens=60, **options):
    """The stream is that of plain decoding and leaves its caches; telemetry."""
    caches = plain.target.make_cache()
    decoder = SpeculativeDecoder(target, drafter, DEPTH)
    steps = decoder.stream(PROMPT, max_tokens=tokens, caches=caches, **options)
    assert [step.token for step in steps] == plain.tokens[:tokens]
    plain.check(caches, len(PROMPT) + tokens)
    return steps.telemetry


def row_by_row(tokens, logits):
    return logits


@pytest.mark.parametrize("processors", [[], [row_by_row]])
@pytest.mark.parametrize("method", ["begin", "propose", "prefill", "grow"])
def test_a_drafter_that_fails_is_tried_again(qwen, method, processors):
    plain = Plain(qwen)
    drafter = FailingDrafter(random_head(plain.target), method)
    telemetry = check(plain, plain.target, drafter, processors=processors)
    if method == "grow":
        assert telemetry.step_downs == 0  # there was room
        return
    assert telemetry.step_downs == 1
    assert telemetry.fallback == (
        "plain decoding for a while: the drafter failed: no memory"
    )
    # Back to rounds, which are all that drafts.
    assert telemetry.rounds >= 60 - MIN_PAUSE - DEPTH and telemetry.drafted
    assert telemetry.emitted - telemetry.round_tokens <= MIN_PAUSE + 3


def test_a_drafter_that_keeps_failing_is_left_alone_longer_and_longer(plain):
    drafter = FailingDrafter(plain.drafter, "propose", range(10**6))
    telemetry = check(plain, plain.target, drafter, 90)
    assert telemetry.rounds == telemetry.draft_calls == 0
    assert telemetry.step_downs == 3  # at 1, 17 and 49 tokens


def test_a_drafter_that_gives_nan_does_not_end_the_stream(plain):
    class Nan(ScriptedDrafter):
        def propose(self, state, context):
            drafts, state = super().propose(state, context)
            logits = mx.full((*drafts.tokens.shape, 128), mx.nan)
            stats = mx.zeros((*drafts.tokens.shape, 3))
            return drafts._replace(logits=logits, stats=stats), state

    drafter = Nan(plain.tokens, 128)
    telemetry = check(plain, plain.target, drafter, params=SamplingParams(1e-6))
    assert "unusable logits" in telemetry.fallback and telemetry.step_downs == 3


class Hides(Qwen35Target):
    """Gives no hidden rows in some of its forwards."""

    def __init__(self, model, hidden_in, method):
        super().__init__(model)
        self.hides, self.method = hidden_in, method

    def prefill(self, tokens, caches):
        return self.shown("prefill", super().prefill(tokens, caches))

    def step(self, tokens, caches):
        return self.shown("prefill", super().step(tokens, caches))

    def forward(self, tokens, views):
        return self.shown("forward", super().forward(tokens, views))

    def shown(self, method, out):
        if method == self.method:
            self.hides -= 1
            if self.hides >= 0:
                return out._replace(hidden=None)
        return out


@pytest.mark.parametrize(
    ("method", "forwards"),
    [("prefill", 1), ("prefill", 2), ("prefill", 20), ("forward", 1), ("forward", 2)],
)
def test_hidden_rows_that_are_missing_for_a_while(qwen, method, forwards):
    plain = Plain(qwen)
    target = Hides(qwen, forwards, method)
    telemetry = check(plain, target, random_head(target), 90)
    assert telemetry.rounds and telemetry.step_downs
    assert "the model gave no hidden rows" in telemetry.fallback


@pytest.mark.parametrize("processors", [[], [row_by_row]])
@pytest.mark.parametrize("call", [0, 1, 2, 7])
def test_a_round_that_cannot_be_submitted(plain, monkeypatch, call, processors):
    calls, async_eval = iter(range(10**6)), mx.async_eval

    def fails(*args):
        if next(calls) == call:
            raise RuntimeError("[metal::malloc] out of memory")
        async_eval(*args)

    monkeypatch.setattr(mx, "async_eval", fails)
    telemetry = check(plain, plain.target, plain.drafter, processors=processors)
    assert telemetry.step_downs == 1 and "out of memory" in telemetry.fallback
    assert telemetry.rounds > 20


@pytest.mark.parametrize("call", [0, 1, 2, 7])
def test_a_round_that_cannot_be_read(plain, monkeypatch, call):
    calls, read = iter(range(10**6)), stream._read_counts

    def fails(counts):
        tokens = read(counts)
        if next(calls) == call:
            raise stream.StepDown("out of memory")
        return tokens

    monkeypatch.setattr(stream, "_read_counts", fails)
    telemetry = check(plain, plain.target, plain.drafter)
    assert telemetry.step_downs == 1 and "out of memory" in telemetry.fallback
    assert telemetry.rounds > 10


def test_a_model_that_fails_is_an_error_and_leaves_the_caches(plain):
    """In any plain step, once; it never takes a block."""

    class Fails(type(plain.target)):
        def prefill(self, tokens, caches):
            out = super().prefill(tokens, caches)
            self.left -= 1
            if self.left == 0:
                raise Broken("the model")
            return out

        step = prefill

        def forward(self, tokens, views):
            raise Broken("the model")

    for left, emitted in enumerate([0, 0, 1, 1, 2, 3, 4], start=1):
        target = Fails(plain.model)
        target.left = left  # two forwards of the prompt, one behind the first token
        decoder = SpeculativeDecoder(target, plain.drafter, DEPTH)
        caches, tokens = target.make_cache(), []
        steps = decoder.stream(PROMPT, caches=caches)
        with pytest.raises(Broken):
            for step in steps:
                tokens.append(step.token)
        assert tokens == plain.tokens[:emitted]
        if tokens:
            plain.check(caches, len(PROMPT) + len(tokens))


def test_unusable_logits_in_plain_steps_leave_the_emitted_tokens(plain):
    emitted = plain.tokens.index(plain.tokens[5]) + 1

    class Poisoned(type(plain.target)):
        def prefill(self, tokens, caches):
            out = super().prefill(tokens, caches)
            bad = (tokens == plain.tokens[5])[..., None]
            return out._replace(logits=mx.where(bad, mx.nan, out.logits))

        step = prefill

    drafter = FailingDrafter(plain.drafter, "propose", range(10**6))
    caches, tokens = plain.target.make_cache(), []
    decoder = SpeculativeDecoder(Poisoned(plain.model), drafter, DEPTH)
    with pytest.raises(UnusableLogits, match=f"position {len(PROMPT) + emitted}\\."):
        for step in decoder.stream(PROMPT, caches=caches):
            tokens.append(step.token)
    assert tokens == plain.tokens[:emitted]
    plain.check(caches, len(PROMPT) + emitted)


def test_plain_steps_have_the_distribution_of_mlx_lms_sampling(qwen):
    """By seed: the tokens of plain steps are drawn as rounds draw the first one."""
    target = as_target(qwen)
    drafter = FailingDrafter(ScriptedDrafter([1], 128), "propose", range(10**6))
    decoder = SpeculativeDecoder(target, drafter, DEPTH)
    params = SamplingParams(1.0)
    streams = [
        [s.token for s in decoder.stream(PROMPT, max_tokens=9, params=params, seed=i)]
        for i in (1, 1, 2)
    ]
    assert streams[0] == streams[1] != streams[2]


def test_injected_faults_anywhere(llama, qwen):
    hits = campaign(make_suts(llama, qwen), 200)
    assert sum(hits.values()) == 200 and len(hits) > 60


@pytest.mark.slow
def test_ten_thousand_injected_faults(llama):
    campaign(make_suts(llama, tiny_qwen()), 10_000, seed=1)


class EvenBehind:
    """Allows only even tokens behind ``start`` tokens, and masks nothing before."""

    def __init__(self, start):
        self.start, self.seen = start, 0

    @property
    def masks(self):
        return self.seen >= self.start

    def accept(self, token):
        self.seen += 1

    def forced(self):
        return ()

    def horizon(self):
        return 10**6 if self.masks else self.start - self.seen

    def mask(self):
        return np.full((4,), 0x55555555, np.uint32)

    def checkpoint(self):
        return self.seen

    def restore(self, mark):
        self.seen = mark


@pytest.mark.parametrize("start", [0, 1, 5, 16, 17, 18, 30])
def test_masks_hold_in_plain_steps_and_between_them_and_rounds(plain, start):
    streams = []
    for calls in ((), range(1), range(10**6)):
        drafter = FailingDrafter(plain.drafter, "propose", calls)
        decoder = SpeculativeDecoder(plain.target, drafter, DEPTH)
        steps = decoder.stream(PROMPT, max_tokens=40, controller=EvenBehind(start))
        streams.append([step.token for step in steps])
        assert bool(steps.telemetry.step_downs) == bool(calls)
    assert streams[0] == streams[1] == streams[2]
    assert streams[0][:start] == plain.tokens[:start]
    assert all(token % 2 == 0 for token in streams[0][start:])
