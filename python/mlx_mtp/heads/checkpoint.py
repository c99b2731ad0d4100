"""A family's head from its config and the tensors of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from .families import HEADS, REFUSED
from .module import MTPHead
from .registry import UnsupportedHead
from .spec import HeadSpec

ANY_PREFIX = re.compile(r"^(?:(?:model|language_model)\.){0,2}mtp\.")
STORED = ((r"mtp\.", ""),)  # as save_head writes them


@dataclass(frozen=True)
class HeadSizes:
    """What ``MTPHead`` asks of the config of a family."""

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    window: int | None = None
    mtp_use_dedicated_embeddings: bool = False


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model."""
    text = config.get("text_config")
    return {"model_type": config.get("model_type"), **text} if text else config


def find_spec(config: dict[str, Any]) -> HeadSpec:
    """The spec of a checkpoint's head.

    Raises:
        UnsupportedHead: There is none for this model type.
    """
    text = text_config(config)
    types = dict.fromkeys((text.get("model_type"), config.get("model_type")))
    for model_type in types:
        spec = HEADS.find({**text, "model_type": model_type})
        if spec is not None:
            return spec
    name = config.get("model_type")
    reasons = [REFUSED[model_type] for model_type in types if model_type in REFUSED]
    raise UnsupportedHead(
        f"the MTP head of model type {name} is refused: {reasons[0]}"
        if reasons
        else f"model type {name} is not supported yet"
    )


def build_head(config: dict[str, Any], spec: HeadSpec) -> MTPHead:
    """A head of the sizes in ``config``, its weights random."""
    text = text_config(config)
    module = _models(spec.module)
    args = _arguments(module, text)
    sizes = HeadSizes(
        args.hidden_size,
        args.vocab_size,
        getattr(args, spec.eps),
        text.get("sliding_window") or text.get("sliding_window_size"),
        bool(text.get("mtp_use_dedicated_embeddings")),
    )
    try:
        heads = [
            MTPHead(sizes, spec, spec.layers(module, args, text, index))
            for index in range(spec.heads(text))
        ]
    except (IndexError, KeyError) as error:
        raise ValueError(
            f"The config of the MTP head is incomplete: {error}."
        ) from None
    if len(heads) > 1:
        heads[0].more = heads[1:]
    return heads[0]


def select(
    names: Iterable[str], spec: HeadSpec, config: dict[str, Any], stored: bool = False
) -> dict[str, str | None]:
    """The names of a checkpoint that belong to the head, and what they become.

    Args:
        names: All names.
        spec (HeadSpec): The family.
        config (dict): The checkpoint's.
        stored (bool): Whether they are as ``save_head`` writes them.
    """
    text, found = text_config(config), {}
    layers = text.get("num_hidden_layers") or text.get("num_layers") or 0
    rules, has_own = [], False
    for index in range(1 if stored else spec.heads(text)):
        beginning = f"more.{index - 1}." if index else ""
        for is_own, ours in ((True, spec.rules), (False, spec.borrowed)):
            for pattern, name in STORED if stored else ours:
                pattern = pattern.replace("{index}", str(index))
                pattern = re.compile(pattern.replace("{layer}", str(layers + index)))
                rules.append((pattern, name and beginning + name, is_own))
    for name in names:
        plain = ANY_PREFIX.sub("mtp.", name).removeprefix("language_model.")
        for pattern, ours, is_own in rules:
            if match := pattern.match(plain):
                found[name] = None if ours is None else ours + plain[match.end() :]
                has_own |= is_own
                break
    return found if has_own else {}


def convert(
    tensors: dict[str, mx.array], spec: HeadSpec, config: dict[str, Any]
) -> dict[str, mx.array]:
    """Raw tensors of the head's layers as the family's modules hold them.

    The family's own conversion does it, for layers that it takes for a whole trunk.
    """
    converter = spec.module if spec.converter is None else spec.converter
    if not converter:
        return stack_experts(tensors)
    module = _models(converter)
    args = _arguments(module, text_config(config))
    layer = re.compile(r"(more\.\d+\.)?layers\.\d+\.")
    places = sorted({m.group() for name in tensors if (m := layer.match(name))})
    places = {f"{spec.trunk}.layers.{i}.": place for i, place in enumerate(places)}
    places[f"{spec.trunk}.head."] = ""
    there = {ours: theirs for theirs, ours in places.items()}

    def renamed(name):
        match = layer.match(name)
        ours = match.group() if match else ""
        return there[ours] + name[len(ours) :]

    for key, value in {
        "num_hidden_layers": len(places) - 1,
        "first_k_dense_replace": 0,
        "tie_word_embeddings": False,
    }.items():
        if hasattr(args, key):
            setattr(args, key, value)
    done = module.Model.sanitize(
        SimpleNamespace(args=args, norm_head=False),
        {renamed(name): x for name, x in tensors.items()},
    )
    back = re.compile("|".join(map(re.escape, places)))
    return {back.sub(lambda m: places[m.group()], n, 1): x for n, x in done.items()}


def stack_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Experts as one tensor each projection, from one each expert or a fused pair."""
    done, experts = {}, {}
    for name, x in tensors.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            start = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            gate, up = mx.split(x, 2, axis=-2)
            done |= {f"{start}gate_proj.weight": gate, f"{start}up_proj.weight": up}
        elif name.endswith("mlp.experts.down_proj"):
            start = name.removesuffix("experts.down_proj") + "switch_mlp."
            done[f"{start}down_proj.weight"] = x
        elif match := re.search(r"mlp\.experts\.(\d+)\.", name):
            start, end = name[: match.start()], name[match.end() :]
            experts.setdefault(f"{start}mlp.switch_mlp.{end}", {})[int(match[1])] = x
        else:
            done[name] = x
    for name, parts in experts.items():
        done[name] = mx.stack([parts[i] for i in sorted(parts)])
    return done


def _models(name: str):
    return import_module(f"mlx_lm.models.{name}")


def _arguments(module, text: dict[str, Any]):
    arguments = getattr(module, "TextModelArgs", module.ModelArgs)
    try:
        return arguments.from_dict(text)
    except TypeError as error:
        raise ValueError(
            f"The config of the MTP head is incomplete: {error}."
        ) from None
