"""What ``mlx-mtp doctor`` compares: cases of every op, and what counts as equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from .. import ops, reference

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Where a decision is closer than this, float32 may decide otherwise than float64.
NEAR = 1e-5
# Of log-probabilities and statistics.
TOLERANCE = 1e-5
VOCABULARIES = (1, 37, 4099, 151936)
PARAMS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.4, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.9, "filter_order": "temperature_last", "temperature": 0.7},
)


@dataclass
class Tally:
    """What was found for one op and dtype on a device."""

    device: mx.Device
    rows: int = 0
    near: int = 0
    error: float = 0.0
    mismatches: list[str] = field(default_factory=list)

    @property
    def expects_cpu_path(self) -> bool:
        """On a GPU the CPU path says what is right, on the CPU NumPy does."""
        return self.device == mx.Device(mx.gpu)

    def tokens(self, case, got, want, margins: Callable[[], np.ndarray]) -> np.ndarray:
        """Compares rows of integers. Returns which of them agree."""
        got, want = np.array(got), np.array(want)
        agree = (got == want).reshape(len(got), -1).all(axis=1)
        self.rows += len(got)
        if not agree.all():
            near = ~agree & (margins() < NEAR)
            self.near += int(near.sum())
            for row in np.flatnonzero(~agree & ~near)[:1]:
                self.mismatches.append(
                    f"{case}, row {row}: {got[row].tolist()} instead of "
                    f"{want[row].tolist()}"
                )
        return agree

    def values(self, case, got, want, tolerance=TOLERANCE) -> None:
        """Compares floats, relative where they are large."""
        got, want = (np.array(mx.array(x).astype(mx.float32)) for x in (got, want))
        with np.errstate(invalid="ignore"):
            error = np.abs(got - want) / np.maximum(1, np.abs(want))
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        error = np.where(same, 0, np.nan_to_num(error, nan=np.inf))
        worst = float(error.max(initial=0))
        self.error = max(self.error, worst)
        if worst > tolerance:
            self.mismatches.append(f"{case}: error {worst:.2g}")


def _evaluated(*arrays):
    """MLX's CUDA backend moves what the CPU reads: no GPU work may wait for it then."""
    mx.eval(arrays)
    return arrays


def _normal(rng, shape, dtype, scale=3.0):
    return mx.array(rng.normal(0, scale, shape).astype(np.float32)).astype(dtype)


def _uniform(rng, shape):
    return mx.array(rng.random(shape).astype(np.float32))


def _bits(rng, shape):
    """Random rows of a bit mask with about 15 of 16 tokens allowed."""
    words = rng.integers(0, 2**32, (4, *shape), np.uint32)
    return mx.array(np.bitwise_or.reduce(words))


def _float64(x) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def check_sample(tally: Tally, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    for V in VOCABULARIES:
        R = 2 if V > 10000 else 8
        for params in PARAMS:
            logits, u = _evaluated(_normal(rng, (R, V), dtype), _uniform(rng, (R, 2)))
            # A mask on every second vocabulary.
            masked = VOCABULARIES.index(V) % 2 == 0 and V > 32
            allowed = _bits(rng, (R, (V + 31) // 32)) if masked else None
            _sample_case(tally, (logits, u), {**params, "allowed": allowed})


def _sample_case(tally, args, params):
    case = f"V={args[0].shape[1]} {_described(params)}"
    tokens, stats = _evaluated(*ops.sample(*args, **params, stream=tally.device))
    logits, u, allowed = _float64(args[0]), np.array(args[1]), params.pop("allowed")
    masks = [None] * len(u) if allowed is None else np.array(allowed)

    def right():
        return [
            reference.sample(*row, allowed=mask, **params)
            for *row, mask in zip(logits, u, masks, strict=True)
        ]

    def margins():
        return np.array([margin for _, margin in right()])

    if not tally.expects_cpu_path:
        want = [token for token, _ in right()]
        tally.tokens(case, tokens, want, margins)
        return
    want, want_stats = ops.sample(*args, allowed=allowed, **params, stream=mx.cpu)
    agree = tally.tokens(case, tokens, want, margins)
    tally.values(case, np.array(stats)[agree], np.array(want_stats)[agree])


def _described(params):
    return " ".join(f"{k}={v}" for k, v in params.items() if k != "allowed") or "plain"


def check_verify_draft(tally: Tally, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(1)
    for V in VOCABULARIES:
        B, K = (2, 2) if V > 10000 else (6, 4)
        for params in PARAMS:
            for known in ("stats", "point mass"):
                _verify_case(tally, rng, (B, K, V), dtype, params, known)


def _verify_case(tally, rng, shape, dtype, params, known):
    B, K, V = shape
    case = f"B={B} K={K} V={V} {_described(params)} {known}"
    target = _normal(rng, (B, K + 1, V), dtype)
    draft = (target[:, :K] + _normal(rng, shape, dtype, 1)).astype(dtype)
    u = _uniform(rng, (B, K, 2))
    _evaluated(target, draft)
    drafts, stats = _evaluated(*ops.sample(draft, u, **params, stream=mx.cpu))
    options = {
        "uniforms": _uniform(rng, (B, K + 2)),
        "draft_lengths": mx.array(rng.integers(0, K + 1, B)),
        **params,
    }
    if known == "stats":
        options |= {"draft_logits": draft, "draft_stats": stats}
    got = ops.verify_draft(target, drafts, **options, stream=tally.device)
    _evaluated(*got)

    def right():
        return _reference_verify(target, drafts, draft, options, params, known)

    if tally.expects_cpu_path:
        want = ops.verify_draft(target, drafts, **options, stream=mx.cpu)
    else:
        want = right()
    both = [mx.concatenate([x[0], x[1][:, None]], 1) for x in (got, want)]
    agree = tally.tokens(case, *both, lambda: right()[3])
    tally.values(case, np.array(got[2])[agree], np.array(want[2])[agree])


def _reference_verify(target, drafts, draft, options, params, known):
    """tokens, accepted, logprobs and margins of float64 NumPy."""
    B, T, _ = target.shape
    tokens, logprobs = np.full((B, T), -1), np.zeros((B, T), np.float32)
    accepted, margins = np.zeros(B, int), np.zeros(B)
    z, q_logits, u = _float64(target), _float64(draft), np.array(options["uniforms"])
    for b, length in enumerate(options["draft_lengths"].tolist()):
        q = [None] * length
        if known == "stats" and params.get("temperature") != 0:
            q = [reference.shape(row, **params).p for row in q_logits[b, :length]]
        emitted, accepted[b], logp, margins[b] = reference.verify(
            z[b], np.array(drafts)[b, :length], q, u[b], **params
        )
        tokens[b, : len(emitted)] = emitted
        logprobs[b, : len(logp)] = logp
    return mx.array(tokens), mx.array(accepted), mx.array(logprobs), margins


def check_verify_coupled(tally: Tally, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(4)
    for V in VOCABULARIES:
        B, K = (2, 2) if V > 10000 else (6, 3)
        for params in PARAMS:
            _coupled_case(tally, rng, (B, K, V), dtype, params)


def _coupled_case(tally, rng, shape, dtype, params):
    B, K, V = shape
    target = _normal(rng, (B, K + 1, V), dtype)
    seed = rng.integers(0, 2**32, (B, 2), np.uint32)
    # Drafts that are right up to the last, which is right by chance.
    options = {"seed": mx.array(seed), "position": mx.arange(B) * 1000, **params}
    ends = mx.arange(1, B + 1) % (K + 1)
    drafts = mx.zeros((B, K), mx.int32)
    _evaluated(target, drafts, ends, options["position"], options["seed"])
    for i in range(K):
        token, _, _ = ops.verify_coupled(
            target[:, i : i + 1],
            drafts[:, :0],
            **{**options, "position": options["position"] + i},
            stream=mx.cpu,
        )
        drafts = mx.where(mx.arange(K) == i, token, drafts)
    _evaluated(drafts)
    options["draft_lengths"] = ends
    got = ops.verify_coupled(target, drafts, **options, stream=tally.device)
    _evaluated(*got)

    def right():
        return _reference_coupled(target, drafts, options, params)

    if tally.expects_cpu_path:
        want = ops.verify_coupled(target, drafts, **options, stream=mx.cpu)
    else:
        want = right()
    both = [mx.concatenate([x[0], x[1][:, None]], 1) for x in (got, want)]
    case = f"B={B} K={K} V={V} {_described(params)}"
    agree = tally.tokens(case, *both, lambda: right()[3])
    tally.values(case, np.array(got[2])[agree], np.array(want[2])[agree])


def _reference_coupled(target, drafts, options, params):
    """tokens, accepted, logprobs and margins of float64 NumPy."""
    B, T, _ = target.shape
    tokens, logprobs = np.full((B, T), -1), np.zeros((B, T), np.float32)
    accepted, margins = np.zeros(B, int), np.zeros(B)
    z, seed, position = _float64(target), np.array(options["seed"]), options["position"]
    for b, length in enumerate(options["draft_lengths"].tolist()):
        emitted, accepted[b], logp, margins[b] = reference.coupled(
            z[b],
            np.array(drafts)[b, :length],
            seed[b],
            position[b].item(),
            **params,
        )
        tokens[b, : len(emitted)] = emitted
        logprobs[b, : len(logp)] = logp
    return mx.array(tokens), mx.array(accepted), mx.array(logprobs), margins


def check_commit_rows(tally: Tally, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(2)
    for S, D, ring in ((16, 64, 0), (40, 129, 0), (32, 64, 24), (7, 1, 7)):
        B, H, T = 3, 2, 5
        cache, rows = (
            _normal(rng, (B, H, S, D), dtype),
            _normal(rng, (B, H, T, D), dtype),
        )
        start, count = rng.integers(-2, S + 3, B), rng.integers(-1, T + 2, B)
        index = (mx.array(start), mx.array(count))
        _evaluated(cache, rows)
        got = ops.commit_rows(cache, rows, *index, ring=ring, stream=tally.device)
        _evaluated(got)
        if tally.expects_cpu_path:
            want = ops.commit_rows(cache, rows, *index, ring=ring, stream=mx.cpu)
        else:
            want = reference.commit_rows(
                _float64(cache), _float64(rows), start, count, ring
            ).astype(np.float32)
        tally.rows += B
        tally.values(f"S={S} D={D} ring={ring}", got, want, 0)


def check_gated_delta_replay(tally: Tally, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(3)
    # Of y, which is rounded to the dtype.
    rounding = {mx.float32: 0.0, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
    for T, Hk, Hv, Dk, Dv in (
        (5, 2, 4, 128, 128),
        (3, 1, 3, 37, 10),
        (4, 2, 2, 256, 64),
    ):
        B = 3
        state = _normal(rng, (B, Hv, Dv, Dk), mx.float32, 1)
        k, q = (_normal(rng, (B, T, Hk, Dk), dtype, Dk**-0.5) for _ in range(2))
        v = _normal(rng, (B, T, Hv, Dv), dtype, 1)
        g, beta = _uniform(rng, (B, T, Hv)), _uniform(rng, (B, T, Hv)).astype(dtype)
        steps = mx.array([0, T, T - 1])
        args = (state, k, v, g, beta, steps, q)
        _evaluated(*args)
        out, y = _evaluated(*ops.gated_delta_replay(*args, stream=tally.device))
        if tally.expects_cpu_path:
            want, want_y = ops.gated_delta_replay(*args, stream=mx.cpu)
        else:
            want, want_y = reference.gated_delta_replay(*(map(_float64, args)))
            want, want_y = want.astype(np.float32), want_y.astype(np.float32)
        tally.rows += B
        case = f"T={T} Hv={Hv} Dk={Dk} Dv={Dv}"
        tally.values(case, out, want)
        tally.values(case + " y", y, want_y, TOLERANCE + rounding)


CHECKS = {
    "sample": check_sample,
    "verify_draft": check_verify_draft,
    "verify_coupled": check_verify_coupled,
    "commit_rows": check_commit_rows,
    "gated_delta_replay": check_gated_delta_replay,
}
