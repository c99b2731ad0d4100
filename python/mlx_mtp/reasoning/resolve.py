"""Finding out how one checkpoint thinks.

In order: what the caller says, resolvers registered for it, and the family of its
`model_type` corrected by its chat template. The template is rendered with thinking on
and off and the two prompts are compared: a switch that changes nothing is none. The
name of a repository alone is never a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import families, tools
from .config import ALWAYS, PromptStrategy, ReasoningConfig
from .errors import ReasoningError


class TemplateError(ReasoningError):
    """The chat template cannot render a plain user message."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template: its source, and how to render one user message.

    `render(**kwargs)` gives the prompt for one user message up to the model's turn;
    `kwargs` are arguments of the template.
    """

    source: str
    render: Callable[..., str]

    @classmethod
    def from_tokenizer(cls, tokenizer) -> ChatTemplate | None:
        """That of a transformers tokenizer or mlx_lm's wrapper, None without one."""
        # mlx_lm's wrapper fills in a value for the switch: ask the tokenizer below it.
        inner = getattr(tokenizer, "_tokenizer", None)
        if hasattr(inner, "apply_chat_template"):
            tokenizer = inner
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            return None
        if isinstance(source, Mapping):
            source = source.get("default") or next(iter(source.values()))

        def render(**kwargs: Any) -> str:
            return tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hi"}],
                tokenize=False,
                add_generation_prompt=True,
                **kwargs,
            )

        return cls(source, render)


@dataclass(frozen=True)
class Model:
    """What a resolver may look at."""

    model_type: str | None = None
    model_id: str | None = None
    template: ChatTemplate | None = None


Resolver = Callable[[Model], "ReasoningConfig | None"]


class Registry:
    """Resolvers for models that the built-in rows do not fit.

    Example:
        >>> registry = Registry()
        >>> registry.register(
        ...     lambda model: family("qwen3") if model.model_type == "mine" else None
        ... )
    """

    def __init__(self):
        self._resolvers: list[Resolver] = []

    def register(self, resolver: Resolver) -> None:
        """Adds a resolver. The latest is asked first; None defers to the others."""
        self._resolvers.append(resolver)

    def lookup(self, model: Model) -> ReasoningConfig | None:
        for resolver in reversed(list(self._resolvers)):
            if (config := resolver(model)) is not None:
                return config
        return None


REGISTRY = Registry()


def resolve(
    explicit: ReasoningConfig | str | None = None,
    *,
    model_type: str | None = None,
    model_id: str | None = None,
    template: ChatTemplate | None = None,
    registry: Registry = REGISTRY,
) -> ReasoningConfig | None:
    """How a checkpoint thinks, or None if nothing shows that it does.

    Args:
        explicit: A config or the name of a family; decides alone.
        model_type: From config.json.
        model_id: For resolvers only.
        template: The chat template. Without one the family of `model_type` is taken
            as it is.
        registry: Resolvers to ask before the template.

    Raises:
        UnknownFamily: `explicit` names no family.
        TemplateError: The template fails on a plain message.
    """
    if isinstance(explicit, ReasoningConfig):
        return explicit
    if explicit is not None:
        return families.family(explicit)
    model = Model(model_type, model_id, template)
    config = registry.lookup(model)
    if config is not None:
        return config
    config = families.family_of(model_type)
    return config if template is None else _inspect(template, config)


# Switches seen in templates: argument, value for on, value for off.
_SWITCHES = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_budget", -1, 0),
)
_EFFORTS = ("reasoning_effort", "thinking_effort")


def _inspect(
    template: ChatTemplate, hint: ReasoningConfig | None
) -> ReasoningConfig | None:
    """What a template shows, with a family's row as the hint."""
    try:
        default = template.render()
    except Exception as error:
        raise TemplateError(
            f"[reasoning] the chat template fails on one user message: {error}"
        ) from error
    config = _delimiters(template, default, hint)
    if config is None:
        return None
    config = replace(
        config, tools=tools.infer_protocol(template.source) or config.tools
    )
    if config.frame is not None:
        return config
    strategy = _switch(template, default, config)
    on = default if strategy.kind != "flag" else template.render(**strategy.on)
    opens = config.prompt_opens(on)
    if strategy.kind != "flag" and opens:
        strategy = ALWAYS
    return replace(
        config,
        strategy=strategy,
        opens=opens,
        turn=config.turn if config.turn in default else "",
        efforts=_efforts(template, default),
    )


def _delimiters(
    template: ChatTemplate, default: str, hint: ReasoningConfig | None
) -> ReasoningConfig | None:
    """The row whose delimiters the template knows: the hint, or the only other."""
    text = template.source + default

    def shown(config: ReasoningConfig) -> bool:
        return config.start in text and config.end in text

    if hint is not None and shown(hint):
        return hint
    rows = [row.config for row in families.FAMILIES.values() if shown(row.config)]
    if not rows:
        return None
    longest = max(rows, key=lambda config: len(config.start))
    same = [config for config in rows if config.start == longest.start]
    if len(same) == 1:
        return longest
    # Many families share a pair; the rest of a row would be a guess.
    protocol = tools.infer_protocol(template.source)
    openers = tuple(opener for opener, _ in tools.PROTOCOLS[protocol or "none"].spans)
    return ReasoningConfig(
        longest.start, longest.end, implicit_ends=openers, tools=protocol
    )


def _switch(
    template: ChatTemplate, default: str, config: ReasoningConfig
) -> PromptStrategy:
    """The switch that the template obeys, or a strategy without one."""
    known = config.strategy
    candidates = [known] if known.kind == "flag" else []
    candidates += [
        PromptStrategy.flag(key, on=on, off=off) for key, on, off in _SWITCHES
    ]
    for candidate in candidates:
        on = _try(template, candidate.on)
        off = _try(template, candidate.off)
        if on is None or off is None or on == off:
            continue
        default_on = default == on if default in (on, off) else candidate.default_on
        return replace(candidate, default_on=default_on)
    return known if known.kind == "always" else PromptStrategy()


def _efforts(template: ChatTemplate, default: str) -> dict[str, dict[str, Any]]:
    for key in _EFFORTS:
        levels = ("low", "medium", "high", "max")
        prompts = {level: _try(template, {key: level}) for level in levels}
        prompts = {level: text for level, text in prompts.items() if text is not None}
        if len(set(prompts.values())) > 1:
            return {level: {key: level} for level in prompts}
    return {}


def _try(template: ChatTemplate, kwargs: Mapping[str, Any]) -> str | None:
    """The prompt with these arguments, None if the template refuses them."""
    try:
        return template.render(**kwargs)
    except Exception:
        return None
