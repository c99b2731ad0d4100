"""A pytest plugin: the ops run on the fake device.

``pytest -p plugin --fake-device EXTENSION --emulator LIBRARY``
"""

import sys

import fake_device
import pytest


def pytest_addoption(parser):
    parser.addoption("--fake-device", required=True)
    parser.addoption("--emulator", required=True)
    parser.addoption("--max-threads", type=int, default=1024)
    parser.addoption("--fault", default="")


# Before any conftest imports the ops.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    option = early_config.known_args_namespace
    name = "mlx_mtp._ext"
    device = fake_device.FakeDevice(option.fake_device, option.emulator, name)
    device.configure(option.max_threads, fault=option.fault)
    sys.modules[name] = device.ops
    early_config.fake_device = device


def pytest_terminal_summary(terminalreporter, config):
    kernels = {dispatch.kernel for dispatch in config.fake_device.dispatches()}
    terminalreporter.write_line(f"kernels: {' '.join(sorted(kernels))}")
