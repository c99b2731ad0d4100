"""cmake/embed.cmake: kernel text as a C++ header."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "cmake/embed.cmake"
pytestmark = pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
KERNEL = '#include <metal_stdlib>\n#include "a.h"\n#include "b.h"\nkernel void f();\n'


def embed(folder, **files):
    """The header for k.metal, and what cmake said."""
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
    header = folder / "out/header.h"
    options = {"header": header, "sources": folder / "k.metal", "dirs": ""}
    done = subprocess.run(
        ["cmake", *(f"-D{k}={v}" for k, v in options.items()), "-P", SCRIPT],
        capture_output=True,
        text=True,
    )
    return header.read_text() if done.returncode == 0 else None, done.stderr


def test_headers_are_flattened_once(tmp_path):
    a = '#pragma once\n#include "b.h"\n#define A(x) \\\n  x[0]; // [;"\n'
    header, _ = embed(tmp_path, k_metal=KERNEL, a_h=a, b_h="#pragma once\nint b;\n")
    text = header.partition('R"kernel(')[2].partition(')kernel"')[0]
    lines = [line for line in text.splitlines() if line]
    expected = ["#include <metal_stdlib>", "int b;", "#define A(x) \\"]
    assert lines == [*expected, '  x[0]; // [;"', "kernel void f();"]
    assert "inline constexpr KernelSource k = {" in header


def test_the_hash_follows_every_header(tmp_path):
    files = {"k_metal": KERNEL, "a_h": "int a;\n", "b_h": "int b;\n"}
    first, _ = embed(tmp_path, **files)
    again, _ = embed(tmp_path, **files)
    changed, _ = embed(tmp_path, **{**files, "b_h": "int c;\n"})
    hashes = [header.split('"')[5] for header in (first, again, changed)]
    assert len(hashes[0]) == 12 and hashes[0] == hashes[1] != hashes[2]


def test_what_metal_could_not_take_is_refused(tmp_path):
    header, error = embed(tmp_path, k_metal="// µ\n")
    assert header is None and "must be ASCII" in error
    header, error = embed(tmp_path, k_metal='#include "gone.h"\n')
    assert header is None and "gone.h to include" in error
