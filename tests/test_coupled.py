"""Coupled streams are a function of model, prompt and seed alone."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from batches import LooksAhead
from families import tiny_family
from mlx_lm.generate import generate_step
from test_exactness import ALPHA, TARGET, V, sampled, shaped, transition_p_value
from tiny import TableDrafter, random_prompt, tile

from mlx_mtp import Session, make_sampler, stream_generate
from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.generation import bind_sampler
from mlx_mtp.round import Round
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

QUESTIONS = (
    "What is 57 + 68?",
    "Sort in ascending order: 31, 17, 90, 22, 45",
    "Hello!",
    "What does river mean?",
    "Which number is larger, 7310 or 8123?",
    "How many times does the letter t appear in the word letter?",
)
SAMPLERS = (
    {"temp": 1.0},
    {"temp": 0.7, "top_p": 0.9},
    {"temp": 1.5, "top_k": 30},
    {"temp": 1.2, "min_p": 0.05},
    {"temp": 2.0, "top_p": 0.95, "top_k": 100},
    {"temp": 1.0},
)


@pytest.fixture(scope="module")
def prompts(demo):
    _, tokenizer = demo
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            enable_thinking=i % 2 == 0,
        )
        for i, question in enumerate(QUESTIONS)
    ]


def tokens_of(demo, prompt, mtp, i, count=40, **options):
    responses = stream_generate(
        *demo,
        prompt,
        count,
        mtp=mtp,
        sampler=make_sampler(**SAMPLERS[i], coupled=True),
        seed=i,
        **options,
    )
    return [response.token for response in responses]


@pytest.fixture(scope="module")
def plain(demo, prompts):
    return [tokens_of(demo, prompt, None, i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("mtp", [*range(1, 9), NGramDrafter()], ids=str)
def test_every_drafter_and_depth_gives_the_tokens_of_plain_sampling(
    demo, prompts, plain, mtp
):
    assert len({tuple(tokens) for tokens in plain}) == 6
    for i, prompt in enumerate(prompts):
        assert tokens_of(demo, prompt, mtp, i) == plain[i], (i, mtp)


def test_adaptive_depth_and_processors_change_nothing(demo, prompts, plain):
    for i, prompt in enumerate(prompts[:3]):
        got = tokens_of(demo, prompt, "auto", i, num_draft_tokens="adaptive")
        assert got == plain[i]
        for lookahead in (LooksAhead(), lambda tokens, logits: logits):
            got = tokens_of(demo, prompt, 3, i, logits_processors=[lookahead])
            assert got == plain[i]


def test_processors_hold_at_every_position(demo, prompts):
    """A repetition penalty, whose rows depend on the tokens before them."""
    processors = mlx_lm.sample_utils.make_logits_processors(repetition_penalty=1.3)
    options = {"logits_processors": processors}
    expected = tokens_of(demo, prompts[3], None, 3, **options)
    for mtp in (1, 4, NGramDrafter()):
        assert tokens_of(demo, prompts[3], mtp, 3, **options) == expected


def test_the_prompt_may_come_in_parts(demo, prompts, plain):
    """Positions count from the beginning of the caches."""
    model, _ = demo
    for mtp in (None, 3):
        caches = mlx_lm.models.cache.make_prompt_cache(model)
        model(mx.array([prompts[0][:5]]), cache=caches)
        rest = prompts[0][5:]
        assert tokens_of(demo, rest, mtp, 0, prompt_cache=caches) == plain[0]


def test_caches_without_a_count_change_nothing():
    """Positions then count from the prompt, whatever was decoded before."""
    model, sampler = tiny_family("mamba"), make_sampler(1.0, coupled=True)
    decoder = SpeculativeDecoder(as_target(model), NGramDrafter(), 2)
    first, second = random_prompt(7, 96, 1), random_prompt(5, 96, 2)
    options = {"params": sampler.params, "coupled": True, "seed": 3, "max_tokens": 12}

    def turn(caches):
        return [x.token for x in decoder.stream(second, caches=caches, **options)]

    caches, fed = decoder.target.make_cache(), decoder.target.make_cache()
    decoder.feed(first, caches)
    model(mx.array([first]), cache=fed)
    expected = generate_step(
        mx.array(second),
        model,
        max_tokens=12,
        prompt_cache=fed,
        sampler=bind_sampler(sampler, 3, fed, len(second)),
    )
    start, tokens = decoder.snapshot(caches), turn(caches)
    assert tokens == [token for token, _ in expected]
    decoder.restore(caches, start)
    assert turn(caches) == tokens


def test_what_a_snapshot_did_not_know_is_forgotten(llama):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 2)
    caches = decoder.target.make_cache()
    llama(mx.array([[1, 2, 3]]), cache=caches)
    start = decoder.snapshot(caches)
    decoder.feed([4, 5], caches)
    decoder.restore(caches, start)
    assert caches[0] not in decoder._prefixes


def test_sessions_are_coupled_too(demo):
    texts = []
    for mtp in (None, 2, 5):
        sampler = make_sampler(1.5, coupled=True)
        session = Session(*demo, mtp=mtp, sampler=sampler, max_tokens=30)
        texts.append([session.respond(q, seed=4).text for q in QUESTIONS[:2]])
    assert texts[0] == texts[1] == texts[2]


def test_another_seed_is_another_stream(demo, prompts):
    sampler = make_sampler(1.5, coupled=True)
    streams = [
        [r.token for r in stream_generate(*demo, prompts[2], 30, mtp=3, **options)]
        for options in ({"seed": s, "sampler": sampler} for s in (1, 2, 1))
    ]
    assert streams[0] == streams[2] != streams[1]


def test_a_coupled_stream_has_the_transitions_of_the_target():
    params = SamplingParams(0.7)
    decoder = SpeculativeDecoder(TARGET, TableDrafter(mx.mean(TARGET.table, axis=0)), 3)
    steps = decoder.stream([0, 1], max_tokens=4000, seed=5, params=params, coupled=True)
    tokens = np.array([0, 1] + [step.token for step in steps])
    rows = np.array([shaped(row, params) for row in TARGET.table.reshape(-1, V)])
    assert transition_p_value(tokens, rows.reshape(V, V, V)) > ALPHA
    assert steps.telemetry.acceptance_rate > 0.3


def test_rows_of_a_batch_are_their_own_streams(demo_parts):
    from tiny import start_row

    params = SamplingParams(1.3)
    parts = demo_parts.target, demo_parts.drafter
    prompt = demo_parts.tokenizer.encode("What is ")
    round_ = Round(*parts, 2, greedy=False, coupled=True)
    assert sampled(2).coupled is False
    state, _ = start_row(round_, prompt, 64, params)
    batch = tile(state, 3, seed=9)
    rows = [[] for _ in range(3)]
    for _ in range(8):
        batch, result = round_(batch, 64)
        for row, counts in zip(rows, result.counts.tolist(), strict=True):
            row += counts[2 : 3 + counts[0]]
    # The same keys one at a time, at another depth.
    other = Round(*parts, 1, greedy=False, coupled=True)
    for i, key in enumerate(mx.random.split(mx.random.key(9), 3)):
        state, _ = start_row(other, prompt, 64, params)
        state["keys"] = key[None]
        got = []
        for _ in range(10):
            state, result = other(state, 64)
            counts = result.counts[0].tolist()
            got += counts[2 : 3 + counts[0]]
        n = min(len(got), len(rows[i]))
        assert n >= 10 and got[:n] == rows[i][:n]


def test_what_cannot_be_coupled_is_refused(demo, prompts):
    with pytest.raises(ValueError, match="coupled"):
        make_sampler(1.0, xtc_probability=0.5, coupled=True)
    with pytest.raises(ValueError, match="coupled"):
        tokens_of(demo, prompts[0], None, 0, draft_model=demo[0])
    decoder = SpeculativeDecoder(TARGET, NGramDrafter(), 2)
    with pytest.raises(ValueError, match="coupled"):
        decoder.stream([0], sampler=lambda x: mx.argmax(x, -1), coupled=True)
