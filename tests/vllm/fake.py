"""The names of vLLM that the plug-in uses, with the least behaviour that they have in vLLM 0.32.

``installed`` puts them where ``import vllm`` finds them. The scheduler does in a few lines what
vLLM's does in hundreds: running requests first, then waiting ones while tokens last, chunks,
preemption of the last when blocks are short, placeholders for tokens that are on their way, cached
prefixes of whole blocks. The real one is tested by ``make bench NAME=vllm`` and ``make
test-upstreams``.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["MODULES", "Config", "Request", "Scheduler", "installed"]


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    max_tokens: int
    extra_args: dict[str, Any] | None = None
    arrival_time: float = 0.0
    priority: int = 0
    client_index: int = 0
    resumable: bool = False
    stop_token: int | None = None
    lora_request: Any = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_in_flight: int = 0
    num_stale: int = 0
    output: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.prompt_token_ids is not None
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.sampling_params = SimpleNamespace(extra_args=self.extra_args)

    @property
    def output_token_ids(self) -> list[int]:
        return self.output

    @property
    def tokens(self) -> list[int]:
        assert self.prompt_token_ids is not None
        return [*self.prompt_token_ids, *self.output]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output)


class RequestQueue(deque[Request]):
    def add_request(self, request: Request) -> None:
        self.append(request)

    def prepend_request(self, request: Request) -> None:
        self.appendleft(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = {id(request) for request in requests}
        kept = [request for request in self if id(request) not in gone]
        self.clear()
        self.extend(kept)


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    content: tuple[int, ...] | None = None


class KVCacheManager:
    num_kv_cache_groups = 1

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.tables: dict[str, list[Block]] = {}
        self.block_pool = SimpleNamespace(get_num_free_blocks=self.num_free)

    def num_free(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self.tables.get(request_id, []),))

    def get_computed_blocks(self, request: Request) -> tuple[Any, int, int]:
        tokens, found = request.tokens, []
        by_content = {block.content: block for block in self.blocks if block.content}
        for end in range(self.block_size, len(tokens), self.block_size):
            block = by_content.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return SimpleNamespace(blocks=(found,)), len(found) * self.block_size, 0

    def allocate(self, request: Request, end: int, found: list[Block]) -> bool:
        table = self.tables.get(request.request_id, [])
        needed = -(-end // self.block_size) - len(table) - len(found)
        for block in found:
            block.ref_cnt += 1
        free = [block for block in self.blocks if block.ref_cnt == 0]
        if needed > len(free):
            for block in found:
                block.ref_cnt -= 1
            return False
        taken = free[: max(0, needed)]
        for block in taken:
            block.ref_cnt, block.content = 1, None
        self.tables[request.request_id] = [*table, *found, *taken]
        return True

    def cache(self, request: Request, computed: int) -> None:
        tokens = request.tokens
        for index in range(computed // self.block_size):
            block = self.tables[request.request_id][index]
            block.content = block.content or tuple(tokens[: (index + 1) * self.block_size])

    def free(self, request: Request) -> None:
        for block in self.tables.pop(request.request_id, ()):
            block.ref_cnt -= 1


def Config(**changed: Any) -> Any:
    """Return what the plug-in reads of a ``VllmConfig``; ``changed`` are parts by their names."""
    scheduler = {
        "max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True,
        "policy": "fcfs", "watermark": 0.0, "long_prefill_token_threshold": 0,
    }  # fmt: skip
    parts: dict[str, Any] = {
        "additional_config": {}, "speculative_config": None,
        "lora_config": None, "kv_transfer_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "model_config": SimpleNamespace(max_model_len=256, runner_type="generate"),
    }  # fmt: skip
    scheduler |= {name: changed.pop(name) for name in list(changed) if name in scheduler}
    return SimpleNamespace(scheduler_config=SimpleNamespace(**scheduler), **(parts | changed))


class Scheduler:
    """vLLM's ``AsyncScheduler``, in short."""

    def __init__(self, vllm_config: Any, num_blocks: int = 64, block_size: int = 4) -> None:
        self.vllm_config, self.block_size = vllm_config, block_size
        self.lora_config = vllm_config.lora_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.policy = "fcfs"
        self.kv_cache_manager = KVCacheManager(num_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.waiting, self.running = RequestQueue(), list[Request]()
        # for tests: requests that are not ready, as if their grammar were still compiled
        self.unready: set[str] = set()
        self.finished = False

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = [self.requests[name] for name in names if name in self.requests]
        for request in ended:
            self._end(request, finished_status)
        self.finished = self.finished or bool(ended)
        return ended

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_requests([request])
        request.status = status
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]

    def has_requests(self) -> bool:
        return bool(self.requests) or self.finished

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        assert request.status == RequestStatus.RUNNING
        self.kv_cache_manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_stale, request.num_output_placeholders = request.num_in_flight, 0
        self.waiting.prepend_request(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        return num_new_tokens

    def schedule(self, throttle_prefills: bool = False) -> Any:
        scheduled: dict[str, int] = {}
        budget, preempted, self.finished = self.max_num_scheduled_tokens, False, False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens + request.num_output_placeholders - computed
            last = computed + 2 - request.num_output_placeholders
            if request.num_output_placeholders and last >= (
                request.num_prompt_tokens + request.max_tokens
            ):
                num_tokens = 0
            num_tokens = self._reserve_prefill_lookahead(request, computed, min(num_tokens, budget))
            index += 1
            if not num_tokens:
                continue
            fits = self.kv_cache_manager.allocate(request, computed + num_tokens, [])
            while not fits and (victim := self.running.pop()):
                preempted = True
                self._preempt_request(victim, 0.0)
                if victim is request:
                    break
                fits = self.kv_cache_manager.allocate(request, computed + num_tokens, [])
            if fits:
                scheduled[request.request_id] = num_tokens
                budget -= num_tokens
        skipped = []
        adapters = {r.lora_request.lora_int_id for r in self.running
                    if r.request_id in scheduled and r.lora_request}  # fmt: skip
        assert not adapters or len(adapters) <= self.lora_config.max_loras
        while budget > 0 and self.waiting and not preempted:
            if len(self.running) >= self.max_num_running_reqs:
                break
            request = self.waiting[0]
            if request.request_id in self.unready or request.num_stale:
                skipped.append(self.waiting.popleft())
                continue
            if request.lora_request:
                wanted = adapters | {request.lora_request.lora_int_id}
                if len(wanted) > self.lora_config.max_loras:
                    skipped.append(self.waiting.popleft())
                    continue
                adapters = wanted
            blocks, found, _ = self.kv_cache_manager.get_computed_blocks(request)
            num_tokens = self._reserve_prefill_lookahead(
                request, found, min(request.num_tokens - found, budget)
            )
            if not self.kv_cache_manager.allocate(request, found + num_tokens, blocks.blocks[0]):
                break
            self.running.append(self.waiting.popleft())
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, found
            scheduled[request.request_id] = num_tokens
            budget -= num_tokens
        for request in reversed(skipped):
            self.waiting.prepend_request(request)
        assert len(self.running) <= self.max_num_running_reqs
        samples = set()
        for name, num_tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += num_tokens
            request.num_in_flight += num_tokens
            known = request.num_tokens + request.num_output_placeholders
            if request.num_computed_tokens >= known:
                request.num_output_placeholders += 1
                samples.add(name)
        return SimpleNamespace(num_scheduled_tokens=scheduled, samples=samples)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = {}
        for name, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                continue
            stale = request.num_stale > 0
            request.num_in_flight -= num_tokens
            request.num_stale -= num_tokens * stale
            tokens = model_runner_output.sampled_token_ids[
                model_runner_output.req_id_to_index[name]
            ]
            for token in tokens:
                request.output.append(token)
                request.num_output_placeholders -= not stale
                status = None
                if token == request.stop_token:
                    status = RequestStatus.FINISHED_STOPPED
                elif len(request.output) >= request.max_tokens:
                    status = RequestStatus.FINISHED_LENGTH_CAPPED
                news = EngineCoreOutput(name, [token])
                if status is not None:
                    self._end(request, status)
                    self.finished = True
                    news.finish_reason = FinishReason(status - RequestStatus.FINISHED_STOPPED)
                elif not stale:
                    computed = request.num_computed_tokens - request.num_output_placeholders
                    self.kv_cache_manager.cache(request, computed)
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(news)
        return outputs

    def shutdown(self) -> None:
        self.finished = True


MODULES = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": Scheduler},
    "vllm.v1.core.sched.request_queue": {"create_request_queue": lambda policy: RequestQueue()},
    "vllm.v1.engine": {
        "EngineCoreOutput": EngineCoreOutput, "EngineCoreOutputs": EngineCoreOutputs,
        "FinishReason": FinishReason,
    },
    "vllm.v1.request": {"RequestStatus": RequestStatus},
}  # fmt: skip


@contextmanager
def installed() -> Iterator[None]:
    """Put the names where ``import vllm`` finds them, and the module of ours that does so."""
    ours = "paceline.vllm.scheduler"
    before = {name: sys.modules.pop(name, None) for name in (*MODULES, ours)}
    for name, members in MODULES.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, kept in before.items():
            sys.modules.pop(name, None)
            if kept is not None:
                sys.modules[name] = kept
