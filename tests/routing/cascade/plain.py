"""Features and scores of version 2 of the calibration, as plain as they can be written: calibration
files hold weights for exactly these values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.routing.cascade import NUM_BUCKETS, Forest, Token


def shown(text: str) -> str:
    return text if len(text) <= 512 else f"{text[:128]} {text[-384:]}"


def ngrams(text: str) -> NDArray[np.float32]:
    data = shown(text).lower().encode("utf-8", "replace")
    hashes = []
    for length in (3, 4, 5):
        for at in range(len(data) - length + 1):
            hashed = length
            for letter in data[at : at + length]:
                hashed = (hashed * 0x01000193 + letter) % (1 << 32)
            hashes.append(hashed)
    words = re.findall(rb"[a-z0-9]+|[^\sa-z0-9]", data)
    pairs = [one + b" " + other for one, other in pairwise(words)]
    counts = np.zeros(NUM_BUCKETS)
    for hashed in (*hashes, *map(crc32, words), *map(crc32, pairs)):
        spread = hashed * 0x9E3779B1 % (1 << 32)
        counts[(spread >> 19) % NUM_BUCKETS] += 1.0 if spread >> 31 else -1.0
    norm = math.sqrt(float((counts**2).sum()))
    return (counts / (norm or 1.0)).astype(np.float32)


def form(text: str, turns: int, tools: int, wants_json: bool) -> list[float]:
    seen = shown(text)
    data = seen.encode("utf-8", "replace")
    kinds = (b"0123456789", b"-+*/=<>^%", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", bytes(range(128, 256)))
    return [
        math.log1p(len(text)),
        math.log1p(seen.count("\n")),
        *(sum(byte in kind for byte in data) / max(1, len(data)) for kind in kinds),
        min(3, seen.count("?")),
        any(part in seen for part in ("```", "def ", "return ", "();", "{\n")),
        "json" in seen or "JSON" in seen,
        math.log1p(turns),
        math.log1p(tools),
        wants_json,
    ]


def answer_form(answer: str, prompt: str) -> list[float]:
    answer, prompt = answer[:2000], prompt[-2000:]
    words, asked = re.findall(r"\w+", answer.lower()), re.findall(r"\w+", prompt.lower())
    return [
        math.log1p(len(answer)),
        math.log1p(len(words)),
        min(10.0, len(words) / max(1, len(asked))),
        sum(word in asked for word in words) / max(1, len(words)),
        sum(letter.isdigit() for letter in answer) / max(1, len(answer)),
        sum(letter.isupper() for letter in answer) / max(1, len(answer)),
        answer[:1].isdigit(),
        answer.rstrip()[-1:] in (".", "!", "?"),
        "\n" in answer,
        "{" in answer,
        bool(words) and f" {' '.join(words)} " in f" {' '.join(asked)} ",
    ]


def confidence(tokens: Sequence[Token], first: int) -> list[float]:
    """By the arithmetic of NumPy, whose sums are in pairs."""
    widest = max(2, *(len(token.top) for token in tokens))
    tops = np.array(
        [[*token.top, *[-math.inf] * (widest - len(token.top))] for token in tokens], np.float64
    )
    tops.sort(axis=1)
    told, shares = np.maximum(tops, -20.0), np.exp(tops)
    rest = 1.0 - shares.sum(axis=1)
    rest[rest < 1e-9] = 1.0
    margins = told[:, -1] - told[:, -2]
    margins[tops[:, -2] == -math.inf] = 20.0
    rest[tops[:, -1] == -math.inf] = 1.0
    entropies = -(shares * told).sum(axis=1) - rest * np.log(rest)
    logprobs = np.array([min(0.0, max(-20.0, token.logprob)) for token in tokens])
    found: list[float] = []
    for end in (first, len(tokens)):
        run = np.array((logprobs[:end], margins[:end], entropies[:end]))
        means = run.sum(axis=1) / run.shape[1]
        for row, mean in zip(np.sort(run[:2], axis=1), means, strict=False):
            found += [row[0], quantile(row, 0.1), quantile(row, 0.25), mean]
        found.append(means[2])
    return [*found, math.log(len(tokens))]


def quantile(ranked: NDArray[np.float64], share: float) -> float:
    place = (len(ranked) - 1) * share
    below, value = int(place), float(ranked[int(place)])
    if place == below:
        return value
    return value + (place - below) * float(ranked[below + 1] - ranked[below])


def is_loop(text: str) -> bool:
    text = text.rstrip()
    return any(
        text.endswith(text[-unit:] * max(4, -(-48 // unit)))
        for unit in range(1, min(200, len(text) // 4) + 1)
    )


def leaves(forest: Forest, values: NDArray[np.float32]) -> float:
    """The score of a forest whose trees look at these values, node by node."""
    shares = []
    for at in forest.roots:
        for _ in range(12):
            node = forest.nodes[at]
            at = node["right" if values[node["value"]] > node["threshold"] else "left"]
        shares.append(forest.nodes[at]["share"])
    return float(np.array(shares, np.float32).mean())
