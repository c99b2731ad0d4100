"""Would a depth chosen by confidence pay? A bound, from recorded streams.

    python bench/confidence.py [--quick] [--json FILE]

At every token of the demo's streams it records how many of 8 drafts would be accepted,
and what is known in front of such a round:

- probability: what the target gave the newest token
- entropy: of the row that token was drawn from, negative
- whole: whether the round before was accepted to its end
- draft: the drafter's largest probability for its first draft, or how many tokens an
  n-gram drafter has to copy. The host does not have it in time.

A policy has one depth below a limit of such a signal and one from it on. The best for
half of the streams is compared with the best fixed depth for that half, both on the
other half, and the other way round: once with changes of depth that are free and known
before the round is built, and once paid for as in adaptive.py. The seconds of rounds
are those of results/adaptive_cpu.json.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import adaptive
import common

SIGNALS = ("probability", "entropy", "whole", "draft")
COSTS = Path(__file__).parent / "results" / "adaptive_cpu.json"


def main():
    args = common.parser(__doc__).parse_args()
    header, rows = common.start(args), []
    common.show_header(header)
    bench = adaptive.Bench(args.quick)
    for row in json.loads(COSTS.read_text())["rows"]:
        if row["name"] != "replay":
            continue
        kind, cost = row["kind"], row["seconds_by_depth"]
        cost = {int(depth): seconds for depth, seconds in cost.items()}
        streams = [record(bench, kind, p, i) for i, p in enumerate(bench.prompts(kind))]
        halves = streams[: len(streams) // 2], streams[len(streams) // 2 :]
        ways = halves, halves[::-1]
        rows.append({"name": "confidence", "kind": kind})
        for name, change in ("free", 0.0), ("paid", 2 * cost[0]):
            rows[-1][name] = {
                s: [gain(*way, cost, change, s) for way in ways] for s in SIGNALS
            }
        print(rows[-1], flush=True)
        common.write(args.json, header, rows)


def record(bench, kind: str, prompt, seed: int) -> list[dict]:
    """What a round would give, and the signals, at every token of a stream."""
    import mlx.core as mx
    import rounds

    from mlx_mtp.drafters import Drafts
    from mlx_mtp.round import Proposal
    from mlx_mtp.sampling import SamplingParams
    from mlx_mtp.stream import bucket

    drafter, temperature, _ = adaptive.KINDS[kind]
    subject, params = bench.subjects[drafter], SamplingParams(temperature)
    depth, scale = adaptive.DEEPEST, temperature or 1.0
    round_ = rounds.make_round(subject.target, subject.drafter, depth, params)
    draw, first = round_._draw, []

    def noted(state, draws, logits, i):
        if i == 0:
            first.append(mx.softmax(logits / scale, axis=-1).max())
        return draw(state, draws, logits, i)

    round_._draw = noted
    room = bucket(len(prompt) + bench.tokens + 2 * depth)
    state = rounds.begin(round_, prompt, params, room)
    state["keys"] = mx.random.key(seed)[None]
    out, known = [], {"probability": 1.0, "entropy": 0.0}
    while len(out) < bench.tokens:
        proposal = Proposal(*round_.draft(state, room))
        verified, logits = round_._call("verify", round_.verify, room, state, proposal)
        tokens, accepted, _ = round_.accept(verified, proposal, logits)
        sure = first.pop() if first else Drafts(*proposal.drafts).lengths
        out.append({"accepted": accepted.item(), **known, "draft": sure.item()})
        row = logits[0, 0] / scale
        row = row - mx.logsumexp(row)
        token = tokens[0, 0]
        entropy = (mx.exp(row) * row).sum()
        known = {"probability": mx.exp(row[token]).item(), "entropy": entropy.item()}
        if token.item() in subject.tokenizer.eos_token_ids:
            break
        state, _ = round_.commit(
            verified, proposal, tokens[:, :1], mx.zeros_like(accepted)
        )
    return out


def gain(train, test, cost, change: float, signal: str) -> float:
    """On ``test``, over the best fixed depth of ``train``."""
    limits = {1}
    if signal != "whole":
        known = sorted(x[signal] for stream in train for x in stream)
        limits = {known[len(known) * i // 4] for i in (1, 2, 3)}

    def spent(streams, options):
        return sum(seconds(x, cost, change, signal, *options) for x in streams)

    fixed = min(((0, d, d) for d in cost), key=lambda x: spent(train, x))
    best = min(product(limits, cost, cost), key=lambda x: spent(train, x))
    return spent(test, fixed) / spent(test, best)


def seconds(stream, cost, change, signal, limit, low, high) -> float:
    """Of a stream with ``high`` drafts where the signal reaches the limit."""
    at, whole, before, total = 0, 1, None, 0.0
    while at < len(stream):
        known = whole if signal == "whole" else stream[at][signal]
        depth = high if known >= limit else low
        if change and before and depth != before:
            total, at, before = total + change, at + 1, None
            continue
        accepted = min(depth, stream[at]["accepted"])
        total += cost[depth]
        at, whole, before = at + accepted + 1, int(accepted == depth), depth
    return total


if __name__ == "__main__":
    main()
