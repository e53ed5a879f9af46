"""Look in the source of a vLLM for the names that paceline.vllm uses; exit with 1 if one is gone.

    python scripts/vllm_names.py            the newest releases of two minors on PyPI
    python scripts/vllm_names.py 0.33.0     that one
    python scripts/vllm_names.py FOLDER     a checkout, or an installed package's parent

Nothing is installed or run: the source distribution is downloaded into memory, and its files are
read by ``ast``.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tarfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from paceline.vllm.names import ATTRIBUTES, CACHE_NAMES, READ, SCHEDULER_NAMES  # noqa: E402

INDEX: Final = "https://pypi.org/simple/vllm/"
MINORS: Final = 2
SCHEDULER: Final = "vllm/v1/core/sched/scheduler.py"
ASYNC: Final = "vllm/v1/core/sched/async_scheduler.py"
QUEUE: Final = "vllm/v1/core/sched/request_queue.py"
CACHE: Final = "vllm/v1/core/kv_cache_manager.py"
POOL: Final = "vllm/v1/core/block_pool.py"
REQUEST: Final = "vllm/v1/request.py"
ENGINE: Final = "vllm/v1/engine/__init__.py"
# attributes of vLLM's requests, and fields of its outputs
_REQUEST: Final = (
    "request_id", "status", "num_computed_tokens", "num_prompt_tokens", "prompt_token_ids",
    "sampling_params", "max_tokens", "output_token_ids", "priority", "arrival_time",
    "client_index", "resumable", "lora_request",
)  # fmt: skip
_OUTPUT: Final = ("request_id", "new_token_ids", "finish_reason")
FILES: Final = (SCHEDULER, ASYNC, QUEUE, CACHE, POOL, REQUEST, ENGINE)


def releases() -> dict[tuple[int, ...], str]:
    """Return the addresses of source distributions by version, without pre-releases."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(INDEX, headers=accept)) as answer:
        about, base = json.load(answer), answer.url
    found = {}
    for file in about["files"]:
        if match := re.fullmatch(r"vllm-(\d+)\.(\d+)\.(\d+)\.tar\.gz", file["filename"]):
            found[tuple(map(int, match.groups()))] = urljoin(base, file["url"])
    return found


def newest(versions: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the newest release of each of the newest minors, newest first."""
    by_minor = {version[:2]: version for version in sorted(versions)}
    return sorted(by_minor.values(), reverse=True)[:MINORS]


def download(url: str) -> dict[str, str]:
    """Return the text of a source distribution's files by path."""
    with urllib.request.urlopen(url) as answer:
        data = io.BytesIO(answer.read())
    found: dict[str, str] = {}
    with tarfile.open(fileobj=data) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if path in FILES and (file := archive.extractfile(member)) is not None:
                found[path] = file.read().decode()
    return found


def missing(files: Mapping[str, str]) -> Iterator[str]:
    """Yield the names that are gone from the files, or changed."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    absent = [path for path in FILES if path not in trees]
    yield from absent
    if absent:
        return
    scheduler = _class(trees[SCHEDULER], "Scheduler")
    yield from _methods(scheduler, "Scheduler", SCHEDULER_NAMES)
    yield from _attributes(scheduler, "Scheduler", ATTRIBUTES)
    read = {
        n.attr for n in ast.walk(_method(scheduler, "schedule")) if isinstance(n, ast.Attribute)
    }
    yield from (f"the use of {name} in Scheduler.schedule" for name in READ if name not in read)
    bases = [base.id for base in _class(trees[ASYNC], "AsyncScheduler").bases
             if isinstance(base, ast.Name)]  # fmt: skip
    if "Scheduler" not in bases:
        yield "AsyncScheduler as a subclass of Scheduler"
    yield from _methods(_class(trees[CACHE], "KVCacheManager"), "KVCacheManager", CACHE_NAMES)
    yield from _methods(_class(trees[POOL], "BlockPool"), "BlockPool", {"get_num_free_blocks": ()})
    if "create_request_queue" not in _defined(trees[QUEUE].body):
        yield "create_request_queue"
    yield from _attributes(_class(trees[REQUEST], "Request"), "Request", _REQUEST)
    states = ("RUNNING", "PREEMPTED", "FINISHED_ERROR")
    yield from _attributes(_class(trees[REQUEST], "RequestStatus"), "RequestStatus", states)
    yield from _attributes(_class(trees[ENGINE], "EngineCoreOutput"), "EngineCoreOutput", _OUTPUT)
    yield from _attributes(_class(trees[ENGINE], "FinishReason"), "FinishReason", ("ERROR",))


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return ast.ClassDef(name, bases=[], keywords=[], body=[], decorator_list=[])


def _method(kind: ast.ClassDef, name: str) -> ast.AST:
    found = [n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found[-1] if found else ast.Pass()


def _methods(kind: ast.ClassDef, owner: str, names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name, arguments in names.items():
        method = _method(kind, name)
        if not isinstance(method, ast.FunctionDef):
            yield f"{owner}.{name}"
            continue
        given = [each.arg for each in method.args.args[1:]]
        if given[: len(arguments)] != list(arguments):
            wanted = ", ".join(arguments)
            yield f"{owner}.{name}({wanted}), which is now ({', '.join(given)})"


def _attributes(kind: ast.ClassDef, owner: str, names: Sequence[str]) -> Iterator[str]:
    known = set(_defined(kind.body))
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            known.add(node.attr)
    yield from (f"{owner}.{name}" for name in names if name not in known)


def _defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))


def main() -> int:
    """Print what is gone; return 1 if anything is."""
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    found: dict[str, dict[str, str]] = {}
    if given and Path(given).is_dir():
        found[given] = {path: (Path(given) / path).read_text() for path in FILES
                        if (Path(given) / path).is_file()}  # fmt: skip
    else:
        known = releases()
        wanted = [tuple(map(int, given.split(".")))] if given else newest(known)
        if unknown := [version for version in wanted if version not in known]:
            print(f"vLLM has no source distribution of {unknown}", file=sys.stderr)
            return 2
        found = {".".join(map(str, each)): download(known[each]) for each in wanted}
    bad = False
    for version, files in found.items():
        gone = list(missing(files))
        bad |= bool(gone)
        said = f"gone are {'; '.join(gone)}" if gone else "every name is there"
        print(f"vLLM {version}: {said}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
