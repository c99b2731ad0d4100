"""Prompt sets: some are easy to draft for, some are not."""

from __future__ import annotations

import random
from collections.abc import Callable

PASSAGE = (
    "The ferry across the Tarn fjord has run since 1891. The first boat carried "
    "forty people and two carts, and burned a tonne of coal a day. It was replaced in "
    "1934 by a diesel boat with room for twelve cars, and in 2019 by one that charges "
    "its batteries at the pier while the passengers board. A bridge was planned three "
    "times and never built, so the ferry is still the only way to the islands in "
    "winter."
)

CODE = '''def merge(left, right):
    """Merges two sorted lists into one sorted list."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]'''

SETS = {
    "chat": (
        "What should I pack for a weekend in the mountains?",
        "Explain in a few sentences how a refrigerator works.",
        "Write a short, friendly note that declines an invitation.",
    ),
    "code": (
        "Write a Python function that checks whether a string is a palindrome.",
        f"Add type annotations to this function.\n\n{CODE}",
        "Write a SQL query for the three customers with the most orders in 2024.",
    ),
    "reasoning": (
        "What is 3757 + 4868?",
        "Mia has 34 shells, buys 17 more and then loses 6. How many does she have?",
        "Today is Tuesday. What day will it be in 24 days?",
        "What is the largest of these numbers: 412, 87, 509, 498, 66?",
    ),
    "copy": (
        f"Repeat the following text exactly, word for word.\n\n{PASSAGE}",
        f"Summarise this text in two sentences.\n\n{PASSAGE}",
        f"Rename the variable merged to result in this code.\n\n{CODE}",
    ),
}
LONG = "long"  # the set that is made to measure
NAMES = (*SETS, LONG)

_THINGS = "bell clock map lantern kettle violin compass ladder mirror saddle".split()
_PLACES = "Harwick Ostby Lund Marrow Kelso Brenn Tarby Solva".split()
_BUYERS = "Ines Jonas Petra Ruben Selma Tomas Ulla Viktor".split()


def long_context(encode: Callable[[str], list[int]], tokens: int, seed: int = 0) -> str:
    """A question behind a list of sales, about ``tokens`` tokens in all."""
    rng = random.Random(seed)

    def sale(i):
        thing, place, buyer = map(rng.choice, (_THINGS, _PLACES, _BUYERS))
        return f"{i}. {buyer} bought the {thing} of {place} for {rng.randint(5, 900)}."

    sample = "\n".join(sale(i) for i in range(100, 120))
    count = max(1, 20 * tokens // max(len(encode(sample)), 1))
    lines = "\n".join(sale(i) for i in range(1, count + 1))
    asked = (count + 1) // 2
    return f"These are the sales of the year.\n\n{lines}\n\nRepeat sale number {asked}."
