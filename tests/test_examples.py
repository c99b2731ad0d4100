"""The engines in examples/ give the tokens of mlx_lm and of single runs."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from batches import prompt
from tiny import plain_tokens, random_prompt

from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module


def test_the_engine_with_one_op(example, llama):
    decode = example("engine_ops").decode
    start = [*random_prompt(9, 128, 1), 5, 6, 5]
    expected = plain_tokens(llama, start, 40)
    assert list(decode(llama, start, count=40)) == expected
    assert list(decode(llama, [7], count=1)) == plain_tokens(llama, [7], 1)
    end = expected[11]
    stopped = expected[: expected.index(end) + 1]
    assert list(decode(llama, start, count=40, ends={end})) == stopped
    sampled = [list(decode(llama, start, count=40, temperature=1.0)) for _ in range(2)]
    assert sampled[0] == sampled[1] != expected


@pytest.mark.parametrize("drafter", ["ngram", "head"])
def test_the_engine_on_rounds(example, qwen_head, drafter):
    decode = example("engine_rounds").decode
    drafter = NGramDrafter() if drafter == "ngram" else qwen_head.drafter
    prompts = [prompt(i, 128) for i in range(3)]
    for start, output in zip(
        prompts, decode(qwen_head.target, drafter, prompts, count=24), strict=True
    ):
        assert len(output) >= 24
        assert output == plain_tokens(qwen_head.target.model, start, len(output))


class Words:
    """A tokenizer that writes ids."""

    eos_token_ids = frozenset(range(0, 128, 9))

    @property
    def detokenizer(self):
        return Text()


class Text:
    def __init__(self):
        self.words, self.shown = [], 0

    def add_token(self, token):
        self.words.append(f"{token} ")

    def finalize(self):
        pass

    @property
    def last_segment(self):
        new, self.shown = self.words[self.shown :], len(self.words)
        return "".join(new)


def test_the_engine_on_the_batch(example, llama):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 3)
    engine, texts, ends = example("engine_batch").Engine(decoder, Words()), {}, {}
    asked = {engine.ask(prompt(i, 128), max_tokens=20): i for i in range(4)}
    late = engine.ask(prompt(9, 128), max_tokens=20)

    def turn():
        for id_, text, end in engine.turn():
            texts[id_] = texts.get(id_, "") + text
            ends[id_] = end

    turn()
    engine.cancel(late)
    while engine.texts:
        turn()
    for id_, i in asked.items():
        ends_with = {"max_tokens": 20, "stop_tokens": Words.eos_token_ids}
        tokens = [s.token for s in decoder.stream(prompt(i, 128), **ends_with)]
        assert ends[id_] == ("stop" if tokens[-1] in Words.eos_token_ids else "length")
        shown = [t for t in tokens if t not in Words.eos_token_ids]
        assert texts[id_].split() == [str(t) for t in shown]


@pytest.mark.parametrize("name", ["engine_rounds", "engine_batch"])
def test_the_programs_run(name):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for answer in ("73", "125", "638"):
        assert answer in done.stdout


def test_they_are_short():
    for file in EXAMPLES.glob("engine_*.py"):
        code = file.read_text().partition("if __name__")[0]
        assert len(code.splitlines()) <= 60


def test_the_code_of_the_page_runs(capsys):
    page = (EXAMPLES.parent / "docs/batch.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})
    shown = capsys.readouterr().out
    assert shown.count("length") + shown.count("stop") == 3
