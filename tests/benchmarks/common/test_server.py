import sys
from pathlib import Path

import pytest

from benchmarks.common.processes import Unavailable
from benchmarks.common.server import PacelineServer, ReadyServer


def test_a_server_is_there_from_its_ready_line_on(tmp_path: Path) -> None:
    with PacelineServer("--backend", "null", "--metrics-port", "0", log=tmp_path / "log") as server:
        assert server.alive and server.port > 0 and server.startup > 0.0
        assert int(server.line(r"metrics_listening .*port=(\d+)")[1]) not in (0, server.port)
        server.close()
        assert server.exit_code == 0


@pytest.mark.parametrize(
    ("program", "said"), [("print('no model here')", "no model here"), ("input()", "start")]
)
def test_a_server_that_does_not_start_is_given_up(program: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=said):
        ReadyServer((sys.executable, "-c", program), r"ready (\d+)", tmp_path / "log", seconds=5.0)
