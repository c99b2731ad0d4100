"""Tool call formats: what opens and closes a call, and what it says.

A protocol is a row of `PROTOCOLS`. Parsers take the whole text of a call, delimiters
included, and either return calls or raise `ToolCallError`; they never guess.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import ReasoningError

Tools = Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """One parsed tool call. `id` is the model's own, empty when the format has none."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class ToolCallError(ReasoningError):
    """A text that should be a tool call is none.

    `reason` is "malformed", "incomplete", "missing_name", "undeclared" or
    "invalid_arguments".
    """

    def __init__(self, reason: str, message: str):
        self.reason = reason
        super().__init__(f"[tool call] {message}")


@dataclass(frozen=True)
class Protocol:
    """One tool call format.

    Attributes:
        spans: (opening, closing) delimiters; an empty closing one means that the call
            runs to the next opening delimiter or the end of the turn.
        parse: Body and argument types to calls.
        hint: Text in a chat template that gives the format away.
        bare: Beginnings of a call without delimiters.
        route: For framed protocols, header to region.
        source: Where the format is written down.
    """

    spans: tuple[tuple[str, str], ...]
    parse: Callable[[str, Types], Iterable[Call]]
    hint: str
    source: str
    bare: tuple[str, ...] = ()
    route: Callable[[str], str] | None = None


def parse_tool_calls(
    text: str, protocol: str, tools: Tools | None = None
) -> list[Call]:
    """Parses the text of one call, or of one section with several.

    Args:
        text: The text with its delimiters. A missing closing delimiter is accepted
            when the rest is complete.
        protocol: A key of `PROTOCOLS`.
        tools: Declared tools, as given to a chat template. Argument values of XML
            formats take the declared types, and an undeclared name is an error. None:
            any name goes, values that read as JSON are taken as such.

    Raises:
        ToolCallError: The text is no call.

    Example:
        >>> parse_tool_calls(
        ...     '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "hermes"
        ... )
        [Call(name='f', arguments={'x': 1}, id='')]
    """
    if protocol not in PROTOCOLS:
        raise ReasoningError(
            f"[tool call] protocol must be one of {', '.join(PROTOCOLS)} but is "
            f"{protocol!r}."
        )
    return parse_calls(text, protocol, Types(tools))


def parse_calls(text: str, protocol: str, types: Types) -> list[Call]:
    """`parse_tool_calls` with the declared tools read already."""
    row = PROTOCOLS[protocol]
    try:
        calls = list(row.parse(_body(text, row), types))
    except ToolCallError:
        raise
    # ast and json raise the last three for hostile input.
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ToolCallError("malformed", f"cannot be parsed: {error}") from error
    if not calls:
        raise ToolCallError("malformed", "contains no call")
    for call in calls:
        _check(call, types)
    return calls


def infer_protocol(template: str) -> str:
    """The protocol a chat template shows, or an empty string."""
    for name, row in PROTOCOLS.items():
        if row.hint and row.hint in template:
            return name
    return ""


def _body(text: str, row: Protocol) -> str:
    """The text between the delimiters."""
    text = text.strip()
    for opening, closing in row.spans:
        if text.startswith(opening):
            return text.removeprefix(opening).removesuffix(closing).strip()
    return text


def _check(call: Call, types: Types) -> None:
    if not isinstance(call.name, str) or not call.name:
        raise ToolCallError("missing_name", "has no tool name")
    if types.declared is not None and call.name not in types.declared:
        known = ", ".join(types.declared) or "none"
        raise ToolCallError(
            "undeclared", f"names {call.name!r}, declared tools are: {known}"
        )
    if not isinstance(call.arguments, dict):
        raise ToolCallError(
            "invalid_arguments",
            f"arguments of {call.name!r} must be an object but are "
            f"{type(call.arguments).__name__}",
        )


class Types:
    """Declared types of tool arguments."""

    def __init__(self, tools: Tools | None):
        self.declared: dict[str, Mapping[str, Any]] | None = None
        if tools is None:
            return
        self.declared = {}
        for tool in tools if isinstance(tools, Iterable) else [tools]:
            name, parameters = _declaration(tool)
            if name in self.declared:
                raise ReasoningError(f"[tool call] two tools have the name {name!r}.")
            self.declared[name] = parameters

    def value(self, tool: str, key: str, text: str) -> Any:
        """An argument written as plain text, as its declared type."""
        kinds = self._kinds(tool, key)
        try:
            value = _loads(text)
        except ValueError:
            value = {"True": True, "False": False, "None": None}.get(text, text)
        if value is None and ("null" in kinds or not kinds):
            return None
        if isinstance(value, str) or "string" in kinds:
            return text
        if "integer" in kinds and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    def _kinds(self, tool: str, key: str) -> set[str]:
        properties = (self.declared or {}).get(tool, {}).get("properties") or {}
        schema = properties.get(key, {})
        kinds: set[str] = set()
        options = [schema]
        if isinstance(schema, Mapping):
            options += [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        for option in options:
            kind = option.get("type", ()) if isinstance(option, Mapping) else ()
            kinds.update([kind] if isinstance(kind, str) else kind)
        return kinds


def _declaration(tool: Any) -> tuple[str, Mapping[str, Any]]:
    """The name and the parameters of a declared tool."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ReasoningError(
            "[tool call] tools must be mappings with a name, or with a function "
            "that has one."
        )
    parameters = function.get("parameters") or {}
    properties = isinstance(parameters, Mapping) and parameters.get("properties", {})
    if not isinstance(properties, Mapping) or (
        parameters.get("type", "object") != "object"
    ):
        raise ReasoningError(
            f"[tool call] the parameters of {name!r} must be the schema of an object."
        )
    return name, parameters


# JSON


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Models write raw newlines in strings: strict=False takes them.
_JSON = json.JSONDecoder(strict=False, parse_constant=_constant)


def _loads(text: str) -> Any:
    return _JSON.decode(text.strip())


_GAP = re.compile(r"[\s;,]*")


def _json(body: str, types: Types) -> Iterable[Call]:
    """Objects, or lists of objects, one after the other."""
    at = 0
    while at < len(body):
        value, at = _JSON.raw_decode(body, at)
        for item in value if isinstance(value, list) else [value]:
            yield _json_call(item)
        at = _GAP.match(body, at).end()


def _json_call(item: Any) -> Call:
    if not isinstance(item, dict):
        raise ToolCallError("malformed", "is JSON but no object")
    if isinstance(item.get("function"), dict):
        item = {**item, **item["function"]}
    name = item.get("name") or item.get("tool_name") or item.get("function") or ""
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    id = item.get("id", item.get("tool_call_id", ""))
    return Call(name, arguments, str(id))


# Tags


def _sections(text: str, opening: str, closing: str) -> Iterable[str]:
    """The texts between pairs of delimiters, with nothing but white space around.

    Plain searches: a regular expression would take quadratic time on hostile text.
    """
    at = 0
    while (start := text.find(opening, at)) >= 0:
        _no_stray(text[at:start])
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            raise ToolCallError("malformed", f"lacks {closing!r}")
        yield text[start:end]
        at = end + len(closing)
    _no_stray(text[at:])


def _no_stray(text: str) -> None:
    if text.strip():
        raise ToolCallError("malformed", f"has stray text {text.strip()[:40]!r}")


def _split(text: str, separator: str) -> tuple[str, str]:
    head, found, tail = text.partition(separator)
    if not found:
        raise ToolCallError("malformed", f"lacks {separator!r}")
    return head.strip(), tail


def _inline(text: str) -> str:
    """Without the newline that formats put around a value."""
    return text.removeprefix("\n").removesuffix("\n")


def _functions(body: str, types: Types) -> Iterable[Call]:
    """`<function=name><parameter=key>value</parameter></function>`"""
    for function in _sections(body, "<function=", "</function>"):
        name, inner = _split(function, ">")
        arguments = {}
        for parameter in _sections(inner, "<parameter=", "</parameter>"):
            key, value = _split(parameter, ">")
            arguments[key] = types.value(name, key, _inline(value))
        yield Call(name, arguments)


def _invokes(body: str, types: Types) -> Iterable[Call]:
    """`<invoke name="f"><parameter name="key">value</parameter></invoke>`

    DeepSeek puts `｜DSML｜` before the tag names and says which values are strings.
    """
    body = body.replace("｜DSML｜", "")
    for invoke in _sections(body, "<invoke name=", "</invoke>"):
        name, inner = _split(invoke, ">")
        name = name.strip('"')
        arguments = {}
        for parameter in _sections(inner, "<parameter name=", "</parameter>"):
            head, value = _split(parameter, ">")
            key, typed, string = head.partition(" string=")
            key = key.strip('"')
            if not typed:
                arguments[key] = types.value(name, key, _inline(value))
            else:
                arguments[key] = value if string == '"true"' else _loads(value)
        yield Call(name, arguments)


def _arg_keys(body: str, types: Types) -> Iterable[Call]:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>`"""
    name, tag, rest = body.partition("<arg_key>")
    name = name.strip()
    if not re.fullmatch(r"[\w.\-]+", name):
        raise ToolCallError("malformed", f"is no call: {body[:40]!r}")
    arguments = {}
    for pair in _sections(tag + rest, "<arg_key>", "</arg_value>"):
        key, rest = _split(pair, "</arg_key>")
        _, value = _split(rest, "<arg_value>")
        arguments[key] = types.value(name, key, _inline(value))
    yield Call(name, arguments)


def _tool_call_tag(body: str, types: Types) -> Iterable[Call]:
    """The three formats that share `<tool_call>`."""
    if body.startswith(("{", "[")):
        return _json(body, types)
    if "<function=" in body:
        return _functions(body, types)
    return _arg_keys(body, types)


# Formats of one family


def _mistral(body: str, types: Types) -> Iterable[Call]:
    """A JSON list, or `name[CALL_ID]id[ARGS]{...}` any number of times."""
    if body.startswith("["):
        yield from _json(body, types)
        return
    header = re.compile(r"\s*([\w.\-]+)(?:\s*\[CALL_ID\](\w+))?\s*\[ARGS\]\s*")
    at = 0
    while at < len(body):
        match = header.match(body, at)
        if match is None:
            raise ToolCallError("malformed", f"is no call: {body[at:][:40]!r}")
        arguments, at = _JSON.raw_decode(body, match.end())
        yield Call(match[1], arguments, match[2] or "")


def _kimi(body: str, types: Types) -> Iterable[Call]:
    for call in _sections(body, "<|tool_call_begin|>", "<|tool_call_end|>"):
        id, arguments = _split(call, "<|tool_call_argument_begin|>")
        name = re.sub(r":\d+$", "", id).removeprefix("functions.")
        yield Call(name, _loads(arguments), id)


def _kimi_k3(body: str, types: Types) -> Iterable[Call]:
    def attribute(head: str, name: str) -> str:
        match = re.search(rf'{name}="([^"]*)"', head)
        text = match[1] if match else ""
        return text.replace("&quot;", '"').replace("&amp;", "&")

    for call in _sections(body, "<|open|>call", "<|close|>call<|sep|>"):
        head, inner = _split(call, "<|sep|>")
        arguments = {}
        if inner.lstrip().startswith("<|open|>json"):
            (block,) = _sections(inner, "<|open|>json", "<|close|>json<|sep|>")
            arguments = _loads(_split(block, "<|sep|>")[1])
            inner = ""
        for argument in _sections(
            inner, "<|open|>argument", "<|close|>argument<|sep|>"
        ):
            about, value = _split(argument, "<|sep|>")
            if attribute(about, "type") != "string":
                value = _loads(value)
            arguments[attribute(about, "key")] = value
        yield Call(attribute(head, "tool"), arguments)


def _deepseek(body: str, types: Types) -> Iterable[Call]:
    """`name<sep>{...}` since V3.1; `function<sep>name` and a JSON fence before."""
    for call in _sections(body, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        name, arguments = _split(call, "<｜tool▁sep｜>")
        if "```json" in arguments:
            name, arguments = _split(arguments, "```json")
            arguments = arguments.strip().removesuffix("```")
        yield Call(name, _loads(arguments))


def _gemma(quote: str) -> Callable[[str, Types], Iterable[Call]]:
    """`call:name{key:value}` with bare keys and `quote` around strings."""

    def to_json(body: str) -> str:
        parts = body.split(quote)
        parts[1::2] = [json.dumps(text) for text in parts[1::2]]
        parts[::2] = [
            re.sub(r"([{,]\s*)([\w.\-]+)(\s*:)", r'\1"\2"\3', part)
            for part in parts[::2]
        ]
        return "".join(parts)

    def parse(body: str, types: Types) -> Iterable[Call]:
        text = to_json(body)
        at = 0
        while (
            match := re.compile(r"call:([\w.\-]+)(?=\{)").search(text, at)
        ) is not None:
            arguments, at = _JSON.raw_decode(text, match.end())
            yield Call(match[1], arguments)

    return parse


class _JsonNames(ast.NodeTransformer):
    """JSON's constants in Python syntax."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _pythonic(body: str, types: Types) -> Iterable[Call]:
    """`[f(x=1), g()]`, or one call a line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bad escape in a string is the model's
        statements = ast.parse(body).body
    for statement in statements:
        value = getattr(statement, "value", None)
        for node in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(node, ast.Call) or node.args:
                raise ToolCallError("malformed", "is no call with named arguments")
            arguments = {
                keyword.arg: ast.literal_eval(_JsonNames().visit(keyword.value))
                for keyword in node.keywords
            }
            yield Call(ast.unparse(node.func), arguments)


def _harmony(body: str, types: Types) -> Iterable[Call]:
    header, _, message = body.partition("<|message|>")
    message = re.sub(r"<\|(call|end|return)\|>\Z", "", message)
    yield Call(_recipient(header), _loads(message.strip() or "{}"))


def _recipient(header: str) -> str:
    match = re.search(r"(?:^|[\s>])to=([\w.\-]+)", header)
    return match[1].removeprefix("functions.") if match else ""


def _harmony_route(header: str) -> str:
    """Analysis is a thought whoever it is for; a recipient elsewhere is a call."""
    channel = re.search(r"<\|channel\|>\s*(\w+)", header)
    if channel is not None and channel[1] == "analysis":
        return "reasoning"
    return "tool" if _recipient(header) else "response"


_TOOL_CALL = (("<tool_call>", "</tool_call>"),)

# Specific hints first: `infer_protocol` takes the first that a template contains.
PROTOCOLS: dict[str, Protocol] = {
    "harmony": Protocol(
        (), _harmony, "<|call|>", "openai/harmony docs/format.md", route=_harmony_route
    ),
    "kimi_k3": Protocol(
        (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        _kimi_k3,
        "<|open|>",
        "Kimi K3 chat template",
    ),
    "kimi": Protocol(
        (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        _kimi,
        "<|tool_calls_section_begin|>",
        "Kimi K2 chat template",
    ),
    "dsml": Protocol(
        (
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ),
        _invokes,
        "｜DSML｜",
        "DeepSeek V3.2 encoding_dsv32.py; the second pair vLLM deepseekv4 parser",
    ),
    "deepseek": Protocol(
        (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
        _deepseek,
        "<｜tool▁calls▁begin｜>",
        "DeepSeek R1, V3 and V3.1 chat templates",
    ),
    "seed": Protocol(
        (("<seed:tool_call>", "</seed:tool_call>"),),
        _functions,
        "<seed:tool_call>",
        "Seed-OSS chat template",
    ),
    "minimax": Protocol(
        (("<minimax:tool_call>", "</minimax:tool_call>"),),
        _invokes,
        "<minimax:tool_call>",
        "MiniMax M2 chat template",
    ),
    "gemma": Protocol(
        (("<|tool_call>", "<tool_call|>"),),
        _gemma('<|"|>'),
        "<|tool_call>",
        "Gemma 4 chat template",
    ),
    "function_gemma": Protocol(
        (("<start_function_call>", "<end_function_call>"),),
        _gemma("<escape>"),
        "<start_function_call>",
        "mlx_lm tool_parsers/function_gemma.py",
    ),
    "mistral": Protocol(
        (("[TOOL_CALLS]", ""),), _mistral, "[TOOL_CALLS]", "mistral-common"
    ),
    "llama": Protocol(
        (("<|python_tag|>", ""),),
        _json,
        "<|python_tag|>",
        "Llama 3.1 model card; calls also come without the tag",
        bare=('{"name"', '{"type": "function"'),
    ),
    "cohere": Protocol(
        (("<|START_ACTION|>", "<|END_ACTION|>"),),
        _json,
        "<|START_ACTION|>",
        "Command R7B and Command A chat templates",
    ),
    "lfm2": Protocol(
        (("<|tool_call_start|>", "<|tool_call_end|>"),),
        _pythonic,
        "<|tool_call_start|>",
        "mlx_lm tool_parsers/pythonic.py",
    ),
    "olmo": Protocol(
        (("<function_calls>", "</function_calls>"),),
        _pythonic,
        "<function_calls>",
        "vLLM olmo3 tool parser",
    ),
    "nemotron": Protocol(
        (("<TOOLCALL>", "</TOOLCALL>"),),
        _json,
        "<TOOLCALL>",
        "Nemotron Nano v2 chat template",
    ),
    "hunyuan": Protocol(
        (("<tool_calls>", "</tool_calls>"),),
        _json,
        "<tool_calls>",
        "vLLM hunyuan_a13b tool parser",
    ),
    "granite": Protocol(
        (("<|tool_call|>", ""),), _json, "<|tool_call|>", "vLLM granite tool parser"
    ),
    "glm": Protocol(
        _TOOL_CALL, _tool_call_tag, "<arg_key>", "GLM 4.5 and 4.6 chat templates"
    ),
    "qwen_xml": Protocol(
        _TOOL_CALL, _tool_call_tag, "<function=", "Qwen3-Coder, Qwen3.5 templates"
    ),
    "hermes": Protocol(
        _TOOL_CALL, _tool_call_tag, "<tool_call>", "Hermes and Qwen3 chat templates"
    ),
    "none": Protocol((), _json, "", ""),
}
