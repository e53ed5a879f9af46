"""``paceline gateway``: one address for several engines."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.arguments import Parser, bounded_int

if TYPE_CHECKING:
    from paceline.gateway.settings.config import GatewayConfig
    from paceline.http.keys import KeyRing

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline gateway gateway.toml
  paceline gateway --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002

gateway.toml:
  [[engines]]
  name = "a"
  url = "http://127.0.0.1:8001"

  [[engines]]
  name = "b"
  url = "http://127.0.0.1:8002"

  [[models]]                 # optional: by default each engine's models keep their names
  name = "chat"
  tiers = [["a"], ["b"]]     # b when a cannot

docs/operate/gateway.md explains every setting. Engines may be Paceline, vLLM, SGLang, llama.cpp,
Ollama or any server with OpenAI's API; broken streams resume exactly between Paceline engines.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "gateway",
        help="one address for several engines, with failover",
        description="Route requests to engines, and finish the streams of an engine that fails.",
        epilog=_EPILOG,
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE", help="TOML, see below")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="URL of an engine, instead of a file; may be repeated",
    )
    parser.add_argument(
        "--host", metavar="HOST", help="address; default: the file's, else 127.0.0.1"
    )
    parser.add_argument(
        "--port",
        type=bounded_int(0, 65535),
        metavar="PORT",
        help="port to listen on; 0 takes a free one; default: the file's, else 8080",
    )
    parser.add_argument(
        "--check", action="store_true", help="check the file, print errors, and exit"
    )
    parser.add_argument(
        "--no-ui", dest="ui", action="store_false", help="do not serve the page at /ui"
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of every request to this OTLP/HTTP collector, such as "
        "http://127.0.0.1:4318; needs paceline[otel]; default: the file's, else no traces",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paceline.cli.terminal.logs import configure_logging
    from paceline.errors import ConfigError
    from paceline.gateway.settings.config import EngineConfig, GatewayConfig, check_config
    from paceline.http.listening import bind

    configure_logging(args.log_level, args.log_format)
    if (args.config is None) == (not args.engine):
        raise ConfigError("give either a file or --engine URL")
    if args.config is not None:
        config = _read(args)
    else:
        engines = tuple(
            EngineConfig(name=f"engine{number}", url=url)
            for number, url in enumerate(args.engine, 1)
        )
        config = GatewayConfig(engines=engines, otlp_endpoint=args.otlp_endpoint or "", ui=args.ui)
        check_config(config)
    keys = _keys(config)
    if args.check:
        from paceline.gateway.cascade.check import cascade_lacks
        from paceline.gateway.routing.data_policy import policy_lacks

        for sentence in (*policy_lacks(config), *cascade_lacks(config)):
            print(sentence)
        print(f"{len(config.engines)} engines, {len(config.models)} models: the file is valid")
        return 0
    host = args.host or config.host
    port = config.port if args.port is None else args.port
    with bind(host, port) as listener:
        import asyncio
        import gc

        from paceline.gateway.app import Gateway
        from paceline.gateway.lifecycle import serve_gateway
        from paceline.http.event_loop import new_event_loop

        async def page(*call: Any) -> None:
            # imported when a browser first asks
            from paceline.web.gateway import answer

            await answer(*call)

        async def serve() -> int:
            gateway = Gateway(config, keys, page=page)

            def read() -> tuple[GatewayConfig, KeyRing]:
                again = _read(args)
                return again, _keys(again)

            def ready(host: str, port: int) -> None:
                # imported modules are never garbage
                gc.collect()
                gc.freeze()
                models = ", ".join(gateway.routes.names()) or "no models yet"
                address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                print(
                    f"paceline gateway ready: {address}/v1 ({len(config.engines)} engines: "
                    f"{models}) - status: {address}/status",
                    flush=True,
                )

            again = None if args.config is None else read
            return await serve_gateway(gateway, listener, ready, again)

        logging.getLogger("paceline.gateway").info("starting engines=%d", len(config.engines))
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(serve())


def _read(args: argparse.Namespace) -> GatewayConfig:
    """Read the configuration file, with flags applied. Raises ConfigError."""
    import msgspec

    from paceline.gateway.settings.config import check_config, read_config

    config = read_config(args.config)
    if not args.ui:
        config = msgspec.structs.replace(config, ui=False)
    if args.otlp_endpoint is not None:
        config = msgspec.structs.replace(config, otlp_endpoint=args.otlp_endpoint)
        check_config(config)
    return config


def _keys(config: GatewayConfig) -> KeyRing:
    """Read the keys. Raises ConfigError for a file that is unreadable or has other content."""
    from paceline.errors import ConfigError
    from paceline.http.keys import ApiKey, KeyRing, parse_key_file

    # an empty variable is a secret that went missing, and must not turn keys off
    single = os.environ.get("PACELINE_API_KEY")
    keys = [] if single is None else [ApiKey.of("environment", "admin", single)]
    if not config.api_key_file:
        return KeyRing(keys)
    path = Path(config.api_key_file)
    try:
        found = parse_key_file(path.read_text(encoding="utf-8"), f"api_key_file {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"api_key_file {path} holds no key")
    return KeyRing([*found, *keys])
