"""Float64 NumPy references of the ops: short, slow and independent of their code."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Shaped:
    """One row's shaped distribution.

    ``margin`` is how far the nearest filter decision is from going the other way, as a
    fraction of probability. Below float32 accuracy the op may decide otherwise.
    """

    p: np.ndarray  # (V,)
    log_softmax: np.ndarray  # (V,), after masks, before temperature and filters
    margin: float


def one_hot(i, size):
    return (np.arange(size) == i).astype(np.float64)


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def masked(logits, allowed):
    """The logits with those -inf whose bit in the uint32 words ``allowed`` is 0."""
    z = np.asarray(logits, np.float64)
    if allowed is None:
        return z
    ids = np.arange(z.size)
    bits = (np.asarray(allowed)[ids // 32].astype(np.int64) >> (ids % 32)) & 1
    return np.where(bits == 1, z, -np.inf)


def shape(
    logits,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    filter_order="temperature_first",
    allowed=None,
):
    """The shaped distribution of one row, None when nothing can be drawn from it."""
    z = masked(logits, allowed)
    if np.isnan(z).any() or z.max() in (np.inf, -np.inf):
        return None
    log_softmax = z - z.max() - np.log(np.exp(z - z.max()).sum())
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float64(np.float32(1) / np.float32(temperature))
    if np.isinf(inverse):
        return Shaped(one_hot(z.argmax(), z.size), log_softmax, 1.0)
    with np.errstate(invalid="ignore"):
        scaled = (z - z.max()) * inverse
    first = filter_order == "temperature_first"
    base = softmax(scaled if first else z)
    margin = 1.0

    keep_k = np.ones(z.size, bool)
    if 0 < top_k < z.size:
        keep_k = z >= np.sort(z)[::-1][int(top_k) - 1]
    keep_p = np.ones(z.size, bool)
    if top_p < 1:
        p = np.where(keep_k, base, 0) if first else base
        p = p / p.sum()
        values, index = np.unique(z, return_inverse=True)
        mass = np.cumsum(np.bincount(index, p)[::-1])  # of {z >= t}, t falling
        keep_p = z >= values[::-1][np.argmax(mass >= top_p)]
        margin = min(margin, np.abs(mass - top_p).min())
    keep_m = np.ones(z.size, bool)
    if min_p > 0:
        ratio = base / base.max()
        keep_m = (ratio >= min_p) | (z == z.max())
        margin = min(margin, np.abs(ratio[z < z.max()] - min_p).min(initial=1.0))
    p = np.where(keep_k & keep_p & keep_m, softmax(scaled), 0)
    return Shaped(p / p.sum(), log_softmax, margin)


def uniform(pair):
    return float(pair[0]) + float(pair[1]) * 2.0**-24


def draw(p, u):
    """The id at quantile ``u`` and the distance of ``u`` to the nearest border."""
    cdf = np.cumsum(p) / p.sum()
    token = int(np.argmax(cdf > u))
    below = cdf[token] - p[token] / p.sum()
    # There is no border at 0 and at 1.
    borders = [abs(u - x) for x in (below, cdf[token]) if 1e-12 < x < 1 - 1e-12]
    return token, min(borders, default=1.0)


def sample(logits, uniforms, **params):
    """One row: (token, margin), (-1, 1.0) for an unusable row."""
    shaped = shape(logits, **params)
    if shaped is None:
        return -1, 1.0
    token, margin = draw(shaped.p, uniform(uniforms))
    return token, min(margin, shaped.margin)


def verify(target, drafts, q, uniforms, allowed=None, **params):
    """One sequence: (emitted tokens, accepted, logprobs, margin).

    ``q[i]`` is the distribution that ``drafts[i]`` was drawn from, None for a
    point mass. accepted is -1, and nothing is emitted, when a row is unusable.
    """
    unusable = [], -1, [], 1.0
    tokens, logprobs, margin = [], [], 1.0
    for i in range(len(drafts) + 1):
        row_mask = None if allowed is None else allowed[i]
        shaped = shape(target[i], allowed=row_mask, **params)
        if shaped is None:
            return unusable
        margin = min(margin, shaped.margin)
        p = shaped.p
        if i < len(drafts):
            d = int(drafts[i])
            if not 0 <= d < p.size:
                return unusable
            qi = one_hot(d, p.size) if q[i] is None else q[i]
            if not (np.isfinite(qi).all() and qi[d] > 0):
                return unusable
            margin = min(margin, abs(uniforms[i] * qi[d] - p[d]) / qi[d])
            if qi[d] < 2.0**-60:
                margin = 0.0  # nothing so rare is drawn, and float32 may have no p
            if uniforms[i] * qi[d] < p[d]:
                tokens.append(d)
                logprobs.append(shaped.log_softmax[d])
                continue
            residual = np.maximum(p - qi, 0)
            # So little is a difference of roundings in float32.
            margin = min(margin, residual.sum())
            p = residual if residual.sum() > 1e-6 else p
        token, border = draw(p, uniform(uniforms[-2:]))
        return (
            [*tokens, token],
            i,
            [*logprobs, shaped.log_softmax[token]],
            min(margin, border),
        )


def threefry(key, counter):
    """Threefry-2x32 with 20 rounds: key and counter of two words, two words out."""
    keys = [*map(int, key), 0x1BD11BDA ^ int(key[0]) ^ int(key[1])]
    x, y = (int(counter[0]) + keys[0]) % 2**32, (int(counter[1]) + keys[1]) % 2**32
    for i in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = (x + y) % 2**32
            y = (y << rotation | y >> (32 - rotation)) % 2**32 ^ x
        x = (x + keys[(i + 1) % 3]) % 2**32
        y = (y + keys[(i + 2) % 3] + i + 1) % 2**32
    return x, y


def coupled(target, drafts, seed, position, allowed=None, **params):
    """One sequence: (emitted tokens, accepted, logprobs, margin), see
    ``mlx_mtp.ops.verify_coupled``."""
    tokens, logprobs, margin = [], [], 1.0
    for i, row in enumerate(target):
        mask = None if allowed is None else allowed[i]
        shaped = shape(row, allowed=mask, **params)
        if shaped is None:
            return [], -1, [], 1.0
        ids = np.flatnonzero(shaped.p)
        words = [threefry(seed, ((position + i) % 2**32, int(t))) for t in ids]
        v = np.array([(x * 2**32 + y + 0.5) * 2.0**-64 for x, y in words])
        times = -np.log1p(-v) / shaped.p[ids]
        order = np.argsort(times, kind="stable")
        if ids.size > 1:
            margin = min(margin, times[order[1]] / times[order[0]] - 1)
        token = int(ids[order[0]])
        margin = min(margin, shaped.margin)
        tokens.append(token)
        logprobs.append(shaped.log_softmax[token])
        if i == len(drafts) or drafts[i] != token:
            break
    return tokens, len(tokens) - 1, logprobs, margin


def commit_rows(cache, rows, start, count, ring=0):
    """See ``mlx_mtp.ops.commit_rows``."""
    out = cache.copy()
    slots = ring or cache.shape[2]
    for b in range(cache.shape[0]):
        n = min(max(int(count[b]), 0), rows.shape[2], slots)
        first = int(start[b]) if ring else min(max(int(start[b]), 0), slots - n)
        for i in range(n):
            out[b, :, (first + i) % slots] = rows[b, :, i]
    return out


def gated_delta_replay(state, k, v, g, beta, steps, q):
    """State and outputs, see ``mlx_mtp.ops.gated_delta_replay``."""
    state, k, v, g, beta, q = (
        np.asarray(x, np.float64) for x in (state, k, v, g, beta, q)
    )
    state, y = state.copy(), np.zeros(v.shape)
    batch, T, value_heads, _ = v.shape
    group = value_heads // k.shape[2]
    for b in range(batch):
        for h in range(value_heads):
            S = state[b, h]
            for t in range(min(max(int(steps[b]), 0), T)):
                key, query = k[b, t, h // group], q[b, t, h // group]
                S *= g[b, t, h]
                S += np.outer((v[b, t, h] - S @ key) * beta[b, t, h], key)
                y[b, t, h] = S @ query
    return state, y
