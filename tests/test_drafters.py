"""What the drafters propose, and that their state is the emitted tokens and no more."""

from itertools import islice

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import closeness
from tiny import (
    ScriptedDrafter,
    emitted,
    plain_tokens,
    qwen_config,
    random_head,
    random_prompt,
    start_row,
)

from mlx_mtp.batch import BatchIterator
from mlx_mtp.drafters import DraftContext, HeadConfig, MTPHeadDrafter, NGramDrafter
from mlx_mtp.round import Round
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.state import KVView

# Copied drafts


def lookup(history, depth, longest, shortest):
    """The latest of the longest earlier matches of the newest tokens."""
    best = (0, -1)
    for end in range(len(history) - 1):
        match = 0
        while (
            match < min(longest, end + 1)
            and history[end - match] == history[len(history) - 1 - match]
        ):
            match += 1
        if match >= shortest:
            best = max(best, (match, end))
    if best[1] < 0:
        return []
    return history[best[1] + 1 :][:depth]


def context(rows, width, depth, attended=256):
    """A round behind ``rows``, the tokens that each sequence emitted in the last."""
    padded = [row + [-1] * (width - len(row)) for row in rows]
    count = mx.array([len(row) for row in rows])
    return DraftContext(mx.array(padded), count, None, attended, depth, None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=3),
        min_size=2,
        max_size=2,
    ),
    grams=st.sampled_from([(1, 1), (3, 1), (3, 2), (5, 3)]),
    depth=st.integers(1, 4),
)
def test_the_latest_longest_match_is_copied(rows, grams, depth):
    """Two sequences with ragged rounds; the first lists are the prompts."""
    drafter = NGramDrafter(*grams)
    width = min(len(row[0]) for row in rows)
    histories = [row[0][:width] for row in rows]
    state = drafter.begin(mx.array(histories), 256)
    for step in range(1, min(len(row) for row in rows)):
        new = [row[step] for row in rows]
        drafts, state = drafter.propose(state, context(new, 4, depth))
        for i, history in enumerate(histories):
            history += new[i]
            count = drafts.lengths[i].item()
            assert drafts.tokens[i, :count].tolist() == lookup(history, depth, *grams)


def test_copied_drafts_survive_growth():
    drafter = NGramDrafter()
    history = random_prompt(250, 50, 1)
    state = drafter.grow(drafter.begin(mx.array([history]), 256), 512)
    for token in random_prompt(40, 50, 2):
        history.append(token)
        drafts, state = drafter.propose(state, context([[token]], 4, 3, 384))
        count = drafts.lengths.item()
        assert drafts.tokens[0, :count].tolist() == lookup(history, 3, 3, 1)


@pytest.mark.parametrize("grams", [(0, 0), (2, 3), (3, 0)])
def test_bad_ngram_lengths_are_refused(grams):
    with pytest.raises(ValueError, match="min_ngram must be in"):
        NGramDrafter(*grams)


# The head


def test_an_incomplete_head_config_is_named():
    config = qwen_config()
    del config["intermediate_size"]
    with pytest.raises(ValueError, match="intermediate_size"):
        HeadConfig.from_dict(config)


class Forced(MTPHeadDrafter):
    """Lets a script decide what is accepted; keeps the head's own drafts."""

    def __init__(self, drafter, script):
        super().__init__(drafter.head, drafter.target)
        self.script = script

    def begin(self, prompt, capacity):
        return super().begin(prompt, capacity), self.script.begin(prompt, capacity), ()

    def prefill(self, state, *rows):
        return super().prefill(state[0], *rows), *state[1:]

    def rewind(self, state, count):
        own = super().rewind(state[0], count)
        return own and (own, *state[1:])

    def propose(self, state, context):
        own, head_state = super().propose(state[0], context)
        drafts, script_state = self.script.propose(state[1], context)
        return drafts, (head_state, script_state, (own.tokens,))


@pytest.fixture(
    params=[{}, {"mtp_num_hidden_layers": 2}, {"mtp_use_dedicated_embeddings": True}],
    ids=["one layer", "two layers", "own embedding"],
)
def head(request, qwen_head):
    return random_head(qwen_head.target, mtp=request.param)


def test_the_heads_state_is_that_of_a_fresh_one_after_any_acceptance(qwen_head, head):
    """And so are its drafts: nothing that was rejected or chained stays."""
    target, prompt = qwen_head.target, random_prompt(8, 128, 3)
    truth = plain_tokens(target.model, prompt, 100)
    full = prompt + truth
    plan = [3, 0, 1, 0, 2, 3, 3, 0, 0, 2, 1]
    drafter = Forced(head, ScriptedDrafter(truth, 128, plan))
    round_ = Round(target, drafter, 3, greedy=True)
    state, _ = start_row(round_, prompt, 256)
    hidden = target.prefill(mx.array([full]), target.make_cache()).hidden
    length = len(prompt) + 1  # prompt and emitted tokens
    for _ in range(30):
        # A round commits the tokens of the round before it.
        fresh = head.prefill(
            head.begin(mx.array([prompt]), 256),
            mx.array([full[1:length]]),
            hidden[:, : length - 1],
            256,
        )
        state, result = round_(state, 256)
        (buffers, offset), _, (drafts,) = state["draft"]
        assert offset.item() == fresh[1].item() == length - 1
        for ours, others in zip(buffers, fresh[0], strict=True):
            for x, y in zip(ours, others, strict=True):
                x, y = x[:, :, : length - 1], y[:, :, : length - 1]
                assert mx.allclose(x, y, rtol=0, atol=closeness(1e-5, 1e-4))
        assert drafts.tolist() == chained(head, full, hidden, length)
        length += len(emitted(result.counts)[0])
    assert full[len(prompt) + 1 : length] == truth[1 : length - len(prompt)]


@pytest.mark.parametrize("taken", range(1, 12))
def test_the_heads_state_at_rest_is_that_of_a_fresh_one(qwen_head, taken):
    """Wherever max_tokens cuts a block: what the next turn on the cache starts from."""
    target, prompt = qwen_head.target, random_prompt(8, 128, 3)
    truth = plain_tokens(target.model, prompt, taken + 1)
    script = ScriptedDrafter(truth, 128, [3, 1])
    decoder = SpeculativeDecoder(target, Forced(qwen_head.drafter, script), 3)
    cache = target.make_cache()
    for _ in decoder.stream(prompt, max_tokens=taken, caches=cache):
        pass
    prefix = decoder._prefixes[cache[0]]
    check_at_rest(qwen_head, prefix, prefix.draft_state[0], prompt, truth[:taken])


def check_at_rest(qwen_head, prefix, state, prompt, tokens):
    """A prefix, and the head's state in it, are those of a prompt and tokens."""
    full, target = prompt + tokens, qwen_head.target
    hidden = target.prefill(mx.array([full]), target.make_cache()).hidden
    assert prefix.length == len(full) and prefix.tokens.tolist() == full
    atol = closeness(1e-5, 1e-4)
    assert mx.allclose(prefix.hidden, hidden[:, -1:], atol=atol)
    fresh = qwen_head.drafter.prefill(
        qwen_head.drafter.begin(mx.array([prompt]), 256),
        mx.array([full[1:]]),
        hidden[:, :-1],
        256,
    )
    buffers, offset = state
    assert offset.item() == len(full) - 1
    for x, y in zip(buffers[0], fresh[0][0], strict=True):
        x, y = x[:, :, : len(full) - 1], y[:, :, : len(full) - 1]
        assert mx.allclose(x, y, rtol=0, atol=atol)


def row_by_row(tokens, logits):
    return logits


class Failing(MTPHeadDrafter):
    """A head of which some traces fail."""

    fails, count = (), 0

    def propose(self, *args):
        self.count += 1
        if self.count in self.fails:
            raise MemoryError
        return super().propose(*args)


@pytest.mark.parametrize(
    ("fails", "lost"), [((), None), ((1,), None), (range(99), None), ((), 1), ((), 4)]
)
@pytest.mark.parametrize("processors", [[], [row_by_row]])
@pytest.mark.parametrize("taken", [1, 6, 17, 40])
def test_a_broken_off_stream_leaves_the_heads_state_in_step(
    qwen_head, fails, lost, processors, taken, monkeypatch
):
    """In rounds and below a step down and behind the step up, cut by the limit or
    closed by the caller."""
    target, prompt = qwen_head.target, random_prompt(8, 128, 3)
    truth = plain_tokens(target.model, prompt, taken)
    head, submit = Failing(qwen_head.drafter.head, target), mx.async_eval
    decoder = SpeculativeDecoder(target, head, 3)
    for limit in (taken, 256):
        head.fails, head.count, cache = fails, 0, target.make_cache()
        calls = iter(range(10**6))

        def fails_once(*args, calls=calls):
            if next(calls) == lost:
                raise RuntimeError("out of memory")
            submit(*args)

        monkeypatch.setattr(mx, "async_eval", fails_once)
        steps = decoder.stream(
            prompt, max_tokens=limit, caches=cache, processors=processors
        )
        assert [step.token for step in islice(steps, taken)] == truth
        steps.close()
        if taken > 5:
            assert bool(steps.telemetry.step_downs) == bool(fails or lost)
        prefix = decoder._prefixes[cache[0]]
        check_at_rest(qwen_head, prefix, prefix.draft_state, prompt, truth)


def test_an_error_at_the_first_token_leaves_the_heads_state(qwen_head):
    """The prompt was read, by the model and by the head."""
    target, prompts = qwen_head.target, [random_prompt(n, 128, n) for n in (8, 20)]
    decoder = SpeculativeDecoder(target, qwen_head.drafter, 3)
    cache = target.make_cache()
    tokens = [s.token for s in decoder.stream(prompts[0], max_tokens=5, caches=cache)]

    def broken(tokens, logits):
        raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError):
        next(decoder.stream(prompts[1], caches=cache, processors=[broken]))
    prefix, held = decoder._prefixes[cache[0]], prompts[0] + tokens
    check_at_rest(qwen_head, prefix, prefix.draft_state, held, prompts[1])


class Flagging:
    """A target whose rounds behind ``length`` cached tokens give NaN."""

    def __init__(self, target, length):
        self.target, self.length = target, length

    def __getattr__(self, name):
        return getattr(self.target, name)

    def forward(self, tokens, views):
        out = self.target.forward(tokens, views)
        bad = mx.array(views[3].offset).reshape(-1, 1, 1) >= self.length
        return out._replace(logits=mx.where(bad, mx.nan, out.logits))


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("length", [11, 12, 13])
def test_a_stream_closed_in_front_of_unusable_logits_keeps_the_heads_state(
    qwen_head, in_batch, length
):
    """Though the round that gave them, and read the block, is in flight."""
    target, prompt = qwen_head.target, random_prompt(8, 128, 3)
    truth = plain_tokens(target.model, prompt, 4)
    decoder = SpeculativeDecoder(Flagging(target, length), qwen_head.drafter, 3)
    cache = target.make_cache()
    if in_batch:
        batch, tokens = BatchIterator(decoder), []
        row = batch.add(prompt, caches=cache)
        while len(tokens) < 4:
            tokens += [step.token for out in next(batch) for step in out.steps]
        batch.remove(row)
    else:
        steps = decoder.stream(prompt, caches=cache)
        tokens = [next(steps).token for _ in range(4)]
        steps.close()
    assert tokens == truth
    prefix = decoder._prefixes[cache[0]]
    check_at_rest(qwen_head, prefix, prefix.draft_state, prompt, truth)


def chained(drafter, full, hidden, length, depth=3):
    """Drafts behind ``length`` tokens by feeding every row to the head in turn."""
    head, target = drafter.head, drafter.target
    state = drafter.begin(mx.array([[0]]), 256)
    embed = head.embed_tokens if "embed_tokens" in head else target.embed
    views = [KVView(k, v, mx.array([0]), 256) for k, v in state[0]]
    out = head(embed(mx.array(full[1:length])), hidden[0, : length - 1], views)
    out, tokens = out[-1:], []
    for i in range(depth):
        tokens.append(mx.argmax(target.logits(out)[0]).item())
        for view in views:
            view.offset = mx.array([length - 1 + i])
        out = head(embed(mx.array([tokens[-1]])), out, views)
    return [tokens]


@pytest.mark.parametrize("depth", [1, 3])
def test_greedy_tokens_with_any_head_are_plain(qwen_head, head, depth):
    prompt = random_prompt(5, 128, 7)
    decoder = SpeculativeDecoder(qwen_head.target, head, depth)
    tokens = [step.token for step in decoder.stream(prompt, max_tokens=40)]
    assert tokens == plain_tokens(qwen_head.target.model, prompt, 40)


@pytest.mark.parametrize("limit", [None, 256])
@pytest.mark.parametrize("first", [1, 5, 6, 20])
def test_a_second_turn_drafts_like_one_long_prompt(demo_parts, first, limit):
    """The head's state comes back with the cache, wherever the first turn stopped, by
    its limit or by the caller."""
    decoder = SpeculativeDecoder(demo_parts.target, demo_parts.drafter, 3)
    tokenizer = demo_parts.tokenizer
    prompt = tokenizer.encode("import os\nimport sys\n\n\ndef main(path):\n")
    more = tokenizer.encode("    for name in os.listdir(path):\n        print(")
    cache = demo_parts.target.make_cache()
    steps = decoder.stream(prompt, max_tokens=limit or first, caches=cache)
    start = [step.token for step in islice(steps, first)]
    steps.close()

    def marks(prompt, cache=None):
        steps = decoder.stream(prompt, max_tokens=40, caches=cache)
        return [(step.token, step.from_draft) for step in steps]

    again, fresh = marks(more, cache), marks(prompt + start + more)
    assert [token for token, _ in again] == [token for token, _ in fresh]
    # Where rows round otherwise in a block, a draft may be another one at a near tie.
    differ = sum(one != other for one, other in zip(again, fresh, strict=True))
    assert differ <= closeness(0, 4)
