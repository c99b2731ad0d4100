"""mlx-mtp doctor: right ops pass, one wrong value anywhere fails."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp import ops
from mlx_mtp.cli import doctor, doctor_checks, doctor_speed, main

CHECKS = list(doctor_checks.CHECKS)


@pytest.fixture
def small(monkeypatch):
    """Vocabularies that are quick to compare."""
    monkeypatch.setattr(doctor_checks, "VOCABULARIES", (1, 37, 300))
    monkeypatch.setattr(doctor_speed, "V", 500)
    monkeypatch.setattr(doctor_speed, "REPEATS", 2)


@pytest.fixture
def gpu(monkeypatch):
    """A device that the doctor takes for a GPU: the CPU path once more."""
    monkeypatch.setattr(doctor, "device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(doctor_checks.Tally, "expects_cpu_path", True)


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="speaks of machines without a GPU")
def test_compares_the_cpu_path_with_numpy(small, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "No GPU that MLX can use: the CPU path against NumPy" in out
    assert f"mlx {mx.__version__}" in out
    assert "15 of 15 right" in out and "WRONG" not in out
    assert all(out.count(f"\n{op} ") == 3 for op in CHECKS)


@pytest.mark.parametrize("op", CHECKS)
def test_every_op_has_a_composed_twin_with_its_result(op, small):
    ours, composed = doctor_speed.CASES[op](mx.float32)
    got, want = ours(), composed()
    if op == "sample":
        assert got[0].item() == want.item()
    elif op == "verify_draft":
        accepted, token = want
        assert got[1].item() == accepted.item()
        assert got[0][0, accepted.item()].item() == token.item()
    elif op == "verify_coupled":
        tokens, accepted = want
        assert got[1].item() == accepted.item()
        n = accepted.item() + 1
        assert got[0][0, :n].tolist() == tokens[0, :n].tolist()
    elif op == "commit_rows":
        kept = slice(1000, 1000 + doctor_speed.K)
        assert mx.array_equal(got[:, :, kept], want[:, :, kept])
    else:
        assert mx.allclose(got, want, atol=1e-5)


def broken(op, position, change):
    """An op with one result changed."""

    def wrong(*args, stream=None, **kwargs):
        out = getattr(ops, op)(*args, stream=stream, **kwargs)
        if not isinstance(out, tuple):
            return change(out)
        return tuple(change(x) if i == position else x for i, x in enumerate(out))

    return wrong


FAULTS = [
    ("sample", 0, lambda x: x ^ 1),
    ("sample", 1, lambda x: x + 1e-3),
    ("verify_draft", 0, lambda x: mx.where(x == 5, 4, x)),
    ("verify_draft", 1, lambda x: mx.maximum(x - 1, -1)),
    ("verify_draft", 2, lambda x: x * 1.001),
    ("commit_rows", 0, lambda x: mx.where(x == x.max(), mx.nan, x)),
    ("gated_delta_replay", 0, lambda x: x + 1e-4),
    ("gated_delta_replay", 1, lambda x: x * 1.05),
]


@pytest.mark.parametrize("op, position, change", FAULTS)
def test_a_faulty_gpu_is_found(op, position, change, small, gpu, monkeypatch, capsys):
    assert main(["doctor", "--no-speed"]) == 0
    faulty = broken(op, position, change)

    class Ops:
        """Faulty when not asked for the CPU path by name."""

        def __getattr__(self, name):
            right = getattr(ops, name)
            if name != op:
                return right
            return lambda *args, stream, **kwargs: (
                right if stream is mx.cpu else faulty
            )(*args, stream=stream, **kwargs)

    monkeypatch.setattr(doctor_checks, "ops", Ops())
    capsys.readouterr()
    assert main(["doctor", "--no-speed"]) == 1
    out = capsys.readouterr().out
    assert all((f"{op} " in line) == ("WRONG" in line) for line in rows(out))


def rows(out):
    return [line for line in out.splitlines() if line.startswith(tuple(CHECKS))]


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="speaks of machines without a GPU")
def test_a_faulty_cpu_path_is_found(small, monkeypatch, capsys):
    class Ops:
        sample = staticmethod(broken("sample", 0, lambda x: x ^ 1))
        verify_draft = ops.verify_draft
        verify_coupled = ops.verify_coupled
        commit_rows = ops.commit_rows
        gated_delta_replay = ops.gated_delta_replay

    monkeypatch.setattr(doctor_checks, "ops", Ops)
    assert main(["doctor", "--no-speed"]) == 1
    assert "sample " in next(x for x in rows(capsys.readouterr().out) if "WRONG" in x)


def test_an_op_that_raises_is_a_failure_of_its_own(small, gpu, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("[metal::Device] Unable to build\nline 2")

    monkeypatch.setattr(doctor_checks.ops, "commit_rows", fails)
    assert main(["doctor", "--no-speed"]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG: [metal::Device] Unable to build line 2") == 3
    assert "12 of 15 right" in out


def test_a_near_tie_is_counted_and_no_error():
    tally = doctor_checks.Tally(mx.Device(mx.cpu))
    got, want = np.array([[1], [2], [3]]), np.array([[1], [9], [8]])
    agree = tally.tokens("case", got, want, lambda: np.array([1, 1e-7, 1]))
    assert agree.tolist() == [True, False, False]
    assert tally.near == 1 and tally.mismatches == ["case, row 2: [3] instead of [8]"]
