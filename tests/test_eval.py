"""``ops.eval`` is ``mx.eval``, awake."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.ops import eval, sample


@pytest.mark.parametrize("spin_us", [0, 1, 200, 2**31 - 1])
def test_everything_is_evaluated(spin_us):
    x = mx.arange(6.0).reshape(2, 3)
    lazy = x + 1, sample(x, mx.full((2, 2), 0.5))[0], x
    eval(*lazy, spin_us=spin_us)
    in_other_thread = []
    thread = threading.Thread(target=lambda: in_other_thread.append(np.array(lazy[0])))
    thread.start()
    thread.join()  # which could not evaluate it
    np.testing.assert_array_equal(in_other_thread[0], np.arange(6.0).reshape(2, 3) + 1)
    assert lazy[1].shape == (2,)


def test_devices_and_streams_mix():
    one, two = mx.new_stream(mx.default_device()), mx.new_stream(mx.cpu)
    x = mx.add(mx.ones((64, 64)), 1, stream=one)
    y = mx.matmul(x, x, stream=two)
    eval(x, y)
    assert x[0, 0].item() == 2 and y[0, 0].item() == 256


def test_what_is_known_already_and_nothing():
    x = mx.array(3)
    eval(x)
    eval(x, x)
    eval()
    assert x.item() == 3


def test_other_threads_run_meanwhile():
    ran = threading.Event()
    x = mx.ones((1024, 1024))
    mx.eval(x)
    thread = threading.Thread(target=ran.set)
    y = x
    for _ in range(8):
        y = y @ x / 1024
    thread.start()
    eval(y, spin_us=10**6)
    thread.join()
    assert ran.is_set() and y[0, 0].item() == 1


@pytest.mark.parametrize("arrays", [([],), (1.0,), (None,), ((mx.ones(1),),)])
def test_only_arrays(arrays):
    with pytest.raises(TypeError, match=r"\[eval\] arrays must be arrays but argument"):
        eval(*arrays)


def test_spin_us_is_not_negative():
    with pytest.raises(ValueError, match=r"\[eval\] spin_us must be at least 0 but is"):
        eval(mx.ones(1), spin_us=-1)


def test_within_a_transformation():
    def f(x):
        y = x * 2
        eval(y)
        return y * y

    assert mx.grad(f)(mx.array(3.0)).item() == 24


def test_an_error_of_an_evaluation():
    stream = mx.new_stream(mx.cpu)
    singular = mx.linalg.inv(mx.zeros((4, 4)), stream=stream)
    with pytest.raises(RuntimeError, match="LU factorization failed"):
        eval(singular)
    x = mx.add(mx.ones(2), 1, stream=stream)
    eval(x)
    assert x.tolist() == [2, 2]
