"""Grammars on the demo model: validity, speed, and what the masks cost.

    python bench/grammar.py [--quick] [--json FILE]

schemas    random JSON schemas (nested, enums, patterns, unicode), sampled at
           temperature 1 with MTP: every finished answer must be valid JSON that fits,
           by a checker of its own.
overhead   a grammar that allows every text, against none: the same tokens, so the
           time is that of the masks.
speed      tokens a second under a schema: mlx_lm, MTP without and with forced text.
"""

from __future__ import annotations

import json
import random
import re
import sys
from time import perf_counter

import common
import prompts

KEYS = ("name", "größe", "x", "Straße 1", "名前", "emoji 🙂", "is_ok", "n-th", "a.b")
WORDS = ("red", "größer", "🙂", "naïve", "x y", "日本", "", 'quo"te', "back\\slash")
OVERHEAD_BAR = 0.1
PATTERNS = ("[a-c]{1,4}", "(ja|nein)", "[0-9]{2}-[0-9]{2}", "[äöü]{2}", "a(b|cd)?e")


def main():
    args = common.parser(__doc__).parse_args()
    header = common.start(args)
    common.show_header(header)
    bench = Bench()
    rows = [
        bench.schemas(20 if args.quick else 500),
        bench.overhead(args.quick),
        bench.speed(2 if args.quick else 10),
    ]
    common.write(args.json, header, rows)
    sys.exit(not all(row["ok"] for row in rows))


def schema(rng: random.Random, depth: int = 2) -> dict:
    """A schema whose answers are short."""
    kinds = [_integer, _boolean, _enum, _pattern, _string, _either]
    kind = rng.choice([*kinds, *([_object, _object, _array] if depth else [])])
    return kind(rng, depth)


def _integer(rng, depth):
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)}


def _boolean(rng, depth):
    return {"type": rng.choice(["boolean", "null"])}


def _enum(rng, depth):
    values = [*rng.sample(WORDS, 3), rng.randint(0, 99), None, True]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _pattern(rng, depth):
    return {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"}


def _string(rng, depth):
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + 6}


def _either(rng, depth):
    return {"anyOf": [_integer(rng, 0), _pattern(rng, 0)]}


def _array(rng, depth):
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": schema(rng, depth - 1),
        "minItems": low,
        "maxItems": low + 2,
    }


def _object(rng, depth):
    keys = rng.sample(KEYS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: schema(rng, depth - 1) for key in keys},
        "required": rng.sample(keys, rng.randint(0, len(keys))),
        "additionalProperties": False,
    }


def valid(x, s: dict) -> bool:
    """Whether a value fits one of the schemas above."""
    if "anyOf" in s:
        return any(valid(x, option) for option in s["anyOf"])
    if "enum" in s:
        return any(x == y and type(x) is type(y) for y in s["enum"])
    kind = s["type"]
    if kind == "object":
        return (
            isinstance(x, dict)
            and set(s["required"]) <= set(x) <= set(s["properties"])
            and all(valid(value, s["properties"][key]) for key, value in x.items())
        )
    if kind == "array":
        fits = isinstance(x, list) and s["minItems"] <= len(x) <= s["maxItems"]
        return fits and all(valid(item, s["items"]) for item in x)
    if kind == "integer":
        return type(x) is int and s["minimum"] <= x <= s["maximum"]
    if kind == "string":
        if "pattern" in s:
            return isinstance(x, str) and bool(re.search(s["pattern"], x))
        return isinstance(x, str) and s["minLength"] <= len(x) <= s["maxLength"]
    return x is None if kind == "null" else type(x) is bool


class Bench:
    def __init__(self):
        import mlx_mtp

        self.mtp = mlx_mtp
        self.model, self.tokenizer = mlx_mtp.load("demo")

    def prompt(self, question: str) -> list[int]:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            enable_thinking=False,
        )

    def run(self, prompt, max_tokens, **options):
        """Tokens, seconds from the request to the last one, and the last response."""
        times, tokens = [perf_counter()], []
        for response in self.mtp.stream_generate(
            self.model, self.tokenizer, prompt, max_tokens, **options
        ):
            times.append(perf_counter())
            tokens.append(response.token)
        return tokens, times[-1] - times[0], response

    def schemas(self, count: int) -> dict:
        rng = random.Random(1)
        sampler = self.mtp.make_sampler(1.0)
        finished = fitting = tokens = forced = 0
        for i in range(count):
            wanted = schema(rng)
            prompt = self.prompt(f"What is {rng.randint(10, 99)} + {i}?")
            out, _, last = self.run(
                prompt, 400, mtp=1 + i % 6, sampler=sampler, seed=i, grammar=wanted
            )
            tokens += len(out)
            forced += last.mtp.emitted - last.mtp.round_tokens
            finished += last.finish_reason == "stop"
            text = self.tokenizer.decode(out[:-1])
            try:
                fits = last.finish_reason == "stop" and valid(json.loads(text), wanted)
            except ValueError:
                fits = False
            if not fits:
                print(f"  {json.dumps(wanted)}\n  {text!r}")
            fitting += fits
        print(
            f"schemas   {count}: {finished} answers finished, {fitting} valid; "
            f"{tokens} tokens, {forced / tokens:.0%} of them forced"
        )
        return {
            "name": "schemas",
            "schemas": count,
            "finished": finished,
            "valid": fitting,
            "tokens": tokens,
            "ok": fitting == finished == count,
        }

    def overhead(self, quick: bool) -> dict:
        """Pairs of the same greedy stream, in turns; thoughts, as they are long."""
        turns = 2 if quick else 15
        anything = self.mtp.Grammar.regex("(?s:.*)")
        ratios = {}
        for depth in (1, 3, 6):
            ratios[depth] = []
            for turn in range(-1, turns):
                for question in prompts.problems(3, seed=4):
                    prompt = self.prompt(question)
                    arms = {"free": None, "masked": anything}
                    runs = {
                        name: self.run(prompt, 100, mtp=depth, grammar=arms[name])
                        for name in (list(arms) if turn % 2 else list(arms)[::-1])
                    }
                    assert runs["free"][0] == runs["masked"][0]
                    if turn >= 0:  # the first turn compiles
                        ratios[depth].append(runs["masked"][1] / runs["free"][1] - 1)
        medians = {depth: common.median(values) for depth, values in ratios.items()}
        for depth, value in medians.items():
            print(
                f"overhead  depth {depth}: {value:+.1%} time a token, half of the "
                f"pairs within {common.iqr(ratios[depth]):.1%}"
            )
        return {
            "name": "overhead",
            "by_depth": medians,
            "iqr": {depth: common.iqr(values) for depth, values in ratios.items()},
            "bar": OVERHEAD_BAR,
            "ok": quick or max(medians.values()) < OVERHEAD_BAR,
        }

    def speed(self, turns: int) -> dict:
        grammar = self.mtp.Grammar
        person = grammar.json_schema(PERSON)
        slow = grammar(person.source, fast_forward=False)
        arms = {
            "mlx_lm": {"mtp": None, "grammar": slow},
            "mtp 3": {"mtp": 3, "grammar": slow},
            "mtp 3, forced text": {"mtp": 3, "grammar": person},
            "mtp 6, forced text": {"mtp": 6, "grammar": person},
        }
        speeds = {name: [] for name in arms}
        for turn in range(-1, turns):
            for question in prompts.problems(3, seed=5):
                prompt = self.prompt(question)
                for name in list(arms) if turn % 2 else list(arms)[::-1]:
                    tokens, seconds, _ = self.run(prompt, 200, **arms[name])
                    if turn >= 0:
                        speeds[name].append(len(tokens) / seconds)
        medians = {name: common.median(values) for name, values in speeds.items()}
        for name, value in medians.items():
            print(
                f"speed     {name:20} {value:6.1f} tokens a second, "
                f"{value / medians['mlx_lm']:.2f}x"
            )
        return {"name": "speed", "tokens_per_second": medians, "ok": True}


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sum": {"type": "integer", "minimum": 0, "maximum": 9999},
        "items": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "maxItems": 4,
        },
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 12},
                "number": {"type": "integer", "minimum": 1, "maximum": 999},
            },
            "required": ["street", "number"],
            "additionalProperties": False,
        },
        "ok": {"type": "boolean"},
    },
    "required": ["name", "sum", "items", "address", "ok"],
    "additionalProperties": False,
}


if __name__ == "__main__":
    main()
