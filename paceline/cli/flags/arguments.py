"""A parser with one-line errors and --help by topic, and the types of numbers and sizes."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from paceline.errors import ConfigError
from paceline.renamed import is_gone, is_now

__all__ = [
    "Parser",
    "bounded_float",
    "bounded_int",
    "byte_count",
    "first_help",
    "json_object",
    "memory_size",
    "parts_of",
    "shown_bytes",
    "size_list",
    "size_with_unit",
    "topic_help",
    "weights_by_name",
]


def first_help(parser: argparse.ArgumentParser, names: Sequence[str]) -> str:
    """Return what --help alone shows: the flags of these names, and how to see the others."""
    formatter = parser._get_formatter()
    formatter.add_usage("%(prog)s [MODEL] [flags]", (), ())
    formatter.add_text(parser.description)
    by_name = parser._option_string_actions
    formatter.start_section("flags to begin with")
    formatter.add_arguments([by_name[name] for name in names])
    formatter.end_section()
    groups = ", ".join(_word(group) for group in _groups(parser))
    formatter.add_text(
        f"All flags: {parser.prog} --help=all. One group: --help=GROUP, of {groups}. Flags with a "
        "word in them: --help=WORD. Flags of vLLM and llama-server, and Ollama's variables, are "
        "taken too: docs/use/flags.md."
    )
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def topic_help(parser: argparse.ArgumentParser, topic: str) -> str:
    """Return the help of all flags, of a group, or of the flags that have ``topic`` in their name
    or else in their help."""
    if topic in ("", "all"):
        return parser.format_help()
    word = topic.lower().lstrip("-").replace("_", "-")
    formatter = parser._get_formatter()
    for group in _groups(parser):
        if word in _word(group):
            _add(formatter, group, group._group_actions)
    if not formatter.format_help():
        for found in (_named, _explained):
            formatter = parser._get_formatter()
            for group in _groups(parser):
                _add(formatter, group, [a for a in group._group_actions if found(a, word)])
            if formatter.format_help():
                break
    return formatter.format_help() or f"{parser.prog}: no flag and no group has {topic!r} in it\n"


def _groups(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    # those of argparse come first: positional arguments, and --help itself
    return [group for group in parser._action_groups[2:] if group._group_actions]


def _word(group: argparse._ArgumentGroup) -> str:
    """Return the word that names a group after --help=."""
    title = (group.title or "").lower().partition(" (")[0]
    return title.replace(" ", "-")


def _named(action: argparse.Action, word: str) -> bool:
    return any(word in name for name in action.option_strings)


def _explained(action: argparse.Action, word: str) -> bool:
    return word in (action.help or "").lower()


def _add(
    formatter: argparse.HelpFormatter,
    group: argparse._ArgumentGroup,
    actions: Iterable[argparse.Action],
) -> None:
    if actions := list(actions):
        formatter.start_section(group.title)
        formatter.add_arguments(actions)
        formatter.end_section()


_T = TypeVar("_T")
_UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


class _HelpFormatter(argparse.HelpFormatter):
    """Formatter that keeps descriptions and epilogs as written where they fit in the terminal. A
    wider paragraph is wrapped; where one of several indented lines (examples) is wider, the text
    after the first wide gap of each moves to the next line."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in _fitting(text, width - len(indent)))

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        parse = getattr(action.type, "__qualname__", "").partition(".")[0]
        return _METAVARS.get(parse) or super()._get_default_metavar_for_optional(action)


# by the parser of a flag's value: what its help calls the value, where it says nothing else
_METAVARS: Final = {
    "Path": "FILE", "bounded_int": "N", "byte_count": "SIZE", "int": "N", "json_object": "JSON",
    "memory_size": "SIZE", "rate": "RATE", "size_with_unit": "SIZE",
}  # fmt: skip


def _fitting(text: str, width: int) -> Iterator[str]:
    for is_prose, part in groupby(text.splitlines(), key=lambda line: line[:1] not in ("", " ")):
        lines = list(part)
        if all(len(line) <= width for line in lines):
            yield from lines
        elif is_prose:
            yield from textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
        else:
            for line in lines:
                example = re.fullmatch(r"( +\S.*?)  +(\S.*)", line)
                if example is None:
                    yield line
                else:
                    yield example[1]
                    yield from textwrap.wrap(
                        example[2], width, initial_indent=" " * 6, subsequent_indent=" " * 6
                    )


# makes arguments, and notes on what was replaced, from arguments and the flags that exist here
Rewrite: TypeAlias = Callable[[list[str], Collection[str]], tuple[list[str], tuple[object, ...]]]


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line and name the nearest flag."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        # a prefix that is unique today may be ambiguous in a later version, and would break scripts
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        # replaces flags of other servers before any is read, and says what it did; see
        # ``elsewhere``
        self.rewrite: Rewrite | None = None
        # flags that --help alone shows, in order; (): all
        self.shown_first: tuple[str, ...] = ()
        # whether flags may stand between positional arguments
        self.intermixed = False

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse as argparse does, but report unknown arguments as errors of the named command,
        which knows its flags."""
        known, left = self.parse_known_args(args, namespace)
        if left:
            command = self._command(getattr(known, "command", ""))
            # values may be secrets, such as those of a flag that is spelled wrong
            flags = [word.partition("=")[0] for word in left if word.startswith("--")]
            command.error(f"unrecognized arguments: {' '.join(flags or left)}")
        return known

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        args = list(sys.argv[1:] if args is None else args)
        if self.shown_first and (about := next((a for a in args if a.startswith("--help=")), "")):
            print(topic_help(self, about.partition("=")[2]), end="")
            self.exit()
        notes: tuple[object, ...] = ()
        if self.rewrite is not None:
            try:
                args, notes = self.rewrite(args, self._option_string_actions)
            except (argparse.ArgumentTypeError, ConfigError) as error:
                self.error(str(error))
        if self.intermixed:
            # it calls this method for each of its two passes
            self.intermixed, rewrite, self.rewrite = False, self.rewrite, None
            try:
                known, left = self.parse_known_intermixed_args(args, namespace)
            finally:
                self.intermixed, self.rewrite = True, rewrite
        else:
            known, left = super().parse_known_args(args, namespace)
        if self.rewrite is not None:
            known.elsewhere = notes
        return known, left

    def print_help(self, file: Any = None) -> None:
        """Print what --help alone shows."""
        text = first_help(self, self.shown_first) if self.shown_first else self.format_help()
        self._print_message(text, file or sys.stdout)

    def _command(self, name: str) -> Parser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(name)
                if isinstance(chosen, Parser):
                    return chosen
        return self

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message += _nearest(unknown[1], self._option_string_actions)
        choice = re.match(r"argument .*: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            message += _nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        print(f"{self.prog}: {message} - see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


# flags of other servers -> flags to use here
_ELSEWHERE: Final = {
    "--api-key": "PACELINE_API_KEY in the environment, or --api-key-file",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--download-dir": "PACELINE_CACHE in the environment",
    "--enable-auto-tool-choice": "not needed: tool calls are always enabled",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--kv-cache-memory SIZE",
    "--model-path": "the first argument, or --model",
    "--n-gpu-layers": "--device cuda",
    "--parallel": "--max-num-seqs",
    "--quantization": "--dtype int8 or q4",
    "--trust-remote-code": "not supported: code from a checkpoint is never run",
}
_SYNONYMS: Final = {
    "edf": "deadline", "fifo": "fcfs", "lifo": "priority", "shortest": "sjf", "spf": "sjf",
    "vtc": "fair", "wfq": "fair", "fp32": "float32", "bf16": "bfloat16", "half": "bfloat16",
    "float16": "bfloat16", "fp16": "bfloat16", "gpu": "cuda",
}  # fmt: skip


# a name less alike than this was not meant: --seed and --screen-head are 0.56 alike, --tokenizer
# and --block-size 0.64, --max-model-length and --max-model-len 0.90
_ALIKE: Final = 0.75


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    if gone := is_gone([word]):
        return f" ({gone})"
    if word in _ELSEWHERE:
        return f" (in Paceline: {_ELSEWHERE[word]})"
    if renamed := is_now([word], known):
        return f" ({renamed})"
    if _SYNONYMS.get(word) in known:
        return f" (did you mean {_SYNONYMS[word]}?)"
    begun = [name for name in known if len(word) > 5 and name.startswith(word)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)
    return f" (did you mean {near[0]}?)" if near else ""


def bounded_int(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers in ``[low, high]``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {value}")
        return value

    return parse


def bounded_float(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a parser of finite numbers in ``[low, high]``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (math.isfinite(value) and low <= value <= high):
            wanted = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            if high == math.inf and not math.isfinite(value):
                wanted = f"finite and {wanted}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
        return value

    return parse


def parts_of(text: str, parse: Callable[[str], _T], flag: str) -> list[_T]:
    """Parse what stands between commas, where a flag's type cannot. Raises ConfigError."""
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{flag}: {error}") from None


def weights_by_name(text: str) -> dict[str, float]:
    """Parse ``gold=3,batch=0.5``: finite numbers above 0 by name. An empty text: none."""
    weights: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        name, equals, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not (equals and name and math.isfinite(weight) and weight > 0.0):
            raise argparse.ArgumentTypeError(
                f"{entry!r} is not NAME=WEIGHT with a weight above 0; example: gold=3,batch=0.5"
            )
        if name in weights:
            raise argparse.ArgumentTypeError(f"{name!r} has two weights")
        weights[name] = weight
    return weights


def json_object(text: str) -> dict[str, Any]:
    """Parse an object in JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def size_list(text: str) -> tuple[int, ...]:
    """Parse ``256,512``: whole numbers from 1."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes; example: 256,512")
    return tuple(int(part) for part in parts)


def byte_count(text: str) -> int:
    """Parse ``2GiB``, ``512 MB`` or a plain number of GiB, as vLLM's sizes of memory are."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper() or "GIB") if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; examples: 2GiB, 512MiB, 65536B; for memory also 4 (4GiB)"
        )
    count = int(float(match[1]) * unit)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, got {text}")
    return count


def memory_size(text: str) -> int:
    """Parse a size of this machine's memory; a plain number above it was meant in bytes."""
    count, plain = byte_count(text), text.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not plain[-1].isalpha() and count > memory:
        raise argparse.ArgumentTypeError(
            f"a number without a unit is in GiB, and {plain} GiB is more than the "
            f"{memory / 2**30:.1f} GiB of this machine; write {plain}B for bytes or {plain}GiB"
        )
    return count


def size_with_unit(text: str) -> int:
    """Parse ``8KiB`` or ``512 MB``; a plain number is refused, as it may mean bytes or GiB."""
    count, plain = byte_count(text), text.strip()
    if not plain[-1].isalpha():
        raise argparse.ArgumentTypeError(
            f"give a unit, for example {plain}KiB, {plain}MiB or {plain}B for bytes; a plain "
            "number would be in GiB, as in --swap-space"
        )
    return count


def shown_bytes(count: int) -> str:
    """Return a size as ``byte_count`` reads it, in the largest unit that is exact."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _UNITS[unit.upper()] == 0:
            return f"{count // _UNITS[unit.upper()]}{unit}"
    return f"{count}B"
