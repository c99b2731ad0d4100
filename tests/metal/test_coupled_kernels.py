"""verify_coupled, emulated, against the float64 oracle."""

import cases
import mlx.core as mx
import numpy as np
import oracle
import pytest
from host import DTYPES, Host
from test_sampling_kernels import SIZES, random_host

from mlx_mtp import ops

# A float32 race may have another winner where two times are closer than this.
NEAR = 2e-5


def check(case, got):
    """Asserts that sequences agree with the oracle. Returns how many are too close."""
    names = ("temperature", "top_k", "top_p", "min_p", "filter_order")
    params = {name: case[name] for name in names if name in case}
    tokens, accepted, logprobs = got
    batch, T, _ = case["target"].shape
    lengths = case.get("draft_lengths", [T - 1] * batch)
    near = 0
    for b in range(batch):
        expected, count, logp, margin = oracle.coupled(
            case["target"][b],
            case["draft_tokens"][b][: lengths[b]],
            case["seed"][b],
            int(case["position"][b]),
            allowed=case["allowed"][b] if "allowed" in case else None,
            **{k: v[b] if np.ndim(v) else v for k, v in params.items()},
        )
        if margin < NEAR:
            near += 1
            continue
        assert accepted[b] == count
        assert tokens[b].tolist() == expected + [-1] * (T - len(expected))
        np.testing.assert_allclose(logprobs[b, : len(logp)], logp, atol=3e-6)
        assert not logprobs[b, len(logp) :].any()
    return near


def coupled_case(rng, dtype, V, params, batch=2, drafts=3):
    """Arguments whose drafts are often the tokens of the same race."""
    x = cases.logits(rng, (batch, drafts + 1, V), dtype)
    case = {
        "target": x,
        "seed": rng.integers(0, 2**32, (batch, 2), np.uint32),
        "position": np.array([7, 2**31 - 2])[:batch],
        **params,
    }
    tokens = np.zeros((batch, drafts), np.int32)
    for b in range(batch):
        full = oracle.coupled(x[b], [-1] * drafts, case["seed"][b], 0, **params)
        tokens[b] = full[0][0] if full[0] else 0
        for i in range(drafts):
            at = int(case["position"][b]) + i
            found = oracle.coupled(x[b, i : i + 1], [], case["seed"][b], at, **params)
            if found[0] and rng.random() < 0.7:
                tokens[b, i] = found[0][0]
    if rng.random() < 0.3:
        case["draft_lengths"] = rng.integers(0, drafts + 1, batch)
    return {**case, "draft_tokens": tokens}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", cases.FILTERS, ids=str)
def test_verify_coupled_equals_the_oracle(machine, params, dtype):
    rng = np.random.default_rng(4)
    near = rows = accepted = 0
    for V in SIZES:
        params = {**params, "filter_order": cases.ORDERS[rng.integers(2)]}
        case = coupled_case(rng, dtype, V, params, drafts=int(rng.integers(0, 4)))
        got = random_host(machine, rng).verify_coupled(**case, dtype=dtype)
        near += check(case, got)
        accepted += got[1].sum()
        rows += 2
    assert near <= 0.2 * rows
    assert accepted > 3


def test_masks_unusable_rows_and_parameters_of_each_sequence(machine):
    rng = np.random.default_rng(5)
    B, V = 6, 700
    case = {
        "target": rng.normal(0, 2, (B, 3, V)).astype(np.float32),
        "seed": rng.integers(0, 2**32, (B, 2), np.uint32),
        "position": np.arange(B) - 2,
        "temperature": np.array([1, 0, 0.5, 1, 1, 1], np.float32),
        "top_k": np.array([0, 3, 9, 0, 0, 2.5], np.float32),
    }
    case["target"][3, 0, 5], case["target"][4, 1, V - 1] = np.nan, np.inf
    allowed = rng.random((B, 3, V)) < 0.3
    allowed[3, 0, 5] = allowed[4, 1, V - 1] = True
    words = cases.bits(allowed)
    first = np.array(
        Host(machine).verify_coupled(
            **case, draft_tokens=np.zeros((B, 2)), allowed=words
        )[0]
    )
    drafts = np.stack([first[:, 0], np.full(B, V)], axis=1)
    options = {**case, "draft_tokens": drafts}
    got = Host(machine, threads=32).verify_coupled(**options, allowed=words)
    assert got[1].tolist() == [1, 1, 1, -1, -1, -1]
    assert (got[0][3:] == -1).all() and not got[2][3:].any()
    sound = {name: x[:3] for name, x in {**options, "allowed": words}.items()}
    assert check(sound, [x[:3] for x in got]) == 0
    assert allowed[np.arange(3), 0, got[0][:3, 0]].all()
    # Lengths out of range flag their sequence, a draft after the end is not read.
    lengths = np.array([0, -1, 3, 0, 2, 2])
    got = Host(machine).verify_coupled(**options, allowed=words, draft_lengths=lengths)
    assert got[1].tolist() == [0, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.95}, {"top_k": 20}], ids=str)
def test_a_large_vocabulary(machine, params):
    rng = np.random.default_rng(6)
    target = rng.normal(0, 4, (1, 2, 248320)).astype(np.float32)
    case = {
        "target": target,
        "seed": np.array([[3, 4]], np.uint32),
        "position": np.array([11]),
        "draft_tokens": np.array([[1]], np.int32),
        **params,
    }
    got = Host(machine).verify_coupled(**case)
    row = target[0, 0].astype(np.float64)
    p = oracle.shape(row, **params).p
    kept = np.flatnonzero(p)
    cpu = ops.verify_coupled(
        mx.array(target),
        mx.array([[1]]),
        seed=mx.array(case["seed"]),
        position=mx.array([11]),
        **params,
        stream=mx.cpu,
    )
    assert got[0].tolist() == cpu[0].tolist() and got[0][0, 0] in kept
    np.testing.assert_allclose(got[2], np.array(cpu[2]), atol=3e-6)
