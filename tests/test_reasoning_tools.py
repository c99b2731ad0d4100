"""Tool call formats."""

import json
import time

import pytest

import mlx_mtp.reasoning as r

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array"},
                "exact": {"type": "boolean"},
                "note": {"type": ["string", "null"]},
            },
        },
    },
}
TIME = {"name": "time", "parameters": {"properties": {}}}
TOOLS = [WEATHER, TIME]
ARGUMENTS = {"city": "São Paulo", "days": 3, "tags": ["a", "b"], "exact": True}
JSON = json.dumps(ARGUMENTS)

# For each protocol: one call, and two calls.
ONE = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nSão Paulo\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=tags>\n"
    '["a", "b"]\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n'
    "</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo"
    "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n'
    "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=weather>\n<parameter=city>São Paulo"
    '</parameter>\n<parameter=days>3</parameter>\n<parameter=tags>["a", "b"]'
    "</parameter>\n<parameter=exact>true</parameter>\n</function>\n"
    "</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
    'São Paulo</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="tags">["a", "b"]</parameter>\n<parameter name="exact">true'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">São Paulo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">["a", "b"]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma": '<|tool_call>call:weather{city:<|"|>São Paulo<|"|>,days:3,'
    'tags:[<|"|>a<|"|>,<|"|>b<|"|>],exact:true}<tool_call|>',
    "function_gemma": "<start_function_call>call:weather{city:<escape>São Paulo"
    "<escape>,days:3,tags:[<escape>a<escape>,<escape>b<escape>],exact:true}<end_function_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>São Paulo<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    '<|open|>argument key="tags" type="array"<|sep|>["a", "b"]<|close|>argument<|sep|>'
    '<|open|>argument key="exact" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON}",
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}',
    "cohere": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", '
    f'"parameters": {JSON}}}\n]<|END_ACTION|>',
    "lfm2": "<|tool_call_start|>[weather(city='São Paulo', days=3, tags=['a', 'b'], "
    "exact=True)]<|tool_call_end|>",
    "olmo": '<function_calls>\nweather(city="São Paulo", days=3, tags=["a", "b"], '
    "exact=true)\n</function_calls>",
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {JSON}}}]</TOOLCALL>',
    "hunyuan": f'<tool_calls>[{{"name": "weather", "arguments": {JSON}}}]</tool_calls>',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}]',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json"
    f"<|message|>{JSON}<|call|>",
}
TWO = {
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON}time[ARGS]{{}}",
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}; '
    '{"name": "time", "parameters": {}}',
    "kimi": ONE["kimi"].replace(
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek": ONE["deepseek"].replace(
        "<｜tool▁calls▁end｜>",
        "\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "dsml": ONE["dsml"].replace(
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "lfm2": ONE["lfm2"].replace(")]", "), time()]"),
    "olmo": ONE["olmo"].replace(")\n", ")\ntime()\n"),
    "cohere": ONE["cohere"].replace(
        "\n]", ',\n{"tool_call_id": "1", "tool_name": "time", "parameters": {}}\n]'
    ),
}


@pytest.mark.parametrize("protocol", ONE)
def test_one_call_of_each_protocol(protocol):
    (call,) = r.parse_tool_calls(ONE[protocol], protocol, TOOLS)
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)


@pytest.mark.parametrize("protocol", TWO)
def test_parallel_calls_of_one_section(protocol):
    calls = r.parse_tool_calls(TWO[protocol], protocol, TOOLS)
    assert [(c.name, c.arguments) for c in calls] == [
        ("weather", ARGUMENTS),
        ("time", {}),
    ]


def test_every_protocol_has_a_test_and_is_found_in_a_template_that_shows_it():
    assert set(ONE) == set(r.PROTOCOLS) - {"none"}
    for protocol, text in ONE.items():
        assert r.infer_protocol(f"... {text} ...") == protocol
    assert r.infer_protocol("<|im_start|>") == ""


def test_ids_of_the_model_are_kept():
    (kimi,) = r.parse_tool_calls(ONE["kimi"], "kimi")
    (cohere,) = r.parse_tool_calls(ONE["cohere"], "cohere")
    (mistral,) = r.parse_tool_calls("[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}", "mistral")
    assert (kimi.id, cohere.id, mistral.id) == ("functions.weather:0", "0", "a1")


def test_older_forms_of_a_format():
    fenced = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    assert r.parse_tool_calls(fenced, "deepseek")[0] == ("weather", ARGUMENTS, "")
    listed = f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}, "id": "x"}}]'
    assert r.parse_tool_calls(listed, "mistral")[0] == ("weather", ARGUMENTS, "x")
    text = json.dumps({"name": "weather", "arguments": JSON})
    assert r.parse_tool_calls(text, "hermes")[0].arguments == ARGUMENTS
    block = (
        '<|open|>tools<|sep|><|open|>call tool="a&quot;b" index="1"<|sep|><|open|>json '
        'type="object"<|sep|>{"x": 1}<|close|>json<|sep|><|close|>call<|sep|>'
    )
    assert r.parse_tool_calls(block, "kimi_k3")[0] == ('a"b', {"x": 1}, "")


@pytest.mark.parametrize("body", ["qwen_xml", "glm", "hermes"])
@pytest.mark.parametrize("protocol", ["qwen_xml", "glm", "hermes"])
def test_the_three_formats_that_share_a_tag_are_told_apart(body, protocol):
    (call,) = r.parse_tool_calls(ONE[body], protocol, TOOLS)
    assert call.arguments == ARGUMENTS


def test_declared_types_win_over_what_a_value_looks_like():
    def value(text, key):
        xml = f"<tool_call><function=weather><parameter={key}>{text}</parameter>"
        (call,) = r.parse_tool_calls(xml + "</function></tool_call>", "qwen_xml", TOOLS)
        return call.arguments[key]

    assert value("12", "city") == "12"
    assert value("{x", "city") == "{x"
    assert value("12.0", "days") == 12 and type(value("12.0", "days")) is int
    assert value("True", "exact") is True
    assert value("null", "note") is None
    assert value("null", "city") == "null"
    assert value("\n  two\nlines\n", "city") == "  two\nlines"
    assert value("plain", "unknown") == "plain"
    assert value("[1]", "unknown") == [1]


def test_strings_may_hold_anything():
    odd = 'a{b}: "c", call:x{y:1} </tool_call> \\ \n\t🙂'
    quoted = f'<|tool_call>call:weather{{city:<|"|>{odd}<|"|>}}<tool_call|>'
    (call,) = r.parse_tool_calls(quoted, "gemma", TOOLS)
    assert call.arguments == {"city": odd}
    raw = '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>'
    assert r.parse_tool_calls(raw, "hermes")[0].arguments == {"city": "a\nb"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>so <function=time></function></tool_call>", "malformed"),
        ("<tool_call><function=time>oops</function></tool_call>", "malformed"),
        ("<tool_call></tool_call>", "malformed"),
        ("<tool_call>{bad}</tool_call>", "malformed"),
        ("<tool_call>just words here</tool_call>", "malformed"),
        ('<tool_call>"text"</tool_call>', "malformed"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing_name"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "missing_name"),
        ('<tool_call>{"name": "nope", "arguments": {}}</tool_call>', "undeclared"),
        (
            '<tool_call>{"name": "time", "arguments": [1]}</tool_call>',
            "invalid_arguments",
        ),
        (
            '<tool_call>{"name": "time", "arguments": {"x": NaN}}</tool_call>',
            "malformed",
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "malformed"),
        (
            "<tool_call><function=time><parameter=a>1</function></tool_call>",
            "malformed",
        ),
    ],
)
def test_a_bad_call_says_what_is_wrong(text, reason):
    with pytest.raises(r.ToolCallError, match=r"\[tool call\]") as error:
        r.parse_tool_calls(text, "hermes", TOOLS)
    assert error.value.reason == reason


def test_positional_arguments_and_hostile_python_are_refused():
    for body in (
        "f(1)",
        "f(**x)",
        "x = 1",
        "import os",
        "f(a=g())",
        "(" * 5000,
        "f(a=1)(",
    ):
        with pytest.raises(r.ToolCallError):
            r.parse_tool_calls(f"<function_calls>{body}</function_calls>", "olmo")


def test_bad_declarations_are_refused_before_any_token():
    for tools in ([{"type": "function"}], ["weather"], [{"function": {}}], 5):
        with pytest.raises(r.ReasoningError, match="tools must be mappings"):
            r.ReasoningEmitter(r.family("qwen3"), tools=tools)
    for parameters in ({"type": "string"}, {"properties": []}, [], "x"):
        tool = {"name": "f", "parameters": parameters}
        if parameters:
            with pytest.raises(r.ReasoningError, match="'f' must be the schema"):
                r.ReasoningEmitter(r.family("qwen3"), tools=[tool])
    with pytest.raises(r.ReasoningError, match="two tools have the name 'f'"):
        r.ReasoningEmitter(r.family("qwen3"), tools=[{"name": "f"}, {"name": "f"}])


def test_schemas_of_any_shape_are_read():
    """True and False are schemas, and options may be."""
    tool = {
        "name": "f",
        "parameters": {"properties": {"a": True, "b": {"anyOf": [True, {}]}}},
    }
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b>x</parameter>"
    (call,) = r.parse_tool_calls(f"{text}</function></tool_call>", "qwen_xml", [tool])
    assert call.arguments == {"a": 1, "b": "x"}


# Beginning, what is repeated, end.
HOSTILE = {
    "openers": ("", "<tool_call>", ""),
    "functions": ("<tool_call>", "<function=a>", "</tool_call>"),
    "parameters": ("<tool_call><function=a>", "<parameter=b>", "</tool_call>"),
    "objects": ("<tool_call>", '{"name": "a"} ', "</tool_call>"),
    "thoughts": ("", "<think></think>", ""),
    "literal": ("", "`<think>` ", ""),
    "brackets": ("", "<<<<", ""),
    "backticks": ("", "``` ` ", ""),
    "spaces": ("a", "  \n ", ""),
    "marks": ("e", "\u0301", ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_linear_time(name):
    first, repeated, last = HOSTILE[name]

    def seconds(count):
        text = first + repeated * count + last
        emitter = r.ReasoningEmitter(r.family("qwen3_5"), trim=False)
        start = time.process_time()
        events = [*emitter.push_text(text), *emitter.finish()]
        seconds = time.process_time() - start
        assert "".join(event.text for event in events) == text
        return seconds

    # Quadratic time would be 64 times as long.
    assert seconds(8000) < 24 * seconds(1000) + 0.3


def test_an_unknown_protocol_is_an_error():
    with pytest.raises(r.ReasoningError, match="protocol must be one of"):
        r.parse_tool_calls("", "telepathy")


MLX_LM = {
    "hermes": "json_tools",
    "qwen_xml": "qwen3_coder",
    "glm": "glm47",
    "minimax": "minimax_m2",
    "gemma": "gemma4",
    "function_gemma": "function_gemma",
    "kimi": "kimi_k2",
    "mistral": "mistral",
    "lfm2": "pythonic",
}


@pytest.mark.parametrize("protocol", MLX_LM)
def test_mlx_lm_reads_the_same_call(protocol):
    name = f"mlx_lm.tool_parsers.{MLX_LM[protocol]}"
    theirs = pytest.importorskip(name, exc_type=ImportError)
    body = ONE[protocol].removeprefix(theirs.tool_call_start)
    body = body.removesuffix(theirs.tool_call_end)
    if protocol == "function_gemma":  # theirs has no lists
        body = body.replace(",tags:[<escape>a<escape>,<escape>b<escape>]", "")
    tools = [WEATHER]
    call = theirs.parse_tool_call(body.strip() if protocol != "glm" else body, tools)
    call = call[0] if isinstance(call, list) else call
    (ours,) = r.parse_tool_calls(body, protocol, TOOLS)
    assert (call["name"], call["arguments"]) == (ours.name, ours.arguments)
