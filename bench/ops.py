"""The ops against the same composed of MLX ops, and against plain NumPy.

    python bench/ops.py [--quick] [--json FILE]

Every case is checked before it is timed: the arms must give the same result. Then
they take turns in one process. A time is the median of whole calls, from building the
graph to the evaluated result, and ``ratio`` is a peer's time over ours; ``spread`` is
the interquartile range over the median and ``least_us`` the fastest call. ``mlx_max``
is no peer but a measure: one pass of ``mx.max`` over the same logits. On a GPU a turn
is 8 calls, and all arms wait awake, by ``ops.eval``; ``ours_asleep`` is ours by
``mx.eval``.

The compositions are the best we know. What an acceptance needs comes from log-sum-exps
and gathered logits, one row alone is turned into probabilities, top-k is a partition,
and only what it leaves is sorted.
"""

from __future__ import annotations

import sys
from functools import partial

import common
import numpy as np

VOCABULARY = 151936  # of Qwen 2.5 and 3
FILTERED = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}


# The composition, for xp = mlx.core or NumPy. ``shape`` is (log-sum-exp over the
# survivors, threshold), both with a last axis of 1.


def largest(xp, z, k):
    return xp.topk(z, k) if hasattr(xp, "topk") else xp.partition(z, -k)[..., -k:]


def log_sum(xp, z):
    if hasattr(xp, "logsumexp"):
        return xp.logsumexp(z, axis=-1, keepdims=True)
    high = z.max(-1, keepdims=True)
    return high + xp.log(xp.exp(z - high).sum(-1, keepdims=True))


def shape_of(xp, z, temperature, top_k=0, top_p=1.0, min_p=0.0):
    if top_k == 0 and top_p == 1:
        high = z.max(-1, keepdims=True)
        threshold = high + (np.log(min_p) * temperature if min_p else -np.inf)
        kept = xp.where(z >= threshold, z, -np.inf) if min_p else z
        return log_sum(xp, kept * (1 / temperature)), threshold
    best = -xp.sort(-(largest(xp, z, top_k) if top_k else z), axis=-1)
    p = xp.exp(best * (1 / temperature) - log_sum(xp, best * (1 / temperature)))
    kept = (xp.cumsum(p, axis=-1) - p < top_p) & (p >= min_p * p[..., :1])
    threshold = xp.where(kept, best, np.inf).min(-1, keepdims=True)
    kept = xp.where(kept, best * (1 / temperature), -np.inf)
    return log_sum(xp, kept), threshold


def probability(xp, z, shape, temperature):
    p = xp.exp(z * (1 / temperature) - shape[0])
    return xp.where(z >= shape[1], p, 0)


def quantile(xp, p, u):
    cdf = xp.cumsum(p, axis=-1)
    goal = (u[..., :1] + u[..., 1:] * 2.0**-24) * cdf[..., -1:]
    return (cdf <= goal).astype(xp.int32).sum(-1)


def composed_sample(xp, z, u, temperature=1.0, **filters):
    z = z.astype(xp.float32)
    shape = shape_of(xp, z, temperature, **filters)
    return quantile(xp, probability(xp, z, shape, temperature), u)


def composed_verify(xp, target, drafts, draft, stats, u, temperature=1.0, **filters):
    target = target.astype(xp.float32)
    K = drafts.shape[1]
    slots = xp.arange(K + 1)[None]
    full = log_sum(xp, target)
    if temperature == 0:
        final = target.argmax(-1)
        ok = final[:, :K] == drafts
        accepted = xp.cumprod(ok.astype(xp.int32), axis=1).sum(1)
    else:
        plain = temperature == 1 and not filters
        shape = (full, full * 0 - np.inf)
        if not plain:
            shape = shape_of(xp, target, temperature, **filters)
        draft = draft.astype(xp.float32)
        if stats is None:
            q_shape = shape_of(xp, draft, temperature)
        else:
            q_shape = (stats[..., :1], stats[..., 1:2])
        weigh = partial(probability, xp, temperature=temperature)
        ids = drafts[..., None]
        p = weigh(
            xp.take_along_axis(target[:, :K], ids, axis=-1), [x[:, :K] for x in shape]
        )
        q = weigh(xp.take_along_axis(draft, ids, axis=-1), q_shape)
        ok = (u[:, :K, None] * q < p)[..., 0]
        accepted = xp.cumprod(ok.astype(xp.int32), axis=1).sum(1)
        rows, last = xp.arange(len(u)), xp.minimum(accepted, K - 1)
        p = weigh(target[rows, accepted], [x[rows, accepted] for x in shape])
        q = weigh(draft[rows, last], [x[rows, last] for x in q_shape])
        residual = xp.maximum(p - xp.where(accepted[:, None] < K, q, 0), 0)
        empty = residual.sum(-1, keepdims=True) == 0
        final = quantile(xp, xp.where(empty, p, residual), u[:, K:])[:, None]
    padded = xp.concatenate([drafts, drafts[:, :1]], axis=1)
    tokens = xp.where(slots < accepted[:, None], padded, final)
    emitted = xp.take_along_axis(target, tokens[..., None], axis=-1) - full
    logprobs = xp.where(slots <= accepted[:, None], emitted[..., 0], 0)
    return xp.where(slots <= accepted[:, None], tokens, -1), accepted, logprobs


def logits(mx, shape, dtype, flat=False):
    """Rows like a model's: a wide bulk and a few tokens that stand out."""
    peaks = mx.random.randint(0, shape[-1], (*shape[:-1], 40))
    heights = mx.random.normal(peaks.shape) * 2 + 15
    x = mx.put_along_axis(mx.random.normal(shape) * 2, peaks, heights, axis=-1)
    return (mx.zeros(shape) if flat else x).astype(dtype)


def to_numpy(mx, x):
    return None if x is None else np.array(x.astype(mx.float32))


def verify_arms(mx, ops, B, K, V, dtype, params, flat=False):
    target = logits(mx, (B, K + 1, V), dtype, flat)
    draft = (target[:, :K] + mx.random.normal((B, K, V)) * 0.5).astype(dtype)
    draft = target[:, :K] if flat else draft
    drafts, stats = ops.sample(draft, mx.random.uniform(shape=(B, K, 2)), **params)
    mx.eval(target, draft, drafts, stats)
    # Unfiltered drafts need no statistics: then all arms sum the draft rows as well.
    stats = stats if params.keys() - {"temperature"} else None
    composed = partial(composed_verify, mx, target, drafts, draft, stats, **params)
    in_numpy = partial(
        composed_verify,
        np,
        to_numpy(mx, target),
        np.array(drafts),
        to_numpy(mx, draft),
        to_numpy(mx, stats),
        **params,
    )
    ours = partial(ops.verify_draft, target, drafts, draft, draft_stats=stats, **params)
    return {
        "ours": lambda u: ours(uniforms=u),
        "mlx_ops": composed,
        "mlx_ops_compiled": mx.compile(composed),
        "numpy": lambda u: in_numpy(np.array(u)),
        "mlx_max": lambda u: [mx.max(target, axis=-1), mx.max(draft, axis=-1)],
    }, [mx.random.uniform(shape=(B, K + 2)) for _ in range(8)]


def sample_arms(mx, ops, B, V, dtype, params):
    from mlx_lm.sample_utils import make_sampler

    x = logits(mx, (B, V), dtype)
    mx.eval(x)
    composed = partial(composed_sample, mx, x, **params)
    in_numpy = partial(composed_sample, np, to_numpy(mx, x), **params)
    drop_in = make_sampler(
        params.get("temperature", 1.0),
        top_p=params.get("top_p", 0.0),
        top_k=params.get("top_k", 0),
    )
    return {
        "ours": lambda u: ops.sample(x, u, **params)[0],
        "mlx_ops": composed,
        "mlx_ops_compiled": mx.compile(composed),
        "numpy": lambda u: in_numpy(np.array(u)),
        "mlx_lm": lambda u: drop_in(x - mx.logsumexp(x, axis=-1, keepdims=True)),
        "mlx_max": lambda u: mx.max(x, axis=-1),
    }, [mx.random.uniform(shape=(B, 2)) for _ in range(8)]


def commit_arms(mx, ops, B, H, S, D, T, dtype):
    """Rows written in place: each arm owns its cache and drops the old one."""
    rows = mx.random.normal((B, H, T, D)).astype(dtype)
    start = mx.arange(B) * 7 + S // 2
    count = mx.arange(B) % T + 1
    steps = mx.arange(T)

    def put(cache):
        at = (start[:, None] + steps)[:, None, :, None]
        at = mx.broadcast_to(at, rows.shape)
        keep = (steps < count[:, None])[:, None, :, None]
        old = mx.take_along_axis(cache, at, axis=2)
        return mx.put_along_axis(cache, at, mx.where(keep, rows, old), axis=2)

    def where(cache):
        step = mx.arange(S) - start[:, None]
        inside = ((step >= 0) & (step < count[:, None]))[:, None, :, None]
        at = mx.clip(step, 0, T - 1)[:, None, :, None]
        new = mx.take_along_axis(rows, mx.broadcast_to(at, cache.shape), axis=2)
        return mx.where(inside, new, cache)

    def arm(write):
        caches = [mx.zeros((B, H, S, D), dtype)]
        mx.eval(caches)

        def call(_):
            caches.append(write(caches.pop()))
            return caches[0]

        return call

    arms = {
        "ours": arm(lambda cache: ops.commit_rows(cache, rows, start, count)),
        "mlx_put_along_axis": arm(put),
        "mlx_where": arm(where),
    }
    if B == 1:  # as many rows for all, known on the host
        n = count.item()
        write = arm(lambda c: mx.slice_update(c, rows[:, :, :n], start, axes=[2]))
        arms["mlx_slice_update"] = write
    return arms, [None]


def replay_arms(mx, ops, B, T, Hk, Hv, D, dtype, outputs):
    from mlx_lm.models.gated_delta import gated_delta_ops

    q, k = (mx.random.normal((B, T, Hk, D)) / D**0.5 for _ in range(2))
    v = mx.random.normal((B, T, Hv, D))
    g, beta = (mx.random.uniform(shape=(B, T, Hv)) for _ in range(2))
    state = mx.random.normal((B, Hv, D, D))
    q, k, v, beta = (x.astype(dtype) for x in (q, k, v, beta))
    steps = mx.full((B,), T)
    mx.eval(q, k, v, g, beta, state, steps)

    def ours(_):
        got = ops.gated_delta_replay(
            state, k, v, g, beta, steps, q if outputs else None
        )
        return got[::-1] if outputs else (got,)

    def theirs(function, _):
        y, new = function(q, k, v, g, beta, state)
        return (y, new) if outputs else (new,)

    return {
        "ours": ours,
        "mlx_lm": partial(theirs, gated_delta_ops),
        "mlx_lm_compiled": partial(theirs, mx.compile(gated_delta_ops)),
    }, [None]


def check(name, mx, arms, inputs):
    """The share of the rows in which each peer gives our result, at least 3 in 4.

    Draws differ near a border of the distribution: the compositions sum in float32.
    """
    agree = {}
    for arm in arms.keys() - {"ours", "mlx_max"}:
        if arm == "mlx_lm" and name == "sample":
            continue  # draws with its own random numbers
        both = [(arms["ours"](x), arms[arm](x)) for x in inputs]
        if name == "verify_draft_flat":
            # Sums of float32 over a flat row are off by more than one token.
            both = [(ours[1:], theirs[1:]) for ours, theirs in both]
        agree[arm] = np.concatenate([equal(mx, *pair) for pair in both]).mean()
        if agree[arm] < 0.75:
            sys.exit(f"{name}: {arm} agrees in {agree[arm]:.0%} of the rows")
    return agree


def equal(mx, ours, theirs):
    """For every row: integers exactly, the rest to what MLX's float32 sums give."""
    if isinstance(ours, tuple):
        pairs = zip(ours, theirs, strict=True)
        return np.all([equal(mx, *pair) for pair in pairs], axis=0)
    ours, theirs = (to_numpy(mx, mx.array(x)) for x in (ours, theirs))
    same = np.isclose(ours, theirs, rtol=1e-6, atol=1e-3)
    return same.reshape(len(same), -1).all(axis=1)


def eval_awake(result):
    from mlx_mtp import ops

    ops.eval(*(result if isinstance(result, (tuple, list)) else [result]))


def measure(mx, header, name, arms, inputs, repeats, **about):
    agree = check(name, mx, arms, inputs)
    calls = {arm: lambda f=f: mx.eval(f(inputs[0])) for arm, f in arms.items()}
    turn = 1
    if mx.default_device() == mx.gpu:
        calls = {arm: lambda f=f: eval_awake(f(inputs[0])) for arm, f in arms.items()}
        calls["ours_asleep"] = lambda: mx.eval(arms["ours"](inputs[0]))
        turn = 8
    common.alternate(calls, 2)
    seconds = common.alternate(calls, repeats, calls=turn)
    us = {arm: common.median(times) * 1e6 for arm, times in seconds.items()}
    ours = us.pop("ours")
    ratio = {arm: value / ours for arm, value in us.items()}
    shape = " ".join(f"{k}={v}" for k, v in about["shape"].items())
    params = " ".join(f"{k}={v}" for k, v in about["params"].items())
    print(f"{name} {about['dtype']} {shape} {params}: {ours:.0f} us")
    print("   " + ", ".join(f"{arm} {x:.3g}x" for arm, x in ratio.items()), flush=True)
    return {
        "name": name,
        "backend": header["backend"],
        "blas": header["blas"],
        **about,
        "ours_us": ours,
        "peers_us": us,
        "ratio": ratio,
        "agree": agree,
        "spread": {arm: common.spread(times) for arm, times in seconds.items()},
        "least_us": {arm: min(times) * 1e6 for arm, times in seconds.items()},
    }


def gpu_cases(mx, ops, about, quick):
    """The same for a GPU, where batches are wide and NumPy is no peer."""
    V, half = VOCABULARY, mx.bfloat16
    hot = {"temperature": 0.7}
    verify = [
        (1, V, {}),
        (1, V, hot),
        (1, V, FILTERED),
        (1, V, {**hot, "top_p": 0.95}),
        (32, 248320, hot),
        (32, 248320, FILTERED),
    ]
    for B, V, params in verify[: 3 if quick else None]:
        arms, inputs = verify_arms(mx, ops, B, 4, V, half, params)
        del arms["numpy"]
        yield "verify_draft", arms, inputs, about(half, params, B=B, K=4, V=V)
    caches = [{"B": 1, "H": 8, "S": S, "D": 128, "T": 5} for S in (256, 65536)]
    states = {"B": 32, "T": 5, "Hk": 32, "Hv": 32, "D": 128}
    yield from state_cases(mx, ops, about, caches, states, half)


def state_cases(mx, ops, about, caches, states, dtype):
    """The ops on caches of these shapes, and on states of this one and dtype."""
    half = mx.bfloat16
    for shape in caches:
        arms = commit_arms(mx, ops, **shape, dtype=half)
        yield "commit_rows", *arms, about(half, **shape)
    for outputs in (False, True):
        arms = replay_arms(mx, ops, **states, dtype=dtype, outputs=outputs)
        name = "gated_delta_forward" if outputs else "gated_delta_replay"
        yield name, *arms, about(dtype, **states)


def cases(mx, ops, quick):
    """(name, arms, inputs, what to say about it)"""
    V, half, full = VOCABULARY, mx.bfloat16, mx.float32

    def about(dtype, params=None, **shape):
        dtype = str(dtype).removeprefix("mlx.core.")
        return {"dtype": dtype, "shape": shape, "params": params or {}}

    if mx.default_device() == mx.gpu:
        yield from gpu_cases(mx, ops, about, quick)
        return
    verify = [
        (1, V, full, {}),
        (1, V, full, FILTERED),
        (1, V, full, {"temperature": 0.7}),
        (1, V, full, {"temperature": 0.0}),
        (1, V, full, {"top_p": 0.95}),
        (1, V, full, {"min_p": 0.05}),
        (1, V, half, {}),
        (1, V, half, FILTERED),
        (8, V, full, {}),
        (1, 4096, full, {}),
        (1, 4096, full, FILTERED),
    ]
    for B, V, dtype, params in verify[: 2 if quick else None]:
        arms = verify_arms(mx, ops, B, 3, V, dtype, params)
        yield "verify_draft", *arms, about(dtype, params, B=B, K=3, V=V)
    V = VOCABULARY
    for params in [] if quick else [{"top_p": 0.95}, FILTERED]:
        arms = verify_arms(mx, ops, 1, 3, V, full, params, flat=True)
        yield "verify_draft_flat", *arms, about(full, params, B=1, K=3, V=V)
    for params in [{}, FILTERED, {"top_p": 0.95}][1 if quick else 0 :][: 2 - quick]:
        arms = sample_arms(mx, ops, 1, V, full, params)
        yield "sample", *arms, about(full, params, B=1, K=0, V=V)
    caches = [{"B": B, "H": 8, "S": 8192, "D": 128, "T": 4} for B in (1, 4)]
    states = {"B": 1, "T": 4, "Hk": 16, "Hv": 32, "D": 128}
    yield from state_cases(mx, ops, about, caches, states, full)


def main():
    args = common.parser(__doc__).parse_args()
    header = common.start(args)
    import mlx.core as mx

    from mlx_mtp import ops

    common.show_header(header)
    mx.random.seed(0)
    rows, repeats = [], 5 if args.quick else 25
    for name, arms, inputs, about in cases(mx, ops, args.quick):
        rows.append(measure(mx, header, name, arms, inputs, repeats, **about))
        common.write(args.json, header, rows)


if __name__ == "__main__":
    main()
