"""Decodes with the package mtplx, in a Python of its own that has it.

    PYTHON mtplx_worker.py FOLDER DTYPE [BLAS THREADS]

Each line of the standard input is a request in JSON, each line of the output its
answer. This file is run by path and imports nothing of mlx_mtp.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter, process_time

# As its own server sets them for models with recurrent layers.
SETTINGS = (
    "MTPLX_LAZY_VERIFY_LOGITS",
    "MTPLX_LAZY_TARGET_DISTRIBUTIONS",
    "MTPLX_LAZY_MTP_HISTORY_APPEND",
    "MTPLX_SKIP_VERIFY_SNAPSHOT",
    "MTPLX_DROP_EVENTS",
)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no answer
    folder, dtype, *blas = sys.argv[1:]
    if blas:
        library = ctypes.CDLL(blas[0], mode=ctypes.RTLD_GLOBAL)
        library.openblas_set_num_threads(int(blas[1]))
    for name in SETTINGS:
        os.environ.setdefault(name, "1")
    if sys.platform == "linux":
        _stand_in_for_macos()
    import mlx.core as mx
    from mtplx import runtime

    loaded = runtime.load(folder)
    loaded.model.set_dtype(getattr(mx, dtype))
    mx.eval(loaded.model.parameters())
    versions = {name: _version(name) for name in ("mtplx", "mlx-lm", "mlx")}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(loaded, json.loads(line))), file=answers, flush=True)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def decode(loaded, request: dict) -> dict:
    """The answer to a request; depth 0 is decoding without drafts."""
    import mlx.core as mx
    from mtplx import generation
    from mtplx.sampling import SamplerConfig

    times, cpu = [], []  # of the request, then of every token

    def token_callback(_):
        times.append(perf_counter())
        cpu.append(process_time())

    options = {
        "max_tokens": request["max_tokens"],
        "sampler": SamplerConfig(
            temperature=request["temperature"],
            top_p=request["top_p"],
            top_k=request["top_k"],
        ),
        "seed": request["seed"],
        "stop_token_ids": set(request["stop"]),
        "token_callback": token_callback,
    }
    mx.reset_peak_memory()
    token_callback(None)
    if request["depth"]:
        options |= {
            "speculative_depth": request["depth"],
            "verify_strategy": "capture_commit",
            "verify_core": _verify_core(mx),
            "mtp_history_policy": "committed",
        }
        out = generation.generate_mtpk(loaded, request["prompt"], **options)
        counts = {
            "rounds": out.stats.verify_calls,
            "accepted": list(out.stats.accepted_by_depth),
            "drafted": list(out.stats.drafted_by_depth),
        }
    else:
        out = generation.generate_ar(loaded, request["prompt"], **options)
        counts = {"rounds": 0, "accepted": [], "drafted": []}
    return {
        "tokens": list(map(int, out.tokens)),
        "seconds": times[-1] - times[0],
        "cpu": cpu[-1] - cpu[0],
        "first": times[1] - times[0],
        "peak_bytes": mx.get_peak_memory(),
        **counts,
    }


def _verify_core(mx) -> str:
    """Its server's choice; without Metal all but one lose the recurrent state."""
    return "linear-gdn-from-conv-tape" if mx.metal.is_available() else "stock"


def _stand_in_for_macos() -> None:
    """mtplx opens libSystem at import, for timers: on Linux a stand-in will do."""
    real = ctypes.CDLL

    class AnySymbol:
        def __getattr__(self, name):
            symbol = type("Symbol", (), {"__call__": lambda self, *_: 0})()
            setattr(self, name, symbol)
            return symbol

    def open_library(name, *args, **options):
        if "libSystem" in str(name):
            return AnySymbol()
        return real(name, *args, **options)

    ctypes.CDLL = open_library


if __name__ == "__main__":
    main()
