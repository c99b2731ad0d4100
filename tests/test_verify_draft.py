"""verify_draft against its oracle, and that its output has the target's law."""

import threading

import mlx.core as mx
import numpy as np
import oracle
import pytest
from arrays import DTYPES, LAYOUTS, array, bits, values
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from mlx_mtp.ops import sample, verify_draft

ORDERS = ["temperature_first", "temperature_last"]
FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]
# How a draft was drawn and what verify_draft is told about it.
DRAFTS = ["stats", "own stats", "logits", "own temperature", "greedy", "point mass"]
# The op may differ from float64 where a decision is closer than this.
NEAR = 5e-6
ALPHA = 1e-4


def log(p):
    with np.errstate(divide="ignore"):
        return mx.array(np.log(np.array(p, np.float64)).astype(np.float32))


def draw_drafts(kind, logits, u, params):
    """Drafts, the arguments that describe them, and the q that they imply."""
    own = {"temperature": 1.3, "top_k": 40}
    drawn = {
        "stats": params,
        "own stats": own,
        "logits": {"temperature": params.get("temperature", 1)},
        "own temperature": {"temperature": 1.7},
        "greedy": {"temperature": 0},
        "point mass": own,
    }[kind]
    tokens, stats = sample(logits, u, **drawn)
    known = {
        "stats": {"draft_logits": logits, "draft_stats": stats},
        "own stats": {"draft_logits": logits, "draft_stats": stats},
        "logits": {"draft_logits": logits},
        "own temperature": {"draft_logits": logits, "draft_params": drawn},
        "greedy": {"draft_logits": logits, "draft_params": drawn},
        "point mass": {},
    }[kind]
    if kind == "point mass" or drawn.get("temperature") == 0:
        return tokens, known, lambda b, i: None
    z = values(logits)
    return tokens, known, lambda b, i: oracle.shape(z[b, i], **drawn).p


def check(target, drafts, q, u, params, got, lengths=None, allowed=None):
    """Compares sequences with the oracle. Returns how many were too close to tell."""
    tokens, accepted, logprobs = (np.array(x) for x in got)
    B, T, _ = target.shape
    assert tokens.shape == logprobs.shape == (B, T) and accepted.shape == (B,)
    near = 0
    for b in range(B):
        K = T - 1 if lengths is None else lengths[b]
        emitted, count, logp, margin = oracle.verify(
            target[b],
            np.array(drafts[b])[:K],
            [q(b, i) for i in range(K)],
            u[b],
            allowed=None if allowed is None else allowed[b],
            **params,
        )
        if margin < NEAR:
            near += 1
            continue
        n = len(emitted)
        assert accepted[b] == count
        assert tokens[b].tolist() == emitted + [-1] * (T - n)
        np.testing.assert_allclose(logprobs[b, :n], logp, atol=2e-6, rtol=1e-6)
        assert (logprobs[b, n:] == 0).all()
    return near


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_equals_the_oracle(params, order, kind):
    rng = np.random.default_rng(0)
    params = {**params, "filter_order": order}
    near = 0
    for dtype, V in zip(DTYPES, [301, 33, 1100], strict=True):
        B, K = 12, 3
        target = array(rng.normal(0, 3, (B, K + 1, V)), dtype)
        draft = array(values(target)[:, :K] + rng.normal(0, 1, (B, K, V)), dtype)
        u = rng.random((B, K + 2)).astype(np.float32)
        u[: B // 2, 0] *= 0.1
        u_draft = mx.array(rng.random((B, K, 2)).astype(np.float32))
        drafts, known, q = draw_drafts(kind, draft, u_draft, params)
        got = verify_draft(target, drafts, uniforms=mx.array(u), **known, **params)
        near += check(values(target), drafts, q, u, params, got)
    assert near <= 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index", [mx.int8, mx.uint16, mx.int32, mx.uint32, mx.int64])
def test_takes_any_layout_mask_and_length(layout, dtype, index):
    rng = np.random.default_rng(1)
    B, K, V = 5, 4, 100
    params = {"temperature": 0.9, "top_p": 0.95}
    target = array(rng.normal(0, 2, (B, K + 1, V)), dtype, layout)
    draft = array(values(target)[:, :K], dtype, layout)
    allowed = bits(rng.random((B, K + 1, V)) < 0.8)
    lengths = [0, 1, 2, 3, 4]
    u = rng.random((B, K + 2)).astype(np.float32) * 0.9
    u_draft = mx.array(rng.random((B, K, 2)).astype(np.float32))
    drafts, known, q = draw_drafts("stats", draft, u_draft, params)
    apart = mx.repeat(drafts.astype(index), 2, axis=1)[:, ::2]
    got = verify_draft(
        target,
        apart,
        uniforms=array(u, layout=layout),
        draft_lengths=mx.array(lengths).astype(index),
        allowed=mx.array(allowed),
        **known,
        **params,
    )
    near = check(values(target), drafts, q, u, params, got, lengths, allowed)
    assert near <= 1
    assert all(np.array(got[1]) <= lengths)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_holds_its_promises_for_any_input(data):
    """Garbage included: ids in range, -1 after the last, flagged or accepted + 1."""
    pick = data.draw
    B, K, V = pick(st.integers(1, 3)), pick(st.integers(0, 3)), pick(st.integers(1, 70))
    numbers = st.sampled_from(
        [0.0, 1.0, -1.0, 5.0, 80.0, -np.inf, np.inf, np.nan, 3e38]
    )
    seed = pick(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    bad = pick(st.lists(st.tuples(st.integers(0, 10**6), numbers), max_size=4))
    target = rng.normal(0, 2, (B, K + 1, V)).astype(np.float32)
    draft = rng.normal(0, 2, (B, K, V)).astype(np.float32)
    for x in (target, draft):
        for i, value in bad:
            if x.size:
                x.flat[i % x.size] = value
    drafts = rng.integers(-1, V + 1, (B, K))
    u = rng.random((B, K + 2)).astype(np.float32)
    params = pick(st.sampled_from(FILTERS))
    tokens, accepted, logprobs = (
        np.array(x)
        for x in verify_draft(
            mx.array(target),
            mx.array(drafts),
            mx.array(draft) if pick(st.booleans()) else None,
            uniforms=mx.array(u),
            **params,
        )
    )
    assert ((accepted >= -1) & (accepted <= K)).all()
    for b in range(B):
        n = accepted[b] + 1
        assert (tokens[b, :n] >= 0).all() and (tokens[b, :n] < V).all()
        assert (tokens[b, n:] == -1).all() and (logprobs[b, n:] == 0).all()
        assert (tokens[b, : max(n - 1, 0)] == drafts[b, : max(n - 1, 0)]).all()
        emitted = target[b, np.arange(n), tokens[b, :n]]
        assert (emitted > -np.inf).all() and np.isfinite(logprobs[b, :n]).all()


def test_coins_are_compared_strictly():
    p = [[0.0, 1.0], [0.5, 0.5]]
    below_one = 1 - 2**-24
    # (coin, target row) -> accepted; q(0) = 1 for a point mass.
    for coin, row, accepted in [
        (0.0, [0.0, 1.0], 0),
        (0.0, [1e-30, 1.0], 1),
        (below_one, [1.0, 0.0], 1),
        (0.5, [0.5, 0.5], 0),
        (0.5 - 2**-25, [0.5, 0.5], 1),
    ]:
        target = log([[row, p[1]]])
        u = mx.array([[coin, 0.0, 0.0]])
        got = verify_draft(target, mx.array([[0]]), uniforms=u)
        assert got[1].item() == accepted, (coin, row)
    # p = q is accepted by every coin.
    row = log([[[0.2, 0.5, 0.3]] * 2])
    for draft in range(3):
        u = mx.array([[below_one, 0.0, 0.0]])
        got = verify_draft(row, mx.array([[draft]]), row[:, :1], uniforms=u)
        assert got[1].item() == 1


def test_the_final_draw_is_the_inverse_of_the_distribution():
    # Correction: residual (0, 0.1, 0.3) -> (0, 0.25, 0.75). Bonus: (0.5, 0.25, 0.25).
    target = log([[[0.2, 0.5, 0.3], [0.5, 0.25, 0.25]]])
    draft = log([[[0.6, 0.4, 0.0]]])
    for coin, u, slot, token in [
        (0.5, 0.0, 0, 1),
        (0.5, 0.249, 0, 1),
        (0.5, 0.251, 0, 2),
        (0.5, 1 - 2**-24, 0, 2),
        (0.1, 0.0, 1, 0),
        (0.1, 0.51, 1, 1),
        (0.1, 0.76, 1, 2),
    ]:
        for low in (0.0, 1 - 2**-24):
            tokens, accepted, _ = verify_draft(
                target, mx.array([[0]]), draft, uniforms=mx.array([[coin, u, low]])
            )
            assert accepted.item() == slot and tokens[0, slot].item() == token


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_drafts_it_is_plain_sampling(temperature):
    rng = np.random.default_rng(2)
    x = mx.array(rng.normal(0, 2, (6, 1, 500)).astype(np.float32))
    u = mx.array(rng.random((6, 2), np.float32))
    params = {"temperature": temperature, "top_k": 30}
    tokens, accepted, _ = verify_draft(
        x, mx.zeros((6, 0), mx.int32), uniforms=u, **params
    )
    assert accepted.tolist() == [0] * 6
    assert tokens[:, 0].tolist() == sample(x[:, 0], u, **params)[0].tolist()


def test_only_rows_up_to_the_first_rejection_count():
    B, K, V = 6, 3, 64
    bad = [np.nan, np.inf, -np.inf, None, None, None]
    target = np.zeros((B, K + 1, V), np.float32)
    draft = np.zeros((B, K, V), np.float32)
    drafts = np.zeros((B, K), np.int32)
    for b, value in enumerate(bad):
        if value is not None:
            target[b, 2] = value
    draft[3, 2] = np.nan
    draft[4, 2, 0] = -np.inf  # q of the draft is 0
    drafts[5, 2] = V
    target[:, 1, 0] = -5  # rejected by a coin above its probability
    for coin, count in [(0.9, 1), (0.0, -1)]:
        u = mx.array([[0.0, coin, 0.0, 0.5, 0.5]] * B)
        tokens, accepted, logprobs = verify_draft(
            mx.array(target), mx.array(drafts), mx.array(draft), uniforms=u
        )
        assert accepted.tolist() == [count] * B
        emitted = (np.array(tokens) >= 0).sum(axis=1)
        assert emitted.tolist() == [count + 1] * B
        assert (np.array(logprobs)[:, count + 1 :] == 0).all()


def test_draft_logits_count_where_they_are_used():
    target = np.zeros((3, 2, 64), np.float32)
    draft = np.zeros((3, 1, 64), np.float32)
    target[:, 0, 0] = -1
    drafts, stats = sample(mx.array(draft), mx.zeros((3, 1, 2)))
    draft[1, 0, 9] = np.nan
    draft[2, 0, 63] = np.inf
    arguments = mx.array(target), drafts, mx.array(draft)
    for coin, flags in [(0.9, [0, -1, -1]), (0.0, [1, 1, 1])]:
        u = mx.array([[coin, 0.5, 0.0]] * 3)
        got = verify_draft(*arguments, uniforms=u, draft_stats=stats)
        assert got[1].tolist() == flags
    # Without statistics the row is read for its sum; at temperature 0 never.
    assert verify_draft(*arguments, uniforms=u)[1].tolist() == [1, -1, -1]
    own = {"temperature": 1}
    got = verify_draft(*arguments, uniforms=u, temperature=0, draft_params=own)
    assert got[1].tolist() == [0, 0, 0]


def test_bad_rows_flag_their_own_sequence():
    """Padding never wins: a vocabulary that fills no block and no vector."""
    V = 5
    target = np.tile(np.log([0.1, 0.2, 0.3, 0.2, 0.2]).astype(np.float32), (5, 4, 1))
    target[1, 1] = np.nan
    target[2, 1] = -np.inf
    target[3, 1, 4] = np.inf
    drafts = np.array([[2, 2, 2]] * 4 + [[2, -1, -1]])
    u = mx.array([[0.0, 0.0, 0.0, 0.95, 0.0]] * 5)
    tokens, accepted, _ = verify_draft(mx.array(target), mx.array(drafts), uniforms=u)
    assert accepted.tolist() == [3, -1, -1, -1, -1]
    assert tokens.tolist() == [[2, 2, 2, 4]] + [[-1] * 4] * 4
    # The same drafts with their true length: the -1 slots are never looked at.
    lengths = mx.array([3, 3, 3, 3, 1])
    tokens, accepted, _ = verify_draft(
        mx.array(target), mx.array(drafts), uniforms=u, draft_lengths=lengths
    )
    assert accepted.tolist() == [3, -1, -1, -1, 1]
    assert tokens[4].tolist() == [2, 4, -1, -1]
    assert V > np.array(tokens).max()


@pytest.mark.parametrize("value", [2**32, -(2**32), 2**63 - 1, 64])
def test_a_wide_draft_id_does_not_wrap(value):
    target = mx.zeros((1, 2, 64))
    drafts = mx.array([[value]], mx.int64)
    got = verify_draft(target, drafts, uniforms=mx.zeros((1, 3)))
    assert got[1].item() == -1


def test_lengths_and_parameters_out_of_range_are_flagged():
    target = mx.zeros((6, 3, 10))
    drafts = mx.zeros((6, 2), mx.int32)
    got = verify_draft(
        target,
        drafts,
        uniforms=mx.full((6, 4), 0.05),
        draft_lengths=mx.array([2, 3, -1, 2, 2, 2]),
        temperature=mx.array([1, 1, 1, -1.0, 1, 1]),
        top_p=mx.array([1, 1, 1, 1, 0.0, 1]),
        top_k=mx.array([0, 0, 0, 0, 0, 0.5]),
    )
    assert got[1].tolist() == [2, -1, -1, -1, -1, -1]
    temperature = mx.array([1, 0, -1, np.nan, np.inf, -0.0])
    got = verify_draft(
        target,
        drafts,
        target[:, :2],
        uniforms=mx.full((6, 4), 0.05),
        draft_params={"temperature": temperature},
    )
    assert got[1].tolist() == [2, 2, -1, -1, -1, 2]


def test_parameters_of_each_sequence():
    rng = np.random.default_rng(3)
    B, K, V = 4, 3, 400
    target = rng.normal(0, 2, (B, K + 1, V)).astype(np.float32)
    draft = target[:, :K] + rng.normal(0, 0.5, (B, K, V)).astype(np.float32)
    u = mx.array(rng.random((B, K + 2), np.float32))
    u_draft = mx.array(rng.random((B, K, 2), np.float32))
    columns = {
        "temperature": [0.0, 0.5, 1.0, 2.0],
        "top_k": [0, 10, 300, 1000],
        "top_p": [0.5, 1.0, 0.9, 0.3],
        "min_p": [0.0, 0.0, 0.01, 0.3],
    }
    arrays = {name: mx.array(column) for name, column in columns.items()}
    x, y = mx.array(target), mx.array(draft)
    drafts, stats = sample(y, u_draft, **arrays)
    got = verify_draft(x, drafts, y, uniforms=u, draft_stats=stats, **arrays)
    for b in range(B):
        one = slice(b, b + 1)
        params = {name: column[b] for name, column in columns.items()}
        alone = verify_draft(
            x[one],
            drafts[one],
            y[one],
            uniforms=u[one],
            draft_stats=stats[one],
            **params,
        )
        assert [a.tolist() for a in alone] == [a[one].tolist() for a in got]


def test_mixed_temperatures_stay_finite():
    """Zero, tiny, denormal and one, in half precision."""
    target = mx.broadcast_to(mx.array([20.0, 10.0, 0.0]), (4, 2, 3)).astype(mx.float16)
    temperature = mx.array([0.0, 1e-6, 1e-40, 1.0])
    u = mx.array([[0.5, 0.5, 0.5]] * 4)
    for draft, accepted in [(0, [1, 1, 1, 1]), (1, [0, 0, 0, 0])]:
        drafts = mx.full((4, 1), draft, mx.int32)
        got = verify_draft(target, drafts, uniforms=u, temperature=temperature)
        assert got[1].tolist() == accepted
        assert got[0].tolist() == [[0, 0 if draft == 0 else -1]] * 4
        assert np.isfinite(np.array(got[2])).all()
    # A point mass on the argmax is accepted by every coin.
    u = mx.full((4, 3), 1 - 2**-24)
    got = verify_draft(
        target, mx.zeros((4, 1), mx.int32), uniforms=u, temperature=mx.zeros(4)
    )
    assert got[1].tolist() == [1] * 4


@pytest.mark.parametrize("temperature", [1, 0.1, 0.01, 0.001])
def test_statistics_stay_exact_at_low_temperatures(temperature):
    """In float32 a log-sum of 3000 is off by 1e-4, which would scale q."""
    offsets = np.arange(29, 30, 0.05)[:, None, None]
    rows = mx.array((np.array([0, -temperature, -9]) + offsets).astype(np.float32))
    n = rows.shape[0]
    for u in (0.1, 0.9):
        drafts, stats = sample(rows, mx.full((n, 1, 2), u), temperature=temperature)
        got = verify_draft(
            mx.concatenate([rows, rows], axis=1),
            drafts,
            rows,
            uniforms=mx.array([[1 - 1e-5, 0.5, 0.5]] * n),
            draft_stats=stats,
            temperature=temperature,
        )
        assert got[1].tolist() == [1] * n


def test_log_probabilities_are_those_of_the_target():
    """For accepted, correction and bonus alike, whatever the filters are."""
    rng = np.random.default_rng(4)
    target = mx.array(rng.normal(0, 3, (3, 4, 200)).astype(np.float32))
    expected = values(target) - np.log(np.exp(values(target)).sum(-1, keepdims=True))
    for params in FILTERS:
        drafts = mx.argmax(target[:, :3], axis=-1)
        drafts[1, 1] = mx.argmin(target[1, 1])
        drafts[2, 0] = mx.argmin(target[2, 0])
        u = mx.full((3, 5), 0.01)
        tokens, accepted, logprobs = verify_draft(target, drafts, uniforms=u, **params)
        assert accepted.tolist() == [3, 1, 0]
        for b in range(3):
            for i in range(accepted[b].item() + 1):
                logp = expected[b, i, tokens[b, i].item()]
                assert abs(logprobs[b, i].item() - logp) < 2e-6


@pytest.mark.parametrize("order", ["temperature_first", "temperature_last"])
def test_log_probabilities_can_be_left_out(order):
    rng = np.random.default_rng(5)
    target = mx.array(rng.normal(0, 3, (6, 4, 200)).astype(np.float32))
    drafts = mx.argmax(target[:, :3], axis=-1)
    u = mx.array(rng.random((6, 5)).astype(np.float32))
    for params in FILTERS:
        options = {"uniforms": u, **params, "filter_order": order}

        def both(target, options=options):
            given = verify_draft(target, drafts, **options)
            return given, verify_draft(target, drafts, **options, logprobs=False)

        for call in (both, mx.compile(both)):  # compiled, the two are not one
            given, without = call(target)
            assert without[2].shape == (6, 0) and without[2].dtype == mx.float32
            assert given[2].shape == (6, 4)
            assert without[0].tolist() == given[0].tolist()
            assert without[1].tolist() == given[1].tolist()


def test_filters_hold_in_every_slot():
    p = [0.90, 0.09, 0.01]
    for slot in range(4):
        drafts = [0, 0, 0]
        if slot < 3:
            drafts[slot] = 1
        u = mx.array([[0.0, 0.0, 0.0, 0.95, 0.0]])
        tokens, accepted, _ = verify_draft(
            log([[p] * 4]), mx.array([drafts]), uniforms=u, min_p=0.2
        )
        assert accepted.item() == min(slot, 3)
        assert tokens[0, slot].item() == 0


def test_temperature_holds_in_every_slot():
    n = 20_000
    rng = np.random.default_rng(5)
    target = mx.broadcast_to(mx.array([np.log(4), 0.0], mx.float32), (n, 4, 2))
    drafts = mx.array(rng.integers(0, 2, (n, 3)))
    u = mx.array(rng.random((n, 5), np.float32))
    tokens = np.array(verify_draft(target, drafts, uniforms=u, temperature=0.5)[0])
    for slot in range(4):
        emitted = tokens[:, slot][tokens[:, slot] >= 0]
        share = (emitted == 0).mean()
        assert abs(share - 16 / 17) < 4 * np.sqrt(16 / 17 / 17 / emitted.size)


def chi_square(observed, p):
    observed, p = np.asarray(observed), np.asarray(p, np.float64)
    assert observed[p == 0].sum() == 0
    expected = p[p > 0] / p.sum() * observed.sum()
    return scipy_stats.chisquare(observed[p > 0], expected).pvalue


def first_tokens(p, q, n, seed, shared=False, unfiltered=False, **draft):
    """Tokens at position 0 of n rounds, and which of them were corrections."""
    rng = np.random.default_rng(seed)
    u = rng.random((n, 3)).astype(np.float32)
    u_draft = rng.random((n, 1, 2)).astype(np.float32)
    if shared:
        u[:, 1:] = u_draft[:, 0]
    target = mx.broadcast_to(log([[p, p]]), (n, 2, len(p)))
    logits = mx.broadcast_to(log([[q]]), (n, 1, len(q)))
    drafts, stats = sample(logits, mx.array(u_draft), **draft)
    tokens, accepted, _ = verify_draft(
        target,
        drafts,
        logits,
        uniforms=mx.array(u),
        draft_stats=None if unfiltered else stats,
        **({} if unfiltered else {"temperature": 1.0}),
    )
    return np.array(tokens)[:, 0], np.array(accepted) == 0


def test_output_follows_the_target_whatever_the_draft():
    p, q = [0.2, 0.5, 0.3], [0.5, 0.3, 0.2]
    tokens, rejected = first_tokens(p, q, 100_000, 6)
    assert chi_square(np.bincount(tokens, minlength=3), p) > ALPHA
    # Corrections follow max(p - q, 0) = (0, 0.2, 0.1).
    corrections = np.bincount(tokens[rejected], minlength=3)
    assert chi_square(corrections, [0, 2, 1]) > ALPHA
    assert abs(rejected.mean() - 0.3) < 0.006
    # Draft noise reused for the correction, and q without the filter that was drawn
    # with, are biased, and seen to be.
    tokens, _ = first_tokens(p, q, 100_000, 7, shared=True)
    assert chi_square(np.bincount(tokens, minlength=3), p) < ALPHA
    tokens, _ = first_tokens(p, q, 100_000, 8, top_k=2)
    assert chi_square(np.bincount(tokens, minlength=3), p) > ALPHA
    tokens, _ = first_tokens(p, q, 100_000, 9, top_k=2, unfiltered=True)
    assert chi_square(np.bincount(tokens, minlength=3), p) < ALPHA


def test_a_filtered_draft_counts_with_its_filtered_probability():
    """Draft (0.5, 0.3, 0.2) with top-k 2 is (0.625, 0.375, 0)."""
    p = [0.6, 0.4, 0.0]
    tokens, rejected = first_tokens(p, [0.5, 0.3, 0.2], 100_000, 10, top_k=2)
    assert chi_square(np.bincount(tokens, minlength=3), p) > ALPHA
    assert chi_square([rejected.sum(), (~rejected).sum()], [0.025, 0.975]) > ALPHA


def test_equal_distributions_are_always_accepted():
    for kind in ({}, {"unfiltered": True}):
        _, rejected = first_tokens([0.5, 0.5], [0.5, 0.5], 20_000, 11, **kind)
        assert rejected.sum() <= 1


def test_q_is_computed_from_the_values_drawn_from():
    """In bfloat16 64.0 and 64.24 are one value: q is (0.5, 0.5)."""
    n = 50_000
    rng = np.random.default_rng(12)
    logits = mx.broadcast_to(mx.array([64.0, 64.24]).astype(mx.bfloat16), (n, 1, 2))
    drafts, stats = sample(logits, mx.array(rng.random((n, 1, 2), np.float32)))
    target = mx.broadcast_to(log([0.5, 0.5]), (n, 2, 2))
    u = mx.array(rng.random((n, 3), np.float32))
    for known in (stats, None):
        tokens, accepted, _ = verify_draft(
            target, drafts, logits, uniforms=u, draft_stats=known
        )
        observed = np.bincount(np.array(tokens)[:, 0], minlength=2)
        assert chi_square(observed, [0.5, 0.5]) > ALPHA
        assert np.array(accepted).mean() > 0.9999


@pytest.mark.parametrize("kind", DRAFTS)
def test_sequences_follow_the_target(kind):
    """Every sequence of 3 tokens, with rows that depend on what came before."""
    n, V, K = 60_000, 3, 2
    params = {"temperature": 0.8, "top_p": 0.9}
    rng = np.random.default_rng(13)
    # The row after a prefix depends on its last token; -1 is the start.
    target_of = rng.normal(0, 1, (V + 1, V)).astype(np.float32)
    draft_of = target_of + rng.normal(0, 1, (V + 1, V)).astype(np.float32)
    u = mx.array(rng.random((n, K + 2), np.float32))
    last, drafts, known = np.full(n, -1), [], []
    for _ in range(K):
        logits = mx.array(draft_of[last][:, None])
        u_draft = mx.array(rng.random((n, 1, 2), np.float32))
        tokens, arguments, _ = draw_drafts(kind, logits, u_draft, params)
        drafts.append(tokens)
        known.append(arguments)
        last = np.array(tokens)[:, 0]
    joined = {
        name: x if isinstance(x, dict) else mx.concatenate([k[name] for k in known], 1)
        for name, x in known[0].items()
    }
    drafts = mx.concatenate(drafts, 1)
    before = np.concatenate([np.full((n, 1), -1), np.array(drafts)], 1)
    target = mx.array(target_of[before])
    tokens, accepted, _ = verify_draft(target, drafts, uniforms=u, **joined, **params)
    tokens, accepted = np.array(tokens), np.array(accepted)
    assert (accepted >= 0).all() and len(set(accepted)) == K + 1
    law = np.array([oracle.shape(row, **params).p for row in target_of])
    # Where a round emitted fewer than 3, the rest is drawn from the target here.
    for i in range(1, K + 1):
        missing = tokens[:, i] < 0
        p = law[tokens[missing, i - 1]]
        r = rng.random((missing.sum(), 1))
        tokens[missing, i] = (np.cumsum(p, 1) <= r * p.sum(1, keepdims=True)).sum(1)
    code = tokens @ (V ** np.arange(K + 1)[::-1])
    p = law[-1][:, None, None] * law[:V, :, None] * law[None, :V, :]
    assert chi_square(np.bincount(code, minlength=V**3), p.ravel()) > ALPHA


def test_is_lazy_and_compiles():
    rng = np.random.default_rng(14)
    target = mx.array(rng.normal(0, 2, (3, 4, 500)).astype(np.float32))
    drafts = mx.argmax(target[:, :3], axis=-1)
    draft = target[:, :3] * 0.5
    u = mx.full((3, 5), 0.6)

    none = mx.array([0, 0, 0])

    def all_kinds(target, drafts, draft, u, none):
        given = verify_draft(target, drafts, draft, uniforms=u)
        point = verify_draft(target, drafts, uniforms=u)
        cut = verify_draft(target, drafts, uniforms=u, draft_lengths=none)
        first = verify_draft(target, drafts, uniforms=u, temperature=4, top_p=0.5)
        last = verify_draft(
            target,
            drafts,
            uniforms=u,
            temperature=4,
            top_p=0.5,
            filter_order="temperature_last",
        )
        # Only nodes that are not outputs are merged.
        return [-x for x in (*given, *point, *cut, *first, *last)]

    expected = [x.tolist() for x in all_kinds(target, drafts, draft, u, none)]
    assert len({str(tokens) for tokens in expected[::3]}) == 5
    for compiled in (mx.compile(all_kinds), mx.compile(all_kinds, shapeless=True)):
        got = compiled(target, drafts, draft, u, none)
        assert [x.tolist() for x in got] == expected
    two = compiled(target[:2], drafts[:2], draft[:2], u[:2], none[:2])
    assert [x.tolist() for x in two] == [x[:2] for x in expected]


def test_runs_on_other_streams_and_threads():
    rng = np.random.default_rng(15)
    target = rng.normal(0, 2, (3, 4, 50_000)).astype(np.float32)
    u = rng.random((3, 5)).astype(np.float32)
    drafts = target[:, :3].argmax(-1)

    def run(stream):
        got = verify_draft(
            mx.array(target),
            mx.array(drafts),
            mx.array(target[:, :3]),
            uniforms=mx.array(u),
            stream=stream,
        )
        mx.async_eval(*got)
        return [x.tolist() for x in got]

    expected = run(mx.cpu)
    got = []
    threads = [
        threading.Thread(
            target=lambda: got.extend(run(mx.new_stream(mx.cpu)) for _ in range(5))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 20


@pytest.mark.cpu
def test_allocates_nothing_of_the_size_of_a_row():
    target = array(np.zeros((2, 4, 151936)), mx.bfloat16, "last axis apart")
    drafts = mx.zeros((2, 3), mx.int32)
    u = mx.full((2, 5), 0.5)
    mx.eval(target, drafts, u)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(verify_draft(target, drafts, target[:, :3], uniforms=u, top_k=20))
    assert mx.get_peak_memory() - before < 4096


GOOD = {
    "target_logits": mx.zeros((2, 4, 40)),
    "draft_tokens": mx.zeros((2, 3), mx.int32),
    "draft_logits": mx.zeros((2, 3, 40)),
    "uniforms": mx.zeros((2, 5)),
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_logits": mx.zeros((4, 40))}, r"target_logits must have shape \(B, T"),
        ({"target_logits": mx.zeros((2, 0, 40))}, "must have T = K"),
        ({"target_logits": mx.zeros((2, 4, 0))}, "must have T = K"),
        ({"target_logits": mx.zeros((2, 4, 40), mx.int32)}, "must be float32, float16"),
        ({"draft_tokens": mx.zeros((2, 4), mx.int32)}, r"shape \(B=2, K=3\) but has"),
        ({"draft_tokens": mx.zeros((2, 3))}, "draft_tokens must be an integer array"),
        ({"draft_logits": mx.zeros((2, 3, 41))}, r"shape \(B=2, K=3, V=40\)"),
        (
            {"draft_logits": mx.zeros((2, 3, 40), mx.uint8)},
            "draft_logits must be float",
        ),
        ({"uniforms": mx.zeros((2, 4))}, r"uniforms must have shape \(B=2, K \+ 2=5\)"),
        ({"uniforms": mx.zeros((2, 5), mx.bfloat16)}, "uniforms must be float32"),
        ({"draft_stats": mx.zeros((2, 3))}, "draft_stats must have shape"),
        (
            {"draft_stats": mx.zeros((2, 3, 3), mx.float16)},
            "draft_stats must be float32",
        ),
        (
            {"draft_lengths": mx.zeros((2, 1), mx.int32)},
            "draft_lengths must have shape",
        ),
        ({"draft_lengths": mx.zeros((2,))}, "draft_lengths must be an integer array"),
        (
            {"allowed": mx.zeros((2, 4, 1), mx.uint32)},
            r"allowed must have shape \(2, 4, 2",
        ),
        ({"temperature": -1}, "temperature must be finite"),
        ({"top_p": mx.ones((3,))}, r"top_p must have shape \(\) or \(2,\)"),
        ({"filter_order": "first"}, "filter_order must be"),
        ({"draft_params": {"top_k": 5}}, "Filtered drafts need the draft_stats"),
        ({"draft_params": {"top_p": 0.9}}, "Filtered drafts need the draft_stats"),
        ({"draft_params": {"min_p": 0.1}}, "Filtered drafts need the draft_stats"),
        ({"draft_params": {"top_k": mx.array([0, 0])}}, "Filtered drafts need"),
        ({"draft_params": {"temperature": -2}}, "temperature must be finite"),
        ({"draft_params": {"temp": 1}}, "draft_params has no key 'temp'"),
        ({"draft_params": {"filter_order": "x"}}, "filter_order must be"),
        (
            {"draft_logits": None, "draft_params": {"temperature": 1}},
            "need draft_logits",
        ),
        (
            {"draft_logits": None, "draft_stats": mx.zeros((2, 3, 3))},
            "need draft_logits",
        ),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=r"^\[verify_draft\] .*" + message):
        verify_draft(**{**GOOD, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"draft_params": {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 0.5}},
        {"draft_params": {"top_k": 5}, "draft_stats": mx.zeros((2, 3, 3))},
        {"draft_params": {"temperature": mx.array([0.5, 1.0])}},
        {"allowed": mx.zeros((2, 4, 2), mx.int32)},
    ],
)
def test_takes(change):
    mx.eval(verify_draft(**{**GOOD, **change}))


def test_wrong_kinds_are_type_errors():
    for change in ({"draft_tokens": [[0, 0, 0]]}, {"draft_params": 1}, {"top_k": "5"}):
        with pytest.raises(TypeError):
            verify_draft(**{**GOOD, **change})
