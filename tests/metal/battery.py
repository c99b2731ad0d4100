"""A short run of every kernel and path: for the sanitizers and the mutants."""

import cases
import numpy as np
from host import DTYPES, Host
from test_state_kernels import commit_case, delta_case

# Sizes that end inside a group, inside a chunk and inside a 16-byte load.
SIZES = [37, 300, 1032]


def sampling(machine, seed, dtypes=DTYPES):
    rng = np.random.default_rng(0)
    for i, params in enumerate(cases.FILTERS):
        dtype = dtypes[i % len(dtypes)]
        V = SIZES[(i + i // len(dtypes)) % len(SIZES)]
        params = {**params, "filter_order": cases.ORDERS[i % 2]}
        emulated = Host(machine, chunk=256, threads=[64, 96, 128][i % 3], seed=seed)
        x = cases.rounded(rng.normal(0, 2, (2, V)), dtype)
        x[1] = np.round(x[1])
        u = rng.random((2, 2), np.float32)
        yield emulated.sample(x, u, dtype, **params)
        for kind in ("point", "temperature", "stats"):
            case, _ = cases.verify_case(rng, dtype, V, params, kind, 2, 3, i % 2 == 0)
            case["draft_tokens"] = case["draft_tokens"].astype(np.int32)
            yield emulated.verify_draft(**case, dtype=dtype)


def edges(machine, seed):
    """Unusable rows, an empty residual, and coins that no generator gives."""
    emulated = Host(machine, chunk=256, threads=64, seed=seed)
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (6, 2, 300)).astype(np.float32)
    x[0, 0, 299], x[1, 1] = np.nan, -np.inf
    draft = x[:, :1].copy()
    draft[2, 0, 0] = np.inf
    tokens = np.array([[0], [0], [1], [300], [-1], [5]], np.int32)
    u = np.tile(np.array([1.5, 0.999, 0.999], np.float32), (6, 1))
    for params in ({}, {"top_k": 9}):
        yield emulated.verify_draft(x, tokens, draft, uniforms=u, **params)
        yield emulated.sample(x[:, 0].copy(), u[:, 1:].copy(), **params)


def commits(machine, seed):
    rng = np.random.default_rng(2)
    for i, dtype in enumerate(["uint8", "float16", "float32", "int64"]):
        cache, rows = commit_case(rng, dtype, D=[3, 8, 5, 8][i])
        for ring in (0, 5):
            emulated = Host(machine, threads=32, seed=seed)
            yield [emulated.commit_rows(cache, rows, [-1, 5], [2, 9], ring)]


def replays(machine, seed, dtypes=DTYPES):
    rng = np.random.default_rng(3)
    for i, dtype in enumerate(dtypes):
        size = {"B": 2, "T": 3, "Hk": 1, "Hv": 2, "Dk": [128, 40, 200][i], "Dv": 5}
        args = delta_case(rng, **size, dtype=dtype)
        emulated = Host(machine, threads=64, seed=seed)
        yield emulated.gated_delta_replay(**args, dtype=dtype)


def everything(machine, seed=0):
    """The outputs of all runs."""
    parts = [sampling, edges, commits, replays]
    return [np.asarray(x) for part in parts for run in part(machine, seed) for x in run]
