"""Runs whose frames, and what they mean, are kept in ``tests/ui/vectors`` for readers in other
languages. ``python -m tests.timeline.vectors`` writes them again."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from paceline.backends.reference.null import expected_tokens
from paceline.core.request import Request
from paceline.core.slo import Slo
from paceline.engine.testing import ScriptedDrafter
from paceline.timeline.chrome import trace_of
from paceline.timeline.codec import Decoder
from paceline.timeline.events import NO_LANE, State
from paceline.timeline.model import Model, Seen, Step
from tests.driving import make_request
from tests.timeline.watching import Watched

FOLDER = Path(__file__).parents[1] / "ui" / "vectors"


def scenario() -> Watched:
    """Preemption, swap, forks, an expiry, an abort and targets that are given up."""
    watched = Watched(
        num_blocks=11, num_host_blocks=3, policy="deadline", max_num_seqs=4,
        max_num_batched_tokens=24, preemption="auto",
    )  # fmt: skip
    slo = Slo(slo_class="interactive", ttft=0.03, tpot=0.02)
    watched.add(make_request("a/0", 20, 12, arrival=99.99, slo=slo))
    watched.add(make_request("a/1", 20, 12, arrival=99.99, slo=slo, fork_of="a/0"))
    for turn in range(30):
        if turn % 3 == 0:
            watched.add(
                make_request(f"b{turn}/0", 6 + turn, 8, arrival=watched.now, slo=slo),
                make_request(f"c{turn}/0", 9, 10, arrival=watched.now, tenant="téam"),
            )
        if turn == 4:
            watched.add(make_request("d/0", 9, 9, arrival=watched.now, slo=Slo(queue_ttl=0.02)))
        if turn == 10:
            watched.abort("c9/0")
            watched.tap.door.hold("e/0", "interactive", "téam", 100.05)
            watched.tap.door.refuse("f/0", "standard", "", 100.1, "queue-full")
        watched.step()
    watched.run()
    return watched


def guessing(depth: int = 2) -> Watched:
    """Few requests whose next tokens are guessed, the third guess always wrong."""
    prompts = ((3, 5, 8, 13), (1, 1, 2), (60, 50, 40))

    def knowing(request: Request) -> ScriptedDrafter:
        prompt = request.asked.prompt_token_ids
        return ScriptedDrafter([*prompt, *expected_tokens(prompt, 200, 97)], 97, wrong=(2,))

    watched = Watched(
        depth=depth, vocab_size=97, drafter=knowing,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )  # fmt: skip
    watched.add(
        *(make_request(f"{n}/0", prompt, 24 + n, arrival=100.0) for n, prompt in enumerate(prompts))
    )
    watched.run()
    return watched


def meaning(data: bytes) -> dict[str, Any]:
    """What a reader must make of the frames."""
    columns: list[Any] = []
    ended: list[Seen] = []
    steps: list[Step] = []
    model = Model(steps.append, ended.append)
    for frame in Decoder().feed(data):
        step = model.step
        model.take(frame)
        if model.step != step:
            columns.append([model.step, *(_cell(model, number) for number in model.lanes)])
    return {
        "columns": columns,
        "ended": list(map(_seen, ended)),
        "steps": list(map(_step, steps)),
        "doubts": model.num_doubts,
        "held": model.held,
        "num_held": model.num_held,
        "refused": list(model.refused),
        "num_refused": model.num_refused,
        # the end of it, of which something is left out, and that is said
        "trace": trace_of(steps, ended, now=model.now, most=60),
    }


def _cell(model: Model, number: int) -> Any:
    if not number:
        return None
    seen = model.requests[number]
    return [number, int(seen.state), seen.computed]


def _step(step: Step) -> list[Any]:
    assert step.done is not None
    plan = step.plan
    return [
        plan.step, plan.tokens, plan.narrow, plan.wide, plan.blocked_by, round(step.start, 6),
        round(step.done.done, 6),
    ]  # fmt: skip


def _seen(seen: Seen) -> dict[str, Any]:
    assert seen.told is not None and seen.ended is not None
    return {
        "number": seen.number,
        "id": seen.told.request_id,
        "tenant": seen.told.tenant,
        "end": seen.end,
        "waited": round(seen.waited, 6),
        "waits": [round(seconds, 5) for seconds in seen.ended.waits],
        "preemptions": seen.preemptions,
        "output": seen.ended.output_tokens,
        "spans": [
            [span.state.name.lower(), round(span.start, 6), round(span.end, 6),
             None if span.lane == NO_LANE else span.lane, span.steps, span.tokens]
            for span in seen.spans
        ],
    }  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    runs = {"told": scenario().data, "guessed": guessing().data}
    told: dict[str, Any] = {"states": [state.name.lower() for state in State]}
    for name, data in runs.items():
        told[name] = {"frames": base64.b64encode(data).decode(), "meaning": meaning(data)}
    (FOLDER / "timeline.json").write_text(json.dumps(told, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
