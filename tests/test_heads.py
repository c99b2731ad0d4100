"""Heads of every family: loaded from raw checkpoints and held to a reference."""

import warnings
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from head_families import FAMILIES, tiny_checkpoint
from mlx.utils import tree_flatten
from tiny import plain_tokens, random_prompt

from mlx_mtp.drafters import DraftContext, MTPHeadDrafter
from mlx_mtp.loading import load, load_head, probe_head, save_head
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target, takes_heads

DEPTH = 6  # past the windows of four


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


def test_rows_and_chained_rows_are_the_references(tiny):
    """Nine prompt rows, then rounds that keep one to four tokens, in any order."""
    rng = np.random.default_rng(0)
    counts, n = [1, 3, 2, *rng.integers(1, 5, 7).tolist()], 9
    tokens = rng.integers(0, 96, n + sum(counts) + 1)
    hidden = rng.normal(size=(n + sum(counts), 64))
    as_rows = lambda x: mx.array(x[None], mx.float32)  # noqa: E731
    drafter, prompt = tiny.drafter, mx.array(tokens[None, :n])
    state = drafter.begin(prompt, 64)
    following = mx.array(tokens[None, 1 : n + 1])
    state = drafter.prefill(state, following, as_rows(hidden[:n]), 64)
    for count in counts:
        rows = np.full((4, 64), 7.0)  # slots behind count hold anything
        rows[:count] = hidden[n : n + count]
        new = np.full(4, -1)
        new[:count] = tokens[n + 1 : n + 1 + count]
        n, seen = n + count, []

        def draw(row, i, seen=seen):
            seen.append(row)
            return mx.argmax(row, axis=-1).astype(mx.int32), None

        context = DraftContext(
            mx.array(new[None]), mx.array([count]), as_rows(rows), 64, DEPTH, draw
        )
        drafts, state = drafter.propose(state, context)
        expected = expected_logits(
            tiny.reference,
            len(drafter.head.chain),
            tokens[: n + 1],
            hidden[:n],
            np.array(drafts.tokens[0]),
        )
        ours = np.concatenate([np.array(row) for row in seen])
        assert np.abs(ours - expected).max() < 2e-4 * np.abs(expected).max()


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
