"""What the compiled round draws on real weights, against exact probabilities."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import rounds
from mlx.utils import tree_map
from scipy import stats

from mlx_mtp.round import Round
from mlx_mtp.sampling import SamplingParams

ALPHA = 1e-4  # how often a right round fails
LENGTH = 3  # tokens of a sequence
BATCH = 200
SLOTS = 256
FEW = 5  # cells with a lower expected count are one

# The demo model makes up a question: its digits are hard to guess.
TEXT = "<|im_start|>user\nWhat is "


def check(
    subject, depth: int, streams: int, *, draft_temperature=None, bias=None, **settings
) -> dict:
    """A chi-square test of the next tokens of ``streams`` streams of one prompt.

    Args:
        draft_temperature (float, optional): The drafts' own, so that more of them are
            rejected.
        bias (str, optional): A fault of ``BIASES``; then the test has to fail.
        settings: Arguments of ``SamplingParams``.
    """
    params = draft_params = SamplingParams(**settings)
    if draft_temperature is not None:
        draft_params = SamplingParams(draft_temperature)
    prompt = subject.tokenizer.encode(TEXT, add_special_tokens=False)
    round_ = rounds.make_round(subject.target, subject.drafter, depth, params)
    state = rounds.begin(round_, prompt, params, SLOTS, draft_params)
    if bias is not None:
        _make_biased(round_, BIASES[bias])
    context = [*prompt, state["tokens"][0, 0].item()]
    drawn, acceptance = draw(round_, state, streams)
    cells = expected_cells(subject.target, context, params, streams)
    p, freedom = _p_value(drawn, cells)
    return {
        "ok": (p > ALPHA) == (bias is None),
        "p": p,
        "cells": freedom + 1,
        "streams": streams,
        "acceptance": acceptance,
        "total_variation_found": _power(freedom, streams),
    }


def draw(round_: Round, state: dict, streams: int) -> tuple[np.ndarray, float]:
    """The next ``LENGTH`` tokens of ``streams`` copies of a stream, each with a key of
    its own, and the share of accepted drafts."""
    wide = tree_map(lambda x: mx.repeat(x, BATCH, axis=0), state)
    out, accepted = [], []
    for first in range(0, streams, BATCH):
        batch = {**wide, "keys": mx.random.split(mx.random.key(first), BATCH)}
        tokens = []
        for _ in range(LENGTH):  # at least one token each
            batch, result = round_(batch, SLOTS)
            counts = np.array(result.counts)
            accepted.append(counts[:, 0].mean())
            tokens.append(counts[:, 2:])
        tokens = np.concatenate(tokens, axis=1)
        order = np.argsort(tokens < 0, axis=1, kind="stable")[:, :LENGTH]
        out.append(np.take_along_axis(tokens, order, axis=1))
    return np.concatenate(out)[:streams], float(np.mean(accepted)) / round_.depth


def expected_cells(target, context, params, streams) -> dict[tuple, float]:
    """Expected counts of prefixes of the sequences, as long as they are frequent.

    A prefix with fewer than ``4 * FEW`` is not followed further. Its cell is the prefix
    itself; cells with fewer than ``FEW`` are left out.
    """
    cells: dict[tuple, float] = {}
    nodes = {(): float(streams)}
    for length in range(LENGTH):
        rows = mx.array([[*context, *prefix] for prefix in nodes])
        logits = target.prefill(rows, target.make_cache()).logits[:, -1]
        followed = {}
        for (prefix, count), row in zip(nodes.items(), np.array(logits), strict=True):
            for token, p in enumerate(shaped(row.astype(np.float64), params)):
                if count * p >= 4 * FEW and length < LENGTH - 1:
                    followed[(*prefix, token)] = count * p
                elif count * p >= FEW:
                    cells[(*prefix, token)] = count * p
        nodes = followed
        if not nodes:
            break
    return cells


def shaped(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, then top-k, then top-p, each renormalised; ties are kept."""
    p = _softmax(row / params.temperature)
    ordered = np.sort(p)[::-1]
    if params.top_k:
        p = np.where(p >= ordered[params.top_k - 1], p, 0.0)
        p /= p.sum()
    if params.top_p < 1:
        ordered = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(ordered), params.top_p)
        p = np.where(p >= ordered[last], p, 0.0)
    return p / p.sum()


def _softmax(z):
    p = np.exp(z - z.max())
    return p / p.sum()


def _p_value(drawn: np.ndarray, cells: dict[tuple, float]) -> tuple[float, int]:
    """The chi-square test; what is in no cell is one more. p and degrees of freedom."""
    observed = dict.fromkeys(cells, 0)
    for sequence in map(tuple, drawn.tolist()):
        prefixes = (sequence[:n] for n in range(1, LENGTH + 1))
        cell = next((prefix for prefix in prefixes if prefix in cells), None)
        if cell is not None:
            observed[cell] += 1
    counts, expected = np.array([*observed.values()]), np.array([*cells.values()])
    rest = len(drawn) - expected.sum()
    if rest >= FEW:
        counts = np.append(counts, len(drawn) - counts.sum())
        expected = np.append(expected, rest)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, counts.size - 1)), counts.size - 1


def _power(freedom: int, streams: int) -> float:
    """The distance in total variation that is found 99 times of 100, when half of the
    cells by weight are too frequent by one factor and the others too rare."""
    bar, low, high = stats.chi2.isf(ALPHA, freedom), 0.0, 1e5
    while high - low > 1e-3:
        middle = (low + high) / 2
        found = stats.ncx2.sf(bar, freedom, middle) > 0.99
        low, high = (low, middle) if found else (middle, high)
    return (high / streams) ** 0.5 / 2


# Faults, as changes of a proposal before acceptance.


def _make_biased(round_: Round, fault) -> None:
    accept = round_.accept
    round_.accept = lambda state, proposal, logits: accept(
        state, fault(proposal), logits
    )


def _shared_coin(proposal):
    """The final draw reuses the first coin, which a rejection has made large."""
    coins, final = proposal.uniforms[:, :-2], proposal.uniforms[:, -1:]
    coins = mx.concatenate([coins, coins[:, :1], final], axis=1)
    return proposal._replace(uniforms=coins)


def _small_coins(proposal):
    """Drafts are accepted 1 / 0.8 times as often as they should be."""
    coins, final = proposal.uniforms[:, :-2], proposal.uniforms[:, -2:]
    coins = mx.concatenate([0.8 * coins, final], axis=1)
    return proposal._replace(uniforms=coins)


BIASES = {
    "final draw shares the first coin": _shared_coin,
    "coins too small by 0.8": _small_coins,
}
