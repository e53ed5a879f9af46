"""The line that says that a server is ready, and what it tells of the model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.pooling import EMBED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.cli.flags.settings import EngineSettings
    from paceline.engine.types import EngineInfo

__all__ = ["ready_line", "told_of_model"]


def ready_line(
    info: EngineInfo,
    name: str,
    host: str,
    port: int,
    *,
    tls: bool = False,
    taken_over: Sequence[str] = (),
) -> str:
    """Return the line on standard output: address, model, what else is to be known
    (``taken_over``), and a command to try."""
    # a server that listens on every address can be tried on this machine's own
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    path, said = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    body: dict[str, object] = {"model": name, **said}
    if info.pooling is not None:
        path = "/v1/embeddings" if info.pooling.task == EMBED else "/classify"
        body = {"model": name, "input": "Hello!"}
    curl = (
        f"curl {address}{path} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
    kv_bytes, windows = info.num_blocks * info.block_bytes + info.window_bytes, ""
    if info.num_window_blocks:
        windows = f" and {info.num_window_blocks} for sliding-window layers"
    cache = (
        f"{info.num_blocks} KV blocks of {info.block_size} tokens{windows} in {info.kv_dtype}, "
        f"{kv_bytes / 2**20:.0f} MiB when full"
    )
    if not kv_bytes:
        cache = "no KV cache"
    why = "".join(f"; {each}" for each in taken_over)
    why += f"; auto: {info.choice}" if info.choice else ""
    return (
        f"paceline ready: {address}/v1 ({name}, {info.dtype} on {info.device}, {cache}, up to "
        f"{info.max_model_len} tokens per request{why}) - try: {curl}"
    )


def told_of_model(settings: EngineSettings, sampling: Mapping[str, float]) -> list[str]:
    """Return the sampling defaults with their reason, and the next better model that fits."""
    from paceline.backends.machine.cpu import available_memory
    from paceline.checkpoints.hub.catalogue import ALIASES, next_better

    told = []
    alias = ALIASES.get(settings.model_name)
    if sampling:
        values = " ".join(f"{name}={value:g}" for name, value in sampling.items())
        why = "the model's own"
        if settings.generation_config != "auto" or settings.override_generation_config:
            why = "by flags"
        elif alias is not None:
            why = alias.sampling_reason
        told.append(f"sampling {values} where a request names none ({why})")
    if (row := next_better(settings.model_name, available_memory())) is not None:
        told.append(
            f"better answers: {row.name}, {row.parameters} parameters, not tried here, follows "
            f"{row.ifeval:g} % of instructions" + (f" for {alias.ifeval:g}" if alias else "")
        )
    return told
