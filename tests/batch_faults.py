"""Faults at any call of a batch: what each row's caches hold behind them.

    python tests/batch_faults.py 3000

makes that many for each model.
"""

import random
import sys
from collections import Counter

from faults import InjectedFault, Injector
from plain import PROMPT, Plain
from tiny import tiny_llama, tiny_qwen

from mlx_mtp.batch import BatchIterator

LIMITS = (6, 14, 9)
# A fault here can lose the output of tokens that the caches have.
DELIVERY = ("batch._advance", "batch._output", "batch.in_batch")


def run(plain: Plain, at: int, removed_at: int = 0) -> Injector:
    """Three rows with a fault at a call, 0 for none."""
    batch, injector, raised = BatchIterator(plain.decoder), Injector(at), False
    caches, found = [plain.target.make_cache() for _ in LIMITS], {}
    try:
        with injector:
            for cache, limit in zip(caches, LIMITS, strict=True):
                found[batch.add(PROMPT, caches=cache, max_tokens=limit)] = []
            turns = 0
            while len(batch):
                turns += 1
                if turns == removed_at:
                    batch.remove(1)
                for out in next(batch, []):
                    found[out.id] += [step.token for step in out.steps]
    except InjectedFault:
        raised = True
    batch.close()
    assert len(batch) == 0 and batch.capacity == 0
    lost = raised or str(injector.hit).startswith(DELIVERY)
    for tokens, cache, limit in zip(found.values(), caches, LIMITS, strict=False):
        assert tokens == plain.tokens[: len(tokens)], injector.hit
        check(plain, cache, len(tokens), limit if lost else len(tokens), injector.hit)
    return injector


def check(plain: Plain, cache, least: int, most: int, hit) -> None:
    """The cache holds the prompt and a number of tokens, or a part of the prompt."""
    offset = max(getattr(entry, "offset", 0) for entry in cache)
    emitted = offset - len(PROMPT)
    assert least <= emitted <= most or (not least and emitted < 0), hit
    if offset in plain.states:
        plain.check(cache, offset)


def campaign(plain: Plain, faults: int, seed: int = 0) -> Counter:
    """What was hit how often."""
    rng, hits = random.Random(seed), Counter()
    run(plain, 0)  # traces
    calls = run(plain, 0).calls
    for _ in range(faults):
        injector = run(plain, rng.randint(1, calls), rng.choice([0, 0, 3, 5]))
        hits[injector.hit] += 1
    return hits


def main():
    for model in (tiny_llama(), tiny_qwen()):
        hits = campaign(Plain(model), int(sys.argv[1]), seed=1)
        print(f"{sum(hits.values())} faults at {len(hits)} points, all exact")


if __name__ == "__main__":
    main()
