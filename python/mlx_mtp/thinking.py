"""Thoughts in the decoding loop: how a model thinks, and what steers its streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from .grammar import Grammar, GrammarMatcher, load_vocabulary
from .reasoning import (
    ChatTemplate,
    ReasoningConfig,
    ReasoningError,
    ThinkingBudget,
    Transition,
    Vocabulary,
    resolve,
)
from .shaping import Controller, add_bias, apply_mask, check_forced


class MissingCapability(ReasoningError):
    """The model lacks what was asked of it. ``capability`` names it."""

    def __init__(self, capability: str, message: str):
        self.capability = capability
        super().__init__(message)


def reasoning_config(model, tokenizer) -> ReasoningConfig | None:
    """How a loaded model thinks, None if its chat template shows no thoughts."""
    return resolve(
        model_type=getattr(model, "model_type", None),
        template=ChatTemplate.from_tokenizer(tokenizer),
    )


def template_kwargs(
    config: ReasoningConfig | None,
    thinking: bool | None = None,
    effort: str | None = None,
) -> dict:
    """Arguments of the chat template, for models without thoughts as well.

    Raises:
        MissingCapability: Thoughts are asked of a model that has none.
        CannotDisableReasoning, UnknownEffort: See ``ReasoningConfig``.
    """
    if config is not None:
        return config.template_kwargs(thinking, effort)
    if thinking or effort is not None:
        raise MissingCapability(
            "reasoning",
            "The chat template of this model shows no thoughts. Leave thinking to its "
            "default, or load a thinking model.",
        )
    return {}


def make_budget(
    config: ReasoningConfig | None,
    tokenizer,
    prompt: str | list[int],
    tokens: int | None,
    *,
    vocabulary: Vocabulary | None = None,
    **options,
) -> ThinkingBudget:
    """A budget for the stream behind ``prompt``.

    A family without a text of its own for cutting a thought short gets the bare
    closing delimiter.

    Args:
        config: How the model thinks.
        tokenizer: Of ``transformers`` or ``mlx_lm``.
        prompt: The rendered prompt, or its token ids.
        tokens: As in ``ThinkingBudget``, where ``options`` go as well.
        vocabulary: Of the tokenizer, if there is one already.

    Raises:
        MissingCapability: The model shows no thoughts.
        BudgetError: The budget cannot be kept.
    """
    if config is None:
        raise MissingCapability(
            "reasoning",
            "A thinking budget needs a model with thoughts, and the chat template of "
            "this one shows none. Pass a ThinkingBudget with a ReasoningConfig of "
            "your own.",
        )
    if not isinstance(prompt, str):
        prompt = tokenizer.decode(prompt)
    options.setdefault("transition", config.transition or Transition())
    return ThinkingBudget(
        config,
        vocabulary or Vocabulary.from_tokenizer(tokenizer),
        tokens,
        primed=config.prompt_opens(prompt),
        **options,
    )


def make_guide(
    config: ReasoningConfig | None,
    tokenizer,
    prompt: list[int],
    grammar: Grammar,
    budget: ThinkingBudget | None = None,
) -> Controller:
    """A grammar for the stream behind ``prompt``.

    It begins at once, or behind the thought that the prompt has opened.

    Args:
        config: How the model thinks, None if it does not.
        tokenizer: Of ``transformers`` or ``mlx_lm``.
        prompt: Its token ids.
        grammar: What must be written.
        budget: Of the thought. Without an open one the grammar allows none.

    Raises:
        GrammarError: The grammar is not supported.
        ImportError: llguidance is missing.
    """
    thinks = config is not None and config.prompt_opens(tokenizer.decode(prompt))
    text = grammar.opener
    if thinks:
        after = (config.transition or Transition()).after
        text = (grammar.lead or after or "\n\n") + text
    written = tokenizer.encode(text, add_special_tokens=False) if text else ()
    matcher = GrammarMatcher(grammar, load_vocabulary(tokenizer), written)
    if not thinks:
        return matcher
    return AfterThought(budget or make_budget(config, tokenizer, prompt, None), matcher)


class AfterThought:
    """A controller that follows another one where a thought has ended.

    Args:
        thought: Follows the thought and may limit it.
        answer: Steers what is behind it.
    """

    def __init__(self, thought: ThinkingBudget, answer: Controller):
        self._thought, self._answer = thought, answer
        self.biases = thought.biases

    @property
    def masks(self) -> bool:
        return self._thought.closed and self._answer.masks

    @property
    def _now(self) -> Controller:
        return self._answer if self._thought.closed else self._thought

    def accept(self, token: int) -> None:
        self._now.accept(token)

    def forced(self) -> Sequence[int]:
        return self._now.forced()

    def horizon(self) -> int:
        # The next token may end the thought.
        free = self._now.horizon()
        return free if self._thought.closed else min(free, 1)

    def bias(self) -> Mapping[int, float] | None:
        return self._now.bias()

    def mask(self) -> np.ndarray:
        return self._answer.mask()

    def checkpoint(self) -> object:
        return self._thought.checkpoint(), self._answer.checkpoint()

    def restore(self, mark: object) -> None:
        thought, answer = mark
        self._thought.restore(thought)
        self._answer.restore(answer)


class ControllerProcessor:
    """A controller as a logits processor, for loops that take nothing else.

    Forced tokens are forced by a mask. Tokens are read no earlier than the controller
    may act, so a loop that runs ahead of the host keeps its lead until then; while it
    masks, that is at every token. Such a loop has not given out the newest token yet,
    so what fails behind that one is kept for ``check``, or for the next call.
    """

    def __init__(self, controller: Controller):
        self.controller = controller
        self.forced: set[int] = set()  # which of the stream's tokens were
        self._start = self._seen = -1
        self._error: Exception | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.check()
        if self._start < 0:
            self._start = self._seen = tokens.size  # the prompt
        try:
            return self._steer(tokens, logits)
        except Exception as error:
            if tokens.size == self._start:
                raise
            self._error = error
            return logits

    def check(self) -> None:
        """Raises what has failed; for a loop that has given out its newest token."""
        if self._error is not None:
            raise self._error

    def _steer(self, tokens: mx.array, logits: mx.array) -> mx.array:
        controller = self.controller
        masks = getattr(controller, "masks", False)
        if not masks and tokens.size - self._seen < controller.horizon():
            return logits
        for token in tokens[self._seen :].tolist():
            controller.accept(token)
        self._seen = tokens.size
        if forced := controller.forced():
            token = check_forced(forced[0], logits.shape[-1])
            self.forced.add(self._seen - self._start)
            allowed = mx.arange(logits.shape[-1]) == token
            return mx.where(allowed, 0.0, -mx.inf)[None].astype(logits.dtype)
        logits = add_bias(controller.bias(), logits)
        if not masks:
            return logits
        mask = controller.mask()
        if not np.any(mask):
            raise RuntimeError("The controller allows no token.")
        return apply_mask(mx.array(mask), logits)
