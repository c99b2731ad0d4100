"""A recorded function is the function, bit by bit, and leaves its arguments alone."""

import gc
import subprocess
import sys
import threading
import weakref
from io import StringIO
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.ops import commit_rows, sample
from mlx_mtp.recorded import Recorded

SIZE = 4


class Pair(NamedTuple):
    left: mx.array
    right: mx.array | None


class Other(NamedTuple):
    left: mx.array
    right: mx.array | None


def nodes(*arrays):
    """Operations that are not computed yet, and how many of them are recordings."""
    file = StringIO()
    mx.export_to_dot(file, *arrays)
    return file.getvalue().count("rectangle"), file.getvalue().count("Recorded")


def random(*shape, seed=0):
    x = mx.random.normal(shape, key=mx.random.key(seed))
    mx.eval(x)
    return x


def same_bits(got, expected):
    """Evaluated apart, so that neither sees what the other leaves behind."""
    mx.eval(got)
    mx.eval(expected)
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        assert np.array(x).tobytes() == np.array(y).tobytes()


OPERATIONS = [
    lambda x, y, z: [x + y],
    lambda x, y, z: [mx.sin(x)],
    lambda x, y, z: [x @ y],
    lambda x, y, z: [x.T],
    lambda x, y, z: [mx.softmax(x * y + z, axis=-1)],
    lambda x, y, z: mx.split(mx.concatenate([x, y]), 2),
    lambda x, y, z: [mx.where(x > y, x, z)],
    lambda x, y, z: [mx.slice_update(x, y[:1], mx.array([1]), axes=[0])],
    lambda x, y, z: [commit_rows(*(a[None, None] for a in (x, y)), *counts())[0, 0]],
    lambda x, y, z: [sample(x, mx.abs(mx.sin(y[:, :2])))[1] @ z[:3]],
    lambda x, y, z: [x + x, y],
    lambda x, y, z: [mx.stop_gradient(x)],
]


def counts():
    return mx.array([1]), mx.array([2])


steps = st.tuples(st.integers(0, len(OPERATIONS) - 1), *[st.integers(0, 99)] * 3)


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, min_size=1, max_size=130), st.lists(st.integers(0, 99)))
def test_random_graphs(plan, kept):
    def function(*values):
        values = list(values)
        for operation, *ids in plan:
            values += OPERATIONS[operation](*(values[i % len(values)] for i in ids))
        return [values[i % len(values)] for i in kept] + values[-1:]

    recorded = Recorded(function)
    for seed in range(3):
        inputs = [random(SIZE, SIZE, seed=3 * seed + i) for i in range(3)]
        before = [np.array(x) for x in inputs]
        same_bits(recorded(*inputs), function(*inputs))
        for x, old in zip(inputs, before, strict=True):
            assert np.array_equal(x, old)


@pytest.mark.cpu
def test_one_node_for_many():
    def function(x):
        for _ in range(100):
            x = mx.cos(mx.sin(x))
        return x

    recorded, x = Recorded(function), random(SIZE)
    assert nodes(recorded(x)) == (201, 0)  # an argument is a node of the first call
    assert nodes(recorded(x)) == (5, 5)
    same_bits([recorded(x)], [function(x)])


def test_trees_of_arrays():
    def function(state, pair, nothing):
        x, y = pair
        return {**state, "sum": [state["x"] + x]}, Pair(x * y, nothing), (), [(x, None)]

    recorded = Recorded(function)
    for seed in range(3):
        x, y, z = (random(SIZE, seed=seed + i) for i in range(3))
        state, pair, empty, nested = recorded({"x": x}, Pair(y, z), None)
        assert list(state) == ["x", "sum"]
        assert type(pair) is Pair and pair.right is None
        assert empty == () and type(nested[0]) is tuple and nested[0][1] is None
        got = [state["x"], *state["sum"], pair.left, nested[0][0]]
        same_bits(got, [x, x + y, y * z, y])


def test_called_once_for_each_kind():
    calls = []

    def function(tree, other):
        calls.append(tree)
        values = tree.values() if isinstance(tree, dict) else tree
        factor = {list: 2, tuple: 3, Pair: 4, Other: 5, dict: 6}[type(tree)]
        return [x * (factor if other is None else 1) for x in values]

    recorded = Recorded(function)
    x = random(SIZE)
    kinds = [
        ([x], None),
        ([x], x),
        ((x,), None),
        ((x, x), None),
        (Pair(x, x), None),
        (Other(x, x), None),
        ([x, x], None),
        ([x[:2]], None),
        ([x[None]], None),
        ([x.reshape(2, 2)], None),
        ([x.astype(mx.float16)], None),
        ({"a": x}, None),
        ({"b": x}, None),
        ({"a": x, "b": x}, None),
    ]
    for _ in range(3):
        for tree, other in kinds:
            expected = function(tree, other)
            calls.pop()
            same_bits(recorded(tree, other), expected)
    assert len(calls) == len(kinds)


class Dict(dict):
    pass


class Number:
    def __init__(self, value):
        self.value = value


OTHERS = [
    [-1, -2, 1, 1.0, True],
    [Number(i) for i in range(3)],
    [{-1: 1}, {-2: 1}, {3}],
    [Dict(a=1), ..., "text", np.float32(3)],
]


@pytest.mark.parametrize("others", OTHERS)
def test_other_trees_are_those_of_the_function(others):
    recorded = Recorded(lambda x, other: (x + 1, other, [other]))
    for _ in range(2):
        for other in others:
            x, one, two = recorded(mx.array(1), other)
            assert x.item() == 2 and one is other and two[0] is other
    for other in others:
        recorded = Recorded(lambda x, other=other: (x + 1, {7: other}))
        for i in range(3):
            x, got = recorded(mx.array(i))
            assert x.item() == i + 1 and got[7] is other


def test_keys_that_are_no_strings():
    """-1 and -2 have one hash."""
    recorded = Recorded(lambda tree: [(x + key) for key, x in tree.items()])
    for _ in range(2):
        for key in (-1, -2):
            assert recorded({key: mx.array(0)})[0].item() == key


def test_a_tree_in_itself_is_refused():
    tree = []
    tree.append(tree)
    with pytest.raises(RecursionError):
        Recorded(lambda tree: mx.zeros(1))(tree)


def test_arguments_are_apart():
    """Which of the first arguments are one array, or one that the function captures."""
    constant = random(SIZE)

    def function(x, y):
        return x - y, x * constant

    recorded = Recorded(function)
    same_bits(recorded(constant, constant), function(constant, constant))
    x, y = random(SIZE, seed=1), random(SIZE, seed=2)
    same_bits(recorded(x, y), function(x, y))


def test_outputs_without_operations():
    constant = random(SIZE)

    def function(x, y):
        return y, constant, x + 1, y, mx.arange(3)

    recorded = Recorded(function)
    for seed in range(3):
        x, y = random(SIZE, seed=seed), random(SIZE, seed=seed + 9)
        same_bits(recorded(x, y), function(x, y))
    same_bits(Recorded(lambda x: x)([constant]), [constant])


def test_lazy_arguments():
    recorded = Recorded(lambda x: [x @ x, x + 1])
    x = random(SIZE, SIZE)
    for _ in range(3):
        same_bits(recorded(mx.sin(x)), [mx.sin(x) @ mx.sin(x), mx.sin(x) + 1])


def test_chained_without_evaluation():
    def function(x, y):
        return y + 1, x * y - mx.sin(x)

    recorded = Recorded(function)
    got = expected = random(SIZE), random(SIZE, seed=1)
    for _ in range(20):
        got, expected = recorded(*got), function(*expected)
    same_bits(got, expected)


@pytest.mark.cpu
@pytest.mark.parametrize("held", [False, True])
def test_in_place_where_nothing_else_holds_it(held):
    rows, start, count = mx.ones((1, 1, 1, 1024)), mx.array([3]), mx.array([1])
    mx.eval(rows, start, count)

    def function(cache, other):
        cache = commit_rows(cache, rows, start, count)
        return cache, cache[0, 0, 3, :2] + other

    recorded = Recorded(function)
    cache, other = mx.zeros((1, 1, 1024, 1024)), mx.zeros(2)
    mx.eval(cache, other)
    before = cache
    for i in range(4):
        if not held:
            before = None
        mx.synchronize()
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        cache, other = recorded(cache, other)
        mx.eval(cache, other)
        extra = mx.get_peak_memory() - active
        assert (extra >= cache.nbytes) == (held and i == 0), (i, extra)
    assert other.tolist() == [4, 4]
    if held:
        assert not before.any()


@pytest.mark.cpu
def test_memory_is_that_of_the_function():
    def function(x):
        for _ in range(200):
            x = mx.sin(x)
        return x

    recorded, x = Recorded(function), random(1 << 20)
    peaks = []
    for call in (function, recorded, recorded):
        mx.synchronize()
        mx.reset_peak_memory()
        mx.eval(call(x))
        peaks.append(mx.get_peak_memory())
    assert peaks[2] <= 1.5 * peaks[0]


@pytest.mark.cpu
def test_buffers_stay_until_they_are_read_and_written():
    """Among them the tokens, which nobody reads. All are of sizes of their own."""
    rows, x = 3001, random(1200, 1200)
    logits, u = random(rows, 8), mx.zeros((rows, 2))

    def function(x, logits, u):
        slow = x @ x @ x
        logits = mx.sin(logits) + 0 * slow[0, :1]
        return sample(logits, u)[1]

    recorded = Recorded(function)
    expected = recorded(x, logits, u)
    mx.eval(expected)
    for _ in range(3):
        result = recorded(x, logits, u)
        mx.async_eval(result)
        sizes = 4 * [(rows,), (rows, 8)]
        mine = [mx.array(np.full(shape, -7, np.int32)) for shape in sizes]
        same_bits([result], [expected])
        assert all((x == -7).all() for x in mine)


@pytest.mark.cpu
def test_several_streams_are_not_recorded():
    other = mx.new_stream(mx.cpu)

    def function(x):
        return mx.sin(x) + mx.cos(x, stream=other)

    recorded, x = Recorded(function), random(SIZE)
    for _ in range(3):
        assert nodes(recorded(x))[1] == 0
        same_bits([recorded(x)], [function(x)])


def test_stream_of_the_caller():
    recorded, x = Recorded(lambda x: mx.sin(x) * 2), random(SIZE)
    expected = mx.sin(x) * 2
    for _ in range(2):
        for stream in (mx.default_stream(mx.default_device()), mx.new_stream(mx.cpu)):
            with mx.stream(stream):
                same_bits([recorded(x)], [expected])


def test_threads():
    recorded, x = Recorded(mx.compile(lambda x: mx.sin(x) @ x)), random(SIZE, SIZE)
    expected, errors, found = np.array(mx.sin(x) @ x), [], []

    def work():
        try:
            for _ in range(5):
                got = recorded(x)
                assert np.allclose(got, expected, atol=1e-5)
            found.append(weakref.ref(recorded._thread.recordings))
        except Exception as error:
            errors.append(error)
        mx.synchronize()

    for _ in range(3):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    same_bits([recorded(x)], [mx.array(expected)])
    assert [ref() for ref in found] == [None] * 6


def test_within_transformations():
    recorded = Recorded(lambda x: (x * x).sum())
    x = random(SIZE)
    recorded(x), recorded(x)
    same_bits([mx.grad(recorded)(x)], [2 * x])
    same_bits([mx.vmap(recorded)(x[:, None])], [x * x])
    same_bits([mx.compile(recorded)(x)], [(x * x).sum()])
    same_bits([recorded(x)], [(x * x).sum()])


@pytest.mark.parametrize("transformation", [mx.compile, mx.vmap, mx.grad])
def test_what_a_transformation_traces_is_no_constant(transformation):
    def outer(x):
        recorded = Recorded(lambda y: (y + x) * x)
        total = recorded(mx.array(1.0)) + recorded(mx.array(1.0))
        return total.sum()

    def plain(x):
        return (2 * (1 + x) * x).sum()

    x = mx.array(3.0) if transformation is mx.grad else random(SIZE)
    assert mx.allclose(transformation(outer)(x), transformation(plain)(x))


def test_evaluated_within():
    """Then its results are no constants."""

    def function(x):
        y = x * 2
        mx.eval(y)
        return y + x

    recorded = Recorded(function)
    for seed in range(3):
        x = random(SIZE, seed=seed)
        same_bits([recorded(x)], [x * 2 + x])


@pytest.mark.cpu
def test_what_it_captures_is_evaluated_once():
    weight = mx.exp(random(SIZE)) + mx.arange(SIZE)
    recorded = Recorded(lambda x: (x + weight, mx.ones(3)))
    x = random(SIZE)
    first = recorded(x)
    assert nodes(weight)[0] == 0
    got = recorded(x)
    assert nodes(*got) == (1, 1)
    same_bits(got, first)


@pytest.mark.cpu
def test_what_it_captures_is_waited_for():
    x = random(1200, 1200)
    for _ in range(3):
        weight = mx.matmul(x, x, stream=mx.new_stream(mx.cpu))
        mx.async_eval(weight)
        recorded = Recorded(lambda y, weight=weight: y + weight)
        recorded(mx.zeros(1200))  # not evaluated
        got = recorded(mx.zeros(1200))
        same_bits([got], [x @ x])


@pytest.mark.cpu
def test_recorded_within_recorded():
    """In place, too."""
    rows, start, count = mx.ones((1, 1, 1, 1024)), mx.array([3]), mx.array([1])
    mx.eval(rows, start, count)
    inner = Recorded(lambda cache: commit_rows(cache, rows, start, count))
    outer = Recorded(lambda cache: inner(inner(cache)))
    cache = mx.zeros((1, 1, 1024, 1024))
    mx.eval(cache)
    for _ in range(4):
        mx.synchronize()
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        cache = outer(cache)
        mx.eval(cache)
        assert mx.get_peak_memory() - active < cache.nbytes
    assert cache.sum().item() == 1024


def test_an_error_is_raised_again():
    ready = []

    def function(x):
        if not ready:
            raise KeyError("not yet")
        return x + 1

    recorded, x = Recorded(function), random(SIZE)
    for _ in range(2):
        with pytest.raises(KeyError, match="not yet"):
            recorded(x)
    ready.append(True)
    for _ in range(2):
        same_bits([recorded(x)], [x + 1])


@pytest.mark.cpu
@pytest.mark.parametrize("size", [64, 2048])
def test_a_failed_evaluation(size):
    """MLX has no such product of float16 on a CPU, and says so when it evaluates."""
    block = mx.ones((size // 32, size // 32), mx.bool_)

    def function(x):
        for _ in range(10):
            x = mx.sin(x) + 0.5
        return x, mx.block_masked_mm(x, x, 32, block)

    recorded = Recorded(function)
    limit = mx.set_cache_limit(0)  # freed memory is gone
    try:
        for _ in range(3):
            x, product = recorded(mx.ones((size, size), mx.float16))
            with pytest.raises(RuntimeError, match="float32"):
                mx.eval(product)
            with pytest.raises(RuntimeError):
                mx.eval(product, x)
    finally:
        mx.set_cache_limit(limit)
    same_bits([mx.sin(random(SIZE))], [mx.sin(random(SIZE))])


@pytest.mark.cpu
def test_a_stream_of_another_thread():
    recorded, results = Recorded(lambda x: mx.sin(x) + 1), []

    def work():
        for _ in range(2):
            results.append(recorded(random(SIZE)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for result in results:
        with pytest.raises(RuntimeError, match="no Stream"):
            mx.eval(result)


@pytest.mark.cpu
def test_an_error_in_the_stream():
    recorded = Recorded(lambda x: mx.linalg.inv(x, stream=mx.cpu) @ x)
    x = random(SIZE, SIZE) + 4 * mx.eye(SIZE)
    for singular in (False, True, False, True):
        if singular:
            with pytest.raises(RuntimeError):
                mx.eval(recorded(mx.zeros((SIZE, SIZE))))
        else:
            assert mx.allclose(recorded(x), mx.eye(SIZE), atol=1e-4)


def test_it_can_be_collected():
    class Owner:
        def __init__(self):
            self.recorded = Recorded(lambda x: self.scale(x))

        def scale(self, x):
            return 2 * x

    owner = Owner()
    owner.recorded(random(SIZE))
    found = weakref.ref(owner)
    del owner
    gc.collect()
    assert found() is None


EXIT = """
import atexit, os, time

@atexit.register  # the first of them is called last
def check():
    begin = time.perf_counter()
    mx.synchronize(stream)
    os._exit(0 if time.perf_counter() - begin < 0.05 else 3)

import mlx.core as mx
from mlx_mtp.recorded import Recorded

x = mx.random.normal((2000, 2000))
mx.eval(x)
stream = mx.new_stream(mx.default_device())
with mx.stream(stream):
    recorded = Recorded(lambda x: x @ x @ x)
    recorded(x)
    mx.async_eval(recorded(x))
"""


def test_nothing_is_under_way_at_exit():
    assert subprocess.run([sys.executable, "-c", EXIT]).returncode == 0
