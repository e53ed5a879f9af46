"""The script that reads a vLLM's source for the names that are used."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_names.py"

SCHEDULER = """
class Scheduler:
    def __init__(self):
        self.requests = self.running = self.waiting = self.max_num_scheduled_tokens = 0
        self.max_num_running_reqs = self.max_model_len = self.policy = 0
    def schedule(self, throttle=False):
        self.running, self.waiting, self.max_num_scheduled_tokens
        self._reserve_prefill_lookahead(1, 2, 3)
    def update_from_output(self, scheduler_output, model_runner_output): ...
    def add_request(self, request): ...
    def finish_requests(self, request_ids, finished_status): ...
    def _preempt_request(self, request, timestamp, more=False): ...
    def _reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens): ...
"""
REQUEST = """
class Request:
    def __init__(self):
        self.request_id = self.status = self.num_computed_tokens = self.num_prompt_tokens = 0
        self.prompt_token_ids = self.sampling_params = self.max_tokens = self.priority = 0
        self.output_token_ids = self.arrival_time = self.client_index = self.resumable = 0
        self.lora_request = 0
class RequestStatus:
    RUNNING = PREEMPTED = FINISHED_ERROR = 0
"""
ENGINE = """
class EngineCoreOutput:
    request_id: str
    new_token_ids: list
    finish_reason: int = 0
class FinishReason:
    ERROR = 3
"""


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_names", _SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_of(script: Any) -> dict[str, str]:
    cache = "class KVCacheManager:\n def get_computed_blocks(self, request): ...\n"
    return {
        script.SCHEDULER: SCHEDULER,
        script.ASYNC: "class AsyncScheduler(Scheduler): ...",
        script.QUEUE: "def create_request_queue(policy): ...",
        script.CACHE: cache + " def get_blocks(self, request_id): ...",
        script.POOL: "class BlockPool:\n def get_num_free_blocks(self): ...",
        script.REQUEST: REQUEST,
        script.ENGINE: ENGINE,
    }


def test_every_name_is_there(script: Any) -> None:
    assert not list(script.missing(files_of(script)))


@pytest.mark.parametrize(
    ("old", "new", "gone"),
    [
        ("def _preempt_request(", "def _preempt(", "Scheduler._preempt_request"),
        ("self.policy = 0", "0", "Scheduler.policy"),
        (
            "def finish_requests(self, request_ids,", "def finish_requests(self, names,",
            "Scheduler.finish_requests(request_ids, finished_status), which is now (names, "
            "finished_status)",
        ),
        (
            "self._reserve_prefill_lookahead(1, 2, 3)", "pass",
            "the use of _reserve_prefill_lookahead in Scheduler.schedule",
        ),
        ("r(Scheduler)", "r", "AsyncScheduler as a subclass of Scheduler"),
        ("PREEMPTED", "EVICTED", "RequestStatus.PREEMPTED"),
        ("    finish_reason: int = 0\n", "", "EngineCoreOutput.finish_reason"),
        (" def get_num_free_blocks", " def num_free", "BlockPool.get_num_free_blocks"),
    ],
)  # fmt: skip
def test_what_is_gone_is_named(script: Any, old: str, new: str, gone: str) -> None:
    files = {path: text.replace(old, new) for path, text in files_of(script).items()}
    assert list(script.missing(files)) == [gone]


def test_missing_file(script: Any, tmp_path: Path) -> None:
    assert list(script.missing({})) == list(script.FILES)


def test_newest_releases_of_two_minors(script: Any) -> None:
    known = [(0, 9, 2), (0, 32, 0), (0, 33, 1), (0, 33, 0), (0, 10, 0)]
    assert script.newest(known) == [(0, 33, 1), (0, 32, 0)]
