"""commit_rows and gated_delta_replay, emulated, against the oracle."""

import host
import numpy as np
import oracle
import pytest
from host import DTYPES, Host


def commit_case(rng, dtype, B=2, H=2, S=6, T=3, D=5):
    cache = rng.integers(0, 100, (B, H, S, D)).astype(dtype)
    return cache, rng.integers(100, 200, (B, H, T, D)).astype(dtype)


@pytest.mark.parametrize("ring", [0, 1, 4, 6])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int64"])
@pytest.mark.parametrize("D", [1, 5, 8, 64])
def test_commit_rows_equals_the_oracle(machine, D, dtype, ring):
    rng = np.random.default_rng(0)
    for T in (1, 3, 8):
        for threads in (32, 256):
            cache, rows = commit_case(rng, dtype, T=T, D=D)
            start, count = rng.integers(-3, 9, (2, 2))
            out = Host(machine, threads=threads, seed=T).commit_rows(
                cache, rows, start, count, ring
            )
            expected = oracle.commit_rows(cache, rows, start, count, ring)
            np.testing.assert_array_equal(out, expected)


def test_commit_rows_clamps_every_start_and_count(machine):
    rng = np.random.default_rng(1)
    far = np.iinfo(np.int32)
    for start in (far.min, -7, -1, 0, 3, 6, 7, far.max):
        for count in (far.min, -1, 0, 2, 5, far.max):
            for ring in (0, 5, 6):
                cache, rows = commit_case(rng, "float16", T=7)
                got = Host(machine).commit_rows(
                    cache, rows, [start, 0], [count, 1], ring
                )
                expected = oracle.commit_rows(cache, rows, [start, 0], [count, 1], ring)
                np.testing.assert_array_equal(got, expected)


def test_commit_rows_reads_strided_rows_and_keeps_bits(machine):
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**16, (2, 3, 4, 8), np.uint16)  # NaN payloads among them
    cache = rng.integers(0, 2**16, (2, 3, 9, 8), np.uint16)
    # As attention gives them: (B, T, H, D) transposed.
    rows = np.ascontiguousarray(bits.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    for view in (rows, np.pad(bits, [(0, 0)] * 3 + [(0, 1)])[..., :-1]):
        got = Host(machine).commit_rows(cache, view, [7, 2], [4, 3])
        np.testing.assert_array_equal(
            got, oracle.commit_rows(cache, bits, [7, 2], [4, 3])
        )


def delta_case(rng, B, T, Hk, Hv, Dk, Dv, dtype):
    """Inputs as in a model: unit keys, decay and strength in (0, 1)."""

    def rounded(x):
        return host.load(host.store(x, dtype), dtype)

    return {
        "state": rng.normal(0, 1, (B, Hv, Dv, Dk)).astype(np.float32),
        "k": rounded(rng.normal(0, Dk**-0.5, (B, T, Hk, Dk))),
        "v": rounded(rng.normal(0, 1, (B, T, Hv, Dv))),
        "g": rng.random((B, T, Hv), np.float32),
        "beta": rng.random((B, T, Hv), np.float32),
        "steps": rng.integers(-1, T + 2, B),
        "q": rounded(rng.normal(0, Dk**-0.5, (B, T, Hk, Dk))),
    }


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
SHAPES = [
    {"B": 1, "T": 5, "Hk": 2, "Hv": 4, "Dk": 128, "Dv": 20},
    {"B": 2, "T": 3, "Hk": 1, "Hv": 2, "Dk": 128, "Dv": 24},
    {"B": 2, "T": 1, "Hk": 1, "Hv": 1, "Dk": 16, "Dv": 33},
    {"B": 3, "T": 3, "Hk": 1, "Hv": 3, "Dk": 7, "Dv": 1},
    {"B": 2, "T": 2, "Hk": 1, "Hv": 2, "Dk": 200, "Dv": 6},
    {"B": 1, "T": 4, "Hk": 1, "Hv": 1, "Dk": 256, "Dv": 4},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_delta_replay_equals_the_oracle(machine, shape, dtype):
    rng = np.random.default_rng(3)
    for threads, in_place in [(128, False), (32, True), (96, True)]:
        args = delta_case(rng, **shape, dtype=dtype)
        state, y = oracle.gated_delta_replay(*args.values())
        emulated = Host(machine, threads=threads, seed=threads // 32)
        got, got_y = emulated.gated_delta_replay(**args, dtype=dtype, in_place=in_place)
        np.testing.assert_allclose(got, state, rtol=0, atol=5e-6)
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(got_y, y, rtol=tolerance, atol=tolerance)
        del args["q"]
        again = emulated.gated_delta_replay(**args, dtype=dtype)
        np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s["Dk"] <= 128], ids=str)
def test_rows_of_a_lane_change_no_bit(machine, shape):
    args = delta_case(np.random.default_rng(7), **shape, dtype="bfloat16")
    for threads in (32, 64):
        one, two = (
            Host(machine, threads=threads, rows=rows).gated_delta_replay(
                **args, dtype="bfloat16"
            )
            for rows in (1, 2)
        )
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(one[1], two[1])


def test_gated_delta_replay_stops_at_its_steps(machine):
    rng = np.random.default_rng(4)
    args = delta_case(rng, 2, 4, 1, 2, 32, 5, "float32") | {"steps": [2, 0]}
    state, y = Host(machine).gated_delta_replay(**args)
    for name in ("k", "v", "g", "beta", "q"):
        args[name][:, 2:] = np.nan
    again, again_y = Host(machine).gated_delta_replay(**args)
    np.testing.assert_array_equal(again, state)
    np.testing.assert_array_equal(again_y, y)
    np.testing.assert_array_equal(state[1], args["state"][1])
    assert not y[1].any() and not y[0, 2:].any()


def test_gated_delta_replay_keeps_nan_in_its_head(machine):
    args = delta_case(np.random.default_rng(5), 1, 2, 1, 2, 33, 4, "float32")
    args["steps"] = [2]
    args["g"][0, 0, 1] = np.nan
    state, y = Host(machine).gated_delta_replay(**args)
    assert np.isnan(state[0, 1]).all() and np.isnan(y[..., 1, :]).all()
    assert np.isfinite(state[0, 0]).all() and np.isfinite(y[..., 0, :]).all()


@pytest.mark.emulated
def test_threadgroup_memory_stays_small(machine):
    """What metal/README.md promises."""
    rng = np.random.default_rng(6)
    x = rng.normal(0, 1, (1, 2, 300)).astype(np.float32)
    u = rng.random((1, 3), np.float32)
    used = []

    class Watch(Host):
        def launch(self, *args):
            super().launch(*args)
            used.append(machine.threadgroup_bytes())

    for params in ({}, {"top_k": 5}):
        Watch(machine).sample(x[0], u.repeat(2, 0)[:, :2].copy(), **params)
        Watch(machine).verify_draft(x, [[1]], uniforms=u, **params)
    assert max(used) <= 12 * 1024
