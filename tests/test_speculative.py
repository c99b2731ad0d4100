"""The driver: what it emits, counts, refuses and leaves behind."""

import gc
import math
import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from batches import Forces, LooksAhead
from families import tiny_family
from gemma import assistant_config
from mlx.utils import tree_map
from mlx_lm import stream_generate
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from tiny import (
    ScriptedDrafter,
    StatelessDrafter,
    TableTarget,
    plain_tokens,
    random_head,
    random_prompt,
    tiny_qwen,
)

import mlx_mtp.context
from mlx_mtp.drafters import (
    AssistantConfig,
    DrafterMismatch,
    Drafts,
    Gemma4Assistant,
    Gemma4AssistantDrafter,
    MTPHeadDrafter,
    NGramDrafter,
)
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder, UnusableLogits, speculative_step
from mlx_mtp.state import UnsupportedCache
from mlx_mtp.targets import GenericTarget, as_target

PROMPT = random_prompt(9, 128, 11)


@pytest.fixture(scope="module")
def truth(qwen):
    return plain_tokens(qwen, PROMPT, 420)


@pytest.fixture(scope="module")
def scripted(qwen, truth):
    """A decoder of depth 4 whose drafts are right in a ragged way."""
    drafter = ScriptedDrafter(truth, 128, [4, 1, 0, 3, 2])
    return SpeculativeDecoder(as_target(qwen), drafter, 4)


@pytest.fixture(scope="module")
def perfect(qwen, truth):
    """A decoder of depth 4 whose drafts are always right."""
    return SpeculativeDecoder(as_target(qwen), ScriptedDrafter(truth, 128), 4)


def tokens_of(steps):
    return [step.token for step in steps]


# Greedy tokens are mlx_lm's.

TASKS = [
    "What is 3757 + 4868?",
    "Multiply 3821 by 7.",
    "Subtract 288 from 9041.",
    "Sort in ascending order: 12, 5, 99, 41, 77",
    "How many times does the letter e appear in the word between?",
    "Write garden backwards.",
    "What date is 9 days after March 14?",
    "Tom has 12 pens, buys 7 more and then loses 5. How many pens does Tom have?",
]
TALK = [
    "Define the word water.",
    "Hello!",
    "Continue: 3, 7, 11",
    "Who was Ada Lovelace?",
]


@pytest.fixture(scope="module")
def chats(demo):
    """Twelve prompts, eight of which the model thinks about, and 48 plain tokens."""
    model, tokenizer = demo
    chats = []
    for question in TASKS + TALK:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            enable_thinking=question in TASKS,
        )
        plain = stream_generate(model, tokenizer, prompt, max_tokens=48)
        chats.append((prompt, [response.token for response in plain]))
    return chats


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6])
def test_greedy_tokens_with_the_head_are_mlx_lms(demo_parts, chats, depth):
    """And tasks are accepted as on the card: 0.99 and more in positions 1 to 4."""
    decoder = SpeculativeDecoder(demo_parts.target, demo_parts.drafter, depth)
    ends = demo_parts.tokenizer.eos_token_ids
    reached, accepted = np.zeros(depth), np.zeros(depth)
    for i, (prompt, plain) in enumerate(chats):
        steps = decoder.stream(prompt, max_tokens=48, stop_tokens=ends)
        assert tokens_of(steps) == plain
        if i < len(TASKS):
            reached += steps.telemetry.reached_at
            accepted += steps.telemetry.accepted_at
    assert (accepted / reached)[:4].min() > 0.9


@pytest.mark.parametrize("depth", [1, 4])
def test_greedy_tokens_with_copied_drafts_are_mlx_lms(demo_parts, chats, llama, depth):
    decoder = SpeculativeDecoder(demo_parts.target, NGramDrafter(), depth)
    ends = demo_parts.tokenizer.eos_token_ids
    for prompt, plain in chats[::4]:
        steps = decoder.stream(prompt, max_tokens=48, stop_tokens=ends)
        assert tokens_of(steps) == plain
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(max_ngram=2), depth)
    for seed in range(4):
        prompt = random_prompt(3 + 9 * seed, 128, seed)
        steps = decoder.stream(prompt, max_tokens=100)
        assert tokens_of(steps) == plain_tokens(llama, prompt, 100)
        assert steps.telemetry.accepted > 0


def acceptance(parts, chats, drafter, **options):
    """Of the first draft of a round at depth 4."""
    decoder = SpeculativeDecoder(parts.target, drafter, 4)
    rounds = accepted = 0
    for prompt, _ in chats:
        steps = decoder.stream(prompt, max_tokens=48, **options)
        tokens_of(steps)
        rounds += steps.telemetry.reached_at[0]
        accepted += steps.telemetry.accepted_at[0]
    return accepted / rounds


def test_sampled_acceptance_on_the_demo_is_that_of_its_card(demo_parts, chats):
    """0.966 of the first drafts, here of some 80 rounds."""
    params = SamplingParams(1.0)
    tasks = chats[: len(TASKS)]
    assert (
        acceptance(demo_parts, tasks, demo_parts.drafter, params=params, seed=7) > 0.9
    )


class WrongRow(MTPHeadDrafter):
    """Reads the hidden rows of the token before."""

    def propose(self, state, context):
        hidden = mx.roll(context.hidden, 1, axis=1)
        return super().propose(state, replace(context, hidden=hidden))


def test_a_wrong_hidden_row_shows_as_lost_acceptance(demo_parts, chats):
    drafter = WrongRow(demo_parts.drafter.head, demo_parts.target)
    assert acceptance(demo_parts, chats[:3], drafter) < 0.75


@pytest.mark.parametrize("size", [1, 3, 8, 9, 2048])
def test_prompt_chunks_change_nothing_and_are_reported(qwen_head, truth, size):
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, 2)
    seen = []
    steps = decoder.stream(
        PROMPT,
        max_tokens=12,
        prefill_step_size=size,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert tokens_of(steps) == truth[:12]
    assert [total for _, total in seen] == [len(PROMPT)] * len(seen)
    assert [done for done, _ in seen] == [*range(0, 8, size), 8, 9]


def test_growth_and_bucket_borders_change_no_token(scripted, qwen, truth, monkeypatch):
    """Attended 256, 384 and 512, with slots for all at the start and without."""
    assert tokens_of(scripted.stream(PROMPT, max_tokens=420)) == truth
    monkeypatch.setattr(mlx_mtp.context, "MAX_RESERVED", 8)
    for drafter in (scripted.drafter, NGramDrafter(), random_head(scripted.target)):
        decoder = SpeculativeDecoder(scripted.target, drafter, 4)
        cache = scripted.target.make_cache()
        steps = decoder.stream(PROMPT, max_tokens=420, caches=cache)
        assert tokens_of(steps) == truth
        assert {entry.keys.shape[2] for entry in cache if hasattr(entry, "keys")} == {
            512
        }
        # 256 slots, 384 and 512 of 768
        (round_,) = decoder._rounds.values()
        assert round_.traces == 3


# One round


SYNCS = ["item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__"]


@pytest.fixture
def syncs(monkeypatch):
    """A list that grows with every way in which Python waits for an array."""
    calls = []

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in SYNCS:
        if hasattr(mx.array, name):
            count(mx.array, name)
    for name in ("eval", "synchronize"):
        count(mx, name)
    assert bool(mx.array(1)) and calls == ["__bool__"]
    return calls


def test_the_host_waits_once_a_round(scripted, truth, syncs):
    steps = scripted.stream(PROMPT, max_tokens=-1)
    for _ in range(20):
        next(steps)
    rounds, target_calls = steps.telemetry.rounds, steps.telemetry.target_calls
    syncs.clear()
    for _ in range(200):
        next(steps)
    assert syncs == ["tolist"] * (steps.telemetry.rounds - rounds)
    assert len(syncs) > 60
    assert steps.telemetry.target_calls - target_calls == len(syncs)


@pytest.mark.parametrize("params", [None, SamplingParams(1.0, top_p=0.9)])
def test_the_host_waits_once_a_round_with_an_assistant(params, syncs):
    target = as_target(tiny_family("gemma4_text"))
    assistant = Gemma4Assistant(AssistantConfig.from_dict(assistant_config()))
    mx.eval(assistant.parameters())
    decoder = SpeculativeDecoder(target, Gemma4AssistantDrafter(assistant, target), 3)
    prompt = random_prompt(9, 96, 11)
    steps = decoder.stream(prompt, max_tokens=-1, params=params, seed=1)
    for _ in range(10):
        next(steps)
    rounds = steps.telemetry.rounds
    syncs.clear()
    for _ in range(40):  # across the window
        next(steps)
    assert syncs == ["tolist"] * (steps.telemetry.rounds - rounds) != []


class Anything:
    """A controller whose masks allow every token."""

    masks = True

    def accept(self, token):
        pass

    def forced(self):
        return ()

    def mask(self):
        return np.full(4, 2**32 - 1, np.uint32)

    def checkpoint(self):
        return None

    def restore(self, mark):
        pass


def test_stop_tokens_that_no_model_has_stop_nothing(llama):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 3)
    steps = decoder.stream(PROMPT, max_tokens=9, stop_tokens={-1, 128, None})
    assert tokens_of(steps) == plain_tokens(llama, PROMPT, 9)


@pytest.mark.parametrize("token", [-5, 128, 500])
@pytest.mark.parametrize("host", [False, True])
def test_a_draft_that_is_no_token_is_rejected_under_masks(llama, host, token):
    class Reads(Anything):
        def accept(self, token):
            assert 0 <= token < 128

        def horizon(self):
            return 1 << 62

        def bias(self):
            return None

    steps = speculative_step(
        PROMPT,
        as_target(llama),
        Proposes([token] * 3),
        controller=Reads(),
        processors=[LooksAhead()] if host else [],
        max_tokens=10,
    )
    assert tokens_of(steps) == plain_tokens(llama, PROMPT, 10)


@pytest.mark.cpu
@pytest.mark.parametrize("controller", [None, Anything()])
def test_a_stream_copies_no_cache(llama, controller):
    """Of 65,536 slots: one copied buffer would be 16 MiB. CUDA copies: docs/cuda.md."""
    truth = plain_tokens(llama, PROMPT, 90)
    decoder = SpeculativeDecoder(as_target(llama), ScriptedDrafter(truth, 128, [2]), 3)
    cache = decoder.target.make_cache()
    for entry in cache:
        entry.keys = mx.zeros((1, 2, 65536, 32))
        entry.values = mx.zeros((1, 2, 65536, 32))
    mx.eval([entry.keys for entry in cache], [entry.values for entry in cache])
    before = mx.get_active_memory()
    steps = decoder.stream(PROMPT, max_tokens=90, caches=cache, controller=controller)
    tokens = [next(steps).token for _ in range(30)]
    mx.reset_peak_memory()
    tokens += tokens_of(steps)
    assert mx.get_peak_memory() - before < 2**21
    assert tokens == truth
    assert cache[0].keys.shape[2] == 65536


def disturbed(x):
    return x + 0.02 * mx.random.normal(x.shape)


def test_new_weights_are_seen_by_a_decoder_in_use():
    """A compiled round has its weights as constants."""
    model = tiny_qwen(seed=8)
    target = as_target(model)
    drafter = random_head(target)
    decoder = SpeculativeDecoder(target, drafter, 2)
    seen = set()
    for i in range(3):
        if i:
            model.update(tree_map(disturbed, model.parameters()))
        tokens = tokens_of(decoder.stream(PROMPT, max_tokens=20))
        assert tokens == plain_tokens(model, PROMPT, 20)
        seen.add(tuple(tokens))
    assert len(seen) == 3
    (before,) = decoder._rounds.values()
    drafter.head.update(tree_map(lambda x: 2 * x, drafter.head.parameters()))
    tokens_of(decoder.stream(PROMPT, max_tokens=3))
    assert list(decoder._rounds.values()) != [before]


def test_streams_of_one_decoder_share_their_traces(qwen_head):
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, 2)
    for seed in range(3):
        tokens_of(decoder.stream(random_prompt(3 + seed, 128, seed), max_tokens=20))
    (round_,) = decoder._rounds.values()
    assert round_.traces == 1


# Limits and counts


@pytest.mark.parametrize("own_caches", [False, True])
@pytest.mark.parametrize("processors", [[], [lambda tokens, logits: logits]])
def test_exactly_max_tokens_are_emitted_and_counted(
    perfect, truth, processors, own_caches
):
    for limit in range(1, 13):
        steps = perfect.stream(
            PROMPT,
            max_tokens=limit,
            processors=processors,
            caches=None if own_caches else perfect.target.make_cache(),
        )
        emitted = list(steps)
        assert [step.token for step in emitted] == truth[:limit]
        counts = steps.telemetry
        rounds = -(-(limit - 1) // 5)
        assert counts.emitted == limit
        assert counts.rounds == rounds
        assert counts.drafted == counts.accepted == 4 * rounds
        assert counts.rejected == 0
        assert counts.reached_at == counts.accepted_at == [rounds] * min(4, 4 * rounds)
        assert counts.drafted >= sum(step.from_draft for step in emitted)
        assert counts.round_tokens == limit - 1
        assert counts.draft_calls == 4 * rounds
        # One forward feeds the last token to a caller's cache if no round has.
        closing = limit % 5 == 1 and not own_caches
        assert counts.target_calls == rounds + closing


def test_tokens_behind_a_stop_are_not_counted(perfect, truth):
    """A block of four right drafts whose second is the end adds two."""
    steps = perfect.stream(PROMPT, stop_tokens={truth[2]})
    assert tokens_of(steps) == truth[:3]
    assert steps.telemetry.emitted == 3
    assert steps.telemetry.rounds == 1
    assert steps.telemetry.tokens_per_round == 2


def test_counts_by_position_follow_the_acceptance(scripted, truth):
    """Accepted 4, 1, 0, 3, 2 of 4 and again."""
    steps = scripted.stream(PROMPT, max_tokens=31)
    marks = [step.from_draft for step in steps]
    counts = steps.telemetry
    assert counts.rounds == 10
    assert (counts.drafted, counts.accepted, counts.rejected) == (40, 20, 20)
    assert counts.reached_at == [10, 8, 6, 4]
    assert counts.accepted_at == [8, 6, 4, 2]
    assert counts.acceptance_by_position == [0.8, 6 / 8, 4 / 6, 0.5]
    assert counts.acceptance_rate == 0.5
    assert counts.tokens_per_round == 3
    assert sum(marks) == counts.accepted
    assert marks[:8] == [False, True, True, True, True, False, True, False]
    assert set(counts.seconds) == {"prefill", "build", "submit", "wait", "close"}
    assert counts.fallback is None


def test_a_round_that_was_submitted_and_not_read_is_counted(scripted):
    steps = scripted.stream(PROMPT)
    for _ in range(3):
        next(steps)
    steps.close()
    assert steps.telemetry.rounds == 1
    assert steps.telemetry.target_calls == 2


# Seeds and log-probabilities


def test_a_seed_fixes_a_stream(qwen_head):
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, 3)
    params = SamplingParams(1.0)

    def run(seed):
        steps = decoder.stream(PROMPT, max_tokens=24, params=params, seed=seed)
        return tokens_of(steps)

    assert run(5) == run(5)
    assert len({tuple(run(seed)) for seed in range(4)}) == 4
    assert run(None) != run(None)
    mx.random.seed(1)
    first = run(None)
    mx.random.seed(1)
    assert run(None) == first


@pytest.mark.parametrize("processors", [[], [lambda tokens, logits: logits]])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_those_of_the_targets_row(scripted, qwen, processors, temperature):
    """Of accepted, corrected and bonus tokens; before temperature."""
    steps = scripted.stream(
        PROMPT,
        max_tokens=30,
        params=SamplingParams(temperature),
        processors=processors,
        seed=3,
    )
    emitted = list(steps)
    logits = qwen(mx.array([PROMPT + [step.token for step in emitted]]))[0]
    plain = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for i, step in enumerate(emitted):
        expected = plain[len(PROMPT) - 1 + i]
        assert step.logprobs.shape == expected.shape
        assert mx.allclose(step.logprobs, expected, atol=1e-4)


# Processors


class Recorder:
    """Keeps every history that it was called with."""

    def __init__(self):
        self.seen = []

    def __call__(self, tokens, logits):
        self.seen.append(tokens.tolist())
        return logits


def test_a_processor_sees_every_emitted_token_once_and_nothing_rejected(
    scripted, truth
):
    recorder = Recorder()
    steps = scripted.stream(PROMPT, max_tokens=40, processors=[recorder])
    assert tokens_of(steps) == truth[:40]
    full = PROMPT + truth
    rounds = [seen for seen in recorder.seen if len(seen) < len(PROMPT) + 40]
    assert rounds == [full[: len(PROMPT) + i] for i in range(40)]
    assert steps.telemetry.fallback.startswith("split round")


class Alternates:
    """Forbids even ids after an even number of calls: wrong if a call is lost."""

    calls = 0

    def __call__(self, tokens, logits):
        ids = mx.arange(logits.shape[1])
        self.calls += 1
        return mx.where(ids % 2 == self.calls % 2, -mx.inf, logits)


class AlternatesAhead(Alternates):
    def checkpoint(self):
        return self.calls

    def restore(self, mark):
        self.calls = mark


def plain_processed(model, prompt, count, processors):
    return plain_tokens(model, prompt, count, logits_processors=processors)


@pytest.mark.parametrize("kind", [Alternates, AlternatesAhead])
@pytest.mark.parametrize("plan", [[99], [0], [4, 1, 0, 3, 2]])
def test_a_processor_with_state_gives_mlx_lms_tokens(qwen, kind, plan):
    plain = plain_processed(qwen, PROMPT, 40, [Alternates()])
    decoder = SpeculativeDecoder(
        as_target(qwen), ScriptedDrafter(plain, 128, plan), depth=4
    )
    processor = kind()
    steps = decoder.stream(PROMPT, max_tokens=40, processors=[processor])
    assert tokens_of(steps) == plain
    assert steps.telemetry.rounds == {99: 8, 0: 39, 4: 14}[plan[0]]


@pytest.mark.parametrize("plan", [[99], [4, 1, 0, 3, 2]])
def test_penalties_of_mlx_lm_hold_inside_a_block(qwen, plan):
    def processors():
        return make_logits_processors(
            logit_bias={3: 0.5},
            repetition_penalty=1.3,
            repetition_context_size=12,
            presence_penalty=0.1,
            frequency_penalty=0.05,
        )

    plain = plain_processed(qwen, PROMPT, 48, processors())
    assert plain != plain_tokens(qwen, PROMPT, 48)
    decoder = SpeculativeDecoder(
        as_target(qwen), ScriptedDrafter(plain, 128, plan), depth=4
    )
    steps = decoder.stream(PROMPT, max_tokens=48, processors=processors())
    assert tokens_of(steps) == plain
    assert steps.telemetry.accepted > 15


class Proposes(StatelessDrafter):
    """The same block every round."""

    def __init__(self, block):
        self.block = mx.array([block])

    def propose(self, state, context):
        return Drafts(self.block[:, : context.depth]), state


def constant_target(*row):
    return TableTarget(mx.broadcast_to(mx.array(row), (len(row),) * 3))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_second_of_two_equal_drafts_is_penalised_by_the_first(depth):
    """A = 1.0, B = 0.9, C = 0.2, penalty 2: A, B, then the halved A again."""
    target = constant_target(1.0, 0.9, 0.2)
    decoder = SpeculativeDecoder(target, Proposes([0, 0, 0, 0]), depth)
    processors = make_logits_processors(
        repetition_penalty=2.0, repetition_context_size=20
    )
    steps = decoder.stream([2], max_tokens=4, processors=processors)
    assert tokens_of(steps) == [0, 1, 0, 0]


def test_case_10_a_frequency_penalty_counts_every_token_of_a_block():
    """Sevens and a nine of one block: each is 0.5 off the rows behind it."""
    start = [0.0] * 7 + [2.0, 0.0, 1.4]
    target = constant_target(*start)
    decoder = SpeculativeDecoder(target, Proposes([7, 9, 7]), 3)
    processors = make_logits_processors(frequency_penalty=0.5)
    steps = list(decoder.stream([0], max_tokens=5, processors=processors))
    assert [step.token for step in steps] == [7, 7, 9, 7, 9]
    assert [step.from_draft for step in steps] == [False, True, True, True, False]
    for step, sevens in ((steps[3], 1.0), (steps[4], 1.5)):
        change = step.row - mx.array(start)
        assert change[7].item() == -sevens and change[1].item() == 0
        assert abs(change[9].item() + 0.5) < 1e-6


@pytest.mark.parametrize("slot", range(4))
def test_case_17_a_bias_holds_in_every_slot(slot):
    """The likeliest token is banned, and drafted in one of the slots."""
    block = [0, 0, 0]
    if slot < 3:
        block[slot] = 1
    decoder = SpeculativeDecoder(constant_target(1.0, 5.0, 0.0), Proposes(block), 3)
    steps = decoder.stream(
        [0],
        max_tokens=400,
        params=SamplingParams(1.0),
        processors=make_logits_processors(logit_bias={1: -100.0}),
        seed=slot,
    )
    tokens = tokens_of(steps)
    # e to 1 between the two that are left, in accepted, corrected and bonus slots.
    assert set(tokens) == {0, 2}
    assert abs(tokens.count(0) / 400 - math.e / (1 + math.e)) < 4 * 0.45 / 400**0.5


@pytest.mark.parametrize("end", range(8))
def test_a_minimum_length_counts_tokens_not_rounds(end):
    """The end token is drafted in every slot and must not come before its time."""

    def minimum(tokens, logits):
        early = tokens.size - 1 < end
        return mx.where((mx.arange(3) == 2) & early, -mx.inf, logits)

    decoder = SpeculativeDecoder(constant_target(0.0, 1.0, 2.0), Proposes([1, 2, 2]), 3)
    steps = decoder.stream([0], processors=[minimum], stop_tokens={2})
    assert tokens_of(steps) == [1] * end + [2]


def test_any_sampler_draws_what_it_would_without_drafts(scripted, qwen, truth):
    """Its own greedy and a sharp one; drafts are accepted where they match."""
    for sampler in (make_sampler(0.0), make_sampler(1e-4)):
        steps = scripted.stream(PROMPT, max_tokens=30, sampler=sampler)
        assert tokens_of(steps) == truth[:30]
        assert steps.telemetry.accepted == 20
    mx.random.seed(2)
    steps = scripted.stream(PROMPT, max_tokens=30, sampler=make_sampler(3.0))
    assert tokens_of(steps) != truth[:30]


def test_a_sampler_sees_normalised_logprobs_after_processors(scripted):
    def sampler(logprobs):
        assert logprobs.shape == (1, 128)
        assert abs(mx.logsumexp(logprobs).item()) < 1e-4
        assert logprobs[0, 5].item() == -mx.inf
        return mx.argmax(logprobs, axis=-1)

    def forbid(tokens, logits):
        return mx.where(mx.arange(128) == 5, -mx.inf, logits)

    steps = scripted.stream(PROMPT, max_tokens=12, sampler=sampler, processors=[forbid])
    assert len(tokens_of(steps)) == 12


def test_a_sampler_is_not_asked_about_unusable_logits():
    target = constant_target(0.0, 2.0, 1.0)
    target.table = mx.where(mx.arange(3)[:, None] == 1, mx.nan, target.table)
    decoder = SpeculativeDecoder(target, Proposes([1, 2]), 2)
    for processors in ([], [lambda tokens, logits: logits]):
        steps = decoder.stream(
            [1, 0], sampler=make_sampler(0.0), processors=processors, max_tokens=9
        )
        assert next(steps).token == 1
        with pytest.raises(UnusableLogits):
            tokens_of(steps)


# What is refused, before anything is written


@pytest.fixture(scope="module")
def small(llama):
    return SpeculativeDecoder(as_target(llama), NGramDrafter(), 2)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, r"at least one token id, .* but has shape \(0,\)"),
        ([[1, 2]], ValueError, r"but has shape \(1, 2\)"),
        (3, ValueError, r"but has shape \(\)"),
        ([1.0, 2.0], TypeError, "integer token ids but has mlx.core.float32"),
        ([True], TypeError, "bool"),
        ([1, 128], ValueError, "token id 128, outside of the vocabulary of 128"),
        ([-1, 5], ValueError, "token id -1"),
    ],
)
def test_a_bad_prompt_is_refused(small, prompt, error, message):
    with pytest.raises(error, match=message):
        small.stream(prompt)


@pytest.mark.parametrize("dtype", [mx.int64, mx.uint32, mx.uint8])
def test_prompts_of_any_integer_type_are_the_same(small, llama, dtype):
    prompt = mx.array([5, 6, 7]).astype(dtype)
    steps = small.stream(prompt, max_tokens=5)
    assert tokens_of(steps) == plain_tokens(llama, [5, 6, 7], 5)


@pytest.mark.parametrize("limit", [0, -2])
def test_a_bad_limit_is_refused(small, limit):
    with pytest.raises(ValueError, match=f"max_tokens .* {limit}"):
        small.stream([1], max_tokens=limit)
    with pytest.raises(ValueError, match=f"prefill_step_size .* {limit}"):
        small.stream([1], prefill_step_size=limit)


@pytest.mark.parametrize("depth", [0, -1, 33, 99])
def test_a_bad_depth_is_refused(llama, depth):
    with pytest.raises(ValueError, match=rf"in \[1, 32\] for the ngram .* {depth}"):
        SpeculativeDecoder(as_target(llama), NGramDrafter(), depth)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"filter_order": "first"}, "filter_order"),
    ],
)
def test_bad_sampling_parameters_are_refused(values, name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab": 96}, "vocabulary 96 but the target has 128"),
        ({"hidden": 32}, "hidden size 32 but the target has 64"),
    ],
)
def test_a_head_of_another_model_is_refused(qwen_head, config, message):
    drafter = random_head(qwen_head.target, **config)
    with pytest.raises(DrafterMismatch, match=message):
        SpeculativeDecoder(qwen_head.target, drafter)


def test_a_head_is_refused_by_a_target_without_hidden_rows(llama, qwen_head):
    target = GenericTarget(llama)
    drafter = MTPHeadDrafter(qwen_head.drafter.head, target)
    with pytest.raises(DrafterMismatch, match="hidden"):
        SpeculativeDecoder(target, drafter)


def filled(cache, layers=1):
    rows = mx.random.normal((1, 2, 6, 64), key=mx.random.key(1))
    for entry in cache:
        entry.update_and_fetch(rows, rows)
    return cache


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: filled([KVCache(), BatchKVCache([0, 2])]), "entry 1 holds padded"),
        (lambda: [ArraysCache(2), ArraysCache(2)], "ArraysCache"),
    ],
)
def test_a_cache_that_cannot_be_rolled_back_is_refused_untouched(small, make, message):
    cache = make()
    before = [list(vars(entry).items()) for entry in cache]
    with pytest.raises(UnsupportedCache, match=message):
        small.stream([1, 2], caches=cache)
    for entry, attributes in zip(cache, before, strict=True):
        assert all(vars(entry)[name] is value for name, value in attributes)


def test_too_few_caches_are_an_error_in_every_mode(small):
    with pytest.raises(ValueError, match="has 0 entries but the model has 2") as found:
        small.stream([1, 2], caches=[])
    assert not isinstance(found.value, UnsupportedCache)


def test_padded_recurrent_rows_are_refused(qwen_head):
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter)
    cache = qwen_head.target.make_cache()
    cache[0] = ArraysCache(2, left_padding=[1])
    with pytest.raises(UnsupportedCache, match="entry 0 holds padded batch rows"):
        decoder.stream([1, 2], caches=cache)


# Models that cannot be traced


class HostOffset(GenericTarget):
    """A model that reads its cache's offset as a Python integer."""

    def prefill(self, tokens, caches):
        self.offsets.append(int(caches[0].offset))
        return super().prefill(tokens, caches)

    forward = prefill
    offsets: list = []  # noqa: RUF012


@pytest.mark.parametrize("processors", [[], [lambda tokens, logits: logits]])
def test_a_model_that_cannot_be_traced_runs_eagerly(llama, processors):
    target, tokens = HostOffset(llama), plain_tokens(llama, PROMPT, 300)
    decoder = SpeculativeDecoder(target, ScriptedDrafter(tokens, 128, [2, 0, 3, 1]), 3)
    for _ in range(2):  # a second stream of the decoder as well
        target.offsets = []
        cache = target.make_cache()
        steps = decoder.stream(
            PROMPT, max_tokens=300, caches=cache, processors=processors
        )
        assert tokens_of(steps) == tokens
        assert steps.telemetry.fallback.startswith("eager round: ")
        assert steps.telemetry.acceptance_rate == 0.5
        assert target.offsets[2:5] == [9, 12, 13]
        assert cache[0].offset == len(PROMPT) + 300
    steps = decoder.stream(
        PROMPT, max_tokens=40, processors=processors, params=SamplingParams(1e-5)
    )
    assert tokens_of(steps) == tokens[:40]


def test_an_error_of_the_model_in_a_round_is_told_and_no_token_lost(llama):
    class Fails(GenericTarget):
        def forward(self, tokens, views):
            raise OSError("broken layer")

    cache = Fails(llama).make_cache()
    decoder = SpeculativeDecoder(Fails(llama), NGramDrafter(), 2)
    steps = decoder.stream(PROMPT, caches=cache, max_tokens=20)
    assert tokens_of(steps) == plain_tokens(llama, PROMPT, 20)
    assert "broken layer" in steps.telemetry.fallback
    assert cache[0].offset == len(PROMPT) + 20


def test_an_error_of_a_later_trace_is_a_short_step_down(llama):
    """A model that was traced once is not slowed down for good by an error."""

    class Fails(GenericTarget):
        forwards = 0

        def forward(self, tokens, views):
            self.forwards += 1
            if self.forwards == 2:
                raise MemoryError("no room")
            return super().forward(tokens, views)

    decoder = SpeculativeDecoder(Fails(llama), NGramDrafter(), 2)
    cache = decoder.target.make_cache()
    steps = decoder.stream(PROMPT, caches=cache, max_tokens=400)
    assert tokens_of(steps) == plain_tokens(llama, PROMPT, 400)
    assert "no room" in steps.telemetry.fallback and steps.telemetry.step_downs == 1
    assert cache[0].offset == len(PROMPT) + 400


# Threads


def in_thread(function):
    """``function()`` in a new thread; its result or its exception."""
    out = []

    def work():
        try:
            out.append(function())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, out


def test_a_decoder_works_from_any_thread(scripted, truth):
    def decode():
        return tokens_of(scripted.stream(PROMPT, max_tokens=40))

    assert decode() == truth[:40]
    for _ in range(2):
        thread, out = in_thread(decode)
        thread.join()
        assert out == [truth[:40]]
    pairs = [in_thread(decode) for _ in range(2)]
    for thread, _ in pairs:
        thread.join()
    assert [out for _, out in pairs] == [[truth[:40]]] * 2


def test_a_stream_may_be_closed_from_another_thread(scripted, qwen, truth):
    cache = scripted.target.make_cache()
    steps = scripted.stream(PROMPT, caches=cache)
    assert [next(steps).token for _ in range(7)] == truth[:7]
    thread, out = in_thread(steps.close)
    thread.join()
    assert out == [None]
    more = plain_tokens(qwen, truth[6:7], 1, cache)  # the cache is whole
    assert len(more) == 1
    del steps
    gc.collect()


def after(work, in_other_thread):
    """``work()``, here or in another thread."""
    if not in_other_thread:
        return work()
    thread, out = in_thread(work)
    thread.join()
    return out[0]


def each_step_in_a_thread(steps, count):
    return [after(lambda: next(steps).token, True) for _ in range(count)]


@pytest.mark.parametrize("length", [6, 9, 12])
@pytest.mark.parametrize("head", [False, True], ids=["copied", "head"])
def test_a_prompt_cache_may_come_back_in_another_thread(
    demo_parts, chats, head, length
):
    """With what its drafter knows, also where the block is cut."""
    target, prompt = demo_parts.target, chats[0][0]
    drafter = demo_parts.drafter if head else NGramDrafter()

    def two_turns(in_other_thread):
        decoder = SpeculativeDecoder(target, drafter, 4)
        cache = target.make_cache()
        tokens_of(decoder.stream(prompt, caches=cache, max_tokens=length))
        steps = decoder.stream(prompt[:8], caches=cache, max_tokens=12)
        tokens = after(lambda: tokens_of(steps), in_other_thread)
        return tokens, steps.telemetry.accepted, steps.telemetry.fallback

    assert two_turns(True) == two_turns(False)


def test_a_padded_cache_may_come_back_in_another_thread(llama):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 4)

    def two_turns(in_other_thread):
        cache = [BatchKVCache([0]) for _ in llama.layers]
        tokens_of(decoder.stream(PROMPT, caches=cache, max_tokens=6))
        steps = decoder.stream(PROMPT, caches=cache, max_tokens=12)
        return after(lambda: tokens_of(steps), in_other_thread)

    assert two_turns(True) == two_turns(False)


def test_a_prompt_that_was_fed_is_known_in_another_thread(llama):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 4)
    cache = decoder.target.make_cache()
    decoder.feed(PROMPT[:-1], cache)
    tokens = after(
        lambda: tokens_of(decoder.stream(PROMPT[-1:], caches=cache, max_tokens=12)),
        True,
    )
    assert tokens == plain_tokens(llama, PROMPT, 12)


def test_every_step_may_be_taken_in_another_thread(demo_parts, chats):
    """Of rounds, of plain decoding with a host side, and around forced tokens."""
    prompt, plain = chats[0]
    decoder = SpeculativeDecoder(demo_parts.target, demo_parts.drafter, 4)
    assert each_step_in_a_thread(decoder.stream(prompt), 24) == plain[:24]

    def as_it_is(tokens, logits):
        assert tokens.tolist()[: len(prompt)] == list(prompt)
        return logits

    steps = decoder.stream(prompt, processors=[as_it_is])
    steps.stream.context.plain_left = 12
    assert each_step_in_a_thread(steps, 24) == plain[:24]
    steps = decoder.stream(prompt, controller=Forces())
    assert len(each_step_in_a_thread(steps, 24)) == 24
    assert not steps.telemetry.step_downs


def test_entries_that_were_quantised_are_free_again(llama):
    """Those of the caller's that quantised ones have replaced in a copy of its list."""
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 3)
    mine = decoder.target.make_cache()
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}
    replaced = list(mine)
    tokens_of(decoder.stream(PROMPT, caches=replaced, max_tokens=8, **options))
    assert replaced[0] is not mine[0]
    next(decoder.stream(PROMPT, caches=mine))


def test_speculative_step_is_the_decoders_stream(llama):
    steps = speculative_step(
        PROMPT, as_target(llama), NGramDrafter(), depth=4, max_tokens=12
    )
    assert tokens_of(steps) == plain_tokens(llama, PROMPT, 12)
