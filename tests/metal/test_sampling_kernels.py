"""sample and verify_draft, emulated, against the float64 oracle."""

import ctypes

import host
import numpy as np
import oracle
import pytest
from cases import (
    FILTERS,
    NEAR,
    ORDERS,
    bits,
    check_sample,
    check_verify,
    logits,
    rounded,
    verify_case,
)
from host import DTYPES, Host

# Around the sizes of a mask word, of a group and of a chunk.
SIZES = [1, 2, 31, 33, 37, 255, 256, 257, 700]


def random_host(machine, rng):
    """Any geometry and order of threads: the results must not depend on them."""
    return Host(
        machine,
        chunk=int(rng.choice([256, 512, 4096])),
        threads=int(rng.choice([32, 96, 256])),
        seed=int(rng.integers(0, 3)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_sample_equals_the_oracle(machine, params, order, dtype):
    rng = np.random.default_rng(0)
    params = {**params, "filter_order": order}
    near = rows = 0
    for V in [*SIZES, 5000]:
        x = rounded(rng.normal(0, 3, (2, V)), dtype)
        u = rng.random((2, 2), np.float32)
        tokens, stats = random_host(machine, rng).sample(x, u, dtype, **params)
        near += check_sample(x, u, params, tokens, stats)
        rows += 2
    assert near <= 0.15 * rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["point", "temperature", "stats"])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_verify_draft_equals_the_oracle(machine, params, kind, dtype):
    rng = np.random.default_rng(1)
    near = rows = 0
    for V in SIZES:
        params = {**params, "filter_order": ORDERS[rng.integers(2)]}
        drafts, ragged = int(rng.integers(0, 4)), bool(rng.integers(2))
        case, q = verify_case(rng, dtype, V, params, kind, 2, drafts, ragged)
        got = random_host(machine, rng).verify_draft(**case, dtype=dtype)
        near += check_verify(case, q, got)
        rows += 2
    assert near <= 0.2 * rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_eight_with_its_own_parameters(machine, dtype):
    rng = np.random.default_rng(2)
    B, K, V = 8, 2, 400
    columns = {
        "temperature": [0.0, 0.5, 1.0, 2.0, 1.0, 0.7, 1.0, 1.5],
        "top_k": [0, 10, 300, 1000, 0, 1, 0, 50],
        "top_p": [0.5, 1.0, 0.9, 0.3, 1.0, 1.0, 1.0, 0.95],
        "min_p": [0.0, 0.0, 0.01, 0.3, 0.0, 0.0, 0.2, 0.0],
    }
    case, _ = verify_case(rng, dtype, V, {}, "point", B, K)
    arrays = {name: np.array(column) for name, column in columns.items()}
    got = Host(machine).verify_draft(**case, **arrays, dtype=dtype)
    sampled = Host(machine).sample(
        case["target"].reshape(B * 3, V),
        case["uniforms"].repeat(3, axis=0)[:, :2].copy(),
        dtype,
        batch=B,
        **arrays,
    )
    for b in range(B):
        params = {name: column[b] for name, column in columns.items()}
        one = {name: x[b : b + 1] for name, x in case.items()}
        assert (
            check_verify({**one, **params}, [[None] * K], [x[b : b + 1] for x in got])
            == 0
        )
        rows = slice(3 * b, 3 * b + 3)
        check_sample(
            case["target"][b],
            case["uniforms"][[b] * 3, :2],
            params,
            *(x[rows] for x in sampled),
        )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_log_probabilities_can_be_left_out(machine, params, order):
    rng = np.random.default_rng(6)
    shape = {"temperature": 0.6, **params, "filter_order": order}
    for kind in ("point", "temperature"):
        case, _ = verify_case(rng, "float32", 700, shape, kind, batch=16)
        emulated = random_host(machine, rng)
        given = emulated.verify_draft(**case)
        tokens, accepted, logprobs = emulated.verify_draft(**case, logprobs=False)
        np.testing.assert_array_equal(tokens, given[0])
        np.testing.assert_array_equal(accepted, given[1])
        assert (logprobs == -7).all()  # not written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0, 2], ids=["flat", "normal"])
@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.95}, {"top_k": 9000}],
    ids=str,
)
def test_a_large_vocabulary(machine, params, scale, dtype):
    """By the definition of the filters: near ties are the rule in such rows."""
    rng = np.random.default_rng(3)
    x = rounded(rng.normal(0, scale, (1, 248320)), dtype)
    u = rng.random((1, 2), np.float32)
    tokens, stats = Host(machine).sample(x, u, dtype, **params)
    row = x[0].astype(np.float64)
    log_sum, threshold, _ = stats[0].astype(np.float64)
    if k := params.get("top_k"):
        assert (row > threshold).sum() < k
        p = oracle.softmax(np.where(row >= np.sort(row)[-k], row, -np.inf))
    else:
        p = oracle.softmax(row)
    if top_p := params.get("top_p"):
        assert p[row >= threshold].sum() >= top_p - 1e-6
        assert p[row > threshold].sum() < top_p + 1e-6
    q = np.where(row >= threshold, np.exp(row - log_sum), 0)
    assert abs(q.sum() - 1) < 2e-6
    border = np.cumsum(q)[tokens[0]] - oracle.uniform(u[0])
    assert -2e-6 < border < q[tokens[0]] + 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", [{}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_verify_draft_at_a_large_vocabulary(machine, params, dtype):
    rng = np.random.default_rng(4)
    kind = "stats" if params else "temperature"
    case, q = verify_case(rng, dtype, 248320, params, kind, batch=1, drafts=1)
    case["target"] = rounded(rng.normal(0, 3, case["target"].shape), dtype)
    got = Host(machine).verify_draft(**case, dtype=dtype)
    assert check_verify(case, q, got) == 0


def test_results_do_not_depend_on_the_geometry(machine):
    rng = np.random.default_rng(5)
    for params in FILTERS:
        case, _ = verify_case(rng, "float32", 3000, params, "stats", 2, 3)
        results = [
            Host(machine, chunk, threads, seed).verify_draft(**case)
            for chunk, threads, seed in [(4096, None, 0), (256, 96, 1), (1024, 480, 2)]
        ]
        for tokens, accepted, logprobs in results[1:]:
            assert tokens.tolist() == results[0][0].tolist()
            assert accepted.tolist() == results[0][1].tolist()
            np.testing.assert_allclose(logprobs, results[0][2], atol=2e-6)


def test_unfiltered_rows_on_the_filtered_path(machine):
    """Where the host does not know the parameters it asks for the filtered path."""
    rng = np.random.default_rng(6)
    for kind in ("point", "temperature", "stats"):
        case, q = verify_case(rng, "float32", 700, {"temperature": 0.8}, kind)
        got = Host(machine).verify_draft(**case, filtered=True)
        assert check_verify(case, q, got) == 0


@pytest.mark.parametrize("params", [{}, {"top_k": 3}], ids=str)
def test_only_rows_up_to_the_first_rejection_count(machine, params):
    B, K, V = 6, 3, 64
    bad = [np.nan, np.inf, -np.inf, None, None, None]
    target, draft = np.zeros((B, K + 1, V)), np.zeros((B, K, V))
    tokens = np.zeros((B, K), np.int32)
    for b, value in enumerate(bad):
        if value is not None:
            target[b, 2] = value
    draft[3, 2] = np.nan
    draft[4, 2, 0] = -np.inf  # q of the draft is 0
    tokens[5, 2] = V
    target[:, 1, 0] = -5  # rejected by a coin above its probability
    x, y = target.astype(np.float32), draft.astype(np.float32)
    for coin, count in [(0.9, 1), (0.0, 1 if params else -1)]:
        u = np.array([[0.0, coin, 0.0, 0.5, 0.5]] * B, np.float32)
        for host_ in (Host(machine), Host(machine, threads=32, seed=1)):
            emitted, accepted, logprobs = host_.verify_draft(
                x, tokens, y, uniforms=u, **params
            )
            assert accepted.tolist() == [count] * B
            assert (emitted >= 0).sum(axis=1).tolist() == [count + 1] * B
            assert (logprobs[:, count + 1 :] == 0).all()


@pytest.mark.parametrize("filtered", [False, True])
def test_draft_logits_count_where_they_are_used(machine, filtered):
    """With stats, the row of an accepted draft only counts at the draft."""
    target = np.zeros((3, 2, 64), np.float32)
    target[:, 0, 0] = -1
    draft = np.zeros((3, 1, 64), np.float32)
    u = np.zeros((3, 2), np.float32)
    tokens, stats = Host(machine).sample(draft[:, 0].copy(), u)
    draft[1, 0, 9], draft[2, 0, 63] = np.nan, np.inf
    known = {"draft_stats": stats[:, None], "filtered": filtered}
    for coin, flags in [(0.9, [0, -1, -1]), (0.0, [1, 1, 1])]:
        u = np.array([[coin, 0.5, 0.0]] * 3, np.float32)
        got = Host(machine).verify_draft(
            target, tokens[:, None], draft, uniforms=u, **known
        )
        assert got[1].tolist() == flags
    got = Host(machine).verify_draft(
        target, tokens[:, None], draft, uniforms=u, filtered=filtered
    )
    assert got[1].tolist() == [1, -1, -1]


@pytest.mark.parametrize("filtered", [False, True])
def test_bad_input_flags_its_own_sequence(machine, filtered):
    V = 5
    row = np.log([0.1, 0.2, 0.3, 0.2, 0.2]).astype(np.float32)
    target = np.tile(row, (8, 4, 1))
    target[1, 1], target[2, 1], target[3, 1, 4] = np.nan, -np.inf, np.inf
    drafts = np.full((8, 3), 2)
    drafts[4] = [2, -1, -1]
    lengths = np.array([3, 3, 3, 3, 1, 4, -1, 3])
    temperature = np.array([1, 1, 1, 1, 1, 1, 1, -1.0])
    u = np.tile(np.array([0, 0, 0, 0.95, 0], np.float32), (8, 1))
    tokens, accepted, logprobs = Host(machine).verify_draft(
        target,
        drafts,
        uniforms=u,
        draft_lengths=lengths,
        temperature=temperature,
        filtered=filtered,
    )
    assert accepted.tolist() == [3, -1, -1, -1, 1, -1, -1, -1]
    assert tokens[0].tolist() == [2, 2, 2, 4]
    assert tokens[4].tolist() == [2, 4, -1, -1]
    for b in (1, 2, 3, 5, 6, 7):
        assert tokens[b].tolist() == [-1] * 4 and not logprobs[b].any()
    for name, value in [("top_k", 0.5), ("top_k", -1), ("top_p", 0), ("min_p", 2)]:
        got = Host(machine).verify_draft(
            target[:1], drafts[:1], uniforms=u[:1], **{name: value}
        )
        assert got[1].tolist() == [-1]
    assert V > tokens.max()


def test_sample_flags_bad_rows(machine):
    x = np.zeros((8, 300), np.float32)
    x[1, 7], x[2, 299], x[3, 5], x[4] = np.nan, -np.nan, np.inf, -np.inf
    columns = {"temperature": np.array([1, 1, 1, 1, 1, -1, np.nan, 0])}
    u = np.full((8, 2), 0.5, np.float32)
    for extra, last in [({}, 8), ({"top_k": 5}, 8), (columns, 5)]:
        tokens, stats = Host(machine).sample(x, u, **extra)
        bad = [*range(1, 5), *range(last, 7)]
        assert (tokens[bad] == -1).all() and np.isnan(stats[bad]).all()
        good = [r for r in range(8) if r not in bad]
        assert (tokens[good] >= 0).all() and not np.isnan(stats[good]).any()


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 5}], ids=str)
def test_a_flaw_counts_wherever_it_is(machine, params):
    """Before and behind larger logits of its lane, its simdgroup and its chunk."""
    rising = np.linspace(-5, 5, 3000, dtype=np.float32)
    x = np.stack([rising, rising[::-1]] * 6)
    for r, value in enumerate([np.nan, np.nan, np.inf, np.inf] * 3):
        x[r, [5, 1029, 2999][r % 3]] = value
    u = np.full((12, 2), 0.5, np.float32)
    for chunk, threads in [(4096, 32), (1024, 64), (256, 64)]:
        tokens, stats = Host(machine, chunk, threads).sample(x, u, **params)
        assert (tokens == -1).all() and np.isnan(stats).all()


def test_greedy_takes_the_lowest_id(machine):
    x = np.array([[0, 3, 1, 3], [-0.0, 0, -1, 0]], np.float32)
    u = np.full((2, 2), 0.9, np.float32)
    for temperature in (0.0, 1e-40, -0.0):
        tokens, _ = Host(machine).sample(x, u, temperature=temperature)
        assert tokens.tolist() == [1, 0]
    tokens, _ = Host(machine).sample(
        np.zeros((1, 9000), np.float32), u[:1], temperature=0
    )
    assert tokens.tolist() == [0]


def test_zeros_of_both_signs_are_ties(machine):
    x = np.array([[-0.0, 0.0, -1.0, -0.0]], np.float32)
    u = np.array([[0.99, 0]], np.float32)
    for params in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        tokens, stats = Host(machine).sample(x, u, **params)
        assert tokens.tolist() == [3] and abs(stats[0, 0] - np.log(3)) < 1e-6


def test_draws_have_48_bits(machine):
    x = np.array([[np.log(2.0**-30), 0]], np.float32)
    for low, token in [(2.0**-7, 0), (2.0**-5, 1)]:
        u = np.array([[0, low]], np.float32)
        assert Host(machine).sample(x, u)[0].tolist() == [token]


def test_no_uniform_leads_out_of_the_vocabulary(machine):
    """Whatever it is, and never to an id without probability."""
    x = np.full((6, 700), -np.inf, np.float32)
    x[:, [3, 600]] = 0
    values = [0, 1 - 2**-24, 1, 7e30, -1, np.nan]
    u = np.array([[v, v] for v in values], np.float32)
    for params in ({}, {"top_k": 2}):
        tokens, _ = Host(machine, chunk=256).sample(x, u, **params)
        assert tokens.tolist() == [3, 600, 600, 600, 3, 3]


def test_coins_are_compared_strictly(machine):
    below = 1 - 2**-24
    for coin, row, accepted in [
        (0.0, [0.0, 1.0], 0),
        (0.0, [1e-30, 1.0], 1),
        (below, [1.0, 0.0], 1),
        (0.5, [0.5, 0.5], 0),
        (0.5 - 2**-25, [0.5, 0.5], 1),
    ]:
        with np.errstate(divide="ignore"):
            target = np.log(np.array([[row, [0.5, 0.5]]], np.float32))
        u = np.array([[coin, 0, 0]], np.float32)
        got = Host(machine).verify_draft(target, np.array([[0]]), uniforms=u)
        assert got[1].tolist() == [accepted], (coin, row)


def test_equal_distributions_are_accepted_by_every_coin(machine):
    rng = np.random.default_rng(7)
    for temperature in (1.0, 0.1, 0.01):
        x = logits(rng, (4, 2, 900), "float32")
        draft = x[:, :1].copy()
        u = np.tile(np.array([1 - 1e-5, 0.5, 0.5], np.float32), (4, 1))
        params = {"temperature": temperature}
        tokens, stats = Host(machine).sample(draft[:, 0], u[:, 1:].copy(), **params)
        for known in ({}, {"draft_stats": stats[:, None]}):
            got = Host(machine).verify_draft(
                x, tokens[:, None], draft, uniforms=u, **known, **params
            )
            assert got[1].tolist() == [1] * 4


def test_an_empty_residual_falls_back_to_the_target(machine):
    """p = q, and a coin that no generator gives."""
    x = np.log(np.array([[[0.25, 0.25, 0.5]] * 2], np.float32))
    for params in ({}, {"top_k": 3}):
        for u, token in [(0.1, 0), (0.3, 1), (0.9, 2)]:
            got = Host(machine).verify_draft(
                x,
                np.array([[0]]),
                x[:, :1].copy(),
                uniforms=np.array([[1.5, u, 0]], np.float32),
                **params,
            )
            assert got[1].tolist() == [0] and got[0].tolist() == [[token, -1]]


def test_views_are_read_in_place(machine):
    rng = np.random.default_rng(8)
    case, q = verify_case(rng, "float16", 320, {"temperature": 0.7}, "temperature")
    for pad in (8, 5):  # aligned to 16 bytes, and not
        views = dict(case)
        for name in ("target", "draft"):
            wide = np.pad(host.store(case[name], "float16"), [(1, 0), (1, 2), (0, pad)])
            views[name] = wide[1:, 1:-2, :-pad]
        views["uniforms"] = np.pad(case["uniforms"], [(0, 0), (0, 3)])[:, :-3]
        views["draft_tokens"] = (
            case["draft_tokens"].astype(np.int32).repeat(2, 1)[:, ::2]
        )
        got = Host(machine).verify_draft(**views, dtype="float16")
        assert check_verify(case, q, got) == 0


def test_one_mask_row_for_all(machine):
    rng = np.random.default_rng(9)
    x = rng.normal(0, 2, (3, 100)).astype(np.float32)
    u = rng.random((3, 2), np.float32)
    words = bits(rng.random((1, 100)) < 0.3)
    allowed = np.broadcast_to(words, (3, words.shape[1]))
    for params in ({}, {"top_k": 5}):
        tokens, stats = Host(machine).sample(x, u, allowed=allowed, **params)
        assert check_sample(x, u, params, tokens, stats, allowed) == 0


def test_probabilities_are_within_the_bound(machine):
    """The worst error of a probability in fp32, over rows of 50,000 logits."""
    rng = np.random.default_rng(10)
    worst = 0
    for scale, params in [(1, {}), (4, {"temperature": 0.5}), (4, {"top_p": 0.99})]:
        x = rng.normal(0, scale, (1, 50_000)).astype(np.float32)
        _, stats = Host(machine).sample(x, np.zeros((1, 2), np.float32), **params)
        log_sum, threshold, inverse = stats[0].astype(np.float64)
        q = np.where(x[0] >= threshold, np.exp(x[0] * inverse - log_sum), 0)
        p = oracle.shape(x[0], **params).p
        worst = max(worst, np.abs(q - p).max() / p.max())
    assert worst < 1e-5


def test_structs_have_no_padding():
    for struct in host.STRUCTS.values():
        sizes = [ctypes.sizeof(kind) for _, kind in struct._fields_]
        assert ctypes.sizeof(struct) == sum(sizes)
    assert NEAR < 1e-5
