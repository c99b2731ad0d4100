"""Many requests in one round: each has the tokens of its own single run."""

import gc
import random
from collections import Counter
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from batch_faults import campaign
from batches import (
    CHUNK,
    DEPTH,
    Forces,
    Pool,
    Request,
    compare,
    equal_rows,
    make_pools,
    prompt,
    read,
    row_by_row,
    window_model,
)
from families import tiny_family
from plain import LENGTH, PROMPT, Plain, equal
from test_drafters import check_at_rest
from tiny import (
    StatelessDrafter,
    TableDrafter,
    TableTarget,
    plain_tokens,
    random_head,
    random_prompt,
    start_row,
    tiny_llama,
    tiny_qwen,
)

from mlx_mtp.batch import BatchIterator
from mlx_mtp.batch_round import BatchRound
from mlx_mtp.drafters import DraftModelDrafter, Drafts, NGramDrafter
from mlx_mtp.round import Round, stack_states
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder, UnusableLogits
from mlx_mtp.targets import as_target

MODELS = ["plain", "hybrid", "window"]


@pytest.fixture(scope="module")
def pools(llama, qwen):
    return make_pools(llama, qwen)


def together(pool, requests):
    """Steps of each request, all added at once."""
    ids = [pool.batch.add(r.prompt, **r.build()) for r in requests]
    steps, ends = read(pool.batch)
    assert all(ends[i].error is None for i in ids)
    return [steps[i] for i in ids]


@pytest.mark.parametrize("model", MODELS)
def test_eight_rows_with_forced_acceptance_equal_their_single_runs(pools, model):
    """Patterns such as (3, 0) beside (1, 2): the tokens, and the logits bit for bit."""
    pool = pools[f"{model}, scripted"]
    rounds, rows = pool.batch.rounds, pool.batch.row_rounds
    for request, steps in zip(
        pool.requests, together(pool, pool.requests), strict=True
    ):
        assert [step.token for step in steps] == request.tokens
        for step, row in zip(steps, request.rows, strict=True):
            assert equal_rows(model, step.row, row)
    # A plan of all threes needs 10 rounds for 40 tokens, one of zeros 39.
    assert pool.batch.rounds - rounds < 60
    assert pool.batch.row_rounds - rows > 120


@pytest.mark.parametrize("model", MODELS)
def test_requests_of_all_kinds_equal_their_single_runs(pools, model):
    pool = pools[f"{model}, mixed"]
    requests = pool.requests
    for some in (requests[:8], requests[4:]):
        for request, steps in zip(some, together(pool, some), strict=True):
            assert compare(request, steps) == 0


@pytest.mark.parametrize("name", ["processors", "coupled"])
def test_ways_of_drawing_in_pairs(pools, name):
    """Each kind of row beside each other one: no third one lends it anything."""
    pool = pools["hybrid, mixed"]
    request = next(r for r in pool.requests if name in r.options)
    for other in pool.requests:
        for some in ([request, other], [other, request]):
            for expected, steps in zip(some, together(pool, some), strict=True):
                assert compare(expected, steps) == 0


@pytest.mark.parametrize("kind", ["scripted", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_random_joins_and_leaves_change_no_row(pools, model, kind):
    pool = pools[f"{model}, {kind}"]
    assert sum(pool.schedule(seed) for seed in range(4)) == 0
    assert len(pool.batch) == 0 and pool.batch.capacity == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scripted", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_two_hundred_schedules(pools, model, kind):
    pool = pools[f"{model}, {kind}"]
    assert sum(pool.schedule(seed) for seed in range(100, 300)) <= 2


def test_a_rows_stream_does_not_depend_on_its_neighbours(pools):
    """The same seeds beside others, in other slots, and alone."""
    pool = pools["hybrid, mixed"]
    greedy, *_, sampled, _ = pool.requests[:5]
    others = [r for r in pool.requests if r not in (greedy, sampled)]
    for before, after in (([], []), (others[:3], others[3:5]), (others[5:7], [])):
        some = [*before, sampled, greedy, *after]
        found = together(pool, some)[len(before) : len(before) + 2]
        assert [[s.token for s in x] for x in found] == [sampled.tokens, greedy.tokens]


def test_slots_stay_and_joins_retrace_nothing(llama):
    """Once each number of slots has been seen."""
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 2)
    batch = BatchIterator(decoder, max_rows=4)

    def fill():
        for i in range(4):
            batch.add(prompt(i, 128), max_tokens=12 + 9 * i)
            next(batch)
        seen = [dict(batch._seated) for _ in iter(lambda: next(batch, None), None)]
        for a, b in pairwise(seen):
            assert all(a[slot] is b[slot] for slot in a.keys() & b.keys())

    fill()
    traces = [round_.traces for round_ in batch._rounds.values()]
    fill()
    assert [round_.traces for round_ in batch._rounds.values()] == traces


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_drafter_with_caches_of_its_own(name, request):
    """Rows of a draft model, recurrent or not, that begin at unlike times."""
    model = request.getfixturevalue(name)
    target = as_target(model)
    decoder = SpeculativeDecoder(target, DraftModelDrafter(target, target), DEPTH)
    requests = [Request(prompt(i, 128), {"max_tokens": 24}) for i in range(4)]
    pool = Pool(decoder, requests)
    assert pool.schedule(1, count=6) == 0
    ids = [pool.batch.add(r.prompt, **r.build()) for r in requests]
    while len(pool.batch) > 1:
        next(pool.batch)
    telemetry = pool.batch.telemetry(max(set(ids) & set(pool.batch._requests)))
    assert telemetry.acceptance_rate == 1
    pool.batch.close()


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2", "falcon_h1", "llama4"])
def test_other_families(family):
    """Windows, states a row, both together; the last cannot be traced."""
    model = tiny_family(family)
    decoder = SpeculativeDecoder(as_target(model), NGramDrafter(), DEPTH)
    requests = [Request(prompt(i, 96), {"max_tokens": 16}) for i in range(3)]
    pool = Pool(decoder, requests)
    assert pool.schedule(1, count=5) == 0
    assert (pool.batch.rounds == 0) == (family == "llama4")


def test_an_empty_slot_counts_nothing_and_keeps_its_state(qwen_head):
    """Beside a full one, which has the tokens that it has alone."""
    part = Round(qwen_head.target, qwen_head.drafter, 2, greedy=True)
    states = [start_row(part, prompt(i, 128), 256)[0] for i in (3, 4)]
    state = stack_states(states)
    for active in ([True, False], [False, True]):
        controls = {"active": mx.array(active), "most": mx.array([2, 1])}
        found, result = BatchRound([part])({**state, **controls}, 256)
        full, empty = active.index(True), active.index(False)
        assert result.counts[empty].tolist() == [-1, 1 + (empty == 0), -1, -1, -1]
        assert found["offset"][empty].item() == state["offset"][empty].item()
        assert found["steps"][empty].item() == found["count"][empty].item() == 0
        alone = {k: x[full : full + 1] for k, x in controls.items()}
        _, other = BatchRound([part])({**states[full], **alone}, 256)
        assert result.counts[full].tolist() == other.counts[0].tolist()
        assert 0 <= result.counts[full, 0].item() <= controls["most"][full].item()


# Depth


class Changing:
    """Takes depths in turn."""

    max_depth = 4

    def __init__(self):
        self.depth, self.seen = 4, []

    def set_slots(self, slots):
        pass

    def add_rows(self, accepted, seconds):
        self.seen.append((self.depth, accepted, seconds))
        self.depth = (3, 0, 0, 1, 4, 0, 2)[len(self.seen) % 7]

    def end(self, tokens):
        pass


@pytest.mark.parametrize("name", ["hybrid", "window"])
def test_rounds_of_changing_depth_change_no_greedy_or_coupled_row(pools, name):
    """Plain steps among them; the drafter keeps up."""
    mixed = pools[f"{name}, mixed"]
    target, drafter = mixed.decoder.target, mixed.decoder.drafter
    batch = BatchIterator(
        SpeculativeDecoder(target, drafter, 4), prefill_step_size=CHUNK
    )
    batch._pace, batch._adaptive = Changing(), True
    some = [
        r for r in mixed.requests if "params" not in r.options or "coupled" in r.options
    ]
    ids = [batch.add(r.prompt, **r.build()) for r in some]
    telemetry = [batch.telemetry(i) for i in ids]
    steps, _ = read(batch)
    assert [compare(r, steps[i]) for i, r in zip(ids, some, strict=True)] == [0] * len(
        some
    )
    depths = {depth for t in telemetry for depth in t.depths}
    assert depths >= {0, 1, 2, 3, 4}
    assert all(
        0 <= max(accepted) <= depth and seconds > 0
        for depth, accepted, seconds in batch._pace.seen
    )


def test_a_shallow_round_leaves_no_room_for_a_deep_one(llama):
    batch = BatchIterator(SpeculativeDecoder(as_target(llama), NGramDrafter(), 4))
    batch._pace, batch._adaptive = Changing(), True
    batch.add(prompt(0, 128), max_tokens=60)
    widths = []
    for _ in batch:
        if batch._pending is not None and batch.rounds:
            widths.append(batch._pending.round.width)
            assert batch._state["tokens"].shape[1] == widths[-1]
    assert set(widths) == {1, 2, 3, 4, 5}


def test_a_row_counts_rounds_by_their_own_depth(qwen_head):
    target, head = qwen_head.target, qwen_head.drafter
    batch = BatchIterator(SpeculativeDecoder(target, head, 4))
    batch._pace, batch._adaptive = Changing(), True
    telemetry = batch.telemetry(batch.add(prompt(0, 128), max_tokens=40))
    depths = Counter()
    while len(batch):
        pending, rounds = batch._pending, batch.rounds
        next(batch)
        if batch.rounds > rounds:
            depths[pending.round.depth] += 1
    assert set(depths) == {0, 1, 2, 3, 4} and telemetry.depths == depths
    calls = sum(n * head.forwards(depth) for depth, n in depths.items())
    assert telemetry.draft_calls == calls


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen, window_model])
def test_a_row_joins_behind_a_round_of_any_depth(make):
    target = as_target(make())
    drafter = random_head(target) if make is tiny_qwen else NGramDrafter()
    decoder = SpeculativeDecoder(target, drafter, 4)
    prompts = [random_prompt(9 + i, 95, i) for i in range(12)]
    expected = [[s.token for s in decoder.stream(p, max_tokens=40)] for p in prompts]
    batch, found = BatchIterator(decoder), {}
    batch._pace, batch._adaptive = Changing(), True
    for tokens in prompts:
        batch.add(tokens, max_tokens=40)
        for _ in range(2):
            for out in next(batch):
                found.setdefault(out.id, []).extend(s.token for s in out.steps)
    for outputs in batch:
        for out in outputs:
            found.setdefault(out.id, []).extend(s.token for s in out.steps)
    assert list(found.values()) == expected


def test_an_adaptive_batch_measures_its_slots(llama):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), "adaptive")
    batch = BatchIterator(decoder)
    ids = [batch.add(prompt(i, 128), max_tokens=60) for i in range(3)]
    steps, _ = read(batch)
    for i, id_ in enumerate(ids):
        expected = plain_tokens(llama, prompt(i, 128), 60)
        assert [step.token for step in steps[id_]] == expected
    assert len(decoder.batch_costs[4]) > 1


# Ends


def test_a_row_has_the_weights_of_the_time_when_it_is_added():
    model, other = tiny_llama(), tiny_llama(seed=7)
    batch = BatchIterator(SpeculativeDecoder(as_target(model), NGramDrafter(), DEPTH))
    for _ in range(3):  # of four slots, so the late one changes no shape
        batch.add(PROMPT, max_tokens=60)
    for _ in range(4):
        next(batch)
    model.update(other.parameters())
    late = batch.add(PROMPT, max_tokens=20)
    steps, _ = read(batch)
    assert [step.token for step in steps[late]] == plain_tokens(other, PROMPT, 20)


def test_nothing_is_left_of_requests_that_ended(pools):
    """The second time that the same schedules run, when all is traced."""
    pool, held = pools["hybrid, mixed"], []
    for _ in range(2):
        for seed in (51, 52):
            pool.schedule(seed, count=6)
        gc.collect()
        mx.synchronize()  # what is still computed is held
        held.append(mx.get_active_memory())
    assert held[1] <= held[0] + 2**14  # a slot has 100 KiB, small states differ


class Breaks:
    """A processor that fails at a call."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, tokens, logits):
        self.calls -= 1
        if self.calls < 0:
            raise ZeroDivisionError("broken")
        return logits


class Masks:
    """Allows even tokens only; fails at a count of tokens."""

    masks = biases = False

    def __init__(self, fails=10**9):
        self.masks, self.count, self.fails = True, 0, fails

    def mask(self):
        if self.count >= self.fails:
            raise ZeroDivisionError("broken")
        return np.full(4, 0x55555555, np.uint32)

    def accept(self, token):
        self.count += 1

    def forced(self):
        return ()

    def bias(self):
        return None

    def horizon(self):
        return 10**9

    def checkpoint(self):
        return self.count

    def restore(self, mark):
        self.count = mark


class ForcesUnderMasks(Masks):
    """Texts of three to nine tokens."""

    def __init__(self):
        super().__init__()
        self.texts, self.left = {4: 3, 12: 5, 20: 7, 35: 9}, 0

    def accept(self, token):
        super().accept(token)
        self.left = max(self.left - 1, 0) or self.texts.get(self.count, 0)

    def forced(self):
        return [6] * self.left

    def mask(self):
        return np.array([64, 0, 0, 0], np.uint32) if self.left else super().mask()

    def horizon(self):
        return 0 if self.left else min(x - self.count for x in (*self.texts, 99))

    def checkpoint(self):
        return self.count, self.left

    def restore(self, mark):
        self.count, self.left = mark


@pytest.mark.parametrize("seed", range(3))
def test_forced_texts_of_a_shallow_row_are_those_of_its_single_run(llama, seed):
    """What is a long text depends on the row's own depth, not on the batch's."""
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 7)
    options = {"max_tokens": 45, "params": SamplingParams(1.0), "seed": seed}
    alone = decoder.with_depth(1).stream([5], controller=ForcesUnderMasks(), **options)
    expected = [(step.token, step.forced) for step in alone]
    batch = BatchIterator(decoder)
    batch.add([5], depth=1, controller=ForcesUnderMasks(), **options)
    batch.add([9, 8], max_tokens=60)
    steps = [s for outs in batch for out in outs if out.id == 0 for s in out.steps]
    assert [(step.token, step.forced) for step in steps] == expected
    assert sum(forced for _, forced in expected) > 20


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_masks_hold_for_their_row_alone(name, request, qwen_head):
    model = request.getfixturevalue(name)
    target = as_target(model)
    decoder = SpeculativeDecoder(target, NGramDrafter(), DEPTH)
    sampled = {"params": SamplingParams(1.0), "seed": 3}
    kinds = [
        ({"max_tokens": 20}, {"controller": Masks}),
        ({"max_tokens": 20, **sampled}, {"controller": Masks}),
        ({"max_tokens": 20, "processors": [row_by_row]}, {"controller": Masks}),
        ({"max_tokens": 20}, {}),
        ({"max_tokens": 20, **sampled}, {"controller": Forces}),
    ]
    requests = [Request(prompt(i, 128), *kind) for i, kind in enumerate(kinds)]
    pool = Pool(decoder, requests)
    for request_, steps in zip(requests, together(pool, requests), strict=True):
        assert compare(request_, steps) == 0
        masked = request_.make.get("controller") is Masks
        assert not masked or all(step.token % 2 == 0 for step in steps)
        for step, row in zip(steps, request_.rows, strict=True):
            assert equal(step.row, row)


@pytest.mark.parametrize("calls", [0, 1, 7])
def test_a_row_whose_own_code_fails_ends_alone(pools, calls):
    pool = pools["hybrid, mixed"]
    batch, good = pool.batch, pool.requests[:4]
    bad = [
        batch.add(PROMPT, processors=[Breaks(calls)]),
        batch.add(PROMPT, controller=Masks(fails=calls)),
    ]
    ids = [batch.add(r.prompt, **r.build()) for r in good]
    steps, ends = read(batch)
    for id_ in bad:
        assert ends[id_].finish == "error"
        assert isinstance(ends[id_].error, ZeroDivisionError)
        assert len(steps[id_]) <= calls
    for id_, request in zip(ids, good, strict=True):
        assert compare(request, steps[id_]) == 0


def failing(name, calls, **flags):
    """A controller with a method that works so many times."""
    controller = Masks()
    vars(controller).update(flags)
    method, left = getattr(controller, name), iter(range(calls))

    def call(*args):
        return 1 / 0 if next(left, None) is None else method(*args)

    setattr(controller, name, call)
    return controller


@pytest.mark.parametrize("neighbours", [0, 2])
@pytest.mark.parametrize(
    "name, flags",
    [
        ("horizon", {"masks": False, "biases": True}),
        ("bias", {"masks": False, "biases": True, "horizon": lambda: 0}),
        ("forced", {"masks": False}),
        ("forced", {}),
        ("accept", {}),
    ],
)
def test_a_controller_that_fails_anywhere_ends_its_row_alone(
    llama, name, flags, neighbours
):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), DEPTH)
    batch, expected = BatchIterator(decoder), plain_tokens(llama, PROMPT, 20)
    for calls in range(9):
        bad = batch.add(PROMPT, controller=failing(name, calls, **flags))
        good = [batch.add(PROMPT, max_tokens=20) for _ in range(neighbours)]
        telemetry = [batch.telemetry(i) for i in good]
        steps, ends = read(batch)
        assert isinstance(ends[bad].error, ZeroDivisionError)
        for id_ in good:
            assert ends[id_].error is None
            assert [step.token for step in steps[id_]] == expected
        assert not any(t.step_downs for t in telemetry)
        assert batch._state is batch._pending is None


def test_a_row_with_unusable_logits_ends_alone():
    """NaN behind two tokens, in a vocabulary of five; its neighbours go on."""
    table = mx.random.normal((5, 5, 5), key=mx.random.key(0))
    table[3, 4] = mx.nan
    table[:, :, 3] -= 20  # nobody else gets there
    target, drafter = TableTarget(table), TableDrafter(mx.zeros((5, 5)))
    decoder = SpeculativeDecoder(target, drafter, DEPTH)
    options = {"params": SamplingParams(1.0), "max_tokens": 40}
    requests = [Request([0, i], {**options, "seed": i}) for i in (1, 2)]
    pool = Pool(decoder, requests)
    first = table[0, 3].tolist()
    table[0, 3, 4] = 100 + max(first)  # 4 follows 0, 3
    ids = [pool.batch.add(r.prompt, **r.build()) for r in requests]
    bad = pool.batch.add([0, 3], **options)
    steps, ends = read(pool.batch)
    assert isinstance(ends[bad].error, UnusableLogits)
    assert [step.token for step in steps[bad]] == [4]
    for id_, request in zip(ids, requests, strict=True):
        assert [step.token for step in steps[id_]] == request.tokens
        assert all(0 <= step.token < 5 for step in steps[id_])


def test_temperatures_of_one_batch(qwen_head):
    """0, tiny and 1 side by side: the first three are the argmax, nothing is NaN."""
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, DEPTH)
    batch, start = BatchIterator(decoder), random_prompt(9, 128, 4)
    ids = [
        batch.add(start, params=SamplingParams(t), seed=i, max_tokens=20)
        for i, t in enumerate((0.0, 1e-6, 1e-40, 1.0))
    ]
    steps, _ = read(batch)
    tokens = [[step.token for step in steps[i]] for i in ids]
    greedy = plain_tokens(qwen_head.target.model, start, 20)
    assert tokens[:3] == [greedy] * 3 and tokens[3] != greedy
    assert all(mx.all(mx.isfinite(s.logprobs)).item() for i in ids for s in steps[i])


def test_cancelled_rows_leave_no_trace(pools):
    """At random moments, twice in a row now and then; a probe answers behind each."""
    pool, rng = pools["plain, scripted"], random.Random(5)
    batch, probe = pool.batch, pool.requests[4]
    rates = []
    for _ in range(20):
        count = rng.choice([1, 1, 2])
        ids = [batch.add(prompt(9, 128), max_tokens=300) for _ in range(count)]
        for _ in range(rng.randrange(6)):
            next(batch)
        for id_ in ids:
            assert batch.remove(id_)
        assert len(batch) == 0 and batch.capacity == 0
        id_ = batch.add(probe.prompt, **probe.build())
        telemetry = batch.telemetry(id_)
        steps, _ = read(batch)
        assert compare(probe, steps[id_]) == 0
        rates.append(telemetry.acceptance_rate)
    assert min(rates) == max(rates) > 0.9  # its plan is to accept everything


def test_one_row_of_two_goes_on_drafting(pools):
    pool = pools["plain, scripted"]
    batch, probe = pool.batch, pool.requests[4]
    other = batch.add(prompt(9, 128), max_tokens=300)
    id_ = batch.add(probe.prompt, **probe.build())
    telemetry = batch.telemetry(id_)
    while telemetry.rounds < 3:
        next(batch)
    batch.remove(other)
    read(batch)
    assert telemetry.acceptance_rate > 0.9 and telemetry.step_downs == 0


# The caller's caches


@pytest.fixture(scope="module", params=["qwen", "llama"])
def plain(request):
    return Plain(request.getfixturevalue(request.param))


def test_a_callers_cache_holds_prompt_and_tokens(plain):
    """Ended by length in any slot, by a stop, by removal with a round in flight, by an
    error: bit for bit what plain decoding leaves."""
    batch = BatchIterator(plain.decoder)
    ways = [{"max_tokens": n} for n in (1, 2, 6, 9, 13)]
    ways += [{"stop_tokens": {plain.tokens[7]}, "max_tokens": LENGTH}]
    ways += [{"processors": [Breaks(5)]}, {"max_tokens": LENGTH}]
    caches = [plain.target.make_cache() for _ in ways]
    ids = [
        batch.add(PROMPT, caches=c, **way) for c, way in zip(caches, ways, strict=True)
    ]
    found = {i: [] for i in ids}
    for _ in range(12):
        for out in next(batch):
            found[out.id] += [step.token for step in out.steps]
    assert len(batch) == 1 and caches[-1][-1].offset == 0
    batch.remove(ids[-1])
    for i, cache in zip(ids, caches, strict=True):
        assert found[i] == plain.tokens[: len(found[i])]
        plain.check(cache, len(PROMPT) + len(found[i]))
    assert [len(found[i]) for i in ids[:5]] == [1, 2, 6, 9, 13]


def test_a_cache_that_is_in_the_batch_is_refused(plain):
    batch, caches = BatchIterator(plain.decoder), plain.target.make_cache()
    batch.add(PROMPT, caches=caches)
    next(batch)
    with pytest.raises(ValueError, match="still open"):
        batch.add(PROMPT, caches=caches)
    batch.close()
    plain.check(
        caches, max(entry.offset for entry in caches if hasattr(entry, "offset"))
    )


def test_quantised_rows_run_beside_the_batch(plain):
    batch = BatchIterator(plain.decoder)
    options = {
        "kv_bits": 8,
        "kv_group_size": 32,
        "quantized_kv_start": 20,
        "max_tokens": 24,
    }
    alone = [step.token for step in plain.decoder.stream(PROMPT, **options)]
    first = batch.add(PROMPT, **options)
    other = batch.add(PROMPT, max_tokens=24)
    telemetry = batch.telemetry(first)
    steps, _ = read(batch)
    assert [step.token for step in steps[first]] == alone
    assert [step.token for step in steps[other]] == plain.tokens[:24]
    assert "beside the batch" in telemetry.fallback


# Rounds that fail


def test_behind_a_round_that_fails_the_rows_go_on_alone_and_come_back(
    plain, monkeypatch
):
    batch = BatchIterator(plain.decoder)
    caches = [plain.target.make_cache() for _ in range(3)]
    ids = [
        batch.add(PROMPT, caches=c, max_tokens=20 + 15 * i)
        for i, c in enumerate(caches)
    ]
    telemetries = [batch.telemetry(i) for i in ids]
    found = {i: [] for i in ids}

    def turn():
        for out in next(batch):
            found[out.id] += [step.token for step in out.steps]

    for _ in range(4):
        turn()
    with monkeypatch.context() as m:
        m.setattr(type(batch), "_round", lambda *a: 1 / 0)
        turn()
    rounds = batch.rounds
    while len(batch):
        turn()
    assert batch.rounds > rounds
    for i, (id_, telemetry, cache) in enumerate(
        zip(ids, telemetries, caches, strict=True)
    ):
        assert found[id_] == plain.tokens[: 20 + 15 * i]
        assert telemetry.step_downs == 1
        assert "division by zero" in telemetry.fallback
        plain.check(cache, len(PROMPT) + 20 + 15 * i)


def test_a_passing_failure_where_a_row_leaves_keeps_no_cache(plain, monkeypatch):
    batch, caches = BatchIterator(plain.decoder), plain.target.make_cache()
    leave, failures = BatchIterator._leave, [MemoryError]

    def fails_once(self, request):
        if failures:
            raise failures.pop()
        leave(self, request)

    monkeypatch.setattr(BatchIterator, "_leave", fails_once)
    id_ = batch.add(PROMPT, caches=caches, max_tokens=6)
    _, ends = read(batch)
    assert isinstance(ends[id_].error, MemoryError)
    plain.check(caches, len(PROMPT) + 6)
    caches, failures = plain.target.make_cache(), [MemoryError]
    id_ = batch.add(PROMPT, caches=caches)
    count = sum(len(out.steps) for _ in range(3) for out in next(batch))
    with pytest.raises(MemoryError):
        batch.remove(id_)
    plain.check(caches, len(PROMPT) + count)
    assert len(batch) == batch.capacity == 0


def test_faults_anywhere_leave_every_cache_exact(plain):
    assert len(campaign(plain, 60)) > 20


# Arguments


def test_bad_arguments_are_refused(plain):
    with pytest.raises(ValueError, match="max_rows and prefill_step_size"):
        BatchIterator(plain.decoder, max_rows=0)
    batch = BatchIterator(plain.decoder, max_rows=1)
    with pytest.raises(ValueError, match=r"depth must be at most 4"):
        batch.add(PROMPT, depth=5)
    with pytest.raises(ValueError, match="depth must be in"):
        batch.add(PROMPT, depth=0)
    with pytest.raises(ValueError, match="prompt must hold"):
        batch.add([])
    assert len(batch) == 0 and next(batch, None) is None
    batch.add(PROMPT)
    with pytest.raises(RuntimeError, match="its 1 requests"):
        batch.add(PROMPT)
    assert not batch.remove(17)
    batch.close()
    assert len(batch) == 0


def test_an_error_in_progress_or_prompt_ends_that_row(plain):
    def progress(done, total):
        if done:
            raise KeyError("stop here")

    batch = BatchIterator(plain.decoder, prefill_step_size=4)
    bad, good = batch.add(PROMPT, progress=progress), batch.add(PROMPT, max_tokens=9)
    steps, ends = read(batch)
    assert isinstance(ends[bad].error, KeyError)
    assert [step.token for step in steps[good]] == plain.tokens[:9]


def test_a_long_row_joins_short_ones(plain):
    """The slots grow, and a prompt in chunks lets the others go on."""
    batch = BatchIterator(plain.decoder, prefill_step_size=64)
    first = batch.add(PROMPT, max_tokens=60)
    telemetry, long = batch.telemetry(first), random_prompt(400, 128, 3)
    while telemetry.rounds < 2:
        next(batch)
    before, capacity = telemetry.rounds, batch.capacity
    second = batch.add(long, max_tokens=5)
    while batch.telemetry(second).emitted == 0:
        next(batch)
    assert telemetry.rounds >= before + 6 and batch.capacity > capacity
    steps, _ = read(batch)
    assert telemetry.emitted == 60
    expected = [s.token for s in plain.decoder.stream(long, max_tokens=5)]
    assert expected[-len(steps[second]) :] == [s.token for s in steps[second]]


def test_slots_grow_no_further_than_their_rows_need(llama, monkeypatch):
    monkeypatch.setattr("mlx_mtp.context.MAX_RESERVED", 16)
    batch = BatchIterator(SpeculativeDecoder(as_target(llama), NGramDrafter(), DEPTH))
    expected = plain_tokens(llama, PROMPT, 300)
    found, capacities = [], set()
    batch.add(PROMPT, max_tokens=300)
    for outputs in batch:
        capacities.add(batch.capacity)
        found += [step.token for out in outputs for step in out.steps]
    assert found == expected and capacities == {0, 256, 384}
    batch.add(PROMPT, max_tokens=-1)
    while batch.capacity <= 256:
        next(batch)
    assert batch.capacity == 768
    batch.close()


class ForcesMuch(Forces):
    """A text that needs more room than is reserved."""

    def forced(self):
        return [7] * (265 - self.count) if 5 <= self.count < 265 else []

    def horizon(self):
        return max(5 - self.count, 0) if self.count < 265 else 10**9


def test_a_forced_text_takes_no_more_room_than_the_limit(qwen_head, monkeypatch):
    monkeypatch.setattr("mlx_mtp.context.MAX_RESERVED", 16)
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, DEPTH)
    options = {"max_tokens": 275, "controller": ForcesMuch()}
    steps = decoder.stream(PROMPT, **options)
    expected = [step.token for step in steps]
    assert len(expected) == 275 and steps.stream.context.capacity == 384
    batch, capacities = BatchIterator(decoder), set()
    batch.add(PROMPT, **{**options, "controller": ForcesMuch()})
    found = []
    for outputs in batch:
        capacities.add(batch.capacity)
        found += [step.token for out in outputs for step in out.steps]
    assert found == expected and max(capacities) == 384


@pytest.mark.parametrize("processors", [[], [row_by_row]])
def test_a_row_that_is_removed_keeps_its_heads_state(qwen_head, processors):
    """Whatever it had taken of a block, with the next round in flight."""
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, DEPTH)
    batch, model = BatchIterator(decoder), qwen_head.target.model
    for turns in range(2, 9):
        caches, taken = qwen_head.target.make_cache(), []
        batch.add(PROMPT[3:])  # a neighbour
        row = batch.add(PROMPT, caches=caches, processors=processors)
        while len(taken) < turns:
            news = [out for out in next(batch) if out.id == row]
            taken += [step.token for out in news for step in out.steps]
        batch.remove(row)
        prefix = decoder._prefixes[caches[0]]
        check_at_rest(qwen_head, prefix, prefix.draft_state, PROMPT, taken)
        assert processors or taken == plain_tokens(model, PROMPT, len(taken))


def unchanged(tokens, logits):
    return logits


class Nothing(StatelessDrafter):
    """Leaves its part of a block without tokens."""

    def propose(self, state, context):
        tokens = mx.full((context.count.size, context.depth), -1, mx.int32)
        return Drafts(tokens, lengths=mx.zeros_like(context.count)), state


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen, window_model])
def test_a_filler_reaches_no_row(make):
    """Slots that nobody uses are fed some token too, and 0 may have an embedding that
    is NaN, which a mask would not keep out."""
    model = make()
    trunk = getattr(model, "language_model", model)
    embedding = trunk.embed if "embed" in trunk else trunk.model.embed_tokens
    output = trunk.head if "head" in trunk else trunk.lm_head
    output.weight[0] = 0  # so that it is not chosen
    target, found = as_target(model), []
    drafters = [Nothing(), NGramDrafter(), DraftModelDrafter(target, target, 96)]
    if make is tiny_qwen:
        drafters[2] = random_head(target)
    prompts = [[1 + t for t in random_prompt(n, 95, n)] for n in (1, 17, 9, 30)]
    for filler in (0, mx.nan):
        embedding.weight[0] = filler
        for drafter in drafters:
            decoder, rows = SpeculativeDecoder(target, drafter, DEPTH), []
            for processors in ([], [unchanged]):
                options = {"max_tokens": 20, "processors": processors}
                batch = BatchIterator(decoder)
                for tokens in prompts:
                    rows.append(list(decoder.stream(tokens, **options)))
                    batch.add(tokens, **options)
                rows += read(batch)[0].values()
            found.append([[step.token for step in steps] for steps in rows])
    assert not any(0 in row for row in found[0])
    assert all(rows == found[0] for rows in found)
