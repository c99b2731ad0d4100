"""The delimiters of a config, compiled for the scanner.

In the scanner's buffer every control token that is part of a delimiter is one lone
surrogate, a code point no decoded text contains: a delimiter then matches the control
token and never a text that spells it. Delimiters without a control token match as text,
however the tokenizer cuts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from .config import Frame, ReasoningConfig
from .tools import PROTOCOLS, Protocol
from .vocabulary import Vocabulary

# Regions. The first three are also the kinds of text items.
RESPONSE = "response"
REASONING = "reasoning"
TOOL = "tool"
HEADER = "header"

# Kinds of items besides text.
START = "start"
END = "end"
TOOL_OPEN = "tool_open"
TOOL_CLOSE = "tool_close"
FRAMING = "framing"

# Further roles of delimiters.
IMPLICIT = "implicit"  # ends a thought, belongs to what follows
UNWRAP = "unwrap"  # closes the wrapper of an answer
NEXT_CALL = "next call"  # opens a call and closes the one before
BODY = "body"  # ends the header of a framed message
FRAME_END = "frame end"
OVERLONG = "overlong"  # a header that goes on and on

# Where a delimiter counts.
ANYWHERE = "anywhere"
LEADING = "leading"  # nothing but white space since the last delimiter
OUTSIDE_CODE = "outside code"  # not in a Markdown code span or fence
LINE_START = "line start"  # and first on its line


class Marker(NamedTuple):
    pattern: str
    literal: str
    role: str
    where: str = ANYWHERE
    closed_by: str = ""  # pattern of the partner of an opening marker


class Delimiters:
    """What a scanner looks for.

    Attributes:
        markers: Delimiters watched in each region.
        symbols: Surrogates of the control tokens in them, by id.
    """

    def __init__(
        self, config: ReasoningConfig, vocabulary: Vocabulary | None, bare_tools: bool
    ):
        controls = _controls(config, vocabulary)
        self._literals = {0xD800 + i: text for i, text in enumerate(controls)}
        self.symbols = {
            id: chr(symbol)
            for symbol, id in zip(self._literals, controls.values(), strict=True)
        }
        self.markers: dict[str, list[Marker]] = {
            region: [] for region in (RESPONSE, REASONING, TOOL, HEADER)
        }
        protocol = PROTOCOLS[config.tools or "none"]
        self.route = protocol.route
        if config.frame is None:
            self._watch_config(config)
            self._watch_tools(protocol, bare_tools)
        else:
            self._watch_frame(config.frame)
        self._tails = {
            (region, leading): _tail(markers, leading)
            for region, markers in self.markers.items()
            for leading in (False, True)
        }
        self._firsts = {
            region: frozenset(marker.pattern[0] for marker in markers)
            for region, markers in self.markers.items()
        }

    def none_in(self, region: str, text: str) -> bool:
        """Whether no delimiter can begin in a text."""
        return self._firsts[region].isdisjoint(text)

    def held_from(self, region: str, leading: bool, text: str) -> int:
        """Where the longest end of a text begins that may begin a delimiter."""
        match = self._tails[region, leading].search(text)
        return match.start() if match else len(text)

    def literal(self, text: str) -> str:
        """Text with the control tokens written out."""
        return text if text.isascii() else text.translate(self._literals)

    def _pattern(self, text: str) -> str:
        for symbol, literal in self._literals.items():
            text = text.replace(literal, chr(symbol))
        return text

    def _watch(self, region, text, role, where=ANYWHERE, closed_by="") -> None:
        if text:
            pattern, partner = self._pattern(text), self._pattern(closed_by)
            self.markers[region].append(Marker(pattern, text, role, where, partner))

    def _watch_config(self, config: ReasoningConfig) -> None:
        for text in config.starts:
            spelled = self._pattern(text) == text
            self._watch(RESPONSE, text, START, LINE_START if spelled else OUTSIDE_CODE)
            self._watch(REASONING, text, FRAMING, LEADING)
        for text in config.ends:
            self._watch(REASONING, text, END)
            self._watch(RESPONSE, text, FRAMING, LEADING)
        for text in config.implicit_ends:
            if text not in config.ends:
                self._watch(REASONING, text, IMPLICIT)
        for opener, closer in config.wrappers:
            self._watch(RESPONSE, opener, FRAMING, LEADING, closer)
            self._watch(RESPONSE, closer, UNWRAP if opener else FRAMING)

    def _watch_tools(self, protocol: Protocol, bare: bool) -> None:
        for opener, closer in protocol.spans:
            self._watch(RESPONSE, opener, TOOL_OPEN, OUTSIDE_CODE, closer)
            self._watch(TOOL, closer, TOOL_CLOSE)
            self._watch(TOOL, "" if closer else opener, NEXT_CALL)
        for opener in protocol.bare if bare else ():
            self._watch(RESPONSE, opener, TOOL_OPEN, LEADING)

    def _watch_frame(self, frame: Frame) -> None:
        for region in (RESPONSE, REASONING, TOOL):
            for text in frame.opens:
                self._watch(region, text, HEADER)
        for region in self.markers:
            for text in frame.ends:
                self._watch(region, text, FRAME_END)
        self._watch(HEADER, frame.body, BODY)


def _controls(config: ReasoningConfig, vocabulary: Vocabulary | None) -> dict[str, int]:
    """The control tokens that delimiters contain, longest first."""
    if vocabulary is None:
        return {}
    texts = "\n".join(_texts(config))
    found = {
        text: id
        for text, id in vocabulary.controls.items()
        if text in texts and not text.isspace() and not text.isalnum()
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _texts(config: ReasoningConfig) -> Iterable[str]:
    yield from (*config.starts, *config.ends, *config.implicit_ends)
    for pair in (*config.wrappers, *PROTOCOLS[config.tools or "none"].spans):
        yield from pair
    if config.frame is not None:
        yield from (*config.frame.opens, config.frame.body, *config.frame.ends)


def _tail(markers: list[Marker], leading: bool) -> re.Pattern:
    anywhere = [_prefixes(m.pattern) for m in markers if m.where != LEADING]
    first = [_prefixes(m.pattern) for m in markers if leading and m.where == LEADING]
    options = [rf"(?:{'|'.join(anywhere)})\Z"] if anywhere else []
    options += [rf"\A\s*(?:{'|'.join(first)})\Z"] if first else []
    return re.compile("|".join(options) or r"(?!)")


def _prefixes(text: str) -> str:
    """A regular expression for the proper prefixes of a text."""
    expression = ""
    for char in reversed(text[:-1]):
        expression = re.escape(char) + (f"(?:{expression})?" if expression else "")
    return expression or r"(?!)"
