"""``paceline serve``: an OpenAI-compatible server, its engine in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.flags.adapter_options import adapter_config, adapter_settings, add_adapter_options
from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.block_options import add_block_options, block_settings
from paceline.cli.flags.explicit_flags import given_flags
from paceline.cli.flags.limit_options import add_limit_options, limit_settings
from paceline.cli.flags.model_options import add_models_options, given_models
from paceline.cli.flags.options import (
    DEFAULT_MODEL,
    add_admission_options,
    add_engine_options,
    engine_settings,
)
from paceline.cli.flags.scheduling_options import ignored_flags
from paceline.cli.flags.server_options import (
    RESTART_WINDOW,
    add_batch_options,
    add_server_options,
    batch_config,
)
from paceline.cli.serve.ready import ready_line, told_of_model
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from paceline.cli.flags.elsewhere.rows import Note
    from paceline.cli.flags.model_options import GivenModel
    from paceline.cli.flags.settings import EngineSettings
    from paceline.engine.types import EngineInfo
    from paceline.http.keys import ApiKey
    from paceline.server.settings.config import ServerConfig

    # signature of ``server.lifecycle.serve``
    Serve = Callable[..., Awaitable[int]]

__all__ = ["add_parser", "successor"]

# fields of ServerConfig with their flags' names
_NAMED_AS_FLAGS: Final = (
    "drain_timeout", "price_per_hour", "metrics_tenants", "trust_request_chat_template",
    "strict_fields", "max_logprobs", "enable_per_request_metrics", "tool_call_parser",
    "reasoning_parser", "sse_keep_alive", "slow_reader_timeout", "ssl_certfile", "ssl_keyfile",
    "otlp_endpoint", "seed", "exit_unwatched", "default_chat_template_kwargs",
)  # fmt: skip

# what --help alone shows: the flags that most notes have
_FIRST: Final = (
    "--model", "--host", "--port", "--api-key", "--api-key-file", "--served-model-name",
    "--max-model-len", "--dtype", "--kv-dtype", "--kv-cache-memory", "--gpu-memory-utilization",
    "--max-num-seqs", "--max-num-batched-tokens", "--scheduling-policy", "--threads", "--device",
    "--chat-template", "--override-generation-config", "--tool-call-parser", "--reasoning-parser",
    "--cors-origin", "--log-level",
)  # fmt: skip

_log = logging.getLogger("paceline.cli")

_EPILOG = """\
examples:
  paceline serve                                     the default model, on this machine only
  paceline serve Qwen/Qwen2.5-0.5B-Instruct --port 8080
  paceline serve ./model.gguf --served-model-name my-model --max-model-len 4096
  paceline serve --kv-cache-memory 2GiB --max-num-seqs 64 --scheduling-policy priority
  paceline serve --backend null                      no model: to try clients against

One line on standard output says when it is ready; logs go to standard error. SIGTERM or Ctrl-C
drains: running requests end, new ones get 503; a second one ends at once. Exit codes: 0 after a
drain, 1 when the engine died too often, 2 when the server could not start.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="Serve a model over the OpenAI API.",
        epilog=_EPILOG,
    )
    add_models_options(parser)
    add_server_options(parser)
    add_limit_options(parser)
    add_engine_options(parser)
    add_admission_options(parser)
    add_adapter_options(parser)
    add_block_options(parser)
    add_batch_options(parser)
    parser.set_defaults(run=partial(run, parser=parser), given=partial(given_flags, parser))
    parser.rewrite = _rewrite
    parser.shown_first = _FIRST


def _rewrite(args: list[str], known: Collection[str]) -> tuple[list[str], tuple[Note, ...]]:
    """Replace flags of other servers, after those that the environment sets."""
    if any(word in ("-h", "--help") for word in args):
        return args, ()
    from paceline.cli.flags.elsewhere import SERVE
    from paceline.cli.flags.elsewhere.ollama import of_environment

    args, flags = SERVE.rewrite(args, known)
    before, variables = of_environment(os.environ, {word.partition("=")[0] for word in args})
    return [*before, *args], (*variables, *flags)


def run(args: argparse.Namespace, *, parser: Parser) -> int:
    from paceline.cli.terminal.logs import configure_logging
    from paceline.http.listening import bind
    from paceline.http.tls import check_tls_files

    configure_logging(args.log_level, args.log_format)
    if not args.enable_log_requests:
        logging.getLogger("paceline.server.requests").setLevel(logging.WARNING)
    for note in args.elsewhere:
        _log.info("flag given=%s here=%s", note.given, note.here)
    _refuse_repeated("--slo-class", [each.slo_class for each in args.slo_class])
    _refuse_repeated("--served-model-name", args.served_model_name)
    models = given_models(args)
    if args.model == DEFAULT_MODEL and args.model_flag is None:
        for flag, values in (
            ("--api-key", args.api_key), ("--served-model-name", args.served_model_name),
        ):  # fmt: skip
            _refuse_model_in(flag, values)
    if args.metrics_host is not None and args.metrics_port is None:
        raise ConfigError(f"--metrics-host {args.metrics_host} needs --metrics-port")
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise ConfigError(f"--ssl-keyfile {args.ssl_keyfile} needs --ssl-certfile: its certificate")
    if args.ssl_certfile is not None:
        # checked before a model is fetched and loaded
        check_tls_files(args.ssl_certfile, args.ssl_keyfile)
    adapters, blocks = adapter_settings(args), block_settings(args)
    api_keys = _api_keys(args.api_key_file, args.api_key)
    # a taken port is found before a model is fetched and loaded
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(bind(args.host, args.port))
        metrics_listener = None
        if args.metrics_port is not None:
            metrics_host = args.metrics_host or "127.0.0.1"
            metrics_listener = sockets.enter_context(
                bind(metrics_host, args.metrics_port, flag="--metrics-port")
            )
        if not api_keys:
            _warn_if_reachable(listener)
        # an engine publishes its timeline only if the server shows it
        kept = args.ui and args.timeline and args.timeline_history > 0
        if models:
            return _run_several(
                parser, args, models, kept, api_keys, listener, metrics_listener, sockets
            )
        settings = engine_settings(args, log_level=args.log_level, log_format=args.log_format)
        settings = replace(settings.changed(**adapters, **blocks), timeline=kept)
        if args.record is not None:
            settings = replace(settings, record=os.path.abspath(args.record))
        # imported here: it opens the model
        from paceline.cli.serve.few_bits import few_bits

        plan = few_bits(settings)
        settings = plan.settings
        for message in ignored_flags(settings):
            logging.getLogger("paceline.cli").warning("%s", message)

        import asyncio

        def configure() -> ServerConfig:
            return _server_config(args, settings, api_keys, listener.getsockname()[1])

        with asyncio.Runner() as runner:
            supervision = (args.stall_timeout, args.max_engine_restarts)
            said = [f"{n.given} is {n.here}" for n in args.elsewhere if "served as" in n.here]
            if plan.said:
                said.append(plan.said)
            try:
                return runner.run(
                    _serve(
                        settings, configure, listener, metrics_listener, *supervision, said,
                        plan.making.start,
                    )
                )  # fmt: skip
            finally:
                plan.making.stop()


def _run_several(
    parser: Parser,
    args: argparse.Namespace,
    models: Sequence[GivenModel],
    timeline: bool,
    api_keys: tuple[ApiKey, ...],
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    stack: contextlib.ExitStack,
) -> int:
    """Serve several models; nothing of this is imported for one."""
    import asyncio
    import tempfile

    from paceline.cli.serve.several import prepare, start_pool, turn_uses
    from paceline.engine.models.front import FrontClient
    from paceline.engine.models.page import make_page
    from paceline.server.app import SeveralModels
    from paceline.server.lifecycle import serve
    from paceline.web.routes import ui_router

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
    turns = Path(folder) / "turns"
    make_page(turns)
    several = prepare(parser, args, models, timeline=timeline, turns=turns)

    def config_of(name: str) -> ServerConfig:
        spec = next(spec for spec in several.specs if spec.name == name)
        config = _server_config(
            several.arguments[name], several.settings[name], api_keys, listener.getsockname()[1]
        )
        return replace(config, served_model_names=(name, *spec.aliases))

    async def served() -> int:
        pool, first = await start_pool(several, args, successor)
        client = FrontClient(pool, first)

        def ready(host: str, port: int) -> None:
            more = f"one of {len(several.specs)} models"
            tls = args.ssl_certfile is not None
            print(
                ready_line(client.info, first, host, port, tls=tls, taken_over=(more,)), flush=True
            )

        configs = {name: partial(config_of, name) for name in several.settings}
        return await serve(
            client,
            config_of(first),
            listener=listener,
            metrics_listener=metrics_listener,
            on_ready=ready,
            page=ui_router,
            models=SeveralModels(
                pool=pool,
                configs=configs,
                adapters=several.adapters,
                first=first,
                autoload=args.models_autoload,
                max_waits={
                    name: settings.scheduler.max_predicted_ttft_s
                    for name, settings in several.settings.items()
                    if settings.scheduler.max_predicted_ttft_s is not None
                },
                turns=partial(turn_uses, pool, turns),
            ),
        )

    with asyncio.Runner() as runner:
        return runner.run(served())


def _refuse_model_in(flag: str, values: Sequence[str]) -> None:
    """Refuse a MODEL behind a flag that takes any number of values: it would be one of them, and
    the default model be served."""
    if len(values) > 1 and (values[-1].endswith(".gguf") or Path(values[-1]).exists()):
        raise ConfigError(
            f"the last value of {flag} is a file or folder: if it is the model, write it before "
            "the flags, or behind --model"
        )


def _refuse_repeated(flag: str, names: Sequence[str]) -> None:
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{flag} {min(twice)} was given {names.count(min(twice))} times")


def _server_config(
    args: argparse.Namespace, settings: EngineSettings, api_keys: tuple[ApiKey, ...], port: int
) -> ServerConfig:
    from paceline.cli.flags.settings import TRACE_PROCESS, WHAT_IF_PROCESS
    from paceline.cli.wiring import default_sampling
    from paceline.server.settings.config import ServerConfig, WhatIfConfig

    return ServerConfig(
        served_model_names=tuple(args.served_model_name),
        max_body_bytes=args.max_body_size,
        default_sampling=default_sampling(settings),
        slo_classes={each.slo_class: each for each in args.slo_class},
        enable_tokenizer_info=args.enable_tokenizer_info_endpoint,
        api_keys=api_keys,
        **{name: getattr(args, name) for name in _NAMED_AS_FLAGS},
        **limit_settings(args),
        what_if=WhatIfConfig(
            command=WHAT_IF_PROCESS,
            check=TRACE_PROCESS,
            settings=settings.to_json().decode(),
            choices=_what_if_choices,
        ),
        batches=batch_config(args, port),
        adapters=adapter_config(args),
        given=args.given(args),
    )


def _what_if_choices() -> Mapping[str, Any]:
    # imported only when the page asks
    from paceline.cli.simulation.what_if import choices

    return choices()


def _warn_if_reachable(listener: socket.socket) -> None:
    """Warn where other machines can reach a server that asks for no key."""
    host, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        logging.getLogger("paceline.cli").warning(
            "open address=%s port=%d: every client that can reach it may use this server and read "
            "its metrics; --api-key-file requires keys",
            host,
            port,
        )


def _api_keys(path: Path | None, given: Sequence[str] = ()) -> tuple[ApiKey, ...]:
    """Read the keys. Raises ConfigError for a file that is unreadable or has other content."""
    # an empty variable is a secret that went missing, and must not turn keys off
    single = os.environ.get("PACELINE_API_KEY")
    if path is None and single is None and not given:
        return ()
    from paceline.http.keys import ApiKey, parse_key_file

    keys: list[ApiKey] = []
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
        keys = parse_key_file(text, f"--api-key-file {path}")
        if not keys:
            raise ConfigError(f"--api-key-file {path} holds no key")
    if single is not None:
        keys.append(ApiKey.of("environment", "admin", single))
    if len(set(given)) < len(given):
        raise ConfigError("--api-key has the same key twice")
    for number, key in enumerate(given, 1):
        if "," in key:
            raise ConfigError(
                f"key {number} of --api-key has a comma, which parts keys in llama-server and is a "
                "part of the key in vLLM: give several keys as words, and one with a comma in "
                "--api-key-file"
            )
        keys.append(ApiKey.of(f"api-key-{number}", "admin", key))
    return tuple(keys)


async def _serve(
    settings: EngineSettings,
    configure: Callable[[], ServerConfig],
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    stall_timeout: float,
    max_restarts: int,
    said: Sequence[str],
    is_ready: Callable[[], None],
) -> int:
    import asyncio

    from paceline.backends.machine.cpu import trim_heap
    from paceline.cli.flags.settings import ENGINE_PROCESS
    from paceline.cli.serve.startup import Stages, process_age
    from paceline.cli.wiring import build_tokenizer
    from paceline.engine.process.client import ProcessEngineClient
    from paceline.engine.process.garbage import uncollected
    from paceline.engine.supervision.supervisor import SupervisedEngineClient

    async def engine(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
        wanted = settings if before is None else successor(settings, before.info, number)
        return await ProcessEngineClient.start(
            ENGINE_PROCESS,
            wanted.to_json(),
            lambda: build_tokenizer(settings) if before is None else before.tokenizer,
            stall_timeout=stall_timeout,
        )

    def prepare() -> tuple[ServerConfig, Serve]:
        from paceline.server.lifecycle import serve
        from paceline.web.routes import ui_router

        return configure(), partial(serve, page=ui_router)

    stages = Stages(process_age(), time.monotonic())
    starting = asyncio.ensure_future(
        SupervisedEngineClient.start(engine, max_restarts=max_restarts, window=RESTART_WINDOW)
    )
    with uncollected():
        # the engine's process starts first: the web framework is imported while it loads its model
        await asyncio.sleep(0)
        stages.done("start", time.monotonic())
        try:
            config, serve = await asyncio.to_thread(prepare)
            stages.done("web", time.monotonic())
        except BaseException:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, PacelineError):
                await (await starting).close()
            raise
        client = await starting
        # the tokenizer is loaded meanwhile, too
        trim_heap()
        stages.done("engine", time.monotonic())
    name = config.served_model_names[0] if config.served_model_names else client.info.model

    def ready(host: str, port: int) -> None:
        if metrics_listener is not None:
            # on standard error: programs read a single line on standard output
            metrics_host, metrics_port = metrics_listener.getsockname()[:2]
            _log.info("metrics_listening host=%s port=%d", metrics_host, metrics_port)
        stages.done("listen", time.monotonic())
        stages.log(_log, "started")
        tls = config.ssl_certfile is not None
        told = (*said, *told_of_model(settings, config.default_sampling))
        print(ready_line(client.info, name, host, port, tls=tls, taken_over=told), flush=True)
        is_ready()

    return await serve(
        client, config, listener=listener, metrics_listener=metrics_listener, on_ready=ready
    )


def successor(settings: EngineSettings, before: EngineInfo, number: int) -> EngineSettings:
    """Return the settings of engine ``number`` that replaces one. It has the same size and NUMA
    nodes, whatever memory is free now, so that all admitted requests and adapters still fit; other
    nodes if it may not run on these any more. Its recording goes to a file of its own."""
    weights = settings.weights_path
    if weights is not None and not Path(weights).exists():
        _log.warning("four_bits=%s gone: the model's own weights are rounded instead", weights)
        weights = None
    return settings.changed(
        weights_path=weights,
        num_blocks=before.num_blocks,
        kv_cache_bytes=None,
        max_model_len=before.max_model_len,
        lora_bytes=before.adapter_bytes or None,
        kv_port=before.kv_port or settings.kv_port,
        numa=before.numa_nodes or settings.load.numa,
        numa_fallback=True,
        record=None if settings.record is None else f"{settings.record}.{number}",
    )
