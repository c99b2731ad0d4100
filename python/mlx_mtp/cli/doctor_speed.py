"""What ``mlx-mtp doctor`` times: every op beside the same in MLX's own ops."""

from __future__ import annotations

import time
from statistics import median

import mlx.core as mx

from .. import ops

V, K = 151936, 4
REPEATS = 20
# A temperature at which any noise gives the same token.
COLD = 1e-6


def times(op: str, dtype: mx.Dtype, device: mx.Device) -> tuple[float, float, float]:
    """Seconds of the first call here, of a later one, and of MLX's own ops."""
    with mx.stream(device):
        ours, composed = CASES[op](dtype)
        first = _seconds(ours)
        _seconds(composed)
        pairs = [(_seconds(ours), _seconds(composed)) for _ in range(REPEATS)]
    return first, *(median(x) for x in zip(*pairs, strict=True))


def _seconds(call) -> float:
    start = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - start


def _inputs(*arrays):
    mx.eval(arrays)
    return arrays


def _sample(dtype):
    logits, u = _inputs(
        mx.random.normal((1, V)).astype(dtype), mx.random.uniform(shape=(1, 2))
    )

    def composed():
        p = mx.softmax(logits.astype(mx.float32), axis=-1)
        return mx.argmax(mx.cumsum(p, axis=-1) > u[:, :1], axis=-1)

    return lambda: ops.sample(logits, u), composed


def _verify_draft(dtype):
    target, draft, drafts, u = _inputs(
        mx.random.normal((1, K + 1, V)).astype(dtype),
        mx.random.normal((1, K, V)).astype(dtype),
        mx.random.randint(0, V, (1, K)),
        mx.random.uniform(shape=(1, K + 2)),
    )

    def composed():
        p = mx.softmax(target.astype(mx.float32), axis=-1)
        q = mx.softmax(draft.astype(mx.float32), axis=-1)
        index = drafts[..., None]
        px = mx.take_along_axis(p[:, :K], index, -1)[..., 0]
        qx = mx.take_along_axis(q, index, -1)[..., 0]
        accepted = mx.cumprod(u[:, :K] * qx < px, axis=-1).sum(-1)
        q = mx.concatenate([q, mx.zeros((1, 1, V))], axis=1)
        row = accepted[:, None, None]
        r = mx.maximum(mx.take_along_axis(p, row, 1) - mx.take_along_axis(q, row, 1), 0)
        total = mx.cumsum(r[:, 0], axis=-1)
        token = mx.argmax(total > u[:, K : K + 1] * total[:, -1:], axis=-1)
        return accepted, token

    return (
        lambda: ops.verify_draft(target, drafts, draft, uniforms=u),
        composed,
    )


def _verify_coupled(dtype):
    target, drafts, seed, position = _inputs(
        mx.random.normal((1, K + 1, V)).astype(dtype),
        mx.random.randint(0, V, (1, K)),
        mx.array([[1, 2]], mx.uint32),
        mx.array([7]),
    )

    options = {"seed": seed, "position": position, "temperature": COLD}

    def composed():
        noise = mx.random.gumbel((1, K + 1, V), key=seed[0])
        tokens = mx.argmax(target.astype(mx.float32) / COLD + noise, axis=-1)
        return tokens, mx.cumprod(tokens[:, :K] == drafts, axis=-1).sum(-1)

    return lambda: ops.verify_coupled(target, drafts, **options), composed


def _commit_rows(dtype):
    cache, rows, start, count = _inputs(
        mx.zeros((1, 8, 4096, 128), dtype),
        mx.ones((1, 8, K + 1, 128), dtype),
        mx.array([1000]),
        mx.array([K]),
    )
    caches = {"ours": cache, "composed": cache + 0}
    del cache

    def ours():
        caches["ours"] = ops.commit_rows(caches.pop("ours"), rows, start, count)
        return caches["ours"]

    def composed():
        caches["composed"] = mx.slice_update(
            caches.pop("composed"), rows, start, axes=(2,)
        )
        return caches["composed"]

    return ours, composed


def _gated_delta_replay(dtype):
    T, Hk, Hv, D = K + 1, 16, 32, 128
    state, k, v, g, beta, steps = _inputs(
        mx.random.normal((1, Hv, D, D)),
        (mx.random.normal((1, T, Hk, D)) * D**-0.5).astype(dtype),
        mx.random.normal((1, T, Hv, D)).astype(dtype),
        mx.random.uniform(shape=(1, T, Hv)),
        mx.random.uniform(shape=(1, T, Hv)).astype(dtype),
        mx.array([T - 1]),
    )

    def composed():
        S, keys = state, mx.repeat(k, Hv // Hk, axis=2)
        for t in range(T - 1):
            key = keys[:, t, :, None]
            S = S * g[:, t, :, None, None]
            delta = (v[:, t] - (S * key).sum(-1)) * beta[:, t, :, None]
            S = S + delta[..., None] * key
        return S

    return lambda: ops.gated_delta_replay(state, k, v, g, beta, steps), composed


CASES = {
    "sample": _sample,
    "verify_draft": _verify_draft,
    "verify_coupled": _verify_coupled,
    "commit_rows": _commit_rows,
    "gated_delta_replay": _gated_delta_replay,
}
