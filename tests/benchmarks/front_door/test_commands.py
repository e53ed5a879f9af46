"""The list of command lines is the one that the benchmark counts with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.front_door.commands import commands


def test_the_list_has_twenty_of_each_and_half_of_them_have_three_flags() -> None:
    found = commands()
    assert Counter(each.server for each in found) == {"vllm": 20, "llama.cpp": 20, "ollama": 20}
    assert sum(each.num_flags >= 3 for each in found) >= 30
    assert len({(each.words, *each.environment.items()) for each in found}) == 60


def test_a_command_becomes_arguments(tmp_path: Path) -> None:
    path = tmp_path / "commands.txt"
    path.write_text(
        "[a]\n# https://x.org/1\npython -m some.server --model=MODEL --port 1\n"
        "# https://x.org/2\nA_B='c d' ./tool run MODEL 'two words'\n",
        encoding="utf-8",
    )
    first, second = commands(path)
    assert first.arguments("m.gguf", "") == ("serve", "--model=m.gguf", "--port", "1")
    assert second.environment == {"A_B": "c d"}
    assert second.arguments("m.gguf", "") == ("run", "m.gguf", "two words")
    path.write_text("[a]\n# https://x.org/1\ntool -a\ntool -b\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no source stands before 'tool -b'"):
        commands(path)
