"""Measure speed against plain mlx_lm and others, on several kinds of prompts.

Greedy tokens are compared with mlx_lm's first. Then all arms take turns. Exit code 1
if the tokens differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tqdm import tqdm

from .. import proof
from ..benchmark import PLAIN, Case, Joules, arms, measure, peers, prompts, report
from ..generation import find_decoder
from ..loading import find_model, load, load_drafter
from . import info, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="Folder or Hub id; demo is the embedded model.")
    options.add_drafter(parser)
    add(
        "--depths",
        type=options.depth,
        nargs="+",
        default=[1, 2, 3, 4, 6],
        help=f"Drafts a round, {options.DEPTHS}; adaptive is one too.",
    )
    add("--sets", nargs="+", choices=prompts.NAMES, default=prompts.NAMES)
    add("--prompt", action="append", help="Your own, in place of --sets; repeatable.")
    add("--contexts", type=int, nargs="+", default=[1024], help="Tokens of long.")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    add("--top-p", type=float, default=0.0, help="Nucleus mass; 0 is off.")
    add("--top-k", type=int, default=0, help="Largest tokens to keep; 0 is off.")
    add("--max-tokens", "-m", type=int, default=128, help="Tokens of a stream.")
    add("--repeats", type=int, default=3, help="Turns of every arm.")
    add("--draft-model", metavar="PATH", help="Also mlx_lm's and our drafts of it.")
    add(
        "--mtplx",
        metavar="PYTHON",
        default=sys.executable if importlib.util.find_spec("mtplx") else None,
        help="A Python that has the package mtplx, to measure it as well.",
    )
    add("--json", metavar="FILE", help="Write the report here.")
    add("--markdown", metavar="FILE", help="Write it as a page.")
    add("--plot", metavar="FILE", help="Draw speed and acceptance by depth.")


def run(args: argparse.Namespace) -> int:
    options.check(args, repeats=1, max_tokens=2, contexts=1)
    options.check_files(args.json, args.markdown, args.plot)
    if args.plot:
        report.check_plot(args.plot)
    model, tokenizer = load(args.model)
    drafter = options.drafter(args, model, tokenizer)
    decoders = {d: find_decoder(model, drafter, d) for d in args.depths}
    if None in decoders.values():
        raise ValueError("The model has no MTP head. Try --drafter ngram.")
    cases, rows = list(_cases(args, tokenizer)), []
    header = _header(args)
    with ExitStack() as stack:
        found = _arms(args, model, tokenizer, decoders, header["notes"], stack)
        gate = _gate(args, decoders, cases)
        header["notes"].insert(0, f"Greedy tokens: {gate.line}.")
        if not gate.ok:
            print(gate.line, file=sys.stderr)
            return 1
        print(*header["notes"], sep="\n")
        for row in measure(
            {name: arm for name, (_, arm) in found.items()},
            cases,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
            rivals=_rivals(found),
            track=lambda jobs: tqdm(jobs, desc="measuring", leave=False),
        ):
            rows.append({**row, "depth": found[row["arm"]][0]})
            print(_line(row), flush=True)
    _write(args, header, rows)
    return 0


def _cases(args, tokenizer):
    """The prompts as token ids; ``long`` is a case of its own for every length."""
    sets = {name: prompts.SETS[name] for name in args.sets if name != prompts.LONG}
    if args.prompt:
        sets = {"own": args.prompt}
    elif prompts.LONG in args.sets:
        for size in args.contexts:
            text = prompts.long_context(tokenizer.encode, size)
            sets[f"{prompts.LONG} {size}"] = (text,)
    for (name, texts), temperature in product(sets.items(), args.temperatures):
        ids = [list(options.chat_prompt(tokenizer, text)) for text in texts]
        yield Case(name, ids, temperature)


def _arms(args, model, tokenizer, decoders, notes, stack) -> dict:
    """Depth and arm by name. Of an arm that cannot be, ``notes`` gets the reason."""
    shared = model, tokenizer, arms.Filters(args.top_p, args.top_k)
    found = {PLAIN: (None, arms.plain(*shared))}
    for depth, decoder in decoders.items():
        found[f"depth {depth}"] = depth, arms.ours(*shared, decoder)
    if args.draft_model:
        _add_draft_model(args, *shared, found, notes)
    if args.mtplx:
        _add_mtplx(args, *shared, found, notes, stack)
    return found


def _rivals(found) -> dict[str, str]:
    """Who else does the same, by the name of our arm."""
    names = {"depth": "mtplx", "draft model": "mlx_lm draft model"}
    pairs = {
        f"{ours} {depth}": f"{theirs} {depth}"
        for ours, theirs in names.items()
        for depth in {name.rpartition(" ")[2] for name in found}
    }
    return {a: b for a, b in pairs.items() if a in found and b in found}


def _add_draft_model(args, model, tokenizer, filters, found, notes) -> None:
    drafter = load_drafter(args.draft_model, model, tokenizer)
    for depth in (d for d in args.depths if d != "adaptive"):
        arm = arms.ours(model, tokenizer, filters, find_decoder(model, drafter, depth))
        found[f"draft model {depth}"] = None, arm
        theirs = arms.plain(model, tokenizer, filters, drafter.model.model, depth)
        try:
            theirs(options.chat_prompt(tokenizer, "Hello"), 0.0, 2, 0)
        except ValueError as error:
            reason = f"mlx_lm's own draft model is not measured: {error}"
            notes += [] if reason in notes else [reason]
            continue
        found[f"mlx_lm draft model {depth}"] = None, theirs


def _add_mtplx(args, model, tokenizer, filters, found, notes, stack) -> None:
    dtypes = {x.dtype for _, x in tree_flatten(model.parameters())}
    dtype = max(
        (d for d in dtypes if mx.issubdtype(d, mx.floating)), key=lambda d: d.size
    )
    try:
        peer = peers.MTPLX(
            args.mtplx,
            find_model(args.model),
            str(dtype).removeprefix("mlx.core."),
            filters,
            tokenizer.eos_token_ids,
        )
    except (OSError, RuntimeError) as error:
        notes.append(f"mtplx is not measured: {error}")
        return
    stack.callback(peer.close)
    versions = ", ".join(f"{name} {v}" for name, v in peer.versions.items())
    notes.append(f"The peer: {versions}. It is made for Apple's GPUs, not for a CPU.")
    for depth in (0, *(d for d in args.depths if d != "adaptive")):
        found[f"mtplx {depth}" if depth else "mtplx plain"] = None, peer.arm(depth)


def _gate(args, decoders, cases) -> proof.Result:
    """Greedy tokens of every depth on every prompt."""
    ids = {tuple(prompt): None for case in cases for prompt in case.prompts}
    return proof.same_tokens(
        list(decoders.values()),
        [list(prompt) for prompt in ids],
        min(args.max_tokens, 64),
        lambda jobs, label: tqdm(jobs, desc=label, leave=False),
    )


def _header(args) -> dict:
    joules, load, cores = Joules().missing, os.getloadavg()[0], os.cpu_count()
    notes = [f"No joules: {joules}."] if joules else []
    if load > cores / 2:
        notes.append(f"The machine was busy: load {load:.1f} on {cores} cores.")
    return {
        **info.environment(),
        "model": args.model,
        "drafter": options.drafter_name(args),
        "top_p": args.top_p,
        "top_k": args.top_k,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "notes": notes,
    }


def _line(row: dict) -> str:
    name, tps, spread, ratio, rival, per_round, *_ = report.cells(row)
    out = f"{row['prompt_set']}, T={row['temperature']:g}, {name}: {tps} tokens/s, "
    out += f"{ratio}, spread {spread}"
    out += f", against {rival}" if rival else ""
    return out + (f", {per_round} tokens a round" if per_round else "")


def _write(args, header, rows) -> None:
    if args.json:
        text = json.dumps({"header": header, "rows": rows}, indent=1)
        Path(args.json).write_text(text + "\n")
    if args.markdown:
        Path(args.markdown).write_text(report.markdown(header, rows))
    if args.plot:
        report.plot(rows, args.plot)
