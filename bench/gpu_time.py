"""GPU time of the kernels on an NVIDIA GPU, without MLX around them.

    python bench/gpu_time.py [--quick] [--json FILE]

The kernel text is launched as the ops launch it, many times in one CUDA graph, over
inputs that rotate through 200 MB, so that the L2 cache does not hold them (a vocabulary
of 32,000 at B = 1 does fit). A time is the median of 25 replays over the number of
operations. ``copy`` is a device copy of the bytes that a verification needs: every
logit of the target and the draft once, or reads and writes the states once.
``parts_us`` has each dispatch alone, where the later ones find nothing to do. Right
results: ``pytest --device gpu tests/metal``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("cuda", "metal")]

from host import Host, store  # noqa: E402
from machine import Graph, Machine, Memory, used  # noqa: E402

K = 4
FILTERS = {
    "none": {},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
}
SHAPES = [(V, B) for V in (32000, 151936, 248320) for B in (1, 8, 32)]
ROTATED = 200e6  # bytes
OPERATIONS = 24  # at least, in a graph


class Recorder:
    """Keeps launches instead of running them."""

    def __init__(self):
        self.launches = []

    def launch(self, kernel, grid, threads, buffers, seed=0):
        self.launches.append((kernel, grid, threads, used(kernel, buffers)))


def rows(rng, shape, kind):
    """bfloat16 logits: of a model's kind, with many ties, or all equal."""
    V = shape[-1]
    if kind == "flat":
        return np.zeros(shape, np.float32)
    one = rng.normal(0, 2, V).astype(np.float32)
    if kind == "ties":
        return np.broadcast_to(np.round(one), shape).copy()
    x = np.stack([np.roll(one, i * 977) for i in range(int(np.prod(shape[:-1])))])
    x = x.reshape(shape)
    peaks = rng.integers(0, V, (*shape[:-1], 40))
    np.put_along_axis(x, peaks, rng.normal(15, 2, peaks.shape).astype(np.float32), -1)
    return x


def case(rng, V, B, kind):
    target = rows(rng, (B, K + 1, V), kind)
    noise = rng.normal(0, 0.5, V).astype(np.float32)
    draft = target[:, :K] + (noise if kind == "model" else 0)
    # A draw from the draft, by the maximum of noisy logits.
    gumbel = rng.gumbel(size=V).astype(np.float32)
    tokens = (draft / 0.7 + gumbel).argmax(-1).astype(np.int32)
    return {
        "target": store(target, "bfloat16"),
        "draft": store(draft, "bfloat16"),
        "draft_tokens": tokens,
        "uniforms": rng.random((B, K + 2), np.float32),
    }


def verify_launches(data, params, logprobs=True):
    recorder = Recorder()
    values = {name: np.float32(value) for name, value in params.items()}
    Host(recorder).verify_draft(
        **data,
        dtype="bfloat16",
        temperature=np.float32(0.7),
        logprobs=logprobs,
        **values,
    )
    return recorder.launches


def time_graph(machine, operations):
    """Microseconds of each operation, a list of launches, in turn."""
    memory = Memory(machine)
    count = max(OPERATIONS, len(operations))

    def encode():
        for i in range(count):
            for launch in operations[i % len(operations)]:
                machine.encode(memory, *launch)

    for launches in operations:  # uploads and compiles before the capture
        for launch in launches:
            machine.encode(memory, *launch)
    seconds = Graph(machine, encode).seconds()
    memory.free()
    return [1e6 * s / count for s in seconds]


def time_copy(machine, size):
    """Microseconds of a kernel that copies so many bytes, ``commit_rows``."""
    row = 2048
    shape = (1, 1, size // row, row)
    recorder = Recorder()
    operations = []
    for _ in range(max(2, int(ROTATED / size))):
        recorder.launches = []
        cache, rows = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        Host(recorder).commit_rows(cache, rows, [0], [shape[2]])
        operations.append(recorder.launches)
    return statistics.median(time_graph(machine, operations))


def time_replay(machine, B, with_outputs, T=5, heads=32, dim=128):
    """Microseconds of ``gated_delta_replay``, and those of a copy of its states."""
    rng, recorder, operations = np.random.default_rng(0), Recorder(), []
    size = B * heads * dim * dim * 4
    k = rng.normal(0, 0.1, (B, T, heads, dim)).astype(np.float32)
    v = rng.normal(0, 1, (B, T, heads, dim)).astype(np.float32)
    g = rng.random((B, T, heads), np.float32)
    for _ in range(max(2, int(ROTATED / size))):
        recorder.launches = []
        state = np.zeros((B, heads, dim, dim), np.float32)
        q = k if with_outputs else None
        Host(recorder).gated_delta_replay(
            state, k, v, g, g, [T] * B, q, dtype="bfloat16", in_place=True
        )
        operations.append(recorder.launches)
    return {
        "kernel": "gated_delta_forward" if with_outputs else "gated_delta_replay",
        "B": B,
        "T": T,
        "heads": heads,
        "dim": dim,
        "us": statistics.median(time_graph(machine, operations)),
        "copy_us": time_copy(machine, size),
    }


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def measure(machine, V, B, kind, filters, logprobs=True):
    rng = np.random.default_rng(V + B)
    size = B * (2 * K + 1) * V * 2
    one = case(rng, V, B, kind)
    copies = [one]
    for _ in range(1, min(OPERATIONS, int(ROTATED / size) + 1)):
        # The same rows elsewhere in memory, with other coins.
        again = {name: x.copy() for name, x in one.items()}
        again["uniforms"] = rng.random((B, K + 2), np.float32)
        copies.append(again)
    operations = [verify_launches(data, FILTERS[filters], logprobs) for data in copies]
    us = time_graph(machine, operations)
    parts = {}
    for at, name in enumerate(launch[0] for launch in operations[0]):
        alone = [[launches[at]] for launches in operations]
        parts[name.split("_bf")[0]] = statistics.median(time_graph(machine, alone))
    return {
        "V": V,
        "B": B,
        "K": K,
        "rows": kind,
        "filters": filters,
        "logprobs": logprobs,
        "us": statistics.median(us),
        "spread": spread(us),
        "parts_us": parts,
        "copy_us": time_copy(machine, size),
        "bytes": size,
    }


def header():
    query = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True)
    return {"gpu": gpu.stdout.strip(), "python": platform.python_version(), "K": K}


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    p.add_argument("--quick", action="store_true", help="two shapes only")
    args = p.parse_args()
    machine = Machine()
    about = header()
    print(about["gpu"])
    wanted = [(V, B, "model", f) for V, B in SHAPES for f in FILTERS]
    wanted += [(151936, 1, kind, f) for kind in ("ties", "flat") for f in FILTERS]
    wanted += [(V, B, "model", f, False) for V, B in SHAPES for f in FILTERS]
    if args.quick:
        wanted = [w for w in wanted if w[:2] in ((151936, 1), (248320, 32))]
    results = []
    for shape in wanted:
        r = measure(machine, *shape)
        results.append(r)
        parts = ", ".join(f"{k} {v:.1f}" for k, v in r["parts_us"].items())
        print(
            f"V={r['V']} B={r['B']} {r['rows']} rows, {r['filters']}"
            f"{'' if r['logprobs'] else ', no logprobs'}: {r['us']:.1f} us "
            f"(copy {r['copy_us']:.1f}; {parts})",
            flush=True,
        )
    for B in (1, 32):
        for with_outputs in (False, True):
            r = time_replay(machine, B, with_outputs)
            results.append(r)
            print(f"{r['kernel']} B={B}: {r['us']:.1f} us (copy {r['copy_us']:.1f})")
    if args.json:
        text = json.dumps({"header": about, "rows": results}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
