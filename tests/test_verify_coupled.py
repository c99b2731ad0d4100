"""verify_coupled against the float64 oracle, its noise, and its distribution."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from arrays import array
from scipy import stats

from mlx_mtp.ops import verify_coupled

PARAMS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {
        "temperature": 1.4,
        "top_k": 40,
        "top_p": 0.95,
        "filter_order": "temperature_last",
    },
    {"temperature": 0.0},
]


def keys(n, seed=0):
    return mx.random.split(mx.random.key(seed), n)


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        (
            (0x13198A2E, 0x03707344),
            (0x243F6A88, 0x85A308D3),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_the_oracle_has_the_published_values_of_threefry(key, counter, expected):
    assert oracle.threefry(key, counter) == expected


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 33, 700])
def test_equals_the_oracle(vocab, params, dtype):
    rng = np.random.default_rng(vocab)
    B, K = 3, 3
    logits = array(rng.normal(0, 2, (B, K + 1, vocab)), dtype)
    seed = keys(B, vocab)
    position = mx.array([0, 7, 2**31 - 2])
    # The first drafts are right more often than by chance.
    drafts = np.array(mx.argmax(logits[:, :K], axis=-1))
    out = verify_coupled(
        logits, mx.array(drafts), seed=seed, position=position, **params
    )
    tokens, accepted, logprobs = (np.array(x) for x in out)
    rows, words = np.array(logits.astype(mx.float32)), np.array(seed)
    for b in range(B):
        expected, n, lp, margin = oracle.coupled(
            rows[b], drafts[b], words[b], position[b].item(), **params
        )
        if margin < 1e-5:
            continue
        assert accepted[b] == n
        assert tokens[b].tolist() == expected + [-1] * (K - n)
        np.testing.assert_allclose(logprobs[b, : n + 1], lp, atol=1e-4)
        assert (logprobs[b, n + 1 :] == 0).all()


def test_tokens_have_the_shaped_distribution():
    rng = np.random.default_rng(3)
    row, n = rng.normal(0, 1.5, 30).astype(np.float32), 40_000
    params = {"temperature": 0.9, "top_p": 0.95}
    tokens, _, _ = verify_coupled(
        mx.broadcast_to(mx.array(row), (n, 1, 30)),
        mx.zeros((n, 0), mx.int32),
        seed=mx.broadcast_to(keys(1), (n, 2)),
        position=mx.arange(n),
        **params,
    )
    p = oracle.shape(row, **params).p
    counts = np.bincount(np.array(tokens)[:, 0], minlength=30)
    assert not counts[p == 0].any()
    assert stats.chisquare(counts[p > 0], n * p[p > 0]).pvalue > 1e-4


def test_rare_tokens_are_as_frequent_as_they_should_be():
    """Of 200,000 ids with one millionth each, 20 % of the draws."""
    vocab, n = 200_001, 600
    row = np.full(vocab, np.log(1e-6), np.float32)
    row[0] = np.log(0.8)
    tokens, _, _ = verify_coupled(
        mx.broadcast_to(mx.array(row), (n, 1, vocab)),
        mx.zeros((n, 0), mx.int32),
        seed=keys(n),
        position=mx.zeros((n,), mx.int32),
    )
    rare = np.array(tokens)[:, 0]
    rare = rare[rare > 0]
    assert abs(len(rare) - 0.2 * n) < 4 * np.sqrt(0.16 * n)
    assert stats.kstest(rare / vocab, "uniform").pvalue > 1e-4


def test_the_token_depends_on_seed_position_and_row_alone():
    rng = np.random.default_rng(4)
    logits = mx.array(rng.normal(0, 1, (1, 5, 100)).astype(np.float32))
    seed = keys(1)
    single = []
    for i in range(5):
        token, _, _ = verify_coupled(
            logits[:, i : i + 1],
            mx.zeros((1, 0), mx.int32),
            seed=seed,
            position=mx.array([11 + i]),
        )
        single.append(token.item())
    for drafts in (single[:4], [single[0], 99, 0, 0]):
        tokens, accepted, _ = verify_coupled(
            logits, mx.array([drafts]), seed=seed, position=mx.array([11])
        )
        n = accepted.item()
        assert tokens[0, : n + 1].tolist() == single[: n + 1]
    assert n == 1


def test_equal_noise_makes_near_distributions_agree():
    """Drafts by the same noise are accepted more often than independent draws."""
    rng = np.random.default_rng(5)
    n, vocab = 4000, 50
    p = rng.normal(0, 1.5, vocab)
    q = p + rng.normal(0, 0.3, vocab)
    at = {"seed": keys(n), "position": mx.zeros((n,), mx.int32)}
    none = mx.zeros((n, 0), mx.int32)

    def draw(row):
        rows = mx.broadcast_to(mx.array(row, mx.float32), (n, 1, vocab))
        return np.array(verify_coupled(rows, none, **at)[0])[:, 0]

    same = (draw(p) == draw(q)).mean()
    p, q = oracle.softmax(p), oracle.softmax(q)
    assert same > 0.7 > 2 * (p * q).sum()
    assert same <= np.minimum(p, q).sum() + 0.03


def test_masks_lengths_and_unusable_rows():
    logits = np.zeros((5, 3, 40), np.float32)
    logits[1, 0, 3] = np.nan
    logits[2, 1] = -np.inf
    logits[3, 2, 0] = np.inf
    allowed = np.zeros((5, 3, 2), np.uint32)
    allowed[..., 0] = 1 << 6
    free = verify_coupled(
        mx.array(logits),
        mx.full((5, 2), 41),
        seed=keys(5),
        position=mx.zeros((5,), mx.int32),
    )
    assert free[1].tolist() == [0, -1, 0, 0, 0]
    tokens, accepted, logprobs = verify_coupled(
        mx.array(np.zeros_like(logits)),
        mx.full((5, 2), 6),
        seed=keys(5),
        position=mx.zeros((5,), mx.int32),
        draft_lengths=mx.array([0, 1, 2, 3, -1]),
        allowed=mx.array(allowed),
    )
    assert accepted.tolist() == [0, 1, 2, -1, -1]
    assert tokens[:3].tolist() == [[6, -1, -1], [6, 6, -1], [6, 6, 6]]
    assert (np.array(logprobs) == 0).all()


def test_compiled_strided_and_empty_batches():
    rng = np.random.default_rng(6)
    wide = mx.array(rng.normal(0, 1, (4, 90, 3)).astype(np.float32))
    logits, drafts = wide.swapaxes(1, 2), mx.zeros((4, 2), mx.int8)
    seed, position = keys(8)[::2], mx.arange(8, dtype=mx.uint8)[::2]

    def run(*args):
        return verify_coupled(*args[:2], seed=args[2], position=args[3], top_k=20)

    expected = [x.tolist() for x in run(mx.contiguous(logits), drafts, seed, position)]
    for f in (run, mx.compile(run), mx.compile(run, shapeless=True)):
        got = f(logits, drafts, seed, position)
        assert [x.tolist() for x in got] == expected
    none = run(logits[:0], drafts[:0], seed[:0], position[:0])
    assert [x.shape for x in none] == [(0, 3), (0,), (0, 3)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_logits": mx.zeros((4, 40))}, r"target_logits must have shape \(B, T"),
        ({"target_logits": mx.zeros((2, 0, 40))}, "must have T = K"),
        ({"target_logits": mx.zeros((2, 4, 40), mx.int32)}, "must be float32, float16"),
        ({"draft_tokens": mx.zeros((2, 4), mx.int32)}, r"shape \(B=2, K=3\) but has"),
        ({"draft_tokens": mx.zeros((2, 3))}, "draft_tokens must be an integer array"),
        ({"seed": mx.zeros((2,), mx.uint32)}, r"seed must have shape \(B=2, 2=2\)"),
        ({"seed": mx.zeros((2, 2), mx.int32)}, "seed must be uint32"),
        ({"position": mx.zeros((2, 1), mx.int32)}, "position must have shape"),
        ({"position": mx.zeros((2,))}, "position must be an integer array"),
        ({"draft_lengths": mx.zeros((2,))}, "draft_lengths must be an integer array"),
        ({"allowed": mx.zeros((2, 4, 1), mx.uint32)}, "allowed must have shape"),
        ({"temperature": -1}, "temperature must be finite"),
        ({"filter_order": "first"}, "filter_order must be"),
    ],
)
def test_refuses(change, message):
    good = {
        "target_logits": mx.zeros((2, 4, 40)),
        "draft_tokens": mx.zeros((2, 3), mx.int32),
        "seed": mx.zeros((2, 2), mx.uint32),
        "position": mx.zeros((2,), mx.int32),
    }
    mx.eval(verify_coupled(**good))
    with pytest.raises(ValueError, match=r"^\[verify_coupled\] .*" + message):
        verify_coupled(**{**good, **change})
