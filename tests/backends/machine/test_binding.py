"""Who runs where: threads of real processes, on this machine's processors.

The nodes are made up, of a processor each; whoever is bound to one shows in /proc.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.loading.load import WorkerBackend
from paceline.backends.loading.plan import place_threads
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.machine.placement import choose_placement
from paceline.backends.machine.topology import allowed_cpus, format_list, parse_list
from paceline.backends.native import unavailable_reason
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.serve.command import successor
from paceline.cli.serve.ready import ready_line
from paceline.core.sampling_params import SamplingParams
from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.supervision.supervisor import SupervisedEngineClient
from paceline.engine.testing import ByteTokenizer
from paceline.engine.types import GenerationRequest
from paceline.errors import ConfigError
from tests.backends.helpers import load_backend
from tests.backends.machines import Machine
from tests.backends.plans import Plans

ALLOWED = sorted(allowed_cpus() or ())
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors to choose from")
COMPUTE = [
    pytest.param(
        "native",
        marks=pytest.mark.skipif(
            unavailable_reason() is not None, reason=str(unavailable_reason())
        ),
    ),
    "torch",
]
PROMPT = list(range(5, 45))

# an engine process whose machine is the one in the folder given
ENGINE = """
import sys
from functools import partial
from pathlib import Path

import paceline.backends.loading.plan as devices
from paceline.backends.machine.placement import choose_placement
from paceline.cli.serve.engine_process import main

root = Path(sys.argv[1])
devices.choose_placement = partial(
    choose_placement, nodes=root / "node", cpus=root / "cpu", environ={}
)
sys.exit(main())
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Node 0 has the first of this process's processors, node 1 the second and more memory."""
    made = Machine(tmp_path, None)
    made.nodes({number: str(ALLOWED[number]) for number in range(2)})
    made.free([100, 200])
    return made


@pytest.fixture
def here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The same, for backends of this process, which must leave its own threads where they are."""
    choose = partial(
        choose_placement, nodes=machine.root / "node", cpus=machine.root / "cpu", environ={}
    )
    monkeypatch.setattr("paceline.backends.loading.plan.choose_placement", choose)
    before = affinities()
    yield machine
    after = affinities()
    assert {task: cpus for task, cpus in after.items() if task in before} == {
        task: cpus for task, cpus in before.items() if task in after
    }


def affinities(pid: int | str = "self") -> dict[int, frozenset[int]]:
    """Processors that each thread of a process may run on."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        (cpus,) = [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")]
        found[int(task.name)] = parse_list(cpus)
    return found


def load(folder: Path, **settings: Any) -> tuple[WorkerBackend, list[frozenset[int]]]:
    """A backend that has computed, and where each of the threads may run that came with it."""
    before = set(affinities())
    defaults: dict[str, Any] = {"num_blocks": 16, "max_num_seqs": 4, "device": "cpu"}
    backend = load_backend(folder, **(defaults | settings))
    Plans(backend).generate(PROMPT, 3)
    if backend.info.name == "torch":
        # the model is so small that PyTorch computes it on one thread
        backend._executor.submit(lambda: torch.ones(400, 400) @ torch.ones(400, 400)).result()
    return backend, [cpus for task, cpus in affinities().items() if task not in before]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize(
    ("numa", "nodes"), [("auto", "1"), ("0", "0"), ("1", "1"), ("0-1", "0-1"), ("off", "")], ids=str
)
def test_of_a_shared_process_only_what_computes_is_bound(
    compute: str, numa: str, nodes: str, here: Machine, llama_folder: Path
) -> None:
    # more than a node has processors: they are started all the same where the node is given
    threads = 3 if numa != "auto" else 1
    backend, new = load(llama_folder, compute=compute, numa=numa, threads=threads)
    where = frozenset(ALLOWED[node] for node in parse_list(nodes)) or frozenset(ALLOWED)
    assert set(new) == {where}
    # the model's own, and those that it started
    assert len(new) == threads
    assert backend.info.numa_nodes == nodes
    assert ("NUMA node 1" in backend.info.choice) == (numa == "auto")
    backend.close()


def test_more_threads_than_a_node_has_cores_are_not_bound(
    here: Machine, llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend, new = load(llama_folder, threads=2)
    assert set(new) == {frozenset(ALLOWED)}
    assert backend.info.numa_nodes == ""
    why = "2 threads, bound to none of 2 NUMA nodes because none has more than 1 core"
    assert why in backend.info.choice
    assert f"threads=2 numa_nodes=none: {why}" in caplog.messages
    backend.close()


def test_a_system_that_refuses_is_served_unbound(
    here: Machine,
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_task: int, _cpus: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    backend, new = load(llama_folder)
    assert set(new) == {frozenset(ALLOWED)}
    assert backend.info.numa_nodes == ""
    assert "NUMA node 1" in backend.info.choice
    assert "but it could not be bound ([Errno 1] Operation not permitted)" in backend.info.choice
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        f"numa_unbound threads=1 numa_nodes=1 cpus={ALLOWED[1]} "
        "reason=[Errno 1] Operation not permitted"
    ]
    backend.close()


def test_the_ready_line_says_why_so_many_threads(here: Machine, llama_folder: Path) -> None:
    def choice(**settings: Any) -> str:
        backend, _ = load(llama_folder, **settings)
        backend.close()
        return backend.info.choice

    assert re.search(r"\d+ threads?, as many as cores and quotas allow$", choice(numa="off"))
    of_node = "1 thread, as many as the cores of NUMA nodes 0 and quotas allow"
    assert choice(numa="0").endswith(of_node)
    # who asks for a number is not told why
    assert "thread" not in choice(numa="off", threads=1)
    assert "thread" not in choice(numa="0", threads=1)


def test_the_ready_line_says_that_nodes_asked_for_were_refused(
    here: Machine, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_task: int, _cpus: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    backend, _ = load(llama_folder, numa="0-1", threads=1)
    backend.close()
    assert backend.info.choice.endswith(
        "NUMA nodes 0-1 could not be bound to ([Errno 1] Operation not permitted)"
    )
    assert backend.info.numa_nodes == ""


def test_one_node_changes_and_says_nothing(
    here: Machine, llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here.nodes({0: format_list(ALLOWED), 1: ""})
    caplog.set_level(logging.INFO)
    choices = set()
    for numa in ("auto", "off"):
        backend, new = load(llama_folder, numa=numa)
        assert set(new) == {frozenset(ALLOWED)}
        assert backend.info.numa_nodes == ""
        choices.add(backend.info.choice)
        backend.close()
    assert len(choices) == 1
    assert not [message for message in caplog.messages if "numa" in message.lower()]


@pytest.mark.parametrize(("device", "nodes"), [("cpu", "0"), ("cuda", "")])
def test_nodes_that_cannot_be_had_any_more(
    device: str, nodes: str, here: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that replaces one goes where auto sends it, instead of never starting again."""
    assert place_threads(BackendSettings(numa="1", numa_fallback=True), device).nodes == "1"
    assert not caplog.messages
    gone = ALLOWED[-1] + 1
    here.nodes({1: str(gone), 2: str(ALLOWED[1])})
    reason = f"--numa 1 leaves no processor on node 1 (CPUs {gone}): this process may use CPUs "
    with pytest.raises(ConfigError, match=re.escape(reason)):
        place_threads(BackendSettings(numa="1"), device)
    assert not caplog.messages
    assert place_threads(BackendSettings(numa="1", numa_fallback=True), device).nodes == nodes
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"numa_fallback numa=1 reason={reason}")


async def test_an_engine_process_and_its_successor_run_on_one_node(
    machine: Machine, llama_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = EngineSettings.of(
        model_name="tiny", model_path=str(llama_folder), device="cpu", num_blocks=16, max_num_seqs=4
    )
    argv = (sys.executable, "-c", ENGINE, str(machine.root))

    async def start(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
        wanted = settings if before is None else successor(settings, before.info, number)
        return await ProcessEngineClient.start(argv, wanted.to_json(), ByteTokenizer)

    async def answer(name: str) -> None:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=3),
            arrival_time=0.0,
        )
        async with aclosing(client.generate(request)) as outputs:
            async for _ in outputs:
                pass

    client = await SupervisedEngineClient.start(start)
    try:
        pids = set()
        for number, node in enumerate((1, 1, 0)):
            # all but the first wait for the next engine
            await answer(f"{number}")
            pids.add(client.pid)
            found = affinities(client.pid)
            assert len(found) > 2
            assert set(found.values()) == {frozenset({ALLOWED[node]})}
            assert client.info.numa_nodes == f"{node}"
            if number == 0:
                assert "1 thread on NUMA node 1 because" in ready_line(client.info, "m", "h", 1)
                # the other one has more memory to spare, which moves nobody
                machine.free([300, 200])
            if number == 1:
                assert "numa_fallback" not in capfd.readouterr().err
                machine.nodes({1: f"{ALLOWED[-1] + 1}", 2: f"{ALLOWED[1]}"})
            if number < 2:
                os.kill(client.pid, signal.SIGKILL)
        assert len(pids) == 3
        assert "numa_fallback numa=1 reason=--numa 1 leaves no" in capfd.readouterr().err
    finally:
        await client.close()
    # the process that started them runs where it did
    assert allowed_cpus() == frozenset(ALLOWED)
