"""Plain decoding through our loop, as behind a step down, against mlx_lm's own.

    python bench/plain.py [--quick] [--json FILE]

The drafter fails, and the next attempt at a round is put off, so all tokens are plain
steps; the third row is ``stream_generate(mtp=None)``. Pairs of equal streams take
turns; the greedy tokens must be equal. ``low`` is the lower end of the 95 % interval of
the median ratio (sign test). Ends with code 1 if one is below 0.95.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import common
import prompts


def main():
    p = common.parser(__doc__)
    p.add_argument("--pairs", type=int, default=30, help="pairs of streams")
    p.add_argument("--cpu", action="store_true", help="CPU seconds of the process")
    p.add_argument("--tokens", type=int, default=128, help="tokens of a stream")
    args = p.parse_args()
    header = common.start(args)
    common.show_header(header)
    rows = [
        measure(args, name, *make(args, sampled))
        for name, make, sampled in (
            ("greedy", stepped_down, False),
            ("sampled", stepped_down, True),
            ("mtp=None", without, False),
        )
    ]
    common.write(args.json, header, rows)
    sys.exit(any(row["low"] < 0.95 for row in rows))


def stepped_down(args, sampled: bool):
    """Our loop behind a drafter that fails, and ``mlx_lm``'s ``generate_step``."""
    import mlx_lm
    from mlx_lm.generate import generate_step

    from mlx_mtp import SamplingParams, SpeculativeDecoder, stream
    from mlx_mtp.drafters import NGramDrafter
    from mlx_mtp.targets import as_target

    class Failing(NGramDrafter):
        def propose(self, state, context):
            raise RuntimeError("this drafter always fails")

    stream.MIN_PAUSE = 10**6
    model, _, prompt = demo()
    decoder = SpeculativeDecoder(as_target(model), Failing(), 3)
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
    return ours, theirs


def without(args, sampled: bool):
    """``stream_generate`` of both packages."""
    import mlx_lm

    import mlx_mtp

    model, tokenizer, prompt = demo()

    def tokens(package, **options):
        steps = package.stream_generate(
            model, tokenizer, prompt, args.tokens, **options
        )
        return [step.token for step in steps]

    ours, theirs = partial(tokens, mlx_mtp, mtp=None), partial(tokens, mlx_lm)
    assert ours() == theirs()
    return ours, theirs


def demo():
    import mlx.core as mx

    import mlx_mtp

    model, tokenizer = mlx_mtp.load("demo", probe=False)
    return model, tokenizer, mx.array(tokenizer.encode(prompts.SMALL_TALK[0]))


def measure(args, name: str, ours, theirs) -> dict:
    pairs = 6 if args.quick else args.pairs
    clock = time.process_time if args.cpu else time.perf_counter
    seconds = common.alternate({"theirs": theirs, "ours": ours}, pairs, clock)
    ratios = sorted(
        a / b for a, b in zip(seconds["theirs"], seconds["ours"], strict=True)
    )
    row = {
        "name": name,
        "ratio": common.median(ratios),
        "low": ratios[_rank(pairs)],
        "ours_tps": args.tokens / common.median(seconds["ours"]),
        "theirs_tps": args.tokens / common.median(seconds["theirs"]),
        "pairs": pairs,
        "tokens": args.tokens,
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
