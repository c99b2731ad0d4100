"""Drafts from a part of the vocabulary: only from there, and exact."""

import json
import warnings
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import tiny_family
from gemma import ORDERED, assistant_config, assistant_tensors, save_assistant
from head_families import tiny_checkpoint
from test_exactness import ALPHA, histogram, model_joint, open_rows, p_value, run
from test_gemma4_assistant import assistant_of, round_of
from tiny import plain_tokens, random_head, random_prompt, start_row, tiny_qwen

from mlx_mtp import draft_vocabulary
from mlx_mtp.drafters import Gemma4AssistantDrafter, MTPHeadDrafter
from mlx_mtp.heads.output import HeadRows, project
from mlx_mtp.loading import load, load_drafter
from mlx_mtp.round import Round
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target


def part_of(drafter, ids):
    return MTPHeadDrafter(drafter.head, drafter.target, vocabulary=ids)


# The rows of a projection


@pytest.mark.parametrize("layer", ["linear", "bias", "embedding"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_rows_of_a_projection_are_its_columns(layer, bits):
    mx.random.seed(1)
    head = nn.Embedding(40, 64)
    if layer != "embedding":
        head = nn.Linear(64, 40, bias=layer == "bias")
    if bits:
        head = head.to_quantized(32, bits)
    x = mx.random.normal((2, 3, 64))
    whole = project(head, x)
    ids = mx.array([7, 0, 39])
    assert mx.allclose(HeadRows(head, ids)(x), whole[..., ids], atol=1e-5)
    each = mx.array([[7, 0], [39, 7]])  # a set for each of the two
    expected = mx.stack([whole[b][:, each[b]] for b in range(2)])
    assert mx.allclose(HeadRows(head, each)(x), expected, atol=1e-5)


# The heads of a checkpoint


@pytest.mark.parametrize(
    "family", ["qwen3_5", "deepseek_v3", "mimo_v2_flash", "step3p5"]
)
def test_the_logits_of_a_head_are_its_own_there(family, tmp_path):
    """Whatever it shares with its target: norms in front of it, the projection."""
    tiny_checkpoint(family, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model, _ = load(tmp_path, probe=False)
    target, ids = as_target(model), [3, 17, 18, 60]
    drafter = MTPHeadDrafter(model.mtp_head.head, target, vocabulary=ids)
    rows = [
        mx.random.normal((2, 64), key=mx.random.key(i))
        for i, _ in enumerate(drafter.head.chain)
    ]
    for j, module in enumerate(drafter.head.chain):
        ours, whole = drafter._logits(j, rows), module.logits(rows[j], target)
        assert mx.allclose(ours[:, mx.array(ids)], whole[:, mx.array(ids)], atol=1e-5)
        assert mx.isinf(ours).sum() == 2 * (96 - len(ids))


@pytest.fixture
def seen(qwen_head):
    """A prompt, the plain tokens behind it, and the tokens that are none of them."""
    prompt = random_prompt(7, 128, 3)
    plain = plain_tokens(qwen_head.target.model, prompt, 40)
    return prompt, plain, sorted({*range(128)} - {*plain})


@pytest.mark.parametrize("params", [None, SamplingParams(1.0)])
def test_only_its_tokens_are_proposed_with_the_logits_of_the_whole(qwen_head, params):
    target, ids = qwen_head.target, [3, 50, 51, 90]
    rounds = [
        Round(target, drafter, 3, greedy=params is None)
        for drafter in (qwen_head.drafter, part_of(qwen_head.drafter, ids))
    ]
    whole, part = (
        r.draft(start_row(r, [1, 2, 3], 256, params)[0], 256).drafts for r in rounds
    )
    assert set(part.tokens.tolist()[0]) <= set(ids)
    if params is not None:
        first = mx.where(mx.isinf(part.logits), 0, whole.logits)[:, 0]
        assert mx.allclose(first[:, mx.array(ids)], part.logits[:, 0, mx.array(ids)])
        assert mx.isinf(part.logits).sum() == 3 * (128 - len(ids))


def test_the_whole_vocabulary_changes_nothing(qwen_head, seen):
    prompt, *_ = seen
    for options in ({}, {"params": SamplingParams(1.0, top_p=0.9), "seed": 2}):
        decoders = [
            SpeculativeDecoder(qwen_head.target, drafter, 3)
            for drafter in (qwen_head.drafter, part_of(qwen_head.drafter, range(128)))
        ]
        whole, part = (d.stream(prompt, max_tokens=30, **options) for d in decoders)
        assert [s.token for s in whole] == [s.token for s in part]
        assert whole.telemetry.accepted == part.telemetry.accepted


def test_without_the_right_tokens_only_corrections_are_emitted(qwen_head, seen):
    prompt, plain, others = seen
    decoder = SpeculativeDecoder(
        qwen_head.target, part_of(qwen_head.drafter, others), 3
    )
    steps = decoder.stream(prompt, max_tokens=40)
    assert [step.token for step in steps] == plain
    assert steps.telemetry.accepted == 0 and steps.telemetry.rounds == 39
    # A coupled stream is the same for every drafter.
    streams = [
        SpeculativeDecoder(qwen_head.target, drafter, 3).stream(
            prompt, max_tokens=30, params=SamplingParams(1.0), seed=4, coupled=True
        )
        for drafter in (qwen_head.drafter, part_of(qwen_head.drafter, others))
    ]
    whole, part = ([step.token for step in steps] for steps in streams)
    assert whole == part


def test_a_trained_head_loses_little_acceptance(demo_parts):
    """What is frequent in its own text is nearly all that it has to propose."""
    prompt = demo_parts.tokenizer.encode("import os\n\n\ndef main(path):\n")
    target, drafter = demo_parts.target, demo_parts.drafter
    whole = SpeculativeDecoder(target, drafter, 3).stream(prompt, max_tokens=60)
    tokens = [step.token for step in whole]
    counts = {token: tokens.count(token) for token in tokens}
    ids = draft_vocabulary(demo_parts.tokenizer, len(counts), counts)
    steps = SpeculativeDecoder(target, part_of(drafter, ids), 3).stream(
        prompt, max_tokens=60
    )
    assert [step.token for step in steps] == tokens
    assert steps.telemetry.accepted > 0.9 * whole.telemetry.accepted > 10


# The distribution


class Leaky(MTPHeadDrafter):
    """Claims that the other tokens are drafted as often as any."""

    def propose(self, state, context):
        drafts, state = super().propose(state, context)
        top = mx.max(drafts.logits, axis=-1, keepdims=True)
        rows = mx.where(drafts.logits > -mx.inf, drafts.logits, top)
        return drafts._replace(logits=rows), state


@pytest.mark.parametrize("kind", [MTPHeadDrafter, Leaky])
def test_every_sequence_has_its_exact_frequency(kind):
    config = {"vocab": 5, "layers": 2, "hidden": 32}
    target = as_target(tiny_qwen(**config))
    # Sharper rows than random weights give.
    target.text.lm_head.weight = 12 * target.text.lm_head.weight
    head = random_head(target, **config).head
    round_ = Round(target, kind(head, target, [0, 3]), 2, greedy=False)
    params = SamplingParams(1.0)
    state, context = open_rows(round_, [3, 1, 4], params, rows=4000)
    accepted, tokens = run(round_, state)
    assert {0, 1, 2} == set(accepted.ravel().tolist())
    joint = model_joint(target.model, context, params, 5)
    assert (p_value(histogram(tokens, 5), joint) > ALPHA) == (kind is MTPHeadDrafter)


def test_every_sequence_of_an_assistant_has_its_exact_frequency():
    vocab, params = 6, SamplingParams(1.0)
    sizes = {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
    target = as_target(tiny_family("gemma4_text", **sizes))
    assistant = assistant_of(assistant_config(vocab))
    drafter = Gemma4AssistantDrafter(assistant, target, vocabulary=[0, 2, 3])
    round_ = round_of(target, drafter, 2)
    state, context = open_rows(round_, random_prompt(9, vocab, 1), params, rows=3000)
    accepted, tokens = run(round_, state)
    assert {0, 1, 2} == set(accepted.ravel().tolist())
    joint = model_joint(target.model, context, params, vocab)
    assert p_value(histogram(tokens, vocab), joint) > ALPHA


# Ranking, loading and refusals


def fake_tokenizer(size=9, ends=(7,)):
    vocabulary = {chr(97 + i): i for i in range(size)}
    return SimpleNamespace(get_vocab=lambda: vocabulary, eos_token_ids={*ends})


def test_frequent_tokens_come_first_and_ends_are_always_there(tmp_path):
    tokenizer = fake_tokenizer()
    assert draft_vocabulary(tokenizer, 4) == [0, 1, 2, 7]
    assert draft_vocabulary(tokenizer, 99) == [*range(9)]
    assert draft_vocabulary(tokenizer, 1) == [7]
    counts = {8: 5, 3: 5, 4: 9, 99: 100}  # 99 is no token
    assert draft_vocabulary(tokenizer, 4, counts) == [3, 4, 7, 8]
    assert draft_vocabulary(tokenizer, 5, counts) == [0, 3, 4, 7, 8]
    file = tmp_path / "counts.json"
    file.write_text(json.dumps({str(i): n for i, n in counts.items()}))
    assert draft_vocabulary(tokenizer, 4, file) == [3, 4, 7, 8]
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        draft_vocabulary(tokenizer, 4, file)
    for size in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"must be positive but is {size}"):
            draft_vocabulary(tokenizer, size)


def test_an_assistant_is_loaded_with_its_draft_vocabulary(tmp_path):
    model, config = tiny_family("gemma4_text"), assistant_config()
    folder = save_assistant(tmp_path / "a", config, assistant_tensors(config))
    prompt = random_prompt(20, 96, 1)
    drafter = load_drafter(folder, model, None, vocabulary=[1, 2, 3])
    steps = SpeculativeDecoder(as_target(model), drafter, 3).stream(
        prompt, max_tokens=20
    )
    assert [step.token for step in steps] == plain_tokens(model, prompt, 20)
    config = assistant_config(**ORDERED)
    folder = save_assistant(tmp_path / "b", config, assistant_tensors(config))
    with pytest.raises(ValueError, match="it takes no draft vocabulary"):
        load_drafter(folder, model, None, vocabulary=[1, 2, 3])


class NoOutput:
    vocab_size = 128


def test_bad_draft_vocabularies_are_refused(qwen_head):
    head = qwen_head.drafter.head
    for ids, message in (
        ([], "needs at least one"),
        ([3, -1], "token id -1, outside of the vocabulary of 128"),
        ([3, 128], "token id 128, outside of the vocabulary of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            MTPHeadDrafter(head, qwen_head.target, vocabulary=ids)
    with pytest.raises(ValueError, match="which a NoOutput does not give"):
        MTPHeadDrafter(head, NoOutput(), vocabulary=[1])
