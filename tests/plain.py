"""What plain decoding leaves behind every token, to compare caches with, and when two
results count as equal: bit for bit on a CPU, while a GPU rounds a row otherwise in a
block."""

import mlx.core as mx
from tiny import ScriptedDrafter, plain_tokens, random_prompt

from mlx_mtp.proof.checks import difference
from mlx_mtp.round import Round
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

DEPTH = 4
PROMPT = random_prompt(11, 128, 5)
LENGTH = 100
PLAN = [2, 4, 0, 3, 1]


class Plain:
    """What mlx_lm's model and caches hold after each token, fed one at a time."""

    def __init__(self, model):
        self.model, self.target = model, as_target(model)
        self.tokens = plain_tokens(model, PROMPT, LENGTH)
        self.fed = PROMPT + self.tokens
        self.drafter = ScriptedDrafter(self.tokens, 128, PLAN)
        self.decoder = SpeculativeDecoder(self.target, self.drafter, DEPTH)
        self.round = Round(self.target, self.drafter, DEPTH, greedy=True)
        cache = self.target.make_cache()
        model(mx.array([PROMPT[:-1]]), cache=cache)
        self.logits, self.states = {}, {}
        for i in range(len(PROMPT), len(self.fed)):
            self.logits[i] = model(mx.array([self.fed[i - 1 : i]]), cache=cache)[0, -1]
            self.states[i] = [contents(entry) for entry in cache]
        mx.eval(self.logits, self.states)

    def check(self, caches, length):
        """``caches`` hold the first ``length`` tokens, and continue like plain ones."""
        for entry, expected in zip(caches, self.states[length], strict=True):
            for x, y in zip(contents(entry), expected, strict=True):
                assert equal(x, y)
        row = self.model(mx.array([self.fed[length : length + 1]]), cache=caches)[0, -1]
        assert equal(row, self.logits[length + 1])


def closeness(cpu, gpu):
    """How far two ways of computing the same may be apart."""
    return cpu if mx.default_device() == mx.cpu else gpu


def equal(x, y, gpu=1e-4):
    """The same bits, or on a GPU numbers that are at most ``gpu`` apart."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    atol = closeness(0, gpu)
    return mx.allclose(x, y, atol=atol) if atol else mx.array_equal(x, y)


def same_tokens(target, prompt, expected, got):
    """The same greedy tokens, or on a GPU ones that part at a near tie."""
    if expected == got or mx.default_device() == mx.cpu:
        return expected == got
    return difference(target, prompt, expected, got)["near_tie"]


def contents(entry):
    """The arrays of a cache that matter, and that later writes do not change."""
    if type(entry).__name__ == "KVCache":
        return [x[:, :, : entry.offset] for x in (entry.keys, entry.values)]
    return [entry[0], entry[1]]
