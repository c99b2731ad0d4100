"""Adaptive depth against every fixed one: replayed, and live.

    python bench/adaptive.py [--quick] [--json FILE]

Replay: how many of 8 drafts would be accepted is recorded at every token of the demo
model's streams, kind by kind. The shipped policy then runs on these records with the
measured seconds of a round of each depth, once knowing them, as after ``mlx-mtp tune``,
and once from no knowledge at all, and is compared with the best fixed depth, plain
decoding included. A change of depth costs the token between, and as much again.

Live: pairs of streams in turns, adaptive against plain ``mlx_lm`` and against the
depth that was best in the replay.
"""

from __future__ import annotations

import common
import prompts
from common import median, spread

DEEPEST = 8
BAR = 0.95
# Prompt kinds: drafter, temperature, thinking; "text" goes on from a bare beginning.
KINDS = {
    "thinking, greedy": ("mtp", 0.0, True),
    "thinking, T=1": ("mtp", 1.0, True),
    "answers, greedy": ("mtp", 0.0, False),
    "answers, T=1": ("mtp", 1.0, False),
    "text, T=1": ("mtp", 1.0, None),
    "copied, thinking": ("ngram", 0.0, True),
    "copied, text T=1.5": ("ngram", 1.5, None),
}


def main():
    p = common.parser(__doc__)
    p.add_argument("--pairs", type=int, help="live pairs of a kind")
    args = p.parse_args()
    header = common.start(args)
    common.show_header(header)
    bench, rows = Bench(args.quick), []
    best = {}
    for kind in KINDS:
        rows.append(bench.replay(kind))
        best[kind] = rows[-1]["best_depth"]
        print(rows[-1], flush=True)
        common.write(args.json, header, rows)
    for kind in ("thinking, greedy", "text, T=1"):
        pairs = args.pairs or (4 if args.quick else 30)
        rows.append(bench.live(kind, best[kind], pairs))
        print(rows[-1], flush=True)
        common.write(args.json, header, rows)
    raise SystemExit(any(row["name"] == "replay" and not row["ok"] for row in rows))


class Bench:
    def __init__(self, quick: bool):
        from streams import Subject

        from mlx_mtp.drafters import NGramDrafter

        self.quick = quick
        self.subjects = {"mtp": Subject("demo"), "ngram": Subject("demo")}
        self.subjects["ngram"].drafter = NGramDrafter()
        self.tokens, self.count = (40, 2) if quick else (160, 12)
        self.costs: dict[tuple, dict[int, float]] = {}

    def prompts(self, kind: str) -> list[list[int]]:
        drafter, _, thinking = KINDS[kind]
        subject = self.subjects[drafter]
        if thinking is None:
            texts = ["What is ", "The first ", "A house ", "In the ", "It was ", "He "]
            texts = (texts * self.count)[: self.count]
            return [subject.tokenizer.encode(text) for text in texts]
        # Answers alone are short.
        count = self.count if thinking else 5 * self.count
        questions = prompts.problems(count, seed=5)
        return [subject.encode(question, thinking=thinking) for question in questions]

    def replay(self, kind: str) -> dict:
        from mlx_mtp.adaptive import Acceptance, AdaptiveDepth, Costs, FixedDepth

        drafter, temperature, _ = KINDS[kind]
        cost = self.cost(drafter, temperature)
        records = [
            self.record(kind, prompt, seed)
            for seed, prompt in enumerate(self.prompts(kind))
        ]
        fixed = {
            depth: sum(replayed(x, cost, FixedDepth(depth)) for x in records)
            for depth in cost
        }
        ours = {}
        for name, costs in (("tuned", Costs(cost)), ("cold", Costs())):
            acceptance = Acceptance()
            ours[name] = sum(
                replayed(x, cost, AdaptiveDepth(costs, DEEPEST, 0, acceptance))
                for x in records
            )
        best = min(fixed, key=fixed.get)
        return {
            "name": "replay",
            "kind": kind,
            "streams": len(records),
            "tokens": sum(map(len, records)),
            "best_depth": best,
            "ratio_to_best": {name: fixed[best] / x for name, x in ours.items()},
            "ratio_to_plain": {name: fixed[0] / x for name, x in ours.items()},
            "ok": self.quick or fixed[best] / ours["tuned"] >= BAR,
            "seconds_by_depth": cost,
        }

    def cost(self, drafter: str, temperature: float) -> dict[int, float]:
        """Seconds of a round by depth, the depths in turns."""
        key = drafter, temperature > 0
        if key in self.costs:
            return self.costs[key]
        subject, found = self.subjects[drafter], {d: [] for d in range(DEEPEST + 1)}
        prompt = subject.encode("What is 5736 + 4868?")
        for turn in range(2 if self.quick else 6):
            for depth, seconds in found.items():
                if depth:
                    run = subject.ours(prompt, 100, temperature, depth, turn)
                    rounds = run.mtp.rounds
                else:
                    run = subject.plain(prompt, 100, temperature, turn)
                    rounds = len(run.tokens) - 1
                if turn:  # the first compiles
                    seconds.append((run.seconds - run.first) / rounds)
        # The least disturbed turn.
        self.costs[key] = {depth: min(x) for depth, x in found.items()}
        return self.costs[key]

    def record(self, kind: str, prompt, seed: int) -> list[int]:
        """How many drafts of a block would be accepted, at every token of a stream."""
        import mlx.core as mx
        import rounds

        from mlx_mtp.sampling import SamplingParams
        from mlx_mtp.stream import bucket

        drafter, temperature, _ = KINDS[kind]
        subject = self.subjects[drafter]
        params = SamplingParams(temperature)
        round_ = rounds.make_round(subject.target, subject.drafter, DEEPEST, params)
        room = bucket(len(prompt) + self.tokens + 2 * DEEPEST)
        state, lengths = rounds.begin(round_, prompt, params, room), []
        state["keys"] = mx.random.key(seed)[None]
        while len(lengths) < self.tokens:
            proposal, verified, logits = round_.halves(state, room)
            tokens, accepted, _ = round_.accept(verified, proposal, logits)
            lengths.append(accepted.item())
            if tokens[0, 0].item() in subject.tokenizer.eos_token_ids:
                break
            # Only the first token is kept, so that the next one is recorded as well.
            state, _ = round_.commit(
                verified, proposal, tokens[:, :1], mx.zeros_like(accepted)
            )
        return lengths

    def live(self, kind: str, best: int, pairs: int) -> dict:
        from mlx_mtp.speculative import SpeculativeDecoder

        drafter, temperature, _ = KINDS[kind]
        subject = self.subjects[drafter]
        adaptive = SpeculativeDecoder(subject.target, subject.drafter, "adaptive")
        subject._decoders["adaptive"] = adaptive
        arms, asked = {"adaptive": "adaptive", "plain": 0, "best": best}, {}
        tps: dict[str, list[float]] = {name: [] for name in arms}
        texts = self.prompts(kind)
        for turn in range(-2, pairs):
            prompt = texts[turn % len(texts)]
            for name in list(arms) if turn % 2 else list(arms)[::-1]:
                depth = arms[name]
                if depth == 0:
                    run = subject.plain(prompt, self.tokens, temperature, turn + 2)
                else:
                    run = subject.ours(
                        prompt, self.tokens, temperature, depth, turn + 2
                    )
                    asked[name] = run.mtp.depths
                if turn >= 0:
                    tps[name].append(run.tps)
        return {
            "name": "live",
            "kind": kind,
            "pairs": pairs,
            "best_depth": best,
            "tps": {name: median(x) for name, x in tps.items()},
            "spread": {name: spread(x) for name, x in tps.items()},
            "to_plain": interval(tps["adaptive"], tps["plain"]),
            "to_best": interval(tps["adaptive"], tps["best"]),
            "last_depths": asked["adaptive"],
        }


def replayed(lengths, cost, pace) -> float:
    """Seconds of a recorded stream under a policy."""
    at, seconds = 0, 0.0
    while at < len(lengths):
        depth = pace.depth
        # What is accepted behind the end is no gain.
        accepted = min(depth, lengths[at], len(lengths) - at)
        emitted = min(accepted + 1, len(lengths) - at)
        seconds += cost[depth]
        at += emitted
        pace.add(accepted, emitted, cost[depth])
        if depth and pace.depth != depth and at < len(lengths):
            seconds, at = seconds + 2 * cost[0], at + 1
    pace.end(len(lengths))
    return seconds


def interval(ours, others) -> dict:
    """The geometric mean of paired ratios with its 95 % interval, by bootstrap."""
    import numpy as np

    logs = np.log(np.array(ours) / np.array(others))
    means = np.random.default_rng(0).choice(logs, (4000, logs.size)).mean(axis=1)
    ratio, low, high = np.exp([logs.mean(), *np.quantile(means, [0.025, 0.975])])
    return {"ratio": float(ratio), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()
