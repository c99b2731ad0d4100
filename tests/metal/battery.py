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


def turns(machine, seed):
    """One simdgroup for a chunk of many groups, and more chunks than lanes."""
    rng = np.random.default_rng(7)
    few = Host(machine, chunk=1024, threads=32, seed=seed)
    case, _ = cases.verify_case(rng, "float32", 1032, {}, "temperature", 2, 2)
    case["draft_tokens"] = case["draft_tokens"].astype(np.int32)
    u = np.array([[0.7, 0], [0.1, 0.9]], np.float32)
    for t in (1, 0.6):
        yield few.verify_draft(**case, temperature=t)
        yield few.sample(case["target"][:, 0].copy(), u, temperature=t)
    # Ties within a lane, and chunks of more groups than are read at once.
    x = cases.rounded(rng.normal(0, 2, (4, 2500)), "bfloat16")
    x[0, [5, 261, 1029]], x[1, [300, 1324]] = 9, 9
    x[2, [5, 261, 1029]], x[3, 2000] = [np.nan, 8, 9], 9
    u = np.array([[0.7, 0], [0.1, 0.9], [0, 0], [0.999, 0]], np.float32)
    words = cases.bits(rng.random((4, 2500)) < 0.5)
    for chunk, threads in ((4096, 32), (1024, 64)):
        one = Host(machine, chunk, threads, seed)
        for params in ({"temperature": 0}, {}, {"top_k": 9}, {"top_p": 0.9}):
            yield one.sample(x, u, **params)
            yield one.sample(x, u, allowed=words, **params)
        for t in (1, 0.6):
            none = np.zeros((4, 0))
            yield one.verify_draft(x[:, None], none, uniforms=u, temperature=t)
    # What counts lies in the second turn of a lane, or in both.
    x = rng.normal(0, 1, (5, 17000)).astype(np.float32)
    x[0, [0, 9000]], x[1, [300, 8500]], x[2, [300, 8500]] = [8, 9], 9, [8, 9]
    x[3, [300, 8500]], x[4, [300, 8500]] = [9, np.nan], [np.inf, 9]
    many = Host(machine, chunk=256, threads=64, seed=seed)
    for t in (0, 1):
        yield many.sample(x, np.full((5, 2), 0.5, np.float32), temperature=t)
    rows, u = x[None, :2, :8500].copy(), np.zeros((1, 3), np.float32)
    yield many.verify_draft(rows, np.full((1, 1), 5), uniforms=u)
    # Parts of some groups, and more groups than threads.
    for V, part, threads in ((3000, 4, 64), (8500, 1, 32)):
        parts = Host(machine, chunk=4096, threads=threads, seed=seed, part=part)
        target = np.round(rng.normal(0, 1, (1, 2, V)), 1).astype(np.float32)
        draft, ids = target[:, 1:].copy(), np.full((1, 1), 5)
        for u in (0.37, 0.999):
            coins = np.array([[0.9999, u, 0.5]], np.float32)
            yield parts.verify_draft(target, ids, draft, uniforms=coins)
    # A threshold at the border of two groups that one thread has.
    even, u = np.zeros((1, 1, 64 * 256), np.float32), np.zeros((1, 2), np.float32)
    u[0, 0] = 1 / 64
    yield parts.verify_draft(even, np.zeros((1, 0)), uniforms=u)
    # A flaw, and a peak that is the first of the next chunk.
    target, draft = np.zeros((1, 2, 800), np.float32), np.zeros((1, 1, 800), np.float32)
    target[0, 0, 512], draft[0, 0, 512], draft[0, 0, 3] = 7.53, 40, np.nan
    ids, coins = np.full((1, 1), 512), np.array([[0.8, 0.5, 0.5]], np.float32)
    stats = np.array([[[40, -np.inf, 1]]], np.float32)
    flawed = Host(machine, chunk=512, threads=32, seed=seed)
    yield flawed.verify_draft(target, ids, draft, uniforms=coins, draft_stats=stats)
    # More rows than simdgroups, of which there can not be more.
    most, u = Host(machine, threads=1024, seed=seed), np.zeros((1, 35), np.float32)
    rows = np.zeros((1, 34, 8), np.float32)
    yield most.verify_draft(rows, np.zeros((1, 33)), uniforms=u)


def filters(machine, seed):
    """Few candidates and many, with a bound from the maxima of groups and without."""
    rng = np.random.default_rng(9)
    x = rng.normal(0, 1, (8, 3000)).astype(np.float32)
    x[1] = np.round(x[1], 1)
    x[2, [5, 700, 1500]] = 12  # nearly all mass
    x[3, 10] = 60  # too far above the others for a bound
    x[4:6] = -5
    x[4, 5 * np.arange(512)] = x[5, 5 * np.arange(513)] = 5  # as many as are few, + 1
    x[6, 0] = 20
    x[7] = 0
    u = np.tile(np.array([[0.3, 0], [0.999, 0]], np.float32), (4, 1))
    emulated = Host(machine, chunk=1024, threads=64, seed=seed)
    some = {"temperature": np.array([0, 1, 1, 1, 1, 1, 0, 0.7])}
    for i, params in enumerate(
        [
            *({"top_k": k} for k in (1, 3, 100, 700, 3000)),
            *({"top_p": p} for p in (0.5, 0.95)),
            {"top_k": 700, "top_p": 0.9},
            {"top_k": 5, "top_p": 0.6},
            {"top_k": 100, "top_p": 0.99, "min_p": 0.01},
            {"min_p": 0.3},
            {"top_k": 3, **some},
        ]
    ):
        for order in cases.ORDERS:
            params = {"temperature": 0.8, **params, "filter_order": order}
            yield emulated.sample(x, u, **params)
        tokens = x[:, None].argmax(-1) + i % 2
        coins = np.array([[0.9 * (i % 2), 0.5, 0]] * 8, np.float32)
        rows = x[:, None].repeat(2, 1)
        yield emulated.verify_draft(rows, tokens, uniforms=coins, **params)
        given = emulated.verify_draft(
            rows, tokens, uniforms=coins, logprobs=False, **params
        )
        yield given[:2]
        assert (given[2] == -7).all()
    # One logit of nearly no weight, others just above the border of a bin.
    x = np.full((3, 300), -30, np.float32)
    x[:, 0], x[:, 299] = [0, 0, 2], [-18, -1 + 2**-21, 1 + 2**-21]
    x[1, 1] = -1.5
    u = np.full((3, 2), 1 - 2**-24, np.float32)
    few = {"top_k": 2}, {"top_p": 0.8}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.9}
    for params in ({"min_p": 1e-9}, *few):
        for order in cases.ORDERS:
            yield emulated.sample(x, u, filter_order=order, **params)
    # A second logit at the bound of what is collected, and next to it.
    x = np.full((3, 300), -5, np.float32)
    x[:, 0] = 0
    bound = np.float32(-0.125) - np.float32(1e-6) * np.float32(0.125)
    x[:, 256] = np.nextafter(bound, np.float32([-1, bound, 0]))
    yield emulated.sample(x, u, top_k=2)
    # As many equal candidates as are few, more threads, and a draft out of range.
    most, coins = Host(machine, seed=seed), np.zeros((1, 3), np.float32)
    even = np.zeros((1, 2, 512), np.float32)
    yield most.verify_draft(even, np.full((1, 1), 512), uniforms=coins, top_k=1)
    # Little weight that is kept, and keys for one bin too many.
    x = np.zeros((2, 3000), np.float32)
    x[0, 9] = 0.3
    x[1, :202] = [2 - 1 / 2400, 1 - 1 / 3200, *np.linspace(1, 1.1, 200)]
    for k in (1, 100):
        yield emulated.sample(x, u[:2], top_k=k)
    # More candidates than threads.
    x = rng.normal(0, 1, (1, 26000)).astype(np.float32)
    yield emulated.sample(x, u[:1], top_k=80, top_p=0.9)


def coupled(machine, seed, dtypes=DTYPES):
    """Races over many groups and chunks, with drafts that are right, and flaws."""
    rng = np.random.default_rng(11)
    for i, params in enumerate(cases.FILTERS):
        dtype, V = dtypes[i % len(dtypes)], SIZES[i % 3]
        params = {**params, "filter_order": cases.ORDERS[i % 2]}
        emulated = Host(machine, chunk=256, threads=[64, 96, 32][i % 3], seed=seed)
        case = {
            "target": cases.rounded(rng.normal(0, 2, (2, 3, V)), dtype),
            "seed": rng.integers(0, 2**32, (2, 2), np.uint32),
            "position": rng.integers(0, 2**31, 2),
            **params,
        }
        tokens = np.full((2, 2), -1, np.int32)
        for k in range(3):
            got = emulated.verify_coupled(**case, draft_tokens=tokens, dtype=dtype)
            yield got
            tokens = np.where(got[0][:, :2] >= 0, got[0][:, :2], tokens)
            case["draft_lengths"] = np.array([2, k])
    # Fewer groups than a chunk has, a greedy first id, more drafts than words.
    rows, tokens = np.zeros((1, 4, 300), np.float32), np.zeros((1, 3))
    words = np.zeros((1, 2), np.uint32)
    one = Host(machine, seed=seed)
    for params in ({"top_k": 3}, {"temperature": 0}):
        yield one.verify_coupled(rows, tokens, seed=words, position=[0], **params)
    # Races that the low word of the noise decides, at both ends, and one without a
    # winner but for the order of ids.
    rows, none = np.full((3, 1, 256), -np.inf, np.float32), np.zeros((3, 0))
    rows[0, 0, [0, 164]] = 15.4476, 0
    rows[1, 0, [0, 141]] = -3.11307, 0
    rows[2, 0, [130, 133]] = 0
    words, position = np.zeros((3, 2), np.uint32), [8008, 50503, 273687]
    yield one.verify_coupled(rows, none, seed=words, position=position)
    # More chunks than lanes, flat, masked and unusable rows, lengths out of range.
    emulated = Host(machine, chunk=256, threads=64, seed=seed)
    x = np.zeros((4, 2, 8700), np.float32)
    x[1] = rng.normal(0, 3, x[1].shape)
    x[2, 0, 8699], x[3, 1, 0] = np.nan, np.inf
    case = {
        "target": x,
        "seed": rng.integers(0, 2**32, (4, 2), np.uint32),
        "position": np.arange(4),
    }
    for params in ({}, {"top_k": 3}, {"min_p": 0.5}):
        got = emulated.verify_coupled(**case, **params, draft_tokens=np.zeros((4, 1)))
        yield got
        right = np.maximum(got[0][:, :1], 0)
        words = cases.bits(rng.random(x.shape) < 0.4)
        yield emulated.verify_coupled(
            **case, **params, draft_tokens=right, draft_lengths=[1, 1, 2, -1]
        )
        yield emulated.verify_coupled(
            **case, **params, draft_tokens=right, allowed=words
        )


def flaws(machine, seed):
    """Unusable rows, drafts and parameters, empty residuals."""
    emulated = Host(machine, chunk=256, threads=64, seed=seed)
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (6, 2, 300)).astype(np.float32)
    x[0, 0, 299], x[1, 1] = np.nan, -np.inf
    draft = x[:, :1].copy()
    draft[2, 0, 0] = np.inf
    tokens = np.array([[0], [0], [1], [300], [-1], [5]], np.int32)
    u = np.tile(np.array([1.5, 0.999, 0.999], np.float32), (6, 1))
    temperature = np.array([1, np.inf, np.nan, -1, -0.0, 0.5])
    for params in ({}, {"top_k": 9}, {"temperature": temperature}):
        yield emulated.verify_draft(x, tokens, draft, uniforms=u, **params)
        for i in (0, 1):
            yield emulated.sample(x[:, i].copy(), u[:, 1:].copy(), **params)
    # Flagged after drafts that another thread accepted.
    x = rng.normal(0, 1, (2, 4, 40)).astype(np.float32)
    x[:, 3, 5] = np.nan
    u = np.zeros((2, 5), np.float32)
    few = Host(machine, threads=32, seed=seed)
    yield few.verify_draft(x, np.full((2, 3), 7), uniforms=u, min_p=1e-9)


def drafts(machine, seed):
    """Drafts without probability, statistics of nothing, flaws that do not count."""
    emulated = Host(machine, chunk=256, threads=64, seed=seed)
    x, draft = np.zeros((4, 2, 256)), np.zeros((4, 1, 256), np.float32)
    draft[0, 0, 7] = -np.inf
    known = np.tile(np.array([np.log(256), -np.inf, 1], np.float32), (4, 1, 1))
    known[1:, 0, 2] = [0, np.nan, -1]
    inputs = x.astype(np.float32), np.full((4, 1), 7, np.int32), draft
    others = {}, {"top_p": 0.5}, {"temperature": 0}
    for options in ({}, *({"draft_stats": known, **x} for x in others)):
        for coin in (0, 0.999):
            u = np.full((4, 3), coin, np.float32)
            yield emulated.verify_draft(*inputs, uniforms=u, **options)
    # An accepted draft whose log-probability is not wanted.
    u = np.zeros((4, 3), np.float32)
    yield emulated.verify_draft(*inputs[:2], uniforms=u, logprobs=False)
    # A residual of less than 2^-28, and the first id where without the draft it
    # would be the second, by one simdgroup.
    x = np.zeros((1, 2, 256), np.float32)
    x[0, 0, 7] = 25
    u = np.array([[1.5, 0.9, 0]], np.float32)
    yield emulated.verify_draft(x, np.full((1, 1), 7), uniforms=u)
    x = np.full((1, 2, 40), -9, np.float32)
    x[0, 0, :3] = np.log([0.3, 0.35, 0.35])
    u = np.array([[0.999, 0.4, 0]], np.float32)
    one = Host(machine, threads=32, seed=seed)
    yield one.verify_draft(x, np.ones((1, 1)), uniforms=u, top_k=3)
    # No draft at all, of none.
    none = np.zeros((4, 0), np.int32), np.zeros((4, 0, 320), np.float32)
    u = np.full((4, 2), 0.5, np.float32)
    for params in ({}, {"top_p": 0.5}):
        one = inputs[0][:, :1].copy()
        yield emulated.verify_draft(one, *none, uniforms=u, **params)
    # The first id as a rejected point mass, and flaws of a draft elsewhere.
    for params in ({}, {"top_k": 3}, {"min_p": 1e-9}):
        tokens, u = np.zeros((4, 1), np.int32), np.eye(3, dtype=np.float32)[[0] * 4]
        yield emulated.verify_draft(inputs[0], tokens, uniforms=u * 0.999, **params)
    # The first id as all that is left, and without mass in a greedy draft.
    first = np.zeros((4, 1, 256), np.float32)
    first[:, 0, 0] = -np.inf
    u = np.array([[0.999, 0.5, 0]] * 4, np.float32)
    yield emulated.verify_draft(*inputs[:2], first, uniforms=u)
    yield emulated.verify_draft(
        inputs[0], tokens, first, uniforms=u, draft_temperature=0
    )
    known[:, 0, 2] = 1
    draft[1, 0, 9], draft[2, 0, 255] = np.nan, np.inf
    for coin in (0, 0.999, 1.5):
        u = np.array([[coin, 0.001, 0]] * 4, np.float32)
        yield emulated.verify_draft(*inputs, uniforms=u, draft_stats=known)
        yield emulated.verify_draft(*inputs, uniforms=u)


def borders(machine, seed):
    """Uniforms and rows at and past every border."""
    emulated = Host(machine, chunk=256, threads=64, seed=seed)
    rng = np.random.default_rng(8)
    # A mask that ends with the row.
    words = rng.integers(0, 2**32, (2, 8), np.uint32)
    u = np.full((2, 2), 0.5, np.float32)
    yield emulated.sample(np.zeros((2, 256), np.float32), u, allowed=words)
    # Weights that are 0 after the last id that can be drawn, and before the first.
    x = np.full((4, 700), -np.inf, np.float32)
    x[:, [3, 299, 300, 420]] = 0
    u = np.array([[0, 0], [0.5, 0], [1, 1], [0.25, 0]], np.float32)
    for params in ({}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 1}):
        yield emulated.sample(x, u, **params)
    # The same in one simdgroup and in one lane's share of the chunks, and a uniform
    # that is exactly a border.
    u = np.array([[1, 1], [0.5, 0], [0.25, 0], [0, 0]], np.float32)
    long = np.full((4, 17000), -np.inf, np.float32)
    long[:, :512] = 0
    yield Host(machine, 1024, 32, seed).sample(long[:, :1000].copy(), u)
    yield emulated.sample(long, u)
    lengths = np.array([0, 1, -1, 2], np.int32)
    tokens = np.array([[3], [299], [3], [3]], np.int32)
    rows = x[:, None].repeat(2, 1)
    u = np.array([[0.1, 0.3, 0], [0.25, 0.3, 0], [0, 0, 0], [0, 0, 0]], np.float32)
    for params in ({}, {"top_k": 2}, {"top_k": 0.5}, {"top_p": 0.0}, {"min_p": 1}):
        yield emulated.verify_draft(
            rows, tokens, uniforms=u, draft_lengths=lengths, **params
        )
    # Between two groups of a row that is drawn from in parts.
    flat, none = np.zeros((2, 1, 512), np.float32), np.zeros((2, 0), np.int32)
    u = np.array([[0.5, 0], [0.25, 0]], np.float32)
    for params in ({}, {"min_p": 0.5}):
        yield emulated.verify_draft(flat, none, uniforms=u, **params)
    yield Host(machine, 1024, 64, seed).verify_draft(flat, none, uniforms=u)
    # One group alone of two that a thread has: the last of the row, drawn with a
    # uniform of 1, the first, and the second.
    x = np.full((3, 1, 33 * 256), -np.inf, np.float32)
    x[0, 0, -256:] = x[1, 0, :256] = x[2, 0, 256:512] = 0
    u = np.array([[1, 1], [1, 1], [0.5, 0]], np.float32)
    one = Host(machine, 4096, 32, seed)
    yield one.verify_draft(x, np.zeros((3, 0)), uniforms=u)
    # Logits of both zeros, far apart, and one value alone.
    x = np.array([[-0.0, 0.0, -1, 0], [3e38, -3e38, 5, 3e38], [-80, 2, -90, 1]])
    u = np.full((3, 2), 0.99, np.float32)
    for params in ({"top_k": 1}, {"top_p": 0.5}, {"temperature": 0}, {"top_k": 3}):
        yield emulated.sample(x.astype(np.float32), u, **params)


def scale_by(machine):
    rng = np.random.default_rng(4)
    total = rng.integers(0, 2**61, 64, np.uint64)
    u = rng.integers(0, 2**48, 64, np.uint64)
    total[:4], u[2:6] = [0, 1, 2**60, 2**61 - 1], [0, 1, 2**48 - 1, 2**24]
    out = np.zeros(64, np.uint64)
    machine.launch("units_scale_by", (1,), (64,), {0: total, 1: u, 2: out})
    return total, u, out


def fine_uniform(machine):
    values = [0, 0.5, 1 - 2**-24, 1, 7e30, -1, np.nan, 2**-24]
    high, low = (np.array(v, np.float32) for v in np.meshgrid(values, values))
    out = np.zeros(64, np.uint64)
    high, low = np.ascontiguousarray(high.ravel()), np.ascontiguousarray(low.ravel())
    machine.launch("units_fine_uniform", (1,), (64,), {0: high, 1: low, 2: out})
    return high, low, out


def pick(machine):
    rng = np.random.default_rng(5)
    weights = rng.integers(0, 2**40, (64, 32), np.uint64)
    weights[rng.random((64, 32)) < 0.5] = 0
    weights[::8] = 0
    weights[1::8, 9:] = 0
    totals = weights.sum(1)
    thresholds = (totals * rng.random(64)).astype(np.uint64)
    border = np.cumsum(weights, 1)[np.arange(64), rng.integers(0, 32, 64)]
    thresholds[1::3] = border[1::3]
    thresholds[2::3] = np.maximum(border, 1)[2::3] - np.uint64(1)
    thresholds[3::7] = 2**64 - 1
    lanes, rests = np.zeros(2048, np.int32), np.zeros(2048, np.uint64)
    buffers = {0: weights, 1: thresholds, 2: lanes, 3: rests}
    machine.launch("units_pick", (16,), (128,), buffers)
    return weights, thresholds, lanes, rests


def keys(machine, dtype):
    rng = np.random.default_rng(6)
    special = [0.0, -0.0, np.inf, -np.inf, 1, -1, 6e-8, -6e-8, 65504, -65504, 3e38]
    z = np.concatenate([special, rng.normal(0, 10, 53), rng.normal(0, 1e-6, 64)])
    with np.errstate(over="ignore"):
        z = cases.rounded(z, dtype)
    out, back = np.zeros(128, np.uint32), np.zeros(128, np.float32)
    machine.launch(f"units_keys_{dtype}", (1,), (128,), {0: z, 1: out, 2: back})
    return z, out, back


def units(machine, seed):
    yield scale_by(machine)
    yield fine_uniform(machine)
    yield pick(machine)
    for dtype in DTYPES:
        yield keys(machine, dtype)


def commits(machine, seed):
    rng = np.random.default_rng(2)
    for i, dtype in enumerate(["uint8", "float16", "float32", "int64"]):
        cache, rows = commit_case(rng, dtype, D=[3, 8, 5, 8][i])
        for ring in (0, 5):
            emulated = Host(machine, threads=32, seed=seed)
            yield [emulated.commit_rows(cache, rows, [-1, 5], [2, 9], ring)]


def replays(machine, seed, dtypes=DTYPES):
    rng = np.random.default_rng(3)
    # Whole rows and others, and rows that are not a multiple of those of a simdgroup.
    shapes = [(128, 4, 1), (40, 3, 1), (200, 4, 1), (256, 8, 1)]
    shapes += [(128, 24, 2), (128, 12, 2), (40, 5, 2)]
    for i, (Dk, Dv, rows) in enumerate(shapes):
        emulated = Host(machine, threads=64, seed=seed, rows=rows)
        dtype = dtypes[i % len(dtypes)]
        size = {"B": 2, "T": 3, "Hk": 2, "Hv": 4, "Dk": Dk, "Dv": Dv}
        args = delta_case(rng, **size, dtype=dtype) | {"steps": [2, 3 * (i % 2)]}
        yield emulated.gated_delta_replay(**args, dtype=dtype)
        del args["q"]
        yield [emulated.gated_delta_replay(**args, dtype=dtype, in_place=rows == 2)]
    # What lies behind the end of a row stays 0.
    args = delta_case(rng, 1, 1, 1, 1, Dk=38, Dv=2, dtype="float32") | {"steps": [1]}
    args |= {name: np.abs(args[name]) for name in ("k", "q")}
    args["v"][:] = np.inf
    yield Host(machine, threads=64, seed=seed).gated_delta_replay(**args)


SAMPLING = [units, coupled, flaws, drafts, borders, filters, turns, sampling]


def everything(machine, seed=0):
    """The outputs of all runs."""
    parts = [*SAMPLING, commits, replays]
    return [np.asarray(x) for part in parts for run in part(machine, seed) for x in run]
