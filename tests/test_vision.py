"""Images on the MTP path: every token is the one that ``mlx_vlm`` decodes, and what is
kept of a prompt with images goes with it wherever it goes.
"""

import json
import sys
from dataclasses import replace
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache
from tiny import ScriptedDrafter, emitted, start_row

pytest.importorskip(
    "mlx_vlm",
    reason="Nothing of images is tested without mlx-vlm: pip install 'mlx-mtp[vision]'",
)

import mlx_vlm
from PIL import Image
from vision import (
    END,
    TALL,
    WIDE,
    image_inputs,
    their_tokens,
    tiny_vision,
    vision_config,
    vision_prompt,
    write_folder,
)

from mlx_mtp.batch import BatchIterator
from mlx_mtp.drafters import (
    DraftContext,
    DrafterMismatch,
    MTPHeadDrafter,
    NGramDrafter,
    VisionHeadDrafter,
    head_drafter,
)
from mlx_mtp.generation import find_decoder, stream_generate
from mlx_mtp.heads import UnsupportedHead
from mlx_mtp.heads.checkpoint import build_head, find_spec
from mlx_mtp.loading import LoadedHead, load_vision
from mlx_mtp.memory import Footprint, MemoryPolicy
from mlx_mtp.prompt_cache import (
    copy_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_mtp.round import Round
from mlx_mtp.scheduler import Scheduler
from mlx_mtp.session import Session
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.state import UnsupportedCache
from mlx_mtp.targets import (
    PlaceholderMismatch,
    Qwen35VisionTarget,
    VisionPrompt,
    as_target,
)

VOCAB = 128
PROMPTS = {
    "text": (12,),
    "image first": (WIDE, 6),
    "image in the middle": (5, WIDE, 7),
    "two images": (5, WIDE, 4, TALL, 9),
    "image last": (6, TALL, None),
    "video": (3, (2, 4, 6), 5),
}
DELTAS = {"text": 0, "image first": -5, "image in the middle": -5, "two images": -9}
COUNT = 40


class Tiny:
    """A model, its target, and a head that was never trained."""

    def __init__(self, moe):
        self.model = tiny_vision(moe=moe)
        self.target = as_target(self.model)
        config = vision_config(moe)
        mx.random.seed(3)
        self.head = build_head(config, find_spec(config))
        net = self.head.layers[0].self_attn
        for part, factor in ((net.q_norm, 3), (net.k_norm, 3), (net.o_proj, 2)):
            part.weight = factor * part.weight
        mx.eval(self.head.parameters())
        self.drafter = VisionHeadDrafter(self.head, self.target)
        self._known = {}

    def theirs(self, name, count=COUNT):
        if (name, count) not in self._known:
            inputs = image_inputs(*PROMPTS[name])
            self._known[name, count] = their_tokens(self.model, inputs, count)
        return self._known[name, count]

    def prompt(self, name):
        return vision_prompt(self.model, *PROMPTS[name])

    def scripted(self, name, plan):
        return ScriptedDrafter(self.theirs(name), VOCAB, plan)


@pytest.fixture(scope="module")
def tiny():
    return Tiny(moe=False)


@pytest.fixture(scope="module")
def sparse():
    return Tiny(moe=True)


def decode(decoder, prompt, count=COUNT, **options):
    return [s.token for s in decoder.stream(prompt, max_tokens=count, **options)]


# Tokens


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_are_those_of_mlx_vlm(tiny, name, depth):
    prompt, expected = tiny.prompt(name), tiny.theirs(name)
    for drafter in (tiny.drafter, tiny.scripted(name, [depth, 0, 1, depth])):
        decoder = SpeculativeDecoder(tiny.target, drafter, depth)
        steps = decoder.stream(prompt, max_tokens=COUNT)
        assert [step.token for step in steps] == expected
        assert steps.telemetry.fallback is None
    assert steps.telemetry.accepted > depth


@pytest.mark.parametrize("name", ["text", "two images"])
def test_tokens_of_a_mixture_of_experts(sparse, name):
    for drafter in (sparse.drafter, sparse.scripted(name, [3, 0, 1])):
        decoder = SpeculativeDecoder(sparse.target, drafter, 3)
        assert decode(decoder, sparse.prompt(name)) == sparse.theirs(name)


@pytest.mark.parametrize("name", DELTAS)
def test_the_distance_counts(tiny, name):
    """Without it a stream goes wrong, so the other tests can fail."""
    decoder = SpeculativeDecoder(tiny.target, tiny.scripted(name, [2]), 3)
    expected, caches = tiny.theirs(name), tiny.target.make_cache()
    prompt = tiny.prompt(name)
    decode(decoder, prompt, 5, caches=caches)
    assert caches[-1][0].tolist() == [DELTAS[name]]
    caches[-1][0] = mx.zeros((1,), mx.int32)
    more = decode(decoder, expected[5:6], COUNT - 6, caches=caches)
    assert (more == expected[6:]) == (DELTAS[name] == 0)


def test_tokens_with_a_prompt_in_pieces_of_any_size(tiny):
    name = "two images"
    prompt, decoder = tiny.prompt(name), SpeculativeDecoder(tiny.target, tiny.drafter)
    for size in (1, 4, 7, 64):
        tokens = decode(decoder, prompt, prefill_step_size=size)
        assert tokens == tiny.theirs(name)


def row_by_row(tokens, logits):
    return logits


class Broken(ScriptedDrafter):
    """Fails in every round after the first."""

    def propose(self, state, context):
        raise RuntimeError("broken")


def test_tokens_of_split_rounds_and_of_plain_steps(tiny):
    name = "two images"
    expected, prompt = tiny.theirs(name), tiny.prompt(name)
    decoder = SpeculativeDecoder(tiny.target, tiny.drafter, 3)
    assert decode(decoder, prompt, processors=[row_by_row]) == expected
    decoder = SpeculativeDecoder(tiny.target, Broken(expected, VOCAB), 3)
    steps = decoder.stream(prompt, max_tokens=COUNT)
    assert [step.token for step in steps] == expected
    assert steps.telemetry.step_downs and "broken" in steps.telemetry.fallback


def test_tokens_of_a_target_that_cannot_be_traced(tiny):
    class Eager(Qwen35VisionTarget):
        def forward(self, tokens, views):
            if isinstance(views[1].offset, mx.array):
                raise ValueError("no")
            return super().forward(tokens, views)

    name = "two images"
    decoder = SpeculativeDecoder(Eager(tiny.model), tiny.scripted(name, [2, 0, 3]), 3)
    steps = decoder.stream(tiny.prompt(name), max_tokens=COUNT)
    assert [step.token for step in steps] == tiny.theirs(name)
    assert "eager" in steps.telemetry.fallback


# State


def whole(model, inputs, more):
    """Logits ``(L, V)`` of a prompt and what follows, in one forward without cache."""
    inputs = dict(inputs)
    ids = mx.concatenate([inputs.pop("input_ids"), mx.array([more])], axis=1)
    found = model.get_input_embeddings(ids, inputs.pop("pixel_values", None), **inputs)
    return model.language_model(
        ids, inputs_embeds=found.inputs_embeds, position_ids=found.position_ids
    ).logits[0]


# The two best logits of all their 400 tokens are at least 8e-4 apart, so that no device
# rounds them into another order.
@pytest.mark.parametrize(
    "parts", [(17,), (5, WIDE, 4, TALL, 10)], ids=["text", "two images"]
)
def test_200_rounds_of_any_acceptance_equal_a_recomputation(tiny, parts):
    """Every row of logits, and the caches behind the last round."""
    depth, inputs = 3, image_inputs(*parts)
    plan = np.random.default_rng(5).choice(4, 200, p=[0.4, 0.3, 0.2, 0.1]).tolist()
    total = sum(plan) + len(plan) + depth + 2
    truth = their_tokens(tiny.model, inputs, total)
    drafter = ScriptedDrafter(truth, VOCAB, plan)
    round_ = Round(tiny.target, drafter, depth, greedy=True)
    caches, prompt = tiny.target.make_cache(), vision_prompt(tiny.model, *parts)
    length = prompt.tokens.size
    tiny.target.prefill(prompt.tokens[None, :-1], caches, prompt.part(0, length - 1))
    state, _ = start_row(round_, prompt.tokens[-1:].tolist(), 768, caches=caches)
    state["offset"] = state["offset"] + length - 1
    expected = whole(tiny.model, inputs, truth[:-1])
    at = 0  # tokens behind the prompt that are in the caches
    for accepts in plan:
        state, result = round_(state, 768)
        assert emitted(result.counts)[0] == truth[at + 1 : at + accepts + 2]
        rows = expected[length + at :][: accepts + 1]
        assert mx.allclose(result.logits[0, : accepts + 1], rows, 1e-3, 1e-3)
        at += accepts + 1
    assert round_.traces == 1
    fresh = tiny.target.make_cache()
    tiny.target.prefill(prompt.tokens[None], fresh, prompt.part(0, length))
    tiny.target.prefill(mx.array([truth[:at]]), fresh)
    pairs = zip(tiny.target.adapters, caches, state["leaves"], strict=True)
    for adapter, cache, leaves in pairs:
        adapter.release(cache, leaves, length + at, state["steps"])
    check_equal(caches, fresh)


def contents(entry):
    if hasattr(entry, "cache"):
        return entry.cache
    return [x[:, :, : entry.offset] for x in (entry.keys, entry.values)]


def check_equal(caches, others):
    for ours, theirs in zip(caches, others, strict=True):
        for x, y in zip(contents(ours), contents(theirs), strict=True):
            assert mx.allclose(x, y, 1e-3, 1e-3)


def test_a_stream_that_ends_anywhere_leaves_prompt_and_taken_tokens(tiny):
    name = "two images"
    prompt, tokens = tiny.prompt(name), tiny.theirs(name)
    length = prompt.tokens.size
    decoder = SpeculativeDecoder(tiny.target, tiny.scripted(name, [2, 3, 0, 1]), 3)
    fresh = tiny.target.make_cache()
    tiny.target.prefill(prompt.tokens[None], fresh, prompt.part(0, length))
    for taken in range(1, 10):
        caches = tiny.target.make_cache()
        steps = decoder.stream(prompt, caches=caches)
        assert [step.token for step in islice(steps, taken)] == tokens[:taken]
        assert all(entry.empty() for entry in caches)
        steps.close()
        tiny.target.prefill(mx.array([tokens[taken - 1 : taken]]), fresh)
        check_equal(caches, fresh)


def test_an_error_in_the_prompt_leaves_what_was_read(tiny):
    """The distance as well: text goes on where the known part of the prompt ends."""

    class Fails(Qwen35VisionTarget):
        left = 3

        def prefill(self, tokens, caches, part=None):
            out = super().prefill(tokens, caches, part)
            self.left -= 1
            if self.left < 0:
                raise MemoryError("none left")
            return out

    target, prompt = Fails(tiny.model), tiny.prompt("two images")
    caches, fresh = target.make_cache(), target.make_cache()
    steps = SpeculativeDecoder(target, NGramDrafter(), 2).stream(
        prompt, caches=caches, prefill_step_size=7
    )
    with pytest.raises(MemoryError):
        next(steps)
    tiny.target.prefill(prompt.tokens[None, :21], fresh, prompt.part(0, 21))
    assert fresh[-1][0].tolist() == [-5]
    check_equal(caches, fresh)


# The head


def head_rows(tiny, embeds, hidden, positions):
    """What the head makes of rows ``(N, H)`` at ``positions`` ``(3, N)``: its keys
    ``(heads, N, D)`` and its output, by ``mlx_vlm``'s rotation."""
    head, layer = tiny.head, tiny.head.layers[0]
    net, rotary = layer.self_attn, tiny.target.trunk.layers[1].self_attn.rotary_emb
    parts = [head.pre_fc_norm_embedding(embeds), head.pre_fc_norm_hidden(hidden)]
    x = head.fc(mx.concatenate(parts, axis=-1))
    y, size = layer.input_layernorm(x)[None], net.head_dim
    q, gate = mx.split(net.q_proj(y).reshape(1, -1, net.heads, 2 * size), 2, axis=-1)
    k, v = (p(y).reshape(1, -1, net.kv_heads, size) for p in (net.k_proj, net.v_proj))
    q, k = (z.transpose(0, 2, 1, 3) for z in (net.q_norm(q), net.k_norm(k)))
    q, k = rotary.apply_rotary(q, k, mx.array(positions)[:, None])
    y = mx.fast.scaled_dot_product_attention(
        q, k, v.transpose(0, 2, 1, 3), scale=net.scale, mask="causal"
    )
    y = y.transpose(0, 2, 1, 3).reshape(x.shape[0], -1)
    x = x + net.o_proj(y * mx.sigmoid(gate.reshape(y.shape)))
    return k[0], head.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


def rows_of(tiny, name, tokens):
    """Of a prompt and ``tokens``: embeddings, hidden rows and positions, by their own
    code, as if all of it were one prompt."""
    inputs = image_inputs(*PROMPTS[name])
    ids = mx.concatenate([inputs["input_ids"], mx.array([tokens])], axis=1)
    prompt = VisionPrompt.of(tiny.model, **{**inputs, "input_ids": ids})
    caches, part = tiny.target.make_cache(), prompt.part(0, ids.size)
    hidden = tiny.target.prefill(ids, caches, part).hidden
    return prompt.embeds[0], hidden[0], prompt.positions


@pytest.mark.parametrize(("size", "limit"), [(5, 9), (64, 9), (64, 99)])
@pytest.mark.parametrize("name", ["image in the middle", "two images"])
def test_the_head_is_at_the_positions_of_its_target(tiny, name, size, limit):
    """Its memory, and drafts at three depths, behind a prompt in pieces, rounds, and
    a pause."""
    decoder = SpeculativeDecoder(tiny.target, tiny.drafter, 3)
    caches, prompt = tiny.target.make_cache(), tiny.prompt(name)
    count = 9
    steps = decoder.stream(
        prompt, max_tokens=limit, caches=caches, prefill_step_size=size
    )
    tokens = [step.token for step in islice(steps, count)]
    steps.close()
    prefix = decoder._prefixes[caches[0]]
    embeds, hidden, positions = rows_of(tiny, name, tokens)
    embeds = embeds[1:]
    keys, _ = head_rows(tiny, embeds, hidden[:-1], positions[:, :-1])
    (pair, *_), offset, delta = prefix.draft_state
    assert offset.tolist() == [prompt.tokens.size + count - 1]
    assert delta.tolist() == [DELTAS[name]]
    assert mx.allclose(pair[0][0, :, : offset.item()], keys, 1e-3, 1e-4)
    context = DraftContext(
        mx.array([[7]]), mx.array([1]), prefix.hidden, 256, 3, greedy_draw
    )
    drafts, _ = tiny.drafter.propose(prefix.draft_state, context)
    token, expected = 7, []
    for _ in range(3):
        embeds = mx.concatenate([embeds, tiny.target.embed(mx.array([token]))])
        _, out = head_rows(tiny, embeds, hidden, positions)
        token = mx.argmax(tiny.target.logits(out[-1])).item()
        expected.append(token)
        hidden = mx.concatenate([hidden, out[-1:]])
        positions = np.append(positions, positions[:, -1:] + 1, axis=1)
    assert drafts.tokens.tolist() == [expected]


def greedy_draw(logits, i):
    return mx.argmax(logits, axis=-1).astype(mx.int32), None


def test_a_head_of_text_is_refused(tiny):
    with pytest.raises(DrafterMismatch, match="use a VisionHeadDrafter"):
        SpeculativeDecoder(tiny.target, MTPHeadDrafter(tiny.head, tiny.target), 2)
    assert type(head_drafter(tiny.head, tiny.target)) is VisionHeadDrafter


# Turns


class Talk:
    """A conversation of several turns, some with images, as ``mlx_vlm`` decodes it:
    all of it anew each turn."""

    TURNS = ((5, WIDE, 7), (6,), (3, TALL, 4), (2,))

    def __init__(self, model, count=12):
        self.inputs = [image_inputs(*x, seed=7 * i) for i, x in enumerate(self.TURNS)]
        self.tokens, known = [], {}
        for inputs in self.inputs:
            for name, x in inputs.items():
                axis = int(name == "input_ids")
                parts = [known[name], x] if name in known else [x]
                known[name] = mx.concatenate(parts, axis)
            self.tokens.append(their_tokens(model, known, count))
            ids = [known["input_ids"], mx.array([self.tokens[-1]])]
            known["input_ids"] = mx.concatenate(ids, axis=1)


@pytest.fixture(scope="module")
def talk(tiny):
    return Talk(tiny.model)


def turn(decoder, model, talk, i, caches):
    prompt = VisionPrompt.of(model, **talk.inputs[i])
    return decode(decoder, prompt, 12, caches=caches)


@pytest.mark.parametrize("drafter", ["head", "ngram"])
def test_turns_with_and_without_images(tiny, talk, drafter):
    drafter = tiny.drafter if drafter == "head" else NGramDrafter()
    decoder, caches = SpeculativeDecoder(tiny.target, drafter), tiny.target.make_cache()
    for i, delta in enumerate((-5, -5, -9, -9)):
        assert turn(decoder, tiny.model, talk, i, caches) == talk.tokens[i]
        assert caches[-1][0].tolist() == [delta]
    if drafter is tiny.drafter:
        assert decoder._prefixes[caches[0]].draft_state[-1].tolist() == [-9]


def test_a_later_turn_of_plain_ids(tiny, talk):
    decoder = SpeculativeDecoder(tiny.target, tiny.drafter)
    caches = tiny.target.make_cache()
    turn(decoder, tiny.model, talk, 0, caches)
    ids = talk.inputs[1]["input_ids"][0]
    assert decode(decoder, ids, 12, caches=caches) == talk.tokens[1]


def test_copies_files_and_snapshots_keep_the_distance(tiny, talk, tmp_path):
    tiny.model.mtp_head = LoadedHead(tiny.head, "test")
    decoder = find_decoder(tiny.model, "auto", 3)
    caches, file = decoder.target.make_cache(), tmp_path / "talk.safetensors"
    turn(decoder, tiny.model, talk, 0, caches)
    save_prompt_cache(file, caches, model=tiny.model)
    mark = decoder.snapshot(caches)
    copy = copy_prompt_cache(caches, model=tiny.model)
    loaded = load_prompt_cache(file, model=tiny.model)
    state = decoder._prefixes[loaded[0]].draft_state
    assert state[-1].tolist() == [-5]
    turn(decoder, tiny.model, talk, 2, caches)
    assert caches[-1][0].tolist() == [-9]
    decoder.restore(caches, mark)
    for others in (caches, copy, loaded):
        assert others[-1][0].tolist() == [-5]
        for i in (1, 2):
            assert turn(decoder, tiny.model, talk, i, others) == talk.tokens[i]


def test_a_prompt_that_is_fed_first(tiny, talk):
    decoder = SpeculativeDecoder(tiny.target, tiny.drafter)
    caches = tiny.target.make_cache()
    prompt = VisionPrompt.of(tiny.model, **talk.inputs[0])
    decoder.feed(prompt, caches, prefill_step_size=9)
    decoder.feed(talk.tokens[0], caches)
    assert turn(decoder, tiny.model, talk, 1, caches) == talk.tokens[1]


# Batches


class Knows(ScriptedDrafter):
    """Has a script for each prompt."""

    def __init__(self, scripts, plan):
        super().__init__([], VOCAB, plan)
        self.scripts = scripts

    def begin(self, prompt, capacity):
        self.truth = self.scripts.get(tuple(prompt[0].tolist()), [])
        return super().begin(prompt, capacity)


@pytest.mark.parametrize("drafter", ["head", "script"])
def test_rows_with_unlike_distances(tiny, drafter):
    """Some join while others are on their way, and one has processors."""
    prompts = {name: tiny.prompt(name) for name in PROMPTS}
    scripts = {tuple(p.tokens.tolist()): tiny.theirs(n) for n, p in prompts.items()}
    drafter = tiny.drafter if drafter == "head" else Knows(scripts, [3, 0, 2])
    batch = BatchIterator(
        SpeculativeDecoder(tiny.target, drafter, 3), prefill_step_size=16
    )
    ids, found, waiting = {}, {}, list(prompts)
    while waiting or len(batch):
        if waiting:
            name = waiting.pop()
            options = {"processors": [row_by_row]} if name == "image last" else {}
            ids[batch.add(prompts[name], max_tokens=COUNT, **options)] = name
        for out in next(batch):
            assert out.error is None
            found.setdefault(ids[out.id], []).extend(s.token for s in out.steps)
    assert found == {name: tiny.theirs(name) for name in PROMPTS}
    assert batch.row_rounds > batch.rounds


def test_requests_of_another_thread(tiny):
    names = ("two images", "text", "video")
    decoder = SpeculativeDecoder(tiny.target, tiny.drafter, 3)
    with Scheduler(decoder) as scheduler:
        handles = [scheduler.submit(tiny.prompt(n), max_tokens=COUNT) for n in names]
        assert [list(h) for h in handles] == [tiny.theirs(n) for n in names]


# The public way


def write_and_load(folder, **form):
    write_folder(folder, **form)
    return load_vision(folder, probe=False)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return write_and_load(tmp_path_factory.mktemp("vision"))


TEXT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"


def processed(processor, text=TEXT):
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
    return mlx_vlm.prepare_inputs(processor, [Image.fromarray(pixels)], prompts=text)


def test_an_image_through_processor_head_and_stream(loaded):
    model, processor = loaded
    inputs = processed(processor)
    prompt = VisionPrompt.of(model, **inputs)
    del inputs["attention_mask"]
    expected = their_tokens(model, inputs, 24)
    assert model.mtp_head.source == "mtp.safetensors"
    stop = expected[20]
    for mtp in ("auto", 2, None, NGramDrafter()):
        rows = list(stream_generate(model, processor, prompt, 24, mtp=mtp))
        assert [r.token for r in rows] == expected
        assert rows[-1].prompt_tokens == prompt.tokens.size
        assert (rows[-1].mtp.rounds > 0) == (mtp is not None)
    model.config.eos_token_id = [1, stop]
    *_, last = stream_generate(model, processor, prompt, 24)
    assert (last.token, last.finish_reason) == (stop, "stop")


@pytest.mark.parametrize("moe", [False, True])
def test_checkpoints_as_published(tmp_path, moe):
    """Dense and with experts: the same model and head as from a converted one."""
    found = []
    for published in (False, True):
        folder = tmp_path / str(published)
        folder.mkdir()
        model, processor = write_and_load(folder, moe=moe, published=published)
        weights = [*tree_flatten(model.parameters())]
        weights += tree_flatten(model.mtp_head.head.parameters())
        inputs = processed(processor)
        rows = stream_generate(model, processor, VisionPrompt.of(model, **inputs), 12)
        rows = list(rows)
        assert rows[-1].mtp.rounds > 0 and rows[-1].mtp.fallback is None
        found.append((weights, [row.token for row in rows]))
    del inputs["attention_mask"]
    (weights, tokens), (others, more) = found
    assert tokens == more == their_tokens(model, inputs, 12)
    for (name, x), (other, y) in zip(weights, others, strict=True):
        assert name == other and mx.allclose(x, y, atol=1e-6), name


def test_a_model_without_a_head_says_so(loaded):
    model, processor = loaded
    head, model.mtp_head = model.mtp_head, None
    rows = list(stream_generate(model, processor, "How many?", 8))
    assert rows[-1].mtp.fallback == "the model has no MTP head"
    assert rows[-1].mtp.rounds == 0
    model.mtp_head = head
    assert [r.token for r in rows] == [
        r.token for r in stream_generate(model, processor, "How many?", 8)
    ]


def test_a_session_is_text_with_and_without_a_head(loaded):
    model, processor = loaded
    for message in ("Hello", "And now?"):
        replies = []
        for mtp in ("auto", None):
            session = Session(model, processor, mtp=mtp, max_tokens=9)
            session.respond("Hi")
            reply = session.respond(message)
            replies.append(reply.reasoning + reply.text)
        assert replies[0] == replies[1] != ""


def test_max_kv_size_changes_nothing(loaded):
    """As with every model that makes its own caches."""
    model, processor = loaded
    prompt = VisionPrompt.of(model, **processed(processor))
    both = (
        stream_generate(model, processor, prompt, 9, max_kv_size=n) for n in (8, None)
    )
    assert len({tuple(r.token for r in rows) for rows in both}) == 1


def test_quantised_keys_and_a_memory_policy(loaded):
    model, processor = loaded
    prompt = VisionPrompt.of(model, **processed(processor))
    start = prompt.tokens.size + 7
    found = [
        [
            r.token
            for r in stream_generate(
                model,
                processor,
                prompt,
                20,
                mtp=mtp,
                kv_bits=8,
                kv_group_size=32,
                quantized_kv_start=start,
                memory=MemoryPolicy(2**33, "fail"),
            )
        ]
        for mtp in (None, 3)
    ]
    assert found[0] == found[1]


def test_a_plan_knows_the_sizes_of_its_text_part(tiny, qwen):
    plans = [
        Footprint(x, NGramDrafter()).plan(512, 3)
        for x in (tiny.target, as_target(qwen))
    ]
    assert plans[0].workspace == plans[1].workspace


def test_what_does_not_fit_is_a_named_error(loaded, qwen, monkeypatch):
    model, processor = loaded
    inputs = processed(processor)
    prompt = VisionPrompt.of(model, **inputs)
    with pytest.raises(ValueError, match="Qwen35Target takes no images"):
        VisionPrompt.of(qwen, **inputs)
    with pytest.raises(ValueError, match="prompt has images, but a Qwen35Target takes"):
        SpeculativeDecoder(as_target(qwen), NGramDrafter(), 2).stream(prompt)
    with pytest.raises(ValueError, match=r"a model of mlx_lm.* takes none"):
        next(stream_generate(qwen, processor, prompt, mtp=None))
    with pytest.raises(ValueError, match="alone: draft_model"):
        next(stream_generate(model, processor, prompt, draft_model=qwen))
    caches = as_target(model).make_cache()[:-1]
    with pytest.raises(ValueError, match="has 4 entries but the model has 5"):
        next(stream_generate(model, processor, prompt, prompt_cache=caches))
    monkeypatch.setattr(model.config, "model_type", "qwen9_vl")
    with pytest.raises(UnsupportedHead, match="mlx_vlm model type qwen9_vl has no tar"):
        VisionPrompt.of(model, **inputs)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    with pytest.raises(ImportError, match=r"pip install 'mlx-mtp\[vision\]'"):
        load_vision("anything")


TWO = image_inputs(5, WIDE, 4, TALL, 9)
GRIDS, IDS, PIXELS = (
    TWO[name] for name in ("image_grid_thw", "input_ids", "pixel_values")
)


def tokens_moved(start, stop, to):
    """The prompt with some of its tokens elsewhere."""
    row = IDS[0].tolist()
    part, rest = row[start:stop], row[:start] + row[stop:]
    return {"input_ids": mx.array([rest[:to] + part + rest[to:]])}


def grid(*rows):
    return {"image_grid_thw": mx.array(rows)}


PLACE, BLOCK = PlaceholderMismatch, "Block {} of image placeholders has {} tokens but"
BAD_INPUTS = [
    ({"image_grid_thw": None}, PLACE, "pixel_values is given but image_grid_thw is mi"),
    ({"pixel_values": None}, PLACE, "image_grid_thw is given but pixel_values is miss"),
    ({"image_grid_thw": None, "pixel_values": None}, PLACE, BLOCK.format(1, 10)),
    ({"input_ids": IDS[:, :20]}, PLACE, BLOCK.format(2, 0)),
    (tokens_moved(8, 9, 25), PLACE, BLOCK.format(1, 9)),
    (tokens_moved(21, 31, 0), PLACE, BLOCK.format(1, 8) + " must have 10"),
    (grid(TALL, WIDE), PLACE, BLOCK.format(1, 10) + " must have 8"),
    (grid(WIDE), ValueError, r"pixel_values must have shape \(40, 96\),.* \(72, 96\)"),
    (
        grid(WIDE, (1, 8, 0)),
        ValueError,
        r"image_grid_thw must .*positive.* \[1, 8, 0\]",
    ),
    (
        grid(WIDE, (1, -8, -4)),
        ValueError,
        r"image_grid_thw must .* but has \[1, -8, -4",
    ),
    (grid(WIDE, (1, 32, 1)), ValueError, "image_grid_thw must .* multiples of 2"),
    (grid(WIDE + TALL), ValueError, r"image_grid_thw must have shape \(N, 3\)"),
    ({"image_grid_thw": GRIDS[0]}, ValueError, r"\(N, 3\),.* but has shape \(3,\)"),
    (
        {"image_grid_thw": GRIDS[:0]},
        ValueError,
        r"pixel_values must have shape \(0, 96",
    ),
    (
        {"image_grid_thw": GRIDS / 2},
        TypeError,
        "image_grid_thw must not have dtype .*fl",
    ),
    (
        {"image_grid_thw": "2"},
        TypeError,
        "image_grid_thw must be an array but is a str",
    ),
    (
        {"pixel_values": PIXELS[:-1]},
        ValueError,
        r"pixel_values .* has shape \(71, 96\)",
    ),
    ({"pixel_values": PIXELS[:, :-1]}, ValueError, r"pixel_values .* shape \(72, 95\)"),
    ({"pixel_values": PIXELS[None]}, ValueError, r"pixel_values .* \(1, 72, 96\)"),
    (
        {"pixel_values": PIXELS.astype(mx.int32)},
        TypeError,
        "pixel_values must not have",
    ),
    ({"pixel_values": [["a"]]}, TypeError, "pixel_values must be an array but is a li"),
    ({"pixel_values_videos": PIXELS}, ValueError, "are both given, but mlx_vlm reads"),
    (
        {"video_grid_thw": GRIDS},
        PLACE,
        "video_grid_thw is given but pixel_values_videos",
    ),
    ({"input_ids": IDS[0]}, ValueError, r"shape \(1, P\), but has shape \(40,\)"),
    ({"input_ids": IDS[:, :0]}, ValueError, r"shape \(1, P\), but has shape \(1, 0\)"),
    ({"input_ids": IDS.astype(mx.float32)}, TypeError, "input_ids must not have dtype"),
    (
        {"input_ids": IDS + 8},
        ValueError,
        "input_ids has 131, outside of the vocabulary",
    ),
    (
        {"input_ids": IDS - 99},
        ValueError,
        "input_ids has -.*, outside of the vocabulary",
    ),
    ({"attention_mask": mx.zeros(IDS.shape)}, ValueError, "padded"),
    ({"attention_mask": np.zeros(IDS.shape)}, ValueError, "padded"),
    (
        {"attention_mask": mx.ones((1, 5))},
        ValueError,
        r"attention_mask must .* \(1, 5\)",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_INPUTS)
def test_inputs_that_do_not_fit_each_other(tiny, change, error, message):
    """Each has a message that names it, and the next prompt is read right."""
    with pytest.raises(error, match=r"\[VisionPrompt\].* " + message):
        VisionPrompt.of(tiny.model, **{**TWO, **change})
    decoder = SpeculativeDecoder(tiny.target, tiny.drafter, 3)
    assert (
        decode(decoder, tiny.prompt("two images"), 5) == tiny.theirs("two images")[:5]
    )


def test_inputs_may_be_arrays_of_numpy(tiny):
    inputs = {name: np.array(x) for name, x in TWO.items()}
    prompt, expected = VisionPrompt.of(tiny.model, **inputs), tiny.prompt("two images")
    assert mx.array_equal(prompt.embeds, expected.embeds)
    assert np.array_equal(prompt.positions, expected.positions)


def test_every_step_of_a_video_has_a_block(tiny):
    film = image_inputs(3, (2, 4, 6), 5)
    ids = film["input_ids"][0].tolist()
    end = ids.index(END)
    joint = mx.array([[*ids[:end], *ids[end + 2 :], 1, 1]])
    with pytest.raises(PlaceholderMismatch, match=r"Block 1 of video .* 12 .* have 6"):
        VisionPrompt.of(tiny.model, **{**film, "input_ids": joint})


def test_a_prompt_of_other_arrays_is_refused(tiny):
    prompt = tiny.prompt("two images")
    for change, error, message in (
        ({"tokens": [1, 2]}, TypeError, "tokens must be a mlx.core array of integer"),
        (
            {"tokens": prompt.embeds},
            TypeError,
            "tokens must .* but is mlx.core.float32",
        ),
        ({"tokens": prompt.tokens[None]}, ValueError, r"tokens must .* \(1, 40\)"),
        ({"embeds": prompt.tokens}, TypeError, "embeds must be a mlx.core array of fl"),
        (
            {"embeds": prompt.embeds[0]},
            ValueError,
            r"embeds must have shape \(1, 40, 64",
        ),
        (
            {"embeds": prompt.embeds[:, :-1]},
            ValueError,
            r"embeds must .* \(1, 39, 64\)",
        ),
        (
            {"positions": mx.array(prompt.positions)},
            TypeError,
            "positions must be a numpy",
        ),
        ({"positions": prompt.positions / 1}, TypeError, "positions must .* float64"),
        (
            {"positions": prompt.positions[:2]},
            ValueError,
            r"positions must .* \(2, 40\)",
        ),
        (
            {"positions": prompt.positions - 1},
            ValueError,
            "positions must not be negat",
        ),
    ):
        with pytest.raises(error, match=message):
            replace(prompt, **change)
    other = replace(prompt, embeds=prompt.embeds[..., :32])
    with pytest.raises(ValueError, match=r"embeddings of size 32 but those .* have 64"):
        SpeculativeDecoder(tiny.target, NGramDrafter()).stream(other)


def test_a_distance_that_is_lost_is_not_taken_as_zero(tiny, talk):
    decoder, caches = SpeculativeDecoder(tiny.target, tiny.drafter), []
    caches = tiny.target.make_cache()
    turn(decoder, tiny.model, talk, 0, caches)
    kept, length = caches[-1][0], caches[1].offset
    caches[-1][0] = None
    with pytest.raises(
        ValueError, match=f"holds {length} tokens but not their distance"
    ):
        turn(decoder, tiny.model, talk, 1, caches)
    caches[-1][0] = kept
    assert turn(decoder, tiny.model, talk, 1, caches) == talk.tokens[1]
    fresh = tiny.target.make_cache()
    fresh[-1][0] = kept  # of a conversation that is no longer there
    assert turn(decoder, tiny.model, talk, 0, fresh) == talk.tokens[0]


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified", "step3p7", "llama"])
def test_other_families_are_refused_before_they_are_read(tmp_path, model_type):
    write_folder(tmp_path)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "model_type": model_type}
    file.write_text(json.dumps(config))
    message = f"model type {model_type} has no target for images.* or use load for"
    with pytest.raises(UnsupportedHead, match=message):
        load_vision(tmp_path)


def test_a_checkpoint_of_text_is_refused(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vision_config": None}))
    with pytest.raises(ValueError, match="has no vision_config"):
        load_vision(tmp_path)


def test_caches_that_cannot_be_lent_are_refused(tiny):
    caches = tiny.target.make_cache()
    caches[1] = RotatingKVCache(max_size=16)
    decoder = SpeculativeDecoder(tiny.target, NGramDrafter())
    with pytest.raises(UnsupportedCache, match="RotatingKVCache cannot be used with"):
        decode(decoder, [1, 2, 3], caches=caches)
    assert all(cache.empty() for cache in caches)
