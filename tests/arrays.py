"""Test inputs: dtypes and layouts that an op has to take."""

import mlx.core as mx
import numpy as np

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
LAYOUTS = ["plain", "rows apart", "last axis apart", "transposed", "offset"]


def array(values, dtype=mx.float32, layout="plain"):
    """``values`` as an evaluated array behind other strides."""
    x = mx.array(np.asarray(values, np.float32)).astype(dtype)
    if layout == "rows apart":
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 5)])[..., :-5]
    elif layout == "last axis apart":
        x = mx.repeat(x, 2, axis=-1)[..., ::2]
    elif layout == "transposed":
        axes = list(range(x.ndim))[::-1]
        x = mx.contiguous(x.transpose(axes)).transpose(axes)
    elif layout == "offset":
        x = mx.concatenate([x[:1], x])[1:]
    mx.eval(x)
    return x


def values(x):
    """What the op sees, as float64."""
    return np.array(x.astype(mx.float32), np.float64)


def bits(allowed):
    """A boolean array ``(..., V)`` as uint32 words ``(..., (V + 31) // 32)``."""
    allowed = np.asarray(allowed, bool)
    pad = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    packed = np.packbits(np.pad(allowed, pad), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)
