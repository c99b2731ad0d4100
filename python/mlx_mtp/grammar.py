"""Tool calls and answers that must be valid: grammars as logits processors.

The grammars are llguidance's (``pip install 'mlx-mtp[tools]'``). A constraint is the
text that is written for the model and the grammar of what the model writes behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .reasoning import ReasoningError, Vocabulary
from .reasoning.tools import Types

Schema = Mapping[str, Any]


class GrammarError(ReasoningError):
    """A JSON schema that cannot be turned into a grammar."""


class UnsupportedToolProtocol(ReasoningError):
    """The calls of this protocol cannot be forced."""

    def __init__(self, protocol: str):
        self.protocol = protocol
        super().__init__(
            f"Tool calls of the {protocol or 'unknown'} protocol have a body that no "
            f"grammar is known for; calls can be required for {', '.join(FORMATS)}. "
            "Use tool_choice='auto'."
        )


class Format(NamedTuple):
    """How the calls of a protocol are written: lead, opener, calls, closer.

    Every call is name, arguments, end; ``joiner`` stands between two.
    """

    lead: str  # between a thought and the opener
    opener: str
    name: str  # in front of the tool's name
    arguments: str  # in front of the arguments
    end: str
    closer: str
    joiner: str | None = None  # None: one call
    tags: bool = False  # arguments are tags, not JSON


_CALL = (' "', '", "arguments": ', "}")
_LIST = ', {"name":'

FORMATS = {
    "hermes": Format(
        "\n\n",
        '<tool_call>\n{"name":',
        *_CALL,
        "\n</tool_call>",
        '\n</tool_call>\n<tool_call>\n{"name":',
    ),
    "qwen_xml": Format(
        "\n\n",
        "<tool_call>\n<function=",
        "",
        ">\n",
        "</function>",
        "\n</tool_call>",
        "\n</tool_call>\n<tool_call>\n<function=",
        tags=True,
    ),
    "nemotron": Format("", '<TOOLCALL>[{"name":', *_CALL, "]</TOOLCALL>", _LIST),
    "hunyuan": Format("", '<tool_calls>\n[{"name":', *_CALL, "]\n</tool_calls>", _LIST),
    "granite": Format("", '<|tool_call|>[{"name":', *_CALL, "]", _LIST),
    "llama": Format("", '<|python_tag|>{"name":', ' "', '", "parameters": ', "}", ""),
    "cohere": Format(
        "",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name":',
        ' "',
        '", "parameters": ',
        "}",
        "\n]<|END_ACTION|>",
    ),
    "kimi": Format(
        "",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        "",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek": Format(
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
    ),
    "harmony": Format(
        "",
        "<|start|>assistant<|channel|>commentary to=functions.",
        "",
        " <|constrain|>json<|message|>",
        "",
        "<|call|>",
    ),
}


@dataclass(frozen=True)
class Constraint:
    """What must follow.

    Args:
        lead (str): Text between a thought and the opener.
        opener (str): Text that is written for the model.
        lark (str): The grammar of the rest, in llguidance's dialect of Lark.
    """

    lead: str
    opener: str
    lark: str


def call_constraint(
    protocol: str,
    tools: Sequence[Schema],
    vocabulary: Vocabulary,
    name: str | None = None,
) -> Constraint:
    """At least one call of a declared tool, with arguments that fit its schema.

    Arguments are written in the order of the schema, and unknown ones are excluded
    unless the schema says otherwise.

    Args:
        protocol: A key of ``mlx_mtp.reasoning.PROTOCOLS``.
        tools: Declarations, as in a chat template.
        vocabulary: Of the tokenizer.
        name: The only tool that may be called. Default: any of them.

    Raises:
        UnsupportedToolProtocol: No grammar is known for the protocol.
        ReasoningError: A declaration has no name, or its parameters are no object.
        ValueError: No tool has this name.
    """
    row = FORMATS.get(protocol)
    if row is None:
        raise UnsupportedToolProtocol(protocol)
    functions = Types(tools).declared
    if name is not None:
        if name not in functions:
            known = ", ".join(functions) or "none"
            raise ValueError(
                f"tool_choice names {name!r}, declared tools are: {known}."
            )
        functions = {name: functions[name]}

    def text(literal: str) -> str:
        return _literal(literal, vocabulary)

    rules = []
    for i, (function, parameters) in enumerate(functions.items()):
        schema = _arguments_schema(parameters)
        arguments = _tags(schema, text) if row.tags else _json(schema)
        head = text(row.name + function + row.arguments)
        rules.append(f"call{i}: {head} {arguments} {text(row.end)}")
    calls = " | ".join(f"call{i}" for i in range(len(rules)))
    more = "" if row.joiner is None else f"({text(row.joiner)} call)*"
    start = f"start: call {more} {text(row.closer)}"
    lark = "\n".join([start, f"call: {calls}", *rules, *([_TEXT] if row.tags else [])])
    return Constraint(row.lead, row.opener, lark)


def answer_constraint(schema: Schema | bool, lead: str = "") -> Constraint:
    """An answer that is JSON of this schema, with the white space of ``json.dumps``."""
    return Constraint(lead, "", f"start: {_json(schema)}")


def load_vocabulary(tokenizer):
    """A tokenizer for ``GrammarProcessor``. Takes about a second, so keep it.

    Args:
        tokenizer: Of ``mlx_lm`` or ``transformers``, a fast one.

    Raises:
        ImportError: llguidance is missing.
        TypeError: The tokenizer is not one of the ``tokenizers`` library.
    """
    lib = _llguidance()
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(
            "A grammar needs a fast tokenizer but this one is a "
            f"{type(inner).__name__}."
        )
    data = json.loads(backend.to_str())
    # Control tokens are no text, so that none can stand inside of a string.
    for token in data["added_tokens"]:
        token["special"] = not (
            token["content"].isspace() or token["content"].isalnum()
        )
    eos = getattr(tokenizer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    return lib.LLTokenizer(json.dumps(data), eos_token=sorted(eos))


class GrammarProcessor:
    """Allows only tokens that fit a constraint; a logits processor with look-ahead.

    The first call is for the first token of the grammar. Behind the last one only an
    end token is allowed.

    Args:
        constraint: What must follow.
        vocabulary: From ``load_vocabulary``.

    Raises:
        GrammarError: The grammar or a schema in it is not supported.
    """

    def __init__(self, constraint: Constraint, vocabulary):
        lib = _llguidance()
        self._matcher = lib.LLMatcher(vocabulary, constraint.lark, log_level=0)
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise GrammarError(f"The schema is not supported: {reason}")
        self._bits = np.zeros(((vocabulary.vocab_size + 31) // 32,), np.uint32)
        self._start: int | None = None
        self._read = 0  # tokens of the grammar that were read
        self._taken = 0  # of those, the ones that fit

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._start is None:
            self._start = tokens.size
        new = tokens[self._start + self._read :].tolist()
        self._read += len(new)
        if new:
            self._taken += self._matcher.try_consume_tokens(new)
        if self._read != self._taken:
            return logits  # behind a draft that does not fit: never used
        return mx.where(self._allowed(logits.shape[-1]), logits, -mx.inf)

    def checkpoint(self) -> object:
        """The state, in O(1)."""
        return self._start, self._read, self._taken

    def restore(self, mark: object) -> None:
        """Goes back to a state."""
        start, read, taken = mark
        if self._taken > taken:
            self._matcher.rollback(self._taken - taken)
        self._start, self._read, self._taken = start, read, taken

    def _allowed(self, size: int) -> mx.array:
        """``(size,)``, which tokens may come next."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        words = mx.array(self._bits)[:, None]
        bits = ((words >> mx.arange(32, dtype=mx.uint32)) & 1).reshape(-1)[:size]
        return mx.pad(bits.astype(mx.bool_), [(0, size - bits.size)])


def _llguidance():
    try:
        import llguidance
    except ImportError:
        raise ImportError(
            "Required tool calls and JSON answers need llguidance: "
            "pip install 'mlx-mtp[tools]'"
        ) from None
    return llguidance


def _literal(text: str, vocabulary: Vocabulary) -> str:
    """A text as terminals: control tokens by id, the rest as strings."""
    controls = sorted(vocabulary.controls, key=len, reverse=True)
    controls = [c for c in controls if not (c.isspace() or c.isalnum())]
    parts = re.split(f"({'|'.join(map(re.escape, controls))})", text)
    ids = vocabulary.controls
    terminals = [f"<[{ids[p]}]>" if p in ids else json.dumps(p) for p in parts if p]
    return " ".join(terminals)


def _json(schema: Schema | bool) -> str:
    if isinstance(schema, Mapping):
        options = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
        schema = {**schema, "x-guidance": options}
    return f"%json {json.dumps(schema)}"


def _arguments_schema(parameters: Schema) -> Schema:
    schema = {"type": "object", "properties": {}, **parameters}
    schema.setdefault("additionalProperties", False)
    return schema


# The text of a parameter, up to and with its closing tag.
_TEXT = r"text[lazy]: /(?s:.*)\n<\/parameter>\n/"


def _tags(schema: Schema, text) -> str:
    """``<parameter=key>`` tags in the order of the schema."""
    required = schema.get("required", ())
    rules = []
    for key, value in schema["properties"].items():
        opener = text(f"<parameter={key}>\n")
        optional = "" if key in required else "?"
        rules.append(f"({opener} {_value(value, text)}){optional}")
    return " ".join(rules)


def _value(schema: Schema, text) -> str:
    closer = text("\n</parameter>\n")
    if schema.get("type") != "string":
        return f"{_json(schema)} {closer}"
    if "enum" in schema:
        return f"({' | '.join(map(text, schema['enum']))}) {closer}"
    return "text"
