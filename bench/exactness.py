"""Exactness on real weights: one command, resumed where it was stopped.

    python bench/exactness.py [--quick] [--parts NAME ...] [--json FILE]

greedy      the demo model, 100 prompts of 128 tokens (on past the end of an answer),
            depths 1 to 6: the tokens of plain ``mlx_lm``, on the BLAS of MLX's wheel,
            where rounding does not depend on the number of rows
ngram       the same of SmolLM2 with copied drafts, 8 prompts of 48 tokens
sampled     the next three tokens of the demo model in 20,000 streams, drawn by the
            compiled round in batches, against their exact probabilities: chi-square,
            with its power and a biased round that must fail
coupled     coupled streams of the demo, 50 prompts of 100 tokens: the same for plain
            sampling by ``mlx_lm``, copied drafts and the head at depths 1 to 8
acceptance  drafts of the demo's head against the numbers on its card, and a wrong
            hidden row, which must show

A result that is in the JSON file already is not computed again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import common
import prompts

RESULTS = Path(__file__).parent / "results" / "exactness_demo.json"
# The BLAS of each part: equality needs one that rounds the same for any number of rows,
# the others have a lot to compute.
PARTS = {
    "greedy": "wheel",
    "ngram": "wheel",
    "sampled": "openblas",
    "coupled": "wheel",
    "acceptance": "openblas",
}


def main():
    p = common.parser(__doc__)
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.set_defaults(blas=None, json=None)
    args = p.parse_args()
    if args.json is None and not args.quick:
        args.json = RESULTS
    if len(args.parts) > 1:
        raise SystemExit(any([_run_alone(part) for part in args.parts]))
    part = args.parts[0]
    args.blas = args.blas or PARTS[part]
    header = common.start(args)
    common.show_header(header)
    results = Results(args.json, part, header)
    globals()[part](results, args.quick)
    failed = [row["key"] for row in results.rows if not row["ok"]]
    print(f"{part}: {len(results.rows)} results, {len(failed)} failed", *failed)
    raise SystemExit(bool(failed))


def _run_alone(part: str) -> int:
    """Runs a part in a process of its own, as a process has one BLAS."""
    given = sys.argv[1:]
    if "--parts" in given:
        at = given.index("--parts")
        rest = given[at + 1 :]
        while rest and rest[0] in PARTS:
            rest.pop(0)
        given = given[:at] + rest
    return subprocess.call([sys.executable, __file__, *given, "--parts", part])


class Results:
    """The rows of one part, kept with those of the others and written after each."""

    def __init__(self, path: Path | None, part: str, header: dict):
        self.path, self.part = path, part
        self.parts = {}
        if path is not None and path.exists():
            self.parts = json.loads(path.read_text())["parts"]
        self.rows = self.parts.get(part, {"rows": []})["rows"]
        self.parts[part] = {"header": header, "rows": self.rows}

    def add(self, key: str, compute: Callable[[], dict]) -> None:
        """Adds the row ``{"key", "ok", ...}`` that ``compute`` gives, if it is new."""
        if any(row["key"] == key for row in self.rows):
            return
        self.rows.append({"key": key, **compute()})
        common.write_json(self.path, {"parts": self.parts})
        print(self.rows[-1], flush=True)


# Greedy equality


def greedy(results: Results, quick: bool) -> None:
    depths = (1, 3, 6) if quick else (1, 2, 3, 4, 5, 6)
    questions = prompts.problems(3 if quick else 100, seed=1)
    _equality(results, "demo", questions, 32 if quick else 128, depths)


def ngram(results: Results, quick: bool) -> None:
    questions = [q for pair in prompts.TEXT.values() for q in pair]
    size = (questions[:1], 8) if quick else (questions, 48)
    _equality(results, "smollm2", *size, (4,))


def _equality(results, name, questions, max_tokens, depths) -> None:
    from streams import Subject

    try:
        subject = Subject(name)
    except FileNotFoundError as error:
        print(f"{name}: skipped. {error}")
        return
    for i, question in enumerate(questions):
        results.add(
            f"greedy {name} {i}",
            lambda q=question: _equal_row(subject, q, max_tokens, depths),
        )


def _equal_row(subject, question, max_tokens, depths) -> dict:
    """One prompt at all depths: equal, or parted at a near-tie."""
    prompt = subject.encode(question)
    expected = subject.plain_tokens(prompt, max_tokens)
    near_ties, wrong = {}, {}
    for depth in depths:
        got = subject.our_tokens(prompt, max_tokens, depth)
        difference = subject.difference(prompt, expected, got)
        if difference is not None:
            (near_ties if difference["near_tie"] else wrong)[depth] = difference
    return {
        "ok": not wrong,
        "depths": list(depths),
        "tokens": len(expected),
        "near_ties": near_ties,
        "wrong": wrong,
    }


# The sampled distribution


def sampled(results: Results, quick: bool) -> None:
    from distribution import BIASES, check
    from streams import Subject

    subject = Subject("demo")
    streams = 2000 if quick else 20000
    poor = {"temperature": 1.0, "draft_temperature": 0.4}  # has many rejections
    cases = {
        f"T=1, drafts at T=0.4, depth {depth}": {"depth": depth, **poor}
        for depth in ((2,) if quick else (1, 2, 3, 4))
    }
    if not quick:
        cases["T=1, depth 3"] = {"depth": 3, "temperature": 1.0}
        cases["T=0.7, top-p 0.9, depth 3"] = {
            "depth": 3,
            "temperature": 0.7,
            "top_p": 0.9,
        }
        cases["T=1.3, top-k 6, depth 3"] = {"depth": 3, "temperature": 1.3, "top_k": 6}
    for bias in BIASES:
        cases[f"biased, must fail: {bias}"] = {"depth": 2, "bias": bias, **poor}
    for label, settings in cases.items():
        results.add(
            f"sampled {label}",
            lambda s=settings: check(subject, streams=streams, **s),
        )


# Coupled streams

SAMPLERS = (
    {"temp": 1.0},
    {"temp": 0.7, "top_p": 0.9},
    {"temp": 1.5, "top_k": 30},
    {"temp": 1.2, "min_p": 0.05},
    {"temp": 2.0, "top_p": 0.95, "top_k": 100},
)


def coupled(results: Results, quick: bool) -> None:
    from streams import Subject

    subject = Subject("demo")
    for i, (question, tools) in enumerate(prompts.mixed(2 if quick else 50, seed=3)):
        prompt = subject.encode(question, tools, thinking=i % 2 == 0)
        results.add(
            f"coupled {i}",
            lambda p=prompt, i=i: _coupled_row(subject, p, i, 20 if quick else 100),
        )


def _coupled_row(subject, prompt, seed: int, count: int) -> dict:
    from mlx_mtp import NGramDrafter, make_sampler, stream_generate

    options = SAMPLERS[seed % len(SAMPLERS)]

    def tokens(mtp):
        responses = stream_generate(
            subject.model,
            subject.tokenizer,
            prompt,
            count,
            mtp=mtp,
            num_draft_tokens=4,
            sampler=make_sampler(**options, coupled=True),
            seed=seed,
        )
        return [response.token for response in responses]

    expected, arms = tokens(None), (NGramDrafter(), *range(1, 9))
    wrong = [str(mtp) for mtp in arms if tokens(mtp) != expected]
    return {
        "ok": not wrong,
        "sampler": options,
        "tokens": len(expected),
        "arms": len(arms),
        "wrong": wrong,
    }


# Acceptance

# Accepted at depth 1 to 4 where all before were, and tokens, from the model's card.
CARD = {
    ("on", 0.0): ((0.996, 0.992, 0.994, 0.994), 2507, 4.84),
    ("on", 1.0): ((0.966, 0.986, 0.990, 0.996), 2511, 4.68),
    ("off", 0.0): ((0.853, 0.944, 0.938, 0.938), 394, 3.61),
    ("off", 1.0): ((0.860, 0.976, 0.946, 0.918), 365, 3.65),
}


def acceptance(results: Results, quick: bool) -> None:
    from streams import Subject

    subject = Subject("demo")
    questions = prompts.mixed(8 if quick else 64, seed=2)
    for thinking, temperature in CARD:
        results.add(
            f"acceptance, thinking {thinking} T={temperature:g}",
            lambda t=thinking, x=temperature: _accept_row(subject, questions, t, x),
        )
    results.add("acceptance, wrong hidden row", lambda: _wrong_row(subject, questions))


def _accept_row(subject, questions, thinking, temperature) -> dict:
    """Against the card by a two-sample test of each position: |z| must be below 4."""
    card, card_tokens, card_per_round = CARD[thinking, temperature]
    reached, accepted = _count(subject, questions, thinking == "on", temperature)
    rates = [a / n for a, n in zip(accepted, reached, strict=True)]
    theirs, z = card_tokens / card_per_round, []
    for rate, n, expected in zip(rates, reached, card, strict=True):
        pooled = (rate * n + expected * theirs) / (n + theirs)
        error = (pooled * (1 - pooled) * (1 / n + 1 / theirs)) ** 0.5
        z.append((rate - expected) / max(error, 1e-9))
        theirs *= expected
    return {
        "ok": all(abs(x) < 4 for x in z),
        "accepted": rates,
        "card": card,
        "z": z,
        "rounds": reached[0],
    }


def _count(subject, questions, thinking, temperature, depth=4):
    """Rounds that reached each position of the block, and that accepted it."""
    reached, accepted = [0] * (depth + 1), [0] * (depth + 1)
    for i, (question, tools) in enumerate(questions):
        prompt = subject.encode(question, tools, thinking)
        run = subject.ours(prompt, 200, temperature, depth, seed=i)
        at = 0
        for from_draft in run.from_draft[1:]:  # the first is the prompt's own
            reached[at] += 1
            accepted[at] += from_draft
            at = at + 1 if from_draft else 0
    return reached[:depth], accepted[:depth]


def _wrong_row(subject, questions) -> dict:
    """The head reads the hidden row before the one it was trained on."""
    import mlx.core as mx
    from streams import Subject

    from mlx_mtp.drafters import MTPHeadDrafter

    class OneRowEarly(MTPHeadDrafter):
        def propose(self, state, context):
            hidden = mx.roll(context.hidden, 1, axis=1)
            return super().propose(state, replace(context, hidden=hidden))

    wrong = Subject("demo")
    wrong.drafter = OneRowEarly(wrong.model.mtp_head.head, wrong.target)
    rates = []
    for s in (subject, wrong):
        reached, accepted = _count(s, questions[:8], True, 0.0)
        rates.append(accepted[0] / reached[0])
    return {"ok": rates[1] < rates[0] - 0.2, "right": rates[0], "wrong": rates[1]}


if __name__ == "__main__":
    main()
