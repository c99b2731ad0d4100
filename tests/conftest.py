"""Models that many tests share. Nothing in the product may change them."""

import os
from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny import random_head, tiny_llama, tiny_qwen

import mlx_mtp
from mlx_mtp.drafters import MTPHeadDrafter
from mlx_mtp.targets import as_target


@pytest.fixture
def one_device():
    """mx.stream sets the default device of every thread, and threads that leave theirs
    in another order leave it changed: what comes next would run elsewhere."""
    device = mx.default_device()
    yield
    left = mx.default_device()
    mx.set_default_device(device)
    assert left == device


@pytest.fixture(autouse=True)
def no_profile(one_device, tmp_path, monkeypatch):
    """What somebody tuned on this machine changes no test."""
    monkeypatch.setattr("mlx_mtp.tuning.FOLDER", tmp_path / "profiles")


def pytest_addoption(parser):
    parser.addoption(
        "--device", choices=["cpu", "gpu"], default="cpu", help="where the ops run"
    )


def pytest_configure(config):
    # Else products of float32 have ten bits on a GPU. MLX reads it at the first one.
    os.environ["MLX_ENABLE_TF32"] = "0"
    mx.set_default_device(mx.Device(getattr(mx, config.getoption("--device"))))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "gpu":
        skip = pytest.mark.skip(reason="holds on a CPU only")
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(skip)


# What MLX's CUDA backend says of products and rotations that it does not have.
MISSING = ("[quantized_matmul] No implementation", "cudaGraphAddKernelNode")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from skip_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from skip_missing())


def skip_missing():
    try:
        return (yield)
    except Exception as error:
        # Hypothesis raises its examples' errors as a group if they are unlike.
        errors = getattr(error, "exceptions", [error])
        if all(map(is_missing, errors)):
            pytest.skip(f"MLX's CUDA backend cannot: {errors[0]}")
        raise


def is_missing(error):
    found = any(message in str(error) for message in MISSING)
    return isinstance(error, RuntimeError) and found


@pytest.fixture(scope="session")
def demo():
    """The embedded model with its head, and its tokenizer."""
    return mlx_mtp.load("demo")


@pytest.fixture(scope="session")
def demo_parts(demo):
    """The embedded model as the target and the drafter of a round."""
    model, tokenizer = demo
    target = as_target(model)
    drafter = MTPHeadDrafter(model.mtp_head.head, target)
    return SimpleNamespace(
        model=model, tokenizer=tokenizer, target=target, drafter=drafter
    )


@pytest.fixture(scope="session")
def llama():
    return tiny_llama()


@pytest.fixture(scope="session")
def qwen():
    return tiny_qwen()


@pytest.fixture(scope="session")
def qwen_head(qwen):
    """A target and an untrained head for it."""
    target = as_target(qwen)
    return SimpleNamespace(target=target, drafter=random_head(target))
