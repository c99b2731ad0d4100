"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import tuning
from ..drafters import MTPHeadDrafter, NGramDrafter, draft_vocabulary
from ..generation import DEFAULT_DEPTH, Sampler, find_decoder
from ..loading import load_drafter
from ..sampling import SamplingParams
from ..speculative import SpeculativeDecoder
from ..targets import as_target

MAX_DEPTH = MTPHeadDrafter.max_depth
DEPTHS = f"1 to {MAX_DEPTH} (16 of an assistant or a smaller model)"
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
        help=f"Drafts a round, {DEPTHS}; adaptive chooses round by round. By default "
        f"what mlx-mtp tune found, else {DEFAULT_DEPTH}.",
    )
    add_drafter(parser)


def add_drafter(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--drafter",
        default="mtp",
        help="What drafts: mtp, ngram, or the folder or Hub id of an assistant or of a "
        "smaller model.",
    )
    add(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="The head or assistant proposes the N most frequent tokens only.",
    )


def depth(text: str) -> int | str:
    """A number of drafts, or ``adaptive``."""
    return text if text == "adaptive" else int(text)


def check(args: argparse.Namespace, **least: int) -> None:
    """Raises ValueError for numbers that would fail later, with a model loaded.

    Args:
        least: The least value of options by their names. Depths and temperatures are
            looked at wherever there are some.
    """
    for name, bound in least.items():
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < bound:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least {bound} but is {value}.")
    for number in getattr(args, "depths", None) or [args.depth]:
        if number not in (None, "adaptive") and not 1 <= number <= MAX_DEPTH:
            raise ValueError(f"A depth must be in [1, {MAX_DEPTH}] but is {number}.")
    top_k, top_p = getattr(args, "top_k", 0), getattr(args, "top_p", 0.0) or 1.0
    for temperature in getattr(args, "temperatures", []):
        SamplingParams(temperature, top_k, top_p)


def check_files(*paths: str | Path | None) -> None:
    """Raises OSError for a file that could not be written after all the work."""
    for path in map(Path, filter(None, paths)):
        if path.is_fifo():
            continue
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()


def sampler(args: argparse.Namespace) -> Sampler:
    return Sampler(
        SamplingParams(
            args.temp, args.top_k, args.top_p, args.min_p, "temperature_last"
        ),
        args.coupled,
    )


def drafter(args: argparse.Namespace, model, tokenizer):
    """A drafter, or "auto" for the model's own head."""
    size, head = args.draft_vocabulary, getattr(model, "mtp_head", None)
    if args.drafter == "ngram":
        if size is not None:
            raise ValueError("--draft-vocabulary does not go with --drafter ngram.")
        return NGramDrafter()
    ids = None if size is None else draft_vocabulary(tokenizer, size)
    if args.drafter != "mtp":
        return load_drafter(args.drafter, model, tokenizer, vocabulary=ids)
    if head is None or ids is None:
        return "auto"
    return MTPHeadDrafter(head.head, as_target(model), ids)


def drafter_name(args: argparse.Namespace) -> str:
    size = args.draft_vocabulary
    return args.drafter if size is None else f"{args.drafter}, {size} tokens"


def profile_path(args: argparse.Namespace) -> Path:
    """Where the profile of this model and drafter is kept."""
    return tuning.profile_path(args.model, drafter_name(args))


def choose_depth(args: argparse.Namespace) -> dict[int, float] | None:
    """Sets the depth that was not given; the costs that ``mlx-mtp tune`` found."""
    if args.depth not in (None, "adaptive"):
        return None
    profile = tuning.load_profile(profile_path(args))
    tuned, costs = profile or (DEFAULT_DEPTH, None)
    if args.depth is None:
        # Depth 0 is what tuning says when no depth pays.
        args.depth, args.no_mtp = tuned or 1, args.no_mtp or not tuned
    return costs


def mtp(args: argparse.Namespace, model, tokenizer):
    """The ``mtp`` argument of ``stream_generate``."""
    costs = choose_depth(args)
    if args.no_mtp:
        return None
    chosen = drafter(args, model, tokenizer)
    if args.depth == "adaptive":
        decoder = find_decoder(model, chosen, "adaptive") if costs else None
        if decoder is None:
            return chosen
        return SpeculativeDecoder(decoder.target, decoder.drafter, "adaptive", costs)
    has_head = getattr(model, "mtp_head", None) is not None
    return args.depth if chosen == "auto" and has_head else chosen


def chat_prompt(tokenizer, text: str) -> list[int]:
    """Token ids of one user message, or of the text if there is no chat template."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    message = {"role": "user", "content": text}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True)


def check_text(text: str) -> None:
    """Raises ValueError for what came in as bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("The input must be UTF-8.") from None
