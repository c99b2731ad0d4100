"""A slice of campaign.py, and the simple ops: emulated kernels and the CPU path."""

import campaign
import cases
import mlx.core as mx
import numpy as np
import oracle
import pytest
from host import DTYPES, Host

from mlx_mtp import ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["verify_draft", "verify_coupled"])
def test_verifying_decides_as_the_cpu(machine, op, dtype):
    counts, wrong = campaign.run(machine, dtype, 1200, seed=1, op=op)
    print(dtype, dict(counts))
    assert not wrong
    assert counts["near ties"] <= 5
    assert 10 < counts["flagged"] < 200 and counts["emitted"] > 1500


def test_the_campaign_can_fail(machine, monkeypatch):
    """A kernel that draws a little too early is seen."""

    class Early(Host):
        def launch(self, kernel, grid, threads, buffers):
            if kernel.startswith("verify_draft_draw"):
                buffers[3] = buffers[3] * np.float32(0.99)
            super().launch(kernel, grid, threads, buffers)

    monkeypatch.setattr(campaign.host, "Host", Early)
    _, wrong = campaign.run(machine, "float32", 600, seed=2)
    assert wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_draws_as_the_cpu(machine, dtype):
    rng = np.random.default_rng(3)
    for params in cases.FILTERS:
        for order in cases.ORDERS:
            params = {**params, "filter_order": order}
            x = cases.logits(rng, (6, 300), dtype)
            u = rng.random((6, 2), np.float32)
            arrays = (campaign.as_mx(x, dtype), mx.array(u))
            cpu = [np.array(a) for a in ops.sample(*arrays, **params, stream=mx.cpu)]
            got = Host(machine, threads=64).sample(x, u, dtype, **params)
            for r in range(6):
                if oracle.sample(x[r], u[r], **params)[1] > cases.NEAR:
                    assert got[0][r] == cpu[0][r]
                    np.testing.assert_allclose(got[1][r], cpu[1][r], rtol=2e-6)


def test_commit_rows_is_bit_equal_to_the_cpu(machine):
    rng = np.random.default_rng(4)
    for ring in (0, 5):
        cache = rng.normal(0, 1, (3, 2, 9, 16)).astype(np.float16)
        rows = rng.normal(0, 1, (3, 2, 4, 16)).astype(np.float16)
        start, count = rng.integers(-2, 12, (2, 3)).astype(np.int32)
        arrays = [mx.array(x) for x in (cache, rows, start, count)]
        cpu = ops.commit_rows(*arrays, ring=ring, stream=mx.cpu)
        got = Host(machine).commit_rows(cache, rows, start, count, ring)
        np.testing.assert_array_equal(got, np.array(cpu))
