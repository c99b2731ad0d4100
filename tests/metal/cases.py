"""Random inputs for the sampling kernels and their comparison with the oracle."""

import host
import numpy as np
import oracle

ORDERS = ["temperature_first", "temperature_last"]
FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 1},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.5, "top_k": 3000},
    {"temperature": 1.5, "top_p": 0.9},
    {"top_p": 0.1},
    {"temperature": 0.7, "min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 60, "top_p": 0.8, "min_p": 0.02},
]
# The kernels may differ from float64 where a decision is closer than this.
NEAR = 3e-6


def rounded(x, dtype):
    """float32 values that ``dtype`` can hold."""
    return host.load(host.store(np.asarray(x, np.float32), dtype), dtype)


def bits(allowed):
    """A boolean array (..., V) as uint32 words (..., ceil(V / 32))."""
    pad = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    packed = np.packbits(np.pad(allowed, pad), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)


def logits(rng, shape, dtype, scale=3.0):
    """Rows of normal logits, of few distinct values, or of one."""
    x = rng.normal(0, scale, shape)
    kind = rng.integers(4)
    if kind == 2:
        x = np.round(x)
    if kind == 3:
        x = np.zeros(shape) + rng.normal()
    return rounded(x, dtype)


def stats_of(row, params):
    """What sample() reports of a row."""
    shaped = oracle.shape(row, **params)
    inverse = 1 / params.get("temperature", 1) if params.get("temperature", 1) else 0
    if not inverse:
        return np.array([0, row.max(), np.inf], np.float32)
    kept = shaped.p > 0
    at = int(shaped.p.argmax())
    log_sum = row[at] * inverse - np.log(shaped.p[at])
    threshold = row[kept].min()
    return np.array([log_sum, threshold, np.float32(inverse)], np.float32)


def verify_case(rng, dtype, V, params, kind, batch=2, drafts=3, ragged=False):
    """Arguments of verify_draft, and the q that the drafts were drawn from."""
    x = logits(rng, (batch, drafts + 1, V), dtype)
    y = rounded(x[:, :drafts] + rng.normal(0, 1, (batch, drafts, V)), dtype)
    arguments = {"uniforms": rng.random((batch, drafts + 2), np.float32), **params}
    q = [[None] * drafts for _ in range(batch)]
    tokens = rng.integers(0, V, (batch, drafts))
    if kind == "point":
        likely = rng.random(tokens.shape) < 0.7
        tokens = np.where(likely, x[:, :drafts].argmax(-1), tokens)
    else:
        drawn = params
        if kind == "temperature":
            drawn = {"temperature": params.get("temperature", 1)}
        for b, i in np.ndindex(tokens.shape):
            q[b][i] = oracle.shape(y[b, i], **drawn).p
            tokens[b, i] = oracle.draw(q[b][i], rng.random())[0]
        arguments["draft"] = y
        if kind == "stats":
            rows = [stats_of(row, drawn) for row in y.reshape(-1, V)]
            arguments["draft_stats"] = np.array(rows, np.float32).reshape(
                batch, drafts, 3
            )
    if ragged:
        arguments["draft_lengths"] = rng.integers(0, drafts + 1, batch)
        allowed = rng.random((batch, drafts + 1, V)) < 0.7
        allowed[..., rng.integers(V)] = True
        arguments["allowed"] = bits(allowed)
    return {"target": x, "draft_tokens": tokens, **arguments}, q


def check_sample(x, u, params, tokens, stats, allowed=None):
    """Asserts that rows agree with the oracle. Returns how many are too close."""
    near = 0
    for r, row in enumerate(x):
        mask = None if allowed is None else allowed[r]
        token, margin = oracle.sample(row, u[r], allowed=mask, **params)
        if margin < NEAR:
            near += 1
            continue
        assert tokens[r] == token
        if token < 0:
            assert np.isnan(stats[r]).all()
        elif params.get("temperature", 1) == 0:
            assert stats[r].tolist() == [0, row.max(), np.inf]
        else:
            z = oracle.masked(row, mask)
            log_sum, threshold, inverse = stats[r].astype(np.float64)
            q = np.where(z >= threshold, np.exp(z * inverse - log_sum), 0)
            p = oracle.shape(row, allowed=mask, **params).p
            np.testing.assert_allclose(q, p, atol=1e-6, rtol=1e-5)
    return near


def check_verify(case, q, got):
    """Asserts that sequences agree with the oracle. Returns how many are too close."""
    tokens, accepted, logprobs = got
    names = ("temperature", "top_k", "top_p", "min_p", "filter_order")
    params = {name: case[name] for name in names if name in case}
    batch, T, _ = case["target"].shape
    lengths = case.get("draft_lengths", [T - 1] * batch)
    near = 0
    for b in range(batch):
        n = lengths[b]
        emitted, count, expected, margin = oracle.verify(
            case["target"][b],
            case["draft_tokens"][b][:n],
            q[b],
            np.concatenate([case["uniforms"][b][:n], case["uniforms"][b][-2:]]),
            allowed=case["allowed"][b] if "allowed" in case else None,
            **params,
        )
        if margin < NEAR:
            near += 1
            continue
        assert accepted[b] == count
        assert tokens[b].tolist() == emitted + [-1] * (T - len(emitted))
        np.testing.assert_allclose(logprobs[b, : len(expected)], expected, atol=3e-6)
        assert not logprobs[b, len(expected) :].any()
    return near
