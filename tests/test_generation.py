"""The drop-in API against mlx_lm on the demo model, stock BLAS."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from plain import closeness

import mlx_mtp
from mlx_mtp import NGramDrafter, SamplingParams, generate, make_sampler
from mlx_mtp.drafters import MTPHeadDrafter
from mlx_mtp.generation import find_decoder
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target

FIELDS = ("text", "token", "finish_reason", "prompt_tokens", "generation_tokens")


@pytest.fixture(scope="module")
def prompt(demo):
    _, tokenizer = demo
    message = {"role": "user", "content": "What is 57 + 68?"}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True)


def responses(stream):
    return [tuple(getattr(r, name) for name in FIELDS) for r in stream]


def tokens(demo, prompt, **kwargs):
    return [r.token for r in mlx_mtp.stream_generate(*demo, prompt, **kwargs)]


@pytest.mark.parametrize("mtp", [None, "auto", 1, 5, "ngram"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 30, 200])
def test_responses_equal_mlx_lm(demo, prompt, mtp, max_tokens):
    drafter = NGramDrafter() if mtp == "ngram" else mtp
    ours = mlx_mtp.stream_generate(*demo, prompt, max_tokens=max_tokens, mtp=drafter)
    theirs = mlx_lm.stream_generate(*demo, prompt, max_tokens=max_tokens)
    assert responses(ours) == responses(theirs)


def test_string_prompts_are_encoded_as_in_mlx_lm(demo):
    ours = mlx_mtp.stream_generate(*demo, "import os", max_tokens=8)
    theirs = mlx_lm.stream_generate(*demo, "import os", max_tokens=8)
    assert responses(ours) == responses(theirs)


def test_logprobs_are_lazy_and_equal_mlx_lm(demo, prompt):
    ours = list(mlx_mtp.stream_generate(*demo, prompt, max_tokens=12))
    theirs = list(mlx_lm.stream_generate(*demo, prompt, max_tokens=12))
    atol = closeness(1e-4, 0.1)  # the logits are float16 on a GPU
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)


def test_drafted_tokens_are_marked(demo, prompt):
    marks = [r.from_draft for r in mlx_mtp.stream_generate(*demo, prompt, mtp=3)]
    assert not marks[0] and any(marks)


def test_model_without_head_is_mlx_lm(demo, prompt):
    model, tokenizer = mlx_mtp.load("demo", mtp=False)
    ours = list(mlx_mtp.stream_generate(model, tokenizer, prompt, max_tokens=9))
    theirs = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=9)
    assert responses(ours) == responses(theirs)
    assert ours[-1].mtp.fallback == "the model has no MTP head"
    with pytest.raises(ValueError, match="no MTP head"):
        list(mlx_mtp.stream_generate(model, tokenizer, prompt, mtp=2))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_kv_size": 64},
        {"kv_bits": 8, "quantized_kv_start": 0},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30},
    ],
)
def test_bounded_and_quantised_caches_speculate(demo, prompt, kwargs):
    ours = list(mlx_mtp.stream_generate(*demo, prompt, max_tokens=25, **kwargs))
    theirs = mlx_lm.stream_generate(*demo, prompt, max_tokens=25, **kwargs)
    assert responses(ours) == responses(theirs)
    assert ours[-1].mtp.fallback is None and ours[-1].mtp.accepted


def test_unsupported_arguments_are_plain_decoding_with_a_reason(demo, prompt):
    embed = demo[0].language_model.model.embed_tokens
    kwargs = {"input_embeddings": embed(mx.array(prompt))}
    ours = list(mlx_mtp.stream_generate(*demo, prompt, max_tokens=9, **kwargs))
    theirs = mlx_lm.stream_generate(*demo, prompt, max_tokens=9, **kwargs)
    assert responses(ours) == responses(theirs)
    assert "input_embeddings" in ours[-1].mtp.fallback


class StrangeCache(KVCache):
    pass


def test_unsupported_cache_is_plain_decoding_with_a_reason(demo, prompt):
    model, _ = demo
    cache = make_prompt_cache(model)
    cache[3] = StrangeCache()
    ours = list(
        mlx_mtp.stream_generate(*demo, prompt, max_tokens=9, prompt_cache=cache)
    )
    theirs = mlx_lm.stream_generate(*demo, prompt, max_tokens=9)
    assert responses(ours) == responses(theirs)
    assert "entry 3 is a StrangeCache" in ours[-1].mtp.fallback


def test_prompt_cache_is_left_as_mlx_lm_leaves_it(demo, prompt):
    model, tokenizer = demo
    follow = tokenizer.encode("<|im_start|>user\nWhat is 9 + 9?<|im_end|>\n")
    results = []
    for package, kwargs in ((mlx_mtp, {"mtp": 4}), (mlx_lm, {})):
        cache = make_prompt_cache(model)
        turns = [
            responses(
                package.stream_generate(
                    *demo, turn, max_tokens=25, prompt_cache=cache, **kwargs
                )
            )
            for turn in (prompt, follow)
        ]
        results.append((turns, [getattr(c, "offset", None) for c in cache]))
    assert results[0] == results[1]


def test_prompt_cache_is_exact_after_the_caller_breaks_off(demo, prompt):
    model, _ = demo
    for count in range(1, 8):
        cache = make_prompt_cache(model)
        stream = mlx_mtp.stream_generate(*demo, prompt, mtp=3, prompt_cache=cache)
        for _ in range(count):
            next(stream)
        stream.close()
        assert cache[3].offset == len(prompt) + count


def test_our_sampler_is_reproducible_and_mlx_lms_is_matched(demo, prompt):
    ours = make_sampler(0.8, top_k=50)
    assert tokens(demo, prompt, sampler=ours, seed=3) == tokens(
        demo, prompt, sampler=ours, seed=3
    )
    theirs = list(
        mlx_mtp.stream_generate(*demo, prompt, sampler=mlx_lm_sampler(0.8, top_k=50))
    )
    assert theirs[-1].mtp.accepted > 0


def test_mlx_random_seed_fixes_a_stream_without_a_seed(demo, prompt):
    streams = []
    for _ in range(2):
        mx.random.seed(11)
        streams.append(tokens(demo, prompt, sampler=make_sampler(4.0), max_tokens=30))
    assert streams[0] == streams[1]
    assert streams[0] != tokens(demo, prompt, sampler=make_sampler(4.0), max_tokens=30)


def test_make_sampler_reads_mlx_lms_arguments():
    assert make_sampler(0.5, 0.9, 0.1, top_k=7).params == SamplingParams(
        0.5, 7, 0.9, 0.1, "temperature_last"
    )
    assert make_sampler().params.greedy
    assert not hasattr(make_sampler(1.0, xtc_probability=0.5), "params")


def test_our_sampler_works_in_mlx_lm(demo, prompt):
    stream = mlx_lm.stream_generate(
        *demo, prompt, max_tokens=5, sampler=make_sampler(1.0, top_k=1)
    )
    greedy = mlx_lm.stream_generate(*demo, prompt, max_tokens=5)
    assert responses(stream) == responses(greedy)


def test_mlx_lm_processors_give_mlx_lms_tokens(demo, prompt):
    processors = make_logits_processors(
        logit_bias={5: -3.0}, repetition_penalty=1.4, repetition_context_size=30
    )
    kwargs = {"max_tokens": 60, "logits_processors": processors}
    theirs = [r.token for r in mlx_lm.stream_generate(*demo, prompt, **kwargs)]
    assert tokens(demo, prompt, mtp=4, **kwargs) == theirs


def test_rounds_are_compiled_once_a_model(demo, prompt):
    model, _ = demo
    tokens(demo, prompt, mtp=2, max_tokens=20)
    rounds = model.mtp_decoders.get(model.mtp_decoders.head, 2)._rounds

    def traces():
        return {key: round_.traces for key, round_ in rounds.items()}

    before = traces()
    tokens(demo, prompt, mtp=2, max_tokens=20)
    assert traces() == before
    assert sum(before.values()) > 0


def test_a_decoder_can_be_given(demo, prompt):
    model, _ = demo
    decoder = SpeculativeDecoder(as_target(model), NGramDrafter(), 2)
    assert tokens(demo, prompt, mtp=decoder) == tokens(demo, prompt, mtp=None)


def test_generate_returns_the_text(demo, prompt, capsys):
    text = generate(*demo, prompt, max_tokens=40, verbose=True)
    assert text == mlx_lm.generate(*demo, prompt, max_tokens=40)
    printed = capsys.readouterr().out
    assert text in printed and "tokens per round" in printed


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"mtp": 0}, ValueError),
        ({"mtp": 99}, ValueError),
        ({"mtp": "fast"}, ValueError),
        ({"mtp": True}, ValueError),
        ({"max_tokens": 0}, ValueError),
        ({"prefill_step_size": 0}, ValueError),
        ({"colour": "red"}, TypeError),
        ({"mtp": 1.5}, ValueError),
        ({"mtp": NGramDrafter}, ValueError),
        ({"seed": -1}, ValueError),
        ({"max_tokens": 2.5}, ValueError),
    ],
)
def test_bad_arguments_are_refused(demo, prompt, kwargs, error):
    with pytest.raises(error):
        list(mlx_mtp.stream_generate(*demo, prompt, **kwargs))


@pytest.mark.parametrize("bad", [[], [-1], [4096], [0.5]])
def test_bad_prompts_are_refused(demo, bad):
    with pytest.raises((ValueError, TypeError)):
        list(mlx_mtp.stream_generate(*demo, bad, mtp=2))


@pytest.mark.parametrize("shaped", [lambda t, row: row[:, :10], lambda t, row: None])
def test_processors_must_keep_the_shape(demo, prompt, shaped):
    with pytest.raises(ValueError, match=r"shape \(1, 4096\)"):
        tokens(demo, prompt, mtp=2, logits_processors=[shaped])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"mtp": None, "sampler": make_sampler(4.0)},
        {"mtp": 3, "max_kv_size": 64, "sampler": make_sampler(4.0)},
        {"mtp": 3, "sampler": mlx_lm_sampler(4.0)},
        {"mtp": 3, "sampler": make_sampler(4.0)},
    ],
)
def test_a_seed_fixes_every_kind_of_stream(demo, prompt, kwargs):
    streams = [
        tokens(demo, prompt, max_tokens=12, seed=seed, **kwargs) for seed in (1, 1, 2)
    ]
    assert streams[0] == streams[1] != streams[2]


def test_a_cache_of_an_open_stream_is_refused(demo, prompt):
    model, _ = demo
    cache = make_prompt_cache(model)
    stream = mlx_mtp.stream_generate(*demo, prompt, mtp=3, prompt_cache=cache)
    next(stream)
    with pytest.raises(ValueError, match="still open"):
        tokens(demo, prompt, mtp=3, prompt_cache=cache)
    stream.close()
    assert len(tokens(demo, prompt[:5], mtp=3, prompt_cache=cache, max_tokens=4)) == 4


def test_equal_ngram_drafters_share_a_decoder(demo, prompt):
    model, _ = demo
    tokens(demo, prompt, mtp=NGramDrafter(2), max_tokens=2)
    before = len(model.mtp_decoders.made)
    tokens(demo, prompt, mtp=NGramDrafter(2), max_tokens=2)
    assert len(model.mtp_decoders.made) == before


def test_make_sampler_refuses_what_mlx_lms_does_not_know():
    with pytest.raises(TypeError):
        make_sampler(temperature=0.7)
    assert make_sampler(0.7, top_k=-1).params.top_k == 0
    assert not hasattr(make_sampler(0.7, 0.95, 0.0, 1, 0, 0.5, 0.1), "params")
    for bad in ({"temp": 1e39}, {"temp": 1.0, "top_k": 2**40}):
        with pytest.raises(ValueError):
            make_sampler(**bad)


def at_a_forced_token(demo, prompt, cache):
    """A stream that rests in front of what it has to feed."""
    stream = mlx_mtp.stream_generate(
        *demo, prompt, mtp=3, prompt_cache=cache, thinking_budget=0, max_tokens=20
    )
    return stream, next(stream).token


def test_a_cache_is_refused_wherever_its_stream_rests(demo, prompt):
    model, _ = demo
    whole = at_a_forced_token(demo, prompt, make_prompt_cache(model))
    expected = [whole[1], *(r.token for r in whole[0])]
    cache = make_prompt_cache(model)
    stream, first = at_a_forced_token(demo, prompt, cache)
    decoder = find_decoder(model, 3, 3)
    for other in (
        lambda: tokens(demo, [1, 2, 3], mtp=3, prompt_cache=cache),
        lambda: tokens(demo, [1, 2, 3], mtp=None, prompt_cache=cache),
        lambda: decoder.feed([1, 2, 3], cache),
        lambda: decoder.stream([1, 2, 3], caches=cache),
    ):
        with pytest.raises(ValueError, match="still open"):
            other()
    assert [first, *(r.token for r in stream)] == expected


def test_only_the_last_drafters_of_a_model_are_kept(demo, demo_parts):
    model, alive = demo[0], []
    for _ in range(6):
        drafter = MTPHeadDrafter(demo_parts.drafter.head, demo_parts.target)
        decoder = find_decoder(model, drafter, 3)
        assert find_decoder(model, drafter, 3) is decoder
        assert find_decoder(model, drafter, 2)._prefixes is decoder._prefixes
        alive.append(weakref.ref(drafter))
        del drafter, decoder
        gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 2 + [True] * 4


def test_of_two_streams_of_a_cache_the_second_to_begin_is_refused(demo, prompt):
    decoder = find_decoder(demo[0], 3, 3)
    cache = make_prompt_cache(demo[0])
    one, two = (decoder.stream(prompt, caches=cache) for _ in range(2))
    next(one)
    with pytest.raises(ValueError, match="still open"):
        next(two)
    one.close()
    assert cache[3].offset == len(prompt) + 1
    next(decoder.stream(prompt, caches=cache))


@pytest.mark.parametrize("mtp", [3, None])
def test_caches_are_whole_at_the_response_that_meets_a_stop(demo, prompt, mtp):
    cache, emitted = make_prompt_cache(demo[0]), 0
    stream = mlx_mtp.stream_generate(
        *demo, prompt, mtp=mtp, prompt_cache=cache, stop="8"
    )
    for response in stream:
        emitted += 1
        if response.finish_reason:
            break
    assert response.finish_reason == "stop"
    # mlx_lm's loop is one token ahead of the one that it has given.
    assert cache[3].offset - len(prompt) in (
        (emitted,) if mtp else (emitted - 1, emitted)
    )
    assert tokens(demo, prompt, prompt_cache=cache, mtp=mtp, max_tokens=2)


@pytest.mark.parametrize("taken", [1, 3, 6])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_draft_tokens": "adaptive"},
        {"num_draft_tokens": 2},
        {"num_draft_tokens": 2, "thinking_budget": 4},
        {"mtp": NGramDrafter(), "num_draft_tokens": 2, "seed": 3},
    ],
    ids=["adaptive", "fixed", "budget", "n-gram"],
)
def test_a_stream_goes_on_in_another_thread(demo, prompt, kwargs, taken):
    expected = tokens(demo, prompt, max_tokens=20, **kwargs)
    cache = make_prompt_cache(demo[0])
    stream = mlx_mtp.stream_generate(
        *demo, prompt, max_tokens=20, prompt_cache=cache, **kwargs
    )
    got = [next(stream).token for _ in range(taken)]
    with ThreadPoolExecutor(1) as pool:
        got += pool.submit(lambda: [r.token for r in stream]).result()
    assert got == expected
    again = {"max_tokens": 4, "mtp": None}
    follow = tokens(demo, [11], prompt_cache=cache, **again)
    assert follow == tokens(demo, [*prompt, *got, 11], **again)


def test_the_first_token_does_not_wait_for_a_round(demo, prompt):
    stream = mlx_mtp.stream_generate(*demo, prompt, mtp=4, max_tokens=8)
    assert next(stream).mtp.target_calls == 0
    assert next(stream).mtp.target_calls > 0
    assert len(list(stream)) == 6


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"mtp": "auto", "num_draft_tokens": 2.0}, "depth must be in"),
        ({"mtp": "auto", "num_draft_tokens": float("nan")}, "depth must be in"),
        ({"kv_bits": 7}, "kv_bits must be 2, 3, 4, 5, 6 or 8"),
        ({"kv_bits": 8, "kv_group_size": 7}, "kv_group_size 32, 64 or 128"),
        ({"prompt_cache": []}, "has 0 entries but the model has 8"),
        ({"max_tokens": -5, "mtp": None}, "max_tokens must be a positive"),
        ({"max_tokens": 2.5, "mtp": None}, "max_tokens must be a positive"),
        ({"sampler": lambda x: mx.array([4096])}, "returned token 4096, outside of"),
    ],
)
def test_refuses_what_would_fail_later(demo, prompt, kwargs, message):
    with pytest.raises(ValueError, match=message):
        tokens(demo, prompt, **{"mtp": 3, **kwargs})


def test_a_head_that_comes_later_is_found(demo, prompt):
    model, tokenizer = mlx_mtp.load("demo")
    head, model.mtp_head = model.mtp_head, None
    tokens((model, tokenizer), prompt, mtp=NGramDrafter(), max_tokens=2)
    model.mtp_head = head
    last = list(mlx_mtp.stream_generate(model, tokenizer, prompt, mtp=2, max_tokens=8))[
        -1
    ]
    assert last.mtp.accepted
