"""sample against its oracle, its statistics, and the distribution of its draws."""

import threading

import mlx.core as mx
import numpy as np
import oracle
import pytest
from arrays import DTYPES, LAYOUTS, array, bits, values
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from mlx_mtp.ops import sample

ORDERS = ["temperature_first", "temperature_last"]
FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 1},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.5, "top_k": 3000},
    {"temperature": 1.5, "top_p": 0.9},
    {"top_p": 0.1},
    {"temperature": 0.7, "min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 60, "top_p": 0.8, "min_p": 0.02},
]
# The op may differ from float64 where a decision is closer than this.
NEAR = 3e-6


def draft_probability(stats, logits):
    """What the statistics of one row say about each of its float64 logits."""
    log_sum, threshold, inverse = np.asarray(stats, np.float64)
    return np.where(logits >= threshold, np.exp(logits * inverse - log_sum), 0)


def check_rows(logits, u, params, tokens, stats, allowed=None):
    """Compares rows with the oracle. Returns how many were too close to tell."""
    near = 0
    for r, row in enumerate(logits):
        mask = None if allowed is None else allowed[r]
        token, margin = oracle.sample(row, u[r], allowed=mask, **params)
        if margin < NEAR:
            near += 1
            continue
        assert tokens[r] == token
        if token < 0:
            assert np.isnan(stats[r]).all()
        elif params.get("temperature", 1) == 0:
            assert stats[r].tolist() == [0, row.max(), np.inf]
        else:
            p = oracle.shape(row, allowed=mask, **params).p
            q = draft_probability(stats[r], oracle.masked(row, mask))
            np.testing.assert_allclose(q, p, atol=1e-6, rtol=1e-5)
    return near


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_equals_the_oracle(params, order, dtype):
    rng = np.random.default_rng(0)
    params = {**params, "filter_order": order}
    near = rows = 0
    # Around the sizes of a mask word and a block, and past the longest list.
    for V in [1, 2, 31, 33, 255, 256, 257, 700, 5000]:
        x = array(rng.normal(0, 3, (4, V)), dtype)
        u = rng.random((4, 2)).astype(np.float32)
        tokens, stats = sample(x, mx.array(u), **params)
        near += check_rows(values(x), u, params, np.array(tokens), np.array(stats))
        rows += 4
    assert near <= 0.1 * rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_takes_any_layout_and_mask(layout, dtype, masked):
    rng = np.random.default_rng(1)
    x = array(rng.normal(0, 2, (3, 2, 300)), dtype, layout)
    u = rng.random((3, 2, 2)).astype(np.float32)
    allowed = bits(rng.random((3, 2, 300)) < 0.4) if masked else None
    mask = mx.array(allowed) if masked else None
    if masked and layout == "last axis apart":
        mask = mx.repeat(mask, 3, axis=-1)[..., ::3]
    params = {"top_k": 50, "top_p": 0.9}
    tokens, stats = sample(x, mx.array(u), allowed=mask, **params)
    near = check_rows(
        values(x).reshape(6, -1),
        u.reshape(6, 2),
        params,
        np.array(tokens).reshape(6),
        np.array(stats).reshape(6, 3),
        allowed.reshape(6, -1) if masked else None,
    )
    assert near <= 1


@st.composite
def rows_with_ties(draw):
    """Few distinct values, so that every threshold falls on a tie."""
    levels = draw(st.lists(st.integers(-12, 12), min_size=1, max_size=6))
    return np.array(
        draw(st.lists(st.sampled_from([*levels, -np.inf]), min_size=1, max_size=600)),
        np.float32,
    )


@settings(max_examples=300, deadline=None)
@given(
    rows_with_ties(),
    st.floats(0, 1, exclude_max=True, width=32),
    st.sampled_from([0, 0.3, 1, 2]),
    st.sampled_from([0, 1, 2, 5, 100, 10**6]),
    st.sampled_from([1, 0.999, 0.7, 0.2]),
    st.sampled_from([0, 0.03, 0.5]),
    st.sampled_from(ORDERS),
)
def test_keeps_all_ties_at_a_threshold(row, u, temperature, k, top_p, min_p, order):
    params = {
        "temperature": temperature,
        "top_k": k,
        "top_p": top_p,
        "min_p": min_p,
        "filter_order": order,
    }
    u = np.array([[u, 0]], np.float32)
    tokens, stats = sample(mx.array(row[None]), mx.array(u), **params)
    check_rows(row[None], u, params, np.array(tokens), np.array(stats))


@pytest.mark.parametrize("V", [700, 20000])
@pytest.mark.parametrize("k", [1, 5, 100, 650])
def test_top_k_of_a_flat_row_keeps_everything(V, k):
    u = mx.array([[0.999, 0.0]])
    tokens, stats = sample(mx.zeros((1, V)), u, top_k=k, top_p=0.9)
    assert tokens.item() == int(0.999 * V)
    assert abs(stats[0, 0].item() - np.log(V)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0, 2], ids=["flat", "normal"])
@pytest.mark.parametrize(
    "k, top_p", [(0, 1), (0, 0.95), (20, 0.95), (400, 1), (9000, 1)]
)
def test_large_vocabulary(k, top_p, scale, dtype):
    """By the definition of the filters: near ties are the rule in such rows."""
    rng = np.random.default_rng(2)
    x = array(rng.normal(0, scale, (2, 151936)), dtype)
    u = rng.random((2, 2)).astype(np.float32)
    tokens, stats = sample(x, mx.array(u), top_k=k, top_p=top_p)
    for r, row in enumerate(values(x)):
        threshold = stats[r, 1].item()
        if k:
            assert (row > threshold).sum() < k
            row_k = np.where(row >= np.sort(row)[-k], row, -np.inf)
        else:
            row_k = row
        p = oracle.softmax(row_k)
        assert p[row >= threshold].sum() >= top_p - 1e-6
        if top_p < 1:
            assert p[row > threshold].sum() < top_p + 1e-6
        q = draft_probability(stats[r], row)
        assert abs(q.sum() - 1) < 2e-6
        token = tokens[r].item()
        border = np.cumsum(q)[token] - oracle.uniform(u[r])
        assert -2e-6 < border < q[token] + 2e-6


def test_parameters_of_each_sequence():
    rng = np.random.default_rng(3)
    x = rng.normal(0, 2, (4, 3, 400)).astype(np.float32)
    u = rng.random((4, 3, 2)).astype(np.float32)
    columns = {
        "temperature": [0.0, 0.5, 1.0, 2.0],
        "top_k": [0, 10, 300, 1000],
        "top_p": [0.5, 1.0, 0.9, 0.3],
        "min_p": [0.0, 0.0, 0.01, 0.3],
    }
    arrays = {name: mx.array(column) for name, column in columns.items()}
    tokens, stats = sample(mx.array(x), mx.array(u), **arrays)
    for b in range(4):
        params = {name: column[b] for name, column in columns.items()}
        alone = sample(mx.array(x[b]), mx.array(u[b]), **params)
        assert alone[0].tolist() == tokens[b].tolist()
        assert alone[1].tolist() == stats[b].tolist()
        assert check_rows(x[b], u[b], params, np.array(tokens[b]), stats[b]) == 0


def test_numbers_are_as_arrays():
    """More of them than a GPU keeps copies of, and the first ones again."""
    rng = np.random.default_rng(5)
    temperatures = np.float32(0.25) + np.arange(1100, dtype=np.float32) / 256
    x = array(rng.normal(0, 3, (1, 50)))
    u = mx.array(rng.random((1, 2), np.float32))
    many = [mx.repeat(a, 1100, axis=0) for a in (x, u)]
    tokens, stats = sample(*many, temperature=mx.array(temperatures), top_p=0.9)
    for i in [*range(1100), *range(10)]:
        number = temperatures[i].item()
        for temperature in (number, mx.array([number])):
            token, one = sample(x, u, temperature=temperature, top_p=0.9)
            assert token.item() == tokens[i].item()
            assert mx.array_equal(one[0], stats[i])


def test_small_temperatures_are_greedy_and_finite():
    x = mx.array([[20.0, 10.0, 0.0]] * 4).astype(mx.float16)
    temperature = mx.array([-0.0, 1e-6, 1e-40, 1.0])
    u = mx.array([[1 - 2**-24, 0.0]] * 4)
    tokens, stats = sample(x, u, temperature=temperature)
    assert tokens.tolist()[:3] == [0, 0, 0]
    assert tokens[3].item() == 1
    assert stats[0].tolist() == stats[2].tolist() == [0, 20, np.inf]
    assert np.isfinite(np.array(stats)[[1, 3]][:, [0, 2]]).all()


def test_greedy_takes_the_lowest_id_on_ties():
    x = mx.array([[0.0, 3.0, 1.0, 3.0], [-0.0, 0.0, -1.0, 0.0]])
    tokens, _ = sample(x, mx.full((2, 2), 0.9), temperature=0)
    assert tokens.tolist() == [1, 0]
    for ids in ([10, 290], [7, 8], [31, 32, 33]):
        x = np.zeros((1, 300), np.float32)
        x[0, ids] = 1
        tokens, _ = sample(mx.array(x), mx.full((1, 2), 0.9), temperature=0)
        assert tokens.item() == ids[0]


def test_never_draws_a_token_without_probability():
    x = mx.array([[-np.inf, 0.0, -np.inf, 0.0, -np.inf]])
    for u in (0.0, 0.5, 1 - 2**-24):
        tokens, _ = sample(x, mx.array([[u, 1 - 2**-24]]))
        assert tokens.item() == (1 if u < 0.5 else 3)


def test_the_second_uniform_refines_the_first():
    x = mx.array([[np.log(2.0**-30), 0.0]])
    for low, token in [(0.8 * 2**-6, 0), (1.2 * 2**-6, 1)]:
        assert sample(x, mx.array([[0.0, low]]))[0].item() == token


def test_unusable_rows_are_flagged_alone():
    x = np.zeros((8, 300), np.float32)
    x[1, 7] = np.nan
    x[2, 299] = -np.nan
    x[3, 5] = np.inf
    x[4] = -np.inf
    parameters = {
        "temperature": mx.array([1, 1, 1, 1, 1, -1, np.nan, 1.0]),
        "top_k": mx.array([0, 0, 0, 0, 0, 0, 0, 2.5]),
    }
    for extra in ({}, {"top_k": 5}, {"temperature": 0}, parameters):
        tokens, stats = sample(mx.array(x), mx.full((8, 2), 0.5), **extra)
        last = 5 if extra is parameters else 8
        good = [0, *range(5, last)]
        bad = [r for r in range(8) if r not in good]
        assert all(tokens[r].item() >= 0 for r in good)
        assert all(tokens[r].item() == -1 for r in bad)
        assert np.isnan(np.array(stats)[bad]).all()
        assert not np.isnan(np.array(stats)[good]).any()


def test_nothing_allowed_is_unusable():
    allowed = mx.array(bits([[False] * 40, [True] * 39 + [False]]))
    for mask in (allowed, allowed.view(mx.int32)):
        tokens, _ = sample(mx.zeros((2, 40)), mx.full((2, 2), 0.999), allowed=mask)
        assert tokens.tolist() == [-1, 38]


ALPHA = 1e-4


def counts(tokens, V):
    return np.bincount(np.array(tokens).ravel(), minlength=V)


def p_value(observed, p):
    """Chi-square goodness of fit over the tokens that have any probability."""
    assert observed[p == 0].sum() == 0
    expected = p * observed.sum()
    return scipy_stats.chisquare(observed[p > 0], expected[p > 0]).pvalue


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5, "top_k": 4}, {"temperature": 1.6, "top_p": 0.7}],
    ids=str,
)
def test_draws_follow_the_distribution(params, order):
    rng = np.random.default_rng(4)
    row = rng.normal(0, 1.5, 7).astype(np.float32)
    u = mx.array(rng.random((60_000, 2), np.float32))
    x = mx.broadcast_to(mx.array(row), (60_000, 7))
    observed = counts(sample(x, u, filter_order=order, **params)[0], 7)
    p = oracle.shape(row, filter_order=order, **params).p
    assert p_value(observed, p) > ALPHA
    # The test is able to fail: a temperature 6 % off.
    biased = {**params, "temperature": params.get("temperature", 1) * 1.06}
    observed = counts(sample(x, u, filter_order=order, **biased)[0], 7)
    assert p_value(observed, p) < ALPHA


def test_is_lazy_and_compiles():
    rng = np.random.default_rng(5)
    x = mx.array(rng.normal(0, 2, (3, 500)).astype(np.float32))
    u = mx.array(rng.random((3, 2), np.float32))

    def both(x, u, t):
        first = sample(x, u, temperature=t, top_p=0.8)
        last = sample(x, u, temperature=t, top_p=0.8, filter_order="temperature_last")
        # Only nodes that are not outputs are merged.
        return [-y for y in (*first, *last)]

    t = mx.array([0.5, 1.0, 3.0])
    expected = [y.tolist() for y in both(x, u, t)]
    # The two orders are not merged as equal nodes.
    assert expected[1] != expected[3]
    for compiled in (mx.compile(both), mx.compile(both, shapeless=True)):
        assert [y.tolist() for y in compiled(x, u, t)] == expected
    assert [y.tolist() for y in compiled(x[:2], u[:2], t[:2])] == [
        y[:2] for y in expected
    ]


def test_runs_on_other_streams_and_threads():
    rng = np.random.default_rng(6)
    x = rng.normal(0, 2, (4, 100_000)).astype(np.float32)
    u = rng.random((4, 2)).astype(np.float32)
    expected = sample(mx.array(x), mx.array(u))[0].tolist()
    got = {}

    def work(i):
        stream = mx.new_stream(mx.cpu)
        a, b = mx.array(x), mx.array(u)
        for _ in range(5):
            tokens, stats = sample(a, b, stream=stream)
            mx.async_eval(tokens, stats)
            got.setdefault(i, []).append(tokens.tolist())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: [expected] * 5 for i in range(4)}


@pytest.mark.cpu
def test_allocates_nothing_of_the_size_of_a_row():
    x = array(np.zeros((2, 151936)), mx.bfloat16, "last axis apart")
    u = mx.full((2, 2), 0.5)
    mx.eval(x, u)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(sample(x, u, top_p=0.9))
    assert mx.get_peak_memory() - before < 4096


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_no_rows(shape):
    tokens, stats = sample(mx.zeros(shape), mx.zeros((*shape[:-1], 2)))
    assert tokens.shape == shape[:-1] and stats.shape == (*shape[:-1], 3)
    mx.eval(tokens, stats)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": mx.zeros((2, 0))}, "at least one value"),
        ({"logits": mx.array(1.0)}, "at least one value"),
        ({"logits": mx.zeros((2, 5), mx.int32)}, "logits must be float32, float16"),
        (
            {"uniforms": mx.zeros((2, 3))},
            r"must have shape \(2, 2\) but has .*\(2, 3\)",
        ),
        ({"uniforms": mx.zeros((2, 2), mx.float16)}, "uniforms must be float32"),
        ({"temperature": -1}, "temperature must be finite and at least 0 but is -1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"top_k": -1}, "top_k must be a whole number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\]"),
        ({"top_k": mx.array([1, 2, 3])}, r"top_k must have shape \(\) or \(2,\)"),
        ({"top_p": mx.array([True, True])}, "top_p must be a real array"),
        ({"filter_order": "last"}, "filter_order must be 'temperature_first' or"),
        ({"allowed": mx.zeros((2, 2), mx.uint32)}, r"allowed must have shape \(2, 1\)"),
        ({"allowed": mx.zeros((2, 1), mx.uint8)}, "allowed must be uint32"),
    ],
)
def test_refuses(change, message):
    arguments = {"logits": mx.zeros((2, 5)), "uniforms": mx.zeros((2, 2)), **change}
    with pytest.raises(ValueError, match=r"^\[sample\] .*" + message):
        sample(**arguments)


def test_has_no_gradient_and_no_vmap():
    x, u = mx.zeros((2, 5)), mx.zeros((2, 2))
    with pytest.raises(ValueError, match="Not implemented"):
        mx.vmap(lambda x, u: sample(x, u)[0])(x, u)
    with pytest.raises(ValueError, match="Not implemented"):
        mx.grad(lambda x: sample(x, u)[1].sum())(x)
