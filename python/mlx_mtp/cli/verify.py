"""Prove that speculation changes nothing, on this model and machine.

Greedy tokens are compared with mlx_lm's, sampled ones with plain decoding and with
exact probabilities, and a biased round must be caught. Exit code 1 if anything differs,
3 if nothing differs but the biased round was not caught: then nothing is proved.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from tqdm import tqdm

from ..generation import DEFAULT_DEPTH, find_decoder
from ..loading import load
from ..proof import ALPHA, Report, Size, Subject, verify
from . import options

# Some are easy to draft for, some are not.
PROMPTS = (
    "What is 3757 + 4868?",
    "Write a short story about a lighthouse.",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue?",
)
TEXT = "What is "
NO_POWER = 3  # the exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="Folder or Hub id; demo is the embedded model.")
    options.add_drafting(parser)
    add("--prompt", action="append", help="A prompt of your own; may be repeated.")
    add("--streams", type=int, default=Size.streams, help="Sampled streams a case.")
    add("--batch", type=int, default=Size.batch, help="Streams at once.")
    add("--tokens", type=int, default=Size.tokens, help="Greedy tokens a prompt.")
    add("--json", metavar="FILE", help="Write the report here.")


def run(args: argparse.Namespace) -> int:
    options.check(args, streams=1, batch=1, tokens=1)
    options.check_files(args.json)
    depth = DEFAULT_DEPTH if args.depth is None else args.depth
    if depth == "adaptive":
        raise ValueError("--depth must be a number: every depth is proved by itself.")
    model, tokenizer = load(args.model)
    decoder = find_decoder(model, options.drafter(args, model, tokenizer), depth)
    if decoder is None:
        raise ValueError("The model has no MTP head. Try --drafter ngram.")
    subject = Subject(
        decoder.target,
        decoder.drafter,
        depth,
        [options.chat_prompt(tokenizer, prompt) for prompt in args.prompt or PROMPTS],
        tokenizer.encode(TEXT),
    )
    track = partial(tqdm, leave=False)
    report = verify(
        subject,
        Size(args.tokens, args.streams, args.batch),
        lambda jobs, label: track(jobs, desc=label),
    )
    print("\n".join(lines(report)))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report.to_dict(), file, indent=1)
    return 1 if report.differs else 0 if report.power else NO_POWER


def lines(report: Report) -> list[str]:
    """The report for a person."""
    out = []
    for result in report.results:
        mark = "ok  " if result.ok else "WEAK" if result.control else "FAIL"
        line = f"{mark} {result.name}: {result.line}"
        if result.p_values:
            line += f"; smallest p {min(result.p_values.values()):.2g}"
        if result.tv is not None:
            line += f"; would find a shift of {result.tv:.1%}"
        out.append(line)
    out.append(
        f"{'SOMETHING DIFFERS' if report.differs else 'Nothing differs'}: "
        f"{len(report.adjusted)} tests, Holm-corrected at {ALPHA:g}. A shift is a "
        "distance in total variation that is found 99 times of 100."
    )
    if not report.power:
        out.append(
            "NO POWER: a round that is wrong on purpose was not found, so these tests "
            "prove nothing. Take more --streams."
        )
    return out
