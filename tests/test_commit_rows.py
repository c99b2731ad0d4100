"""commit_rows against its oracle, and that the cache is really updated in place."""

import threading

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.ops import commit_rows

DTYPES = ["float32", "float16", "bfloat16", "int8", "uint64", "complex64", "bool_"]
INDEX_DTYPES = [
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
]


def numbers(shape, first=0):
    """Distinct small integers, exact in every dtype that holds them."""
    return (np.arange(np.prod(shape)) + first).reshape(shape) % 120


def address(x):
    """Where the data of an evaluated array is, keeping no reference to it."""
    return np.array(x, copy=False).ctypes.data


def laid_out(x, layout):
    """The same values behind other strides."""
    if layout == "transposed":
        return mx.contiguous(x.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    if layout == "sliced":
        return mx.repeat(x, 2, axis=2)[:, :, ::2]
    return x


@st.composite
def problems(draw):
    B, H, D = (draw(st.integers(1, 3)) for _ in range(3))
    S, T = draw(st.integers(1, 9)), draw(st.integers(0, 11))
    ring = draw(st.sampled_from([0, 0, 1, S]))
    index = st.lists(st.integers(-20, 20), min_size=B, max_size=B)
    return (B, H, S, D), T, ring, draw(index), draw(index)


@settings(max_examples=200, deadline=None)
@given(
    problems(),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "transposed", "sliced"]),
    st.sampled_from(["plain", "transposed", "sliced"]),
)
def test_equals_oracle_for_any_start_count_and_layout(problem, dtype, cl, rl):
    (B, H, S, D), T, ring, start, count = problem
    cache = mx.array(numbers((B, H, S, D))).astype(getattr(mx, dtype))
    rows = mx.array(numbers((B, H, T, D), 60)).astype(getattr(mx, dtype))
    out = commit_rows(
        laid_out(cache, cl),
        laid_out(rows, rl),
        mx.array(start),
        mx.array(count),
        ring=ring,
    )
    as_numpy = [np.array(x.astype(mx.complex64)) for x in (cache, rows, out)]
    expected = oracle.commit_rows(*as_numpy[:2], start, count, ring)
    np.testing.assert_array_equal(as_numpy[2], expected)


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_any_integer_dtype_saturates(dtype):
    info = np.iinfo(dtype)
    limits = np.array([info.min, info.max], dtype)
    cache, rows = mx.zeros((2, 1, 5, 1)), mx.ones((2, 1, 3, 1))
    out = commit_rows(cache, rows, mx.array(limits), mx.array([2, 2], mx.int32))
    assert out[:, 0, :, 0].tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]
    out = commit_rows(cache, rows, mx.array([1, 1]), mx.array(limits))
    assert out[:, 0, :, 0].tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]


def test_index_arrays_may_be_strided():
    cache, rows = mx.zeros((2, 1, 4, 1)), mx.ones((2, 1, 1, 1))
    start = mx.array([0, 9, 3, 9])[::2]
    out = commit_rows(cache, rows, start, mx.broadcast_to(mx.array(1), (2,)))
    assert out[:, 0, :, 0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_copies_bits_of_nan_payloads():
    bits = mx.array([0x7FC01234, 0xFFC00001], mx.uint32).view(mx.float32)
    rows = bits.reshape(1, 1, 2, 1)
    out = commit_rows(mx.zeros((1, 1, 3, 1)), rows, mx.array([1]), mx.array([2]))
    assert out.view(mx.uint32).flatten().tolist() == [0, 0x7FC01234, 0xFFC00001]


def test_ring_leaves_the_slots_behind_it_alone():
    cache, rows = mx.zeros((1, 1, 6, 1)), mx.array([1.0, 2, 3]).reshape(1, 1, 3, 1)
    out = commit_rows(cache, rows, mx.array([7]), mx.array([3]), ring=4)
    assert out.flatten().tolist() == [2, 3, 0, 1, 0, 0]
    out = commit_rows(cache, rows, mx.array([-1]), mx.array([2]), ring=4)
    assert out.flatten().tolist() == [2, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]
)
def test_empty_caches(shape):
    B, H, _, D = shape
    index = mx.zeros((B,), mx.int32)
    out = commit_rows(mx.zeros(shape), mx.zeros((B, H, 2, D)), index, index + 2)
    mx.eval(out)
    assert out.shape == shape


# A 16 MB cache: copying it cannot hide in the noise of the allocator.
BIG = (1, 8, 8192, 64)


def commit(cache, start):
    return commit_rows(cache, mx.ones((1, 8, 4, 64)), start, mx.array([4]))


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["eager", "compiled", "async"])
def test_in_place_when_nothing_else_refers_to_the_cache(mode):
    step = mx.compile(commit) if mode == "compiled" else commit
    evaluate = mx.async_eval if mode == "async" else mx.eval
    cache, start = mx.zeros(BIG), mx.array([0])
    mx.eval(cache, start)
    before = address(cache)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for _ in range(5):
        cache, start = step(cache, start), start + 4
        evaluate(cache, start)
        start.item()  # until then an evaluation in flight still refers to the cache
    assert mx.get_peak_memory() - base < 1 << 20
    assert address(cache) == before
    assert cache.sum().item() == 5 * 8 * 4 * 64


def test_copies_when_the_old_cache_is_still_used():
    cache = mx.zeros((1, 2, 4, 2))
    mx.eval(cache)
    new = commit_rows(cache, mx.ones((1, 2, 1, 2)), mx.array([0]), mx.array([1]))
    mx.eval(new)
    assert cache.sum().item() == 0 and new.sum().item() == 4


def test_rows_may_be_a_view_of_the_cache():
    cache = mx.arange(4.0).reshape(1, 1, 4, 1)
    rows = cache[:, :, 2:]
    out = commit_rows(cache, rows, mx.array([0]), mx.array([2]))
    assert out.flatten().tolist() == [2, 3, 2, 3]


def test_compiles_once_for_all_starts_and_counts():
    traces = []

    @mx.compile
    def step(cache, rows, start, count):
        traces.append(1)
        return commit_rows(cache, rows, start, count)

    rows = mx.ones((1, 1, 3, 1))
    for start, count in [(0, 3), (1, 2), (2, 0)]:
        out = step(mx.zeros((1, 1, 5, 1)), rows, mx.array([start]), mx.array([count]))
        assert out.sum().item() == count
    assert len(traces) == 1


def test_shapeless_compile():
    step = mx.compile(commit_rows, shapeless=True)
    for slots in (3, 6):
        cache, rows = mx.zeros((1, 1, slots, 1)), mx.ones((1, 1, slots - 1, 1))
        out = step(cache, rows, mx.array([1]), mx.array([9]))
        assert out.flatten().tolist() == [0] + [1] * (slots - 1)


def test_compile_does_not_merge_different_rings():
    @mx.compile
    def both(cache, rows, start, count):
        # Only nodes that are not outputs are merged.
        return [
            commit_rows(cache, rows, start, count, ring=ring) * 2 for ring in (0, 2, 3)
        ]

    cache, rows = mx.zeros((1, 1, 4, 1)), mx.ones((1, 1, 1, 1))
    outs = both(cache, rows, mx.array([3]), mx.array([1]))
    assert [out.flatten().tolist().index(2) for out in outs] == [3, 1, 0]


def test_streams_and_threads():
    results, device = {}, mx.default_device()

    def work(i):
        with mx.stream(mx.new_stream(device)):
            cache = mx.zeros((1, 1, 64, 8))
            for n in range(64):
                rows = mx.full((1, 1, 1, 8), float(i))
                cache = commit_rows(cache, rows, mx.array([n]), mx.array([1]))
            results[i] = cache.sum().item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: i * 512 for i in range(4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": mx.zeros((2, 3, 4))}, r"\[commit_rows\] cache must have shape"),
        ({"rows": mx.zeros((2, 3, 2, 4))}, r"rows must have shape .* D=5\) but has"),
        ({"rows": mx.zeros((2, 3, 2, 5), mx.float16)}, "the dtype of cache, float32"),
        ({"start": mx.array([0])}, r"start must have shape \(B=2,\) .* \(1,\)\."),
        ({"start": mx.array(0)}, r"start must have shape .* has shape \(\)\."),
        ({"count": mx.array([1.0, 1.0])}, "count must be an integer array"),
        ({"count": mx.array([True, False])}, "count must be an integer array"),
        ({"ring": -1}, "ring must be between 0 and the 4 slots"),
        ({"ring": 5}, "ring must be between 0 and the 4 slots"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {
        "cache": mx.zeros((2, 3, 4, 5)),
        "rows": mx.zeros((2, 3, 2, 5)),
        "start": mx.array([0, 0]),
        "count": mx.array([1, 1]),
    }
    with pytest.raises(ValueError, match=message):
        commit_rows(**(arguments | change))


def test_wrong_kind_is_a_type_error():
    with pytest.raises(TypeError):
        commit_rows([1.0], mx.zeros((1, 1, 1, 1)), mx.array([0]), mx.array([1]))


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="needs a machine without a GPU")
def test_gradient_is_refused():
    def loss(cache):
        rows = mx.ones((1, 1, 1, 1))
        return commit_rows(cache, rows, mx.array([0]), mx.array([1])).sum()

    with pytest.raises(ValueError, match="CommitRows"):
        mx.grad(loss)(mx.zeros((1, 1, 2, 1)))
