"""Builds the kernels for the emulator once a session."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "emulator")]

import emulator  # noqa: E402
import host  # noqa: E402


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if HERE in item.path.parents]
    if config.getoption("--device") == "gpu":
        skip = pytest.mark.skip(reason="the emulator and what it is for")
        ours = [item for item in ours if not runs_on_gpu(item)]
    elif emulator.clang() is None:
        skip = pytest.mark.skip(
            reason="THE METAL KERNELS ARE NOT CHECKED: they need "
            "apt-get install clang-19 libclang-rt-19-dev"
        )
    else:
        ours = []
    for item in ours:
        item.add_marker(skip)


def runs_on_gpu(item):
    return "machine" in item.fixturenames and not item.get_closest_marker("emulated")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The kernels as a shared library."""
    out = tmp_path_factory.mktemp("kernels") / "kernels.so"
    return emulator.build(host.SOURCES, out, include=[host.METAL])


@pytest.fixture(scope="session")
def machine(request):
    """What launches kernels: the emulator, or with --device gpu an NVIDIA GPU."""
    if request.config.getoption("--device") == "gpu":
        sys.path.append(str(HERE.parent / "cuda"))
        from machine import Machine

        return Machine()
    return emulator.Emulator(request.getfixturevalue("library"))
