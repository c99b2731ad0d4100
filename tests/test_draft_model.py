"""A model that drafts for another: exact, whatever their caches and vocabularies."""

import json
import shutil
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest
from batches import Forces
from families import tiny_family
from test_exactness import ALPHA, TARGET, V, shaped, transition_p_value
from tiny import TableTarget, plain_tokens, random_prompt, tiny_llama

import mlx_mtp
from mlx_mtp.drafters import DrafterMismatch, DraftModelDrafter
from mlx_mtp.loading import DEMO
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

PROMPT = random_prompt(9, 96, 1)


def tokens_of(steps):
    return [step.token for step in steps]


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "nemotron_h", "falcon_h1", "mamba2"]
)
def test_a_model_that_drafts_for_its_twin_is_always_right(family):
    """So its caches are right too, past the windows and behind every round."""
    model = tiny_family(family)
    target = as_target(model)
    drafter = DraftModelDrafter(as_target(model), target)
    steps = SpeculativeDecoder(target, drafter, 3).stream(PROMPT, max_tokens=81)
    assert tokens_of(steps) == plain_tokens(model, PROMPT, 81)
    telemetry = steps.telemetry
    assert telemetry.fallback is None and telemetry.rounds == 20
    assert telemetry.acceptance_rate == 1.0 and telemetry.draft_calls == 60


@pytest.mark.parametrize("families", [("llama", "mamba2"), ("falcon_h1", "llama")])
def test_a_draft_model_that_is_mostly_wrong_is_exact(families):
    model, draft = (tiny_family(name) for name in families)
    target = as_target(model)
    decoder = SpeculativeDecoder(target, DraftModelDrafter(as_target(draft), target), 4)
    for _ in range(2):
        steps = decoder.stream(PROMPT, max_tokens=60)
        assert tokens_of(steps) == plain_tokens(model, PROMPT, 60)
        assert steps.telemetry.fallback is None
        assert steps.telemetry.acceptance_rate < 0.5


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "nemotron_h", "falcon_h1", "mamba2"]
)
@pytest.mark.parametrize("taken", [1, 6, 7, 8, 30])
def test_a_draft_model_reads_no_token_twice(family, taken):
    """Over turns that are broken off anywhere, and tokens that are forced."""
    model = tiny_family(family)
    target, drafts, read = as_target(model), as_target(model), []
    prefill = drafts.prefill

    def counted(tokens, caches):
        read.append(tokens.size)
        return prefill(tokens, caches)

    drafts.prefill = counted
    decoder = SpeculativeDecoder(target, DraftModelDrafter(drafts, target), 3)
    caches, turns = target.make_cache(), [PROMPT, random_prompt(5, 96, 2)]
    for prompt in turns:
        steps = decoder.stream(prompt, max_tokens=40, caches=caches)
        assert len(list(islice(steps, taken))) == taken
        steps.close()
        assert steps.telemetry.acceptance_rate in (0.0, 1.0)  # 0: none was read
        assert steps.telemetry.fallback is None
    assert sum(read) <= len(PROMPT) + 5 + 2 * taken
    controller = Forcing()
    steps = decoder.stream([1, 2], max_tokens=40, caches=caches, controller=controller)
    tokens = tokens_of(steps)
    assert [tokens[i] for i in (9, 19, 29, 39)] == [7] * 4
    assert steps.telemetry.acceptance_rate == 1.0
    assert sum(read) <= len(PROMPT) + 5 + 2 * taken + 2 + 40


class Forcing(Forces):
    """Every tenth token is a certain one."""

    biases = False

    def forced(self):
        return (7,) if self.count % 10 == 9 else ()

    def horizon(self):
        return 9 - self.count % 10


@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_partly_accepted_rounds_leave_the_draft_models_caches_exact(family):
    """Every round accepts what the draft model, fed the emitted tokens alone, gives."""
    model, draft = tiny_family(family), tiny_family(family)
    noise = mx.random.normal(draft.lm_head.weight.shape, key=mx.random.key(1))
    draft.lm_head.weight = draft.lm_head.weight + 0.1 * noise
    target, truth = as_target(model), plain_tokens(model, PROMPT, 64)
    rounds = accepted = 0
    at = 1
    while at < 60:
        drafts = plain_tokens(draft, PROMPT + truth[:at], 3)
        right = [a == b for a, b in zip(drafts, truth[at:], strict=False)]
        count = (*right, False).index(False)
        rounds, accepted, at = rounds + 1, accepted + count, at + count + 1
    decoder = SpeculativeDecoder(target, DraftModelDrafter(as_target(draft), target), 3)
    steps = decoder.stream(PROMPT, max_tokens=at)
    assert tokens_of(steps) == truth[:at]
    assert (steps.telemetry.rounds, steps.telemetry.accepted) == (rounds, accepted)
    assert 0.2 < accepted / (3 * rounds) < 0.9


def padded(model, width):
    """The model with logits of another width; new ones are the largest of all."""
    weight = model.lm_head.weight
    more = 9.0 * mx.ones_like(weight)
    model.lm_head.weight = mx.concatenate([weight, more])[:width]
    rows = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.concatenate([rows, rows])[:width]
    model.args.vocab_size = width
    return model


@pytest.mark.parametrize("width", [90, 96, 128])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_that_differ_in_padding(width, temperature):
    model = tiny_family("llama")
    plain = plain_tokens(model, PROMPT, 60)
    draft = padded(tiny_family("llama"), width)
    target = as_target(model)
    drafter = DraftModelDrafter(as_target(draft), target, vocab_size=96)
    decoder = SpeculativeDecoder(target, drafter, 3)
    params = SamplingParams(temperature)
    steps = decoder.stream(PROMPT, max_tokens=60, params=params, seed=1)
    tokens = tokens_of(steps)
    assert temperature or tokens == plain
    assert all(0 <= token < 96 for token in tokens)
    # Without all ids the draft model is fed wrong ones now and then.
    assert steps.telemetry.acceptance_rate > (0.6 if width >= 96 else 0.05)


def test_a_sampled_stream_has_the_transitions_of_the_target():
    params = SamplingParams(0.7)
    noise = mx.random.normal(TARGET.table.shape, key=mx.random.key(1))
    draft = TableTarget(TARGET.table + noise)
    drafter = DraftModelDrafter(draft, TARGET)
    decoder = SpeculativeDecoder(TARGET, drafter, 3)
    steps = decoder.stream([0, 1], max_tokens=4000, seed=5, params=params)
    tokens = np.array([0, 1, *tokens_of(steps)])
    rows = np.array([shaped(row, params) for row in TARGET.table.reshape(-1, V)])
    assert transition_p_value(tokens, rows.reshape(V, V, V)) > ALPHA
    assert 0.2 < steps.telemetry.acceptance_rate < 0.95


def test_a_draft_model_of_another_target_is_refused():
    target = as_target(tiny_llama(vocab=96))
    drafter = DraftModelDrafter(target, target)
    with pytest.raises(DrafterMismatch, match="vocabulary of 96 but the target has 64"):
        SpeculativeDecoder(as_target(tiny_llama(vocab=64)), drafter)


def test_a_draft_model_is_loaded_with_its_tokenizer_checked(demo, tmp_path):
    model, tokenizer = demo
    drafter = mlx_mtp.load_drafter("demo", model, tokenizer)
    prompt = tokenizer.encode("Hello!")
    *_, last = mlx_mtp.stream_generate(
        model, tokenizer, prompt, max_tokens=20, mtp=drafter
    )
    assert last.mtp.acceptance_rate == 1.0 and last.mtp.rounds >= 4
    shutil.copytree(DEMO, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    contents = json.loads(file.read_text())
    vocabulary = contents["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(contents))
    with pytest.raises(DrafterMismatch, match=r"first in token .* with id 300\."):
        mlx_mtp.load_drafter(tmp_path / "other", model, tokenizer)
