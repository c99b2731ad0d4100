"""How often the sampling kernels read a row of logits, counted on the emulator, and
what the bytes cost at the bandwidth of some Macs.

    python tests/metal/traffic.py
"""

import ctypes
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "emulator")]

import cases  # noqa: E402
import emulator  # noqa: E402
import host  # noqa: E402

V, DRAFTS = 248_320, 4
BYTES = 2  # of a logit in bfloat16
BANDWIDTH = {"M1": 68e9, "M3 Max": 400e9, "M5 Max": 614e9}
FILTERS = {"top_k": 20, "top_p": 0.95}
# Name, spread of the logits, parameters.
CASES = [
    ("none", 3.0, {}),
    ("top-k 20, top-p 0.95", 3.0, FILTERS),
    ("min-p 0.05", 3.0, {"min_p": 0.05}),
    ("top-p 0.95, thousands of survivors", 3.0, {"top_p": 0.95}),
    ("top-p 0.95, all logits equal", 0.0, {"top_p": 0.95}),
    ("top-k 20, top-p 0.95, all logits equal", 0.0, FILTERS),
]


def counting_emulator(folder):
    """The kernels, with a counter of the loads of eight logits."""
    folder = Path(folder)
    for path in [*host.METAL.glob("*.h"), *host.METAL.glob("*.metal")]:
        (folder / path.name).write_text(path.read_text())
    text = (folder / "row.h").read_text()
    text, found = re.subn(
        r"(METAL_FUNC Eight load_aligned\(.*?\{)", r"\1 ++loads;", text
    )
    assert found == 2
    (folder / "row.h").write_text(
        text.replace("#pragma once", '#pragma once\nextern "C" unsigned long loads;')
    )
    (folder / "loads.cpp").write_text('extern "C" { unsigned long loads = 0; }\n')
    sources = [*sorted(folder.glob("*.metal")), folder / "loads.cpp"]
    return emulator.Emulator(
        emulator.build(sources, folder / "kernels.so", include=[folder])
    )


class Counter(host.Host):
    """A host that keeps how many times each dispatch reads a row."""

    def __init__(self, machine, **options):
        super().__init__(machine, **options)
        self.loads = ctypes.c_ulong.in_dll(machine._library, "loads")
        self.rows = []

    def launch(self, *arguments):
        before = self.loads.value
        super().launch(*arguments)
        self.rows.append((self.loads.value - before) * 8 / arguments[-1][0].shape[-1])


def verify(machine, scale, params):
    """Rows read by each dispatch of verify_draft that rejects its third draft."""
    rng = np.random.default_rng(0)
    target = rng.normal(0, scale, (1, DRAFTS + 1, V)).astype(np.float32)
    draft = target[:, :DRAFTS] + rng.normal(0, 0.5, (1, DRAFTS, V)).astype(np.float32)
    tokens = target[:, :DRAFTS].argmax(-1)
    coins = np.array([[0, 0, 1e30, 0, 0.5, 0]], np.float32)
    counter = Counter(machine)
    _, accepted, _ = counter.verify_draft(
        target, tokens, draft, uniforms=coins, dtype="bfloat16", **params
    )
    assert accepted.tolist() == [2]
    return counter.rows


def sample(machine, scale, params):
    """Rows read by each dispatch of sample, and the survivors of the row."""
    row = np.random.default_rng(0).normal(0, scale, (1, V)).astype(np.float32)
    counter = Counter(machine)
    half = np.full((1, 2), 0.5, np.float32)
    _, stats = counter.sample(row, half, "bfloat16", **params)
    return counter.rows, int((cases.rounded(row, "bfloat16") >= stats[0, 1]).sum())


def line(name, rows, needed):
    moved = sum(rows) * V * BYTES
    times = [f"{moved / rate * 1e6:.0f}" for rate in BANDWIDTH.values()]
    each = ", ".join(f"{n:.2g}" for n in rows)
    columns = [name, each, f"{sum(rows) / needed:.2f}", f"{moved / 1e6:.1f}", *times]
    print(*columns, sep=" | ", flush=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        machine = counting_emulator(folder)
        print("rows read by each dispatch | moved / needed | MB | us:", *BANDWIDTH)
        for name, scale, params in CASES:
            rows, survivors = sample(machine, scale, params)
            line(f"sample, {name} ({survivors} survivors)", rows, 1)
            rows = verify(machine, scale, params)
            line(f"verify_draft, {name}", rows, 2 * DRAFTS + 1)


if __name__ == "__main__":
    main()
