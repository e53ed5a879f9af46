"""Flags of ``paceline serve`` for the server: where it listens, how it answers, what it logs."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.cli.flags.arguments import (
    Parser,
    bounded_float,
    bounded_int,
    json_object,
    size_with_unit,
)
from paceline.cli.flags.options import LOG_LEVELS
from paceline.core.slo import Slo
from paceline.errors import InvalidRequestError

if TYPE_CHECKING:
    from paceline.server.settings.config import BatchConfig

__all__ = ["RESTART_WINDOW", "add_batch_options", "add_server_options", "batch_config", "slo_class"]

# period in which --max-engine-restarts counts, s
RESTART_WINDOW: Final = 300.0


def add_server_options(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine only; for others see "
        "--api-key-file)",
    )
    group.add_argument(
        "--port",
        type=bounded_int(0, 65535),
        default=8000,
        help="port to listen on; 0 takes a free one (default 8000)",
    )
    group.add_argument(
        "--ssl-certfile",
        type=Path,
        help="serve HTTPS with this PEM certificate, followed by its chain; read at start "
        "(default: plain HTTP)",
    )
    group.add_argument(
        "--ssl-keyfile",
        type=Path,
        help="unencrypted private key of the certificate; default: in --ssl-certfile",
    )
    group.add_argument(
        "--metrics-port",
        type=bounded_int(0, 65535),
        help="serve /metrics on this port too, without a key and from a separate thread, so that "
        "a busy server does not delay it; default: only on --port",
    )
    group.add_argument(
        "--metrics-host",
        metavar="HOST",
        help="address of --metrics-port (default 127.0.0.1: this machine only)",
    )
    group.add_argument(
        "--served-model-name",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="model names that requests may use; answers carry the first, and in the others * "
        "matches any characters ('claude-*'); default: MODEL as given",
    )
    group.add_argument(
        "--drain-timeout",
        type=bounded_float(0.0),
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may continue after SIGTERM (default 30)",
    )
    group.add_argument(
        "--exit-unwatched",
        type=bounded_float(0.0),
        default=0.0,
        metavar="SECONDS",
        help="end when neither a gateway nor a fleet's controller (header x-paceline-fleet) asked "
        "for this long and no request runs, as 'paceline fleet' starts its replicas; 0: never "
        "(default 0)",
    )
    group.add_argument(
        "--stall-timeout",
        type=bounded_float(0.1),
        default=60.0,
        metavar="SECONDS",
        help="an engine whose step takes longer than this counts as hung: it is killed and "
        "replaced, and /health fails until the next one is ready (default 60)",
    )
    group.add_argument(
        "--max-engine-restarts",
        type=bounded_int(0),
        default=5,
        help=f"an engine that dies is replaced; after N restarts within {RESTART_WINDOW:g} s the "
        "server gives up and exits; 0: the first death ends it (default 5)",
    )
    group.add_argument(
        "--slow-reader-timeout",
        type=bounded_float(0.0),
        default=60.0,
        metavar="SECONDS",
        help="close the connection of a client whose buffers stay full this long, or that reads "
        "less than 4 KiB/s; 0: never (default 60)",
    )
    group.add_argument(
        "--max-body-size",
        type=size_with_unit,
        default=8 * 2**20,
        help="refuse larger request bodies (default 8MiB)",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="render chat templates sent in requests",
    )
    group.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse chat and completion requests with an unknown field, such as a misspelt one; "
        "otherwise the header x-paceline-ignored-fields names it",
    )
    group.add_argument(
        "--max-logprobs",
        type=int,
        default=20,
        help="log-probabilities that a request may ask for at each position; -1: the whole "
        "vocabulary, up to 64 MiB per answer (default 20)",
    )
    group.add_argument(
        "--enable-tokenizer-info-endpoint",
        action="store_true",
        help="serve GET /tokenizer_info, which shows the chat template",
    )
    group.add_argument(
        "--enable-per-request-metrics",
        action="store_true",
        help="put times into answers with one choice, as vLLM does: metrics.queue_time_ms, "
        "time_to_first_token_ms, generation_time_ms, mean_itl_ms, tokens_per_second",
    )
    group.add_argument(
        "--record",
        metavar="FILE",
        help="write every step and every request's timeline to FILE, one JSON object a line, for "
        "'paceline simulate'",
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="keys of scope admin; other users of this machine can read them in the list of "
        "processes, so prefer --api-key-file or PACELINE_API_KEY",
    )
    group.add_argument(
        "--seed",
        type=bounded_int(-(2**62), 2**62),
        help="seed of the draws for requests that have none of their own; the same requests in the "
        "same order then get the same answers (default: a random one)",
    )
    group.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="log a line for each request that ends, without its text (default on)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        help="arguments of the chat template for requests that leave them out, such as "
        '{"enable_thinking": false}',
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        help="API keys, one per line: NAME SCOPE SHA256, then limits of that key if any; the "
        "scope is user, or admin, which /metrics needs. The environment variable PACELINE_API_KEY "
        "adds a key of scope admin",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: one object a line, with the fields of the message by name (default text)",
    )
    group.add_argument(
        "--sse-keep-alive",
        type=bounded_float(0.0),
        default=15.0,
        metavar="SECONDS",
        help="send a comment into a stream that had no event for this long; 0: never (default 15)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=("think", "qwen3", "deepseek_r1", "mistral", "granite", "openai_gptoss", "none"),
        default=None,
        help="how the model marks its reasoning, which chat answers return separately; none: as "
        "text; default: as its chat template says",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("harmony", "hermes", "llama3_json", "mistral"),
        default=None,
        help="how the model writes tool calls; default: as its chat template says, else hermes",
    )
    group.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="level of the log on standard error (default info)",
    )
    group.add_argument(
        "--slo-class",
        type=slo_class,
        action="append",
        default=[],
        metavar="NAME=TARGETS",
        help="targets of a class of requests in milliseconds, such as "
        "interactive=ttft:500,tpot:50; targets are ttft, tpot, itl, deadline and queue_ttl, and "
        "best-effort lets all others go first; may be given several times, and can redefine "
        "interactive, standard and batch",
    )
    group.add_argument(
        "--price-per-hour",
        type=bounded_float(0.0),
        default=0.0,
        metavar="PRICE",
        help="price of the machine, for the metric paceline:cost_per_million_tokens",
    )
    group.add_argument(
        "--metrics-tenants",
        type=bounded_int(0),
        default=0,
        help="tenants without a key that get their own label in metrics, by the name in the "
        "request: the first ones seen; later ones are counted together (default 0)",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of every request to this OTLP/HTTP collector, such as "
        "http://127.0.0.1:4318; needs paceline[otel]; default: no traces",
    )


def slo_class(text: str) -> Slo:
    """Parse ``NAME=ttft:MS,tpot:MS,itl:MS,deadline:MS,queue_ttl:MS,best-effort``."""
    name, _, targets = text.partition("=")
    if not re.fullmatch(r"[\w-]{1,64}", name):
        raise argparse.ArgumentTypeError(f"{name!r} is not a name: use letters, digits, - and _")
    seconds: dict[str, float] = {}
    best_effort = False
    for part in filter(None, targets.split(",")):
        if part == "best-effort":
            best_effort = True
            continue
        target, colon, value = part.partition(":")
        if target not in ("ttft", "tpot", "itl", "deadline", "queue_ttl") or not colon:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not one of ttft:MS, tpot:MS, itl:MS, deadline:MS, queue_ttl:MS, "
                "best-effort"
            )
        if target in seconds:
            raise argparse.ArgumentTypeError(f"{target} is given twice in {text!r}")
        seconds[target] = bounded_float(0.001)(value) / 1e3
    try:
        return Slo(slo_class=name, best_effort=best_effort, **seconds)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


OFF = "off"


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files and batches")
    group.add_argument(
        "--batch-dir",
        metavar="FOLDER",
        help="folder for files and batches, used by one server at a time; off: not served; "
        "default: paceline/batches/PORT under $XDG_STATE_HOME (~/.local/state)",
    )
    group.add_argument(
        "--max-file-size",
        type=size_with_unit,
        default=200 * 2**20,
        help="refuse larger files with 413 (default 200MiB)",
    )
    group.add_argument(
        "--batch-storage",
        type=size_with_unit,
        default=10 * 2**30,
        help="size of all files and answers together; beyond it uploads are refused with 413 and "
        "batches pause (default 10GiB)",
    )
    group.add_argument(
        "--max-batch-requests",
        type=bounded_int(1),
        default=50_000,
        help="a batch with more requests fails (default 50000)",
    )
    group.add_argument(
        "--batch-concurrency",
        type=bounded_int(1),
        help="batch requests in the engine at once; default: half of --max-num-seqs",
    )


def batch_config(args: argparse.Namespace, port: int) -> BatchConfig | None:
    """Return the settings of a server that listens on ``port``; None: batches are off."""
    from paceline.server.settings.config import BatchConfig

    if args.batch_dir == OFF:
        return None
    if args.batch_dir is not None:
        folder = Path(args.batch_dir).absolute()
    else:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        folder = Path(state) / "paceline" / "batches" / str(port)
    return BatchConfig(
        folder=folder,
        required=args.batch_dir is not None,
        max_file_bytes=args.max_file_size,
        max_bytes=args.batch_storage,
        max_requests=args.max_batch_requests,
        concurrency=args.batch_concurrency,
    )
