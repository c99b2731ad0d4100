"""What differs between the MTP heads of model families, as data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Rule = tuple[str, str | None]


@dataclass(frozen=True)
class HeadSpec:
    """How the MTP head of one family is built, wired and stored.

    Args:
        family (str): Its name in messages.
        module (str): The module of ``mlx_lm.models`` that has the family's layers.
        layers (callable): ``layers(module, args, config, index)`` gives the decoder
            layers of head ``index``: ``args`` are the family's arguments, ``config``
            is the dict that they were read from.
        rules: Pairs of a regular expression and a name. A checkpoint's tensor belongs
            to the head if an expression matches the beginning of its name, which the
            name then replaces; ``None`` drops a copy of one of the trunk's tensors.
            The first match counts. ``{index}`` stands for the head's number,
            ``{layer}`` for the trunk's number of layers plus that.
        hidden (str): Whether it reads the target's hidden row behind the final norm
            (``"post"``) or before it (``"pre"``). A chained step reads the same of
            the head's own output.
        order (tuple): How the two inputs are joined in front of the projection.
        norm_offset (bool): Whether raw checkpoints hold norm gains less 1.
        borrowed: More rules, for tensors of the trunk that the head has a part in.
        own (tuple): What it does not share with the target: ``"embedding"``,
            ``"output"``.
        count (str, optional): The config's key for the number of heads in a chain.
            Without one, a single head drafts at any depth.
        converter (str, optional): The module of ``mlx_lm.models`` whose ``sanitize``
            turns raw layers into its own. Default ``module``; ``""`` is none.
        trunk (str): The trunk's attribute of the model.
        eps (str): The argument with the epsilon of the norms.
        source (str): Where its wiring was read, for the documentation.
    """

    family: str
    module: str
    layers: Callable[[Any, Any, dict[str, Any], int], list] | None
    rules: tuple[Rule, ...]
    hidden: Literal["post", "pre"] = "post"
    order: tuple[str, str] = ("embedding", "hidden")
    norm_offset: bool = False
    borrowed: tuple[Rule, ...] = ()
    own: tuple[str, ...] = ()
    count: str | None = None
    converter: str | None = None
    trunk: str = "model"
    eps: str = "rms_norm_eps"
    source: str = ""

    @property
    def place(self) -> str:
        """Where its decoder layers are, for people: ``model.layers.N.*``."""
        layers = ("", "layers.", "layers.0.")
        pattern = [pattern for pattern, name in self.rules if name in layers][-1]
        pattern = re.sub(r"\([^)]*\)\?", "", pattern).replace("{layer}", "N")
        return pattern.replace("{index}", "*").replace("\\", "") + "*"

    def heads(self, config: dict[str, Any]) -> int:
        """How many heads the chain of a checkpoint has."""
        return max(config.get(self.count) or 1, 1) if self.count else 1


QWEN = HeadSpec(
    family="Qwen3.5",
    module="qwen3_5",
    layers=None,
    rules=((r"mtp\.", ""),),
    norm_offset=True,
    converter="",
    source="vLLM qwen3_5_mtp",
)
