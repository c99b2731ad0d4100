"""A pytest plugin: the ops run on the fake device.

``pytest -p plugin --fake-device EXTENSION --emulator LIBRARY``
"""

import ctypes
import importlib.util
import sys

import mlx.core  # noqa: F401  The extension needs it loaded.
import pytest


def pytest_addoption(parser):
    parser.addoption("--fake-device", required=True)
    parser.addoption("--emulator", required=True)
    parser.addoption("--max-threads", type=int, default=1024)
    parser.addoption("--schedule", type=int, default=0)


def load(extension, emulator, max_threads=1024, seed=0):
    """Puts the extension in the place of ``mlx_mtp._ext`` and returns its library."""
    spec = importlib.util.spec_from_file_location("mlx_mtp._ext", extension)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["mlx_mtp._ext"] = module
    library = ctypes.CDLL(str(extension))
    library.fake_device_log.restype = ctypes.c_char_p
    library.fake_device(str(emulator).encode(), max_threads, ctypes.c_uint64(seed))
    return library


# Before any conftest imports the ops.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    option = early_config.known_args_namespace
    early_config.fake_device = load(
        option.fake_device, option.emulator, option.max_threads, option.schedule
    )


def pytest_terminal_summary(terminalreporter, config):
    log = config.fake_device.fake_device_log().decode().splitlines()
    kernels = sorted({line.split()[1] for line in log})
    terminalreporter.write_line(f"{len(log)} dispatches: {' '.join(kernels)}")
