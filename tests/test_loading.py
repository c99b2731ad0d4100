"""Loading: where a head is found, how its norms are read, and what is refused."""

import json
import shutil
import warnings

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_mtp import loading
from mlx_mtp.drafters import MTPHead
from mlx_mtp.heads import UnsupportedHead
from mlx_mtp.heads.checkpoint import find_spec
from mlx_mtp.loading import (
    DEMO,
    load,
    load_drafter,
    load_head,
    probe_head,
    save_head,
)

CONFIG = json.loads((DEMO / "config.json").read_text())
RAW = mx.load(str(DEMO / "model.safetensors"))
PROMPT = mx.array([[4088, 882, 198, 20, 14, 25]])
MLX, PT = {"format": "mlx"}, {"format": "pt"}


@pytest.fixture(scope="module")
def demo():
    """The demo model with its head, in float32."""
    return load(probe=False, dtype=mx.float32)


@pytest.fixture
def folder(tmp_path, demo):
    """Makes model folders: ``folder(trunk, head=...)``."""

    def make(trunk="raw", head="embedded", name="model"):
        path = tmp_path / name
        path.mkdir()
        for file in DEMO.glob("*.json"):
            shutil.copy(file, path)
        tensors, metadata = trunks(demo[0])[trunk], PT if trunk == "raw" else MLX
        if head == "embedded":
            prefix = "" if trunk == "raw" else "language_model."
            tensors |= {prefix + n: x for n, x in heads(demo[0])[trunk].items()}
        mx.save_safetensors(str(path / "model.safetensors"), tensors, metadata)
        return path

    return make


def trunks(model):
    return {
        "raw": {n: x for n, x in RAW.items() if not n.startswith("mtp.")},
        "converted": dict(tree_flatten(model.parameters())),
    }


def heads(model):
    flat = tree_flatten(model.mtp_head.head.parameters())
    return {
        "raw": {n: x for n, x in RAW.items() if n.startswith("mtp.")},
        "converted": {f"mtp.{n}": x for n, x in flat},
    }


def sidecar(path, tensors, metadata=None):
    mx.save_safetensors(str(path), tensors, metadata or {})


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def equal(a, b):
    a, b = dict(tree_flatten(a.parameters())), dict(tree_flatten(b.parameters()))
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and mx.array_equal(a[n], b[n]).item() for n in a
    )


def quiet_load(path, **kwargs):
    return load(path, **{"probe": False} | kwargs)[0]


# Where a head is found


@pytest.mark.parametrize("head", ["embedded", None])
@pytest.mark.parametrize("trunk", ["raw", "converted"])
def test_trunk_and_head_are_the_same_however_they_are_stored(demo, folder, trunk, head):
    model = quiet_load(folder(trunk, head), dtype=mx.float32)
    assert mx.array_equal(model(PROMPT), demo[0](PROMPT)).item()
    if head:
        assert equal(model.mtp_head.head, demo[0].mtp_head.head)
    else:
        assert model.mtp_head is None


def test_trunk_is_that_of_mlx_lm(demo):
    theirs, _ = mlx_lm.load(str(DEMO))
    ours = quiet_load("demo", dtype=mx.float16)
    assert mx.array_equal(ours(PROMPT), theirs(PROMPT)).item()
    theirs.set_dtype(mx.float32)
    assert mx.array_equal(demo[0](PROMPT), theirs(PROMPT)).item()


@pytest.mark.parametrize(
    "prefix",
    ["mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."],
)
@pytest.mark.parametrize(
    "file", ["mtp.safetensors", "mtp-1.safetensors", "mtp/weights"]
)
def test_sidecars_of_every_name_and_prefix(demo, folder, file, prefix):
    path = folder("converted", None)
    (path / "mtp").mkdir()
    tensors = {
        prefix + name.removeprefix("mtp."): x
        for name, x in heads(demo[0])["converted"].items()
    }
    sidecar(path / f"{file}.safetensors", tensors, MLX)
    assert equal(quiet_load(path).mtp_head.head, demo[0].mtp_head.head)


def test_head_in_two_sidecar_shards(demo, folder):
    path, tensors = folder("converted", None), heads(demo[0])["converted"]
    names = sorted(tensors)
    sidecar(path / "mtp-1.safetensors", {n: tensors[n] for n in names[:7]}, MLX)
    sidecar(path / "mtp-2.safetensors", {n: tensors[n] for n in names[7:]}, MLX)
    model = quiet_load(path)
    assert equal(model.mtp_head.head, demo[0].mtp_head.head)
    assert model.mtp_head.source == "mtp-1.safetensors, mtp-2.safetensors"
    sidecar(path / "mtp-3.safetensors", {names[0]: tensors[names[0]]}, MLX)
    with pytest.raises(ValueError, match=f"has {names[0]} a second time"):
        quiet_load(path)


def test_sidecar_goes_before_the_embedded_head(demo, folder):
    path, tensors = folder("raw"), heads(demo[0])["converted"]
    tensors["mtp.norm.weight"] = tensors["mtp.norm.weight"] * 3
    sidecar(path / "mtp.safetensors", tensors, MLX)
    gain = quiet_load(path).mtp_head.head.norm.weight
    assert mx.array_equal(gain, demo[0].mtp_head.head.norm.weight * 3).item()


@pytest.mark.parametrize("of", ["file", "folder", "checkpoint"])
def test_head_from_another_place(demo, folder, tmp_path, of):
    path = folder("raw", None)
    if of == "checkpoint":
        place = folder("raw", name="other")
    else:
        place = tmp_path / "head"
        place.mkdir()
        save_head(demo[0].mtp_head.head, place)
        place = place / "mtp.safetensors" if of == "file" else place
    model = quiet_load(path, mtp=place, dtype=mx.float32)
    assert equal(model.mtp_head.head, demo[0].mtp_head.head)
    assert equal(load_head(place, CONFIG, mx.float32), demo[0].mtp_head.head)


def test_head_is_no_parameter_of_the_model(demo):
    names = [name for name, _ in tree_flatten(demo[0].parameters())]
    assert names and not any("mtp" in name for name in names)


def test_mtp_false_does_not_look_for_a_head(folder):
    path = folder("raw", None)
    (path / "mtp.safetensors").write_bytes(b"damaged")
    assert quiet_load(path, mtp=False).mtp_head is None


# How norm gains are read


@pytest.mark.parametrize("trunk", ["raw", "converted"])
@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("raw", PT),
        ("converted", MLX),
        ("raw", {"format": "mlx", "norm_offset": "1"}),
        ("converted", {"format": "pt", "norm_offset": "0"}),
    ],
)
def test_sidecar_metadata_goes_before_the_trunk(demo, folder, trunk, kind, metadata):
    path = folder(trunk, None)
    sidecar(path / "mtp.safetensors", heads(demo[0])[kind], metadata)
    model = quiet_load(path, dtype=mx.float32)
    assert equal(model.mtp_head.head, demo[0].mtp_head.head)


@pytest.mark.parametrize("kind", ["raw", "converted"])
def test_sidecar_without_metadata_follows_the_layout_of_the_trunk(demo, folder, kind):
    path = folder(kind, None)
    sidecar(path / "mtp.safetensors", heads(demo[0])[kind])
    model = quiet_load(path, dtype=mx.float32)
    assert equal(model.mtp_head.head, demo[0].mtp_head.head)


def test_lone_sidecar_must_say_how_its_norms_are_stored(demo, tmp_path):
    file = tmp_path / "mtp.safetensors"
    sidecar(file, heads(demo[0])["raw"])
    with pytest.raises(ValueError, match=r"does not say .*norm_offset"):
        load_head(file, CONFIG)


def test_gains_stay_equal_however_often_they_are_saved_and_loaded(folder):
    tensors = dict(RAW)
    gain = tensors["mtp.norm.weight"]
    tensors["mtp.norm.weight"] = mx.full(gain.shape, -0.1, mx.float32)
    path = folder("raw", None)
    mx.save_safetensors(str(path / "model.safetensors"), tensors, PT)
    first = quiet_load(path)
    assert mx.allclose(first.mtp_head.head.norm.weight, mx.array(0.9)).item()
    model = first
    for i in range(3):
        path = folder("raw", None, name=f"round-{i}")
        trunk = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(path / "model.safetensors"), trunk, MLX)
        save_head(model.mtp_head.head, path)
        model = quiet_load(path)
        assert equal(model.mtp_head.head, first.mtp_head.head)
        assert equal(model, first)


def test_save_head_may_overwrite_the_file_it_was_read_from(demo, tmp_path):
    file = tmp_path / "mtp.safetensors"
    save_head(demo[0].mtp_head.head, file)
    found = loading._find_head(file, [], find_spec(CONFIG), CONFIG)
    save_head(loading._build(found, CONFIG, lazy=True), file)
    assert equal(load_head(file, CONFIG), demo[0].mtp_head.head)


# Dtypes and quantisation


def dtypes(module):
    return {x.dtype for _, x in tree_flatten(module.parameters())}


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the default on a CPU")
def test_float32_on_a_cpu_and_as_stored_when_asked():
    model = quiet_load("demo")
    assert dtypes(model) == dtypes(model.mtp_head.head) == {mx.float32}
    model = quiet_load("demo", dtype=mx.float16)
    assert dtypes(model) == dtypes(model.mtp_head.head) == {mx.float16}


@pytest.mark.parametrize(
    ("trunk", "head", "result"),
    [
        (mx.float16, mx.float16, mx.float16),
        (mx.float16, mx.bfloat16, mx.float32),
        (mx.float16, mx.float32, mx.float32),
        (mx.bfloat16, mx.float16, mx.bfloat16),
        (mx.float32, mx.bfloat16, mx.float32),
    ],
)
def test_head_is_never_narrowed_in_range(
    demo, folder, monkeypatch, trunk, head, result
):
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)  # keeps what is stored
    path = folder("converted", None)
    tensors = {n: x.astype(trunk) for n, x in trunks(demo[0])["converted"].items()}
    mx.save_safetensors(str(path / "model.safetensors"), tensors, MLX)
    tensors = {n: x.astype(head) for n, x in heads(demo[0])["converted"].items()}
    sidecar(path / "mtp.safetensors", tensors, MLX)
    assert dtypes(quiet_load(path).mtp_head.head) == {result}


QUANTISATIONS = {
    "8 bit": {"bits": 8, "group_size": 64},
    "4 bit": {"bits": 4, "group_size": 32},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


@pytest.mark.parametrize("kind", QUANTISATIONS)
@pytest.mark.parametrize("part", ["", "mlp"])
def test_quantised_head_keeps_its_bits(demo, folder, kind, part):
    path = folder("raw", None)
    head = load_head(DEMO, CONFIG, mx.float32)
    nn.quantize(
        head,
        **QUANTISATIONS[kind],
        class_predicate=lambda name, m: hasattr(m, "to_quantized") and part in name,
    )
    save_head(head, path)
    loaded = quiet_load(path).mtp_head.head
    assert equal(loaded, head)
    modules = dict(loaded.named_modules())
    assert isinstance(modules["layers.0.mlp.up_proj"], nn.QuantizedLinear)
    assert isinstance(modules["fc"], nn.Linear if part else nn.QuantizedLinear)
    if kind == "8 bit":
        assert probe_head(demo[0], loaded, demo[1]) > 0.7


def test_quantised_checkpoint_with_head(demo, folder):
    path = folder("converted")
    model = quiet_load(path)
    nn.quantize(model, group_size=64, bits=8)
    nn.quantize(model.mtp_head.head, group_size=32, bits=8)
    tensors = dict(tree_flatten(model.parameters())) | {
        f"language_model.mtp.{n}": x
        for n, x in tree_flatten(model.mtp_head.head.parameters())
    }
    mx.save_safetensors(str(path / "model.safetensors"), tensors, MLX)
    edit_json(path / "config.json", quantization={"group_size": 64, "bits": 8})
    loaded, _ = load(path)
    assert equal(loaded.mtp_head.head, model.mtp_head.head)
    assert loaded.mtp_head.agreement > 0.7


# What is refused


@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"])
def test_missing_head_tensor_is_named(demo, folder, name):
    path, tensors = folder("converted", None), heads(demo[0])["converted"]
    del tensors[name]
    sidecar(path / "mtp.safetensors", tensors, MLX)
    with pytest.raises(ValueError, match=f"{name.removeprefix('mtp.')} is missing"):
        quiet_load(path)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mtp.layers.1.mlp.up_proj.weight", (4, 4), r"layers\.1\..* is unknown"),
        ("mtp.fc.scales", (256, 8), "weights and scales that do not fit together"),
        ("mtp.fc.weight", (256, 256), r"fc\.weight has shape \(256, 256\) in place of"),
        ("foo.mtp.fc.weight", (256, 512), "foo.mtp.fc.weight, .* unknown prefix"),
        ("mtp_head.fc.weight", (256, 512), "mtp_head.fc.weight, .* unknown prefix"),
    ],
)
def test_strange_head_tensor_is_named(demo, folder, name, shape, message):
    path = folder("converted", None)
    tensors = heads(demo[0])["converted"] | {name: mx.ones(shape)}
    sidecar(path / "mtp.safetensors", tensors, MLX)
    with pytest.raises(ValueError, match=message):
        quiet_load(path)


def test_head_of_another_size_is_refused(demo, folder):
    path = folder("raw")
    text = CONFIG["text_config"] | {"mtp_num_hidden_layers": 2}
    edit_json(path / "config.json", text_config=text)
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm.* is missing"):
        quiet_load(path)


@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "is all zeros"), (float("nan"), "is not finite")]
)
def test_dead_head_is_refused(demo, folder, value, message):
    path, tensors = folder("converted", None), heads(demo[0])["converted"]
    tensors["mtp.fc.weight"] = mx.full((256, 512), value)
    sidecar(path / "mtp.safetensors", tensors, MLX)
    with pytest.raises(ValueError, match=f"fc.weight {message}"):
        quiet_load(path)
    assert quiet_load(path, mtp=False).mtp_head is None


def test_without_memory_for_the_head_the_model_loads_and_says_so(folder, monkeypatch):
    def no_memory(head, source):
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    monkeypatch.setattr(loading, "_check_values", no_memory)
    with pytest.warns(UserWarning, match=r"left out: .* could not be read"):
        model = quiet_load(folder("raw"))
    assert model.mtp_head is None


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize("file", ["model.safetensors", "mtp.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "pointer"])
def test_damaged_file_is_named(demo, folder, file, damage):
    path = folder("converted", None)
    save_head(demo[0].mtp_head.head, path)
    if damage == "truncated":
        truncate(path / file)
    elif damage == "empty":
        (path / file).write_bytes(b"")
    else:
        (path / file).write_text("version https://git-lfs.github.com/spec/v1\n")
    reason = "git lfs pull" if damage == "pointer" else "damaged or incomplete"
    with pytest.raises(ValueError, match=rf"{file} is .*{reason}"):
        quiet_load(path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file_is_named(folder, file):
    path = folder("raw")
    (path / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {file[:5]}"):
        quiet_load(path)


def test_missing_shard_is_named(folder):
    path = folder("raw")
    index = {"weight_map": {"x": "model-2.safetensors", "y": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"lacks model-2.safetensors, named"):
        quiet_load(path)


def test_damaged_tokenizer_is_named(folder):
    path = folder("raw")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be loaded"):
        quiet_load(path)


def test_bad_config_is_named(folder):
    path = folder("raw")
    edit_json(path / "config.json", text_config={"hidden_size": 256})
    with pytest.raises(ValueError):
        quiet_load(path)
    edit_json(path / "config.json", model_type="no_such_type")
    with pytest.raises(ValueError, match="no_such_type"):
        quiet_load(path)
    (path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no model_type"):
        quiet_load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        quiet_load(path)


def test_an_empty_name_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(DEMO)
    with pytest.raises(ValueError, match="has no name"):
        load("")


@pytest.mark.parametrize("name", ["mtp", "return_config"])
def test_what_a_drafter_cannot_take_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} is an argument of load alone"):
        load_drafter(DEMO, None, None, **{name: True})


@pytest.mark.parametrize("path", ["./none", "/none", "a/b/c"])
def test_wrong_path_is_no_hub_id(path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        load(path)


def test_file_is_no_folder(folder):
    with pytest.raises(FileNotFoundError, match="is a file"):
        load(folder("raw") / "model.safetensors")


@pytest.mark.parametrize("repo", ["nobody/no-such-model", "no-such-model", "bad id!/x"])
def test_hub_id_offline(monkeypatch, repo):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=f"{repo} is not a folder here"):
        load(repo)


def test_missing_head_file_is_named(folder, tmp_path):
    path = folder("raw", None)
    with pytest.raises(FileNotFoundError, match="no MTP head at"):
        quiet_load(path, mtp=tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="has no MTP head"):
        quiet_load(path, mtp=path)
    with pytest.raises(ValueError, match="no tensors named mtp"):
        quiet_load(path, mtp=path / "model.safetensors")


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("config.json", "model_file"),
        ("config.json", "auto_map"),
        ("tokenizer_config.json", "auto_map"),
    ],
)
def test_code_of_the_checkpoint_is_refused(folder, file, key):
    path = folder("raw")
    edit_json(path / file, **{key: "evil.py"})
    (path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match=f"{key}: evil.py.*trust_remote_code=True"):
        quiet_load(path)


def test_trusted_code_runs(folder):
    path = folder("raw")
    edit_json(path / "config.json", model_file="own.py")
    code = "from mlx_lm.models.qwen3_5 import *\nclass Model(Model):\n  own = True\n"
    (path / "own.py").write_text(code)
    assert quiet_load(path, trust_remote_code=True).own


def test_head_of_another_vocabulary_is_refused(folder):
    path, other = folder("raw", None), folder("raw", name="other")
    assert quiet_load(path, mtp=other).mtp_head
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"differ, first in token '[ab]' with id"):
        quiet_load(path, mtp=other)


def test_family_without_heads_loads_and_says_so(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 4096,
    }
    from mlx_lm.models.llama import Model, ModelArgs

    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, MLX)
    sidecar(tmp_path / "mtp.safetensors", {"mtp.fc.weight": mx.ones((2, 2))})
    assert quiet_load(tmp_path, mtp=False).mtp_head is None
    with pytest.warns(UserWarning, match="left out: model type llama"):
        assert quiet_load(tmp_path).mtp_head is None
    with pytest.raises(UnsupportedHead, match=r"mtp.safetensors .* model type llama"):
        quiet_load(tmp_path, mtp=tmp_path / "mtp.safetensors")
    with pytest.raises(UnsupportedHead, match="model type llama"):
        load_head(tmp_path / "mtp.safetensors", config)


def test_experts_in_the_head_of_a_dense_model_are_refused(demo, folder):
    path = folder("converted", None)
    tensors = {
        name.replace("mlp.", "mlp.experts.0."): x
        for name, x in heads(demo[0])["converted"].items()
    }
    sidecar(path / "mtp.safetensors", tensors, MLX)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.switch_mlp.* is unknown"):
        quiet_load(path)


# Probing


def shifted(head: MTPHead, by: float):
    for module in head.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight = module.weight + by


def swapped(head: MTPHead):
    head.fc.weight = mx.roll(head.fc.weight, head.config.hidden_size, axis=1)


def test_working_head_is_not_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = load(dtype=mx.float32)
    assert model.mtp_head.agreement > 0.7


@pytest.mark.parametrize(
    "break_head", [lambda head: shifted(head, -1.0), swapped], ids=["norms", "halves"]
)
def test_miswired_head_is_reported(folder, break_head):
    path = folder("raw", None)
    head = load_head(DEMO, CONFIG, mx.float32)
    break_head(head)
    save_head(head, path)
    with pytest.warns(UserWarning, match=r"agrees with the model on \d+% of 32"):
        model, _ = load(path)
    assert model.mtp_head.agreement < 0.1
    assert load(path, probe=False)[0].mtp_head.agreement is None


# The rest of mlx_lm's signature


def test_config_is_returned_and_replaced():
    _, _, config = load(model_config={"x": 1}, return_config=True, probe=False)
    assert config["x"] == 1 and config["model_type"] == "qwen3_5"


def test_lazy_reads_nothing(folder):
    path = folder("raw")
    before = mx.get_active_memory()
    model, tokenizer = load(path, lazy=True)
    assert mx.get_active_memory() - before < 1 << 20
    assert model.mtp_head.agreement is None
    assert tokenizer.eos_token_ids == {4087, 4089}
    assert mx.array_equal(model(PROMPT), quiet_load("demo")(PROMPT)).item()


def test_adapters_are_applied(demo, tmp_path):
    model = quiet_load("demo")
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters)
    tensors = {
        name: 0.1 * mx.random.normal(x.shape)  # float16 holds no larger products
        for name, x in tree_flatten(model.parameters())
        if "lora_" in name
    }
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), tensors)
    settings = {"num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    model.update(tree_unflatten(list(tensors.items())))
    adapted = quiet_load("demo", adapter_path=str(tmp_path))
    assert mx.array_equal(adapted(PROMPT), model(PROMPT)).item()
    assert not mx.array_equal(adapted(PROMPT), demo[0](PROMPT)).item()
