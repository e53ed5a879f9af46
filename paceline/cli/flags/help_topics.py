"""Parts of a long --help: the flags that people use first, one group, or what a word finds."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

__all__ = ["first_help", "topic_help"]


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
