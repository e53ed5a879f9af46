"""Shadow traffic as labels: which lines count, and with which signals."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.bench.calibrate.shadows import read_shadows
from paceline.gateway.settings.calibration import Side


def test_all_chats_have_the_same_signals(tmp_path: Path) -> None:
    """A caller may ask for log-probabilities of its prompt, and engines tell none of long ones."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = {"choices": [{"message": {"content": "yes"}}]}
    with_prompt = answer | {"prompt_logprobs": [None, {"5": {"logprob": -1.0}}]}
    lines = [["1", "2", chat, small, answer] for small in (answer, with_prompt)]
    path = tmp_path / "kept.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    sides = Side("small", "1"), Side("large", "2")
    rows, left_out = read_shadows(path, *sides)
    assert [row.said.prompt_logprob for row in rows] == [None, None] and not left_out
    (row,), left_out = read_shadows(path, *sides, perplexity=True)
    assert row.said.prompt_logprob == -1.0 and left_out == 1
    assert len(rows[0].features("cascade", 2).dense) == len(row.features("cascade", 2).dense) - 1
