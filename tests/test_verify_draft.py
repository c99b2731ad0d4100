import mlx.core as mx
import numpy as np
import oracle
import pytest

from mlx_mtp import ops

FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("order", ["temperature_first", "temperature_last"])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_equals_the_oracle(params, order):
    rng = np.random.default_rng(0)
    params = {**params, "filter_order": order}
    B, K, V = 16, 3, 301
    target = rng.normal(0, 3, (B, K + 1, V)).astype(np.float32)
    draft = (target[:, :K] + rng.normal(0, 1, (B, K, V))).astype(np.float32)
    u = rng.random((B, K + 2)).astype(np.float32)
    draws = mx.array(rng.random((B, K, 2)).astype(np.float32))
    drafts, stats = ops.sample(mx.array(draft), draws, **params)
    tokens, accepted, logprobs = ops.verify_draft(
        mx.array(target),
        drafts,
        mx.array(draft),
        uniforms=mx.array(u),
        draft_stats=stats,
        **params,
    )
    near = 0
    for b in range(B):
        q = [oracle.shape(row, **params).p for row in draft[b]]
        emitted, count, logp, margin = oracle.verify(
            target[b], np.array(drafts[b]), q, u[b], **params
        )
        if margin < 1e-5:
            near += 1
            continue
        pad = [-1] * (K + 1 - len(emitted))
        assert accepted[b].item() == count
        assert tokens[b].tolist() == emitted + pad
        np.testing.assert_allclose(logprobs[b, : len(logp)], logp, atol=1e-5)
    assert near <= 1
