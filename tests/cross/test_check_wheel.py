""".ci/check_wheel.py finds what must not ship."""

from pathlib import Path

import pytest

pytest.importorskip("lief", reason="THE WHEEL CHECK IS NOT TESTED: no lief")

import check_wheel

from mlx_mtp import _ext

NAME = f"mlx_mtp/{Path(_ext.__file__).name}"
LICENCE = "mlx_mtp-0.1.0.dist-info/licenses/LICENSE"


@pytest.fixture
def files():
    """A wheel as it should be."""
    parts = dict.fromkeys([*check_wheel.PARTS, LICENCE], b"")
    return {**parts, NAME: Path(_ext.__file__).read_bytes()}


def test_a_right_wheel_passes(files):
    assert check_wheel.problems(files) == []


@pytest.mark.parametrize("part", [*check_wheel.PARTS, LICENCE, NAME])
def test_a_missing_part_is_found(files, part):
    del files[part]
    assert len(check_wheel.problems(files)) == 1


@pytest.mark.parametrize("name", ["mlx_mtp/libmlx.so", "mlx_mtp.libs/libmlx-1.so"])
def test_a_copy_of_libmlx_is_found(files, name):
    assert "the only binary" in check_wheel.problems({**files, name: b""})[0]


def test_size_and_library_path_are_checked(files):
    binary = files[NAME].replace(b"$ORIGIN/../mlx/lib", b"/home/me/mlx/lib\0\0")
    assert "library path" in check_wheel.problems({**files, NAME: binary})[0]
    big = check_wheel.problems({**files, "mlx_mtp/demo/big": bytes(21_000_000)})
    assert "MB are more than 20" in big[0]
