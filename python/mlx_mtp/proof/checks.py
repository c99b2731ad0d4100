"""What ``mlx-mtp verify`` checks. Each function gives its results; see ``verify``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from .. import reference
from ..context import bucket
from ..drafters import Drafts
from ..round import Round
from ..sampling import SamplingParams
from ..speculative import SpeculativeDecoder
from ..state import Position, classify
from . import statistics
from .streams import Restricted, Streams, drafter_of, draw_plain, own_logits

ALPHA = 1e-3  # how often all tests together fail although nothing is wrong
WIDTHS = range(1, 17)
IDS = 5  # of a reduced vocabulary
LENGTH = 3  # tokens that are enumerated
# Noise on log-probabilities: a block rounds them otherwise, and a likely token would
# then be another value in each sample.
BLUR = 0.2

Track = Callable[[Sequence, str], Iterable]


@dataclass(frozen=True)
class Subject:
    """What is proved.

    Args:
        target, drafter, depth: As in ``SpeculativeDecoder``.
        prompts: Token ids of the prompts that are continued greedily.
        text: Token ids of a text whose continuation is uncertain.
    """

    target: object
    drafter: object
    depth: int
    prompts: Sequence[Sequence[int]]
    text: Sequence[int]


@dataclass(frozen=True)
class Size:
    """How much is computed.

    Args:
        tokens (int): Greedy tokens a prompt.
        streams (int): Sampled streams a case.
        batch (int): Streams at once.
    """

    tokens: int = 96
    streams: int = 2048
    batch: int = 64

    @property
    def seeds(self) -> range:
        return range(max(1, self.streams // self.batch))


@dataclass
class Result:
    """One check: ``p_values`` by test, all of which are corrected together.

    ``tv`` is the distance in total variation that the weakest of its tests would have
    found 99 times of 100, when there is one. A ``control`` is a planted fault, ``ok``
    when it is found: it says whether the others mean something.
    """

    name: str
    ok: bool
    line: str
    p_values: dict[str, float] = field(default_factory=dict)
    tv: float | None = None
    details: dict = field(default_factory=dict)
    control: bool = False


def tolerance(dtype: mx.Dtype, largest: float) -> float:
    """How far rounding may move a logit: 16 units in the last place of the largest,
    and at least 1e-3, where two logits this close may change places."""
    return max(1e-3, 16 * mx.finfo(dtype).eps * largest)


# Greedy


def greedy(subject: Subject, size: Size, track: Track) -> list[Result]:
    """Tokens of every depth against ``mlx_lm``."""
    depths = sorted(
        {1, subject.depth, min(subject.depth + 2, subject.drafter.max_depth)}
    )
    decoders = [SpeculativeDecoder(subject.target, subject.drafter, d) for d in depths]
    return [same_tokens(decoders, subject.prompts, size.tokens, track)]


def same_tokens(
    decoders: Sequence[SpeculativeDecoder], prompts, tokens: int, track: Track
) -> Result:
    """Greedy tokens of decoders of one target against ``mlx_lm``'s."""
    target, wrong, ties, equal = decoders[0].target, [], [], 0
    for prompt in track(prompts, "greedy tokens"):
        steps = generate_step(mx.array(prompt), target.model, max_tokens=tokens)
        expected = [int(token) for token, _ in steps]
        for decoder in decoders:
            steps = decoder.stream(prompt, max_tokens=tokens)
            got = [step.token for step in steps]
            found = difference(target, prompt, expected, got)
            if found is None:
                equal += 1
                continue
            (ties if found["near_tie"] else wrong).append(
                {"depth": decoder.depth, **found}
            )
    total = len(prompts) * len(decoders)
    line = f"{equal} of {total} outputs of {tokens} tokens equal mlx_lm's"
    if ties:
        gap = max(tie["gap"] for tie in ties)
        line += f", {len(ties)} part at a near-tie (logits at most {gap:.1e} apart)"
    if wrong:
        line += f", {len(wrong)} differ, first {wrong[0]}"
    depths = [decoder.depth for decoder in decoders]
    details = {"depths": depths, "near_ties": ties, "wrong": wrong}
    return Result("greedy tokens", not wrong, line, details=details)


def difference(target, prompt, expected, got) -> dict | None:
    """Where two outputs part, and how close the two logits are there."""
    pairs = enumerate(zip(expected, got, strict=True))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        return None
    context = mx.array([[*prompt, *expected[:at]]])
    row = own_logits(target, context, target.make_cache())[0, -1]
    a, b = row[expected[at]].item(), row[got[at]].item()
    near = abs(a - b) <= tolerance(row.dtype, mx.abs(row).max().item())
    return {"position": at, "gap": abs(a - b), "near_tie": near}


# Widths


def widths(subject: Subject, size: Size, track: Track) -> list[Result]:
    """Logits of a block against the model's own of one token after the other."""
    target, prompt = subject.target, subject.prompts[0]
    caches, rows, tokens = target.make_cache(), [], []
    row = own_logits(target, mx.array([prompt]), caches)[0, -1]
    for _ in WIDTHS:
        tokens.append(mx.argmax(row).item())
        row = own_logits(target, mx.array([tokens[-1:]]), caches)[0, -1]
        rows.append(np.array(row.astype(mx.float32)))
    expected, ids = np.stack(rows), mx.array([tokens])
    allowed = tolerance(row.dtype, np.abs(expected).max())
    found = []
    for width in track(WIDTHS, "block widths"):
        logits = _block(target, prompt, ids[:, :width])
        near = np.abs(logits - expected[:width]).max()
        changed = logits.argmax(-1) != expected[:width].argmax(-1)
        # An argmax that moves within the tolerance is a near-tie.
        found.append(
            {"width": width, "largest": float(near), "changed": int(changed.sum())}
        )
    plain = float(np.abs(_plain_steps(target, prompt, ids) - expected).max())
    worst = max(plain, *(x["largest"] for x in found))
    equal = [x["width"] for x in found if x["largest"] == 0]
    changed = sum(x["changed"] for x in found)
    line = (
        f"logits of blocks of 1 to {len(WIDTHS)} rows and of plain steps differ by at "
        f"most {worst:.1e} "
        f"(allowed {allowed:.1e}); {len(equal)} widths bit-equal, {changed} near-ties "
        "change places"
    )
    details = {"allowed": allowed, "widths": found, "plain": plain}
    return [Result("block widths", bool(worst <= allowed), line, details=details)]


def _plain_steps(target, prompt, tokens) -> np.ndarray:
    """The same of one token after the other, as our loop decodes without drafts."""
    caches, step = target.make_cache(), getattr(target, "step", target.prefill)
    mx.eval(target.prefill(mx.array([prompt]), caches).logits)
    rows = [step(token[None, None], caches).logits[0, -1] for token in tokens[0]]
    return np.stack([np.array(row.astype(mx.float32)) for row in rows])


def _block(target, prompt, tokens) -> np.ndarray:
    """Logits ``(T, V)`` of a block behind a prompt, as a round computes them."""
    caches, length, width = target.make_cache(), len(prompt), tokens.shape[1]
    mx.eval(target.prefill(mx.array([prompt]), caches).logits)
    attended = bucket(length + width)
    adapters = classify(caches, target.adapters, width)
    position = Position(mx.array([length]), mx.zeros((1,), mx.int32), attended)
    views = [
        adapter.view(adapter.adopt(cache, width, attended), position)
        for adapter, cache in zip(adapters, caches, strict=True)
    ]
    return np.array(target.forward(tokens, views).logits[0].astype(mx.float32))


# Sampled

SETTINGS = {
    "T=1": SamplingParams(1.0, filter_order="temperature_last"),
    "T=0.8, top-p 0.9, top-k 40": SamplingParams(0.8, 40, 0.9, 0.0, "temperature_last"),
}


def sampled(subject: Subject, size: Size, track: Track) -> list[Result]:
    """Speculative streams against plain ones, drawn by ``mlx_lm``'s sampler."""
    return [
        _compare(subject, size, track, label, params)
        for label, params in SETTINGS.items()
    ]


def _compare(subject, size, track, label, params) -> Result:
    count = subject.depth + 3  # up to the token behind a first block
    round_ = _round(subject.target, subject.drafter, subject.depth, params)
    streams = Streams(round_, subject.text, params, params, size.batch, count)
    top_k = params.top_k if params.top_k < subject.target.vocab_size else 0
    sampler = make_sampler(params.temperature, params.top_p, top_k=top_k)
    mx.random.seed(0)
    ours, plain = [], []
    for seed in track(size.seeds, f"sampled, {label}"):
        ours.append(streams.draw(seed)[:2])
        plain.append(
            draw_plain(subject.target, subject.text, sampler, size.batch, count)
        )
    a, b = ([np.concatenate(x) for x in zip(*y, strict=True)] for y in (ours, plain))
    p_values, weakest, rng = {}, 0.0, np.random.default_rng(0)
    for n in range(count):
        p_values[f"token {n}, chi-square"], freedom = statistics.two_sample(
            a[0][:, n], b[0][:, n]
        )
        noise = rng.uniform(0, BLUR, (2, len(a[1])))
        p_values[f"token {n}, KS of log-probabilities"] = statistics.kolmogorov_smirnov(
            a[1][:, n] + noise[0], b[1][:, n] + noise[1]
        )
        tv = statistics.detectable(freedom, ALPHA, len(a[0]) / 2)
        weakest = max(weakest, tv)
    line = f"{len(a[0])} streams against plain ones at {count} positions"
    return Result(f"sampled, {label}", True, line, p_values, weakest)


def _round(target, drafter, depth, params, draft_params=None, kind=Round) -> Round:
    return kind(
        target,
        drafter,
        depth,
        classify(target.make_cache(), target.adapters, depth + 1),
        greedy=False,
        filter_order=params.filter_order,
        draft_filter_order=(draft_params or params).filter_order,
    )


# Enumerated

CASES = {
    "T=1": (SamplingParams(1.0), SamplingParams(1.0)),
    "T=1, drafts at T=0.5": (SamplingParams(1.0), SamplingParams(0.5)),
    "top-k 4, top-p 0.9, drafts at top-k 2": (
        SamplingParams(1.3, top_k=4, top_p=0.9),
        SamplingParams(1.3, top_k=2),
    ),
}


def enumerated(subject: Subject, size: Size, track: Track) -> list[Result]:
    """The next tokens over a reduced vocabulary against their exact probabilities."""
    results = []
    for label, (params, draft_params) in CASES.items():
        for depth in sorted({1, subject.depth}):
            name = f"enumerated, {label}, depth {depth}"
            at = replace(subject, depth=depth)
            results.append(_enumerate(at, size, track, name, params, draft_params))
    return results


def control(subject: Subject, size: Size, track: Track) -> list[Result]:
    """A round that accepts too often must be found."""
    params, draft_params = CASES["T=1, drafts at T=0.5"]
    result = _enumerate(
        replace(subject, depth=1),
        size,
        track,
        "biased control",
        params,
        draft_params,
        _Biased,
    )
    p = min(result.p_values.values())
    caught = p < ALPHA / 100
    line = (
        f"coins half as large are found, p = {p:.1e}"
        if caught
        else f"coins half as large are not found (p = {p:.2g}): too few streams, "
        "or drafts that are hardly ever rejected"
    )
    return [Result("biased control", caught, line, details={"p": p}, control=True)]


class _Biased(Round):
    """Accepts drafts up to twice as often as it should."""

    def accept(self, state, proposal, logits):
        coins = proposal.uniforms
        if coins.shape[1] > 2:
            coins = mx.concatenate([0.5 * coins[:, :-2], coins[:, -2:]], axis=1)
        return super().accept(state, proposal._replace(uniforms=coins), logits)


def _enumerate(subject, size, track, name, params, draft_params, kind=Round) -> Result:
    """Every stream begins with one token, so that all draft from the same state."""
    context, ids = _few(subject)
    target = Restricted(subject.target, ids)
    drafter = drafter_of(subject.drafter, target)
    round_ = _round(target, drafter, subject.depth, params, draft_params, kind)
    streams = Streams(round_, context, params, draft_params, size.batch, LENGTH + 1)
    first = ids[-1]
    sequences, drafts = np.zeros((len(ids),) * LENGTH), np.zeros((2, len(ids)))
    for seed in track(size.seeds, name):
        tokens, _, accepted = streams.draw(seed, first)
        places = np.searchsorted(ids, tokens[:, 1:])
        np.add.at(sequences, tuple(places.T), 1)
        np.add.at(drafts, (1 - accepted, places[:, 0]), 1)
    context.append(first)
    exact = joint(target, context, params)
    p = exact.sum(axis=(1, 2))
    q = _drafted(streams, first, ids, draft_params)
    p_sequences, freedom = statistics.goodness(sequences, exact)
    p_drafts, _ = statistics.goodness(
        drafts, np.stack([np.minimum(p, q), np.maximum(p - q, 0)])
    )
    line = (
        f"{int(drafts.sum())} streams, {exact.size} sequences of {LENGTH} tokens, and "
        f"the first draft, accepted {drafts[0].sum() / drafts.sum():.3f} "
        f"({np.minimum(p, q).sum():.3f})"
    )
    tv = statistics.detectable(freedom, ALPHA, drafts.sum())
    p_values = {"sequences": p_sequences, "first draft": p_drafts}
    return Result(name, True, line, p_values, tv)


def _few(subject: Subject) -> tuple[list[int], list[int]]:
    """A context, and the ids, in order, of its most likely next tokens."""
    target, context = subject.target, list(subject.text)
    row = own_logits(target, mx.array([context]), target.make_cache())[0, -1]
    ids = np.argsort(np.array(row.astype(mx.float32)))[-IDS:]
    if subject.drafter.greedy_only:
        context += [*ids.tolist()] * 2  # something to copy
    return context, sorted(ids.tolist())


def joint(target: Restricted, context: list[int], params) -> np.ndarray:
    """The exact probabilities of the next ``LENGTH`` tokens behind a context."""
    size = len(target.ids)
    out = np.ones((size,) * LENGTH)
    for i in range(LENGTH):
        rows = [[*context, *x] for x in itertools.product(target.ids, repeat=i)]
        logits = own_logits(target, mx.array(rows), target.make_cache())[:, -1]
        p = np.array([_shaped(row, target.ids, params) for row in logits])
        out *= p.reshape((size,) * (i + 1) + (1,) * (LENGTH - i - 1))
    return out


def _drafted(streams: Streams, first: int, ids, draft_params) -> np.ndarray:
    """The probabilities that the first draft behind the token ``first`` is one of
    ``ids``, by its logits. Drafters with an output of their own draft others too."""
    state, _, _ = streams.start(0, first)
    drafts = Drafts(*streams.round.draft(state, streams.attended).drafts)
    if drafts.logits is not None:
        row = drafts.logits[0, 0]
        return _shaped(row, range(row.size), draft_params)[ids]
    proposed = drafts.lengths is None or drafts.lengths[0].item() > 0
    return proposed * (np.array(ids) == drafts.tokens[0, 0].item())


def _shaped(row: mx.array, ids, params) -> np.ndarray:
    row = np.array(row.astype(mx.float32))[ids]
    return reference.shape(row, **asdict(params)).p


# Acceptance


def acceptance(subject: Subject, size: Size, track: Track) -> list[Result]:
    """How many drafts are accepted against the sum of min(p, q) of their rows."""
    params = SamplingParams(1.0)
    round_ = _round(subject.target, subject.drafter, subject.depth, params)
    count = 2 * round_.width
    streams = Streams(round_, subject.text, params, params, size.batch, count)
    tallies = []
    for seed in track(size.seeds[: max(1, len(size.seeds) // 4)], "acceptance"):
        state, _, _ = streams.start(seed)
        for _ in range(2):
            proposal, verified, logits = round_.halves(state, streams.attended)
            tokens, accepted, _ = round_.accept(state, proposal, logits)
            state, _ = round_.commit(verified, proposal, tokens, accepted)
            tallies.append(_tally(Drafts(*proposal.drafts), logits, accepted))
    taken, expected, variance, reached = np.sum(tallies, axis=0)
    p_values = {
        f"draft {i}": statistics.count_p(taken[i], expected[i], variance[i], n)
        for i, n in enumerate(reached)
        if n
    }
    rates = ", ".join(
        f"{a / n:.3f} ({e / n:.3f})"
        for a, e, n in zip(taken, expected, reached, strict=True)
        if n
    )
    line = f"by position, measured (expected): {rates or 'nothing was drafted'}"
    return [Result("acceptance", True, line, p_values)]


def _tally(drafts: Drafts, logits, accepted) -> np.ndarray:
    """``(4, K)``: accepted, expected, its variance, and how often reached."""
    depth = drafts.tokens.shape[1]
    p = mx.softmax(logits[:, :depth].astype(mx.float32), axis=-1)
    if drafts.logits is None:
        overlap = mx.take_along_axis(p, drafts.tokens[..., None], axis=-1)[..., 0]
    else:
        q = mx.softmax(drafts.logits.astype(mx.float32), axis=-1)
        overlap = mx.minimum(p, q).sum(axis=-1)
    overlap, accepted = np.array(overlap, np.float64), np.array(accepted)[:, None]
    overlap = np.clip(overlap, 0, 1)
    lengths = depth if drafts.lengths is None else np.array(drafts.lengths)[:, None]
    slots = np.arange(depth)
    reached = (slots <= accepted) & (slots < lengths)
    values = (slots < accepted, overlap, overlap * (1 - overlap), np.ones_like(overlap))
    return np.array([(x * reached).sum(axis=0) for x in values])
