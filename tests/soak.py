"""Streams with faults and cancellations, one after the other: memory stays flat.

    python tests/soak.py 600

for that many seconds.
"""

import resource
import sys
import time

import mlx.core as mx
from faults import campaign, make_suts
from tiny import tiny_llama, tiny_qwen

MAX_GROWTH = 8 * 2**20  # bytes of this process, from a tenth of the time on


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def soak(seconds: float) -> tuple[int, int, int]:
    """Streams, and bytes that MLX's and the process's memory grew by."""
    suts = make_suts(tiny_llama(), tiny_qwen())
    for sut in suts:
        sut.fresh = False  # what a new decoder compiles is a memory of its own
    begin, streams, before = time.monotonic(), 0, None
    while time.monotonic() - begin < seconds:
        campaign(suts, 20, seed=streams)
        streams += 20 + 2 * len(suts)
        if before is None and time.monotonic() - begin > seconds / 10:
            before = mx.get_active_memory(), resident()
    mx.clear_cache()
    return streams, mx.get_active_memory() - before[0], resident() - before[1]


def main():
    streams, arrays, process = soak(float(sys.argv[1]))
    print(f"{streams} streams; growth {arrays} B of arrays, {process} B in all")
    sys.exit(arrays > 2**16 or process > MAX_GROWTH)


if __name__ == "__main__":
    main()
