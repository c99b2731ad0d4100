"""Heads of every family: loaded from raw checkpoints and held to a reference."""

import warnings
from importlib import import_module
from itertools import islice
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from head_families import FAMILIES, full_config, tiny_checkpoint
from mlx.utils import tree_flatten, tree_map
from test_caches import Case, random_plan
from test_drafters import Forced
from tiny import ScriptedDrafter, plain_tokens, random_prompt

from mlx_mtp.drafters import DraftContext, MTPHeadDrafter
from mlx_mtp.generation import find_decoder
from mlx_mtp.heads.checkpoint import build_head, find_spec
from mlx_mtp.loading import load, load_head, probe_head, save_head
from mlx_mtp.prompt_cache import load_prompt_cache, save_prompt_cache
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target, takes_heads

DEPTH = 6  # past the windows of four
LONG = ("qwen3_5", "deepseek_v3", "mimo_v2_flash", "step3p5")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    """A checkpoint as it was loaded, with its reference."""
    folder = tmp_path_factory.mktemp(request.param)
    made = tiny_checkpoint(request.param, folder)
    made.folder, made.family = folder, request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the tokenizer reads the config
        made.model, _ = load(folder, probe=False)
    made.target = as_target(made.model)
    made.drafter = MTPHeadDrafter(made.model.mtp_head.head, made.target)
    return made


def expected_logits(reference, modules, tokens, hidden, drafts):
    """What a chain predicts behind all rows, for drafts that are given.

    Head j, row i joins row i of head j - 1 with token i + 1 + j. Past the last head,
    that one goes on with its own rows.
    """
    rows, logits, known = hidden, [], len(hidden)
    tokens = np.concatenate([tokens, drafts])
    for step in range(len(drafts)):
        index = min(step, modules - 1)
        if step < modules:
            shifted = tokens[1 + step :]
            before = rows
        else:
            before = np.concatenate([before, rows[-1:]])
        out, scores = reference.rows(shifted[: len(before)], before, index)
        logits.append(scores[-1])
        rows = out
    assert len(rows) >= known
    return np.stack(logits)


def commit(drafter, state, tokens, hidden, n, count, depth):
    """A round behind ``n`` rows that kept ``count`` tokens: its rows of logits too."""
    rows = np.full((4, 64), 7.0)  # slots behind count hold anything
    rows[:count] = hidden[n : n + count]
    new = np.full(4, -1)
    new[:count] = tokens[n + 1 : n + 1 + count]
    seen = []

    def draw(row, i):
        seen.append(row)
        return mx.argmax(row, axis=-1).astype(mx.int32), None

    context = DraftContext(
        mx.array(new[None]),
        mx.array([count]),
        mx.array(rows[None], mx.float32),
        (n + count + 63) // 64 * 64,
        depth,
        draw,
    )
    drafts, state = drafter.propose(state, context)
    mx.eval(state, seen)
    return np.array(drafts.tokens[0]), np.concatenate(list(map(np.array, seen))), state


def start(drafter, tokens, hidden, n):
    state = drafter.begin(mx.array(tokens[None, :n]), 640)
    following = mx.array(tokens[None, 1 : n + 1])
    return drafter.prefill(state, following, mx.array(hidden[None, :n], mx.float32), 64)


def test_rows_and_chained_rows_are_the_references(tiny):
    """Nine prompt rows, then rounds that keep one to four tokens: 200 of them for a
    head of each kind of memory, 24 for the others."""
    rng = np.random.default_rng(0)
    rounds = 200 if tiny.family in LONG else 24
    counts, n = rng.integers(1, 5, rounds).tolist(), 9
    tokens = rng.integers(0, 96, n + sum(counts) + 1)
    hidden = rng.normal(size=(n + sum(counts), 64))
    state = start(tiny.drafter, tokens, hidden, n)
    for i, count in enumerate(counts):
        looks = i in (0, 1, 2, 3, rounds - 1)
        drafts, ours, state = commit(
            tiny.drafter, state, tokens, hidden, n, count, DEPTH if looks else 1
        )
        n += count
        if looks:
            modules = len(tiny.drafter.head.chain)
            expected = expected_logits(
                tiny.reference, modules, tokens[: n + 1], hidden[:n], drafts
            )
            assert np.abs(ours - expected).max() < 5e-4 * np.abs(expected).max()


def test_rows_of_a_batch_do_not_see_each_other(tiny):
    """Two sequences of one prompt length whose rounds keep different counts."""
    rng = np.random.default_rng(1)
    tokens, hidden = rng.integers(0, 96, (2, 40)), rng.normal(size=(2, 40, 64))
    counts = [(1, 4), (3, 1), (2, 2), (4, 1)]
    states = [
        start(tiny.drafter, *pair, 9) for pair in zip(tokens, hidden, strict=True)
    ]
    both = tree_map(lambda *parts: mx.concatenate(parts), *states)
    lengths = [9, 9]
    for pair in counts:
        alone, new, rows = [], np.full((2, 4), -1), np.zeros((2, 4, 64))
        for b, count in enumerate(pair):
            n = lengths[b]
            _, logits, states[b] = commit(
                tiny.drafter, states[b], tokens[b], hidden[b], n, count, 3
            )
            alone.append(logits)
            new[b, :count] = tokens[b, n + 1 : n + 1 + count]
            rows[b, :count] = hidden[b, n : n + count]
            lengths[b] += count
        seen = []

        def draw(row, i, seen=seen):
            seen.append(row)
            return mx.argmax(row, axis=-1).astype(mx.int32), None

        context = DraftContext(
            mx.array(new), mx.array(pair), mx.array(rows, mx.float32), 64, 3, draw
        )
        _, both = tiny.drafter.propose(both, context)
        together = np.array(mx.stack(seen, axis=1))
        assert np.allclose(together, np.stack(alone), rtol=1e-4, atol=2e-4)


def test_hidden_rows_make_the_logits(tiny):
    target, tokens = tiny.target, mx.array([random_prompt(6, 96, 2)])
    assert takes_heads(tiny.model)
    out = target.prefill(tokens, target.make_cache())
    assert out.hidden.shape == (1, 6, target.hidden_size)
    assert mx.allclose(out.logits, tiny.model(tokens), atol=1e-5)
    rows = out.hidden
    if name := FAMILIES[tiny.family].pre:
        gain = mx.array(tiny.reference.gain(name), mx.float32)
        assert not mx.allclose(out.logits, target.logits(rows), atol=1e-2)
        rows = mx.fast.rms_norm(rows, gain, tiny.reference.eps)
    assert mx.allclose(out.logits, target.logits(rows), atol=1e-5)


def test_any_acceptance_leaves_what_plain_decoding_does(tiny):
    """Over 200 rounds."""
    assert Case(tiny.model).check(random_plan(3), 420).rounds > 200


@pytest.mark.parametrize("tiny", ["step3p5", "deepseek_v32"], indirect=True)
@pytest.mark.parametrize("limit", [None, 64])
@pytest.mark.parametrize("taken", [1, 2, 3, 6, 7, 12])
def test_the_state_at_rest_is_that_of_a_fresh_head(tiny, taken, limit):
    """Wherever a stream is cut. Several heads start anew behind one that was closed."""
    prompt = random_prompt(8, 96, 3)
    truth = plain_tokens(tiny.model, prompt, taken + 1)
    script = ScriptedDrafter(truth, 96, [3, 1])
    decoder = SpeculativeDecoder(tiny.target, Forced(tiny.drafter, script), 3)
    cache = tiny.target.make_cache()
    steps = decoder.stream(prompt, max_tokens=limit or taken, caches=cache)
    list(islice(steps, taken))
    steps.close()
    if limit and taken > 1 and len(tiny.drafter.head.chain) > 1:
        assert cache[0] not in decoder._prefixes
        return
    full = prompt + truth[:taken]
    hidden = tiny.target.prefill(mx.array([full]), tiny.target.make_cache()).hidden
    fresh = tiny.drafter.prefill(
        tiny.drafter.begin(mx.array([prompt]), 256),
        mx.array([full[1:]]),
        hidden[:, :-1],
        256,
    )
    (buffers, offset, *carry), *_ = decoder._prefixes[cache[0]].draft_state
    assert offset.item() == len(full) - 1
    assert len(carry) == len(tiny.drafter.head.chain) - 1
    for x, y in zip(tree_flatten(buffers), tree_flatten(fresh[0]), strict=True):
        x, y = (z[1][:, :, : len(full) - 1] for z in (x, y))
        assert mx.allclose(x, y, rtol=0, atol=1e-4)
    for x, y in zip(carry, fresh[2:], strict=True):
        assert mx.allclose(x, y, rtol=0, atol=1e-3)


@pytest.mark.parametrize("tiny", ["step3p5", "deepseek_v32"], indirect=True)
def test_a_prompt_cache_in_a_file_keeps_the_heads_state(tiny, tmp_path):
    file, model = tmp_path / "cache.safetensors", tiny.model
    decoder, caches = find_decoder(model, "auto", 3), tiny.target.make_cache()
    for _ in decoder.stream(random_prompt(8, 96, 3), max_tokens=9, caches=caches):
        pass
    save_prompt_cache(file, caches, model=model)
    loaded = load_prompt_cache(file, model=model)
    ours, theirs = (decoder._prefixes[c[0]].draft_state for c in (caches, loaded))
    leaves = [tree_flatten(state) for state in (ours, theirs)]
    assert len(leaves[0]) == len(leaves[1]) > 4
    assert all(mx.array_equal(x, y) for (_, x), (_, y) in zip(*leaves, strict=True))


def test_a_head_of_any_family_can_be_probed(tiny):
    tokenizer = SimpleNamespace(encode=lambda text: random_prompt(5, 96, 3))
    agreement = probe_head(tiny.model, tiny.drafter.head, tokenizer)
    assert (31 * agreement) == pytest.approx(round(31 * agreement), abs=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_greedy_tokens_with_the_head_are_plain(tiny, depth):
    prompt = random_prompt(7, 96, 5)
    plain = plain_tokens(tiny.model, prompt, 24)
    decoder = SpeculativeDecoder(tiny.target, tiny.drafter, depth)
    steps = decoder.stream(prompt, max_tokens=24)
    assert [step.token for step in steps] == plain
    assert steps.telemetry.drafted > 0 and steps.telemetry.fallback is None


def test_a_saved_head_is_the_head_however_often(tiny, tmp_path):
    """Gains that were stored less 1 get their 1 once."""
    head = first = tiny.model.mtp_head.head
    for i in range(3):
        save_head(head, tmp_path / f"{i}.safetensors")
        head = load_head(tmp_path / f"{i}.safetensors", tiny.config)
        ours, theirs = (dict(tree_flatten(h.parameters())) for h in (head, first))
        assert ours.keys() == theirs.keys()
        assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


def test_fp8_blocks_of_a_raw_head_are_scaled(tmp_path):
    """As DeepSeek V3 was published: 8-bit weights with a scale for 128 x 128 values."""
    plain = tiny_checkpoint("deepseek_v3", tmp_path)
    file = str(tmp_path / "model.safetensors")
    tensors = mx.load(file)
    for part in ("eh_proj", "self_attn.kv_b_proj", "mlp.experts.1.up_proj"):
        name = f"model.layers.2.{part}.weight"
        tensors[name] = mx.to_fp8(tensors[name] / 4)
        tensors[name + "_scale_inv"] = mx.full((1, 1), 4.0)
    mx.save_safetensors(file, tensors, {"format": "pt"})
    ours = load_head(tmp_path, plain.config, mx.float32)
    tiny_checkpoint("deepseek_v3", tmp_path)
    exact = load_head(tmp_path, plain.config, mx.float32)
    for x, y in zip(
        (ours.fc.weight, ours.layers[0].self_attn.embed_q.weight),
        (exact.fc.weight, exact.layers[0].self_attn.embed_q.weight),
        strict=True,
    ):
        assert 0 < mx.abs(x - y).max() < 0.1 * mx.abs(y).max()


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_experts_of_a_sidecar_are_stacked(family, tmp_path):
    """Of a raw head beside a converted model, whose metadata says so."""
    config = tiny_checkpoint(family, tmp_path).config
    embedded = load_head(tmp_path, config)
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    tensors = {name: x for name, x in tensors.items() if name.startswith("mtp.")}
    file = str(tmp_path / "head.safetensors")
    mx.save_safetensors(file, tensors, {"format": "mlx", "norm_offset": "1"})
    beside = load_head(file, config)
    leaves = [tree_flatten(head.parameters()) for head in (embedded, beside)]
    assert any("switch_mlp" in name for name, _ in leaves[0])
    for (_, x), (_, y) in zip(*leaves, strict=True):
        assert mx.array_equal(x, y)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_qwen_head_scales_its_rotation_as_the_trunk(family):
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    }
    config = full_config(family)
    config |= {"rope_parameters" if family == "qwen3_5" else "rope_scaling": dict(yarn)}
    config |= {"partial_rotary_factor": 0.5}
    head = build_head(config, find_spec(config))
    module = import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    trunk = getattr(model, "language_model", model).model.layers[1].self_attn
    x = mx.random.normal((1, 1, 300, 16))
    turned = head.layers[0].self_attn.rope(x, offset=0)
    assert mx.array_equal(turned, trunk.rope(x, offset=0))
    plain = nn.RoPE(8, base=10000.0)(x)
    assert not mx.allclose(turned, plain, atol=1e-2)
