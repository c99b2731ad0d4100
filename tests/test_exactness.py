"""The distribution of what the shipped round emits, against exact enumeration.

Every test draws with fixed seeds. ``ALPHA`` is the chance that one of them fails
although the code is right. The faults at the end must fail the same test.
"""

import itertools
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import oracle
import pytest
from scipy import stats
from tiny import (
    StatelessDrafter,
    TableDrafter,
    TableTarget,
    random_head,
    start_row,
    tile,
    tiny_qwen,
)

import mlx_mtp.round
from mlx_mtp.drafters import Drafts, NGramDrafter
from mlx_mtp.round import Round
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.state import KVAdapter
from mlx_mtp.targets import as_target

ALPHA = 1e-4
ROWS = 24_000
SLOTS = 32
V = 5
LENGTH = 3


def table(*shape, seed, scale=1.5):
    """Logits in steps of a half, so that equal ones are common."""
    z = np.random.default_rng(seed).normal(0, scale, shape)
    return mx.array(np.round(2 * z) / 2, mx.float32)


TARGET = TableTarget(table(V, V, V, seed=1))
DRAFTER = TableDrafter(table(V, V, seed=2))


def shaped(row, params):
    """The distribution that a row is drawn from, in float64."""
    result = oracle.shape(np.array(row.astype(mx.float32)), **asdict(params))
    assert result.margin > 1e-4, "a filter decides by rounding here"
    return result.p


def table_joint(target, context, params):
    """The exact probability of the next ``LENGTH`` tokens, ``(V,) * LENGTH``."""
    ids = range(target.vocab_size)
    rows = {
        pair: shaped(target.table[pair], params)
        for pair in itertools.product(ids, repeat=2)
    }
    joint = np.zeros((len(ids),) * LENGTH)
    for tokens in itertools.product(ids, repeat=LENGTH):
        seen = (*context[-2:], *tokens)
        joint[tokens] = np.prod(
            [rows[seen[i : i + 2]][token] for i, token in enumerate(tokens)]
        )
    return joint


def model_joint(model, context, params, vocab):
    """The same of an ``mlx_lm`` model, which reads every sequence whole."""
    joint = np.ones((vocab,) * LENGTH)
    for i in range(LENGTH):
        seen = list(itertools.product(range(vocab), repeat=i))
        rows = mx.array([[*context, *tokens] for tokens in seen])
        p = np.array([shaped(row, params) for row in model(rows)[:, -1]])
        joint *= p.reshape((vocab,) * (i + 1) + (1,) * (LENGTH - i - 1))
    return joint


def open_rows(round_, prompt, params, draft_params=None, seed=0, rows=ROWS):
    """``rows`` equal streams with their own keys, and the tokens behind them."""
    state, counts = start_row(round_, prompt, SLOTS, params, draft_params, seed)
    for i, adapter in enumerate(round_.target.adapters):
        if isinstance(adapter, KVAdapter):
            state["leaves"][i] = tuple(x[:, :, :SLOTS] for x in state["leaves"][i])
    return tile(state, rows, seed), [*prompt, counts[0, 2].item()]


def run(round_, state):
    """Accepted counts ``(rounds, B)`` and the next ``LENGTH`` tokens of every row."""
    accepted, tokens = [], []
    for _ in range(LENGTH):  # at least one token each
        state, result = round_(state, SLOTS)
        counts = np.array(result.counts)
        accepted.append(counts[:, 0])
        assert (counts[:, 0] <= counts[:, 1]).all()
        tokens.append(counts[:, 2:])
    tokens = np.concatenate(tokens, axis=1)
    order = np.argsort(tokens < 0, axis=1, kind="stable")[:, :LENGTH]
    return np.array(accepted), np.take_along_axis(tokens, order, axis=1)


def histogram(tokens, vocab):
    counts = np.zeros((vocab,) * tokens.shape[1])
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


def chi_square(counts, p):
    """The statistic of ``counts`` against ``p`` and its degrees of freedom.

    Rare cells are pooled. A count where ``p`` is 0 gives infinity.
    """
    counts, expected = counts.ravel(), p.ravel() * counts.sum()
    if not counts.any():
        return 0.0, 0
    if counts[expected == 0].any():
        return np.inf, 1
    rare = expected < 5
    if expected[rare].sum() < 5:  # too rare even together
        rare[expected.argmax()] = True
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return ((observed - expected) ** 2 / expected).sum(), expected.size - 1


def p_value(counts, p):
    statistic, freedom = chi_square(counts, p)
    return stats.chi2.sf(statistic, freedom) if freedom else 1.0


def check(round_, params, draft_params=None, prompt=(0, 1), seed=0):
    """The p-value of the joint distribution of the next tokens."""
    state, context = open_rows(round_, list(prompt), params, draft_params, seed)
    accepted, tokens = run(round_, state)
    assert (accepted >= 0).all()
    joint = table_joint(round_.target, context, params)
    return p_value(histogram(tokens, round_.target.vocab_size), joint)


def sampled(depth, drafter=DRAFTER, target=TARGET, order="temperature_first"):
    return Round(target, drafter, depth, greedy=False, filter_order=order)


PARAMS = {
    "plain": (SamplingParams(1.0), None),
    "cold": (SamplingParams(0.4), None),
    "hot": (SamplingParams(1.8), None),
    "top_k": (SamplingParams(1.0, top_k=3), None),
    "top_p": (SamplingParams(0.8, top_p=0.75), None),
    "min_p": (SamplingParams(1.3, min_p=0.12), None),
    "all": (SamplingParams(1.2, top_k=4, top_p=0.93, min_p=0.05), None),
    "last": (SamplingParams(0.6, 4, 0.85, 0.03, "temperature_last"), None),
    "last_hot": (SamplingParams(2.0, 0, 0.8, 0.0, "temperature_last"), None),
    "own_draft": (SamplingParams(1.0), SamplingParams(0.5, top_k=2)),
    "wider_draft": (SamplingParams(0.7, top_k=2), SamplingParams(1.5)),
    "greedy_draft": (SamplingParams(1.0, top_p=0.9), SamplingParams(0.0)),
}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PARAMS)
def test_every_sequence_has_its_exact_frequency(name, depth):
    params, draft_params = PARAMS[name]
    round_ = sampled(depth, order=params.filter_order)
    assert check(round_, params, draft_params, seed=depth) > ALPHA


def test_every_sequence_of_a_model_with_its_head_has_its_exact_frequency():
    """Gated DeltaNet, attention and a chained head, which is often wrong."""
    config = {"vocab": 5, "layers": 2, "hidden": 32}
    target = as_target(tiny_qwen(**config))
    # Sharper rows than random weights give.
    target.text.lm_head.weight = 12 * target.text.lm_head.weight
    round_ = sampled(2, random_head(target, **config), target)
    params = SamplingParams(1.0, top_p=0.9)
    state, context = open_rows(round_, [3, 1, 4], params, rows=10_000)
    accepted, tokens = run(round_, state)
    assert {0, 1, 2} <= set(accepted.ravel().tolist())

    joint = model_joint(target.model, context, params, 5)
    assert p_value(histogram(tokens, 5), joint) > ALPHA


@pytest.mark.parametrize("depth", [1, 3])
def test_copied_drafts_keep_the_distribution(depth):
    """N-gram drafts are point masses of a length that depends on the history."""
    params = SamplingParams(1.0, min_p=0.05)
    round_ = sampled(depth, NGramDrafter())
    prompt = [0, 1, 2, 0, 3, 1, 4, 2, 0, 1]
    state, context = open_rows(round_, prompt, params)
    accepted, tokens = run(round_, state)
    assert len(set(accepted.ravel().tolist())) == depth + 1
    joint = table_joint(TARGET, context, params)
    assert p_value(histogram(tokens, V), joint) > ALPHA


def constant(p, dtype=mx.float32):
    """A target, or with one axis less a drafter, that always has this distribution."""
    with np.errstate(divide="ignore"):
        row = mx.array(np.log(p), mx.float32).astype(dtype)
    size = len(p)
    target = TableTarget(mx.broadcast_to(row, (size, size, size)))
    return target, TableDrafter(mx.broadcast_to(row, (size, size)))


def test_first_tokens_and_corrections_follow_p_and_the_residual():
    """p = (.2, .5, .3) with drafts from q = (.5, .3, .2)."""
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.5, 0.3, 0.2])
    round_ = sampled(3, constant(q)[1], constant(p)[0])
    rows = 100_000 if mx.default_device() == mx.cpu else 60_000  # a grid ends at 65,535
    state, _ = open_rows(round_, [0], SamplingParams(1.0), rows=rows)
    accepted, tokens = run(round_, state)
    for i in range(LENGTH):
        frequency = np.bincount(tokens[:, i], minlength=3) / len(tokens)
        error = np.sqrt(p * (1 - p) / len(tokens))
        assert (abs(frequency - p) < 4 * error).all()
    corrections = np.bincount(tokens[accepted[0] == 0, 0], minlength=3)
    assert p_value(corrections, np.array([0, 2 / 3, 1 / 3])) > ALPHA


def test_acceptance_is_the_overlap_of_the_distributions():
    """sum(min(p, q)) of the drafts that were reached, within 4 standard errors."""
    params, draft_params = SamplingParams(1.0, top_p=0.9), SamplingParams(0.7, top_k=3)
    state, context = open_rows(sampled(1), [0, 1], params, draft_params)
    accepted, _ = run(sampled(1), state)
    p = shaped(TARGET.table[tuple(context[-2:])], params)
    q = shaped(DRAFTER.table[context[-1]], draft_params)
    overlap = np.minimum(p, q).sum()
    assert 0.2 < overlap < 0.9
    error = np.sqrt(overlap * (1 - overlap) / ROWS)
    assert abs(accepted[0].mean() - overlap) < 4 * error


@pytest.mark.parametrize("order", ["temperature_first", "temperature_last"])
def test_drafts_follow_the_filter_order_of_their_own_parameters(order):
    p, q = np.array([0.2, 0.2, 0.6]), np.array([0.5, 0.3, 0.2])
    draft_params = SamplingParams(2.0, min_p=0.62, filter_order=order)
    drafter = constant(q)[1]
    decoder = SpeculativeDecoder(constant(p)[0], drafter, depth=1)
    params = SamplingParams(1.0)
    steps = decoder.stream(
        [0], max_tokens=6000, params=params, draft_params=draft_params, seed=1
    )
    accepted = sum(step.from_draft for step in steps)
    overlap = np.minimum(p, shaped(drafter.table[0], draft_params)).sum()
    n = steps.telemetry.drafted
    assert abs(accepted / n - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / n)


def test_q_is_the_filtered_distribution_that_drafts_were_drawn_from():
    """Top-k 2 of (.5, .3, .2) is (.625, .375, 0): 2.5 % are rejected for (.6, .4)."""
    target, _ = constant([0.6, 0.4, 0.0])
    _, drafter = constant([0.5, 0.3, 0.2])
    round_ = sampled(1, drafter, target)
    state, _ = open_rows(round_, [0], SamplingParams(1.0), SamplingParams(1.0, top_k=2))
    accepted, tokens = run(round_, state)
    assert abs((accepted[0] == 0).mean() - 0.025) < 4 * np.sqrt(0.025 / ROWS)
    counts = np.bincount(tokens[:, 0], minlength=3)
    assert p_value(counts, np.array([0.6, 0.4, 0])) > ALPHA


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_drafts_from_the_target_distribution_are_always_accepted(dtype):
    target, drafter = constant([0.55, 0.3, 0.15], dtype)
    round_ = sampled(4, drafter, target)
    state, _ = open_rows(round_, [0], SamplingParams(0.8, top_p=0.9))
    accepted, _ = run(round_, state)
    # u * q < p with p = q: only rounding in the last place can reject.
    assert (accepted == 4).mean() > 1 - 1e-4


def test_q_is_computed_from_the_rounded_logits():
    """In bfloat16 both 64.0 and 64.24 are 64: the drafts are fair coins."""
    drafter = TableDrafter(
        mx.broadcast_to(mx.array([64.0, 64.24], mx.bfloat16), (2, 2))
    )
    round_ = sampled(2, drafter, constant([0.5, 0.5])[0])
    state, _ = open_rows(round_, [0], SamplingParams(1.0))
    accepted, tokens = run(round_, state)
    assert (accepted == 2).all()
    assert p_value(histogram(tokens, 2), np.full((2, 2, 2), 1 / 8)) > ALPHA


class PointDrafter(StatelessDrafter):
    """Always proposes one token."""

    def __init__(self, token):
        self.token = token

    def propose(self, state, context):
        shape = (context.tokens.shape[0], context.depth)
        return Drafts(mx.full(shape, self.token, mx.int32)), state


def test_filters_and_temperature_hold_in_every_slot():
    """Verified, corrected and bonus rows are all shaped."""
    target, _ = constant([0.9, 0.09, 0.01])
    round_ = sampled(2, PointDrafter(1), target)
    state, _ = open_rows(round_, [0], SamplingParams(1.0, min_p=0.2), rows=1000)
    accepted, tokens = run(round_, state)
    assert (accepted == 0).all() and (tokens == 0).all()

    target, _ = constant([0.8, 0.2])
    round_ = sampled(2, PointDrafter(0), target)
    state, _ = open_rows(round_, [0], SamplingParams(0.5))
    accepted, tokens = run(round_, state)
    p = 16 / 17
    for slot in range(LENGTH):
        assert abs((tokens[:, slot] == 0).mean() - p) < 4 * np.sqrt(p * (1 - p) / ROWS)
    bonus = tokens[accepted[0] == 2, 2]
    assert abs((bonus == 0).mean() - p) < 4 * np.sqrt(p * (1 - p) / len(bonus))


# The driver: one long stream. The next token given the last two is multinomial.


class RepeatPenalty:
    """Lowers the newest token by 1."""

    def __call__(self, tokens, logits):
        return logits - (mx.arange(logits.shape[1]) == tokens[-1])


class LookingAhead(RepeatPenalty):
    def checkpoint(self):
        return None

    def restore(self, mark):
        pass


def transition_p_value(tokens, rows):
    """Of all next tokens given the two before them, against ``rows`` ``(V, V, V)``."""
    counts = np.zeros(rows.shape)
    np.add.at(counts, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
    parts = [chi_square(counts[pair], rows[pair]) for pair in np.ndindex(V, V)]
    statistic, freedom = np.sum([part for part in parts if part[1]], axis=0)
    return stats.chi2.sf(statistic, freedom)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"processors": [RepeatPenalty()]},
        {"processors": [LookingAhead()]},
        {"sampler": lambda logprobs: mx.random.categorical(logprobs / 0.7)},
        {
            "sampler": lambda logprobs: mx.random.categorical(logprobs / 0.7),
            "processors": [RepeatPenalty()],
        },
    ],
    ids=["compiled", "row by row", "look ahead", "sampler", "sampler and processor"],
)
def test_a_long_stream_has_the_transitions_of_the_target(options):
    params = SamplingParams(0.7)
    mx.random.seed(0)
    prompt = [0, 1]
    drafter = TableDrafter(mx.mean(TARGET.table, axis=0))
    decoder = SpeculativeDecoder(TARGET, drafter, 3)
    if "sampler" not in options:
        options = {**options, "params": params}
    steps = decoder.stream(prompt, max_tokens=4000, seed=5, **options)
    tokens = np.array(prompt + [step.token for step in steps])
    table = TARGET.table
    if "processors" in options:
        table = table - mx.eye(V)
    rows = np.array([shaped(row, params) for row in table.reshape(-1, V)])
    rows = rows.reshape(V, V, V)
    assert 0.05 < steps.telemetry.acceptance_rate < 0.9
    assert transition_p_value(tokens, rows) > ALPHA


# Faults that must fail the same test.


def share_final_draw(draws, depth):
    """The correction is drawn with the noise of the first draft."""
    return mx.concatenate([draws[:, :-2], draws[:, :2]], axis=1)


def share_coins(draws, depth):
    """A draft is accepted by the coin that chose it."""
    coins = draws[:, : 2 * depth : 2]
    return mx.concatenate([draws[:, : 2 * depth], coins, draws[:, -2:]], axis=1)


@pytest.mark.parametrize("fault", [share_final_draw, share_coins])
@pytest.mark.parametrize("depth", [1, 3])
def test_shared_noise_is_found(fault, depth, monkeypatch):
    uniforms = mlx_mtp.round.round_uniforms

    def shared(keys, depth):
        return fault(uniforms(keys, depth), depth)

    monkeypatch.setattr(mlx_mtp.round, "round_uniforms", shared)
    assert check(sampled(depth), SamplingParams(1.0)) < ALPHA


class WithoutStats(TableDrafter):
    """Forgets that its drafts were filtered."""

    def propose(self, state, context):
        drafts, state = super().propose(state, context)
        return drafts._replace(stats=None), state


@pytest.mark.parametrize("depth", [1, 3])
def test_unfiltered_q_of_filtered_drafts_is_found(depth):
    round_ = sampled(depth, WithoutStats(DRAFTER.table))
    draft_params = SamplingParams(1.0, top_k=2)
    assert check(round_, SamplingParams(1.0), draft_params) < ALPHA


class StopsWhenUnsure(TableDrafter):
    """Withdraws a draft whose own probability is low, and those behind it."""

    def propose(self, state, context):
        drafts, state = super().propose(state, context)
        q = mx.softmax(drafts.logits, axis=-1)
        q = mx.take_along_axis(q, drafts.tokens[..., None], axis=-1)[..., 0]
        lengths = mx.sum(mx.cumprod((q > 0.4).astype(mx.int32), axis=1), axis=1)
        return drafts._replace(lengths=lengths), state


@pytest.mark.parametrize("depth", [1, 3])
def test_stopping_by_the_confidence_of_the_drawn_draft_is_found(depth):
    round_ = sampled(depth, StopsWhenUnsure(DRAFTER.table))
    assert check(round_, SamplingParams(1.0)) < ALPHA


class StopsBeforeDrawing(TableDrafter):
    """Drafts less where its distribution is flat: known before anything is drawn."""

    def propose(self, state, context):
        drafts, state = super().propose(state, context)
        top = mx.max(mx.softmax(drafts.logits, axis=-1), axis=-1)
        lengths = mx.sum(mx.cumprod((top > 0.45).astype(mx.int32), axis=1), axis=1)
        return drafts._replace(lengths=lengths), state


def test_draft_lengths_known_before_the_draw_are_exact():
    """Slot i may depend on the drafts before it, never on its own."""
    round_ = sampled(3, StopsBeforeDrawing(DRAFTER.table))
    assert check(round_, SamplingParams(1.0)) > ALPHA
