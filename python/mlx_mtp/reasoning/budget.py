"""An exact limit on the tokens of a thought, for a decoding loop.

A budget reads every emitted token and says which tokens must come next. It never looks
at logits, so plain and speculative decoding give the same stream: the tokens it forces
depend on the tokens before them and on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from .config import ReasoningConfig, Transition
from .errors import ReasoningError
from .scan import Scanner
from .vocabulary import Vocabulary

UNLIMITED = 1 << 62  # `horizon()` when nothing is pending
UTF8_TOKENS = 3  # a character begun within the budget may need so many more


class BudgetError(ReasoningError):
    """A thinking budget that cannot be kept. Raised before any token is made."""


class UnsupportedTransition(BudgetError):
    """Nothing is known about cutting a thought of this family short."""

    def __init__(self, family: str):
        self.family = family
        super().__init__(
            f"[ThinkingBudget] {family or 'this config'} has no published text for "
            "cutting a thought short. Pass transition=Transition() to write the bare "
            "closing delimiter, or a Transition with your own text."
        )


class UnencodableText(BudgetError):
    """The tokenizer cannot write a delimiter or the transition."""

    def __init__(self, text: str, what: str):
        self.text = text
        super().__init__(f"[ThinkingBudget] {what} but is {text!r}.")


class InvalidTokenId(BudgetError):
    """The transition needs a token that the model does not have."""

    def __init__(self, id: int, size: int):
        self.id = id
        self.size = size
        super().__init__(
            f"[ThinkingBudget] token ids of the transition must be in [0, {size}) but "
            f"one is {id}. Tokenizer and model do not match."
        )


class InsufficientTokens(BudgetError):
    """`max_tokens` has no room for the budget, its transition and an answer."""

    def __init__(self, required: int, actual: int, parts: str):
        self.required = required
        self.actual = actual
        super().__init__(
            f"[ThinkingBudget] max_tokens must be at least {required} ({parts}) but is "
            f"{actual}. Raise it or lower the budget."
        )


@dataclass(frozen=True)
class SoftClose:
    """Pulls a thought to its end before the budget does.

    The logit of the closing token gains `strength * (1 - left / window)` while fewer
    than `window` tokens are left.
    """

    window: int = 64
    strength: float = 8.0

    def __post_init__(self):
        _check("window", self.window, 1)


@dataclass(frozen=True)
class LoopGuard:
    """Closes a thought that repeats itself.

    Looks every `every` tokens whether the last tokens are one period of at most
    `longest` tokens, `repeats` times over.
    """

    longest: int = 64
    repeats: int = 4
    every: int = 32

    def __post_init__(self):
        for name, least in (("longest", 1), ("repeats", 2), ("every", 1)):
            _check(name, getattr(self, name), least)

    @property
    def window(self) -> int:
        return self.longest * self.repeats

    def repeating(self, tokens: Sequence[int]) -> bool:
        """Whether the end of `tokens` repeats."""
        for period in range(1, self.longest + 1):
            size = period * self.repeats
            if len(tokens) < size:
                return False
            if tokens[-size:-period] == tokens[period - size :]:
                return True
        return False


class ThinkingBudget:
    """Ends the thoughts of one stream after so many tokens.

    A token counts if it is part of a thought and of no delimiter; a second thought
    continues the count. When the count is reached the transition is forced: the
    family's text, the closing delimiter, the start of the answer. A closing delimiter
    that the model has begun is completed instead. A character begun by the last token
    may be completed first, at most 3 tokens over the limit.

    With `max_tokens` a thought also ends early enough to leave `answer_reserve` tokens
    for the answer, however many tokens came before it.

    Args:
        config: Delimiters and transition of the family.
        vocabulary: The tokenizer.
        tokens: Limit. 0 closes a thought at once. None: only `max_tokens` limits it.
        max_tokens: Limit of the whole stream, None if there is none.
        answer_reserve: Tokens to leave for the answer.
        primed: The prompt has opened a thought, see `ReasoningConfig.prompt_opens`.
        transition: Instead of the family's own.
        vocab_size: Number of logits of the model, to check forced tokens.
        soft: Optional pull towards the end, through `bias()`.
        loops: Optional end of thoughts that repeat themselves.

    Raises:
        BudgetError: A subclass that says what is wrong, with numbers.

    Example:
        >>> budget = ThinkingBudget(config, vocabulary, 2, primed=True)
        >>> budget.horizon()
        2
        >>> for token in (100, 101):
        ...     budget.accept(token)
        >>> list(budget.forced()) == vocabulary.encode("</think>\\n\\n")
        True

    A decoding loop calls `accept` with every emitted token, in order, and emits
    `forced()` whenever it is not empty. A block of `horizon()` tokens cannot reach a
    forced token. A longer block stays exact if it is cut after the first token that
    leaves `forced()` not empty.
    """

    _STATE = ("_emitted", "_stop", "_queue", "_at", "_off", "_history")
    _get_state = attrgetter(*_STATE)

    def __init__(
        self,
        config: ReasoningConfig,
        vocabulary: Vocabulary,
        tokens: int | None,
        *,
        max_tokens: int | None = None,
        answer_reserve: int = 1,
        primed: bool = False,
        transition: Transition | None = None,
        vocab_size: int | None = None,
        soft: SoftClose | None = None,
        loops: LoopGuard | None = None,
    ):
        for name, value in (("tokens", tokens), ("max_tokens", max_tokens)):
            if value is not None:
                _check(name, value, 0)
        _check("answer_reserve", answer_reserve, 0)
        self._scanner = Scanner(config, primed=primed, vocabulary=vocabulary)
        self._vocabulary = vocabulary
        self._transition = _encode_transition(config, vocabulary, transition)
        _check_ids(self._transition, vocab_size or vocabulary.size)
        self._limit = UNLIMITED if tokens is None else tokens
        after = {  # what must fit behind a thought
            "completing a character": UTF8_TOKENS,
            "closing": max(
                len(self._transition),
                *(len(vocabulary.encode(text)) - 1 for text in _boundaries(config)),
            ),
            "answer": answer_reserve,
        }
        opening = 0 if primed else len(vocabulary.encode(config.start))
        _check_room(max_tokens, {"opening": opening, "thinking": tokens or 0, **after})
        self._room = UNLIMITED
        if max_tokens is not None:
            self._room = max_tokens - sum(after.values())
        self._soft = soft
        self._soft_id = _single(config.end, vocabulary) if soft else None
        self._loops = loops
        self._ring = [0] * (2 * loops.window if loops else 0)

        self._emitted = 0
        self._stop = 0  # value of _emitted at which the thought must end
        self._queue: tuple[int, ...] = ()
        self._at = 0
        self._off = ""
        self._history = 0
        self._aim()

    @property
    def spent(self) -> int:
        """Tokens of thoughts so far."""
        return self._scanner.spent

    @property
    def inside(self) -> bool:
        """In a thought."""
        return self._scanner.inside

    @property
    def closed(self) -> bool:
        """A thought has ended."""
        return self._scanner.closed

    @property
    def biases(self) -> bool:
        """Whether `bias()` ever gives anything."""
        return self._soft is not None

    @property
    def stood_down(self) -> str:
        """Why the budget is no longer kept: a forced token was not emitted."""
        return self._off

    def accept(self, token: int) -> None:
        """Reads one emitted token."""
        self._emitted += 1
        if self._queue:
            self._accept_forced(token)
        elif self._scanner.quiet(token) is None:
            self._scanner.accept(token)
            self._aim()
        elif self._emitted >= self._stop:
            self._close()
        if self._loops is not None and self._scanner.inside:
            self._watch_loops(token)

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, in order; empty when any token may."""
        return self._queue[self._at :]

    def horizon(self) -> int:
        """How many of the next tokens are certainly free."""
        if self._off:
            return UNLIMITED
        if self._queue:
            return 0
        scanner = self._scanner
        window = self._soft.window - 1 if self._soft else 0
        if not scanner.inside:
            # The next token may open a thought.
            left = min(self._limit - scanner.spent, self._room - self._emitted - 1)
            free = 1 + max(left - window, 0)
        else:
            # At the limit a character is being completed.
            left = max(self._stop - self._emitted, 1)
            free = max(left - window, 0)
        if self._loops is not None:
            free = min(free, self._loops.every - self._history % self._loops.every)
        return min(free, UNLIMITED)

    def bias(self) -> Mapping[int, float] | None:
        """What to add to the logits of the next token, None for nothing."""
        soft = self._soft
        if soft is None or self._queue or self._off or not self._scanner.inside:
            return None
        left = self._stop - self._emitted
        if left >= soft.window:
            return None
        return {self._soft_id: soft.strength * (1 - max(left, 0) / soft.window)}

    def checkpoint(self) -> object:
        """The state, to go back to with `restore`."""
        return self._get_state(self), self._scanner.checkpoint()

    def restore(self, state: object) -> None:
        own, scanner = state
        for name, value in zip(self._STATE, own, strict=True):
            setattr(self, name, value)
        self._scanner.restore(scanner)

    def _aim(self) -> None:
        """Sets the end of the thought, and ends it if that has come."""
        scanner = self._scanner
        if self._off or not scanner.inside:
            self._stop = UNLIMITED
            return
        left = self._limit - scanner.spent - scanner.undecided
        self._stop = min(self._emitted + left, self._room)
        if self._emitted >= self._stop:
            self._close()

    def _close(self) -> None:
        """Forces the end, once the last character is complete."""
        if self._scanner.incomplete and self._emitted < self._stop + UTF8_TOKENS:
            return
        rest = self._scanner.rest_of_end()
        self._queue = self._transition if rest is None else self._complete(rest)
        self._at = 0

    def _complete(self, rest: str) -> tuple[int, ...]:
        return tuple(self._vocabulary.encode(rest))

    def _accept_forced(self, token: int) -> None:
        expected = self._queue[self._at]
        self._scanner.accept(token, free=token == expected)
        self._at += 1
        if token != expected:
            self._off = f"token {expected} was due but {token} was emitted"
        if self._off or self._at == len(self._queue):
            self._queue = ()
            self._aim()

    def _watch_loops(self, token: int) -> None:
        """Keeps twice the window, so that `restore` finds what it needs."""
        ring, window = self._ring, self._loops.window
        ring[self._history % len(ring)] = token
        self._history += 1
        if self._history % self._loops.every or self._queue or self._off:
            return
        at = self._history % len(ring)
        tokens = (ring[at:] + ring[:at])[-min(self._history, window) :]
        if self._loops.repeating(tokens):
            self._stop = self._emitted
            self._close()


def _check(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"[ThinkingBudget] {name} must be an int but is {type(value).__name__}."
        )
    if value < least:
        raise BudgetError(
            f"[ThinkingBudget] {name} must be at least {least} but is {value}."
        )


def _check_room(max_tokens: int | None, parts: Mapping[str, int]) -> None:
    required = sum(parts.values())
    if max_tokens is not None and max_tokens < required:
        text = " + ".join(f"{n} {part}" for part, n in parts.items())
        raise InsufficientTokens(required, max_tokens, text)


def _boundaries(config: ReasoningConfig) -> tuple[str, ...]:
    return (config.end, *config.other_ends, *config.implicit_ends)


def _encode_transition(
    config: ReasoningConfig, vocabulary: Vocabulary, transition: Transition | None
) -> tuple[int, ...]:
    """The forced tokens, encoded as one text so that merges are the tokenizer's own."""
    transition = transition or config.transition
    if transition is None:
        raise UnsupportedTransition(config.family)
    for text in (config.start, *_boundaries(config)):
        if not text or not vocabulary.encode(text):
            raise UnencodableText(text, "delimiters must encode to at least one token")
    text = transition.before + config.end + transition.after
    forced = tuple(int(id) for id in vocabulary.encode(text))
    scanner = Scanner(config, primed=True, vocabulary=vocabulary)
    for token in forced:
        if token >= 0:
            scanner.accept(token)
    if not scanner.closed or scanner.inside:
        raise UnencodableText(
            text, "the transition must close the thought once encoded"
        )
    return forced


def _check_ids(ids: Sequence[int], size: int | None) -> None:
    size = 1 << 31 if size is None else size
    for id in ids:
        if not 0 <= id < size:
            raise InvalidTokenId(id, size)


def _single(text: str, vocabulary: Vocabulary) -> int:
    ids = vocabulary.encode(text)
    if len(ids) != 1:
        raise BudgetError(
            "[ThinkingBudget] soft needs a closing delimiter of one token but "
            f"{text!r} has {len(ids)}."
        )
    return ids[0]
