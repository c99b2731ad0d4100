"""Rounds and plain steps at the size of a real model, with weights of no training.

    python bench/untrained.py [--quick] [--size 4B] [--depths 1 2 3] [--json FILE]

Qwen3.5's shapes in bfloat16. The norms in front of the logits are scaled so that head
and model, which know nothing of each other, agree in ``--agreement`` of the drafts at
temperature 1: two softmax of independent normal logits of deviation s overlap by
``2 Phi(-s / sqrt(2))``. So it shows what a round costs beside steps of ``mlx_lm`` on
the same weights, and what that makes of an acceptance; not what a trained head accepts.
Arms take turns; a ratio is the median over turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import NormalDist
from time import perf_counter

import common
from common import median, spread

SIZES = {
    "4B": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
}
QWEN = {
    "model_type": "qwen3_5_text",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
}
PROMPT = list(range(1000, 1016))


def main():
    p = common.parser(__doc__)
    p.add_argument("--size", choices=SIZES, default="4B")
    p.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--agreement", type=float, default=0.8)
    p.add_argument("--tokens", type=int, default=128, help="tokens of a stream")
    p.add_argument("--repeats", type=int, default=5)
    args = p.parse_args()
    if args.quick:
        args.size, args.tokens, args.repeats = "tiny", 32, 2
    header = common.start(args)
    common.show_header(header)
    rows = measure(args)
    common.write(args.json, header, rows)


def measure(args: argparse.Namespace) -> list[dict]:
    from mlx.utils import tree_reduce

    from mlx_mtp.speculative import SpeculativeDecoder

    model, target, drafter = untrained(SIZES[args.size], args.agreement)
    weights = tree_reduce(lambda n, x: n + x.size, model.parameters(), 0)
    arms = {"mlx_lm": partial(steps_of_mlx_lm, model, args.tokens)}
    for depth in args.depths:
        decoder = SpeculativeDecoder(target, drafter, depth)
        arms[f"depth {depth}"] = partial(rounds_of_ours, decoder, args.tokens)
    found: dict[str, list[dict]] = {name: [] for name in arms}
    for turn in range(args.repeats + 1):
        for name, arm in arms.items():
            result = arm(seed=turn)
            if turn:  # the first compiles
                found[name].append(result)
    plain = [run["tps"] for run in found["mlx_lm"]]
    rows = []
    for name, runs in found.items():
        speeds = [run["tps"] for run in runs]
        row = {key: median(run[key] for run in runs) for key in runs[0]}
        row |= {
            "name": name,
            "weights": weights,
            "spread": spread(speeds),
            "ratio": median(a / b for a, b in zip(speeds, plain, strict=True)),
        }
        rows.append(row)
        print(
            f"{name}: {row['tps']:.1f} tokens/s ({row['ratio']:.2f}x, spread "
            f"{row['spread']:.0%}), {row['ms']:.2f} ms for {row['tokens']:.2f} tokens"
        )
    return rows


def untrained(size: dict, agreement: float):
    """A model, its target and the drafter of its head."""
    import mlx.core as mx
    from mlx_lm.models import qwen3_5

    from mlx_mtp.drafters import HeadConfig, MTPHead, MTPHeadDrafter
    from mlx_mtp.targets import as_target

    mx.random.seed(0)
    config = QWEN | size
    args = qwen3_5.ModelArgs(model_type="qwen3_5", text_config=config)
    model, head = qwen3_5.Model(args), MTPHead(HeadConfig.from_dict(config))
    deviation = -(2**0.5) * NormalDist().inv_cdf(agreement / 2)
    for norm in (model.language_model.model.norm, head.norm):
        norm.weight = mx.full(norm.weight.shape, deviation)
    for module in (model, head):
        module.set_dtype(mx.bfloat16)
        module.eval()
        mx.eval(module.parameters())
    target = as_target(model)
    return model, target, MTPHeadDrafter(head, target)


def steps_of_mlx_lm(model, count: int, seed: int) -> dict:
    """Speed behind the first token; the milliseconds and tokens of a step."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_sampler

    mx.random.seed(seed)
    steps = generate_step(
        mx.array(PROMPT), model, max_tokens=count, sampler=make_sampler(1.0)
    )
    next(steps)
    begin = perf_counter()
    n = sum(1 for _ in steps)
    seconds = perf_counter() - begin
    return {"tps": n / seconds, "ms": 1e3 * seconds / n, "tokens": 1.0}


def rounds_of_ours(decoder, count: int, seed: int) -> dict:
    """The same of a stream's rounds."""
    from mlx_mtp import SamplingParams

    steps = decoder.stream(
        PROMPT, max_tokens=count, params=SamplingParams(1.0), seed=seed
    )
    next(steps)
    begin = perf_counter()
    n = sum(1 for _ in steps)
    seconds, rounds = perf_counter() - begin, steps.telemetry.rounds
    return {"tps": n / seconds, "ms": 1e3 * seconds / rounds, "tokens": n / rounds}


if __name__ == "__main__":
    main()
