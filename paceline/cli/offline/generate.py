"""``paceline generate``: an offline batch, JSON lines in, JSON lines out."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from paceline.cli.flags.arguments import Parser, bounded_int
from paceline.cli.flags.options import add_engine_options, add_model_argument, engine_settings
from paceline.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

    from paceline.cli.offline.batch_files import OutputFile
    from paceline.server.batches.lines import Answer, BatchLine
    from paceline.server.generation.service import Service

__all__ = ["Tally", "add_parser", "answer_all", "arriving_lines"]

_EPILOG = """\
an input line is one of:
  {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}
  {"messages": [{"role": "user", "content": "Hello"}], "custom_id": "greeting"}
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

with any field of the server's /v1/completions and /v1/chat/completions except stream.

each output line answers one input line, in the order in which they finish:
  {"index": 0, "custom_id": null, "input": "...", "choices": [...], "usage": {...}, "error": null}

or, for the third form, {"index", "custom_id", "input", "id", "response", "error"} as in OpenAI's
batch files. A bad line gets an error of its own and the others run. Run the same command again
after an interruption: lines that have an answer are skipped, and those that failed too, unless
--retry-failed is given. Exit codes: 0 when every line has an answer that is no error, else 1.

examples:
  paceline generate prompts.jsonl -o answers.jsonl
  paceline generate prompts.jsonl -o answers.jsonl --model ./my-model.gguf --max-num-seqs 64
  echo '{"prompt": "2+2="}' | paceline generate - | jq -r '.choices[0].text'
"""

# lines submitted beyond those that run at once, so that the engine never waits for one
_AHEAD = 64


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer a file of requests",
        description="Answer a file of requests, as many at once as the engine can run.",
        epilog=_EPILOG,
    )
    parser.add_argument("input", metavar="INPUT", help="a file of JSON lines; - for standard input")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUTPUT",
        help="file to append answers to; default: standard output",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="drop the answers already in OUTPUT"
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="run lines again whose answer in OUTPUT is an error, and replace it",
    )
    parser.add_argument(
        "--max-tokens",
        type=bounded_int(1),
        help="max_tokens of lines without it; default: that of the endpoint",
    )
    add_model_argument(parser, positional=False)
    add_engine_options(parser)
    parser.set_defaults(run=run)


@dataclass(slots=True)
class Tally:
    """Counts of this run's lines by result."""

    answered: int = 0
    failed: int = 0
    # answered in an earlier run
    skipped: int = 0
    failed_before: int = 0
    output_tokens: int = 0


def run(args: argparse.Namespace) -> int:
    from paceline.cli.offline.batch_files import OutputFile

    if args.overwrite and args.output is None:
        raise ConfigError("--overwrite needs --output")
    if args.retry_failed and args.output is None:
        raise ConfigError("--retry-failed needs --output")
    with _open_input(args.input, args.output) as (source, total):
        if args.output is None:
            output = OutputFile(sys.stdout.buffer)
        else:
            output = OutputFile.open(
                Path(args.output), overwrite=args.overwrite, retry_failed=args.retry_failed
            )
        try:
            return _run(args, source, output, total)
        finally:
            if args.output is not None:
                output.close()


def _run(args: argparse.Namespace, source: BinaryIO, output: OutputFile, total: int | None) -> int:
    settings = engine_settings(args, log_level="warning")

    import asyncio

    from tqdm import tqdm

    from paceline.cli.terminal.logs import configure_logging
    from paceline.cli.wiring import build_core, build_tokenizer, default_sampling
    from paceline.engine.local import LocalEngineClient
    from paceline.server.batches.answering import URLS
    from paceline.server.batches.lines import read_lines
    from paceline.server.generation.service import make_service
    from paceline.server.settings.config import ServerConfig

    configure_logging(settings.log_level)
    config = ServerConfig(default_sampling=default_sampling(settings))
    core, info = build_core(settings)
    client = LocalEngineClient(core, info, build_tokenizer(settings))
    tally = Tally()
    started = time.monotonic()
    # None: no bar unless standard error is a terminal
    bar = tqdm(total=total, unit="line", desc=info.model, file=sys.stderr, disable=None)

    def show() -> None:
        done = tally.answered + tally.failed + tally.skipped + tally.failed_before
        bar.update(done - bar.n)
        rate = tally.output_tokens / max(time.monotonic() - started, 1e-9)
        bar.set_postfix_str(f"{rate:.0f} tokens/s, {tally.failed} failed", refresh=False)

    async def work() -> None:
        try:
            await answer_all(
                make_service(client, config),
                read_lines(source, URLS) if total is not None else _arriving(source, URLS),
                output,
                tally,
                max_tokens=args.max_tokens,
                on_progress=show,
            )
        finally:
            await client.close()

    try:
        asyncio.run(work())
    finally:
        bar.close()
        print(_summary(tally, time.monotonic() - started), file=sys.stderr)
    return 1 if tally.failed or tally.failed_before else 0


def _summary(tally: Tally, seconds: float) -> str:
    parts = [f"{tally.answered} answered"]
    if tally.failed:
        parts.append(f"{tally.failed} failed (see their 'error')")
    if tally.failed_before:
        parts.append(f"{tally.failed_before} failed before (--retry-failed runs them again)")
    if tally.skipped:
        parts.append(f"{tally.skipped} were answered before")
    rate = tally.output_tokens / seconds if seconds > 0 else 0.0
    parts.append(f"{tally.output_tokens} output tokens in {seconds:.1f} s ({rate:.1f}/s)")
    return f"paceline generate: {', '.join(parts)}"


async def answer_all(
    service: Service,
    lines: Iterable[BatchLine] | AsyncGenerator[BatchLine, None],
    output: OutputFile,
    tally: Tally,
    *,
    max_tokens: int | None = None,
    on_progress: Any = None,
) -> None:
    """Answer every line that ``output`` does not answer yet, and count results in ``tally``.

    Lines are read only as far ahead as the engine needs, so the input may be of any length.

    Raises:
        EngineDeadError: the engine broke. Lines without an answer stay unanswered.
    """
    import asyncio
    from uuid import uuid4

    from paceline.server.batches.answering import answer_line

    room = asyncio.Semaphore(service.client.info.max_num_seqs + _AHEAD)

    async def one(line: BatchLine) -> None:
        try:
            body = {"model": service.model_name} | _limited(line, max_tokens)
            answer = await answer_line(service, replace(line, body=body), uuid4().hex)
            output.write(_record(line, answer))
        finally:
            room.release()
        if answer.status == 200:
            tally.answered += 1
            tally.output_tokens += _output_tokens(answer)
        else:
            tally.failed += 1
        if on_progress is not None:
            on_progress()

    try:
        async with asyncio.TaskGroup() as tasks, aclosing(_each(lines)) as each:
            async for line in each:
                if line.key in output.failed:
                    tally.failed_before += 1
                    continue
                if line.key in output.answered:
                    tally.skipped += 1
                    continue
                await room.acquire()
                tasks.create_task(one(line))
    except ExceptionGroup as group:
        # one task failed, which cancelled the others
        raise group.exceptions[0] from None


async def _each(
    lines: Iterable[BatchLine] | AsyncGenerator[BatchLine, None],
) -> AsyncGenerator[BatchLine, None]:
    if isinstance(lines, AsyncGenerator):
        async with aclosing(lines):
            async for line in lines:
                yield line
        return
    for line in lines:
        yield line


async def _arriving(source: BinaryIO, urls: Collection[str]) -> AsyncGenerator[BatchLine, None]:
    """Yield the lines of a pipe or a terminal of which nothing was read before."""
    from paceline.server.batches.lines import LineReader

    reader = LineReader(urls)
    async with aclosing(arriving_lines(source.fileno())) as raws:
        async for raw in raws:
            line = reader.read(raw)
            if line is not None:
                yield line


def _limited(line: BatchLine, max_tokens: int | None) -> dict[str, Any]:
    """Return the line's body, with ``max_tokens`` under its endpoint's name if it has none."""
    body = line.body
    if max_tokens is None or {"max_tokens", "max_completion_tokens", "max_output_tokens"} & set(
        body
    ):
        return body
    if line.url == "/inference/v1/generate":
        sampling = body.get("sampling_params") or {}
        return body | {"sampling_params": {"max_tokens": max_tokens, **sampling}}
    name = "max_output_tokens" if line.url == "/v1/responses" else "max_tokens"
    return body | {name: max_tokens}


def _record(line: BatchLine, answer: Answer) -> dict[str, Any]:
    """Return the output record. ``index`` comes first: it identifies a torn record."""
    from msgspec import json

    from paceline.server.batches.lines import openai_record

    record: dict[str, Any] = {
        "index": line.index,
        "custom_id": line.custom_id,
        "input": line.digest,
    }
    if line.is_openai:
        return record | openai_record(line, f"batch_req_{line.index}", answer)
    body = json.decode(answer.body)
    return record | {
        "choices": body.get("choices", []),
        "usage": body.get("usage"),
        "error": body.get("error"),
    }


def _output_tokens(answer: Answer) -> int:
    from msgspec import json

    usage: dict[str, int] = json.decode(answer.body).get("usage") or {}
    return usage.get("completion_tokens", usage.get("output_tokens", 0))


@contextmanager
def _open_input(name: str, output: str | None) -> Iterator[tuple[BinaryIO, int | None]]:
    """Open the input; also return its number of requests, if it can be read twice."""
    if name == "-":
        yield sys.stdin.buffer, None
        return
    path = Path(name)
    if output is not None and path.exists() and Path(output).exists() and path.samefile(output):
        raise ConfigError(f"{name} is both input and output: choose another output")
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    with file:
        total = None
        if file.seekable():
            total = sum(1 for line in file if line.strip())
            file.seek(0)
        yield file, total


_PIECE: Final = 64 * 1024


async def arriving_lines(file: int) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an open file, without their ends, each as soon as it is complete.

    Args:
        file: a descriptor that has no other reader; stays open.
    """
    # parts of the line that is not complete
    parts: list[bytes] = []
    while data := await _read(file):
        *ends, rest = data.split(b"\n")
        if ends:
            parts.append(ends[0])
            yield b"".join(parts)
            for line in ends[1:]:
                yield line
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


async def _read(file: int) -> bytes:
    """Wait for data and return it; empty at the end of the file."""
    import asyncio

    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(file, _tell, readable)
    except PermissionError:
        # a file on a disk cannot be watched, and is always readable
        return os.read(file, _PIECE)
    try:
        await readable
    finally:
        loop.remove_reader(file)
    return os.read(file, _PIECE)


def _tell(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
