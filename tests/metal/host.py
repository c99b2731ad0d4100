"""What the host does for the kernels, as metal/README.md fixes it, in NumPy.

Floating inputs are float32 arrays that hold values of ``dtype``; ``store`` rounds them.
"""

import ctypes
import re
from pathlib import Path

import numpy as np

METAL = Path(__file__).parents[2] / "metal"
UNITS = Path(__file__).parent / "units.metal"
SOURCES = [*sorted(METAL.glob("*.metal")), UNITS]
DTYPES = ["float32", "float16", "bfloat16"]
FORMS = {"float": ctypes.c_float, "int": ctypes.c_int}


def read_structs(text):
    """The structs of params.h as ctypes classes."""
    structs = {}
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", text, re.M | re.S):
        fields = []
        for form, field, count in re.findall(
            r"^  (\w+) (\w+)(?:\[(\d)\])?;", body, re.M
        ):
            kind = {**FORMS, **structs}[form]
            fields.append((field, kind * int(count) if count else kind))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


STRUCTS = read_structs((METAL / "params.h").read_text())


def store(x, dtype):
    """The bits of an array in ``dtype``, rounded to the nearest even."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype != "bfloat16":
        return x.astype(dtype)
    u = x.view(np.uint32)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def load(x, dtype):
    """The inverse of ``store``, float32."""
    if dtype != "bfloat16":
        return x.astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32)


def strides(x, count):
    """The first strides of an array in elements."""
    return tuple(s // x.itemsize for s in x.strides[:count])


def optional_strides(x, count):
    return (0,) * count if x is None else strides(x, count)


def is_aligned(*arrays):
    """Whether every row starts at a multiple of 16 bytes."""
    return all(
        x.ctypes.data % 16 == 0 and all(s % 16 == 0 for s in x.strides[:-1])
        for x in arrays
    )


def scratch(count, form):
    """Memory that holds NaN wherever a kernel reads before it writes."""
    return np.full(count * ctypes.sizeof(form), 0xFF, np.uint8)


def params_array(value, batch):
    """A parameter and its stride."""
    value = np.array(value, np.float32)
    assert value.ndim == 0 or value.shape == (batch,)
    return value.reshape(-1), value.ndim


def filters(params):
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    return any(np.any(params.get(name, value) != value) for name, value in off.items())


def verify_scratch(params, rows, unused):
    """Buffers 12 to 17 of verify_draft."""
    B, chunks = params.batch, params.chunks
    partials = scratch(rows * chunks, STRUCTS["Partial"])
    drafted = scratch(rows, ctypes.c_float)
    if params.filtered:
        BT = B * (params.drafts + 1)
        maxima = scratch(BT * params.groups, ctypes.c_float)
        densities = scratch(BT, STRUCTS["Density"])
        words = scratch(BT * 512, ctypes.c_uint64)
        decisions = scratch(BT, STRUCTS["Decision"])
    else:
        maxima = densities = unused
        words = scratch(B * params.groups, ctypes.c_uint64)
        decisions = scratch(B, STRUCTS["Decision"])
    found = partials, maxima, densities, words, decisions, drafted
    return dict(enumerate(found, 12))


def verify_arguments(x, y, draft_tokens, coins, lengths, allowed, sizes, params):
    """What the kernels of both verifying ops are given: constants and buffers."""
    B, T, V = x.shape
    chunk, part = sizes
    order = params.pop("filter_order", "temperature_first")
    filtered = params.pop("filtered", filters(params))
    off = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    values = {name: params_array(params.get(name, off[name]), B) for name in off}
    draft_tokens = np.asarray(draft_tokens, np.int32)
    constants = STRUCTS["VerifyDraftParams"](
        vocab=V,
        chunk=chunk,
        chunks=-(-V // chunk),
        groups=-(-V // 256),
        part=part,
        batch=B,
        drafts=T - 1,
        filtered=filtered,
        temperature_first=order == "temperature_first",
        has_draft_lengths=lengths is not None,
        has_allowed=allowed is not None,
        has_logprobs=True,
        aligned=is_aligned(x, y),
        target_strides=strides(x, 2),
        allowed_strides=optional_strides(allowed, 2),
        tokens_strides=strides(draft_tokens, 2),
        lengths_stride=1,
        **{f"{name}_stride": stride for name, (_, stride) in values.items()},
    )
    buffers = {
        0: x,
        1: y,
        2: draft_tokens,
        3: coins,
        **{4 + i: array for i, (array, _) in enumerate(values.values())},
        9: x,
        10: x if lengths is None else np.asarray(lengths, np.int32),
        11: x if allowed is None else allowed,
        18: np.full((B, T), -7, np.int32),
        19: np.full(B, -7, np.int32),
        20: np.full((B, T), -7, np.float32),
        21: constants,
    }
    return constants, buffers


class Host:
    """The ops on an emulator. ``launch`` arguments: see ``emulator.Emulator``."""

    def __init__(
        self, emulator, chunk=None, threads=None, seed=0, part=None, rows=None
    ):
        self.emulator = emulator
        self.chunk = chunk
        self.part = part
        self.rows = rows
        self.threads = threads
        self.seed = seed

    def chunk_size(self, rows, V):
        return self.chunk or (4096 if rows * V < 2**23 else 16384)

    def sizes(self, B, rows, V):
        """Logits of a chunk and groups of a part."""
        groups = B * -(-V // 256)
        return self.chunk_size(rows, V), self.part or min(-(-groups // 2700), 8)

    def launch(self, kernel, grid, threads, buffers):
        threads = self.threads or threads
        self.emulator.launch(kernel, grid, (threads,), buffers, seed=self.seed)

    def sample(self, logits, uniforms, dtype="float32", allowed=None, **params):
        """logits (R, V), uniforms (R, 2), allowed (R, W) -> tokens, stats."""
        x = logits if logits.dtype != np.float32 else store(logits, dtype)
        R, V = x.shape
        order = params.pop("filter_order", "temperature_first")
        filtered = params.pop("filtered", filters(params))
        batch = params.pop("batch", R)
        values = {
            name: params_array(params.get(name, off), batch)
            for name, off in [
                ("temperature", 1),
                ("top_k", 0),
                ("top_p", 1),
                ("min_p", 0),
            ]
        }
        chunk = self.chunk_size(R, V)
        chunks, groups = -(-V // chunk), -(-V // 256)
        constants = STRUCTS["SampleParams"](
            vocab=V,
            chunk=chunk,
            chunks=chunks,
            groups=groups,
            rows_per_param=R // batch,
            filtered=filtered,
            temperature_first=order == "temperature_first",
            has_allowed=allowed is not None,
            aligned=is_aligned(x),
            logits_stride=strides(x, 1)[0],
            uniforms_stride=strides(uniforms, 1)[0],
            allowed_stride=optional_strides(allowed, 1)[0],
            **{f"{name}_stride": stride for name, (_, stride) in values.items()},
        )
        tokens, stats = np.full(R, -7, np.int32), np.full((R, 3), -7, np.float32)
        buffers = {
            0: x,
            1: uniforms,
            **{2 + i: array for i, (array, _) in enumerate(values.values())},
            6: x if allowed is None else allowed,
            7: scratch(R * chunks, STRUCTS["Partial"]),
            8: scratch(R * groups, ctypes.c_float) if filtered else x,
            9: tokens,
            10: stats,
            11: constants,
        }
        self.launch(f"sample_partials_{dtype}", (R, chunks), 128, buffers)
        kind = "filtered_" * bool(filtered)
        self.launch(f"sample_draw_{kind}{dtype}", (R,), 512, buffers)
        return tokens, stats

    def verify_draft(
        self,
        target,
        draft_tokens,
        draft=None,
        *,
        uniforms,
        dtype="float32",
        draft_stats=None,
        draft_lengths=None,
        allowed=None,
        draft_temperature=None,
        logprobs=True,
        **params,
    ):
        """As ``mlx_mtp.ops.verify_draft`` -> tokens, accepted, logprobs."""
        x = target if target.dtype != np.float32 else store(target, dtype)
        B, T, V = x.shape
        y = x[:, : T - 1]
        if draft is not None:
            y = draft if draft.dtype != np.float32 else store(draft, dtype)
        if draft_temperature is None:
            draft_temperature = params.get("temperature", 1)
        rows = B * T + (B * (T - 1) if draft is not None else 0)
        sizes = self.sizes(B, rows, V)
        constants, buffers = verify_arguments(
            x, y, draft_tokens, uniforms, draft_lengths, allowed, sizes, params
        )
        buffers[8], constants.draft_temperature_stride = params_array(
            draft_temperature, B
        )
        constants.has_draft_logits = draft is not None
        constants.has_draft_stats = draft_stats is not None
        constants.has_logprobs = logprobs
        constants.draft_strides[:] = strides(y, 2)
        constants.stats_strides[:] = optional_strides(draft_stats, 2)
        constants.uniforms_stride = strides(uniforms, 1)[0]
        buffers[9] = x if draft_stats is None else draft_stats
        buffers |= verify_scratch(constants, rows, x)
        self.launch_verify(dtype, constants, rows, buffers)
        return buffers[18], buffers[19], buffers[20]

    def verify_coupled(
        self,
        target,
        draft_tokens,
        *,
        seed,
        position,
        dtype="float32",
        draft_lengths=None,
        allowed=None,
        **params,
    ):
        """As ``mlx_mtp.ops.verify_coupled`` -> tokens, accepted, logprobs."""
        x = target if target.dtype != np.float32 else store(target, dtype)
        B, T, V = x.shape
        rows, sizes = B * T, self.sizes(B, B * T, V)
        verify, buffers = verify_arguments(
            x, x, draft_tokens, seed, draft_lengths, allowed, sizes, params
        )
        buffers[8] = np.asarray(position, np.int32)
        buffers |= verify_scratch(verify, rows, x)
        buffers[16] = scratch(rows * verify.chunks, STRUCTS["Racer"])
        self.launch_rows(dtype, verify, rows, buffers, "threshold")
        buffers[21] = STRUCTS["VerifyCoupledParams"](
            verify=verify, seed_stride=strides(seed, 1)[0], position_stride=1
        )
        kind = "filtered_" * bool(verify.filtered) + dtype
        self.launch(f"verify_coupled_race_{kind}", (rows, verify.chunks), 128, buffers)
        self.launch(f"verify_coupled_finish_{kind}", (B,), 128, buffers)
        return buffers[18], buffers[19], buffers[20]

    def launch_rows(self, dtype, params, rows, buffers, second):
        grid = (rows, params.chunks)
        self.launch(f"verify_draft_partials_{dtype}", grid, 128, buffers)
        if params.filtered:
            grid = (params.batch * (params.drafts + 1),)
            threads = 640 if rows * params.vocab < 2**23 else 512
            self.launch(f"verify_draft_{second}_{dtype}", grid, threads, buffers)

    def launch_verify(self, dtype, params, rows, buffers):
        B, kind = params.batch, "filtered_" * bool(params.filtered)
        self.launch_rows(dtype, params, rows, buffers, "threshold_judged")
        if not params.filtered:
            threads = self.threads or 256
            grid = (B, -(-params.groups // (params.part * threads // 32)))
            self.launch(f"verify_draft_residual_{dtype}", grid, threads, buffers)
        each = 256 if params.filtered else min(32 * -(-params.groups // 32), 1024)
        self.launch(f"verify_draft_draw_{kind}{dtype}", (B,), each, buffers)

    def commit_rows(self, cache, rows, start, count, ring=0):
        """Any dtype; ``rows`` with any strides but the last. Returns a new cache."""
        cache = np.ascontiguousarray(cache).copy()
        B, H, S, D = cache.shape
        T = rows.shape[2]
        row_bytes = [cache.ctypes.data, rows.ctypes.data, D * cache.itemsize]
        unit = next(
            size
            for size in (16, 4, 2, 1)
            if all(n % size == 0 for n in [*row_bytes, *rows.strides[:3]])
        )
        units = D * cache.itemsize // unit
        constants = STRUCTS["CommitRowsParams"](
            heads=H,
            slots=S,
            rows=T,
            units=units,
            ring=ring,
            start_stride=1,
            count_stride=1,
            rows_strides=tuple(s // unit for s in rows.strides[:3]),
        )
        buffers = {
            0: cache,
            1: rows,
            2: np.asarray(start, np.int32),
            3: np.asarray(count, np.int32),
            4: constants,
        }
        threads = self.threads or 256
        grid = (-(-T * units // threads), H, B)
        self.launch(f"commit_rows_{8 * unit}", grid, threads, buffers)
        return cache

    def gated_delta_replay(
        self, state, k, v, g, beta, steps, q=None, dtype="float32", in_place=False
    ):
        """k, v, q hold values of ``dtype``. Returns the state, and y with q."""
        k, v = store(k, dtype), store(v, dtype)
        has_q = q is not None
        q = store(q, dtype) if has_q else k
        B, T, Hv, Dv = v.shape
        Hk, Dk = k.shape[2:]
        g, beta = (np.ascontiguousarray(x, np.float32) for x in (g, beta))
        state = np.array(state, np.float32)
        out = state if in_place else np.full_like(state, np.nan)
        aligned = Dk % 4 == 0 and all(s % 4 == 0 for x in (k, q) for s in strides(x, 3))
        constants = STRUCTS["GatedDeltaReplayParams"](
            steps=T,
            key_heads=Hk,
            value_heads=Hv,
            key_dim=Dk,
            value_dim=Dv,
            has_q=has_q,
            aligned=aligned,
            steps_stride=1,
            k_strides=strides(k, 3),
            v_strides=strides(v, 3),
            g_strides=strides(g, 3),
            beta_strides=strides(beta, 3),
            q_strides=strides(q, 3),
        )
        y = np.ones(v.shape, v.dtype)
        buffers = {
            0: state,
            1: k,
            2: v,
            3: g,
            4: beta,
            5: np.asarray(steps, np.int32),
            6: q,
            7: out,
            8: y if has_q else out,
            9: constants,
        }
        threads = self.threads or 64
        size = 128 if Dk <= 128 else 256
        many = size == 128 and B * Hv * Dv >= 16384
        rows = self.rows or (2 if many else 1)
        grid = (-(-Dv // (threads // 8 * rows)), Hv, B)
        name = f"gated_delta_replay_{dtype}_{size}_{rows}"
        self.launch(name, grid, threads, buffers)
        return (out, load(y, dtype)) if has_q else out
