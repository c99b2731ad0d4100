"""The documentation says what the code does."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
from reasoning_support import demo_vocabulary

import mlx_mtp.reasoning as r

PAGE = Path(__file__).parents[1] / "docs" / "reasoning.md"
MODULES = ["budget", "config", "emitter", "families", "resolve", "tools", "vocabulary"]


def rows():
    """The table of families as the page should have it."""
    for name, row in r.FAMILIES.items():
        config, strategy = row.config, row.config.strategy
        switch = "always thinks" if strategy.kind == "always" else "none known"
        if strategy.kind == "flag":
            (key,) = strategy.on
            switch = f"`{key}` ({'on' if strategy.default_on else 'off'})"
        cells = [
            name,
            f"`{config.start}` `{config.end}`".replace("|", "\\|"),
            switch,
            config.tools,
            row.source,
            row.checked or "no",
        ]
        yield "| " + " | ".join(cells) + " |"


def test_the_table_of_families_is_the_data():
    page = PAGE.read_text()
    missing = [line for line in rows() if line not in page]
    assert not missing, "add to docs/reasoning.md:\n" + "\n".join(missing)
    table = page[page.index("| family |") :].strip().splitlines()[2:]
    assert table == list(rows())


def test_every_protocol_is_named():
    page = PAGE.read_text()
    assert all(name in page for name in r.PROTOCOLS if name != "none")


def test_the_examples_of_the_page_run():
    pytest.importorskip("transformers")
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert code.count("assert") == 8
    exec(compile(code, str(PAGE), "exec"), {})


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings_run(name):
    module = importlib.import_module(f"mlx_mtp.reasoning.{name}")
    tests = doctest.DocTestFinder().find(
        module,
        globs=vars(r)
        | {
            "config": r.ReasoningConfig(
                "<think>", "</think>", transition=r.Transition("", "\n\n")
            ),
            "vocabulary": demo_vocabulary(),
        },
    )
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        assert runner.run(test).failed == 0, test.name
    assert runner.tries > 0
