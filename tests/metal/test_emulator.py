"""The emulator finds what Metal forbids, and lets pass what it allows."""

import emulator
import numpy as np
import pytest

WRONG = emulator.HERE / "wrong.metal"
REFUSED = {
    "divergent_barrier": "returned",
    "two_barriers": "different barriers",
    "early_return": "returned",
    "late_barrier": "returned",
    "partial_simd": "wait|only a part",
    "divergent_simd": "different simd operations",
    "shuffle_from_left_lane": "a lane that returned",
    "too_much_memory": "32768",
}
SANITIZED = {
    "address": {"out_of_bounds": "heap-buffer-overflow"},
    "undefined": {"bad_conversion": "outside the range"},
    "thread": {
        "missing_barrier": "data race",
        "simd_is_no_barrier": "data race",
        "device_race": "data race",
        "race_between_groups": "data race",
    },
}
RIGHT = ["right_simd_barrier", "right_barrier", "right_partial_exit"]
SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    out = tmp_path_factory.mktemp("wrong") / "wrong.so"
    return emulator.Emulator(emulator.build([WRONG], out))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", REFUSED)
def test_refuses(wrong, kernel, seed):
    with pytest.raises(RuntimeError, match=f"{kernel}: .*({REFUSED[kernel]})"):
        wrong.launch(kernel, (1,), (64,), {0: np.zeros(64, np.float32)}, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", RIGHT)
def test_runs_what_is_right(wrong, kernel, seed):
    a = np.zeros(64, np.float32)
    wrong.launch(kernel, (1,), (64,), {0: a}, seed)
    lane = np.arange(64)
    expected = {
        "right_simd_barrier": lane ^ 1,
        "right_barrier": 63 - lane,
        "right_partial_exit": np.where(lane % 32 < 16, 16, 0),
    }
    assert a.tolist() == expected[kernel].tolist()


def test_refuses_launches_that_can_not_be(wrong):
    a = {0: np.zeros(64, np.float32)}
    for kernel, grid, threads, buffers, message in [
        ("unbound_buffer", (1,), (64,), {}, "buffer 0 is not bound"),
        ("no_such_kernel", (1,), (64,), a, "no kernel"),
        ("right_barrier", (1,), (1025,), a, "1 to 1024 threads"),
        ("right_barrier", (0,), (64,), a, "a grid is not empty"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            wrong.launch(kernel, grid, threads, buffers)


def test_threadgroup_memory_starts_as_nan(wrong):
    a = np.zeros(64, np.float32)
    wrong.launch("reads_nothing", (1,), (64,), {0: a})
    assert np.isnan(a).sum() == 54


def test_a_random_order_shows_a_missing_barrier(wrong):
    results = set()
    for seed in range(1, 6):
        a = np.zeros(64, np.float32)
        wrong.launch("missing_barrier", (1,), (64,), {0: a}, seed)
        results.add(a.tobytes())
    assert len(results) > 1


@pytest.mark.parametrize("sanitizer", SANITIZED)
def test_sanitizers_see_the_kernels(sanitizer, tmp_path):
    program = emulator.build_replay([WRONG], tmp_path / "replay", sanitize=sanitizer)
    for kernel in [*SANITIZED[sanitizer], *RIGHT]:
        recorder = emulator.Recorder()
        groups = 2 if kernel == "race_between_groups" else 1
        recorder.launch(kernel, (groups,), (64,), {0: np.zeros(64, np.float32)}, 1)
        recorder.save(tmp_path / "recording")
        report = emulator.replay(program, tmp_path / "recording")
        assert SANITIZED[sanitizer].get(kernel, "") in report
        assert bool(report) == (kernel in SANITIZED[sanitizer]), (kernel, report)
