"""Generate text, streamed."""

from __future__ import annotations

import argparse
import json
import sys

from .. import blas
from ..drafters import NGramDrafter
from ..generation import DEFAULT_DEPTH, Sampler, stream_generate, summary
from ..loading import load
from ..sampling import SamplingParams
from ..thinking import reasoning_config, template_kwargs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="Folder or Hub id; demo is the embedded model.")
    add("--prompt", "-p", required=True, help="The message; - reads stdin.")
    add("--system-prompt", help="A system message in front of it.")
    add("--raw", action="store_true", help="No chat template around the prompt.")
    add("--depth", type=int, default=DEFAULT_DEPTH, help="Drafts a round.")
    add("--drafter", choices=("mtp", "ngram"), default="mtp", help="What drafts.")
    add("--no-mtp", action="store_true", help="Plain decoding.")
    add("--temp", type=float, default=0.0, help="Temperature; 0 is greedy.")
    add("--top-p", type=float, default=1.0, help="Nucleus mass; 1 is off.")
    add("--top-k", type=int, default=0, help="Largest tokens to keep; 0 is off.")
    add("--min-p", type=float, default=0.0, help="Share of the largest; 0 is off.")
    add("--seed", type=int, help="Fixes the sampled text.")
    add("--max-tokens", "-m", type=int, default=512, help="-1 is no limit.")
    add_thinking_arguments(parser)
    add("--json", action="store_true", help="One JSON object instead of text.")


def add_thinking_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--thinking",
        choices=("on", "off", "auto"),
        default="auto",
        help="Ask for a thought; auto is the model's default.",
    )
    add("--thinking-budget", type=int, metavar="N", help="Most tokens of a thought.")


THINKING = {"on": True, "off": False, "auto": None}


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        args.temp, args.top_k, args.top_p, args.min_p, "temperature_last"
    )
    model, tokenizer = load(args.model)
    text = []
    for response in stream_generate(
        model,
        tokenizer,
        _prompt(args, model, tokenizer),
        max_tokens=args.max_tokens,
        mtp=_mtp(args, model),
        num_draft_tokens=args.depth,
        sampler=Sampler(params),
        seed=args.seed,
        thinking_budget=args.thinking_budget,
    ):
        text.append(response.text)
        if not args.json:
            print(response.text, end="", flush=True)
    if args.json:
        print(json.dumps(_report("".join(text), response)))
    else:
        print("\n" + "=" * 10)
        print("\n".join(summary(response)))
        if blas.blas_name() == "reference":
            print(blas.HINT, file=sys.stderr)
    return 0


def _mtp(args, model):
    if args.no_mtp:
        return None
    if args.drafter == "ngram":
        return NGramDrafter()
    return args.depth if getattr(model, "mtp_head", None) else "auto"


def _prompt(args, model, tokenizer):
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("--prompt must not be empty.")
    if args.raw or tokenizer.chat_template is None:
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if args.system_prompt:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    kwargs = {}
    if args.thinking != "auto":
        config = reasoning_config(model, tokenizer)
        kwargs = template_kwargs(config, THINKING[args.thinking])
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **kwargs)


def _report(text: str, response) -> dict:
    names = (
        "prompt_tokens",
        "prompt_tps",
        "generation_tokens",
        "generation_tps",
        "peak_memory",
        "finish_reason",
    )
    report = {"text": text, **{name: getattr(response, name) for name in names}}
    report["blas"] = blas.blas_name()
    report["mtp"] = response.mtp and response.mtp.to_dict()
    return report
