"""The Gemma 4 assistant: its forward, its streams, its checkpoints."""

import json
import shutil
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import family_config, tiny_family
from gemma import (
    BACKBONE,
    FULL,
    HEAD_DIM,
    ORDERED,
    SLIDING,
    VOCAB,
    Reference,
    assistant_config,
    assistant_tensors,
    save_assistant,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from test_exactness import (
    ALPHA,
    histogram,
    model_joint,
    open_rows,
    p_value,
    run,
    share_coins,
)
from tiny import (
    ScriptedDrafter,
    emitted,
    plain_tokens,
    random_prompt,
    start_row,
    tiny_llama,
)

import mlx_mtp
from mlx_mtp.batch import BatchIterator
from mlx_mtp.drafters import (
    AssistantConfig,
    DrafterMismatch,
    Gemma4Assistant,
    Gemma4AssistantDrafter,
)
from mlx_mtp.loading import DEMO, load_drafter
from mlx_mtp.prefixes import load_prefix, save_prefix
from mlx_mtp.round import Round
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.state import KVView, classify
from mlx_mtp.state.window import RotatingView
from mlx_mtp.targets import Gemma4Target, as_target

HEADS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "ordered": ORDERED,
    "ordered, untied": {**ORDERED, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def model():
    return tiny_family("gemma4_text")


@pytest.fixture(scope="module", params=HEADS)
def pair(request, model, tmp_path_factory):
    """A drafter from a raw checkpoint, and the same assistant in NumPy."""
    config = assistant_config(**HEADS[request.param])
    tensors = assistant_tensors(config)
    folder = save_assistant(tmp_path_factory.mktemp("raw"), config, tensors)
    return load_drafter(folder, model, None), Reference(config, tensors)


def test_a_step_is_that_of_the_reference(pair):
    drafter, reference = pair
    rng = np.random.default_rng(1)
    embedded, hidden = rng.normal(size=(2, 2, BACKBONE)).astype(np.float32)
    memory = {
        kind: rng.normal(size=(2, 2, 2, 9, HEAD_DIM[kind])).astype(np.float32)
        for kind in (SLIDING, FULL)
    }
    seen = mx.ones((2, 1, 1, 9), mx.bool_)
    x, following = drafter.assistant(
        mx.array(embedded),
        mx.array(hidden),
        {kind: (*map(mx.array, kv), seen) for kind, kv in memory.items()},
        mx.array([9, 1234]),
    )
    rows = drafter.assistant.logits(x)
    for b, position in enumerate([9, 1234]):
        kv = {kind: np.float64(pair[:, b]) for kind, pair in memory.items()}
        logits, next_hidden = reference.step(embedded[b], hidden[b], kv, position)
        assert np.allclose(rows[b], logits, rtol=0, atol=1e-3)  # -inf included
        assert np.allclose(following[b], next_hidden, rtol=0, atol=1e-3)


class Forced(Gemma4AssistantDrafter):
    """Lets a script decide what is accepted; keeps the assistant's own drafts."""

    def __init__(self, drafter, script):
        super().__init__(drafter.assistant, drafter.target)
        self.script = script

    def begin(self, prompt, capacity):
        return self.script.begin(prompt, capacity), mx.zeros((1, 3), mx.int32)

    def propose(self, state, context):
        own, _ = super().propose((), context)
        drafts, state = self.script.propose(state[0], context)
        return drafts, (state, own.tokens)


def round_of(target, drafter, depth, greedy=False):
    adapters = classify(target.make_cache(), target.adapters, depth + 1)
    return Round(target, drafter, depth, adapters, greedy=greedy)


@pytest.mark.parametrize("length", [1, 40])
def test_drafts_of_every_round_are_those_of_the_reference(pair, model, length):
    """Behind any acceptance, below and past the window: nothing rejected is read."""
    drafter, reference = pair
    prompt = random_prompt(length, VOCAB, length)
    truth = plain_tokens(model, prompt, 60)
    full = prompt + truth
    script = ScriptedDrafter(truth, VOCAB, [3, 0, 1, 0, 2, 3, 0, 2, 1])
    round_ = round_of(drafter.target, Forced(drafter, script), 3, greedy=True)
    state, _ = start_row(round_, prompt, 256)
    count = length + 1
    for _ in range(20):
        state, result = round_(state, 256)
        _, drafts = state["draft"]
        assert drafts.tolist() == [reference.drafts(model, full[:count], 3)]
        count += len(emitted(result.counts)[0])
    assert count > length + 40 and round_.traces == 1


@pytest.mark.parametrize(("length", "depth"), [(1, 4), (16, 1), (17, 3), (40, 4)])
def test_greedy_tokens_are_plain_past_the_window(pair, model, length, depth):
    """mlx_lm's own speculation goes wrong there, see test_caches.py."""
    prompt = random_prompt(length, VOCAB, 100 + length)
    decoder = SpeculativeDecoder(as_target(model), pair[0], depth)
    steps = decoder.stream(prompt, max_tokens=50)
    assert [step.token for step in steps] == plain_tokens(model, prompt, 50)
    telemetry = steps.telemetry
    assert telemetry.fallback is None and telemetry.rounds > 10


def test_the_last_round_is_cut_and_the_next_turn_goes_on(model):
    """The cache of one turn is taken over by the next, on both sides of the window."""
    target = as_target(model)
    drafter = Gemma4AssistantDrafter(assistant_of(assistant_config()), target)
    decoder = SpeculativeDecoder(target, drafter, 3)
    prompt, more = random_prompt(9, VOCAB, 3), random_prompt(5, VOCAB, 4)
    caches = decoder.target.make_cache()
    first = [s.token for s in decoder.stream(prompt, max_tokens=17, caches=caches)]
    steps = decoder.stream(more, max_tokens=30, caches=caches)
    tokens = [step.token for step in steps]
    assert tokens == plain_tokens(model, prompt + first + more, 30)
    assert steps.telemetry.rounds > 5 and steps.telemetry.fallback is None


def test_mlx_lms_own_speculation_goes_wrong_where_the_assistant_does_not(model):
    """A ring that has wrapped cannot be trimmed: theirs reads rejected rows."""
    draft, prompt = tiny_family("gemma4_text", seed=1), random_prompt(9, VOCAB, 1)
    theirs = speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=3, max_tokens=40
    )
    plain = plain_tokens(model, prompt, 40)
    assert [token for token, *_ in theirs] != plain
    target = as_target(model)
    drafter = Gemma4AssistantDrafter(assistant_of(assistant_config()), target)
    for depth in (3, "adaptive"):
        steps = SpeculativeDecoder(target, drafter, depth).stream(prompt, max_tokens=40)
        assert [step.token for step in steps] == plain


def test_rows_of_a_batch_are_plain(model):
    """Two join late, and some cross their window while others are past it."""
    assistant = assistant_of(assistant_config(**ORDERED))
    target = as_target(model)
    decoder = SpeculativeDecoder(target, Gemma4AssistantDrafter(assistant, target), 3)
    prompts = [random_prompt(n, VOCAB, n) for n in (3, 30, 12, 17)]
    batch, found = BatchIterator(decoder), {}
    ids = [batch.add(prompt, max_tokens=20) for prompt in prompts[:2]]
    for turn, outputs in enumerate(batch):
        if turn == 6:
            ids += [batch.add(prompt, max_tokens=20) for prompt in prompts[2:]]
        for out in outputs:
            found.setdefault(out.id, []).extend(step.token for step in out.steps)
    for i, prompt in zip(ids, prompts, strict=True):
        assert found[i] == plain_tokens(model, prompt, 20)
    assert batch.rounds > 10


def test_a_cache_is_taken_up_from_a_file(model, tmp_path):
    """The assistant has no state of its own, but a hidden row."""
    target = as_target(model)
    drafter = Gemma4AssistantDrafter(assistant_of(assistant_config()), target)
    decoder, caches = SpeculativeDecoder(target, drafter, 3), target.make_cache()
    prompt, more = random_prompt(20, VOCAB, 3), random_prompt(5, VOCAB, 4)
    steps = decoder.stream(prompt, max_tokens=99, caches=caches)
    first = [step.token for step in islice(steps, 9)]
    steps.close()
    file = str(tmp_path / "prefix.safetensors")
    save_prefix(file, decoder._prefixes[caches[0]], drafter)
    prefix = load_prefix(file, drafter)
    assert prefix.draft_state == () and prefix.length == 29
    decoder._prefixes[caches[0]] = prefix
    steps = decoder.stream(more, max_tokens=20, caches=caches)
    tokens = [step.token for step in steps]
    assert tokens == plain_tokens(model, prompt + first + more, 20)
    assert steps.telemetry.fallback is None


def test_a_view_is_read_up_to_its_offset_and_window():
    keys = mx.arange(8.0).reshape(1, 1, 8, 1)
    for view, seen in (
        (KVView(keys, keys, mx.array([4]), 6), {None: [0, 1, 2, 3, 4], 3: [2, 3, 4]}),
        # A ring of 7 with a window of 5, at position 9.
        (
            RotatingView(keys[:, :, :7], keys, mx.array([9]), 16, 5, 0),
            {None: [0, 1, 2, 5, 6], 2: [1, 2]},
        ),
    ):
        for window, slots in seen.items():
            found, _, mask = view.read(window)
            rows = mx.where(mask, found.reshape(1, 1, 1, -1), -1).flatten().tolist()
            assert [x for x in rows if x >= 0] == slots


def test_quantised_keys_and_values_are_read():
    model = tiny_family("gemma4_text", num_kv_shared_layers=0)

    def caches():
        made = model.make_cache()
        full = [type(cache) is KVCache for cache in made]
        return [
            QuantizedKVCache(32, 8) if f else c for f, c in zip(full, made, strict=True)
        ]

    assistant = Gemma4Assistant(AssistantConfig.from_dict(assistant_config()))
    target = as_target(model)
    decoder = SpeculativeDecoder(target, Gemma4AssistantDrafter(assistant, target), 2)
    prompt = random_prompt(12, VOCAB, 5)
    steps = decoder.stream(prompt, max_tokens=30, caches=caches())
    tokens = [step.token for step in steps]
    assert tokens == plain_tokens(model, prompt, 30, caches())
    assert steps.telemetry.fallback is None and steps.telemetry.rounds > 5


# The distribution


@pytest.mark.parametrize(
    ("head", "top_p", "fault"),
    [
        ("tied", 0.95, None),
        ("ordered", 1.0, None),
        ("ordered", 1.0, "coins"),
        ("ordered", 1.0, "leak"),
    ],
)
def test_every_sequence_has_its_exact_frequency(head, top_p, fault, monkeypatch):
    """Past the window, with drafts by ratio; two faults must be found."""
    vocab, depth, params = 6, 2, SamplingParams(1.0, top_p=top_p)
    sizes = {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
    target = as_target(tiny_family("gemma4_text", **sizes))
    ordered = {**ORDERED, "num_centroids": 3, "centroid_intermediate_top_k": 2}
    config = assistant_config(vocab, **(ordered if head == "ordered" else {}))
    drafter = Leaky if fault == "leak" else Gemma4AssistantDrafter
    round_ = round_of(target, drafter(assistant_of(config), target), depth)
    prompt = random_prompt(20, vocab, 1)
    state, context = open_rows(round_, prompt, params, rows=3000)
    if fault == "coins":
        uniforms = mlx_mtp.round.round_uniforms
        monkeypatch.setattr(
            mlx_mtp.round,
            "round_uniforms",
            lambda keys, count: share_coins(uniforms(keys, count), count),
        )
    accepted, tokens = run(round_, state)
    assert {0, 1, 2} == set(accepted.ravel().tolist())
    joint = model_joint(target.model, context, params, vocab)
    assert (p_value(histogram(tokens, vocab), joint) > ALPHA) == (fault is None)


class Leaky(Gemma4AssistantDrafter):
    """Claims that tokens outside the active clusters are drafted as often as any."""

    def propose(self, state, context):
        drafts, state = super().propose(state, context)
        top = mx.max(drafts.logits, axis=-1, keepdims=True)
        spread = mx.where(drafts.logits > -mx.inf, drafts.logits, top)
        return drafts._replace(logits=spread), state


# Checkpoints


FORMS = {
    "text": ("gemma4_text", "model.", ()),
    "multimodal": ("gemma4", "model.language_model.", ("model.vision_tower.a",)),
    "converted": ("gemma4", "language_model.model.", ()),
    "unified": ("gemma4_unified", "model.language_model.", ("model.embed_audio.a",)),
}


@pytest.fixture(scope="module", params=FORMS)
def target_folder(request, tmp_path_factory):
    """A model with tied embeddings under the names of a form of checkpoint."""
    model_type, prefix, more = FORMS[request.param]
    model = tiny_family("gemma4_text", tie_word_embeddings=True)
    config = family_config("gemma4_text", tie_word_embeddings=True)
    if model_type != "gemma4_text":
        config = {"model_type": model_type, "text_config": config, "vocab_size": VOCAB}
    tensors = {
        name.replace("model.", prefix, 1): x
        for name, x in tree_flatten(model.parameters())
    }
    tensors |= {name: mx.ones((2,)) for name in more}
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder, model


def test_every_form_of_target_takes_the_assistant(target_folder, tmp_path):
    folder, twin = target_folder
    model, tokenizer = mlx_mtp.load(folder)
    target = as_target(model)
    assert type(target) is Gemma4Target and model.mtp_head is None
    rows = mx.array([random_prompt(9, VOCAB, 1)])
    out = target.prefill(rows, target.make_cache())
    assert mx.array_equal(out.logits, model(rows))
    assert mx.array_equal(out.logits, target.logits(out.hidden))
    config = assistant_config()
    raw = save_assistant(tmp_path / "raw", config, assistant_tensors(config))
    drafter = mlx_mtp.load_drafter(raw, model, tokenizer)
    steps = SpeculativeDecoder(target, drafter, 3).stream([1, 2], max_tokens=30)
    assert [step.token for step in steps] == plain_tokens(twin, [1, 2], 30)
    assert steps.telemetry.fallback is None and steps.telemetry.rounds > 5


def assistant_of(config):
    assistant = Gemma4Assistant(AssistantConfig.from_dict(config))
    tensors = assistant_tensors(config)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    assistant.load_weights([(name, mx.array(x)) for name, x in tensors.items()])
    return assistant


@pytest.mark.parametrize("head", HEADS)
def test_a_quantised_assistant_is_loaded_as_it_was_saved(head, model, tmp_path):
    config = assistant_config(**HEADS[head], quantization={"group_size": 32, "bits": 4})
    assistant = assistant_of(config)
    nn.quantize(assistant, 32, 4)
    saved = dict(tree_flatten(assistant.parameters()))
    drafter = load_drafter(save_assistant(tmp_path / "a", config, saved), model, None)
    loaded = dict(tree_flatten(drafter.assistant.parameters()))
    assert saved.keys() == loaded.keys()
    assert all(mx.array_equal(saved[name], x) for name, x in loaded.items())
    x = mx.random.normal((2, 32), key=mx.random.key(1))
    rows = drafter.assistant.logits(x)
    assistant.pop("masked_embedding", None)
    whole = assistant.logits(x)
    assert mx.allclose(mx.where(rows > -mx.inf, rows, whole), whole, atol=1e-4)


@pytest.mark.parametrize(
    ("theirs", "ours"), [(mx.bfloat16, mx.bfloat16), (mx.float16, mx.float32)]
)
def test_an_assistant_in_bfloat16_keeps_its_range(theirs, ours, tmp_path):
    model, config = tiny_family("gemma4_text"), assistant_config(**ORDERED)
    model.set_dtype(theirs)
    folder = save_assistant(tmp_path / "a", config, assistant_tensors(config))
    file = str(folder / "model.safetensors")
    tensors = {
        name: x.astype(mx.bfloat16) if x.dtype == mx.float32 else x
        for name, x in mx.load(file).items()
    }
    mx.save_safetensors(file, tensors)
    drafter = load_drafter(folder, model, None)
    assert drafter.assistant.model.norm.weight.dtype == ours
    prompt, params = random_prompt(20, VOCAB, 1), SamplingParams(1.0)
    decoder = SpeculativeDecoder(as_target(model), drafter, 3)
    steps = decoder.stream(prompt, max_tokens=12, params=params, seed=1)
    assert len(list(steps)) == 12 and steps.telemetry.fallback is None


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone_hidden_size": 48}, "hidden size of 48 but the target has 64"),
        ({"vocab_size": 192}, "vocabulary of 192 but the target has 96"),
        ({"head_dim": 32}, "sliding_attention head size of 32 but the target has 16"),
        ({"global_head_dim": 16}, "full_attention head size of 16 but the target has"),
        (
            {"num_attention_heads": 3},
            "3 query heads, which cannot share the 2 full",
        ),
    ],
)
def test_an_assistant_of_another_target_is_refused(change, message, model, tmp_path):
    config = assistant_config()
    (config if "backbone_hidden_size" in change else config["text_config"]).update(
        change
    )
    folder = save_assistant(tmp_path / "a", config, assistant_tensors(config))
    with pytest.raises(DrafterMismatch, match=message):
        load_drafter(folder, model, None)


def test_a_target_of_another_family_is_refused(tmp_path):
    config = assistant_config()
    folder = save_assistant(tmp_path / "a", config, assistant_tensors(config))
    with pytest.raises(DrafterMismatch, match=r"full_attention but .* GenericTarget"):
        load_drafter(folder, tiny_llama(), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block True is not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types of a Gemma 4 assistant"),
        ({"num_attention_heads": None}, "incomplete: .*num_attention_heads"),
        ({**ORDERED, "num_centroids": 36}, "36 centroids, 3 of them active, do not"),
    ],
)
def test_a_config_that_does_not_fit_is_named(change, message):
    config = assistant_config()
    config["text_config"].update(change)
    text = {k: x for k, x in config["text_config"].items() if x is not None}
    with pytest.raises(ValueError, match=message):
        AssistantConfig.from_dict({**config, "text_config": text})


def test_damaged_checkpoints_are_named(model, tmp_path):
    config, tensors = assistant_config(), assistant_tensors(assistant_config())
    gain = "model.norm.weight"
    for change, message in (
        ({gain: np.full(32, np.nan, np.float32)}, f"damaged: {gain} is not finite"),
        ({gain: np.ones(8, np.float32)}, f"does not fit its config: .*{gain}"),
        ({"more": np.ones(8, np.float32)}, "does not fit its config: .*more"),
    ):
        folder = save_assistant(tmp_path / "a", config, tensors | change)
        with pytest.raises(ValueError, match=message):
            load_drafter(folder, model, None)


def test_an_assistant_with_another_tokenizer_is_refused(demo, model, tmp_path):
    config = assistant_config()
    folder = save_assistant(tmp_path / "a", config, assistant_tensors(config))
    file = folder / "tokenizer.json"
    shutil.copy(DEMO / "tokenizer.json", file)
    load_drafter(folder, model, demo[1])
    contents = json.loads(file.read_text())
    vocabulary = contents["model"]["vocab"]
    token = next(iter(vocabulary))
    vocabulary["another"] = vocabulary.pop(token)
    file.write_text(json.dumps(contents))
    with pytest.raises(DrafterMismatch, match="another one: they differ first in"):
        load_drafter(folder, model, demo[1])
