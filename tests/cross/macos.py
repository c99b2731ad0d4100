"""Compiles and strictly links the extension for macOS arm64 on Linux."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import lief
import nanobind
import ziglang

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ZIG = Path(ziglang.__file__).with_name("zig")
TAGS = ("14.0", "15.0", "26.0")

# Names of libc++ that we use and MLX's binaries do not: sized operators delete, in
# macOS since 10.11, and waiting on an atomic, since 11.
EXTRA_LIBCXX = {
    "__ZdlPvm",
    "__ZdlPvmSt11align_val_t",
    "__ZNSt3__120__libcpp_atomic_waitEPVKNS_17__cxx_atomic_implIxNS_"
    "22__cxx_atomic_base_implIxEEEEx",
    "__ZNSt3__123__cxx_atomic_notify_oneEPVKNS_17__cxx_atomic_implIxNS_"
    "22__cxx_atomic_base_implIxEEEE",
}


def run(*args, **kwargs):
    """Runs a command, raises with its output when it fails."""
    args = [str(a) for a in args]
    # zigcxx finds this Python and its packages.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    done = subprocess.run(args, capture_output=True, text=True, env=env, **kwargs)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)}\n{done.stdout}{done.stderr}")
    return done.stdout


def fetch_mlx(tag, folder):
    """The released wheels of MLX for one macOS as one tree. Returns its ``mlx``."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    platform = f"macosx_{tag.replace('.', '_')}_arm64"
    pin = version("mlx")
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--platform", platform, "--python-version", python),
        *("--dest", folder, f"mlx=={pin}", f"mlx-metal=={pin}"),
    )
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder / "mlx"


def binary(path):
    return lief.MachO.parse(str(path)).at(0)


def imports(path):
    """The undefined symbols of a library, as a dict from library to names."""
    found = {}
    library = binary(path)  # owns what it iterates over
    for symbol in library.imported_symbols:
        bound = symbol.has_binding_info and symbol.binding_info.has_library
        home = symbol.binding_info.library.name if bound else ""
        found.setdefault(home, set()).add(symbol.name)
    return found


def exports(path):
    library = binary(path)
    return {symbol.name for symbol in library.exported_symbols}


def write_stub(path, install_name, symbols):
    names = ", ".join(f"'{name}'" for name in sorted(symbols))
    path.write_text(
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
        f"install-name: '{install_name}'\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {names} ]\n...\n"
    )


def write_stubs(folder, mlx):
    """Stub libraries with the names that a Mac is known to have and no others.

    libc++: what MLX's released binaries import. Python: nanobind's own list.
    """
    libcxx = "/usr/lib/libc++.1.dylib"
    names = set(EXTRA_LIBCXX)
    for path in (mlx / "lib/libmlx.dylib", *mlx.glob("core.cpython-*")):
        found = imports(path)
        # Weak symbols such as operator new are bound without a library.
        names |= found[libcxx] | {n for n in found[""] if n.startswith("__Z")}
    folder.mkdir()
    write_stub(folder / "libc++.tbd", libcxx, names)
    symbols = Path(nanobind.cmake_dir(), "darwin-ld-cpython.sym").read_text()
    write_stub(folder / "libpython.tbd", "/libpython", set(symbols.split()) - {"-U"})
    write_stub(folder / "libobjc.tbd", "/usr/lib/libobjc.A.dylib", ["_objc_msgSend"])


def build(tag, folder, mlx):
    """Builds and installs the package. Returns the log and the installed folder."""
    write_stubs(folder / "stubs", mlx)
    tree = folder / "build"
    run(
        *("cmake", "-S", ROOT, "-B", tree),
        f"-DCMAKE_TOOLCHAIN_FILE={HERE / 'toolchain.cmake'}",
        f"-DCMAKE_OSX_DEPLOYMENT_TARGET={tag}",
        f"-DCROSS_STUBS={folder / 'stubs'}",
        f"-DCROSS_ZIG={ZIG}",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        "-DMLX_MTP_LTO=OFF",
        f"-DMLX_ROOT={mlx}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={sysconfig.get_paths()['include']}",
        f"-Dnanobind_ROOT={nanobind.cmake_dir()}",
        f"-DSKBUILD_SOABI=cpython-{sys.version_info.major}{sys.version_info.minor}-darwin",
    )
    log = run("cmake", "--build", tree, "-j2")
    run("cmake", "--install", tree, "--prefix", folder / "install")
    return log, folder / "install" / "mlx_mtp"


def link(source, tag, folder, mlx):
    """Compiles and links one C++ file as the extension is linked."""
    output = folder / (Path(source).stem + ".so")
    run(
        *(HERE / "zigcxx", f"-mmacosx-version-min={tag}", "-std=c++20", "-c", source),
        *("-isystem", HERE / "stubs/include", "-isystem", mlx / "include"),
        *("-isystem", mlx / "include/metal_cpp", "-o", output.with_suffix(".o")),
    )
    run(
        *(HERE / "zigcxx", f"-mmacosx-version-min={tag}", "-bundle", "-o", output),
        *(output.with_suffix(".o"), mlx / "lib/libmlx.dylib"),
        *(folder / "stubs/libobjc.tbd", folder / "stubs/libc++.tbd"),
    )
    return output
