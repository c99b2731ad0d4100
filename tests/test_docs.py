"""Every name that a page mentions can be imported as the page says."""

import ast
import builtins
import re
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import cache

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*)[`.(]")
MODULE = re.compile(r"\bmlx_mtp(?:\.[a-z]\w*)*\b")


def named(path):
    """A module of this package, or what is in one; None if it needs another package."""
    parent, _, name = path.rpartition(".")
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if not error.name.startswith("mlx_mtp"):
            return None
    return getattr(import_module(parent), name)


def modules(page):
    """What the page names of this package, and where classes of others are from."""
    yield from map(named, {"mlx_mtp", *MODULE.findall(page)})
    yield from (builtins, cache, mx)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_a_page_says_where_its_classes_are(file):
    page = file.read_text()
    homes = list(modules(page))
    names = sorted(set(CLASS.findall(CODE.sub("", page))))
    assert [x for x in names if not any(hasattr(m, x) for m in homes)] == []


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_the_imports_of_a_page_work(file):
    for language, code in CODE.findall(file.read_text()):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            try:
                exec(ast.unparse(node), {})
            except ModuleNotFoundError as error:  # of an extra
                assert not error.name.startswith("mlx_mtp")
