"""Targets: one adapter a model family, chosen by ``model_type``."""

from .base import Target, TargetOutput
from .generic import GenericTarget
from .qwen3_5 import Qwen35Target

_FAMILIES = {"qwen3_5": Qwen35Target, "qwen3_5_moe": Qwen35Target}


def as_target(model) -> Target:
    """The target adapter of an ``mlx_lm`` model."""
    return _FAMILIES.get(model.model_type, GenericTarget)(model)


def takes_heads(model) -> bool:
    """Whether the target adapter gives the hidden rows that an MTP head reads."""
    return getattr(model, "model_type", None) in _FAMILIES


__all__ = [
    "GenericTarget",
    "Qwen35Target",
    "Target",
    "TargetOutput",
    "as_target",
    "takes_heads",
]
