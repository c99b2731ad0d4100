"""Streams under a grammar: one stream in every mode, drawn from the masked model."""

import itertools
import json
import random
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from plain import closeness, same_tokens
from test_exactness import (
    ALPHA,
    DRAFTER,
    LENGTH,
    SLOTS,
    TARGET,
    V,
    histogram,
    open_rows,
    p_value,
    sampled,
    shaped,
)
from tiny import TableDrafter, tiny_llama, tiny_qwen

import mlx_mtp
from mlx_mtp import Grammar, NGramDrafter, SamplingParams, Session, make_sampler
from mlx_mtp.drafters import NGramDrafter as Copies
from mlx_mtp.grammar import GrammarError, GrammarMatcher, load_vocabulary
from mlx_mtp.reasoning import ReasoningError, SoftClose
from mlx_mtp.shaping import apply_mask, block_masks
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target
from mlx_mtp.thinking import make_budget, reasoning_config

pytest.importorskip("llguidance")

NGRAM = NGramDrafter()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sum": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["rot", "größe", 7]}},
        "deep": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "no": {"type": "null"}},
            "required": ["ok", "no"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "sum", "deep"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(PERSON),
    "regex": Grammar.regex("(ab|abcd){2,4}[0-9]{2} und [äöü🙂]{3}!"),
    "lark": Grammar('start: "Yes" | "No, " /[a-z ]{5,20}/ "." '),
    "written": Grammar(
        'start: /[0-9]+/ " is a long text that nobody has to choose any more." ',
        lead="\n\n",
        opener="The answer, in digits, is ",
    ),
}


def render(demo, thinking, question="What is 57 + 68?"):
    message = {"role": "user", "content": question}
    return demo[1].apply_chat_template(
        [message], add_generation_prompt=True, enable_thinking=thinking
    )


def run(demo, prompt, max_tokens=60, **kwargs):
    """The tokens and the last response."""
    steps = mlx_mtp.stream_generate(*demo, prompt, max_tokens, **kwargs)
    responses = list(steps)
    return [r.token for r in responses], responses[-1]


def text_of(demo, tokens):
    """What is behind the thought, without the end token."""
    text = demo[1].decode(tokens)
    return text.rpartition("</think>")[2].removesuffix("<|im_end|>")


def fits(grammar, tokens_of, ids):
    """Whether the grammar takes these tokens, and nothing is missing."""
    matcher = GrammarMatcher(Grammar(grammar.source), tokens_of)
    for token in ids:
        matcher.accept(token)
    return matcher._fits and matcher._matcher.is_accepting()


# One stream


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("name", GRAMMARS)
def test_every_mode_writes_the_same_tokens(demo, name, fast_forward):
    g = GRAMMARS[name]
    grammar = Grammar(g.source, g.lead, g.opener, fast_forward)
    prompt = render(demo, thinking=False)
    expected, _ = run(demo, prompt, mtp=None, grammar=grammar)
    text = text_of(demo, expected)
    assert text.startswith(grammar.opener)
    if expected[-1] in demo[1].eos_token_ids:
        assert demo[1].decode(expected).endswith("<|im_end|>")
        body = demo[1].encode(
            text.removeprefix(grammar.opener), add_special_tokens=False
        )
        assert fits(grammar, load_vocabulary(demo[1]), body)
    else:
        assert len(expected) == 60
    for mtp, depth in ((1, 1), (2, 2), (3, 3), (6, 6), (NGRAM, 4)):
        tokens, last = run(
            demo, prompt, mtp=mtp, num_draft_tokens=depth, grammar=grammar
        )
        assert tokens == expected, (mtp, text_of(demo, tokens), text)
        assert last.mtp.fallback is None
        assert last.mtp.drafted >= last.mtp.accepted >= 0


@pytest.mark.parametrize("budget", [None, 0, 1, 2, 3, 4, 5])
def test_a_grammar_begins_where_the_thought_ends(demo, budget):
    """Wherever in a block that is, and however the thought ends."""
    prompt = render(demo, thinking=True)
    kwargs = {"max_tokens": 120, "grammar": PERSON, "thinking_budget": budget}
    expected, _ = run(demo, prompt, mtp=None, **kwargs)
    thought, _, answer = demo[1].decode(expected).partition("</think>\n\n")
    assert set(PERSON["required"]) <= set(json.loads(answer.removesuffix("<|im_end|>")))
    if budget is not None:
        assert len(demo[1].encode(thought, add_special_tokens=False)) == budget
    for mtp in (1, 3, 5, NGRAM):
        tokens, last = run(demo, prompt, mtp=mtp, **kwargs)
        assert tokens == expected
        assert last.mtp.fallback is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_draft_tokens": "adaptive"},
        {"max_kv_size": 32},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20},
    ],
)
def test_any_cache_and_depth(demo, kwargs):
    """A depth that changes, a window, and caches that are quantised on the way."""
    prompt = render(demo, thinking=True)
    asked = {"grammar": PERSON, "thinking_budget": 30, "max_tokens": 90}
    plain = {k: v for k, v in kwargs.items() if k != "num_draft_tokens"}
    expected, _ = run(demo, prompt, mtp=None, **asked, **plain)
    for mtp in ("auto", NGRAM):
        tokens, last = run(demo, prompt, mtp=mtp, **asked, **kwargs)
        assert tokens == expected
        assert last.mtp.rounds and not last.mtp.fallback


def test_a_soft_close_and_a_grammar(demo):
    prompt = render(demo, thinking=True)
    config = reasoning_config(*demo)
    streams = []
    for mtp in (None, 3):
        budget = make_budget(config, demo[1], prompt, 30, soft=SoftClose(20, 30.0))
        kwargs = {"thinking_budget": budget, "grammar": GRAMMARS["regex"]}
        streams.append(run(demo, prompt, mtp=mtp, **kwargs)[0])
        assert budget.spent < 30
    assert streams[0] == streams[1]


def test_forced_text_is_given_to_rounds_or_fed_at_once(demo):
    """A few tokens stand in a block in place of drafts; many take one forward."""
    prompt = render(demo, thinking=False)
    tokens_of = load_vocabulary(demo[1])
    grammar = Grammar('start: /[0-9]/ "{{\\"name\\": 12}}"')
    after = demo[1].encode('{{"name": 12}}', add_special_tokens=False)
    matcher = GrammarMatcher(grammar, tokens_of)
    matcher.accept(demo[1].encode("1", add_special_tokens=False)[0])
    assert 4 < len(matcher.forced()) <= len(after)
    _, last = run(demo, prompt, mtp=8, grammar=grammar)
    assert last.mtp.rounds <= 2 and last.mtp.drafted <= 8
    _, slow = run(demo, prompt, mtp=8, grammar=Grammar(grammar.source, "", "", False))
    assert slow.mtp.rounds > 2
    tokens, last = run(demo, prompt, mtp=2, grammar=GRAMMARS["written"])
    assert tokens[-1] in demo[1].eos_token_ids
    # The opener, the digits, the long text, and one forward for each text.
    assert last.mtp.target_calls < len(tokens) / 2


def test_forced_tokens_are_marked_and_not_counted_as_drafts(demo):
    decoder = SpeculativeDecoder(as_target(demo[0]), NGRAM, 4)
    matcher = GrammarMatcher(
        Grammar('start: /[0-9]/ " or not"'), load_vocabulary(demo[1])
    )
    steps = list(decoder.stream(render(demo, False), controller=matcher, max_tokens=12))
    assert not steps[0].forced
    forced = [step for step in steps if step.forced]
    assert forced and not any(step.from_draft for step in forced)


def test_log_probabilities_are_those_of_the_masked_row(demo):
    prompt = render(demo, thinking=False)
    kwargs = {"max_tokens": 12, "grammar": GRAMMARS["regex"]}
    plain, ours = (
        list(mlx_mtp.stream_generate(*demo, prompt, mtp=mtp, **kwargs))
        for mtp in (None, 3)
    )
    for a, b in zip(plain, ours, strict=True):
        assert a.token == b.token
        x, y = np.array(a.logprobs), np.array(b.logprobs)
        assert (np.isneginf(x) == np.isneginf(y)).all()
        kept = ~np.isneginf(x)
        atol = closeness(1e-3, 0.1)  # the logits are float16 on a GPU
        np.testing.assert_allclose(x[kept], y[kept], atol=atol)


def test_answers_to_random_schemas_are_valid(demo, monkeypatch):
    """Nested ones, enums, patterns and unicode, hot, at every depth."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    import grammar as bench

    rng, done = random.Random(2), 0
    for i in range(24):
        wanted = bench.schema(rng)
        tokens, last = run(
            demo,
            render(demo, thinking=False),
            200,
            mtp=1 + i % 6,
            sampler=make_sampler(1.5),
            seed=i,
            grammar=wanted,
        )
        if last.finish_reason == "stop":
            done += 1
            assert bench.valid(json.loads(demo[1].decode(tokens[:-1])), wanted)
    assert done > 20
    assert not bench.valid("b", {"enum": ["a", 1]}) and not bench.valid(
        True, {"enum": [1]}
    )


# With everything else


def test_processors_and_samplers_work_under_a_grammar(demo):
    prompt = render(demo, thinking=False)
    a, b = (demo[1].encode(x, add_special_tokens=False)[0] for x in ("ab", "0"))
    processors = {
        "row by row": lambda: [lambda tokens, logits: logits + mx.zeros_like(logits)],
        "bias": lambda: make_logits_processors({a: -50.0, b: 20.0}),
    }
    for make in processors.values():
        kwargs = {"grammar": GRAMMARS["regex"]}
        expected, _ = run(demo, prompt, mtp=None, logits_processors=make(), **kwargs)
        for mtp in (1, 4):
            tokens, _ = run(demo, prompt, mtp=mtp, logits_processors=make(), **kwargs)
            assert tokens == expected
    for sampler in (mlx_lm_sampler(1.0), make_sampler(1.5, top_p=0.9)):
        for seed in range(2):
            tokens, last = run(
                demo, prompt, mtp=3, sampler=sampler, seed=seed, grammar=PERSON
            )
            if last.finish_reason == "stop":
                json.loads(text_of(demo, tokens))
            assert (
                tokens
                == run(demo, prompt, mtp=3, sampler=sampler, seed=seed, grammar=PERSON)[
                    0
                ]
            )


def test_a_coupled_stream_is_the_same_in_every_mode(demo):
    sampler = make_sampler(1.5, top_p=0.95, coupled=True)
    for grammar in (PERSON, GRAMMARS["written"]):
        streams = [
            run(
                demo,
                render(demo, thinking=False),
                mtp=mtp,
                sampler=sampler,
                seed=5,
                grammar=grammar,
            )[0]
            for mtp in (None, 1, 3, 6, NGRAM)
        ]
        assert streams.count(streams[0]) == len(streams)


def test_limits_stops_and_closed_streams_leave_exact_caches(demo):
    """Cut at every token: the cache goes on as one that was never sped up."""
    model, tokenizer = demo
    prompt = render(demo, thinking=False)
    grammar = GRAMMARS["schema"]
    expected, _ = run(demo, prompt, 24, mtp=None, grammar=grammar)
    decoder = SpeculativeDecoder(as_target(model), NGRAM, 3)
    for cut in range(1, 24, 3):
        for close in (False, True):
            cache = make_prompt_cache(model)
            matcher = GrammarMatcher(grammar, load_vocabulary(tokenizer))
            steps = decoder.stream(
                prompt,
                controller=matcher,
                max_tokens=99 if close else cut,
                caches=cache,
            )
            tokens = [next(steps).token for _ in range(cut)]
            steps.close()
            assert tokens == expected[:cut]
            assert cache[3].offset == len(prompt) + cut
            more = [s.token for s in decoder.stream([10], caches=cache, max_tokens=4)]
            fresh = [*prompt, *tokens, 10]
            again = [s.token for s in decoder.stream(fresh, max_tokens=4)]
            assert same_tokens(decoder.target, fresh, again, more)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_grammar_that_fails_halfway_leaves_exact_caches(demo, depth):
    model, tokenizer = demo
    prompt = render(demo, thinking=False)
    decoder = SpeculativeDecoder(as_target(model), NGRAM, depth)
    for calls in (2, 5, 9):
        matcher = GrammarMatcher(GRAMMARS["schema"], load_vocabulary(tokenizer))
        mask, left = matcher.mask, iter(range(calls))

        def failing(mask=mask, left=left):
            if next(left, None) is None:
                raise GrammarError("too complex")
            return mask()

        matcher.mask = failing
        cache, tokens = make_prompt_cache(model), []
        with pytest.raises(GrammarError):
            for step in decoder.stream(prompt, controller=matcher, caches=cache):
                tokens.append(step.token)
        assert tokens and cache[3].offset == len(prompt) + len(tokens)
        more = [s.token for s in decoder.stream([10], caches=cache, max_tokens=4)]
        fresh = [*prompt, *tokens, 10]
        assert more == [s.token for s in decoder.stream(fresh, max_tokens=4)]


def test_a_model_that_cannot_be_traced(demo):
    """The eager round."""
    model = tiny_llama(vocab=4096)
    target = as_target(model)
    prompt = render(demo, thinking=False)
    grammar = GRAMMARS["regex"]
    streams = []
    for eager in (False, True):
        decoder = SpeculativeDecoder(target, NGRAM, 3)
        if eager:
            decoder.round_of = broken_trace(decoder.round_of)
        matcher = GrammarMatcher(grammar, load_vocabulary(demo[1]))
        steps = decoder.stream(prompt, controller=matcher, max_tokens=30)
        streams.append([step.token for step in steps])
        assert bool(steps.telemetry.fallback) == eager
    assert streams[0] == streams[1]


def broken_trace(make):
    def made(*args):
        round_ = make(*args)
        verify = round_.verify

        def refuse(state, proposal, attended, offset=None):
            if offset is None:
                raise ValueError("no trace")
            return verify(state, proposal, attended, offset)

        round_.verify = refuse
        return round_

    return made


# The distribution

# What may follow each token; 3 is followed by 1 alone, and that by two more.
FOLLOW = np.array(
    [
        [1, 1, 0, 1, 1],
        [1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 1],
    ]
)


def words(rows):
    """Masks ``(..., V)`` as bits ``(..., 1)``."""
    return (rows.astype(np.uint32) << np.arange(V, dtype=np.uint32)).sum(
        axis=-1, keepdims=True, dtype=np.uint32
    )


def run_masked(round_, state, newest, given=False, faulty=False):
    """The next ``LENGTH`` tokens of every row under ``FOLLOW``."""
    depth, tokens, rows = round_.depth, [], []
    nothing = np.full((len(newest), depth), -1)
    for _ in range(LENGTH):
        if given:
            place = nothing.copy()
            place[newest == 3, 0] = 1
            state = {**state, "given": mx.array(place, mx.int32)}
        proposal, verified, logits = round_.halves(state, SLOTS)
        forced = (newest == 3) & given
        assert (np.array(proposal.drafts[0])[forced, 0] == 1).all()
        seen = np.concatenate(
            [newest[:, None], np.clip(proposal.drafts[0], 0, V - 1)], axis=1
        )
        masks = words(FOLLOW[seen])
        if faulty:  # the mask of the block's first row for all of it
            masks = np.repeat(masks[:, :1], depth + 1, axis=1)
        state, counts = round_.finish(verified, proposal, logits, mx.array(masks))
        counts = np.array(counts)
        assert (counts[:, 0] >= forced).all()
        newest = np.take_along_axis(counts[:, 2:], counts[:, :1], axis=1)[:, 0]
        rows.append(counts[:, 2:])
    tokens = np.concatenate(rows, axis=1)
    order = np.argsort(tokens < 0, axis=1, kind="stable")[:, :LENGTH]
    return np.take_along_axis(tokens, order, axis=1)


def masked_joint(context, params):
    joint = np.zeros((V,) * LENGTH)
    for tokens in itertools.product(range(V), repeat=LENGTH):
        seen, p = (*context[-2:], *tokens), 1.0
        for i, token in enumerate(tokens):
            row = TARGET.table[seen[i], seen[i + 1]]
            row = mx.where(mx.array(FOLLOW[seen[i + 1]] == 1), row, -mx.inf)
            p *= shaped(row, params)[token]
        joint[tokens] = p
    return joint


ROWS = 6_000
# Never drafts what is given.
FEW = SamplingParams(1.0, top_k=1)
POOR = TableDrafter(mx.where(mx.arange(V) == 1, -9.0, DRAFTER.table))
MASKED = [
    (SamplingParams(1.0), None, DRAFTER),
    (SamplingParams(0.7, top_k=2), FEW, POOR),
    (SamplingParams(1.3, top_p=0.8, min_p=0.05), None, DRAFTER),
    (SamplingParams(1.0), None, Copies()),
]


@pytest.mark.parametrize(
    ("case", "depth", "given"),
    [
        (0, 1, False),
        (0, 3, False),
        (0, 3, True),
        (1, 3, True),
        (2, 2, True),
        (3, 3, True),
    ],
)
def test_every_sequence_has_the_frequency_of_the_masked_model(case, depth, given):
    params, draft_params, drafter = MASKED[case]
    round_ = sampled(depth, drafter)
    state, context = open_rows(
        round_, [0, 1], params, draft_params, seed=depth, rows=ROWS
    )
    tokens = run_masked(round_, state, np.full((ROWS,), context[-1]), given)
    assert p_value(histogram(tokens, V), masked_joint(context, params)) > ALPHA


def test_masks_of_the_wrong_row_are_found():
    params = SamplingParams(1.0)
    round_ = sampled(3)
    state, context = open_rows(round_, [0, 1], params, rows=ROWS)
    newest = np.full((ROWS,), context[-1])
    tokens = run_masked(round_, state, newest, faulty=True)
    assert p_value(histogram(tokens, V), masked_joint(context, params)) < ALPHA


@pytest.mark.parametrize("fast_forward", [False, True])
def test_streams_follow_the_model_under_the_masks_of_a_grammar(demo, fast_forward):
    """Exact probabilities of every way to write the text, however it is tokenised."""
    model = tiny_qwen(vocab=4096, layers=2, hidden=32)
    target = as_target(model)
    target.text.lm_head.weight = 10 * target.text.lm_head.weight
    tokens_of = load_vocabulary(demo[1])
    grammar = Grammar('start: /[ab]/ "12" /[cd]{1,2}/', fast_forward=fast_forward)
    prompt = demo[1].encode("b12d a12dc b12cc a12cd b12c a12d a12c b12dd")
    expected = {}

    def walk(ids, p):
        matcher = GrammarMatcher(grammar, tokens_of)
        for token in ids:
            matcher.accept(token)
        if ids and ids[-1] in demo[1].eos_token_ids:
            expected[ids] = p
            return
        row = model(mx.array([[*prompt, *ids]]))[0, -1]
        probabilities = mx.softmax(apply_mask(mx.array(matcher.mask()), row))
        for token in np.flatnonzero(np.array(probabilities)):
            walk((*ids, int(token)), p * probabilities[token].item())

    walk((), 1.0)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    decoder = SpeculativeDecoder(target, NGRAM, 3)
    counts = dict.fromkeys(expected, 0)
    for seed in range(300):
        steps = decoder.stream(
            prompt,
            controller=GrammarMatcher(grammar, tokens_of),
            params=SamplingParams(1.0),
            stop_tokens=demo[1].eos_token_ids,
            seed=seed,
        )
        counts[tuple(step.token for step in steps)] += 1
    observed = np.array(list(counts.values()), float)
    assert p_value(observed, np.array(list(expected.values()))) > ALPHA


# The pieces


class Countdown:
    """Allows only the token that is one less."""

    masks = True

    def __init__(self, token):
        self.token = token

    def accept(self, token):
        self.token = token

    def mask(self):
        return np.array([1 << (self.token - 1)], np.uint32)

    def checkpoint(self):
        return self.token

    def restore(self, mark):
        self.token = mark


def test_masks_of_a_block_follow_its_drafts_and_end_at_one_that_does_not_fit():
    down = Countdown(9)
    masks = block_masks(down, [8, 7, 3, 2], vocab_size=40)
    assert masks.shape == (1, 5, 2) and masks.dtype == np.uint32
    assert masks[0].tolist() == [[1 << 8, 0], [1 << 7, 0], [1 << 6, 0], [0, 0], [0, 0]]
    assert down.token == 9
    assert block_masks(down, [-1], 40)[0].tolist() == [[1 << 8, 0], [0, 0]]
    with pytest.raises(ValueError):  # a negative shift
        block_masks(down, list(range(8, -1, -1)), vocab_size=40)
    assert down.token == 9


@pytest.mark.parametrize("size", [3, 32, 33, 70])
def test_a_mask_of_any_width_is_applied(size):
    shaped = apply_mask(mx.array([0b101, 1], mx.uint32), mx.zeros((2, size)))
    kept = [i for i in (0, 2, 32) if i < size]
    for row in shaped.tolist():
        assert [i for i, x in enumerate(row) if x == 0.0] == kept


# Sessions and refusals


def test_a_session_takes_any_grammar(demo):
    for mtp in (None, "auto", NGRAM):
        session = Session(*demo, mtp=mtp)
        reply = session.respond(
            "What is 57 + 68?", response_format=Grammar.regex("It is [0-9]{3}")
        )
        assert reply.text == "It is 125" and reply.finish_reason == "stop"
        assert "Result: 125" in reply.reasoning


@pytest.mark.parametrize(
    "grammar",
    [{"type": "strin"}, Grammar("start: nothing"), Grammar.regex("(a"), Grammar("")],
)
def test_bad_grammars_are_refused_before_the_prompt(demo, grammar):
    def silent(done, total):
        raise AssertionError("the prompt was fed")

    for mtp in (None, "auto"):
        with pytest.raises(GrammarError, match="not supported"):
            run(demo, [1], mtp=mtp, grammar=grammar, prompt_progress_callback=silent)
    with pytest.raises(ReasoningError):
        Session(*demo).stream("Hi", response_format=grammar)


def test_the_examples_of_the_page_run():
    page = Path(__file__).parents[1] / "docs" / "grammars.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert code.count("assert") == 2
    exec(compile(code, str(page), "exec"), {})


def test_a_grammar_and_a_draft_model_exclude_each_other(demo):
    with pytest.raises(ValueError, match="grammar does not work with draft_model"):
        run(demo, [1], grammar=PERSON, draft_model=demo[0])
