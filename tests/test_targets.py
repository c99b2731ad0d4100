"""Any mlx_lm model whose state is plain KV caches is a target."""

from importlib import import_module

import mlx.core as mx
import pytest
from plain import contents, equal
from tiny import ScriptedDrafter, plain_tokens, random_prompt

from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import GenericTarget, Qwen35Target, as_target, takes_heads

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GPT = {
    "n_ctx": 512,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": 128,
    "n_layer": 2,
    "n_positions": 512,
    "num_key_value_heads": 4,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 96,
}


def tiny_model(family, config):
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict({**config, "model_type": family}))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize(
    ("family", "config", "fallback"),
    [
        ("qwen3", COMMON, None),
        ("gemma2", COMMON, None),
        ("mixtral", COMMON, None),
        ("gpt2", GPT, None),
        ("gpt_bigcode", GPT, "eager round"),  # reads its offset on the host
    ],
)
def test_greedy_tokens_of_any_family_are_mlx_lms(family, config, fallback):
    model = tiny_model(family, config)
    assert type(as_target(model)) is GenericTarget and not takes_heads(model)
    prompt = random_prompt(9, 96, 1)
    plain = plain_tokens(model, prompt, 50)
    drafter = ScriptedDrafter(plain, 96, [3, 0, 1, 2])
    steps = SpeculativeDecoder(as_target(model), drafter, 3).stream(
        prompt, max_tokens=50
    )
    assert [step.token for step in steps] == plain
    assert (steps.telemetry.fallback or "None").startswith(str(fallback))


def test_a_qwen_target_gives_hidden_rows_that_make_its_logits(qwen):
    target = as_target(qwen)
    assert type(target) is Qwen35Target and takes_heads(qwen)
    rows = mx.array([random_prompt(6, 128, 2)])
    out = target.prefill(rows, target.make_cache())
    assert out.hidden.shape == (1, 6, target.hidden_size)
    assert equal(out.logits, qwen(rows))
    assert equal(out.logits, target.logits(out.hidden))


def test_a_step_of_a_qwen_target_is_that_of_its_model(qwen):
    """Bit for bit, in the logits and in what the caches hold."""
    target, tokens = as_target(qwen), random_prompt(9, 128, 3)
    ours, theirs = target.make_cache(), target.make_cache()
    for i, token in enumerate(tokens):  # the first finds empty caches
        row = mx.array([[token]])
        out = target.step(row, ours)
        assert equal(out.logits, qwen(row, cache=theirs)), i
        assert equal(target.logits(out.hidden), out.logits)
    for x, y in zip(ours, theirs, strict=True):
        for a, b in zip(contents(x), contents(y), strict=True):
            assert equal(a, b)


def test_a_step_of_a_padded_cache_is_the_models_own(qwen):
    target, row = as_target(qwen), mx.array([[5]])
    ours, theirs = target.make_cache(), target.make_cache()
    for caches in (ours, theirs):
        qwen(mx.array([[1, 2, 3]]), cache=caches)
        for cache in caches:
            if hasattr(cache, "left_padding"):
                cache.left_padding = mx.array([4])  # one token is left of the next row
    logits = target.step(row, ours).logits
    assert equal(logits, qwen(row, cache=theirs))


def test_a_padded_qwen_prompt_is_read_in_pieces_as_by_its_model(qwen):
    target, lengths = as_target(qwen), [9, 4]
    tokens = mx.array([random_prompt(9, 128, i) for i in (1, 2)])
    ours, theirs = target.make_cache(), target.make_cache()
    for cache in (*ours, *theirs):
        if hasattr(cache, "left_padding"):
            cache.prepare(lengths=lengths)
    for piece in (tokens[:, :5], tokens[:, 5:]):
        logits = target.prefill(piece, ours).logits, qwen(piece, cache=theirs)
        assert equal(logits[0][0], logits[1][0])
    for a, b in zip(ours, theirs, strict=True):
        if hasattr(a, "left_padding"):
            assert a.lengths.tolist() == b.lengths.tolist()
            assert all(equal(*x) for x in zip(a.cache, b.cache, strict=True))


@pytest.mark.parametrize("cuts", [[17], [1, 16], [6, 11], [16, 1], [5, 1, 2, 9]])
def test_a_qwen_prompt_leaves_what_the_models_own_forward_does(qwen, cuts):
    """Read in any pieces: logits, hidden rows and caches, bit for bit."""
    target, tokens = as_target(qwen), mx.array([random_prompt(17, 128, 6)])
    caches, expected = target.make_cache(), target.make_cache()
    logits, hidden = qwen(tokens, cache=expected), target.trunk(tokens)
    begin, outs = 0, []
    for count in cuts:
        outs.append(target.prefill(tokens[:, begin : begin + count], caches))
        begin += count
    assert equal(mx.concatenate([x.logits for x in outs], axis=1), logits)
    assert equal(mx.concatenate([x.hidden for x in outs], axis=1), hidden)
    for cache, other in zip(caches, expected, strict=True):
        for x, y in zip(contents(cache), contents(other), strict=True):
            assert equal(x, y)
