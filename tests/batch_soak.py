"""Requests with cancels, stops and faults: none lost, none mixed up, memory flat.

    python tests/batch_soak.py 10000

for that many; with ``--seconds 60`` as many as that takes.
"""

import argparse
import gc
import random
import sys
import threading
import time
from collections import Counter

import mlx.core as mx
from batches import prompt
from soak import resident
from tiny import random_head, tiny_llama, tiny_qwen

from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.scheduler import Scheduler
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

# Bytes of this process: a step of 8 MB comes with each new shape of a batch.
MAX_GROWTH = 32 * 2**20
TOKENS = 24
CLIENTS = 3


class Fault(Exception):
    """Raised by a request's own processor."""


class Faulty:
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, tokens, logits):
        self.calls -= 1
        if self.calls < 0:
            raise Fault
        return logits


class Soak:
    def __init__(self, decoder):
        self.decoder = decoder
        self.ended, self.lock = Counter(), threading.Lock()
        self.kinds = []
        for i in range(12):
            options = {"max_tokens": 2 + (5 * i) % TOKENS}
            if i % 3 == 1:
                options |= {"params": SamplingParams(1.0, top_p=0.95), "seed": i}
            if i % 4 == 3:
                options["stop_tokens"] = set(range(0, 128, 11))
            steps = decoder.stream(prompt(i, 128), **options)
            self.kinds.append((prompt(i, 128), options, [s.token for s in steps]))

    def run(self, scheduler, count: int, until: float) -> None:
        """So many requests from several threads, or fewer when the time is over."""
        errors = []

        def client(*args):
            try:
                self.client(scheduler, *args)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=client, args=(7 * count + i, n, until))
            for i, n in enumerate((count + i) // CLIENTS for i in range(CLIENTS))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    def client(self, scheduler, seed: int, count: int, until: float) -> None:
        """Requests one after the other, some of them together."""
        rng = random.Random(seed)
        while count and time.monotonic() < until:
            some = min(rng.randint(1, 4), count)
            begun = [self.begin(scheduler, rng, seed) for _ in range(some)]
            for handle, expected, fault in begun:
                self.finish(handle, expected, fault)
            count -= some

    def begin(self, scheduler, rng, client):
        tokens, options, expected = rng.choice(self.kinds)
        fault = rng.random() < 0.1
        if fault:
            options = {**options, "processors": [Faulty(rng.randint(0, 3))]}
        handle = scheduler.submit(tokens, client=client, timeout=None, **options)
        if rng.random() < 0.2:
            delay = rng.random() * 0.02
            threading.Timer(delay, handle.cancel).start()
        return handle, expected, fault

    def finish(self, handle, expected, fault):
        tokens = []
        try:
            tokens.extend(handle)  # what was there in front of an error is kept
        except Fault:
            assert fault
        finish = handle.finish
        whole = finish in ("stop", "length")
        assert tokens == (expected if whole else expected[: len(tokens)]), finish
        with self.lock:
            self.ended[finish] += 1


def soak(requests: int = 10**9, seconds: float = 10**9) -> tuple[Counter, int, int]:
    """How requests ended, and bytes that MLX's and the process's memory grew by from a
    fifth of them on."""
    qwen = as_target(tiny_qwen())
    ended, arrays, process = Counter(), 0, 0
    for decoder in (
        SpeculativeDecoder(as_target(tiny_llama()), NGramDrafter(), 3),
        SpeculativeDecoder(qwen, random_head(qwen), 3),
    ):
        some, held = Soak(decoder), []
        with Scheduler(decoder, max_rows=8, max_waiting=8) as scheduler:
            for share in (0.2, 0.8):
                until = time.monotonic() + share * seconds / 2
                some.run(scheduler, round(share * requests / 2), until)
                gc.collect()
                held.append((mx.get_active_memory(), resident()))
            metrics = scheduler.metrics()
        assert metrics["waiting"] == metrics["running"] == 0
        assert Counter(metrics["ended"]) == some.ended
        ended += some.ended
        arrays += held[1][0] - held[0][0]
        process += held[1][1] - held[0][1]
    return ended, arrays, process


def main():
    p = argparse.ArgumentParser()
    p.add_argument("requests", type=int, nargs="?", default=10**9)
    p.add_argument("--seconds", type=float, default=10**9)
    args = p.parse_args()
    ended, arrays, process = soak(args.requests, args.seconds)
    print(f"{sum(ended.values())} requests: {dict(ended)}")
    print(f"growth {arrays} B of arrays, {process} B in all")
    sys.exit(arrays > 2**16 or process > MAX_GROWTH)


if __name__ == "__main__":
    main()
