"""How a model marks its thoughts, and how its chat template is told to think.

`ReasoningConfig` is data. The rows of the known families are in `families.py`, finding
the row of a model is in `resolve.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ReasoningError
from .tools import PROTOCOLS


class CannotDisableReasoning(ReasoningError):
    """The model always thinks, or nothing is known that would stop it."""

    def __init__(self, family: str):
        self.family = family
        super().__init__(
            f"[reasoning] {family or 'this model'} cannot answer without thinking. "
            "Leave thinking on and limit it with a thinking budget of 0, or use a "
            "model whose template has a switch."
        )


class UnknownEffort(ReasoningError):
    """The model has no such reasoning effort."""

    def __init__(self, effort: str, known: tuple[str, ...]):
        self.effort = effort
        self.known = known
        levels = ", ".join(known) if known else "none"
        super().__init__(
            f"[reasoning] effort must be one of the levels of this model ({levels}) "
            f"but is {effort!r}."
        )


@dataclass(frozen=True)
class Transition:
    """Text around the closing delimiter when a thought is cut short.

    `Transition()` writes the bare delimiter.
    """

    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class PromptStrategy:
    """Template arguments that turn thinking on and off.

    `kind` is "flag" (the arguments do it), "always" (the prompt opens a thought
    whatever is asked) or "none" (the model decides; nothing is known to steer it).
    """

    kind: str = "none"
    on: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    default_on: bool = True

    def __post_init__(self):
        if self.kind not in ("flag", "always", "none"):
            raise ValueError(
                "[PromptStrategy] kind must be flag, always or none but is "
                f"{self.kind!r}."
            )

    @classmethod
    def flag(
        cls,
        key: str = "enable_thinking",
        default_on: bool = True,
        *,
        on: Any = True,
        off: Any = False,
    ) -> PromptStrategy:
        """One template argument: `key=on` to think, `key=off` not to."""
        return cls("flag", {key: on}, {key: off}, default_on)


ALWAYS = PromptStrategy("always")


@dataclass(frozen=True)
class Frame:
    """Control texts of a protocol that wraps every message (Harmony).

    A header runs from one of `opens` to `body`, the message from there to one of
    `ends`. The header says where the message goes.
    """

    opens: tuple[str, ...]
    body: str
    ends: tuple[str, ...]


@dataclass(frozen=True)
class ReasoningConfig:
    """What marks a thought, and how to ask for one.

    Attributes:
        start: Opens a thought. Empty: never matches.
        end: Closes it. Both delimiters are framing, not part of any output.
        family: Name of the row this comes from; empty for a custom one.
        strategy: How the template is told to think.
        other_starts: Further spellings of `start`.
        other_ends: Further spellings of `end`.
        implicit_ends: Texts that end a thought although it was not closed; they
            belong to what follows (`<tool_call>`).
        wrappers: (open, close) around the answer, framing as well.
        tools: Name of the tool call protocol, see `mlx_mtp.reasoning.tools`.
        transition: What to write when a budget cuts the thought; None when the
            family has no published one.
        efforts: Template arguments of each reasoning effort.
        opens: Whether the prompt opens the thought when thinking is on; None when
            that is not known. The rendered prompt decides, see `prompt_opens`.
        turn: Text that begins the model's turn in a prompt.
        frame: Control texts of a framed protocol.

    Example:
        >>> config = ReasoningConfig("<think>", "</think>", strategy=ALWAYS)
        >>> config.template_kwargs(thinking=True)
        {}
    """

    start: str
    end: str
    family: str = ""
    strategy: PromptStrategy = PromptStrategy()
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    implicit_ends: tuple[str, ...] = ()
    wrappers: tuple[tuple[str, str], ...] = ()
    tools: str = ""
    transition: Transition | None = None
    efforts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    opens: bool | None = None
    turn: str = ""
    frame: Frame | None = None

    def __post_init__(self):
        for text in (*self.starts, *self.ends, *self.implicit_ends):
            if not isinstance(text, str):
                raise TypeError(
                    "[ReasoningConfig] delimiters must be str but one is "
                    f"{type(text).__name__}."
                )
        if set(self.starts) & set(self.ends):
            raise ReasoningError(
                "[ReasoningConfig] start and end must differ but both are "
                f"{self.start!r}."
            )
        if self.tools and self.tools not in PROTOCOLS:
            raise ReasoningError(
                f"[ReasoningConfig] tools must be one of {', '.join(PROTOCOLS)} but is "
                f"{self.tools!r}."
            )

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(text for text in (self.start, *self.other_starts) if text)

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(text for text in (self.end, *self.other_ends) if text)

    def template_kwargs(
        self, thinking: bool | None = None, effort: str | None = None
    ) -> dict[str, Any]:
        """Arguments for the chat template.

        Args:
            thinking: On, off, or None for the family's default.
            effort: One of `efforts`, or None for the template's default.

        Raises:
            CannotDisableReasoning: `thinking` is False and nothing turns it off.
            UnknownEffort: The family has no such effort.
        """
        strategy = self.strategy
        if strategy.kind == "flag":
            think = strategy.default_on if thinking is None else thinking
            kwargs = dict(strategy.on if think else strategy.off)
        elif thinking is False:
            raise CannotDisableReasoning(self.family)
        else:
            kwargs = {}
        if effort is not None:
            if effort not in self.efforts:
                raise UnknownEffort(effort, tuple(self.efforts))
            kwargs.update(self.efforts[effort])
        return kwargs

    def prompt_opens(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside a thought.

        Only the last turn counts where `turn` is known, so a delimiter in a user's
        message changes nothing. A thought the prompt has begun may have any length.
        """
        if self.turn:
            prompt = prompt[max(prompt.rfind(self.turn), 0) :]
        opened = max((prompt.rfind(text) for text in self.starts), default=-1)
        ends = (*self.ends, *filter(None, self.implicit_ends))
        return opened > max((prompt.rfind(text) for text in ends), default=-1)
