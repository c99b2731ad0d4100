"""Options that several commands share."""

from __future__ import annotations

import argparse

from ..drafters import NGramDrafter
from ..generation import DEFAULT_DEPTH, Sampler
from ..sampling import SamplingParams

THINKING = {"on": True, "off": False, "auto": None}


def add_decoding(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="Folder or Hub id; demo is the embedded model.")
    add_drafting(parser)
    add("--no-mtp", action="store_true", help="Plain decoding.")
    add("--temp", type=float, default=0.0, help="Temperature; 0 is greedy.")
    add("--top-p", type=float, default=1.0, help="Nucleus mass; 1 is off.")
    add("--top-k", type=int, default=0, help="Largest tokens to keep; 0 is off.")
    add("--min-p", type=float, default=0.0, help="Share of the largest; 0 is off.")
    add("--seed", type=int, help="Fixes the sampled text.")
    add(
        "--coupled",
        action="store_true",
        help="With a seed: the same text for every drafter and depth.",
    )
    add("--max-tokens", "-m", type=int, default=max_tokens, help="-1 is no limit.")
    add(
        "--thinking",
        choices=THINKING,
        default="auto",
        help="Ask for a thought; auto is the model's default.",
    )
    add("--thinking-budget", type=int, metavar="N", help="Most tokens of a thought.")


def add_drafting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--depth",
        type=depth,
        default=DEFAULT_DEPTH,
        help="Drafts a round; adaptive chooses round by round.",
    )
    add("--drafter", choices=("mtp", "ngram"), default="mtp", help="What drafts.")


def depth(text: str) -> int | str:
    """A number of drafts, or ``adaptive``."""
    return text if text == "adaptive" else int(text)


def sampler(args: argparse.Namespace) -> Sampler:
    return Sampler(
        SamplingParams(
            args.temp, args.top_k, args.top_p, args.min_p, "temperature_last"
        ),
        args.coupled,
    )


def mtp(args: argparse.Namespace, model):
    """The ``mtp`` argument of ``stream_generate``."""
    if args.depth != "adaptive" and args.depth < 1:
        raise ValueError(f"--depth must be at least 1 but is {args.depth}.")
    if getattr(args, "no_mtp", False):
        return None
    if args.drafter == "ngram":
        return NGramDrafter()
    if args.depth == "adaptive":
        return "auto"
    return args.depth if getattr(model, "mtp_head", None) else "auto"


def check_text(text: str) -> None:
    """Raises ValueError for what came in as bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("The input must be UTF-8.") from None
