"""Many requests: a batch of ours, one after the other, and mlx_lm's plain batch.

    python bench/batch.py [--quick] [--json FILE]

All arms decode the same prompts of the demo model to their limits, in turns, in one
process, prompts included. A ratio is the median over turns of tokens a second against
the other arm's of the same turn. Tokens of greedy rows are compared with their single
runs first.
"""

from __future__ import annotations

import argparse
from functools import partial

import common
import prompts
from common import median, spread


def main():
    p = common.parser(__doc__)
    p.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    p.add_argument("--depths", nargs="+", default=["1", "3", "6", "adaptive"])
    p.add_argument("--temperatures", type=float, nargs="+")
    p.add_argument("--tokens", type=int, help="tokens of a request")
    p.add_argument("--repeats", type=int)
    args = p.parse_args()
    args.tokens = args.tokens or (40 if args.quick else 100)
    args.repeats = args.repeats or (1 if args.quick else 5)
    header = common.start(args)
    common.show_header(header)
    rows: list[dict] = []
    for count in args.rows:
        for temperature in args.temperatures or ([0.0] if args.quick else [0.0, 1.0]):
            for row in compare(count, temperature, args):
                rows.append(row)
                show(row)
                common.write(args.json, header, rows)


def compare(count: int, temperature: float, args: argparse.Namespace):
    """One row an arm."""
    from batch_arms import Arms  # loads MLX: not before its BLAS

    arms = Arms(prompts.problems(count), temperature, args.tokens)
    depths = [d if d == "adaptive" else int(d) for d in args.depths]
    calls = {"mlx_lm batch": arms.mlx_lm, "one by one": partial(arms.one_by_one, 3)}
    calls |= {f"batch, depth {d}": partial(arms.ours, d) for d in depths}
    ties = arms.check(depths) if temperature == 0 else {}
    common.alternate(calls, 2)  # compiles, and an adaptive depth learns
    arms.clear()
    seconds = common.alternate(calls, args.repeats)
    total = count * args.tokens
    speed = {name: [total / s for s in values] for name, values in seconds.items()}
    for name, values in speed.items():
        yield {
            "name": "batch",
            "rows": count,
            "temperature": temperature,
            "tokens": args.tokens,
            "arm": name,
            "tps": median(values),
            "spread": spread(values),
            "ratio": {
                other: median(a / b for a, b in zip(values, speed[other], strict=True))
                for other in ("mlx_lm batch", "one by one")
            },
            **arms.counters(name),
            "near_ties": ties.get(name),
        }


def show(row: dict) -> None:
    ratio = ", ".join(f"{x:.2f}x {name}" for name, x in row["ratio"].items())
    more = ""
    if "acceptance" in row:
        more = (
            f"; accepted {row['acceptance']:.0%}, {row['width']:.1f} rows a round, "
            f"depths {row['depths']}"
        )
    ties = "" if row["near_ties"] is None else f"; {row['near_ties']} near-ties"
    print(
        f"{row['rows']} rows, T={row['temperature']:g}, {row['arm']}: "
        f"{row['tps']:.0f} tok/s ({ratio}), spread {row['spread']:.0%}{more}{ties}",
        flush=True,
    )


if __name__ == "__main__":
    main()
