"""Which target and which head a model gets, and what is refused."""

import itertools
import json
import shutil
import warnings
from dataclasses import replace

import mlx.core as mx
import pytest
from families import tiny_family
from head_families import full_config, tiny_checkpoint
from tiny import plain_tokens, random_head, random_prompt, tiny_llama

from mlx_mtp import register_family
from mlx_mtp.drafters import DrafterMismatch, MTPHeadDrafter
from mlx_mtp.heads import AmbiguousFamily, Entry, Registry, UnsupportedHead
from mlx_mtp.heads.checkpoint import find_spec
from mlx_mtp.heads.families import HEADS, MIMO, QWEN_MOE, REFUSED
from mlx_mtp.loading import (
    DEMO,
    inspect_model,
    load,
    load_drafter,
    load_head,
    save_head,
)
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import TARGETS, FamilyTarget, GenericTarget, as_target


@pytest.fixture
def registries(monkeypatch):
    """What a test registers is gone behind it."""
    for registry in (HEADS, TARGETS):
        monkeypatch.setattr(registry, "_entries", list(registry.entries()))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """The folder of a tiny checkpoint with a head, and its model."""
    folder = tmp_path_factory.mktemp("mimo")
    tiny_checkpoint("mimo", folder)
    return folder, load(folder, probe=False)[0]


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# The registry


ENTRIES = [
    Entry("a", 1, "plain"),
    Entry("a", 2, "large", lambda config: config["size"] > 9),
    Entry("a", 3, "seen", kind="vision"),
    Entry("b", 4, "other"),
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_what_is_found_does_not_depend_on_the_order(order):
    registry = Registry("thing")
    for i in order:
        registry.register(ENTRIES[i])
    assert registry.find({"model_type": "a", "size": 1}) == 1
    assert registry.find({"model_type": "a", "size": 10}) == 2
    assert registry.find({"model_type": "a", "size": 10}, "vision") == 3
    assert registry.find({"model_type": "b"}) == 4
    assert registry.find({"model_type": "b"}, "vision") is None
    assert registry.find({"model_type": "c"}) is None
    assert [e.name for e in registry.entries()] == ["large", "plain", "other", "seen"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_that_fit_equally_are_an_error(order):
    registry = Registry("thing")
    entries = [
        Entry("a", 1, "big", lambda config: config["size"] > 9),
        Entry("a", 2, "even", lambda config: config["size"] % 2 == 0),
    ]
    for i in order:
        registry.register(entries[i])
    assert registry.find({"model_type": "a", "size": 11}) == 1
    with pytest.raises(AmbiguousFamily, match=r"a has 2 entries .* big, even"):
        registry.find({"model_type": "a", "size": 10})


def test_a_second_entry_needs_a_predicate():
    registry = Registry("thing")
    registry.register(ENTRIES[0])
    with pytest.raises(ValueError, match=r"thing of model type a \(text\) is there"):
        registry.register(ENTRIES[0])
    with pytest.raises(ValueError, match=r"kind must be .* but is 'audio'"):
        registry.register(Entry("b", 1, "b", kind="audio"))


def test_experts_choose_the_head_of_a_qwen():
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    assert find_spec(config).family == "Qwen3.5"
    config["text_config"]["num_experts"] = 8
    assert find_spec(config) is QWEN_MOE


# Families of others


def test_a_family_of_ones_own(registries, mimo, tmp_path):
    """A model type that only mlx_lm knows, its head stored as MiMo's."""
    assert type(as_target(tiny_llama())) is GenericTarget
    with pytest.raises(UnsupportedHead, match="llama is not supported"):
        find_spec({"model_type": "llama"})

    def layers(m, args, config, index):
        return [m.TransformerBlock(args)]

    spec = replace(MIMO, family="Mine", module="llama", layers=layers, converter="")
    register_family("llama", head=spec, name="mine")
    folder, model = mimo[0], tiny_llama(vocab=96)
    assert type(as_target(model)) is FamilyTarget
    config = full_config("mimo") | {"model_type": "llama", "attention_bias": True}
    tensors = mx.load(str(folder / "model.safetensors"))
    file = str(tmp_path / "head.safetensors")
    bias = "model.mtp_layers.0.self_attn.o_proj.bias"
    mx.save_safetensors(file, tensors | {bias: mx.zeros(64) + 0.1}, {"format": "pt"})
    head = load_head(file, config)
    assert head.spec.family == "Mine"
    prompt = random_prompt(5, 96, 1)
    decoder = SpeculativeDecoder(
        as_target(model), MTPHeadDrafter(head, as_target(model)), 3
    )
    steps = decoder.stream(prompt, max_tokens=12)
    assert [step.token for step in steps] == plain_tokens(model, prompt, 12)
    assert steps.telemetry.drafted > 0


def test_what_a_model_does_to_its_logits_stays(registries):
    """Granite scales them; its trunk and its projection alone would not."""
    model = tiny_family("granitemoehybrid", logits_scaling=3.0)
    register_family("granitemoehybrid", head=MIMO)
    target, tokens = as_target(model), mx.array([random_prompt(7, 96, 1)])
    out = target.prefill(tokens, target.make_cache())
    assert mx.array_equal(out.logits, model(tokens, cache=target.make_cache()))
    assert mx.allclose(out.logits, target.logits(out.hidden) / 3, atol=1e-5)


def test_a_target_of_ones_own_goes_before_a_plain_one(registries):
    model = tiny_llama(vocab=96)
    register_family("llama", target=lambda model: "small", name="small")
    assert as_target(model) == "small"
    register_family(
        "llama", target=lambda model: "deep", when=lambda c: c["num_hidden_layers"] > 1
    )
    assert as_target(model) == "deep"
    with pytest.raises(ValueError, match="target of model type llama"):
        register_family("llama", target=GenericTarget)


def test_a_vision_model_is_not_taken_for_its_text(registries):
    model = tiny_llama()
    seen = type("Model", (type(model),), {"__module__": "mlx_vlm.models.llama"})
    model.__class__ = seen
    with pytest.raises(UnsupportedHead, match="mlx_vlm model type llama has no target"):
        as_target(model)
    register_family("llama", target=lambda model: "vision", kind="vision")
    assert as_target(model) == "vision"


# What does not fit


def test_a_head_of_another_family_is_refused(mimo, qwen):
    target, head = as_target(mimo[1]), mimo[1].mtp_head.head
    other = random_head(as_target(qwen), vocab=96)
    with pytest.raises(DrafterMismatch, match=r"one of Qwen3\.5 .* model of MiMo"):
        SpeculativeDecoder(target, MTPHeadDrafter(other.head, target))
    wide = as_target(tiny_llama(vocab=128))
    wide.hidden_size = 64
    with pytest.raises(DrafterMismatch, match="vocabulary 96 but the target has 128"):
        SpeculativeDecoder(wide, MTPHeadDrafter(head, wide))
    wide.hidden_size = 32
    with pytest.raises(DrafterMismatch, match="hidden size 64 but the target has 32"):
        SpeculativeDecoder(wide, MTPHeadDrafter(head, wide))


def test_the_file_of_another_familys_head_is_refused(mimo, tmp_path, demo):
    file, config = tmp_path / "mtp.safetensors", full_config("mimo")
    save_head(demo[0].mtp_head.head, file)
    with pytest.raises(UnsupportedHead, match=r"of Qwen3\.5 but .* mimo .* of MiMo"):
        load_head(file, config)
    mx.save_safetensors(str(file), {"mtp.fc.weight": mx.ones((2, 2))}, {"format": "pt"})
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight, .* unknown prefix"):
        load_head(file, config)
    mx.save_safetensors(str(file), {"x": mx.ones((2, 2))}, {"format": "pt"})
    named = r"no tensors named model\.mtp_layers\.\*\.\*, as an MTP head of MiMo"
    with pytest.raises(ValueError, match=named):
        load_head(file, config)


def test_the_family_of_a_folders_head_is_shown(mimo):
    report = inspect_model(mimo[0])
    assert report["mtp_head"]["family"] == "MiMo"
    assert report["mtp_head"]["source"] == "model.safetensors"


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refused_head_is_named(model_type):
    with pytest.raises(UnsupportedHead) as caught:
        find_spec({"model_type": model_type})
    assert model_type in str(caught.value) and REFUSED[model_type] in str(caught.value)


def test_a_refused_head_is_left_out_and_said(monkeypatch, mimo, tmp_path):
    folder = shutil.copytree(mimo[0], tmp_path / "model")
    monkeypatch.setattr(HEADS, "_entries", [])
    monkeypatch.setitem(REFUSED, "mimo", "because")
    with pytest.warns(UserWarning, match="left out: .* mimo is refused: because"):
        assert load(folder)[0].mtp_head is None
    with pytest.raises(UnsupportedHead, match=r"model.safetensors .* mimo .* because"):
        load(folder, mtp=folder / "model.safetensors")


@pytest.mark.parametrize(
    "sign",
    [
        "modules.json",
        "config_sentence_transformers.json",
        "MiMoModel",
        "XForTokenClassification",
    ],
)
def test_embedding_and_reranking_models_get_no_head(mimo, tmp_path, demo, sign):
    folder = shutil.copytree(mimo[0], tmp_path / "model")
    if sign.endswith(".json"):
        (folder / sign).write_text("[]")
    else:
        edit(folder, architectures=[sign])
    with pytest.warns(UserWarning, match=f"reranking model of type mimo .{sign}"):
        assert load(folder)[0].mtp_head is None
    save_head(mimo[1].mtp_head.head, tmp_path)
    with pytest.raises(UnsupportedHead, match=rf"mtp.safetensors fits: .*{sign}"):
        load(folder, mtp=tmp_path / "mtp.safetensors")
    with pytest.raises(UnsupportedHead, match=sign):
        load_drafter(folder, *demo)


def test_models_that_decode_are_no_embedding_models(mimo, tmp_path):
    folder = shutil.copytree(mimo[0], tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("MiMoForCausalLM", "GPT2LMHeadModel", "XForConditionalGeneration"):
            edit(folder, architectures=[name])
            assert load(folder, probe=False)[0].mtp_head is not None
    assert not (DEMO / "modules.json").exists()
