"""Builds the kernels for the emulator once a session."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "emulator")]

import emulator  # noqa: E402
import host  # noqa: E402


def pytest_collection_modifyitems(items):
    if emulator.clang() is None:
        skip = pytest.mark.skip(
            reason="THE METAL KERNELS ARE NOT CHECKED: they need "
            "apt-get install clang-19 libclang-rt-19-dev"
        )
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The kernels as a shared library."""
    out = tmp_path_factory.mktemp("kernels") / "kernels.so"
    return emulator.build(host.SOURCES, out, include=[host.METAL])


@pytest.fixture(scope="session")
def machine(library):
    return emulator.Emulator(library)
