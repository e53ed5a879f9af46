"""``paceline calibrate``: when the small model of a cascade is good enough."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.cli.flags.arguments import Parser
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.calibrate.asking import Answers, Source
    from paceline.bench.calibrate.fitting import Measured
    from paceline.bench.calibrate.labels import Label
    from paceline.gateway.settings.config import GatewayConfig, ModelConfig

__all__ = ["add_parser"]

_EPILOG = """\
labels.jsonl has a prompt and a checker in each line:
  {"prompt": "What is 2 + 2?", "check": {"exact": "4"}}
  {"prompt": "Name the capital of France.", "check": {"regex": "(?i)paris"}, "max_tokens": 32}
  {"messages": [...], "check": {"json_schema": {"type": "object", "required": ["name"]}}}
  {"prompt": "...", "check": {"program": ["python3", "check.py"], "timeout": 5}}
  {"prompt": "...", "check": {"judge": "http://127.0.0.1:9000/v1", "model": "grader"}}

A program reads {"prompt", "answer"} as JSON and ends with 0 for a good answer, 1 for a bad one; a
judge is asked for a grade from 0 to 10. Both models answer every prompt once; their answers are
kept beside the calibration, so that an interrupted run goes on, and other checkers ask nothing
again. Half of the labels fit the scorers, the others set the thresholds: max_loss = 0.05 needs 19
of these, and 200 leave far more to the small model.

example:
  paceline calibrate gateway.toml --model chat --labels labels.jsonl -o chat.json
  paceline calibrate gateway.toml --model chat --shadow -o chat.json
"""
# failures that are printed
_SHOWN: Final = 3


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure when a small model is good enough, for a gateway's cascade",
        description="Measure on labelled prompts when the small model of a cascade is good enough.",
        epilog=_EPILOG,
    )
    parser.add_argument("config", type=Path, metavar="FILE", help="the gateway's TOML")
    parser.add_argument(
        "--model", default="", metavar="NAME", help="model with a cascade; default: the only one"
    )
    labels = parser.add_mutually_exclusive_group(required=True)
    labels.add_argument("--labels", type=Path, metavar="FILE", help="JSON lines, see below")
    labels.add_argument(
        "--shadow",
        action="store_true",
        help="take the gateway's shadow_file instead: nothing is asked, and a small answer counts "
        "as good where it says the same as the large one",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="calibration to write; default: the one that the gateway's file names",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from functools import partial

    import msgspec

    from paceline.bench.calibrate.asking import (
        Answers,
        AskError,
        ask,
        ask_all,
        ask_embedding,
        ask_samples,
    )
    from paceline.bench.calibrate.fitting import calibrate
    from paceline.bench.calibrate.labels import read_labels
    from paceline.bench.calibrate.report import report
    from paceline.bench.calibrate.shadows import read_shadows
    from paceline.files import write_private
    from paceline.gateway.settings.calibration import Side, Signals, digest_of
    from paceline.gateway.settings.config import read_config

    config = read_config(args.config)
    model = _model(config, args.model)
    assert model.cascade is not None, "the model has a cascade"
    output = args.output or (Path(model.cascade.calibration) if model.cascade.calibration else None)
    if output is None:
        raise ConfigError("give --output FILE: the gateway's file names no calibration")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}")
    labels = [] if args.shadow else read_labels(args.labels)
    if args.shadow and not model.cascade.shadow_file:
        raise ConfigError(f"model {model.name}: its cascade has no shadow_file")
    cascade = model.cascade
    if args.shadow and cascade.embeddings:
        raise ConfigError("--shadow: embeddings need labels, as no shadow traffic has any")
    small_model = next(each for each in config.models if each.name == cascade.small)
    sources = {"small": _source(config, small_model), "large": _source(config, model)}
    sides, kept_as = {}, {}
    answers = Answers(output.with_suffix(".answers.jsonl"))
    failed: list[str] = []
    for side, source in sources.items():
        try:
            entry = source.entry()
        except AskError as error:
            raise ConfigError(f"the {side} model: {error}") from None
        sides[side] = Side(source.model, digest_of(entry), entry)
        # answers of another model, format or template are other answers
        kept = f"{side} {sides[side].digest}"
        is_small = side == "small"
        perplexity = cascade.perplexity and is_small
        kept += " perplexity" * perplexity
        asking = partial(ask, source, logprobs=is_small, perplexity=perplexity)
        kept_as[side] = kept
        failed += ask_all(kept, labels, answers, asking, _told(f"{side} model"))
    if cascade.samples:
        kept_as["samples"] = f"samples {cascade.samples} {sides['small'].digest}"
        drawing = partial(ask_samples, sources["small"], samples=cascade.samples)
        told = _told("further answers")
        failed += ask_all(kept_as["samples"], labels, answers, drawing, told)
    if cascade.embeddings:
        other = next(each for each in config.models if each.name == cascade.embeddings)
        kept_as["embedding"] = f"embedding {cascade.embeddings}"
        embedding = partial(ask_embedding, _source(config, other))
        told = _told("embeddings")
        failed += ask_all(kept_as["embedding"], labels, answers, embedding, told)
    rows, unchecked = _measure(labels, answers, kept_as, perplexity=cascade.perplexity)
    if args.shadow:
        rows, others = read_shadows(
            Path(cascade.shadow_file), sides["small"], sides["large"], perplexity=cascade.perplexity
        )
        if others:
            print(
                f"{others} of {others + len(rows)} chats were answered by other models, cannot be "
                "read or lack the prompt's log-probabilities: they are left out",
                file=sys.stderr,
            )
    for sentence in (*failed[:_SHOWN], *unchecked[:_SHOWN]):
        print(f"warning: {sentence}", file=sys.stderr)
    if failed or unchecked:
        print(
            f"{len(labels)} labels: {len(failed)} answers failed, {len(unchecked)} were not "
            f"checked; {len(rows)} labels are left. Run it again to ask for the others.",
            file=sys.stderr,
        )
    made = _checked(rows, model.cascade.max_loss, output) and calibrate(
        rows,
        sides["small"],
        sides["large"],
        model.cascade.prefix_tokens,
        labels="shadow" if args.shadow else "checked",
        signals=Signals(
            samples=cascade.samples,
            perplexity=cascade.perplexity,
            embeddings=cascade.embeddings,
            num_values=len(rows[0].prompt.embedding),
        ),
    )
    assert made, "there are labels enough"
    for line in report(rows, made, model.cascade.max_loss):
        print(line)
    # a gateway that reads its file again never sees half of one
    part = output.with_suffix(".part")
    write_private(part, msgspec.json.encode(made).decode())
    part.replace(output)
    print(f"\n{output}: for small {sides['small'].digest} and large {sides['large'].digest}")
    return 0


def _told(what: str) -> Callable[[int, int], None]:
    """Return a function that prints how far the asking is."""

    def told(done: int, count: int) -> None:
        if done == count or done % 20 == 0:
            print(f"{what}: {done} of {count}", file=sys.stderr)

    return told


def _model(config: GatewayConfig, name: str) -> ModelConfig:
    found = [each for each in config.models if each.cascade and name in ("", each.name)]
    if len(found) != 1:
        names = ", ".join(each.name for each in config.models if each.cascade) or "none"
        raise ConfigError(
            f"there is no model {name!r} with a cascade; there are {names}"
            if name
            else f"give --model NAME: {names} have a cascade"
        )
    return found[0]


def _source(config: GatewayConfig, model: ModelConfig) -> Source:
    """Return the first endpoint of a model. Raises ConfigError."""
    import os

    from paceline.bench.calibrate.asking import AskError, Source
    from paceline.gateway.settings.config import Target

    target = Target.parse(model.tiers[0][0])
    if target.pool:
        raise ConfigError(
            f"model {model.name} is served by the pool {target.pool}, whose engines only a running "
            "gateway knows: name the gateway as an engine"
        )
    engine = next(each for each in config.engines if each.name == target.engine)
    if engine.kind in ("azure", "anthropic"):
        raise ConfigError(
            f"engine {engine.name} has kind {engine.kind}, and calibrate asks OpenAI's API: name a "
            "gateway before it as an engine"
        )
    key = os.environ.get(engine.api_key_env, "") if engine.api_key_env else ""
    source = Source(engine.url, target.model, key)
    if target.model:
        return source
    try:
        listed = [str(each["id"]) for each in source.fetch("/models", None)["data"]]
    except (AskError, KeyError, TypeError) as error:
        raise ConfigError(f"engine {engine.name}: its models cannot be listed: {error}") from None
    name = model.name if model.name in listed or len(listed) != 1 else listed[0]
    return Source(engine.url, name, key)


def _measure(
    labels: Sequence[Label], answers: Answers, sides: dict[str, str], *, perplexity: bool
) -> tuple[list[Measured], list[str]]:
    """Check all answers; return the labels with both checked, and what went wrong."""
    from concurrent.futures import ThreadPoolExecutor

    from paceline.bench.calibrate.checkers import CheckFailedError, quality, text_of
    from paceline.bench.calibrate.fitting import measured

    def one(numbered: tuple[int, Label]) -> Measured | str | None:
        number, label = numbered
        found = {name: answers.find(kept, label) for name, kept in sides.items()}
        small, large = found["small"], found["large"]
        if small is None or large is None:
            return None
        try:
            good = quality(label, text_of(small)), quality(label, text_of(large))
        except CheckFailedError as error:
            return f"label {number}: {error}"
        if any(found[name] is None for name in sides):
            return None
        samples, embedding = found.get("samples"), found.get("embedding")
        row = measured(
            label, small, *good, samples=samples, embedding=embedding, perplexity=perplexity
        )
        if row is None:
            return f"label {number}: the small answer is none of a chat"
        if perplexity and row.said.prompt_logprob is None:
            return f"label {number}: the small model's engine tells no prompt_logprobs"
        return row

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(one, enumerate(labels, 1)))
    return (
        [each for each in told if each is not None and not isinstance(each, str)],
        [each for each in told if isinstance(each, str)],
    )


def _checked(rows: Sequence[Measured], max_loss: float, output: Path) -> bool:
    """Raise ConfigError where half of the labels are too few for the bound."""
    from paceline.routing.cascade import labels_missing

    wanted = 2 * labels_missing(0, max_loss)
    if len(rows) < max(2, wanted):
        raise ConfigError(
            f"max_loss {max_loss:g} needs {wanted} labels, of which half fit the scorers, and "
            f"there are {len(rows)}: {wanted - len(rows)} are missing. The answers are kept in "
            f"{output.with_suffix('.answers.jsonl')}"
        )
    return True
