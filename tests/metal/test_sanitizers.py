"""All kernels under the address, undefined behaviour and thread sanitizers."""

import battery
import emulator
import host
import numpy as np
import pytest


@pytest.mark.parametrize("sanitizer", emulator.SANITIZERS)
def test_kernels_are_clean(sanitizer, tmp_path):
    program = emulator.build_replay(
        host.SOURCES, tmp_path / "replay", include=[host.METAL], sanitize=sanitizer
    )
    for seed in (0, 1) if sanitizer != "thread" else (1,):
        recorder = emulator.Recorder()
        battery.everything(recorder, seed)
        recorder.save(tmp_path / "recording")
        assert emulator.replay(program, tmp_path / "recording") == ""


@pytest.mark.emulated
def test_the_battery_is_the_same_every_time(machine):
    """Bit for bit, in any order of threads."""
    expected = battery.everything(machine, 0)
    for seed in (0, 1, 2, 3):
        for x, y in zip(expected, battery.everything(machine, seed), strict=True):
            np.testing.assert_array_equal(x, y)
