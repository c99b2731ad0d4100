"""Measure which depth pays here, against plain mlx_lm.

All depths take turns with mlx_lm's own decoding over several prompts and temperatures.
The result is kept, and used by generate and chat when no depth is given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path

from tqdm import tqdm

from ..benchmark import Arm, Run
from ..benchmark.arms import Filters, ours, plain
from ..benchmark.report import check_plot, pyplot
from ..generation import find_decoder
from ..loading import load
from ..tuning import Measurement, Verdict, judge, save_profile
from . import options

PROMPTS = (
    "What is 3757 + 4868?",
    "Why is the sky blue?",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the largest of three numbers.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="Folder or Hub id; demo is the embedded model.")
    options.add_drafter(parser)
    add("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 6], help=options.DEPTHS)
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    add("--prompt", action="append", help="A prompt of your own; may be repeated.")
    add("--max-tokens", "-m", type=int, default=128, help="Tokens of a stream.")
    add("--repeats", type=int, default=5, help="Turns of every arm.")
    add("--json", metavar="FILE", help="Write the measurements here.")
    add("--plot", metavar="FILE", help="Draw tokens a second by depth.")
    add("--dry-run", action="store_true", help="Keep no profile.")


def run(args: argparse.Namespace) -> int:
    options.check(args, repeats=1, max_tokens=2)
    options.check_files(args.json, args.plot)
    if args.plot:
        check_plot(args.plot)
    model, tokenizer = load(args.model)
    drafter = options.drafter(args, model, tokenizer)
    depths = sorted(set(args.depths))
    decoders = {depth: find_decoder(model, drafter, depth) for depth in depths}
    if None in decoders.values():
        raise ValueError("The model has no MTP head. Try --drafter ngram.")
    profile = None if args.dry_run else _profile(args)
    shared = model, tokenizer, Filters()
    arms = {0: plain(*shared)}
    arms |= {depth: ours(*shared, decoder) for depth, decoder in decoders.items()}
    measurements = list(measure(args, tokenizer, arms))
    verdict = judge(measurements)
    if profile is not None:
        save_profile(profile, verdict)
    print("\n".join(lines(verdict)))
    if args.json:
        report = {
            "verdict": asdict(verdict),
            "measurements": [asdict(m) for m in measurements],
        }
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    if args.plot:
        plot(verdict, args.plot)
    return 0


def _profile(args) -> Path:
    """Where the profile will be, which must be writable before minutes are spent."""
    path = options.profile_path(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    options.check_files(path)
    return path


def measure(args, tokenizer, arms: Mapping[int, Arm]) -> Iterator[Measurement]:
    """Every arm on every prompt and temperature in turn; the first turn warms up."""
    prompts = [options.chat_prompt(tokenizer, p) for p in args.prompt or PROMPTS]
    jobs = list(product(range(-1, args.repeats), enumerate(prompts), args.temperatures))
    for turn, (i, prompt), temperature in tqdm(jobs, desc="measuring", leave=False):
        for depth in list(arms) if turn % 2 else list(arms)[::-1]:
            run = arms[depth](prompt, temperature, args.max_tokens, turn + 1)
            if turn >= 0:
                case = f"prompt {i}, T={temperature:g}"
                yield _measurement(depth, case, turn, run)


def _measurement(depth: int, case: str, turn: int, run: Run) -> Measurement:
    rounds, per_round, acceptance = run.tokens - 1, 1.0, 0.0
    if depth:
        rounds, per_round = run.mtp.rounds, run.mtp.tokens_per_round
        acceptance = run.mtp.acceptance_rate
    seconds = (run.seconds - run.first) / rounds if rounds else None
    return Measurement(depth, case, turn, run.tps, per_round, acceptance, seconds)


def lines(verdict: Verdict) -> list[str]:
    """The verdict for a person."""
    out = [f"plain mlx_lm: {verdict.plain_tps:.1f} tokens/s"]
    for arm in verdict.arms:
        line = (
            f"depth {arm.depth}: {arm.tps:.1f} tokens/s, {arm.ratio:.2f}x "
            f"({arm.low:.2f} to {arm.high:.2f}), {arm.acceptance:.0%} accepted, "
            f"{arm.tokens_per_round:.2f} tokens a round"
        )
        out.append(line + (f"; refused: {arm.refused}" if arm.refused else ""))
    out += [f"Warning: {warning}" for warning in verdict.warnings]
    out.append(
        f"Use depth {verdict.depth}."
        if verdict.depth
        else "No depth certainly pays: plain decoding is used."
    )
    return out


def plot(verdict: Verdict, path: str) -> None:
    plt = pyplot()
    plain_tps = verdict.plain_tps
    figure, axes = plt.subplots()
    tps = [plain_tps * arm.ratio for arm in verdict.arms]
    error = [
        [plain_tps * (arm.ratio - arm.low) for arm in verdict.arms],
        [plain_tps * (arm.high - arm.ratio) for arm in verdict.arms],
    ]
    depths = [arm.depth for arm in verdict.arms]
    axes.errorbar(depths, tps, yerr=error, marker="o", capsize=3, label="mlx-mtp")
    axes.axhline(plain_tps, linestyle="--", color="gray", label="plain mlx_lm")
    axes.set(xlabel="drafts a round", ylabel="tokens/s (95 % interval)", ylim=(0, None))
    axes.set_xticks(depths)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
