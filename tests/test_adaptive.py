"""Adaptive depth: the tokens stay exact, and the policy finds the depth that pays."""

import math
import random
from statistics import fmean

import mlx.core as mx
import numpy as np
import pytest
from test_exactness import ALPHA, TARGET, V, shaped, transition_p_value
from tiny import (
    StatelessDrafter,
    TableDrafter,
    TableTarget,
    plain_tokens,
    random_prompt,
)

from mlx_mtp.adaptive import (
    IDLE,
    PRIOR,
    Acceptance,
    AdaptiveDepth,
    BatchCosts,
    BatchDepth,
    Costs,
    FixedDepth,
)
from mlx_mtp.drafters import Drafts, NGramDrafter
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder, UnusableLogits
from mlx_mtp.targets import TargetOutput, as_target


class Scripted:
    """Takes the depths of a list in turn."""

    max_depth = 6

    def __init__(self, depths):
        self.depths, self.depth, self.taken = depths, depths[0], 0

    def add(self, accepted, emitted, seconds):
        self.taken += 1
        self.depth = self.depths[self.taken % len(self.depths)]

    def end(self, tokens):
        pass


def scripted(decoder, depths):
    decoder._pace = lambda greedy, plain: Scripted(depths)
    return decoder


SCRIPTS = ([0], [1, 0], [3, 1, 0, 0, 2], [4, 4, 2, 2, 2], [0, 0, 0, 6, 6])


@pytest.mark.parametrize("depths", SCRIPTS)
def test_greedy_tokens_do_not_depend_on_the_depths(qwen_head, depths):
    prompt = random_prompt(9, 128, 3)
    expected = plain_tokens(qwen_head.target.model, prompt, 60)
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, 3)
    steps = scripted(decoder, depths).stream(prompt, max_tokens=60)
    assert [step.token for step in steps] == expected
    assert set(steps.telemetry.depths) <= set(depths)


def test_the_head_has_the_same_drafts_after_plain_decoding(demo_parts):
    """What it accepts behind a plain stretch is what it accepts without one."""
    message = {"role": "user", "content": "What is 57 + 68?"}
    prompt = demo_parts.tokenizer.apply_chat_template(
        [message], add_generation_prompt=True
    )
    rates = []
    for depths in ([2], [0] * 5 + [2, 2]):
        decoder = SpeculativeDecoder(demo_parts.target, demo_parts.drafter, 2)
        steps = scripted(decoder, depths).stream(prompt, max_tokens=60)
        assert len(list(steps)) == 60
        rates.append(steps.telemetry.acceptance_rate)
    assert rates[0] > 0.9 and rates[1] > 0.9


@pytest.mark.parametrize("depths", SCRIPTS)
def test_a_stream_of_changing_depths_has_the_transitions_of_the_target(depths):
    params = SamplingParams(0.7)
    drafter = TableDrafter(mx.mean(TARGET.table, axis=0))
    decoder = scripted(SpeculativeDecoder(TARGET, drafter, 3), depths)
    steps = decoder.stream([0, 1], max_tokens=2500, seed=5, params=params)
    tokens = np.array([0, 1] + [step.token for step in steps])
    rows = np.array([shaped(row, params) for row in TARGET.table.reshape(-1, V)])
    assert transition_p_value(tokens, rows.reshape(V, V, V)) > ALPHA


def test_a_depth_that_knows_the_next_draft_is_found():
    """Negative control: draft only where the drawn draft will be the likelier one."""

    class Peeks(StatelessDrafter):
        def propose(self, state, context):
            logits = mx.broadcast_to(mx.log(mx.array([0.9, 0.1])), (1, 2))
            token, stat = context.draw(logits, 0)
            drafts = Drafts(token[:, None], logits[:, None], stat[:, None])
            return drafts._replace(lengths=(token == 0).astype(mx.int32)), state

    class Fair:
        vocab_size, hidden_size, adapters = 2, None, []

        def weights(self):
            return ()

        def make_cache(self):
            return []

        def prefill(self, tokens, caches):
            return TargetOutput(mx.zeros((*tokens.shape, 2)))

        forward = prefill

    decoder = SpeculativeDecoder(Fair(), Peeks(), 1)
    params = SamplingParams(1.0)
    steps = decoder.stream([0], max_tokens=8000, seed=1, params=params)
    share = np.mean([step.token == 0 for step in steps])  # of 0.533
    assert abs(share - 0.5) > 4 * 0.5 / 8000**0.5


@pytest.mark.parametrize("stop", range(1, 22, 3))
@pytest.mark.parametrize("depths", [[0], [2, 0, 0, 3]])
def test_caches_are_exact_wherever_a_stream_ends(qwen, qwen_head, depths, stop):
    prompt = random_prompt(5, 128, 4)
    truth = plain_tokens(qwen, prompt, 40)
    for limit, closed in ((stop, False), (40, True)):
        decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, 3)
        caches = qwen_head.target.make_cache()
        scripted(decoder, depths)
        steps = decoder.stream(prompt, max_tokens=limit, caches=caches)
        for _ in range(stop):
            next(steps)
        if closed:
            steps.close()
        assert list(steps) == []
        more = decoder.stream(truth[stop : stop + 1], max_tokens=8, caches=caches)
        # The emitted tokens are in the caches; the next prompt token follows them.
        expected = plain_tokens(qwen, [*prompt, *truth[: stop + 1]], 8)
        assert [step.token for step in more] == expected


@pytest.mark.parametrize("depths", [[0], [2, 0, 0, 3]])
def test_quantised_caches_are_mlx_lms_at_every_depth(llama, depths):
    prompt = random_prompt(5, 128, 4)
    how = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 14}
    expected = plain_tokens(llama, prompt, 30, **how)
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 3)
    steps = scripted(decoder, depths).stream(prompt, max_tokens=30, **how)
    assert [step.token for step in steps] == expected


def test_unusable_logits_in_plain_decoding_leave_the_caches_exact():
    class Breaks:
        """Counts up; NaN behind token 6."""

        def __init__(self, table):
            self.inner = table

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def prefill(self, tokens, caches):
            out = self.inner.prefill(tokens, caches)
            ids = mx.arange(9)
            logits = mx.where(ids == (tokens[..., None] + 1) % 9, 5.0, 0.0)
            broken = (tokens == 6)[..., None]
            return out._replace(logits=mx.where(broken, mx.nan, logits))

        forward = prefill

    target = Breaks(TableTarget(mx.zeros((9, 9, 9))))
    decoder = scripted(SpeculativeDecoder(target, NGramDrafter(), 2), [0])
    caches = target.make_cache()
    steps = decoder.stream([0, 1], caches=caches)
    got = []
    with pytest.raises(UnusableLogits):
        for step in steps:
            got.append(step.token)
    assert got == [2, 3, 4, 5, 6]
    assert caches[0].offset == 7
    assert caches[0].keys[0, 0, :7, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_adaptive_decoding_counts_its_depths(demo_parts):
    message = {"role": "user", "content": "What is 57 + 68?"}
    prompt = demo_parts.tokenizer.apply_chat_template(
        [message], add_generation_prompt=True
    )
    decoder = SpeculativeDecoder(demo_parts.target, demo_parts.drafter, "adaptive")
    expected = plain_tokens(demo_parts.model, prompt, 80)
    for _ in range(2):
        steps = decoder.stream(prompt, max_tokens=80)
        assert [step.token for step in steps] == expected
    assert sum(steps.telemetry.depths.values()) >= steps.telemetry.rounds > 0
    with pytest.raises(ValueError, match="adaptive"):
        SpeculativeDecoder(demo_parts.target, demo_parts.drafter, "deep")


@pytest.mark.parametrize("limit, stops", [(7, ()), (60, (6,))])
def test_drafts_behind_the_end_are_no_gain(limit, stops):
    """A drafter that is always right: blocks of four, and three tokens of the last."""

    class Counts(Scripted):
        def __init__(self):
            super().__init__([3])
            self.rounds, self.tokens = [], 0

        def add(self, accepted, emitted, seconds):
            self.rounds.append((accepted, emitted))

        def end(self, tokens):
            self.tokens = tokens

    counting = 20.0 * mx.eye(9)[(mx.arange(9) + 1) % 9]
    target = TableTarget(mx.broadcast_to(counting[None], (9, 9, 9)))
    decoder = SpeculativeDecoder(target, TableDrafter(counting), 3)
    pace = Counts()
    decoder._pace = lambda greedy, plain: pace
    steps = decoder.stream([7, 8], max_tokens=limit, stop_tokens=stops)
    assert [step.token for step in steps] == [0, 1, 2, 3, 4, 5, 6]
    assert pace.rounds == [(3, 4), (2, 2)] and pace.tokens == 6
    assert steps.telemetry.accepted == 6


# The policy, on made-up rounds.


def replay(lengths, cost, pace, measured=None):
    """Seconds of a stream that would accept ``lengths[t]`` drafts at token t."""
    at, seconds = 0, 0.0
    while at < len(lengths):
        depth = pace.depth
        accepted = min(depth, lengths[at], len(lengths) - at)
        emitted = min(accepted + 1, len(lengths) - at)
        seconds += cost(depth)
        at += emitted
        pace.add(accepted, emitted, (measured or cost)(depth))
        if depth and pace.depth != depth and at < len(lengths):
            seconds, at = seconds + cost(0), at + 1  # the token between two depths
    pace.end(len(lengths))
    return seconds


def lengths_of(rate, count, seed):
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        n = 0
        while n < 16 and rng.random() < rate:
            n += 1
        out.append(n)
    return out


@pytest.mark.parametrize(("tuned", "bar"), [(False, 0.93), (True, 0.95)])
@pytest.mark.parametrize("slope", [0.06, 0.2, 0.5])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.97])
def test_the_policy_is_as_fast_as_the_best_fixed_depth(rate, slope, tuned, bar):
    def cost(depth):
        return 1.0 if depth == 0 else 1.1 + slope * depth

    costs = Costs({depth: cost(depth) for depth in range(9)} if tuned else None)
    acceptance, ours, best = Acceptance(), 0.0, 0.0
    for seed in range(6):
        lengths = lengths_of(rate, 300, seed)
        ours += replay(lengths, cost, AdaptiveDepth(costs, 8, 0, acceptance))
        best += min(replay(lengths, cost, FixedDepth(depth)) for depth in range(9))
    assert best / ours > bar


@pytest.mark.parametrize("known", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.95])
def test_the_policy_bears_noise_and_a_machine_that_changes_its_speed(rate, known):
    """Measured seconds are disturbed; what was known is off by a factor."""
    cost = {depth: 1.0 if depth == 0 else 1.1 + 0.2 * depth for depth in range(9)}
    rng = random.Random(1)

    def measured(depth):
        speed = 1.0 + (measured.rounds // 400 % 2)
        measured.rounds += 1
        noise = abs(rng.gauss(0, 0.1)) + 2 * (rng.random() < 0.05)
        return speed * cost[depth] * (1 + noise)

    measured.rounds = 0
    costs = Costs({d: known * c for d, c in cost.items()} if known else None)
    acceptance, spent, best = Acceptance(), 0.0, 0.0
    for seed in range(15):
        lengths = lengths_of(rate, 160, seed)
        pace = AdaptiveDepth(costs, 8, 0, acceptance)
        spent += replay(lengths, cost.get, pace, measured)
        best += min(replay(lengths, cost.get, FixedDepth(d)) for d in cost)
    assert best / spent > 0.9


def test_the_policy_knows_that_short_answers_end():
    """Sure drafts, but seven tokens a stream: the deepest round is mostly waste."""

    def cost(depth):
        return 1.0 if depth == 0 else 1.1 + 0.3 * depth

    costs = Costs({depth: cost(depth) for depth in range(9)})
    acceptance, lengths = Acceptance(), [8] * 4
    ours = sum(
        replay(lengths, cost, AdaptiveDepth(costs, 8, 0, acceptance)) for _ in range(60)
    )
    best = 60 * min(replay(lengths, cost, FixedDepth(depth)) for depth in range(9))
    assert best / ours > 0.93


def test_costs_are_lower_quartiles_and_lines_between():
    costs = Costs({0: 1.0, 2: 1.4, 4: 1.8})
    assert costs(3) == pytest.approx(1.6) and costs(8) == pytest.approx(2.6)
    for _ in range(12):
        costs.add(2, 99.0)
    assert costs(2) == 1.4
    costs.add(2, 99.0)
    assert costs(2) == 99.0
    assert Costs()(3) == 1.0
    assert Costs({1: 1.0, 2: 0.5})(5) == 0.5  # deeper is never taken to be cheaper


@pytest.mark.parametrize(
    "costs", [{3: 0.0}, {3: -1.0}, {3: math.nan}, {3: math.inf}, {-1: 1.0}], ids=str
)
def test_costs_that_cannot_be(demo_parts, costs):
    with pytest.raises(ValueError, match="positive seconds"):
        SpeculativeDecoder(demo_parts.target, demo_parts.drafter, 3, costs)


def test_what_makes_one_depth_slower_makes_all_slower():
    costs = Costs({0: 1.0, 2: 1.4, 4: 1.8})
    for _ in range(20):
        costs.add(2, 2.8)
    assert [costs(d) for d in (0, 2, 4)] == pytest.approx([2.0, 2.8, 3.6])
    for _ in range(20):
        costs.add(4, 1.8)
    assert [costs(d) for d in (0, 2, 4)] == pytest.approx([1.0, 1.4, 1.8])


def test_a_cost_of_long_ago_is_tried_again():
    costs = Costs({0: 1.0, 2: 9.0, 3: 1.6})
    for _ in range(450):
        costs.add(1, 1.2)
    assert costs(0) == 1.0  # plain decoding is not on the line
    assert costs(2) == pytest.approx(1.4)  # that line is 9.0's better guess
    costs.add(2, 1.3)
    assert costs(2) == 1.3


def test_acceptance_by_position_forgets_and_counts_missing_drafts():
    acceptance = Acceptance()
    assert acceptance.rates(6) == [PRIOR[0]] * 6
    for _ in range(400):
        acceptance.add(3, 1)
    assert acceptance.rates(1)[0] > 0.97 and acceptance.rates(2)[1] < 0.06
    assert acceptance.tokens(3) == pytest.approx(2, abs=0.1)
    for _ in range(400):
        acceptance.add(3, 0)
    assert acceptance.rates(1)[0] < 0.06


def test_positions_without_a_draft_are_not_forgotten():
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.add(3, 1)
    before = acceptance.rates(3)
    for _ in range(400):
        acceptance.add(1, 1)
    assert acceptance.rates(3)[1:] == pytest.approx(before[1:], abs=0.01)


def test_streams_take_whole_rounds():
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.add(8, 8)
    assert acceptance.tokens(3) == pytest.approx(4, rel=0.02)
    acceptance.end(5)
    tokens = [acceptance.tokens(depth) for depth in (0, 3, 4, 8)]
    assert tokens == pytest.approx([1, 2.5, 5, 5], rel=0.02)
    acceptance.end(0)  # no round
    acceptance.end(100)  # 2 + 25 rounds of 4, and 1 + 12 of 9
    tokens = [acceptance.tokens(depth) for depth in (3, 8)]
    assert tokens == pytest.approx([105 / 27, 105 / 12.55], rel=0.02)


def test_an_idle_round_is_dearer_the_deeper_it_is():
    single, batch = Acceptance(), Acceptance(IDLE)
    for acceptance in (single, batch):
        for _ in range(1000):
            acceptance.add(8, 8)
        acceptance.end(100)
    ratio = [batch.tokens(depth) / single.tokens(depth) for depth in (0, 3, 8)]
    assert ratio == pytest.approx([100 / 101, 25 / 26, 12 / 13], rel=0.02)


def test_a_slot_behind_the_end_says_nothing():
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.add(3, 2, 2)
    assert acceptance.rates(3) == pytest.approx([1, 1, 1], abs=0.1)


@pytest.mark.parametrize("rate", [0.5, 0.85, 0.97])
def test_the_policy_fits_whole_answers(rate):
    """Many of one length: the depth that ends with them is best."""
    cost = {depth: 1.0 if depth == 0 else 1.1 + 0.15 * depth for depth in range(9)}
    costs, acceptance = Costs(cost), Acceptance()
    streams = [lengths_of(rate, 5, seed) for seed in range(150)]
    ours = sum(
        replay(x, cost.get, AdaptiveDepth(costs, 8, 0, acceptance)) for x in streams
    )
    fixed = [sum(replay(x, cost.get, FixedDepth(d)) for x in streams) for d in cost]
    assert min(fixed) / ours > 0.96


# Of batches. Milliseconds of the demo's rounds on a CPU, as measured: plain ones, and a
# line for those with drafts.

RECORDED = {1: (6.9, 5.6, 1.3), 8: (15.3, 13.7, 4.3), 32: (30.5, 27.0, 15.5)}


def recorded(slots, depth):
    plain, base, slope = RECORDED[slots]
    return base + slope * depth if depth else plain


class Fixed:
    def __init__(self, depth):
        self.depth = depth

    def set_slots(self, slots):
        pass

    def add_rows(self, accepted, seconds):
        pass

    def end(self, tokens):
        pass


def decode(pace, cost, slots, rate, seed, tokens=100):
    """Seconds of a batch, and the depths of its rounds."""
    rng, noise = random.Random(seed), random.Random(seed)
    left, seconds, depths = [tokens] * slots, 0.0, []
    while left:
        pace.set_slots(slots)
        depth, lengths = pace.depth, lengths_of(rate, len(left), rng.random())
        accepted = [min(depth, n) for n in lengths]
        took = cost(slots, depth)
        pace.add_rows(accepted, took * (1 + abs(noise.gauss(0, 0.05))))
        left = [n - a - 1 for n, a in zip(left, accepted, strict=True)]
        for _ in range(sum(n <= 0 for n in left)):
            pace.end(tokens)
        left = [n for n in left if n > 0]
        seconds, depths = seconds + took, [*depths, depth]
    return seconds, depths


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("slots", RECORDED)
def test_a_batch_finds_its_depth_in_a_few_rounds(slots, rate):
    """A first batch, which knows nothing, and those behind it."""
    seeds = range(12)
    fixed = {
        depth: [decode(Fixed(depth), recorded, slots, rate, s)[0] for s in seeds]
        for depth in range(9)
    }
    best, first, later = min(fixed.values(), key=sum), [], []
    for seed in seeds:
        if seed % 3 == 0:
            costs, acceptance = BatchCosts(), Acceptance(IDLE)
        pace = BatchDepth(costs, 8, acceptance)
        seconds, _ = decode(pace, recorded, slots, rate, seed)
        (later if seed % 3 else first).append(seconds / best[seed])
    assert fmean(first) < 1.13
    assert fmean(later) < 1.05


@pytest.mark.parametrize(("slots", "rate"), [(1, 0.97), (8, 0.8), (32, 0.1)])
def test_the_next_batch_begins_where_the_last_one_ended(slots, rate):
    costs, acceptance = BatchCosts(), Acceptance(IDLE)
    first, second = (
        decode(BatchDepth(costs, 8, acceptance), recorded, slots, rate, seed)[1]
        for seed in (1, 2)
    )
    assert len(set(first)) > 1
    assert abs(second[0] - first[-1]) <= 1 and len(set(second)) <= 2


def test_plain_rounds_may_be_cheaper_than_the_line_through_the_others():
    def cost(slots, depth):
        return 15.0 + 1.5 * depth if depth else 12.0

    _, depths = decode(BatchDepth(BatchCosts(), 8), cost, 2, 0.1, 1)
    assert depths[0] > 0 and depths[20:].count(0) > 60


def test_a_round_that_compiles_is_no_measurement():
    seen = set()

    def cost(slots, depth):
        first = depth not in seen
        seen.add(depth)
        return recorded(slots, depth) * (50 if first else 1)

    _, depths = decode(BatchDepth(BatchCosts(), 8), cost, 8, 0.8, 1)
    assert set(depths[12:]) <= {2, 3, 4, 5}


def test_a_batch_that_decodes_plainly_tries_drafts_when_its_texts_change():
    pace = BatchDepth(BatchCosts(), 8)
    _, depths = decode(pace, recorded, 8, 0.05, 1)
    assert depths.count(0) > 90
    _, depths = decode(pace, recorded, 8, 0.97, 2, tokens=600)
    assert min(depths[-20:]) > 3


def test_guesses_are_a_line_over_the_rows_of_a_round():
    costs = BatchCosts()
    ratio = costs[4](3) / costs[4](0)
    assert ratio == pytest.approx((16 + 16) / (16 + 4))
    costs[1].add(1, 4.0)  # two rows
    assert costs[1](3) == pytest.approx(4 * 20 / 18)
    assert costs[8](0) == pytest.approx(4 * 24 / 18)
    costs[8].add(0, 7.0)  # eight rows: half a second each, and three of weights
    assert costs[4](1) == pytest.approx(7.0) and costs[2](4) == pytest.approx(8.0)
    costs[4].add(1, 14.0)  # twice what was guessed
    assert costs[4](3) > 20
    assert BatchCosts({0: 1.0, 2: 2.0})[1](1) == pytest.approx(1.5)


def test_a_batch_stays_at_a_depth_for_long():
    costs = BatchCosts()
    costs[8].add(1, 9.0)
    for _ in range(500):
        costs[8].add(3, 20.0)
    assert costs[8](1) == pytest.approx(9.0)


def test_wide_batches_go_to_plain_decoding_and_narrow_ones_draft():
    """A round costs 1 for its weights and something for each verified row."""
    rng, costs = random.Random(0), BatchCosts()
    pace = BatchDepth(costs, 6)
    chosen = {}
    for slots, rounds in ((1, 150), (32, 150), (1, 60), (32, 60)):
        depths = []
        for _ in range(rounds):
            pace.set_slots(slots)
            depth = pace.depth
            accepted = [
                next((i for i in range(depth) if rng.random() > 0.7), depth)
                for _ in range(slots)
            ]
            seconds = 1 + 0.1 * slots * (depth + 1) + (0.2 if depth else 0)
            pace.add_rows(accepted, seconds)
            depths.append(depth)
        chosen.setdefault(slots, []).append(depths)
    for depths in chosen[1]:
        assert sum(depth >= 2 for depth in depths[-40:]) > 30
    for depths in chosen[32]:
        assert depths[-40:].count(0) >= 24
    # What is known of a number of slots is known when they are there again.
    assert chosen[32][1].count(0) > 50
