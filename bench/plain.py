"""Plain decoding through our loop, as behind a step down, against mlx_lm's own.

    python bench/plain.py [--quick] [--json FILE]

The drafter fails, and the next attempt at a round is put off, so all tokens are plain
steps. Pairs of equal streams take turns; the greedy tokens must be equal. ``low`` is
the lower end of the 95 % interval of the median ratio (sign test).
"""

from __future__ import annotations

import sys
import time

import common
import prompts


def main():
    p = common.parser(__doc__)
    p.add_argument("--pairs", type=int, default=30, help="pairs of streams")
    p.add_argument("--cpu", action="store_true", help="CPU seconds of the process")
    p.add_argument("--tokens", type=int, default=192, help="tokens of a stream")
    args = p.parse_args()
    header = common.start(args)
    common.show_header(header)
    rows = [measure(args, sampled) for sampled in (False, True)]
    common.write(args.json, header, rows)
    sys.exit(any(row["low"] < 0.95 for row in rows))


def measure(args, sampled: bool) -> dict:
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step

    import mlx_mtp
    from mlx_mtp import SamplingParams, SpeculativeDecoder, stream
    from mlx_mtp.drafters import NGramDrafter
    from mlx_mtp.targets import as_target

    class Failing(NGramDrafter):
        def propose(self, state, context):
            raise RuntimeError("this drafter always fails")

    stream.MIN_PAUSE = 10**6
    model, tokenizer = mlx_mtp.load("demo", probe=False)
    decoder = SpeculativeDecoder(as_target(model), Failing(), 3)
    prompt = mx.array(tokenizer.encode(prompts.SMALL_TALK[0]))
    temperature = 0.8 if sampled else 0.0
    params = SamplingParams(temperature, filter_order="temperature_last")
    sampler = mlx_lm.sample_utils.make_sampler(temperature)

    def ours():
        steps = decoder.stream(
            prompt, max_tokens=args.tokens, params=params, caches=model.make_cache()
        )
        return [step.token for step in steps]

    def theirs():
        steps = generate_step(prompt, model, max_tokens=args.tokens, sampler=sampler)
        return [token for token, _ in steps]

    assert sampled or ours() == theirs()
    pairs = 6 if args.quick else args.pairs
    clock = time.process_time if args.cpu else time.perf_counter
    seconds = common.alternate({"theirs": theirs, "ours": ours}, pairs, clock)
    ratios = sorted(
        a / b for a, b in zip(seconds["theirs"], seconds["ours"], strict=True)
    )
    row = {
        "name": "sampled" if sampled else "greedy",
        "ratio": common.median(ratios),
        "low": ratios[_rank(pairs)],
        "ours_tps": args.tokens / common.median(seconds["ours"]),
        "theirs_tps": args.tokens / common.median(seconds["theirs"]),
        "pairs": pairs,
    }
    print(", ".join(f"{k} {v:.4g}" if k != "name" else v for k, v in row.items()))
    return row


def _rank(n: int) -> int:
    """How many of ``n`` values lie below the 95 % interval of their median."""
    below, chance, rank = 0.0, 0.5**n, 0
    while below + chance <= 0.025:
        below += chance
        chance *= (n - rank) / (rank + 1)
        rank += 1
    return max(rank - 1, 0)


if __name__ == "__main__":
    main()
