"""Prompts that several newcomers of a batch read in one forward."""

import mlx.core as mx
import pytest
from batches import DEPTH, Pool, Request, compare, equal_rows, read, window_model
from families import tiny_family
from plain import PROMPT, Plain, contents, equal
from tiny import random_head, random_prompt

from mlx_mtp.batch import BatchIterator
from mlx_mtp.batch_prompts import JointPrompts, joint_groups
from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

STEP = 64
LENGTHS = [17, 1, 40, 2, 16, 63, 33, 64, 15, 65, 30, 130]
MODELS = ["plain", "hybrid", "window"]


def make_decoder(name, llama, qwen):
    if name == "hybrid":
        return SpeculativeDecoder(as_target(qwen), random_head(as_target(qwen)), DEPTH)
    model = llama if name == "plain" else tiny_family("gemma3_text")
    return SpeculativeDecoder(as_target(model), NGramDrafter(), DEPTH)


@pytest.fixture(scope="module")
def pools(llama, qwen):
    """Requests of unlike lengths; every third is sampled."""
    pools = {}
    for name in MODELS:
        decoder = make_decoder(name, llama, qwen)
        requests = []
        for i, length in enumerate(LENGTHS):
            options = {"max_tokens": 4 + i % 5}
            if i % 3 == 0:
                options |= {"params": SamplingParams(1.0, top_p=0.95), "seed": i}
            requests.append(Request(random_prompt(length, 96, i), options))
        pools[name] = Pool(decoder, requests, STEP)
    return pools


@pytest.fixture
def joint(monkeypatch):
    """The lengths of the prompts of each forward for several."""
    lengths = []

    class Watched(JointPrompts):
        def __init__(self, target, adapters, prompts):
            lengths.append([prompt.size for prompt in prompts])
            super().__init__(target, adapters, prompts)

    monkeypatch.setattr("mlx_mtp.batch.JointPrompts", Watched)
    return lengths


@pytest.mark.parametrize("model", MODELS)
def test_rows_read_together_equal_their_single_runs(pools, model, joint):
    """Tokens and logits, the first behind the prompt included, bit for bit."""
    pool = pools[model]
    ids = [pool.batch.add(r.prompt, **r.build()) for r in pool.requests]
    steps, _ = read(pool.batch)
    for id_, request in zip(ids, pool.requests, strict=True):
        assert [step.token for step in steps[id_]] == request.tokens
        for step, row in zip(steps[id_], request.rows, strict=True):
            assert equal_rows(model, step.row, row)
    assert joint == [[1, 2, 16, 17], [33, 63]]


@pytest.mark.parametrize("model", MODELS)
def test_newcomers_join_and_leave_beside_running_rows(pools, model, joint):
    pool = pools[model]
    assert sum(pool.schedule(seed) for seed in range(4)) == 0
    assert joint
    assert len(pool.batch) == 0 and pool.batch.capacity == 0


def test_a_turn_reads_no_more_than_a_step_beside_running_rows(pools):
    pool = pools["plain"]
    batch = pool.batch
    first = batch.telemetry(batch.add(PROMPT, max_tokens=200))
    while first.rounds < 2:
        next(batch)
    streams = []
    for i in range(8):
        id_ = batch.add(random_prompt(30, 96, i), max_tokens=2)
        streams.append(batch._requests[id_].stream)
    turns = 0
    while left := sum(s.context.prompt_left for s in streams):
        before = first.rounds
        next(batch)
        turns += 1
        assert 30 <= left - sum(s.context.prompt_left for s in streams) < STEP + 30
        assert first.rounds == before + 1
    assert turns == 3
    batch.close()


def test_a_request_that_leaves_before_its_turn_changes_nothing(pools):
    pool = pools["hybrid"]
    some = [r for r in pool.requests if len(r.prompt) in (30, 33, 40)]
    gone = [pool.batch.add(random_prompt(30, 96, 50 + i)) for i in range(2)]
    ids = [pool.batch.add(r.prompt, **r.build()) for r in some]
    pool.batch.remove(gone[1])
    steps = next(pool.batch)
    pool.batch.remove(gone[0])
    assert {out.id for out in steps} <= {gone[0], *ids}
    rest, _ = read(pool.batch)
    for out in steps:
        rest[out.id] = out.steps + rest.get(out.id, [])
    assert [compare(r, rest[i]) for i, r in zip(ids, some, strict=True)] == [0] * 3


def test_a_callback_removes_others_but_not_its_own_request(llama):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), DEPTH)
    prompts = [random_prompt(10 + i, 96, i) for i in range(3)]
    batch, done = BatchIterator(decoder), []

    def progress(read, total):
        if read == total and not done:
            done.append(batch.remove(ids[2]))
            with pytest.raises(RuntimeError, match="cannot remove its own"):
                batch.remove(ids[0])

    ids = [
        batch.add(prompt, max_tokens=8, progress=None if i else progress)
        for i, prompt in enumerate(prompts)
    ]
    found = {id_: [] for id_ in ids}
    for outputs in batch:
        for out in outputs:
            found[out.id] += [step.token for step in out.steps]
    assert done == [True] and found.pop(ids[2]) == []
    for id_, prompt in zip(found, prompts[:2], strict=True):
        steps = decoder.stream(prompt, max_tokens=8)
        assert found[id_] == [step.token for step in steps]


def test_if_prompts_cannot_be_read_together_each_is_by_itself(pools, monkeypatch):
    pool, calls = pools["hybrid"], []
    prefill = pool.decoder.target.prefill

    def broken(tokens, caches):
        if tokens.shape[0] > 1:
            calls.append(tokens.shape)
            raise MemoryError
        return prefill(tokens, caches)

    monkeypatch.setattr(pool.decoder.target, "prefill", broken)
    some = [r for r in pool.requests if len(r.prompt) in (15, 16, 17)]
    ids = [pool.batch.add(r.prompt, **r.build()) for r in some]
    steps, _ = read(pool.batch)
    assert calls == [(3, 17)]
    assert [compare(r, steps[i]) for i, r in zip(ids, some, strict=True)] == [0] * 3


@pytest.mark.parametrize("model", MODELS)
def test_a_row_that_fails_behind_a_shared_forward_ends_alone(pools, model, joint):
    """Its own cache then has the prompt, here as long as a window."""

    def progress(done, total):
        seen.append((done, total))
        if done:
            raise KeyError("stop here")

    pool, seen = pools[model], []
    some = [r for r in pool.requests if len(r.prompt) in (15, 16, 17)]
    target, begin = pool.decoder.target, random_prompt(16, 96, 3)
    caches, expected = target.make_cache(), target.make_cache()
    bad = pool.batch.add(begin, progress=progress, caches=caches)
    ids = [pool.batch.add(r.prompt, **r.build()) for r in some]
    steps, ends = read(pool.batch)
    assert isinstance(ends[bad].error, KeyError) and seen == [(0, 16), (16, 16)]
    assert [compare(r, steps[i]) for i, r in zip(ids, some, strict=True)] == [0] * 3
    assert joint == [[15, 16, 16, 17]]
    target.prefill(mx.array([begin]), expected)
    for token in range(5):
        rows = [
            target.prefill(mx.array([[token]]), x).logits for x in (caches, expected)
        ]
        assert equal(*rows, gpu=1e-3)


def test_a_cache_with_tokens_is_read_behind_these(qwen, joint):
    """A second turn goes on where the first ended."""
    plain = Plain(qwen)
    batch, caches = BatchIterator(plain.decoder), []
    for _ in range(3):
        caches.append(plain.target.make_cache())
        batch.add(PROMPT, caches=caches[-1], max_tokens=3)
    read(batch)
    assert joint == [[len(PROMPT)] * 3]
    ids = [batch.add(plain.tokens[3:7], caches=x, max_tokens=5) for x in caches]
    steps, _ = read(batch)
    assert len(joint) == 1
    for id_, cache in zip(ids, caches, strict=True):
        assert [step.token for step in steps[id_]] == plain.tokens[7:12]
        plain.check(cache, len(PROMPT) + 12)


@pytest.mark.parametrize("tokens", [1, 5])
def test_two_rows_of_one_cache_share_nothing(qwen, tokens):
    """The second is refused, or goes on behind a first that has ended already."""
    plain = Plain(qwen)
    batch, cache = BatchIterator(plain.decoder), plain.target.make_cache()
    ids = [batch.add(PROMPT, caches=cache, max_tokens=tokens) for _ in range(2)]
    steps, ends = read(batch)
    assert [step.token for step in steps[ids[0]]] == plain.tokens[:tokens]
    if tokens == 5:
        assert isinstance(ends[ids[1]].error, ValueError)
        plain.check(cache, len(PROMPT) + tokens)
        return
    expected = plain.target.make_cache()
    fed = [*PROMPT, steps[ids[0]][0].token, *PROMPT, steps[ids[1]][0].token]
    plain.target.prefill(mx.array([fed]), expected)
    for entry, other in zip(cache, expected, strict=True):
        for x, y in zip(contents(entry), contents(other), strict=True):
            assert equal(x, y)


def test_prompts_longer_than_their_own_step_are_read_in_pieces(pools, joint):
    pool, seen = pools["hybrid"], []
    some = [r for r in pool.requests if len(r.prompt) in (15, 16, 17)]
    ids = [
        pool.batch.add(
            r.prompt,
            prefill_step_size=size,
            progress=lambda *counts: seen.append(counts),
            **r.build(),
        )
        for r, size in zip(some, (8, 9, 17), strict=True)
    ]
    steps, _ = read(pool.batch)
    assert [compare(r, steps[i]) for i, r in zip(ids, some, strict=True)] == [0] * 3
    assert not joint and {(8, 17), (9, 16), (14, 15)} <= set(seen)


@pytest.mark.parametrize("family", ["mamba2", "llama4", "a window that keeps"])
def test_caches_that_no_two_prompts_can_share(family, joint):
    keeps = family.startswith("a window")
    model = window_model() if keeps else tiny_family(family)
    decoder = SpeculativeDecoder(as_target(model), NGramDrafter(), DEPTH)
    prompts = [random_prompt(30 + i, 96, i) for i in (0, 1)]
    requests = [Request(x, {"max_tokens": 6}) for x in prompts]
    pool = Pool(decoder, requests, STEP)
    ids = [pool.batch.add(r.prompt, **r.build()) for r in requests]
    steps, _ = read(pool.batch)
    for id_, request in zip(ids, requests, strict=True):
        assert compare(request, steps[id_]) == 0
    assert not joint


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([9], []),
        ([9, 200], []),
        ([9, 9, 9], [[9, 9, 9]]),
        ([30, 20, 43, 24, 29], [[20, 24, 29, 30]]),  # 43 would pad four rows by 13
        ([300, 10, 299, 12], [[10, 12], [299, 300]]),
    ],
)
def test_prompts_are_grouped_where_padding_costs_little(lengths, groups):
    assert joint_groups(lengths, lambda x: x) == groups
