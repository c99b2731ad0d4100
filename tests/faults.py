"""Faults at any call of a stream, and what must hold behind them.

    python tests/faults.py 10000

makes that many and says what they hit.
"""

import random
import sys
from collections import Counter
from inspect import CO_GENERATOR
from itertools import islice
from pathlib import Path

import mlx.core as mx
from plain import DEPTH, PROMPT, Plain
from tiny import random_head, tiny_llama, tiny_qwen

import mlx_mtp
from mlx_mtp.memory import MemoryPolicy
from mlx_mtp.speculative import SpeculativeDecoder

PACKAGE = str(Path(mlx_mtp.__file__).parent)
TOKENS = 14


class InjectedFault(Exception):
    """Stands for an allocation that fails, or a bug, in whatever is called."""


class Injector:
    """Fails the ``at``-th call, of Python or of C, that the package makes.

    ``at=0`` only counts them.
    """

    def __init__(self, at: int):
        self.at, self.calls, self.hit = at, 0, None

    def __enter__(self):
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _profile(self, frame, event, arg):
        code = frame.f_code
        if event not in ("call", "c_call") or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_flags & CO_GENERATOR:
            return  # to go on with one is no call, and cannot fail
        self.calls += 1
        if self.calls == self.at:
            name = f" calls {arg.__name__}" if event == "c_call" else ""
            self.hit = f"{Path(code.co_filename).stem}.{code.co_name}{name}"
            raise InjectedFault(self.hit)


class Sut:
    """A model with a drafter and processors, and the plain stream to hold them to."""

    def __init__(
        self, plain: Plain, drafter=None, processors=(), fresh=False, memory=None
    ):
        self.plain, self.drafter = plain, drafter or plain.drafter
        self.processors, self.fresh, self.memory = processors, fresh, memory
        self.decoder = self.new()

    def new(self):
        return SpeculativeDecoder(self.plain.target, self.drafter, DEPTH)

    def run(self, at: int, taken: int) -> Injector:
        """A stream with a fault, closed behind ``taken`` tokens; then another one."""
        if self.fresh:
            self.decoder = self.new()  # its round is traced within
        plain, caches = self.plain, self.plain.target.make_cache()
        tokens, injector = [], Injector(at)
        steps = self.decoder.stream(
            PROMPT,
            max_tokens=TOKENS,
            caches=caches,
            processors=self.processors,
            memory=self.memory,
        )
        try:
            with injector:
                for step in islice(steps, taken):
                    tokens.append(step.token)
                steps.close()
        except InjectedFault:
            pass
        steps.close()
        assert tokens == plain.tokens[: len(tokens)], injector.hit
        self.check(caches, len(tokens), injector.hit)
        return injector

    def check(self, caches, emitted: int, hit):
        """The caches hold prompt and tokens, or a part of the prompt, and go on."""
        plain = self.plain
        offset = max(getattr(entry, "offset", 0) for entry in caches)
        length = len(PROMPT) + emitted
        assert offset == length or (not emitted and offset in (0, len(PROMPT) - 1)), hit
        if offset in plain.states:
            plain.check(caches, offset)
            offset += 1
        steps = self.decoder.stream(
            plain.fed[offset : max(offset + 1, len(PROMPT))],
            max_tokens=3,
            caches=caches,
        )
        start = max(offset + 1, len(PROMPT))
        tokens = [step.token for step in steps]
        assert tokens == plain.fed[start : start + 3], hit


def row_by_row(tokens, logits):
    return logits


def make_suts(llama, qwen) -> list[Sut]:
    attention, hybrid = Plain(llama), Plain(qwen)
    head = random_head(hybrid.target)
    return [
        Sut(attention),
        Sut(hybrid, head),
        Sut(hybrid, head, memory=MemoryPolicy(2**50)),
        Sut(hybrid, processors=[row_by_row]),
        Sut(hybrid, head, fresh=True),
    ]


def campaign(suts: list[Sut], faults: int, seed: int = 0) -> Counter:
    """What was hit how often. The last of them is traced anew each time."""
    rng, hits = random.Random(seed), Counter()
    weights = [10, 10, 3, 10, 1]
    for sut in suts:
        sut.run(0, TOKENS)  # traces
    calls = [sut.run(0, TOKENS).calls for sut in suts]
    for _ in range(faults):
        i = rng.choices(range(len(suts)), weights)[0]
        injector = suts[i].run(rng.randint(1, calls[i]), rng.randint(1, TOKENS))
        hits[injector.hit] += 1
    return hits


def main():
    mx.random.seed(0)
    hits = campaign(make_suts(tiny_llama(), tiny_qwen()), int(sys.argv[1]), seed=1)
    for hit, count in hits.most_common():
        print(f"{count:6} {hit}")
    print(f"{sum(hits.values())} streams with a fault at {len(hits)} points, all exact")


if __name__ == "__main__":
    main()
