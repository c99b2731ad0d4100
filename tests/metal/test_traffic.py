"""The kernels read no more of the logits than docs/metal.md says."""

import pytest
import traffic


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return traffic.counting_emulator(tmp_path_factory.mktemp("traffic"))


# Rows read over rows needed, a little above what docs/metal.md counts.
@pytest.mark.parametrize(
    "name, of_sample, of_verify",
    [
        ("none", 1.05, 1.25),
        ("top-k 20, top-p 0.95", 1.2, 1.1),
        ("top-p 0.95, thousands of survivors", 6.5, 3.0),
    ],
)
def test_rows_are_read_as_often_as_documented(counting, name, of_sample, of_verify):
    scale, params = next(case[1:] for case in traffic.CASES if case[0] == name)
    rows = traffic.verify(counting, scale, params)
    assert 9 <= sum(rows) < of_verify * 9
    rows, _ = traffic.sample(counting, scale, params)
    assert 1 <= sum(rows) < of_sample
