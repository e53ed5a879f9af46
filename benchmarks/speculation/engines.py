"""The engines that take turns, and their requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.statistics import paired_ratio
from benchmarks.speculation.asked import DTYPE, SPECULATION, TOKENS, TURNS, Entry
from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.cli.flags.draft_model import draft_of
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import NO_SLO, Slo
from paceline.engine.core import EngineCore
from paceline.engine.llm import LLM
from paceline.engine.protocol import Tokenizer
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.engine.types import GenerationRequest


class Pair:
    """The two engines, and the results of all answers so far."""

    def __init__(
        self, path: Path, config: dict[str, Any] = SPECULATION, dtype: str = DTYPE
    ) -> None:
        self.tokenizer = load_tokenizer(path)
        self.off, self.on = (
            open_engine(path, {"method": "off"}, dtype),
            open_engine(path, config, dtype),
        )
        self.same = self.total = 0
        self._num_ratios = 0

    def close(self) -> None:
        self.off.close()
        self.on.close()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encode prompts by the model's chat template."""
        return encode(self.tokenizer, texts)

    def ratio(
        self,
        prompts: list[list[int]],
        count: int,
        temperature: float = 0.0,
        turns: int = TURNS,
        *,
        again: bool = False,
    ) -> Entry:
        """Return the seconds without drafts over those with, in turns; with ``again`` for the
        second time that the prompts are played."""
        off, on = [], []
        self._num_ratios += 1
        before = self.on.core.stats()
        for turn in range(turns):
            order = (self.off, self.on) if turn % 2 == 0 else (self.on, self.off)
            played = {}
            # a new salt, so that earlier answers are of no use
            salt = f"{self._num_ratios} {turn}"
            for engine in order:
                for _ in range(1 + again):
                    played[engine is self.on] = play_prompts(
                        engine, prompts, count, turn, temperature, salt
                    )
            without, drafted = played[False], played[True]
            off.append(without[0])
            on.append(drafted[0])
            pairs = list(zip(without[1], drafted[1], strict=True))
            self.same += sum(a == b for a, b in pairs)
            self.total += len(pairs)
        after = self.on.core.stats()
        found = paired_ratio(off, on)
        ratios = [a / b for a, b in zip(off, on, strict=True)]
        return {
            "ratio": round(found.median, 3),
            "low": round(found.low, 3),
            "high": round(found.high, 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "guesses": after.num_draft_tokens - before.num_draft_tokens,
            "right": after.num_accepted_tokens - before.num_accepted_tokens,
        }


class Engine(NamedTuple):
    llm: LLM
    core: EngineCore
    # tokens that end an answer, as on a server
    ends: frozenset[int]

    def close(self) -> None:
        self.llm.close()


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode prompts by the model's chat template."""
    chats = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


def open_engine(path: Path, speculative_config: dict[str, Any], dtype: str) -> Engine:
    draft = draft_of(speculative_config, str(path)) or (None, "auto")
    settings = BackendSettings(
        device="cpu", dtype=dtype, max_model_len=1024, draft_path=draft[0], draft_dtype=draft[1]
    )
    backend = load_backend(path, settings)
    info = backend.info
    core = EngineCore(
        backend,
        SchedulerConfig(max_model_len=1024, speculative_config=speculative_config, policy="fcfs"),
        CacheConfig(block_size=info.block_size, num_blocks=info.num_blocks),
    )
    tokenizer = load_tokenizer(path)
    return Engine(LLM(core, tokenizer), core, frozenset(tokenizer.eos_token_ids))


def request_of(
    engine: Engine,
    name: str,
    prompt: list[int],
    turn: int,
    temperature: float = 0.0,
    slo: Slo = NO_SLO,
    salt: str = "",
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=TOKENS, temperature=temperature, seed=turn, eos_token_ids=engine.ends
        ),
        arrival_time=time.monotonic(),
        cache_salt=salt or str(turn),
        slo=slo,
    )


def play_prompts(
    engine: Engine,
    prompts: list[list[int]],
    size: int,
    turn: int,
    temperature: float,
    salt: str = "",
) -> tuple[float, list[Any]]:
    """Play prompts; return seconds, and the tokens of each answer."""
    batches = [[prompt] for prompt in prompts]
    if size > 1:
        batches = [[prompts[index % len(prompts)] for index in range(size)]]
    began = time.perf_counter()
    outputs = [
        output
        # salts of their own, as answers under the same salt are sources of drafts
        for number, batch in enumerate(batches)
        for output in engine.llm.generate(
            [
                request_of(engine, f"r{i}", prompt, turn, temperature, salt=f"{salt} {number} {i}")
                for i, prompt in enumerate(batch)
            ]
        )
    ]
    return time.perf_counter() - began, [output.choices[0].token_ids for output in outputs]
