"""Random cases of the sampling kernels against the CPU path: the same tokens and
accepted counts, but where a decision is too close for float32, which is counted apart.

    python tests/metal/campaign.py [--cases N] [--device gpu] [--seed S]

N of each op and dtype, 10,000 by default, on the emulator or on an NVIDIA GPU.
"""

import argparse
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "emulator")]

import cases  # noqa: E402
import emulator  # noqa: E402
import host  # noqa: E402
import mlx.core as mx  # noqa: E402
import oracle  # noqa: E402

from mlx_mtp import ops  # noqa: E402

# Sequences in one call.
BATCH = 4
# A difference is explained if float64 finds a decision closer than this, as a fraction
# of probability.
NEAR = 1e-5


def choose(rng, values, size=BATCH):
    return np.array([values[i] for i in rng.integers(len(values), size=size)])


def garbage(rng, x, share):
    """Some values that make a row unusable, and some that only look like it."""
    x = x.copy()
    for _ in range(rng.binomial(4, share)):
        values = [np.nan, np.inf, -np.inf, -np.inf, 3e38, -3e38]
        if x.size:
            x.flat[rng.integers(x.size)] = values[rng.integers(6)]
    return x


def draw_parameters(rng):
    order = cases.ORDERS[rng.integers(2)]
    params = {"temperature": choose(rng, [0, 0.3, 0.7, 1, 1, 1.5])}
    if rng.random() < 0.7:
        params["top_k"] = choose(rng, [0, 0, 1, 3, 20, 200, 10**6])
        params["top_p"] = choose(rng, [1, 1, 0.95, 0.7, 0.2, 1e-6])
        params["min_p"] = choose(rng, [0, 0, 0.02, 0.3, 1])
    return params, order


def random_case(rng, dtype):
    """Arguments of verify_draft for the host and the parameters of the draft."""
    V = int(2 ** rng.uniform(0, 9.5)) if rng.random() < 0.9 else 5000
    drafts = int(rng.integers(0, 5))
    x = cases.logits(rng, (BATCH, drafts + 1, V), dtype, choose(rng, [1, 3, 8])[0])
    y = cases.rounded(x[:, :drafts] + rng.normal(0, 1, (BATCH, drafts, V)), dtype)
    x = cases.rounded(garbage(rng, x, 0.1), dtype)
    params, order = draw_parameters(rng)
    case = {"target": x, "uniforms": rng.random((BATCH, drafts + 2), np.float32)}
    case |= {**params, "filter_order": order}
    tokens = x[:, :drafts].argmax(-1).astype(np.int32)
    drawn = {}
    kind = rng.integers(3)
    if kind > 0 and drafts:
        case["draft"] = y
        drawn = params if kind == 1 else {"temperature": params["temperature"]}
        u = mx.array(rng.random((BATCH, drafts, 2), np.float32))
        arrays = {name: mx.array(value) for name, value in drawn.items()}
        arrays["stream"] = mx.cpu
        drafted, stats = ops.sample(as_mx(y, dtype), u, filter_order=order, **arrays)
        tokens = np.array(drafted)
        if kind == 1:
            case["draft_stats"] = np.array(stats)
    random = rng.integers(-1, V + 1, tokens.shape)
    case["draft_tokens"] = np.where(rng.random(tokens.shape) < 0.05, random, tokens)
    if rng.random() < 0.3:
        case["draft_lengths"] = rng.integers(0, drafts + 1, BATCH)
    if rng.random() < 0.3:
        case["allowed"] = cases.bits(rng.random(x.shape) < 0.6)
    return case, drawn


def coupled_case(rng, dtype):
    """The same for verify_coupled."""
    case, _ = random_case(rng, dtype)
    for name in ("draft", "draft_stats", "uniforms"):
        case.pop(name, None)
    case["seed"] = rng.integers(0, 2**32, (BATCH, 2), np.uint32)
    case["position"] = rng.integers(-(2**31), 2**31, BATCH).astype(np.int32)
    return case, {}


def as_mx(x, dtype):
    return mx.array(x).astype(getattr(mx, dtype))


def on_cpu(case, dtype):
    arrays = {
        name: value if isinstance(value, str) else mx.array(value)
        for name, value in case.items()
        if name not in ("target", "draft")
    }
    draft = as_mx(case["draft"], dtype) if "draft" in case else None
    tokens = arrays.pop("draft_tokens").astype(mx.int32)
    target = as_mx(case["target"], dtype)
    if "seed" in case:
        out = ops.verify_coupled(target, tokens, **arrays, stream=mx.cpu)
    else:
        out = ops.verify_draft(target, tokens, draft, **arrays, stream=mx.cpu)
    return [np.array(a) for a in out]


def margin_of(case, drawn, b):
    """How close the nearest decision of a sequence is, by the oracle."""
    drafts = case["draft_tokens"].shape[1]
    n = case["draft_lengths"][b] if "draft_lengths" in case else drafts
    one = {
        name: case[name][b].item()
        for name in ("temperature", "top_k", "top_p", "min_p")
        if name in case
    }
    one["filter_order"] = case["filter_order"]
    mask = case["allowed"][b] if "allowed" in case else None
    if "seed" in case:
        return oracle.coupled(
            case["target"][b],
            case["draft_tokens"][b][:n],
            case["seed"][b],
            case["position"][b].item(),
            allowed=mask,
            **one,
        )[3]
    q, margin = [None] * n, 1.0
    if "draft" in case:
        draft_params = {name: one[name] for name in drawn}
        draft_params["filter_order"] = case["filter_order"]
        shaped = [oracle.shape(row, **draft_params) for row in case["draft"][b, :n]]
        q = [np.full(1, np.nan) if s is None else s.p for s in shaped]
        margin = min((s.margin for s in shaped if s is not None), default=1.0)
    u = case["uniforms"][b]
    found = oracle.verify(
        case["target"][b],
        case["draft_tokens"][b][:n],
        q,
        np.concatenate([u[:n], u[-2:]]),
        allowed=mask,
        **one,
    )
    return min(margin, found[3])


def run(machine, dtype, count, seed=0, op="verify_draft"):
    """Counts of sequences: cases, near ties, and a list of those that are wrong."""
    rng = np.random.default_rng(seed)
    make_case = coupled_case if op == "verify_coupled" else random_case
    counts, wrong = Counter(), []
    while counts["cases"] < count:
        with np.errstate(over="ignore"):
            case, drawn = make_case(rng, dtype)
        emulated = host.Host(
            machine,
            chunk=int(choose(rng, [256, 4096])[0]),
            threads=int(choose(rng, [32, 64, 128])[0]),
            seed=int(rng.integers(0, 100)),
            part=int(choose(rng, [1, 3, 4])[0]),
        )
        with np.errstate(all="ignore"):
            expected = on_cpu(case, dtype)
            got = getattr(emulated, op)(**case, dtype=dtype)
            for b in range(BATCH):
                counts["cases"] += 1
                counts["emitted"] += int(expected[1][b]) + 1
                counts["flagged"] += int(expected[1][b] < 0)
                e, g = [x[b] for x in expected], [x[b] for x in got]
                same = (e[0] == g[0]).all() and e[1] == g[1]
                if same and np.allclose(e[2], g[2], rtol=0, atol=1e-5):
                    continue
                margin = margin_of(case, drawn, b)
                if margin < NEAR:
                    counts["near ties"] += 1
                else:
                    wrong.append((case, b, e, g))
    return counts, wrong


def make_machine(device):
    if device == "gpu":
        sys.path.append(str(HERE.parent / "cuda"))
        from machine import Machine

        return Machine()
    out = Path(tempfile.mkdtemp()) / "kernels.so"
    return emulator.Emulator(emulator.build(host.SOURCES, out, include=[host.METAL]))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cases", type=int, default=10_000, metavar="N")
    p.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    p.add_argument("--seed", type=int, default=0, metavar="S")
    args = p.parse_args()
    mx.set_default_device(mx.cpu)
    machine = make_machine(args.device)
    failed = 0
    for op, dtype in product(("verify_draft", "verify_coupled"), host.DTYPES):
        counts, wrong = run(machine, dtype, args.cases, args.seed, op)
        print(op, dtype, dict(counts), f"wrong: {len(wrong)}", flush=True)
        for case, b, expected, got in wrong[:5]:
            shape = case["target"].shape
            print("  shape", shape, "sequence", b, "CPU", expected, "kernels", got)
        failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
