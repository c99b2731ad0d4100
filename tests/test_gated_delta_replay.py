"""gated_delta_replay against its oracle and, bit for bit, against mlx_lm."""

import platform
import threading

import mlx.core as mx
import numpy as np
import oracle
import plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_mtp.ops import gated_delta_replay

# Elsewhere mlx sums with SIMD or contracts to fma: another order, same math.
stock_cpu = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="bit equality is promised for mlx's CPU backend on Linux x86-64",
)
NAMES = ("state", "k", "v", "g", "beta", "steps", "q")


def problem(B=1, T=4, Hk=1, Hv=1, Dk=8, Dv=8, dtype=mx.float32, seed=0):
    """Inputs as in a model: unit keys, decay and strength in (0, 1)."""
    keys = mx.random.split(mx.random.key(seed), 6)
    k, q = (mx.random.normal((B, T, Hk, Dk), key=keys[i]) / Dk**0.5 for i in (0, 1))
    v = mx.random.normal((B, T, Hv, Dv), key=keys[2])
    beta = mx.random.uniform(shape=(B, T, Hv), key=keys[3])
    args = {
        "state": mx.random.normal((B, Hv, Dv, Dk), key=keys[4]),
        "k": k.astype(dtype),
        "v": v.astype(dtype),
        "g": mx.random.uniform(shape=(B, T, Hv), key=keys[5]),
        "beta": beta.astype(dtype),
        "steps": mx.full((B,), T, mx.int32),
        "q": q.astype(dtype),
    }
    mx.eval(args)
    return args


def rows(args, cut):
    """Some of the steps."""
    return {n: args[n][:, cut] for n in ("k", "v", "g", "beta", "q")}


def reference(args):
    y, state = gated_delta_ops(
        *(args[n] for n in ("q", "k", "v", "g", "beta", "state"))
    )
    return state, y


def to_numpy(args):
    return [np.array(args[n].astype(mx.float32)) for n in NAMES]


def equal(a, b):
    return a.dtype == b.dtype and mx.array_equal(a, b).item()


SHAPES = [
    {"T": 5, "Hk": 2, "Hv": 4, "Dk": 128, "Dv": 64},
    {"B": 2, "T": 1, "Hk": 4, "Hv": 4, "Dk": 16, "Dv": 33},
    {"B": 3, "T": 3, "Hv": 3, "Dk": 7, "Dv": 1},
]


@stock_cpu
@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bit_equal_to_mlx_lm(shape, dtype):
    args = problem(**shape, dtype=dtype)
    state, y = reference(args)
    ours, ours_y = gated_delta_replay(**args)
    assert equal(ours, state) and equal(ours_y, y)
    del args["q"]
    assert equal(gated_delta_replay(**args), state)


@stock_cpu
def test_bit_equal_after_every_number_of_steps():
    args = problem(T=6, Hk=2, Hv=4, Dk=64, Dv=32, dtype=mx.bfloat16)
    for n in range(7):
        ours, ours_y = gated_delta_replay(**args | {"steps": mx.array([n])})
        state, y = args["state"], mx.zeros((1, 0, 4, 32), mx.bfloat16)
        if n:
            state, y = reference({"state": state} | rows(args, slice(n)))
        assert plain.equal(ours, state) and plain.equal(ours_y[:, :n], y, gpu=0.02)
        assert not ours_y[:, n:].any().item()


@stock_cpu
def test_bit_equal_over_a_long_prompt_and_in_pieces():
    args = problem(T=96, Hk=1, Hv=2, Dk=32, Dv=40)
    state, y = reference(args)
    whole, whole_y = gated_delta_replay(**args)
    assert plain.equal(whole, state) and plain.equal(whole_y, y)
    piece = args["state"]
    for t in range(0, 96, 32):
        cut = rows(args, slice(t, t + 32))
        piece = gated_delta_replay(state=piece, steps=mx.array([32]), **cut)[0]
    assert plain.equal(piece, state)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_equals_oracle_for_ragged_steps(data):
    sizes = {n: data.draw(st.integers(1, 5), n) for n in ("B", "Hk")}
    group, T = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    Dk, Dv = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    args = problem(**sizes, Hv=sizes["Hk"] * group, T=T, Dk=Dk, Dv=Dv)
    steps = st.lists(st.integers(-3, 9), min_size=sizes["B"], max_size=sizes["B"])
    args["steps"] = mx.array(data.draw(steps))
    state, y = oracle.gated_delta_replay(*to_numpy(args))
    ours, ours_y = gated_delta_replay(**args)
    np.testing.assert_allclose(np.array(ours), state, rtol=0, atol=2e-5)
    np.testing.assert_allclose(np.array(ours_y), y, rtol=0, atol=2e-5)


def test_inputs_may_be_views_of_any_strides():
    args = problem(B=2, T=3, Hk=2, Hv=4, Dk=8, Dv=6)
    expected = gated_delta_replay(**args)
    fused = mx.concatenate([args[n].flatten(2) for n in ("q", "k", "v")], axis=-1)
    parts = mx.split(fused, [16, 32], axis=-1)
    views = {n: x.reshape(args[n].shape) for n, x in zip("qkv", parts, strict=True)}
    for name in ("state", "g", "beta"):
        views[name] = mx.contiguous(args[name].T).T
    views["steps"] = mx.broadcast_to(mx.array(3), (2,))
    for ours, reference in zip(gated_delta_replay(**views), expected, strict=True):
        assert equal(ours, reference)
    assert equal(args["state"], views["state"])


def test_state_may_be_broadcast():
    args = problem(B=2, Dk=4, Dv=4)
    zero = mx.zeros_like(args["state"])
    expected = gated_delta_replay(**args | {"state": zero})
    shared = mx.broadcast_to(mx.array(0.0), zero.shape)
    for ours, reference in zip(
        gated_delta_replay(**args | {"state": shared}), expected, strict=True
    ):
        assert equal(ours, reference)


def test_dtypes_may_differ():
    args = problem(Dk=4, Dv=4, dtype=mx.bfloat16)
    args["v"], args["beta"] = args["v"].astype(mx.float16), args["beta"] + 0.0
    exact = {n: x.astype(mx.float32) for n, x in args.items()} | {
        "steps": args["steps"]
    }
    state, y = gated_delta_replay(**exact)
    ours, ours_y = gated_delta_replay(**args)
    assert equal(ours, state) and equal(ours_y, y.astype(mx.bfloat16))


def test_rows_behind_the_steps_do_not_count():
    args = problem(B=2, T=4) | {"steps": mx.array([2, 0])}
    state, y = gated_delta_replay(**args)
    late = mx.arange(4) >= 2
    for name in ("k", "v", "g", "beta", "q"):
        mask = late.reshape(1, 4, *[1] * (args[name].ndim - 2))
        args[name] = mx.where(mask, mx.nan, args[name])
    ours, ours_y = gated_delta_replay(**args)
    assert equal(ours, state) and equal(ours_y, y)
    assert equal(ours[1], args["state"][1])


def test_nan_stays_in_its_head():
    args = problem(Hv=2)
    args["g"][0, 0, 1] = mx.nan
    state, y = gated_delta_replay(**args)
    assert mx.isnan(state[0, 1]).all() and mx.isnan(y[..., 1, :]).all()
    assert mx.isfinite(state[0, 0]).all() and mx.isfinite(y[..., 0, :]).all()


@pytest.mark.parametrize("Dk", [40, 128])
def test_a_full_batch_is_its_sequences(Dk):
    """A GPU divides the work of many rows another way."""
    args = problem(B=4, T=3, Hk=16, Hv=32, Dk=Dk, Dv=128, dtype=mx.bfloat16)
    args["steps"] = mx.array([3, 0, 1, 3])
    state, y = gated_delta_replay(**args)
    for b in range(4):
        one = gated_delta_replay(**{n: x[b : b + 1] for n, x in args.items()})
        assert equal(one[0], state[b : b + 1])
        assert equal(one[1], y[b : b + 1])


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "uint64"])
def test_steps_of_any_integer_dtype_are_clamped(dtype):
    args = problem(T=3)
    full = gated_delta_replay(**args)[0]
    info = np.iinfo(dtype)
    high, low = mx.array(np.array([[info.max], [info.min]], dtype))
    assert equal(gated_delta_replay(**args | {"steps": high})[0], full)
    assert equal(gated_delta_replay(**args | {"steps": low})[0], args["state"])


@pytest.mark.parametrize("size", [{"B": 0}, {"T": 0}, {"Dv": 0}, {"Hv": 0}])
def test_empty_axes(size):
    args = problem(**size)
    state, y = gated_delta_replay(**args)
    mx.eval(state, y)
    assert state.shape == args["state"].shape and y.shape == args["v"].shape
    assert equal(state, args["state"])


@pytest.mark.cpu  # MLX's CUDA backend moves an array that the CPU looks at
@pytest.mark.parametrize("compiled", [False, True])
def test_in_place_when_nothing_else_refers_to_the_state(compiled):
    args = problem(T=1, Hv=4, Dk=128, Dv=4096)
    state, q = args.pop("state") + 0, args.pop("q")
    step = mx.compile(gated_delta_replay) if compiled else gated_delta_replay
    mx.eval(state, q)
    before = np.array(state, copy=False).ctypes.data
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for _ in range(3):
        state = step(state, **args)
        mx.eval(state)
    assert np.array(state, copy=False).ctypes.data == before
    assert mx.get_peak_memory() - base < 1 << 20


def test_old_state_survives_when_it_is_still_used():
    args = problem()
    before = np.array(args["state"])
    mx.eval(gated_delta_replay(**args))
    np.testing.assert_array_equal(np.array(args["state"]), before)


def test_compiles_once_for_all_steps():
    traces = []

    @mx.compile
    def step(args):
        traces.append(1)
        return gated_delta_replay(**args)

    args = problem(T=3)
    for n in range(4):
        args["steps"] = mx.array([n])
        for ours, expected in zip(step(args), gated_delta_replay(**args), strict=True):
            assert equal(ours, expected)
    assert len(traces) == 1


@pytest.mark.parametrize("with_q", [False, True])
def test_shapeless_compile(with_q):
    step = mx.compile(gated_delta_replay, shapeless=True)
    for T in (2, 5):
        args = [problem(T=T)[n] for n in NAMES[: 6 + with_q]]
        out, expected = step(*args), gated_delta_replay(*args)
        pairs = zip(out, expected, strict=True) if with_q else [(out, expected)]
        assert all(equal(a, b) for a, b in pairs)


def test_threads_with_their_own_streams():
    expected = [gated_delta_replay(**problem(seed=i))[0].tolist() for i in range(4)]
    results, device = {}, mx.default_device()

    def work(i):
        with mx.stream(mx.new_stream(device)):
            results[i] = gated_delta_replay(**problem(seed=i))[0].tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict(enumerate(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": mx.zeros((1, 4, 8))}, r"\[gated_delta_replay\] state must have sh"),
        ({"state": mx.zeros((1, 4, 8, 8), mx.float16)}, "state must be float32 but is"),
        ({"k": mx.zeros((1, 3, 2, 4))}, r"k must have shape \(B=1, T, Hk, Dk=8\)"),
        ({"k": mx.zeros((1, 3, 3, 8))}, "4 value heads must be a multiple of the 3"),
        ({"k": mx.zeros((1, 3, 0, 8))}, "4 value heads must be a multiple of the 0"),
        ({"v": mx.zeros((1, 2, 4, 8))}, r"v must have shape \(B=1, T=3, Hv=4, Dv=8\)"),
        (
            {"g": mx.zeros((1, 3, 4, 8))},
            r"g must have shape .* but has shape \(1, 3, 4",
        ),
        (
            {"beta": mx.zeros((1, 3, 4), mx.int32)},
            "beta must be float32, float16 or bf",
        ),
        ({"steps": mx.array(3)}, r"steps must have shape \(B=1,\) but has shape \(\)"),
        ({"steps": mx.array([3.0])}, "steps must be an integer array but is float32"),
        ({"q": mx.zeros((1, 3, 4, 8))}, r"q must have shape .*Hk=2"),
        ({"q": mx.zeros((1, 3, 2, 8), mx.int8)}, "q must be float32, float16"),
    ],
)
def test_errors_name_the_argument(change, message):
    args = problem(T=3, Hk=2, Hv=4)
    with pytest.raises(ValueError, match=message.replace("bf", "bfloat16")):
        gated_delta_replay(**(args | change))


def test_gradient_is_refused():
    args = problem()

    def loss(state):
        return gated_delta_replay(**args | {"state": state})[0].sum()

    with pytest.raises(ValueError, match="GatedDeltaReplay"):
        mx.grad(loss)(args["state"])
