"""vLLM on one GPU, by itself and with Paceline's scheduler inside, in ten minutes.

    PYTHONPATH=. python scripts/gpu_bench.py --part probe,planning,paced

Run by the interpreter of an environment that has vLLM for that GPU, from a checkout. Nothing is
downloaded: the model has the shape of an 8B Llama and dummy weights. ``probe`` prints the device,
vLLM's version and whether it has the names that are used. ``planning`` is the time of planning at
64 and 256 running, for which the device does nothing. ``paced`` serves with vLLM's defaults but for
the memory, with the core's plan, and with 2,048 tokens a step, under the same arrivals: at 0.5, 1.2
and 1.5 times the measured capacity, and at 1.2 times in bursts; what each completes without targets
comes first. The three servers run side by side, each with 0.29 of the memory, and compute one after
another.
Prompts have 64 to 768 tokens, 15 % of them 2,000 to 3,500.
Targets: first token within 0.5 s (long prompts: 3 s), 25 ms a token after that.

It was not run yet: no device with vLLM was at hand. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common.processes import Command  # noqa: E402
from benchmarks.common.unmeasured import Unmeasured  # noqa: E402
from benchmarks.vllm.__main__ import cost_case, overhead_of, run_cases  # noqa: E402
from benchmarks.vllm.live import Load, Windows, Work, measure  # noqa: E402

PARTS: Final = ("probe", "planning", "paced")
VOCABULARY: Final = 32_000
SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
WORK: Final = Work(
    vocabulary=VOCABULARY, short=(64, 768), long=(2_000, 3_500), outputs=(32, 256),
    ttft=(0.5, 3.0), tpot=0.025, outstanding=256, tuned=((2_048, 256),),
)  # fmt: skip
LOADS: Final = (Load(1.2), Load(1.2, burst=8), Load(1.5))


class Gpu:
    """vLLM's server with dummy weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "config.json").write_text(json.dumps(SHAPE))

    python = Path(sys.executable)

    def environment(self) -> tuple[tuple[str, str], ...]:
        """Return what its processes need in their environment."""
        return ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")

    def server(self, port: int) -> Command:
        return Command(
            (sys.executable, "-m", "vllm.entrypoints.openai.api_server",
             "--model", str(self._folder), "--load-format", "dummy", "--skip-tokenizer-init",
             "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192",
             "--gpu-memory-utilization", "0.29"),
            self.environment(),
            start_seconds=240,
        )  # fmt: skip


def probe() -> dict[str, Any]:
    """Return the device, the driver, and what vLLM is here."""
    found: dict[str, Any] = {"nvidia-smi": None, "vllm": None}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv"]
        found["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    code = "import vllm; print(vllm.__version__, vllm.__path__[0])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if run.returncode:
        return found
    version, path = run.stdout.strip().splitlines()[-1].split(maxsplit=1)
    names = [sys.executable, str(ROOT / "scripts/vllm_names.py"), str(Path(path).parent)]
    said = subprocess.run(names, capture_output=True, text=True).stdout.strip()
    return found | {"vllm": version, "names": said}


def main() -> int:
    """Print figures as they come, and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each rate")
    given = parser.parse_args()
    parts = given.part.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    failed = Unmeasured()
    if "probe" in parts:
        results["probe"] = probe()
        print(results["probe"])
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as logs:
        peer = Gpu(Path(model))
        if "planning" in parts:
            with failed.part("planning"):
                costs = run_cases(peer, [cost_case(64), cost_case(256)])
                results["planning"] = dict(zip(("64", "256"), map(overhead_of, costs), strict=True))
                print(results["planning"])
        if "paced" in parts:
            found = results["paced"] = dict[str, Any]()
            windows = Windows(capacity=15.0, rate=given.seconds, sustained=given.seconds)
            measure(peer, WORK, Path(logs), LOADS, windows, failed, found)
    print(json.dumps({"bench": "gpu", "results": results, "absent": failed.reasons}))
    return failed.exit_code


if __name__ == "__main__":
    sys.exit(main())
