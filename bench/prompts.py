"""Prompts of our own: tasks that the demo model was trained for, and general ones."""

from __future__ import annotations

import random

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NAMES = "Ana Ben Cleo Dan Eva Finn Hana Ivo Kim Leo Mia Nora Otto Pia Rosa Sam".split()
ITEMS = "apples pens coins books stamps shells cards eggs marbles cups keys".split()
WORDS = (
    "house river garden letter window summer winter market machine teacher doctor "
    "island animal bridge forest mountain picture kitchen village morning"
).split()
SMALL_TALK = ("Hello!", "What can you do?", "Who are you?", "Thank you!")

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "A calculator for arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def problems(count: int, seed: int = 0) -> list[str]:
    """Questions of every kind in turn, with numbers drawn from ``seed``."""
    rng = random.Random(seed)
    kinds = (_add, _sub, _mul, _word, _sort, _largest, _compare, _day, _order, _count)
    return [kinds[i % len(kinds)](rng) for i in range(count)]


def mixed(count: int, seed: int = 0) -> list[tuple[str, list | None]]:
    """Questions and tools: of eight, six problems, one of small talk, one tool call."""
    rng = random.Random(seed)
    asked = iter(problems(count, seed))
    out: list[tuple[str, list | None]] = []
    for i in range(count):
        if i % 8 == 3:
            word = rng.choice(WORDS)
            out.append((rng.choice((*SMALL_TALK, f"What does {word} mean?")), None))
        elif i % 8 == 7:
            a, b = rng.randint(10, 999), rng.randint(10, 99)
            out.append(
                (f"Use the calculator: {a} {rng.choice('+-*')} {b}", [CALCULATOR])
            )
        else:
            out.append((next(asked), None))
    return out


def _pair(rng, digits=(3, 5)):
    low, high = 10 ** (digits[0] - 1), 10 ** digits[1] - 1
    a, b = rng.randint(low, high), rng.randint(low, high)
    return max(a, b), min(a, b)


def _add(rng):
    a, b = _pair(rng)
    return rng.choice((f"What is {a} + {b}?", f"Add {a} and {b}."))


def _sub(rng):
    a, b = _pair(rng)
    return rng.choice((f"What is {a} - {b}?", f"Subtract {b} from {a}."))


def _mul(rng):
    a, b = rng.randint(100, 9999), rng.randint(2, 9)
    return rng.choice((f"What is {a} * {b}?", f"Multiply {a} by {b}."))


def _word(rng):
    (a, b), item = rng.sample(NAMES, 2), rng.choice(ITEMS)
    n, more, less = rng.randint(10, 60), rng.randint(5, 40), rng.randint(1, 10)
    return rng.choice(
        (
            f"{a} has {n} {item}, buys {more} more and then loses {less}. "
            f"How many {item} does {a} have?",
            f"{a} has {n} {item}. {b} gives {a} {more} more. "
            f"How many {item} does {a} have now?",
        )
    )


def _sort(rng):
    numbers = ", ".join(map(str, rng.sample(range(10, 100), 5)))
    return f"Sort in ascending order: {numbers}"


def _largest(rng):
    numbers = ", ".join(map(str, rng.sample(range(10, 1000), 5)))
    return f"What is the largest of these numbers: {numbers}?"


def _compare(rng):
    a, b = rng.sample(range(1000, 100000), 2)
    return f"Which number is larger, {a} or {b}?"


def _day(rng):
    day, days = rng.choice(DAYS), rng.randint(3, 60)
    return f"Today is {day}. What day will it be in {days} days?"


def _order(rng):
    a, b, c, d = rng.sample(NAMES, 4)
    facts = [f"{a} is taller than {b}.", f"{b} is taller than {c}."]
    facts.append(f"{c} is taller than {d}.")
    rng.shuffle(facts)
    return f"{' '.join(facts)} Who is the tallest?"


def _count(rng):
    word = rng.choice(WORDS)
    return (
        f"How many times does the letter {rng.choice(word)} appear in the word {word}?"
    )


# For models of general text, by how much of the answer repeats the prompt.

_PASSAGE = (
    "The lighthouse on the northern cape was built in 1874 from grey granite that was "
    "brought by boat from the quarry across the bay. Its lamp first burned rapeseed "
    "oil, then paraffin, and since 1926 it has been electric. Three keepers and their "
    "families lived there until the light was automated in 1988. Today the building "
    "is a small museum, and its old lens, as tall as a person, turns slowly in the "
    "hall where visitors buy their tickets."
)

_CODE = '''def moving_average(values, width):
    """Averages of every window of the given width."""
    if width < 1:
        raise ValueError("width must be positive")
    total = sum(values[:width])
    averages = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        averages.append(total / width)
    return averages'''

TEXT = {
    "copy": (
        f"Repeat the following text exactly, word for word.\n\n{_PASSAGE}",
        f"Write this Python code again without any change.\n\n{_CODE}",
    ),
    "code": (
        f"Rename the argument width to size in this code.\n\n{_CODE}",
        f"Add type annotations to this function.\n\n{_CODE}",
    ),
    "summarise": (
        f"Summarise this text in three sentences.\n\n{_PASSAGE}",
        f"List the dates in this text and what happened then.\n\n{_PASSAGE}",
    ),
    "chat": (
        "Give me three tips for a good night's sleep.",
        "Explain in a few sentences why the sky is blue.",
    ),
}
