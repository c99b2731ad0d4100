"""Caches over turns, in files, in copies and taken back: the same tokens as one long
prompt, and the same drafts where the drafter's state came along."""

from functools import partial
from itertools import islice
from threading import Thread

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.cache import load_prompt_cache as lm_load
from mlx_lm.models.cache import save_prompt_cache as lm_save
from tiny import plain_tokens, random_head, random_prompt, tiny_qwen

from mlx_mtp import (
    NGramDrafter,
    SpeculativeDecoder,
    copy_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
    stream_generate,
)
from mlx_mtp.targets import as_target

TURNS = ("import os\nimport sys\n\n\ndef main(path):\n", "    for name in os.listdir(")


@pytest.fixture(scope="module")
def texts(demo):
    return [demo[1].encode(text) for text in TURNS]


def marks(demo, prompt, cache, tokens=30, **options):
    """The tokens of a stream and which of them were drafted."""
    steps = stream_generate(
        *demo, prompt, tokens, prompt_cache=cache, **({"mtp": 3} | options)
    )
    return [(r.token, r.from_draft) for r in steps]


@pytest.fixture(scope="module")
def whole(demo, texts):
    """Both turns as one long prompt."""
    cache = make_prompt_cache(demo[0])
    said = [token for token, _ in marks(demo, texts[0], cache, 7)]
    long = texts[0] + said + texts[1]
    return marks(demo, long, make_prompt_cache(demo[0]))


@pytest.fixture
def first(demo, texts):
    """The cache behind the first turn."""
    cache = make_prompt_cache(demo[0])
    marks(demo, texts[0], cache, 7)
    return cache


def only_tokens(pairs):
    return [token for token, _ in pairs]


def test_a_cache_from_a_file_goes_on_in_another_thread(
    demo, texts, first, whole, tmp_path
):
    file = tmp_path / "chat.safetensors"
    save_prompt_cache(file, first, model=demo[0])
    cache, found = load_prompt_cache(file, model=demo[0]), []
    work = Thread(target=lambda: found.extend(marks(demo, texts[1], cache)))
    work.start()
    work.join()
    assert found == whole


def test_a_cache_from_a_file_drafts_as_if_it_had_stayed(
    demo, texts, first, whole, tmp_path
):
    file = tmp_path / "chat.safetensors"
    save_prompt_cache(file, first, {"turn": "1"}, model=demo[0])
    cache, metadata = load_prompt_cache(file, True, model=demo[0])
    assert metadata == {"turn": "1"} and marks(demo, texts[1], cache) == whole
    assert marks(demo, texts[1], first) == whole  # the saved one goes on too


def test_mlx_lm_reads_the_file_and_its_own_is_read(demo, texts, first, whole, tmp_path):
    ours, theirs = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_prompt_cache(ours, first, model=demo[0])
    lm_save(str(theirs), first)
    steps = mlx_lm.stream_generate(*demo, texts[1], 30, prompt_cache=lm_load(str(ours)))
    assert [r.token for r in steps] == only_tokens(whole)
    cache = load_prompt_cache(theirs, model=demo[0])
    assert only_tokens(marks(demo, texts[1], cache)) == only_tokens(whole)


def test_a_file_without_a_drafters_state_has_none_beside_it(demo, first, tmp_path):
    file = tmp_path / "chat.safetensors"
    save_prompt_cache(file, first, model=demo[0])
    assert len(list(tmp_path.iterdir())) == 2
    save_prompt_cache(file, first, model=demo[0], mtp=None)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("mtp", [None, "auto", 2, NGramDrafter()])
def test_any_decoding_goes_on_from_a_file(demo, texts, first, whole, tmp_path, mtp):
    file = tmp_path / "chat.safetensors"
    save_prompt_cache(file, first, model=demo[0], mtp=mtp)
    cache = load_prompt_cache(file, model=demo[0], mtp=mtp)
    assert only_tokens(marks(demo, texts[1], cache, mtp=mtp)) == only_tokens(whole)


def test_a_state_of_another_drafter_is_left_out(qwen_head, tmp_path):
    file, caches = str(tmp_path / "prefix.safetensors"), qwen_head.target.make_cache()
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, 3)
    assert not decoder.load_prefix(file, caches)
    list(decoder.stream(random_prompt(9, 128, 1), max_tokens=5, caches=caches))
    decoder.save_prefix(file, caches)
    assert decoder.load_prefix(file, caches)
    other = as_target(tiny_qwen(hidden=32))
    wide = as_target(tiny_qwen(seed=5))
    for target, drafter in (
        (other, random_head(other, hidden=32, mtp={"num_key_value_heads": 1})),
        (wide, random_head(wide, mtp={"mtp_num_hidden_layers": 2})),
        (qwen_head.target, NGramDrafter()),
    ):
        loads = SpeculativeDecoder(target, drafter, 3).load_prefix(file, caches)
        assert not loads, drafter.name
    # Nothing is known of new ones.
    decoder.save_prefix(file, qwen_head.target.make_cache())
    assert not decoder.load_prefix(file, caches)


@pytest.mark.parametrize(
    "make",
    [
        KVCache,
        lambda: RotatingKVCache(8),
        lambda: RotatingKVCache(64, keep=4),
        lambda: QuantizedKVCache(group_size=32),
    ],
)
@pytest.mark.parametrize("taken", [1, 6, 24])
def test_every_class_of_cache_survives_a_file(llama, tmp_path, make, taken):
    """Also of a turn that was broken off in the middle of a block."""
    model, file = llama, tmp_path / "chat.safetensors"
    prompt, more = random_prompt(20, 128, 1), random_prompt(5, 128, 2)
    expected, caches = ([make() for _ in range(2)] for _ in range(2))
    truth = plain_tokens(model, prompt, 25, expected)
    decoder = SpeculativeDecoder(as_target(model), NGramDrafter(), 3)
    steps = decoder.stream(prompt, caches=caches)
    assert [s.token for s in islice(steps, taken)] == truth[:taken]
    steps.close()
    save_prompt_cache(file, caches, model=model, mtp=decoder)
    loaded = load_prompt_cache(file, model=model, mtp=decoder)
    again = [make() for _ in range(2)]
    plain_tokens(model, prompt, taken, again)
    rest = decoder.stream(more, max_tokens=12, caches=loaded)
    assert [s.token for s in rest] == plain_tokens(model, more, 12, again)


def test_drafts_of_another_depth_know_the_turn(demo, texts, first):
    long = make_prompt_cache(demo[0])
    said = only_tokens(marks(demo, texts[0], make_prompt_cache(demo[0]), 7))
    expected = marks(demo, texts[0] + said + texts[1], long, mtp=2)
    assert marks(demo, texts[1], first, mtp=2) == expected


def test_copies_of_a_shared_beginning_go_on_by_themselves(demo, texts, first, whole):
    other = demo[1].encode("    print(path)\n")
    copies = [copy_prompt_cache(first, model=demo[0]) for _ in range(2)]
    assert marks(demo, other, copies[0]) == marks(
        demo, other, copy_prompt_cache(first, model=demo[0])
    )
    assert marks(demo, texts[1], copies[1]) == whole
    assert marks(demo, texts[1], first) == whole
    plain = copy_prompt_cache(first, model=demo[0], mtp=None)
    assert [c.offset for c in plain[3:4]] == [c.offset for c in first[3:4]]


def test_a_cache_of_an_open_stream_is_not_saved_or_copied(demo, texts, tmp_path):
    cache = make_prompt_cache(demo[0])
    stream = stream_generate(*demo, texts[0], prompt_cache=cache, mtp=3)
    next(stream)
    for call in (
        lambda: save_prompt_cache(tmp_path / "a.safetensors", cache, model=demo[0]),
        lambda: copy_prompt_cache(cache, model=demo[0]),
    ):
        with pytest.raises(ValueError, match="still open"):
            call()
    stream.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["qwen", "llama"])
@pytest.mark.parametrize("taken", [3, 8])
def test_case_11_a_prompt_that_shares_half_of_another(request, family, taken):
    """Twice the first one with a second in between, stopped inside a block."""
    model = request.getfixturevalue(family)
    target = as_target(model)
    decoder = SpeculativeDecoder(target, NGramDrafter(), 3)
    shared, ends = random_prompt(12, 128, 1), [random_prompt(9, 128, i) for i in (2, 3)]
    caches = target.make_cache()
    decoder.feed(shared, caches)
    mark, answers = decoder.snapshot(caches), []
    for end in (ends[0], ends[1], ends[0]):
        decoder.restore(caches, mark)
        steps = decoder.stream(end, max_tokens=40, caches=caches)
        answers.append([s.token for s in islice(steps, taken)])
        steps.close()
    assert answers[0] == answers[2] == plain_tokens(model, shared + ends[0], taken)
    assert answers[1] == plain_tokens(model, shared + ends[1], taken)


@pytest.mark.parametrize("shared", [4, 18])
@pytest.mark.parametrize("drafts", [True, False])
def test_case_15_a_window_goes_back_to_what_it_has_overwritten(llama, shared, drafts):
    target = as_target(llama)
    decoder = SpeculativeDecoder(target, NGramDrafter(), 3)
    turn, more = random_prompt(20, 128, 1), random_prompt(6, 128, 2)
    caches = [RotatingKVCache(8) for _ in range(2)]
    decoder.feed(turn[:shared], caches)
    mark = decoder.snapshot(caches)
    list(decoder.stream(turn[shared:], max_tokens=20, caches=caches))
    decoder.restore(caches, mark)
    assert caches[0].offset == shared
    cold = plain_tokens(
        llama, turn[:shared] + more, 20, [RotatingKVCache(8) for _ in range(2)]
    )
    if drafts:
        warm = [s.token for s in decoder.stream(more, max_tokens=20, caches=caches)]
    else:
        warm = plain_tokens(llama, more, 20, caches)
    assert warm == cold


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (BatchKVCache, KVCache),
        (partial(BatchRotatingKVCache, 16), partial(RotatingKVCache, 16)),
    ],
)
def test_a_padded_cache_goes_back_to_its_rows(llama, make, plain, padding):
    decoder = SpeculativeDecoder(as_target(llama), NGramDrafter(), 3)
    shared, more = random_prompt(12, 128, 1), random_prompt(5, 128, 2)
    caches, pad = [make([padding]) for _ in range(2)], [0] * padding
    empty = decoder.snapshot(caches)
    llama(mx.array([pad + shared]), cache=caches)
    mark = decoder.snapshot(caches)
    expected = plain_tokens(llama, shared + more, 8, [plain() for _ in range(2)])
    for _ in range(3):
        steps = decoder.stream(more, max_tokens=8, caches=caches)
        assert [step.token for step in steps] == expected
        decoder.restore(caches, mark)
    decoder.restore(caches, empty)
    steps = decoder.stream(pad + shared + more, max_tokens=8, caches=caches)
    assert [step.token for step in steps] == expected
