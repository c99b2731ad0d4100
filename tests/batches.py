"""Requests with their own single runs, and random schedules of them in a batch.

    python tests/batches.py 200

runs that many schedules of each model.
"""

import random
import sys
from dataclasses import dataclass, field

import mlx.core as mx
from families import WindowModel
from mlx_lm.models.cache import KVCache, RotatingKVCache
from plain import closeness, equal
from tiny import ScriptedDrafter, random_head, random_prompt, tiny_llama, tiny_qwen

from mlx_mtp.batch import BatchIterator
from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

DEPTH = 3
CHUNK = 32  # prompt tokens at a time
NEAR = 1e-4  # logits closer than this may be rounded into another order
PLANS = [[3, 0], [1, 2], [0, 3], [2], [3], [0], [1, 3, 0, 2], [2, 2, 0, 1]]


class ScriptedRows(ScriptedDrafter):
    """As its parent, with a script for each prompt.

    Attributes:
        scripts (list): Of prompt, tokens and plan. Another prompt has no drafts that
            are any good.
    """

    def __init__(self, vocab):
        super().__init__([], vocab)
        self.scripts = []

    def begin(self, prompt, capacity):
        fed, place = prompt[0].tolist(), 0
        self.truth, self.plan = [0], [0]
        for begin, tokens, plan in self.scripts:
            whole = begin + tokens
            if len(begin) <= len(fed) <= len(whole) and fed == whole[: len(fed)]:
                self.truth, self.plan, place = tokens, plan, len(fed) - len(begin)
        truth, plan, _, rounds = super().begin(prompt, capacity)
        return truth, plan, mx.array([place]), rounds


@dataclass
class Request:
    prompt: list[int]
    options: dict
    # What builds options anew, such as processors with a state.
    make: dict = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    rows: list[mx.array] = field(default_factory=list)

    def build(self):
        return {**self.options, **{name: f() for name, f in self.make.items()}}

    def run_alone(self, decoder, chunk=CHUNK):
        # With keys that stay in a window mlx_lm's prompts depend on their chunks.
        options = {"prefill_step_size": chunk, **self.build()}
        depth = options.pop("depth", decoder.depth)
        if depth != decoder.depth:
            decoder = SpeculativeDecoder(decoder.target, decoder.drafter, depth)
        steps = list(decoder.stream(self.prompt, **options))
        self.tokens = [step.token for step in steps]
        self.rows = [step.row for step in steps]
        mx.eval(self.rows)


def compare(request, steps, ended=True) -> int:
    """1 if the tokens differ behind a near-tie, 0 if they do not."""
    tokens = [step.token for step in steps]
    expected = request.tokens if ended else request.tokens[: len(tokens)]
    if tokens == expected:
        return 0
    pairs = zip(tokens, request.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert place is not None, (tokens, expected)
    row = request.rows[place]
    gap = abs(row[tokens[place]] - row[request.tokens[place]]).item()
    assert gap < NEAR, f"other tokens from {place} on, logits {gap} apart"
    return 1


def equal_rows(model, x, y):
    """Logits of a request in a batch and by itself. A ring that a longer neighbour made
    wider has another order of slots."""
    if model == "window":
        return mx.allclose(x, y, rtol=0, atol=closeness(1e-4, 1e-3))
    return equal(x, y)


def read(batch):
    """Everything that is left: steps and last outputs, by id."""
    steps, ends = {}, {}
    for outputs in batch:
        for out in outputs:
            steps.setdefault(out.id, []).extend(out.steps)
            if out.finish:
                ends[out.id] = out
    return steps, ends


class Pool:
    """Requests of many kinds for one decoder, and a batch for schedules of them."""

    def __init__(self, decoder, requests, chunk=CHUNK):
        self.decoder, self.requests = decoder, requests
        for request in requests:
            request.run_alone(decoder, chunk)
        self.batch = BatchIterator(
            decoder, max_rows=max(8, len(requests)), prefill_step_size=chunk
        )

    def schedule(self, seed: int, count: int = 12) -> int:
        """Joins and leaves at random turns. Returns how many near-ties were met."""
        rng, batch, ties = random.Random(seed), self.batch, 0
        left, open_, steps = count, {}, {}
        while left or len(batch):
            while left and len(batch) < batch.max_rows and rng.random() < 0.5:
                request = rng.choice(self.requests)
                id_ = batch.add(request.prompt, **request.build())
                open_[id_], steps[id_], left = request, [], left - 1
            if open_ and rng.random() < 0.08:
                id_ = rng.choice(list(open_))
                assert batch.remove(id_) and not batch.remove(id_)
                ties += compare(open_.pop(id_), steps[id_], ended=False)
            for out in next(batch, []):
                steps[out.id] += out.steps
                if out.finish:
                    assert out.error is None
                    ties += compare(open_.pop(out.id), steps[out.id])
        assert not open_
        return ties


def prompt(seed, vocab):
    return random_prompt(1 + (seed * 13) % 45, vocab, seed)


def row_by_row(tokens, logits):
    return mx.where(mx.arange(logits.shape[-1]) == tokens[-1], -mx.inf, logits)


class LooksAhead:
    """A processor that changes nothing, and can be taken back."""

    def __call__(self, tokens, logits):
        return logits

    def checkpoint(self):
        return None

    def restore(self, mark):
        pass


class Forces:
    """A controller that forces a text behind its fifth token."""

    def __init__(self):
        self.count = 0

    def accept(self, token):
        self.count += 1

    def forced(self):
        return [1, 2, 3, 4, 5, 6, 7][self.count - 5 :] if 5 <= self.count < 12 else []

    def horizon(self):
        return max(5 - self.count, 0) if self.count < 12 else 10**9

    def bias(self):
        return None

    def checkpoint(self):
        return self.count

    def restore(self, mark):
        self.count = mark


def mixed_requests(vocab):
    """Unlike lengths, limits, parameters, seeds, depths, processors and stops."""
    sampled, cold = SamplingParams(1.0, top_p=0.95), SamplingParams(0.6, top_k=20)
    last = SamplingParams(0.8, min_p=0.02, filter_order="temperature_last")
    kinds = [
        {"max_tokens": 24},
        {"max_tokens": 40, "depth": 2},
        {"max_tokens": 1},
        {"max_tokens": 30, "params": sampled, "seed": 1},
        {"max_tokens": 17, "params": sampled, "seed": 2, "depth": 1},
        {"max_tokens": 22, "params": cold, "draft_params": sampled, "seed": 3},
        {"max_tokens": 26, "params": last, "seed": 4},
        {"max_tokens": 19, "params": sampled, "seed": 5, "coupled": True},
        {"max_tokens": 21, "processors": [row_by_row]},
        {"max_tokens": 15, "params": cold, "processors": [row_by_row], "seed": 6},
        {"max_tokens": 64, "stop_tokens": set(range(0, vocab, 9))},
    ]
    requests = [Request(prompt(i, vocab), kind) for i, kind in enumerate(kinds)]
    forced = {"max_tokens": 28, "params": sampled, "seed": 7}
    requests.append(Request(prompt(20, vocab), forced, {"controller": Forces}))
    return requests


def scripted_pool(model, vocab):
    """Greedy requests with forced patterns of acceptance."""
    target, drafter = as_target(model), ScriptedRows(vocab)
    decoder = SpeculativeDecoder(target, drafter, DEPTH)
    requests = [
        Request(prompt(i + 1, vocab), {"max_tokens": 40}) for i in range(len(PLANS))
    ]
    for request in requests:
        request.run_alone(decoder)
    drafter.scripts = [
        (request.prompt, request.tokens, plan)
        for request, plan in zip(requests, PLANS, strict=True)
    ]
    return Pool(decoder, requests)


def window_model():
    """Windows of 16, with and without first tokens that stay, and a full layer."""
    return WindowModel(
        lambda: RotatingKVCache(16), lambda: RotatingKVCache(16, 4), KVCache
    )


def make_pools(llama, qwen):
    """By name; every model with forced acceptance, and with requests of all kinds."""
    window = window_model()
    head = random_head(as_target(qwen))
    pools = {}
    for name, model, vocab, drafter in (
        ("plain", llama, 128, NGramDrafter()),
        ("hybrid", qwen, 128, head),
        ("window", window, 96, NGramDrafter()),
    ):
        pools[f"{name}, scripted"] = scripted_pool(model, vocab)
        decoder = SpeculativeDecoder(as_target(model), drafter, DEPTH)
        pools[f"{name}, mixed"] = Pool(decoder, mixed_requests(vocab))
    return pools


def main():
    for name, pool in make_pools(tiny_llama(), tiny_qwen()).items():
        count = int(sys.argv[1])
        ties = sum(pool.schedule(seed) for seed in range(count))
        print(f"{name}: {count} schedules, {ties} near-ties", flush=True)


if __name__ == "__main__":
    main()
