"""Targets: one adapter a model family, chosen by ``model_type``.

Families are imported at first use: only they need ``mlx_lm``, the protocol does not.
"""

from importlib import import_module

from .base import Target, TargetOutput

_HOME = {"GenericTarget": ".generic", "Qwen35Target": ".qwen3_5"}
_FAMILIES = {"qwen3_5": "Qwen35Target", "qwen3_5_moe": "Qwen35Target"}


def as_target(model) -> Target:
    """The target adapter of an ``mlx_lm`` model."""
    return __getattr__(_FAMILIES.get(model.model_type, "GenericTarget"))(model)


def takes_heads(model) -> bool:
    """Whether the target adapter gives the hidden rows that an MTP head reads."""
    return getattr(model, "model_type", None) in _FAMILIES


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


__all__ = [
    "GenericTarget",
    "Qwen35Target",
    "Target",
    "TargetOutput",
    "as_target",
    "takes_heads",
]
