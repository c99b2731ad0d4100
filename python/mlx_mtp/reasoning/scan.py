"""Where thoughts, answers and tool calls begin and end in one stream.

One scanner serves the emitter and the budget, so the two cannot disagree. It reads
text, or token ids through a `Vocabulary`. The first delimiter to be complete wins, the
longest at equal ends, so the result does not depend on how the stream is cut.
"""

from __future__ import annotations

import codecs
import re
from operator import attrgetter
from typing import NamedTuple

from .config import ReasoningConfig
from .delimiters import (
    ANYWHERE,
    BODY,
    END,
    FRAME_END,
    FRAMING,
    HEADER,
    IMPLICIT,
    LEADING,
    LINE_START,
    NEXT_CALL,
    OUTSIDE_CODE,
    OVERLONG,
    REASONING,
    RESPONSE,
    START,
    TOOL,
    TOOL_CLOSE,
    TOOL_OPEN,
    UNWRAP,
    Delimiters,
    Marker,
)
from .errors import ReasoningError
from .vocabulary import Vocabulary

MAX_HEADER = 1024  # characters; a framed message with a longer header is text
_TOO_LONG = Marker("", "", OVERLONG)


class Item(NamedTuple):
    kind: str
    text: str
    cause: str = ""


class Code(NamedTuple):
    """Markdown code context after some text of an answer."""

    fence: int = 0  # length of the open fence
    inline: int = 0  # length of the open code span's backticks
    opener: bool = False  # that span becomes a fence at the end of its line
    run: int = 0  # backticks just read, not yet known to be complete
    first: bool = False  # that run began its line
    blank: bool = True  # only white space since the last newline

    def after(self, text: str) -> Code:
        """The context after more text."""
        if "`" not in text and not self.run:
            return self._plain(text)
        code = self
        for part in re.findall("`+|[^`]+", text):
            if part[0] != "`":
                code = code.settled()._plain(part)
                continue
            first = code.first if code.run else code.blank
            code = code._replace(run=code.run + len(part), first=first, blank=False)
        return code

    def _plain(self, text: str) -> Code:
        """The context after text without backticks."""
        _, newline, line = text.rpartition("\n")
        blank = line.isspace() or not line
        if newline:
            fence = self.inline if self.opener else self.fence
            return Code(fence, blank=blank) if fence else _OUTSIDE[blank]
        if blank or not self.blank:
            return self
        return _OUTSIDE[False] if self is _OUTSIDE[True] else self._replace(blank=False)

    def settled(self) -> Code:
        """The context when the next character is no backtick."""
        run = self.run
        if not run:
            return self
        if self.fence:
            closed = self.first and run >= self.fence
            return Code(0 if closed else self.fence, blank=self.blank)
        if self.inline:
            return self._replace(inline=self.inline if run != self.inline else 0, run=0)
        return Code(0, run, self.first and run >= 3, blank=self.blank)


# The usual contexts, made once: on a new line or not, outside of code.
_OUTSIDE = {blank: Code(blank=blank) for blank in (False, True)}


class Scanner:
    """Reads one stream and tells its regions apart.

    Args:
        config: Delimiters of the model.
        primed: The prompt has opened a thought.
        vocabulary: Needed to read tokens with `accept`; None to read text with `feed`.
        bare_tools: Also take a bare JSON call at the start of an answer for a tool
            call, in protocols that have such calls.
    """

    _STATE = (
        "region",
        "opened",
        "closed",
        "leading",
        "spent",
        "_buffer",
        "_code",
        "_closer",
        "_header",
        "_bytes",
        "_lengths",
        "_strip",
        "_now",
    )
    _get_state = attrgetter(*_STATE)

    def __init__(
        self,
        config: ReasoningConfig,
        *,
        primed: bool = False,
        vocabulary: Vocabulary | None = None,
        bare_tools: bool = False,
    ):
        self._vocabulary = vocabulary
        self._delimiters = Delimiters(config, vocabulary, bare_tools)
        self._quiet: dict[str, dict[int, str]] = {RESPONSE: {}, REASONING: {}}
        self._pieces: dict[int, str] = {}  # tokens that are whole text

        self.region = REASONING if primed else RESPONSE
        self.opened = primed
        self.closed = False
        self.leading = True
        self.spent = 0
        self._buffer = ""
        self._code = _OUTSIDE[True]
        self._closer = ""
        self._header = ""
        self._bytes = b""
        self._lengths: tuple[int, ...] = ()
        self._strip = vocabulary is not None and vocabulary.strip_space
        self._now: dict[int, str] = {}  # the quiet tokens of this moment

    # Reading

    def quiet(self, token: int) -> str | None:
        """Reads a token that is plain text here and gives its text.

        None for every other token: then nothing was read, and `accept` must do it.
        """
        text = self._now.get(token)
        if text is not None and self.region is REASONING:
            self.spent += 1
        return text

    def accept(self, token: int, *, free: bool = False) -> list[Item]:
        """Reads one token.

        A token of a thought counts in `spent` once it is known to be no delimiter,
        unless it is `free`.
        """
        text, framing = self._text_of(token)
        items = self.feed(text)
        # A step that crosses a delimiter decides only tokens of that.
        free = free or not self.inside or any(i.kind not in self._quiet for i in items)
        if framing:
            self._text(items, self._take_buffer())
            items.append(Item(FRAMING, framing))
        decided = self._decide(len(text))
        if not free:
            self.spent += decided
        return items

    def _decide(self, length: int) -> int:
        """How many tokens are decided by one of this length, itself included."""
        lengths = (*self._lengths, length)
        if not self._buffer:
            self._lengths = ()
            return len(lengths)
        over = sum(lengths) - len(self._buffer)
        decided = 0
        while lengths[decided] <= over:
            over -= lengths[decided]
            decided += 1
        self._lengths = lengths[decided:]
        return decided

    def _text_of(self, token: int) -> tuple[str, str]:
        """What a token adds to the buffer, and what follows it as framing."""
        symbol = self._delimiters.symbols.get(token)
        if symbol is not None:
            return self._broken() + symbol, ""
        text = self._pieces.get(token)
        if text is not None and not (self._bytes or self._strip):
            return text, ""
        if self._vocabulary is None:
            raise ReasoningError("[reasoning] a stream of tokens needs a vocabulary.")
        piece = self._vocabulary.piece(token)
        if token in self._vocabulary.special and self.region in self._quiet:
            return self._broken(), piece.decode()
        self._learn(token, piece)
        data = self._bytes + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        return text, ""

    def feed(self, text: str) -> list[Item]:
        """Reads a piece of text."""
        self._buffer += text
        items: list[Item] = []
        region = self.region
        if region is HEADER or not self._delimiters.none_in(region, self._buffer):
            self._scan(items)
        else:
            self._text(items, self._take_buffer())
        loud = (
            self._buffer
            or self._bytes
            or self.leading
            or self.region not in self._quiet
            or (self.region is RESPONSE and (self._code.blank or self._code.run))
        )
        self._now = {} if loud else self._quiet[self.region]
        return items

    def _scan(self, items: list[Item]) -> None:
        """Takes what is certain from the buffer."""
        while (hit := self._next()) is not None:
            at, marker = hit
            before = self._buffer[:at]
            self._buffer = self._buffer[at + len(marker.pattern) :]
            self._text(items, before)
            self._cross(items, marker)
        buffer = self._buffer
        at = self._delimiters.held_from(self.region, self.leading, buffer)
        self._buffer = buffer[at:]
        self._text(items, buffer[:at])

    def finish(self) -> list[Item]:
        """Ends the stream: what was held back is text."""
        items = self.feed(self._broken())
        self._text(items, self._take_buffer())
        if self.region == HEADER:
            items.append(Item(FRAMING, self._header))
            self._enter(RESPONSE)
        return items

    # State

    @property
    def inside(self) -> bool:
        """In a thought."""
        return self.region == REASONING

    @property
    def incomplete(self) -> bool:
        """The last token ends within a UTF-8 character."""
        return bool(self._bytes)

    @property
    def undecided(self) -> int:
        """Tokens that may yet turn out to be a delimiter."""
        return len(self._lengths)

    def rest_of_end(self) -> str | None:
        """What completes the end of a thought that has begun, None if none has."""
        held = self._buffer.lstrip()
        if not held or not self.inside:
            return None
        for marker in self._delimiters.markers[REASONING]:
            if marker.role in (END, IMPLICIT) and marker.pattern.startswith(held):
                return self._delimiters.literal(marker.pattern[len(held) :])
        return None

    def checkpoint(self) -> tuple:
        """The state, to go back to with `restore`."""
        return self._get_state(self)

    def restore(self, state: tuple) -> None:
        for name, value in zip(self._STATE, state, strict=True):
            setattr(self, name, value)

    # Delimiters

    def _next(self) -> tuple[int, Marker] | None:
        """The first delimiter to be complete in the buffer."""
        best = None
        room = MAX_HEADER - len(self._header)
        if self.region == HEADER and room < len(self._buffer):
            best = (room + 1, 0), room, _TOO_LONG
        for marker in self._delimiters.markers[self.region]:
            at = self._find(marker)
            if at >= 0:
                size = len(marker.pattern)
                if best is None or (at + size, -size) < best[0]:
                    best = (at + size, -size), at, marker
        return best and best[1:]

    def _find(self, marker: Marker) -> int:
        """Where a delimiter first counts in the buffer, -1 if nowhere."""
        code, read = self._code, 0
        at = self._buffer.find(marker.pattern)
        while at >= 0:
            if marker.where in (OUTSIDE_CODE, LINE_START):
                code, read = code.after(self._buffer[read:at]), at
            if self._counts(marker, at, code.settled()):
                return at
            at = self._buffer.find(marker.pattern, at + 1)
        return -1

    def _counts(self, marker: Marker, at: int, code: Code) -> bool:
        if marker.role in (UNWRAP, TOOL_CLOSE):
            return marker.pattern == self._closer
        if marker.role == NEXT_CALL:
            return not self._closer
        if marker.where == ANYWHERE:
            return True
        if marker.where == LEADING:
            return self.leading and not self._buffer[:at].strip()
        if code.fence or code.inline:
            return False
        return code.blank or marker.where == OUTSIDE_CODE

    def _cross(self, items: list[Item], marker: Marker) -> None:
        role, literal = marker.role, marker.literal
        if role == START:
            items.append(Item(START, literal))
            self._enter(REASONING)
        elif role == END:
            items.append(Item(END, literal, "canonical"))
            self._enter(RESPONSE)
        elif role == IMPLICIT:
            items.append(Item(END, "", IMPLICIT))
            self._buffer = marker.pattern + self._buffer
            self._enter(RESPONSE)
        elif role == TOOL_OPEN:
            items.append(Item(TOOL_OPEN, literal, marker.where))
            self._enter(TOOL)
            self._closer = marker.closed_by
        elif role == TOOL_CLOSE:
            items.append(Item(TOOL_CLOSE, literal))
            self._enter(RESPONSE)
        elif role == NEXT_CALL:
            items += Item(TOOL_CLOSE, ""), Item(TOOL_OPEN, literal)
        elif role == BODY:
            self._route(items, literal)
        elif role == HEADER:
            self._leave(items, "", IMPLICIT)
            self._enter(HEADER)
            self._header = literal
        elif role == OVERLONG:
            items.append(Item(FRAMING, self._header))
            self._enter(RESPONSE)
        elif role == FRAME_END:
            self._leave(items, literal, "canonical")
            self._enter(RESPONSE)
        else:
            items.append(Item(FRAMING, literal))
            self._closer = marker.closed_by

    def _leave(self, items: list[Item], literal: str, cause: str) -> None:
        """Ends a framed message, or a header that never got one."""
        if self.region == REASONING:
            items.append(Item(END, literal, cause))
        elif self.region == TOOL:
            items.append(Item(TOOL_CLOSE, literal))
        elif literal or self._header:
            items.append(Item(FRAMING, self._header + literal))

    def _route(self, items: list[Item], literal: str) -> None:
        """Sends a framed message where its header says."""
        header, self._header = self._header + literal, ""
        region = self._delimiters.route(header)
        kind = {REASONING: START, TOOL: TOOL_OPEN}.get(region, FRAMING)
        items.append(Item(kind, header))
        self._enter(region)

    def _enter(self, region: str) -> None:
        if self.region == REASONING:
            self.closed = True
        if region == REASONING:
            self.opened = True
        self.region = region
        self.leading = True
        self._code = _OUTSIDE[True]
        self._closer = ""
        self._header = ""

    # Text

    def _text(self, items: list[Item], text: str) -> None:
        if not text:
            return
        text = self._delimiters.literal(text)
        if self.region == HEADER:
            self._header += text
            return
        if self.region == RESPONSE:
            self._code = self._code.after(text)
        if self.leading and not text.isspace():
            self.leading = False
        items.append(Item(self.region, text))

    def _take_buffer(self) -> str:
        text, self._buffer = self._buffer, ""
        return text

    def _broken(self) -> str:
        """The end of a character that will not be completed."""
        broken, self._bytes = self._bytes, b""
        return broken.decode(errors="replace")

    def _learn(self, token: int, piece: bytes) -> None:
        """Notes the text of an ordinary token, and in which regions it is quiet."""
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            return
        self._pieces[token] = text
        if not text or text[-1].isspace():
            return
        if self._delimiters.none_in(REASONING, text):
            self._quiet[REASONING][token] = text
        if self._delimiters.none_in(RESPONSE, text) and not {"`", "\n"} & set(text):
            self._quiet[RESPONSE][token] = text
