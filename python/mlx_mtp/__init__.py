"""Exact multi-token-prediction speculative decoding for MLX.

Names are imported at first use: the command line must choose a BLAS before MLX is
loaded, and ``mlx_mtp.reasoning`` needs no MLX at all.
"""

from importlib import import_module

_HOME = {
    "load": ".loading",
    "load_drafter": ".loading",
    "load_vision": ".loading",
    "generate": ".generation",
    "stream_generate": ".generation",
    "make_sampler": ".generation",
    "make_logits_processors": ".processors",
    "Session": ".session",
    "copy_prompt_cache": ".prompt_cache",
    "load_prompt_cache": ".prompt_cache",
    "save_prompt_cache": ".prompt_cache",
    "Grammar": ".grammar",
    "speculative_step": ".speculative",
    "SpeculativeDecoder": ".speculative",
    "BatchIterator": ".batch",
    "Scheduler": ".scheduler",
    "as_target": ".targets",
    "VisionPrompt": ".targets",
    "register_family": ".targets",
    "SamplingParams": ".sampling",
    "Telemetry": ".telemetry",
    "MemoryBudgetExceeded": ".memory",
    "MemoryPlan": ".memory",
    "MemoryPolicy": ".memory",
    "DraftModelDrafter": ".drafters",
    "Gemma4AssistantDrafter": ".drafters",
    "MTPHeadDrafter": ".drafters",
    "NGramDrafter": ".drafters",
    "VisionHeadDrafter": ".drafters",
    "draft_vocabulary": ".drafters",
    "sample": ".ops",
    "verify_coupled": ".ops",
    "verify_draft": ".ops",
    "commit_rows": ".ops",
    "gated_delta_replay": ".ops",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__():
    return [*globals(), *__all__]
