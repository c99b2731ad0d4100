"""Targets: one adapter a model family, chosen by model type and config.

Families are imported at first use: only they need ``mlx_lm``, the protocol does not.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..heads import Entry, HeadSpec, Registry, UnsupportedHead
from ..heads.families import HEADS
from .base import SharedKV, Target, TargetOutput
from .vision_prompt import PlaceholderMismatch, VisionPrompt

_HOME = {
    "FamilyTarget": ".family",
    "Gemma4Target": ".gemma4",
    "GenericTarget": ".generic",
    "Qwen35Target": ".qwen3_5",
    "Qwen35VisionTarget": ".qwen3_5_vision",
}

TARGETS: Registry[Callable[[Any], Target]] = Registry("target")


def _qwen(model) -> Target:
    return __getattr__("Qwen35Target")(model, HEADS.find(_config(model)))


def _qwen_vision(model) -> Target:
    return __getattr__("Qwen35VisionTarget")(model, HEADS.find(_config(model)))


for _type in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
    TARGETS.register(Entry(_type, _qwen, "Qwen35Target"))
for _type in ("qwen3_5", "qwen3_5_moe"):
    TARGETS.register(Entry(_type, _qwen_vision, "Qwen35VisionTarget", kind="vision"))
for _type in ("gemma4", "gemma4_text", "gemma4_unified"):
    TARGETS.register(
        Entry(_type, lambda model: __getattr__("Gemma4Target")(model), "Gemma4Target")
    )


def register_family(
    model_type: str,
    *,
    target: Callable[[Any], Target] | None = None,
    head: HeadSpec | None = None,
    when: Callable[[dict[str, Any]], bool] | None = None,
    kind: str = "text",
    name: str | None = None,
) -> None:
    """Adds a model family, or a more specific form of one.

    Args:
        model_type (str): As in ``config.json``.
        target (callable, optional): ``target(model)`` gives its ``Target``. Without
            one, a family with a head gets a ``FamilyTarget``.
        head (HeadSpec, optional): How its MTP head is built and stored.
        when (callable, optional): ``when(config) -> bool``, of the text part of the
            config. An entry whose predicate holds goes before one without.
        kind (str): ``"text"`` for models of ``mlx_lm``, ``"vision"`` for those of
            ``mlx_vlm``.
        name (str, optional): For messages. Default ``model_type``.

    Raises:
        ValueError: There is an entry already and ``when`` is missing.

    Example:
        >>> from dataclasses import replace
        >>> from mlx_mtp.heads.families import GLM
        >>> register_family("my_glm", head=replace(GLM, family="My GLM"))
    """
    for registry, value in ((TARGETS, target), (HEADS, head)):
        if value is not None:
            registry.register(Entry(model_type, value, name or model_type, when, kind))


def as_target(model) -> Target:
    """The target adapter of an ``mlx_lm`` model.

    Raises:
        AmbiguousFamily: Two registered families fit it equally well.
        UnsupportedHead: A model of ``mlx_vlm`` that nobody has registered.
    """
    config, kind = _config(model), _kind(model)
    make = TARGETS.find(config, kind)
    if make is not None:
        return make(model)
    spec = HEADS.find(config, kind)
    if spec is not None:
        return __getattr__("FamilyTarget")(model, spec)
    if kind == "vision":
        check_vision(config)
    return __getattr__("GenericTarget")(model)


def check_vision(config: dict[str, Any]) -> None:
    """Raises ``UnsupportedHead`` if no target reads images for a ``config.json``."""
    config = _flat(config)
    if not any(registry.find(config, "vision") for registry in (TARGETS, HEADS)):
        raise UnsupportedHead(
            f"The mlx_vlm model type {config['model_type']} has no target for images. "
            'Register one with register_family(..., kind="vision"), or use load for '
            "its text."
        )


def reads_images(model) -> bool:
    """Whether a model is one of ``mlx_vlm``, which ``mlx_lm`` cannot run."""
    return _kind(model) == "vision"


def takes_heads(model) -> bool:
    """Whether the target adapter gives the hidden rows that an MTP head reads."""
    config, kind = _config(model), _kind(model)
    if kind == "vision" and TARGETS.find(config, kind) is None:
        return False
    return HEADS.find(config, kind) is not None or HEADS.find(config) is not None


def vocab_size(model) -> int | None:
    """How many logits a model gives, None if its config does not say."""
    return _config(model).get("vocab_size")


def _config(model) -> dict[str, Any]:
    """The text part of a model's config, with the model type it was loaded by."""
    args = getattr(model, "args", None) or getattr(model, "config", None) or {}
    config = _flat(args if isinstance(args, dict) else vars(args))
    model_type = getattr(model, "model_type", None) or config["model_type"]
    return {**config, "model_type": model_type}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config") or config
    text = text if isinstance(text, dict) else vars(text)
    return {**text, "model_type": config.get("model_type")}


def _kind(model) -> str:
    return "vision" if type(model).__module__.startswith("mlx_vlm") else "text"


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


__all__ = [
    "FamilyTarget",
    "Gemma4Target",
    "GenericTarget",
    "PlaceholderMismatch",
    "Qwen35Target",
    "Qwen35VisionTarget",
    "SharedKV",
    "Target",
    "TargetOutput",
    "VisionPrompt",
    "as_target",
    "check_vision",
    "reads_images",
    "register_family",
    "takes_heads",
    "vocab_size",
]
