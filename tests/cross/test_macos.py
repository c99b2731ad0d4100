"""The extension compiles and strictly links for macOS against the released MLX."""

import pytest

pytest.importorskip("ziglang", reason="THE MACOS BUILD IS NOT CHECKED: no ziglang")
pytest.importorskip("lief", reason="THE MACOS BUILD IS NOT CHECKED: no lief")

import check_wheel
import macos

PYTHON = "/libpython"
LIBMLX = "@rpath/libmlx.dylib"
LIBRARIES = {
    LIBMLX,
    PYTHON,
    "/usr/lib/libSystem.B.dylib",
    "/usr/lib/libc++.1.dylib",
    "/usr/lib/libobjc.A.dylib",
}


class Build:
    def __init__(self, tag, folder):
        self.tag = tag
        self.folder = folder
        self.mlx = macos.fetch_mlx(tag, folder)
        self.log, self.package = macos.build(tag, folder, self.mlx)
        self.extension = next(self.package.glob("_ext.*.so"))


@pytest.fixture(scope="module", params=macos.TAGS)
def build(request, tmp_path_factory):
    return Build(request.param, tmp_path_factory.mktemp("macos"))


def test_builds_without_warnings(build):
    assert "warning" not in build.log


def test_every_symbol_of_mlx_is_exported_there(build):
    used = macos.imports(build.extension)[LIBMLX]
    assert len(used) > 20
    assert used <= macos.exports(build.mlx / "lib/libmlx.dylib")


def test_needs_nothing_else(build):
    binary = macos.binary(build.extension)
    libraries = {library.name for library in binary.libraries}
    assert libraries - {build.extension.name} <= LIBRARIES
    assert list(binary.build_version.minos[:2]) == [*map(int, build.tag.split("."))]


def test_has_library_path_and_kernel_text(build):
    assert check_wheel.problems_of_binary(build.extension.read_bytes()) == []


HIDDEN = """
#include "mlx/backend/metal/device.h"
bool probe() { return mlx::core::metal::is_nax_available(); }
"""
EXPORTED = """
#include "mlx/backend/metal/device.h"
void* probe() { return &mlx::core::metal::device(mlx::core::Device::gpu); }
"""


def test_a_symbol_that_mlx_declares_but_hides_does_not_link(build):
    source = build.folder / "probe.cpp"
    source.write_text(EXPORTED)
    macos.link(source, build.tag, build.folder, build.mlx)
    source.write_text(HIDDEN)
    with pytest.raises(RuntimeError, match=r"undefined symbol: .*is_nax_available"):
        macos.link(source, build.tag, build.folder, build.mlx)
