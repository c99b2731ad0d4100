"""One stream of tokens or text as events: thoughts, answers, tool calls.

The events of a stream, adjacent deltas joined, do not depend on how it is cut into
pieces, and the joined `text` of all events is the stream itself when `trim` is off.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .config import ReasoningConfig
from .delimiters import (
    END,
    LEADING,
    REASONING,
    RESPONSE,
    START,
    TOOL,
    TOOL_CLOSE,
    TOOL_OPEN,
)
from .errors import ReasoningError
from .scan import Item, Scanner
from .tools import Call, ToolCallError, Tools, Types, parse_calls
from .vocabulary import Vocabulary

PIECE = 512  # characters scanned at once
MAX_TOOL_TEXT = 1 << 18  # characters of one call
MAX_SPACE = 1024  # characters of white space held back
MAX_CLUSTER = 32  # code points of one held back character


@dataclass(slots=True)
class Event:
    """Base class. `text` is the part of the stream the event stands for."""

    text: str = ""


@dataclass(slots=True)
class ReasoningStart(Event):
    """A thought begins. `primed`: the prompt opened it."""

    primed: bool = False


@dataclass(slots=True)
class ReasoningDelta(Event):
    """More of a thought."""


@dataclass(slots=True)
class ReasoningEnd(Event):
    """A thought ends.

    `cause` is "canonical" (its delimiter), "forced" (a delimiter that a budget wrote),
    "implicit" (something else began), "eos" or "limit" (the stream ended).
    """

    cause: str = "canonical"


@dataclass(slots=True)
class ResponseDelta(Event):
    """More of the answer."""


@dataclass(slots=True)
class RejectedToolCall(ResponseDelta):
    """A tool call that cannot be used, as text of the answer so that it is not lost.

    `reason` is that of `ToolCallError`, `message` says more.
    """

    reason: str = ""
    message: str = ""


@dataclass(slots=True)
class ToolCall(Event):
    """A complete tool call. `text` is on the first of the calls of one section."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(slots=True)
class Framing(Event):
    """Text of the protocol that is part of no output."""


@dataclass(slots=True)
class End(Event):
    """The stream has ended.

    `reason` is that given to `finish`, or "tool_calls" if it was "stop" and calls were
    made. `reasoning_tokens` counts tokens of thoughts without delimiters, as a budget
    does; 0 for a stream of text.
    """

    reason: str = "stop"
    reasoning_tokens: int = 0


class ReasoningEmitter:
    """Turns one stream into events.

    Args:
        config: Delimiters of the model.
        vocabulary: For a stream of tokens, read with `push`. None for a stream of
            text, read with `push_text`: then delimiters are told by their text alone,
            and a thought after the first text begins only at the start of a line.
        primed: The prompt has opened a thought, see `ReasoningConfig.prompt_opens`.
        tools: Declared tools; calls of others are rejected. None: any name goes.
        trim: Drop white space next to delimiters. Off, no character is lost.

    Example:
        >>> emitter = ReasoningEmitter(family("qwen3"))
        >>> emitter.push_text("<think>hm</think>yes")
        [ReasoningStart(text='<think>', primed=False), ReasoningDelta(text='hm'),
        ReasoningEnd(text='</think>', cause='canonical'), ResponseDelta(text='ye')]
        >>> emitter.finish()
        [ResponseDelta(text='s'), End(text='', reason='stop', reasoning_tokens=0)]

    The last character is held back until the next is known, so a delta never ends
    between a letter and its combining marks.
    """

    def __init__(
        self,
        config: ReasoningConfig,
        vocabulary: Vocabulary | None = None,
        *,
        primed: bool = False,
        tools: Tools | None = None,
        trim: bool = True,
    ):
        self._scanner = Scanner(
            config, primed=primed, vocabulary=vocabulary, bare_tools=bool(tools)
        )
        self._of_tokens = vocabulary is not None
        self._protocol = config.tools or "none"
        self._types = Types(tools)
        self._trim = trim
        self._pending: list[Event] = [ReasoningStart(primed=True)] if primed else []
        self._delta = ReasoningDelta if primed else ResponseDelta
        self._tail = ""  # of the current text, held back
        self._lead = trim  # still dropping the white space after a delimiter
        self._call: list[str] = []
        self._call_size = 0
        self._bare = False
        self._called = False

    @property
    def inside(self) -> bool:
        """In a thought."""
        return self._scanner.inside

    @property
    def closed(self) -> bool:
        """A thought has ended."""
        return self._scanner.closed

    @property
    def calling(self) -> bool:
        """In a tool call."""
        return self._scanner.region == TOOL

    def push(self, token: int, *, forced: bool = False) -> list[Event]:
        """Reads one token. `forced`: a budget wrote it."""
        text = self._scanner.quiet(token)
        if text is None:
            return self._route(self._scanner.accept(token, free=forced), forced)
        if not text.isascii():
            return self._text(self._started(), text)
        # Quiet ASCII text completes what was held back, and ends in no white space.
        text = self._tail + text
        self._tail = text[-1]
        return [self._delta(text[:-1])] if len(text) > 1 else []

    def push_text(self, text: str) -> list[Event]:
        """Reads a piece of text, of any length."""
        if self._of_tokens:
            raise ReasoningError(
                "[ReasoningEmitter] this is a stream of tokens, use push."
            )
        # In bounded pieces, so that time is linear in the length.
        items = []
        for at in range(0, len(text), PIECE):
            items += self._scanner.feed(text[at : at + PIECE])
        return self._route(items, False)

    def finish(self, reason: str = "stop") -> list[Event]:
        """Ends the stream. `reason`: "stop", "length" or whatever the caller says."""
        events = self._route(self._scanner.finish(), False)
        if self._scanner.region == TOOL:
            events += self._call_events(complete=reason != "length")
        self._flush(events)
        if self._scanner.inside:
            cause = "limit" if reason == "length" else "eos"
            events.append(ReasoningEnd(cause=cause))
        if reason == "stop" and self._called:
            reason = "tool_calls"
        events.append(End(reason=reason, reasoning_tokens=self._scanner.spent))
        return events

    def _started(self) -> list[Event]:
        """The events so far: the start of a thought that the prompt opened."""
        events, self._pending = self._pending, []
        return events

    def _route(self, items: Iterable[Item], forced: bool) -> list[Event]:
        events = self._started()
        for kind, text, cause in items:
            if kind in (RESPONSE, REASONING):
                self._text(events, text)
            elif kind == TOOL:
                events += self._add_call(text)
            elif kind == TOOL_CLOSE:
                events += self._add_call(text)
                events += self._call_events(complete=True)
            else:
                self._boundary(events, kind, text, "forced" if forced else cause)
        return events

    def _boundary(self, events: list[Event], kind: str, text: str, cause: str) -> None:
        if self._trim and self._tail.isspace():
            self._tail = ""
        self._flush(events)
        self._lead = self._trim
        if kind == START:
            self._delta = ReasoningDelta
            events.append(ReasoningStart(text))
        elif kind == END:
            self._delta = ResponseDelta
            events.append(ReasoningEnd(text, cause))
        elif kind == TOOL_OPEN:
            self._bare = cause == LEADING
            events += self._add_call(text)
        else:
            events.append(Framing(text))

    # Text

    def _text(self, events: list[Event], text: str) -> list[Event]:
        text = self._tail + text
        if self._lead:
            text = text.lstrip()
            self._lead = not text
        at = _held_from(text, self._trim)
        self._tail = text[at:]
        return self._add(events, text[:at])

    def _flush(self, events: list[Event]) -> None:
        """Adds what was held back."""
        self._add(events, self._tail)
        self._tail = ""

    def _add(self, events: list[Event], text: str) -> list[Event]:
        if events and type(events[-1]) is self._delta:
            events[-1].text += text
        elif text:
            events.append(self._delta(text))
        return events

    # Tool calls

    def _add_call(self, text: str) -> list[Event]:
        """Keeps text of a call, up to a limit; what is beyond it is answer."""
        if self._call_size > MAX_TOOL_TEXT:
            return [ResponseDelta(text)] if text else []
        kept = text[: MAX_TOOL_TEXT - self._call_size]
        self._call_size += len(text)
        self._call.append(kept)
        if self._call_size <= MAX_TOOL_TEXT:
            return []
        events = self._rejected("too_long", f"exceeds {MAX_TOOL_TEXT} characters")
        return [*events, ResponseDelta(text[len(kept) :])]

    def _call_events(self, complete: bool) -> list[Event]:
        """The events of a call that has ended."""
        size, self._call_size = self._call_size, 0
        self._lead = self._trim
        if size > MAX_TOOL_TEXT:
            return []
        text = "".join(self._call)
        try:
            calls = parse_calls(text, self._protocol, self._types)
        except ToolCallError as error:
            return self._rejected(
                error.reason if complete else "incomplete", str(error)
            )
        self._call.clear()
        self._called = True
        first, *others = (ToolCall("", *call) for call in calls)
        first.text = text
        return [first, *others]

    def _rejected(self, reason: str, message: str) -> list[Event]:
        text = "".join(self._call)
        self._call.clear()
        if self._bare:
            return [ResponseDelta(text)]
        return [RejectedToolCall(text, reason, message)]


def _held_from(text: str, trim: bool) -> int:
    """Where the end of a text begins that may change with what follows."""
    if trim:
        solid = len(text.rstrip())
        if solid < len(text):
            return max(solid, len(text) - MAX_SPACE)
    at = len(text) - 1
    lowest = max(at - MAX_CLUSTER, 0)
    while at > lowest and _joins(text[at - 1], text[at]):
        at -= 1
    return max(at, 0)


def _joins(left: str, right: str) -> bool:
    """Whether two code points belong to one character (roughly, UAX #29)."""
    if right < "\u0300":
        return False
    flags = (
        "\U0001f1e6" <= right <= "\U0001f1ff" and "\U0001f1e6" <= left <= "\U0001f1ff"
    )
    skin = "\U0001f3fb" <= right <= "\U0001f3ff"
    joiner = "\u200d" in (left, right)
    return flags or skin or joiner or unicodedata.category(right)[0] == "M"


@dataclass(frozen=True)
class Split:
    """A finished text, taken apart. `open`: it ended within a thought."""

    reasoning: str
    response: str
    tool_calls: tuple[Call, ...]
    rejected: tuple[RejectedToolCall, ...]
    open: bool


def split(
    text: str,
    config: ReasoningConfig,
    *,
    primed: bool = False,
    tools: Tools | None = None,
    trim: bool = True,
) -> Split:
    """Takes a finished text apart, exactly as a `ReasoningEmitter` would.

    Example:
        >>> split("<think>hm</think>yes", family("qwen3")).response
        'yes'
    """
    emitter = ReasoningEmitter(config, primed=primed, tools=tools, trim=trim)
    return collect([*emitter.push_text(text), *emitter.finish()])


def collect(events: Iterable[Event]) -> Split:
    """Joins the events of a stream."""
    events = list(events)
    return Split(
        reasoning="".join(e.text for e in events if isinstance(e, ReasoningDelta)),
        response="".join(e.text for e in events if isinstance(e, ResponseDelta)),
        tool_calls=tuple(
            Call(e.name, e.arguments, e.id) for e in events if isinstance(e, ToolCall)
        ),
        rejected=tuple(e for e in events if isinstance(e, RejectedToolCall)),
        open=any(
            isinstance(e, ReasoningEnd) and e.cause in ("eos", "limit") for e in events
        ),
    )
