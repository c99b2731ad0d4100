"""Models that many tests share. Nothing in the product may change them."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny import random_head, tiny_llama, tiny_qwen

import mlx_mtp
from mlx_mtp.drafters import MTPHeadDrafter
from mlx_mtp.targets import as_target


@pytest.fixture(autouse=True)
def no_profile(tmp_path, monkeypatch):
    """What somebody tuned on this machine changes no test."""
    monkeypatch.setattr("mlx_mtp.tuning.FOLDER", tmp_path / "profiles")


def pytest_addoption(parser):
    parser.addoption(
        "--device", choices=["cpu", "gpu"], default="cpu", help="where the ops run"
    )


def pytest_configure(config):
    mx.set_default_device(mx.Device(getattr(mx, config.getoption("--device"))))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "gpu":
        skip = pytest.mark.skip(reason="holds on a CPU only")
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except RuntimeError as error:
        if "[quantized_matmul] No implementation" in str(error):
            pytest.skip("MLX's CUDA backend has no such quantised product")
        raise


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
