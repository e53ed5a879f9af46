"""Asking of both models, and a file of their answers.

Each answer is written as it comes, so that a run that was interrupted, or whose checkers failed,
asks nothing twice.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from paceline.bench.calibrate.labels import Label
from paceline.errors import ConfigError
from paceline.files import private_opener
from paceline.gateway.cascade.prompt import read_prompt
from paceline.gateway.cascade.signals import embedding_of, request_of_embedding, sample_fields

__all__ = [
    "Answers", "AskError", "Source", "ask", "ask_all", "ask_embedding", "ask_samples",
]  # fmt: skip

# seconds for one answer
_TIMEOUT: Final = 600.0
# answers under way at one model
_AT_ONCE: Final = 8
_TOP: Final = 5


class AskError(Exception):
    """A server gave no answer."""


class Source(msgspec.Struct, frozen=True):
    """Server with OpenAI's API, and a model there."""

    url: str
    model: str
    key: str = ""

    def __repr__(self) -> str:
        return f"Source({self.url!r}, {self.model!r})"

    def fetch(self, path: str, body: Mapping[str, Any] | None, timeout: float = _TIMEOUT) -> Any:
        """Return what the server says in JSON. Raises AskError."""
        base = self.url.rstrip("/")
        url = f"{base.removesuffix('/v1')}/v1{path}"
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return msgspec.json.decode(response.read())
        except urllib.error.HTTPError as error:
            told = error.read(2000).decode("utf-8", "replace")
            raise AskError(f"{url} answers {error.code}: {told[:300]}") from None
        except (OSError, http.client.HTTPException) as error:
            raise AskError(f"{url} does not answer: {error}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise AskError(f"{url} does not answer in JSON: {error}") from None

    def entry(self) -> dict[str, Any]:
        """Return what the server lists of the model. Raises AskError."""
        listed = self.fetch("/models", None)
        entries = listed.get("data") if isinstance(listed, dict) else None
        entries = [each for each in entries if isinstance(each, dict)] if entries else []
        found = [each for each in entries if each.get("id") == self.model]
        if not found:
            names = ", ".join(str(each.get("id")) for each in entries[:10]) or "none"
            raise AskError(f"{self.url} has no model {self.model!r}; it lists {names}")
        return dict(found[0])


def ask(
    source: Source, label: Label, *, logprobs: bool, perplexity: bool = False
) -> dict[str, Any]:
    """Return a whole answer, with ``perplexity`` also log-probabilities of the prompt. Raises
    AskError."""
    body = label.body(source.model)
    if logprobs:
        try:
            more = {"logprobs": True, "top_logprobs": _TOP}
            more |= {"prompt_logprobs": 0} if perplexity else {}
            return _checked(source, source.fetch("/chat/completions", {**body, **more}))
        except AskError as error:
            if "logprob" not in str(error):
                raise
    return _checked(source, source.fetch("/chat/completions", body))


def ask_samples(source: Source, label: Label, samples: int) -> dict[str, Any]:
    """Return further answers. Raises AskError."""
    body = label.body(source.model) | sample_fields(samples)
    return _checked(source, source.fetch("/chat/completions", body))


def ask_embedding(source: Source, label: Label) -> dict[str, Any]:
    """Return the vector of a label's prompt. Raises AskError."""
    prompt = read_prompt(label.as_read(), "")
    text = "" if prompt is None else prompt.text
    found = source.fetch("/embeddings", request_of_embedding(text, source.model))
    if not embedding_of(msgspec.json.encode(found)):
        raise AskError(f"{source.url} answers without an embedding")
    return dict(found)


def _checked(source: Source, answer: Any) -> dict[str, Any]:
    match answer:
        case {"choices": [{"message": dict()}, *_]}:
            return dict(answer)
    raise AskError(f"{source.url} answers without choices")


class Answers:
    """File of answers, by side ("small" or "large") and label; lines that cannot be read, such as
    the last one of a run that was killed, are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError as error:
            raise ConfigError(f"answers {path} cannot be read: {error.strerror}") from None
        for line in lines:
            try:
                side, digest, answer = msgspec.json.decode(
                    line, type=tuple[str, str, dict[str, Any]]
                )
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            self._found[side, digest] = answer

    def find(self, side: str, label: Label) -> dict[str, Any] | None:
        return self._found.get((side, label.digest))

    def add(self, side: str, label: Label, answer: dict[str, Any]) -> None:
        self._found[side, label.digest] = answer
        with open(self._path, "ab", opener=private_opener) as file:
            # a line of its own also behind half a line
            file.write(b"\n" + msgspec.json.encode((side, label.digest, answer)))


def ask_all(
    side: str,
    labels: Sequence[Label],
    answers: Answers,
    answer: Callable[[Label], dict[str, Any]],
    told: Callable[[int, int], None] = lambda done, count: None,
) -> list[str]:
    """Have each label answered that has no answer yet; return what went wrong, a sentence each.

    Args:
        told: is called with the answers that are there, and those that are wanted.
    """
    missing = {label.digest: label for label in labels if answers.find(side, label) is None}
    failed: list[str] = []

    def one(label: Label) -> tuple[Label, dict[str, Any] | None, str]:
        try:
            return label, answer(label), ""
        except AskError as error:
            return label, None, str(error)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found: Iterable[tuple[Label, dict[str, Any] | None, str]] = pool.map(one, missing.values())
        for number, (label, answered, why) in enumerate(found, 1):
            if answered is None:
                failed.append(why)
            else:
                answers.add(side, label, answered)
            told(number, len(missing))
    return failed
