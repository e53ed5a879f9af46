"""``paceline fleet up|status|down``: a fleet of replicas, as one file says."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.flags.arguments import Parser

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.fleet.spec import FleetFile

__all__ = ["add_parser"]

_log = logging.getLogger("paceline.fleet")

# seconds that a controller gets to end after a signal
_END_SECONDS: Final = 10.0

_EPILOG = """\
fleet.toml:
  [fleet]
  gateways = ["http://127.0.0.1:8080"]
  admin_key_env = "FLEET_KEY"     # a key of scope admin at these gateways

  [[pools]]
  name = "chat"                   # a tier of the gateway says "@chat"
  replicas = 3
  serve = ["smollm2-135m", "--max-num-seqs", "64"]

'up' starts the replicas and watches them; SIGHUP has it read the file again, which updates them one
by one. When it ends, by Ctrl-C too, the replicas run on, and the next 'up' finds them; 'down' ends
them. docs/operate/fleet.md explains the rest.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "fleet",
        help="replicas on this host or a Ray cluster, updated without a caller noticing",
        description="Start, watch, update and end the replicas behind gateways.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", dest="action", required=True, parser_class=Parser
    )
    for name, does in (
        ("up", "start and watch the replicas, until this command ends"),
        ("status", "print each replica's state"),
        ("down", "drain and end all replicas"),
    ):
        action = actions.add_parser(name, help=does, description=does.capitalize() + ".")
        action.add_argument("config", type=Path, metavar="FILE", help="TOML, such as fleet.toml")
        if name == "status":
            action.add_argument("--json", action="store_true", help="print one JSON object")
        elif name == "up":
            action.add_argument(
                "--check", action="store_true", help="check the file, print errors, and exit"
            )
        if name != "status":
            action.add_argument(
                "--log-level", choices=("debug", "info", "warning", "error"), default="info"
            )
            action.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paceline.errors import ConfigError
    from paceline.files import make_private_folder
    from paceline.fleet.spec import read_fleet

    file = read_fleet(args.config)
    folder = file.state_folder(args.config)
    if args.action == "status":
        return _status(args, folder)
    _check_places(file)
    if args.action == "up" and args.check:
        print(f"{len(file.pools)} pools, {sum(p.most for p in file.pools)} replicas: valid")
        return 0
    from paceline.cli.terminal.logs import configure_logging

    configure_logging(args.log_level, args.log_format)
    try:
        make_private_folder(folder)
    except OSError as error:
        raise ConfigError(f"state_dir {folder} cannot be made: {error.strerror}") from None
    return _drive(args, file, folder)


def _check_places(file: FleetFile) -> None:
    """Refuse replicas that this host has no room for. Raises ConfigError."""
    from paceline.errors import ConfigError
    from paceline.fleet.process_host import capacity
    from paceline.fleet.spec import unplaceable

    # nodes may join a Ray cluster later: its host tells what is missing while it waits
    told = [] if file.fleet.ray else unplaceable(file.pools, {"this host": capacity()})
    if told:
        raise ConfigError("; ".join(told[:4]) + (f"; {len(told)} in all" if len(told) > 4 else ""))


def _drive(args: argparse.Namespace, file: FleetFile, folder: Path) -> int:
    """Run the controller under its lock. Raises ConfigError if another one runs."""
    import asyncio
    import time

    from paceline.fleet.lock import ControllerLock
    from paceline.http.event_loop import new_event_loop

    is_down = args.action == "down"
    with ControllerLock(folder) as lock:
        if is_down:
            lock.take_over(_END_SECONDS)
        else:
            lock.take()
        # the gateways obey the controller that started last
        epoch = lock.next_epoch(time.time_ns() // 1_000_000)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_run(args, file, folder, epoch, is_down=is_down))


async def _run(
    args: argparse.Namespace, file: FleetFile, folder: Path, epoch: int, *, is_down: bool
) -> int:
    import asyncio
    import signal
    import time

    from paceline.errors import ConfigError, EngineError
    from paceline.fleet.driver import Driver
    from paceline.fleet.gateways import Gateways, SupersededError
    from paceline.fleet.host import Host
    from paceline.fleet.process_host import ProcessHost
    from paceline.fleet.spec import read_fleet

    fleet = file.fleet
    key = os.environ[fleet.admin_key_env]
    environ = {name: value for name, value in os.environ.items() if name != fleet.admin_key_env}
    host: Host
    if fleet.ray:
        from paceline.fleet.ray_host import RayHost

        host = await asyncio.to_thread(RayHost, fleet.ray, folder, fleet.exit_unwatched, file.pools)
    else:
        host = ProcessHost(folder, fleet.exit_unwatched, environ)
    gateways = Gateways(fleet.gateways, key, epoch, time.monotonic)
    driver = Driver(host, gateways, folder, time.monotonic, fleet.exit_unwatched)
    stop = asyncio.Event()

    def hung_up() -> None:
        try:
            again = read_fleet(args.config)
            _check_places(again)
        except ConfigError as error:
            _log.error("reload_refused reason=%r", str(error))
            return
        if again.fleet != fleet:
            _log.warning("[fleet] has changed, which needs a restart of this command")
        driver.change(again.pools)
        _log.info("reloaded pools=%d", len(again.pools))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if not is_down:
        loop.add_signal_handler(signal.SIGHUP, hung_up)
    try:
        await driver.start(file.pools)
        if is_down:
            # drained as the file says
            driver.change(())
            await driver.run(stop, until_settled=True)
            await driver.say_last_word()
            print("paceline fleet: all replicas have ended" if driver.is_settled else "stopped")
            return 0 if driver.is_settled else 1
        await driver.run(stop, until_settled=True)
        if not stop.is_set():
            count = sum(len(each.replicas) for each in driver.controllers.values())
            print(f"paceline fleet ready: {count} replicas in {len(file.pools)} pools", flush=True)
        await driver.run(stop)
        print(f"the replicas run on: 'paceline fleet down {args.config}' ends them", flush=True)
        return 0
    except SupersededError as error:
        raise EngineError(f"{error}; the replicas are its own now") from None
    finally:
        await driver.close()


def _status(args: argparse.Namespace, folder: Path) -> int:
    import json

    import msgspec

    from paceline.cli.terminal.table import table
    from paceline.errors import ConfigError
    from paceline.fleet.driver import STATUS
    from paceline.fleet.lock import ControllerLock

    with ControllerLock(folder) as lock:
        pid = lock.holder()
    try:
        told: Mapping[str, Any] = msgspec.json.decode((folder / STATUS).read_bytes())
    except (OSError, msgspec.MsgspecError):
        raise ConfigError(f"no fleet of {args.config} was started here") from None
    if args.json:
        print(json.dumps({"controller": pid, **told}))
        return 0
    rows = [("REPLICA", "STATE", "UP", "REQUESTS", "VERSION", "URL", "TROUBLE")]
    for pool in told["pools"].values():
        for each in pool["members"]:
            is_old = each["version"] != pool["version"]
            rows.append(
                (
                    each["name"], each["state"], "yes" if each["up"] else "no",
                    "-" if each["requests"] is None else str(each["requests"]),
                    each["version"] + (" (old)" if is_old else ""), each["url"] or "-",
                    each["trouble"] or "-",
                )
            )  # fmt: skip
    print(table(rows))
    for name, pool in told["pools"].items():
        ready = sum(each["state"] == "ready" and each["up"] for each in pool["members"])
        print(f"pool {name}: {ready} of {pool['replicas']} replicas are up")
        if pool["failures"]:
            print(
                f"pool {name}: {pool['failures']} starts of version {pool['version']} have failed, "
                f"the last one as {pool['last_failure']}"
            )
    for url, why in told["gateways"].items():
        print(f"gateway {url} does not answer: {why}")
    print(f"controller: process {pid}" if pid else "no controller runs: this is its last word")
    return 0
