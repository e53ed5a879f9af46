"""Tasks with exact checkers, made from a seed: what a small model can do in part.

Every kind makes prompts of its own difficulty, and a pattern that a good answer's text matches.
Kinds of HELD_OUT are never fitted or calibrated on.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Final

from paceline.bench.calibrate.labels import Check, Label

__all__ = ["HELD_OUT", "KINDS", "make_labels", "truth"]

HELD_OUT: Final = ("opposites", "counting", "last word")
_MAX_TOKENS: Final = 32
_NAMES: Final = ("Ann", "Bob", "Carla", "David", "Emma", "Frank", "Greta", "Hugo", "Ivy", "Jack")
_WORDS: Final = (
    "river", "stone", "apple", "cloud", "tiger", "window", "garden", "silver", "bridge", "candle",
    "forest", "music", "pencil", "rocket", "sugar", "yellow", "winter", "castle", "orange", "lamp",
)  # fmt: skip
_THINGS: Final = {
    "animal": (
        "dog",
        "horse",
        "eagle",
        "salmon",
        "spider",
        "otter",
        "beetle",
        "lizard",
        "camel",
        "goose",
    ),
    "fruit": (
        "apple",
        "banana",
        "cherry",
        "mango",
        "papaya",
        "lychee",
        "quince",
        "grape",
        "peach",
        "plum",
    ),
    "color": (
        "red",
        "blue",
        "green",
        "crimson",
        "teal",
        "mauve",
        "ochre",
        "violet",
        "pink",
        "beige",
    ),
    "vehicle": (
        "car",
        "bus",
        "bicycle",
        "tram",
        "ferry",
        "sledge",
        "rickshaw",
        "truck",
        "scooter",
        "barge",
    ),
}
_CAPITALS: Final = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Germany": "Berlin", "Poland": "Warsaw", "Norway": "Oslo", "Portugal": "Lisbon",
    "Greece": "Athens", "Russia": "Moscow", "China": "Beijing", "Austria": "Vienna",
    "Hungary": "Budapest", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana",
    "Finland": "Helsinki", "Ireland": "Dublin", "Thailand": "Bangkok", "Chile": "Santiago",
    "Iran": "Tehran", "Iraq": "Baghdad", "Mongolia": "Ulaanbaatar", "Bhutan": "Thimphu",
    "Latvia": "Riga", "Estonia": "Tallinn", "Malta": "Valletta", "Ghana": "Accra",
    "Uruguay": "Montevideo", "Nepal": "Kathmandu", "Jordan": "Amman", "Qatar": "Doha",
    "Senegal": "Dakar", "Slovenia": "Ljubljana", "Iceland": "Reykjavik",
}  # fmt: skip
_OPPOSITES: Final = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "open": "closed",
    "happy": "sad", "early": "late", "rich": "poor", "hard": "soft", "full": "empty",
    "wet": "dry", "old": "young", "high": "low", "loud": "quiet", "thick": "thin",
    "brave": "cowardly", "sweet": "sour", "rough": "smooth", "win": "lose", "buy": "sell",
    "arrive": "depart", "ancient": "modern", "expand": "contract", "victory": "defeat",
    "always": "never", "push": "pull", "north": "south", "light": "dark", "true": "false",
    "first": "last", "left": "right", "love": "hate", "begin": "end", "clean": "dirty",
    "strong": "weak",
}  # fmt: skip

# a prompt, and its answer
_Made = tuple[str, str]


def _sums(draw: random.Random) -> _Made:
    most = draw.choice((9, 9, 30, 99))
    a, b = draw.randint(1, most), draw.randint(1, most)
    return f"What is {a} + {b}? Answer with the number only.", str(a + b)


def _differences(draw: random.Random) -> _Made:
    most = draw.choice((9, 20, 99))
    a, b = sorted((draw.randint(1, most), draw.randint(1, most)), reverse=True)
    return f"Compute {a} - {b}. Give only the result.", str(a - b)


def _products(draw: random.Random) -> _Made:
    a, b = draw.randint(2, draw.choice((9, 12, 30))), draw.randint(2, 9)
    return f"Multiply {a} by {b}. Reply with the product only.", str(a * b)


def _copying(draw: random.Random) -> _Made:
    text = " ".join(draw.sample(_WORDS, draw.choice((2, 4, 6, 9))))
    return f"Repeat this text exactly, and say nothing else: {text}", text


def _extraction(draw: random.Random) -> _Made:
    names = draw.sample(_NAMES, draw.choice((2, 3, 5)))
    rows = {name: f"555-{draw.randint(1000, 9999)}" for name in names}
    wanted = draw.choice(names)
    told = " ".join(f"{name}'s phone number is {number}." for name, number in rows.items())
    return f"{told} What is {wanted}'s phone number?", rows[wanted]


def _categories(draw: random.Random) -> _Made:
    kind = draw.choice(tuple(_THINGS))
    thing = draw.choice(_THINGS[kind])
    return f"Is {thing!r} an animal, a fruit, a color or a vehicle? Answer with one word.", kind


def _json(draw: random.Random) -> _Made:
    name, age = draw.choice(_NAMES), draw.randint(18, 80)
    city = draw.choice(tuple(_CAPITALS.values()))
    fields = {"name": name, "age": age}
    told = f"{name} is {age} years old"
    if draw.random() < 0.5:
        fields["city"] = city
        told += f" and lives in {city}"
    keys = ", ".join(fields)
    return f"{told}. Write this as a JSON object with the keys {keys}. Only JSON.", json.dumps(
        fields
    )


def _sorting(draw: random.Random) -> _Made:
    numbers = draw.sample(range(1, draw.choice((10, 100))), draw.choice((3, 4, 6)))
    asked = ", ".join(map(str, numbers))
    told = ", ".join(map(str, sorted(numbers)))
    return f"Sort these numbers from smallest to largest: {asked}. Only the numbers.", told


def _comparisons(draw: random.Random) -> _Made:
    a, b = draw.sample(range(1, draw.choice((10, 100, 1000))), 2)
    return f"Which number is larger, {a} or {b}? Answer with the number.", str(max(a, b))


def _code(draw: random.Random) -> _Made:
    word, number = draw.choice(_WORDS), draw.randint(2, 9)
    code, result = draw.choice(
        (
            (f"print({word!r}.upper())", word.upper()),
            (f"print(len({word!r}))", str(len(word))),
            (f"print({number} * {number})", str(number * number)),
            (f"print([{number}, {number + 1}][0])", str(number)),
            (f"print({word!r})", word),
        )
    )
    return f"What does this Python program print?\n{code}\nOnly the output.", result


def _capitals(draw: random.Random) -> _Made:
    country = draw.choice(tuple(_CAPITALS))
    return f"What is the capital of {country}?", _CAPITALS[country]


def _parity(draw: random.Random) -> _Made:
    number = draw.randint(1, draw.choice((10, 100, 1000)))
    return f"Is {number} even or odd? Answer with one word.", ("even", "odd")[number % 2]


def _first_letters(draw: random.Random) -> _Made:
    word = draw.choice((*_WORDS, *_OPPOSITES))
    return f"What is the first letter of the word {word!r}? Only the letter.", word[0]


def _reading(draw: random.Random) -> _Made:
    name, other = draw.sample(_NAMES, 2)
    thing, one, two = draw.choice(_WORDS), *draw.sample(("red", "blue", "green", "white"), 2)
    asked = draw.choice(((name, one), (other, two)))
    return (
        f"{name} has a {one} {thing}, and {other} has a {two} {thing}. What color is "
        f"{asked[0]}'s {thing}?",
        asked[1],
    )


def _opposites(draw: random.Random) -> _Made:
    word = draw.choice(tuple(_OPPOSITES))
    return f"Give the opposite of {word!r} in one word.", _OPPOSITES[word]


def _counting(draw: random.Random) -> _Made:
    words = draw.choices(_WORDS, k=draw.randint(2, 8))
    return f"How many words are in this list: {', '.join(words)}?", str(len(words))


def _last_word(draw: random.Random) -> _Made:
    words = draw.sample(_WORDS, draw.choice((3, 5, 7)))
    return f"Here are some words: {' '.join(words)}. Write down the last one only.", words[-1]


KINDS: Final[dict[str, Callable[[random.Random], _Made]]] = {
    "sums": _sums, "differences": _differences, "products": _products, "copying": _copying,
    "extraction": _extraction, "categories": _categories, "json": _json, "sorting": _sorting,
    "comparisons": _comparisons, "code": _code, "capitals": _capitals, "parity": _parity,
    "first letters": _first_letters, "reading": _reading, "opposites": _opposites,
    "counting": _counting, "last word": _last_word,
}  # fmt: skip
# the answer to a question
TRUTH: Final[dict[str, str]] = {}


def _pattern(kind: str, answer: str) -> str:
    """Return what a good answer's text matches: the answer, as the only number or the only one of
    the possible words, with any words around it; lists and copies word for word."""
    quoted = re.escape(answer)
    if kind == "json":
        # in any layout, and in a code block or not
        parts = [
            rf'"{name}"\s*:\s*{re.escape(json.dumps(value))}'
            for name, value in json.loads(answer).items()
        ]
        fields = r"\s*,\s*".join(parts)
        return rf"\A\s*(?:```(?:json)?\s*)?\{{\s*{fields}\s*\}}\s*(?:```)?\s*\Z"
    if kind == "copying":
        return rf"(?i)\A\W*{quoted}\W*\Z"
    if kind == "sorting":
        numbers = r"[,\s]+".join(answer.split(", "))
        return rf"\A\D*{numbers}\D*\Z"
    if kind == "extraction":
        return rf"\A(?:(?!555-).)*{quoted}(?:(?!555-)[\s\S])*\Z"
    if answer.isdigit():
        # the last number, so that "7 + 5 = 12" is good
        return rf"(?<!\d){quoted}\D*\Z"
    if kind == "first letters":
        return rf"(?i)\A\W*(?:[\w\s]*\bis\W+)?{quoted}\W*\Z"
    others = {
        "categories": r"animal|fruit|color|vehicle", "parity": r"even|odd",
        "reading": r"red|blue|green|white",
    }.get(kind)  # fmt: skip
    if others is not None:
        rest = rf"(?:(?!\b(?:{others})\b)[\s\S])*"
        return rf"(?i)\A{rest}\b{quoted}\b{rest}\Z"
    return rf"(?i)\b{quoted}\b"


def make_labels(count: int, kinds: tuple[str, ...], seed: int) -> list[Label]:
    """Make ``count`` labels with different questions, of each kind as many. Each conversation
    begins with two questions of its kind, and their answers."""
    draw, found = random.Random(seed), dict[str, Label]()
    examples = {kind: _examples(kind) for kind in kinds}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        for _ in range(1000):
            prompt, answer = KINDS[kind](draw)
            if prompt not in found:
                break
        found[prompt] = Label(
            check=Check(regex=_pattern(kind, answer)),
            messages=[*examples[kind], {"role": "user", "content": prompt}],
            kind=kind,
            max_tokens=_MAX_TOKENS,
        )
        TRUTH[prompt] = answer
    return list(found.values())


def _examples(kind: str) -> list[dict[str, str]]:
    draw, told = random.Random(f"examples of {kind}"), []
    for _ in range(2):
        prompt, answer = KINDS[kind](draw)
        told.append({"role": "user", "content": prompt})
        told.append({"role": "assistant", "content": answer})
    return told


def truth(label: Label) -> str:
    """Return the good answer to a label."""
    return TRUTH[label.messages[-1]["content"]]
