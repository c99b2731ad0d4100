"""The integer arithmetic of the kernels against Python's."""

import battery
import numpy as np
import pytest
from host import DTYPES

pytestmark = pytest.mark.emulated


def test_scale_by_is_exact(machine):
    total, u, out = battery.scale_by(machine)
    expected = [(int(t) * int(x)) >> 48 for t, x in zip(total, u, strict=True)]
    assert out.tolist() == expected


def test_fine_uniform_has_48_bits(machine):
    high, low, out = battery.fine_uniform(machine)
    for h, x, got in zip(high.tolist(), low.tolist(), out.tolist(), strict=True):
        h, x = (min(v, 1.0) if v > 0 else 0.0 for v in (h, x))
        assert got == int(h * 2**48) + int(x * 2**24)


def test_pick_finds_the_first_lane_past_the_threshold(machine):
    weights, thresholds, lanes, rests = battery.pick(machine)
    for w, threshold, lane, rest in zip(
        weights.reshape(-1, 32).tolist(),
        thresholds.tolist(),
        lanes.reshape(-1, 32).tolist(),
        rests.reshape(-1, 32).tolist(),
        strict=True,
    ):
        ends = np.cumsum(np.array(w, object))
        hits = [i for i in range(32) if w[i] and ends[i] > threshold]
        with_weight = [i for i in range(32) if w[i]]
        if hits:
            expected = hits[0], threshold - (ends[hits[0]] - w[hits[0]])
        else:
            expected = (with_weight or [-1])[-1], 2**64 - 1
        assert set(lane) == {expected[0]} and set(rest) == {expected[1]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_order_like_the_values(machine, dtype):
    z, keys, back = battery.keys(machine, dtype)
    np.testing.assert_array_equal(back, z)
    order = np.argsort(z, kind="stable")
    z, keys = z[order], keys[order]
    assert (keys[:-1] <= keys[1:]).all()
    assert ((keys[:-1] == keys[1:]) == (z[:-1] == z[1:])).all()
