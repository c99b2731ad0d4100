"""Generate text, streamed."""

from __future__ import annotations

import argparse
import json
import sys

from .. import blas
from ..generation import stream_generate, summary
from ..loading import load
from ..thinking import reasoning_config, template_kwargs
from . import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", "-p", required=True, help="The message; - reads stdin.")
    add("--system-prompt", help="A system message in front of it.")
    add("--raw", action="store_true", help="No chat template around the prompt.")
    options.add_decoding(parser, max_tokens=512)
    add("--stop", action="append", help="End in front of this text; may be repeated.")
    add("--json", action="store_true", help="One JSON object instead of text.")


def run(args: argparse.Namespace) -> int:
    options.check(args)
    if args.raw and (args.system_prompt or args.thinking != "auto"):
        raise ValueError("--raw does not go with --system-prompt and --thinking.")
    sampler = options.sampler(args)
    model, tokenizer = load(args.model)
    mtp = options.mtp(args, model, tokenizer)
    text = []
    for response in stream_generate(
        model,
        tokenizer,
        _prompt(args, model, tokenizer),
        max_tokens=args.max_tokens,
        mtp=mtp,
        num_draft_tokens=args.depth,
        sampler=sampler,
        seed=args.seed,
        stop=args.stop,
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


def _prompt(args, model, tokenizer):
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("--prompt must not be empty.")
    options.check_text(prompt)
    if args.raw:
        return prompt
    if tokenizer.chat_template is None:
        if args.system_prompt or args.thinking == "on":
            raise ValueError(
                "--system-prompt and --thinking on need a chat template, and this "
                "model has none."
            )
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if args.system_prompt:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    kwargs = {}
    if args.thinking != "auto":
        config = reasoning_config(model, tokenizer)
        kwargs = template_kwargs(config, options.THINKING[args.thinking])
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
