"""The shipped round, driven directly: batches, traces, memory."""

import time
from io import StringIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import (
    ScriptedDrafter,
    TableDrafter,
    TableTarget,
    emitted,
    plain_tokens,
    random_prompt,
    start_row,
)

from mlx_mtp.round import Round, stack_states
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.targets import as_target

CAPACITY = 256


def run_rounds(round_, state, rounds):
    """The tokens of every row, and accepted counts ``(rounds, B)``."""
    tokens, accepted = [[] for _ in state["count"].tolist()], []
    for _ in range(rounds):
        state, result = round_(state, CAPACITY)
        for row, more in zip(tokens, emitted(result.counts), strict=True):
            row += more
        accepted.append(result.counts[:, 0].tolist())
    return tokens, np.array(accepted)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_rows_with_ragged_acceptance_equal_plain_decoding(name, request):
    model = request.getfixturevalue(name)
    target, states, truths = as_target(model), [], []
    plans = [3, 0, 1, 2, 3, 3], [0, 2, 3, 1], [1, 3, 0]
    for i, (length, plan) in enumerate(zip((5, 17, 1), plans, strict=True)):
        prompt = random_prompt(length, 128, seed=i)
        truths.append(plain_tokens(model, prompt, 40))
        drafter = ScriptedDrafter(truths[-1], 128, plan)
        round_ = Round(target, drafter, 3, greedy=True)
        states.append(start_row(round_, prompt, CAPACITY)[0])
    tokens, accepted = run_rounds(round_, stack_states(states), 8)
    for row, truth, counts, plan in zip(tokens, truths, accepted.T, plans, strict=True):
        assert row == truth[1 : 1 + len(row)]
        assert counts.tolist() == (plan * 8)[:8]


@pytest.mark.cpu
def test_a_sampled_row_depends_on_its_own_key_alone(demo_parts):
    """Alone, in a batch, and in another slot: the same tokens. On a GPU a row of half
    precision rounds otherwise in a batch."""
    round_ = Round(demo_parts.target, demo_parts.drafter, 3, greedy=False)
    params = SamplingParams(temperature=1.2, top_p=0.98)
    states = [
        start_row(round_, random_prompt(6 + 5 * i, 4096, i), CAPACITY, params, seed=i)
        for i in range(3)
    ]
    states = [state for state, _ in states]
    alone = [run_rounds(round_, state, 8)[0][0] for state in states]
    batch, accepted = run_rounds(round_, stack_states(states), 8)
    moved, _ = run_rounds(round_, stack_states(states[::-1]), 8)
    assert batch == alone
    assert moved == alone[::-1]
    assert len(set(accepted.ravel().tolist())) > 2  # ragged
    other = {**states[0], "keys": states[1]["keys"]}
    assert run_rounds(round_, other, 8)[0][0] != alone[0]


def test_rows_of_one_batch_have_their_own_parameters(qwen_head):
    """Temperatures 0, tiny and 1 side by side; only the last row is random."""
    round_ = Round(qwen_head.target, qwen_head.drafter, 2, greedy=False)
    prompt = random_prompt(9, 128, 4)
    states = [
        start_row(round_, prompt, CAPACITY, SamplingParams(t), seed=i)[0]
        for i, t in enumerate((0.0, 1e-6, 1e-40, 1.0))
    ]
    batch, accepted = run_rounds(round_, stack_states(states), 8)
    greedy = plain_tokens(qwen_head.target.model, prompt, 30)
    assert (accepted >= 0).all()
    for row in batch[:3]:
        assert row == greedy[1 : 1 + len(row)]
    assert batch[3] != greedy[1 : 1 + len(batch[3])]


def test_a_flagged_row_gives_no_token_and_leaves_the_others_alone():
    """One row of three meets NaN logits in the middle of the run."""
    table = mx.random.normal((5, 5, 5), key=mx.random.key(0))
    table[3, 4] = mx.nan  # after 3, 4 nothing can be drawn
    drafter = TableDrafter(mx.zeros((5, 5)))
    round_ = Round(TableTarget(table), drafter, 3, greedy=False)
    params = SamplingParams(1.0)
    good = [start_row(round_, [0, i], CAPACITY, params, seed=i)[0] for i in (1, 2)]
    bad = start_row(round_, [0, 3], CAPACITY, params, seed=9)[0]
    bad = {**bad, "tokens": mx.array([[4] * 4])}
    before = stack_states([good[0], bad, good[1]])
    after, result = round_(before, CAPACITY)
    assert result.counts[1, 0].item() == -1
    assert result.counts[1, 2:].tolist() == [-1] * 4
    assert after["offset"][1].item() == before["offset"][1].item()
    assert after["steps"][1].item() == after["count"][1].item() == 0
    for row, state in zip((0, 2), good, strict=True):
        _, alone = round_(state, CAPACITY)
        assert result.counts[row].tolist() == alone.counts[0].tolist()
        assert alone.counts[0, 0].item() >= 0


def test_a_round_is_traced_once_a_shape_and_prefix(qwen_head):
    round_ = Round(qwen_head.target, qwen_head.drafter, 2, greedy=True)
    state, _ = start_row(round_, [1, 2, 3], 512)
    other, _ = start_row(round_, [4], 512)
    for expected, start, attended in (
        (1, state, 256),
        (1, other, 256),
        (2, state, 384),
        (2, state, 256),
        (3, stack_states([state, other]), 256),
        (4, round_.grow(state, 1024), 256),
    ):
        for _ in range(3):
            start, _ = round_(start, attended)
        assert round_.traces == expected


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_rows_of_a_block_equal_one_token_at_a_time(name, request):
    """Any width gives the logits of plain decoding, so greedy never differs."""
    model = request.getfixturevalue(name)
    target, prompt = as_target(model), random_prompt(20, 128, 6)
    truth = plain_tokens(model, prompt, 17)
    cache = target.make_cache()
    model(mx.array([prompt]), cache=cache)
    plain = [model(mx.array([[token]]), cache=cache)[0, 0] for token in truth[:16]]
    for width in (1, 2, 3, 4, 5, 8, 9, 13, 16):
        round_ = Round(target, ScriptedDrafter(truth, 128), width - 1, greedy=True)
        state, _ = start_row(round_, prompt, CAPACITY)
        _, result = round_(state, CAPACITY)
        expected = mx.stack(plain[:width])
        logprobs = expected - mx.logsumexp(expected, axis=-1, keepdims=True)
        emitted_at = mx.array(truth[1 : width + 1])[:, None]
        logprobs = mx.take_along_axis(logprobs, emitted_at, axis=1)[:, 0]
        assert mx.allclose(result.logprobs[0], logprobs, rtol=0, atol=1e-4)
        assert mx.allclose(result.logits[0], expected, rtol=0, atol=1e-5)
        assert result.counts[0, 2:].tolist() == truth[1 : width + 1]


def test_capacity_changes_neither_tokens_nor_memory_nor_time(llama):
    """From 256 to 65,536 slots with the attended prefix fixed: nothing is copied."""
    prompt = random_prompt(30, 128, 8)
    truth = plain_tokens(llama, prompt, 60)
    drafter = ScriptedDrafter(truth, 128, [1, 3, 2])
    round_ = Round(as_target(llama), drafter, 3, greedy=True)
    extra, fastest = {}, {}
    for capacity in (256, 4096, 65536):
        state, _ = start_row(round_, prompt, capacity)
        tokens, times = [], []
        for i in range(16):
            if i == 2:  # traced and warm
                mx.reset_peak_memory()
                before = mx.get_active_memory()
            start = time.perf_counter()
            state, result = round_(state, CAPACITY)
            mx.eval(state, result)
            times.append(time.perf_counter() - start)
            tokens += emitted(result.counts)[0]
        extra[capacity] = mx.get_peak_memory() - before
        fastest[capacity] = min(times[2:])
        assert tokens == truth[1 : 1 + len(tokens)]
    if mx.default_device() != mx.cpu:
        return  # CUDA copies: docs/cuda.md
    # One copied buffer of 65,536 slots is 16 MiB.
    assert extra[65536] - extra[256] < 2**20
    assert fastest[65536] < 3 * fastest[256]


def test_weights_are_transposed_by_the_trace_not_by_every_round(qwen):
    """With the same numbers, and linear layers are as before behind it."""
    call, target = nn.Linear.__call__, as_target(qwen)
    round_ = Round(target, ScriptedDrafter([1], 128), 3, greedy=True)
    state, _ = start_row(round_, random_prompt(9, 128, 1), CAPACITY)
    proposal, _, logits = round_.halves(state, CAPACITY)
    _, expected = round_.verify(state, proposal, CAPACITY)
    layers = [m for m in qwen.modules() if isinstance(m, nn.Linear)]
    assert transposes(expected) - transposes(logits) >= len(layers) > 10
    assert mx.array_equal(logits, expected)
    assert nn.Linear.__call__ is call


def transposes(x):
    """How many nodes of the graph behind an array swap axes."""
    file = StringIO()
    mx.export_to_dot(file, x)
    return file.getvalue().count('"Transpose"')
