"""Grammars of tool calls and answers, and what they allow at each token.

They are llguidance's (``pip install 'mlx-mtp[tools]'``). A ``GrammarMatcher`` is a
controller of the decoding loops: it masks tokens that do not fit, and forces text that
the grammar leaves no choice about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from .reasoning import ReasoningError, Vocabulary
from .reasoning.tools import Types

Schema = Mapping[str, Any]


class GrammarError(ReasoningError):
    """A grammar, or a JSON schema, that is wrong or not supported."""


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
    "mistral": Format("", "[TOOL_CALLS]", "", "[ARGS]", "", "", "[TOOL_CALLS]"),
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
class Grammar:
    """What must be written, to its end and nothing behind it.

    Args:
        source (str): In llguidance's dialect of Lark, or its JSON form.
        lead (str): Text that is written between a thought and the opener.
        opener (str): Text that is written for the model in front of the grammar.
        fast_forward (bool): Text that the grammar leaves no choice about is written as
            the tokenizer writes it, without asking the model how to cut it into
            tokens. Off, the model is only masked.

    Example:
        >>> Grammar.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}")
        >>> Grammar('start: "yes" | "no"')
    """

    source: str
    lead: str = ""
    opener: str = ""
    fast_forward: bool = True

    def __post_init__(self):
        for name in ("source", "lead", "opener"):
            _check_text(name, getattr(self, name))

    @classmethod
    def json_schema(cls, schema: Schema | bool, **options) -> Grammar:
        """JSON of this schema, with the white space of ``json.dumps``.

        Properties are written in the order of the schema. ``options`` are the other
        arguments.

        Raises:
            GrammarError: The schema is no JSON itself.
        """
        return cls(f"start: {_json(schema)}", **options)

    @classmethod
    def regex(cls, pattern: str, **options) -> Grammar:
        """Text that matches as a whole, in the syntax of Rust's ``regex``.

        Raises:
            GrammarError: The pattern is no text that has an UTF-8 form.
            ImportError: llguidance is missing.
        """
        _check_text("pattern", pattern)
        return cls(_llguidance().LLMatcher.grammar_from_regex(pattern), **options)


def call_grammar(
    protocol: str,
    tools: Sequence[Schema],
    vocabulary: Vocabulary,
    name: str | None = None,
) -> Grammar:
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
        GrammarError: Arguments are written as tags that cannot keep a schema.
        ValueError: No tool has this name.
    """
    row = FORMATS.get(protocol)
    if row is None:
        raise UnsupportedToolProtocol(protocol)
    types = Types(tools)
    functions = types.declared
    if name is not None:
        if name not in functions:
            known = ", ".join(functions) or "none"
            raise ValueError(
                f"tool_choice names {name!r}, declared tools are: {known}."
            )
        functions = {name: functions[name]}

    def text(literal: str) -> str:
        return _literal(literal, vocabulary)

    rules, tags = [], _Tags(text, types)
    for i, (function, parameters) in enumerate(functions.items()):
        schema = _arguments_schema(parameters)
        arguments = tags.arguments(function, schema) if row.tags else _json(schema)
        head = text(row.name + function + row.arguments)
        rules.append(f"call{i}: {head} {arguments} {text(row.end)}")
    calls = " | ".join(f"call{i}" for i in range(len(rules)))
    more = "" if row.joiner is None else f"({text(row.joiner)} call)*"
    start = f"start: call {more} {text(row.closer)}"
    used = tags.rules if row.tags else []
    lark = "\n".join([start, f"call: {calls}", *rules, *used])
    return Grammar(lark, row.lead, row.opener)


def load_vocabulary(tokenizer):
    """A tokenizer for ``GrammarMatcher``. The first one takes about a second.

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
    ends = getattr(tokenizer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    key = (len(inner), *sorted(ends))
    made = _VOCABULARIES.setdefault(inner, {})
    if key not in made:
        plain = lib.LLTokenizer(_with_controls(backend.to_str()), slices=[])
        made[key] = lib.LLTokenizer(_Spelling(plain), eos_token=sorted(ends))
    return made[key]


_VOCABULARIES: WeakKeyDictionary[Any, dict] = WeakKeyDictionary()


def _with_controls(tokenizer: str) -> str:
    """The tokenizer, with control tokens that are no text: none is part of a string."""
    data = json.loads(tokenizer)
    for token in data["added_tokens"]:
        token["special"] = not (
            token["content"].isspace() or token["content"].isalnum()
        )
    return json.dumps(data)


class _Spelling:
    """What llguidance asks of a tokenizer; no text becomes a control token.

    Args:
        plain: The tokenizer with control tokens that are no text, but written as such.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, plain):
        self._plain = plain
        self.eos_token_id = plain.eos_token
        self.tokens = [plain.decode_bytes([i]) for i in range(plain.vocab_size)]
        # An id without a token is decoded as its number; as a text it would be one.
        self.special_token_ids = special = [
            i
            for i, piece in enumerate(self.tokens)
            if plain.is_special_token(i) or piece == b"<[%d]>" % i
        ]
        names = [self.tokens[i].decode("utf-8", "ignore") for i in special]
        names = sorted(filter(None, names), key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    def __call__(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(self._controls.split(text)):
            # Every other part is the text of a control token.
            spell = self._plain.greedy_tokenize if i % 2 else self._plain.tokenize_str
            ids += spell(part) if part else []
        return ids


class GrammarMatcher:
    """What a grammar allows at the next token of one stream; a controller.

    Behind the last token only an end token is allowed.

    Args:
        grammar: What must be written.
        vocabulary: From ``load_vocabulary``.
        written: Tokens of the text in front of the grammar; they are forced.

    Raises:
        GrammarError: The grammar is not supported, or no text fits it.
    """

    masks, biases = True, False

    def __init__(self, grammar: Grammar, vocabulary, written: Sequence[int] = ()):
        lib = _llguidance()
        self._matcher = lib.LLMatcher(vocabulary, grammar.source, log_level=0)
        self._check()
        self._fast_forward, self._size = grammar.fast_forward, vocabulary.vocab_size
        self._bits = np.zeros(((self._size + 31) // 32,), np.uint32)
        self._fill()  # a grammar that no text fits shows here
        self._ends = np.zeros_like(self._bits)
        for token in vocabulary.eos_tokens:
            _set(self._ends, token)
        self._written = tuple(written)
        self._read = 0  # tokens that were read, with the written ones
        self._taken = 0  # tokens that the grammar has taken
        self._due: Sequence[int] | None = self._written or None  # None: not known yet

    def accept(self, token: int) -> None:
        """Reads one token. Behind one that does not fit, only an end is allowed."""
        known = 0 <= token < self._size
        if known and self._read >= len(self._written) and self._fits:
            self._taken += self._matcher.try_consume_tokens([token])
        self._read += 1
        # The rest of what is due stays due, however it would be cut from here.
        due = self._due
        self._due = (due[1:] if due and due[0] == token else None) or None

    def forced(self) -> Sequence[int]:
        """The tokens of the text that must come next; empty where there is a choice."""
        if self._due is None:
            self._due = ()
            if self._fast_forward and self._fits:
                self._due = tuple(self._matcher.compute_ff_tokens())
        return self._due

    def mask(self) -> np.ndarray:
        """Which tokens may come next, as ``Controller.mask``; the array is reused."""
        if forced := self.forced():
            self._bits[:] = 0
            _set(self._bits, forced[0])
        elif self._fits and not self._matcher.is_stopped():
            self._fill()
        else:
            self._check()
            self._bits[:] = self._ends
        return self._bits

    @property
    def _fits(self) -> bool:
        """Whether every token so far does."""
        return self._read <= self._taken + len(self._written)

    def horizon(self) -> int:
        """No token is free of the mask, but nothing else happens to any of them."""
        return 1 << 62

    def bias(self) -> None:
        """None: a grammar has no preferences."""

    def checkpoint(self) -> object:
        """The state, in O(1)."""
        return self._read, self._taken, self._due

    def restore(self, mark: object) -> None:
        """Goes back to a state."""
        read, taken, due = mark
        if self._taken > taken:
            self._matcher.rollback(self._taken - taken)
        self._read, self._taken, self._due = read, taken, due

    def _fill(self) -> None:
        """The grammar's own mask."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        # The rest quotes the grammar and the state of its parser.
        first, *rest = self._matcher.get_error().strip().splitlines()
        reason = " ".join(
            [first, *(line for line in rest if line.startswith("error:"))]
        )
        if reason.startswith("NoExtension"):
            raise GrammarError("No text fits the grammar, or none that ends.")
        raise GrammarError(f"The grammar is not supported: {reason}")


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str but is a {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"{name} has no UTF-8 form: {error}.") from error


def _set(words: np.ndarray, token: int) -> None:
    words[token // 32] |= np.uint32(1 << (token % 32))


def _llguidance():
    try:
        import llguidance
    except ImportError:
        raise ImportError(
            "Grammars, required tool calls and JSON answers need llguidance: "
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
    try:
        return f"%json {json.dumps(schema, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"The schema is no JSON: {error}.") from error


def _arguments_schema(parameters: Schema) -> Schema:
    schema = {"type": "object", "properties": {}, **parameters}
    schema.setdefault("additionalProperties", False)
    return schema


# Texts of parameters run up to and with their closing tag; no such tag is part of them.
_CLOSER = json.dumps("\n</parameter>\n")
_TEXT = rf"""text[lazy]: (ANY & ~TAGS) {_CLOSER}
ANY: /(?s:.*)/
TAGS: /(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/"""
_NULL = json.dumps("null\n</parameter>\n")

# Keywords that say more than is looked at here.
_NESTED = {"$ref", "allOf", "anyOf", "oneOf", "not", "if"}
_WHOLE = _NESTED | {
    "dependentRequired",
    "dependentSchemas",
    "maxProperties",
    "minProperties",
    "patternProperties",
    "propertyNames",
}
_FORMATS = {
    # February has 28 days: which years have a 29th is beyond a pattern.
    "date": "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}


class _Tags:
    """Arguments as ``<parameter=key>`` tags: strings as they are, all else as JSON.

    ``rules`` are those that the arguments refer to.
    """

    def __init__(self, text, types: Types):
        self._literal, self._types = text, types
        self.rules = [_TEXT]

    def arguments(self, function: str, schema: Schema) -> str:
        """The tags of a call in the order of the schema.

        Raises:
            GrammarError: Not every text of such tags would fit the schema.
        """
        properties, required = schema["properties"], schema.get("required", ())
        for name in (function, *properties):
            if not name or ">" in name or name != name.strip():
                raise GrammarError(f"{name!r} cannot be written as the name of a tag.")
        missing = [f"properties.{key}" for key in required if key not in properties]
        if unknown := sorted(_WHOLE & schema.keys()) + missing:
            raise GrammarError(
                f"The parameters of {function!r} are written as tags, for which "
                f"{unknown[0]} is not supported or missing."
            )
        tags = []
        for key, value in properties.items():
            try:
                body = self._value(value, partial(self._types.value, function, key))
            except GrammarError as error:
                place = f"Parameter {key!r} of {function!r} is written as a tag"
                raise GrammarError(f"{place}, where {error}") from None
            opener = self._literal(f"<parameter={key}>\n")
            tags.append(f"({opener} {body}){'' if key in required else '?'}")
        return " ".join(tags)

    def _value(self, schema: Schema | bool, read) -> str:
        """A value and its closing tag; ``read`` is what the parser makes of a text."""
        if not isinstance(schema, Mapping):
            schema = {} if schema else {"not": {}}
        if "enum" in schema or "const" in schema:
            return _choice(schema.get("enum", [schema.get("const")]), read)
        kinds = _kinds(schema)
        options = schema.get("anyOf") or schema.get("oneOf")
        if options and not kinds:
            return self._alternatives(schema, options, read)
        if kinds and "string" not in kinds:
            return f"{_json(schema)} {_CLOSER}"
        if nested := sorted(_NESTED & schema.keys()):
            raise GrammarError(f"{nested[0]} is not supported.")
        text = self._text(schema)
        return f"({text} | {_NULL})" if "null" in kinds else text

    def _alternatives(self, schema: Schema, options: Sequence[Schema], read) -> str:
        """Of ``anyOf`` or ``oneOf``. Where one is a text, all but null are read so."""
        kinds = [_kinds(option) for option in options]
        if all(k and "string" not in k for k in kinds):
            return f"{_json(schema)} {_CLOSER}"
        texts = [o for o, k in zip(options, kinds, strict=True) if k == {"string"}]
        if not texts or ("oneOf" in schema and len(texts) > 1):
            raise GrammarError("these alternatives are not supported.")
        words = [self._value(option, read) for option in texts]
        return f"({' | '.join(words + [_NULL] * ({'null'} in kinds))})"

    def _text(self, schema: Schema) -> str:
        """The name of a rule for a string with its closing tag."""
        parts = []
        if pattern := schema.get("pattern"):
            parts.append(_unanchored(pattern))
        if name := schema.get("format"):
            if name not in _FORMATS:
                raise GrammarError(f"the format {name!r} is not supported.")
            parts.append(_FORMATS[name])
        if {"minLength", "maxLength"} & schema.keys():
            most = schema.get("maxLength", "")
            parts.append(f"(?s:.{{{schema.get('minLength', 0)},{most}}})")
        if not parts:
            return "text"
        rule = f"text{len(self.rules)}"
        terminals = " & ".join(
            f"/{part.replace('/', chr(92) + '/')}/" for part in parts
        )
        self.rules.append(f"{rule}[lazy]: ({terminals} & ~TAGS) {_CLOSER}")
        return rule


def _kinds(schema: Schema | bool) -> set[str]:
    """The types that a schema names."""
    kind = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    return {kind} if isinstance(kind, str) else set(kind)


def _choice(values: Sequence, read) -> str:
    """One of some values with its closing tag."""
    words = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value)
        tag = re.search("</(parameter|function|tool_call)>", text)
        if tag or type(read(text)) is not type(value) or read(text) != value:
            raise GrammarError(f"{value!r} would be read as another value.")
        words.append(json.dumps(f"{text}\n</parameter>\n", ensure_ascii=False))
    if not words:
        raise GrammarError("an enum is empty.")
    return f"({' | '.join(words)})"


def _unanchored(pattern: str) -> str:
    """A pattern that matches anywhere, as one that matches as a whole."""
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) else "(?s:.*)"
    body = pattern[not start :]
    return f"{start}(?:{body[:-1] if not end else body}){end}"
