"""The model that a name on the hub stands for, given the files of its repository.

::

    org/repo                the safetensors folder; without one, PREFERRED's first kind of GGUF file
    org/repo:Q4_K_M         the GGUF file of that kind
    org/repo/file.gguf      that file
    org/repo/folder         as org/repo, for a folder inside
    org/repo/folder:Q8_0    as org/repo:Q8_0, for a folder inside

A split file (``-00001-of-00003.gguf``) stands for all its parts, whichever one is named. Fetching
is not known here: a repository is the names of its files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal

from paceline.errors import CheckpointError

__all__ = [
    "PREFERRED",
    "HubReference",
    "Selection",
    "parse_hub_name",
    "parts_of",
    "quant_of",
    "select",
]

# files of a checkpoint; no pickles, no Python, and not the second copy in some repositories
_FOLDER_FILES: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "model.safetensors.index.json", "model*.safetensors",
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
)  # fmt: skip
# files of sentence-transformers' modules, in a folder each
_MODULE_FILES: Final = (
    "[0-9]_Pooling/config.json", "[0-9]_LogitScore/config.json",
    "[0-9]_Dense/config.json", "[0-9]_Dense/model.safetensors",
)  # fmt: skip
# kinds of GGUF files to prefer where none is named: the usual compromise of size and loss first
PREFERRED: Final = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "BF16", "F16")
# files that are no language model: an image projector, a quantiser's statistics
_BESIDE: Final = ("mmproj", "imatrix")
_WORD: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
# a folder or file in the repository may follow its name, and may use more characters
_NAME: Final = re.compile(
    rf"(?:https://huggingface\.co/|hf\.co/)?(?P<repo>{_WORD}/{_WORD})"
    r"(?P<path>(?:/[A-Za-z0-9_][A-Za-z0-9._+ -]{0,250}){0,8})(?::(?P<tag>[A-Za-z0-9_.-]{1,40}))?",
    re.ASCII,
)
_PART: Final = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf\Z", re.IGNORECASE)
_QUANT: Final = re.compile(
    r"(?:\A|[-._])((?:UD-)?(?:(?:IQ|TQ|Q)[0-9](?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|MXFP4(?:_MOE)?|NVFP4))\Z",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A parsed name."""

    # "org/name"
    repo: str
    # a folder or file inside the repository; "": its root
    path: str = ""
    # a kind of GGUF file such as "Q4_K_M"; "": none was named
    tag: str = ""
    # branch, tag or commit of the repository
    revision: str = "main"

    @property
    def within(self) -> str:
        """The part inside the repository, as one word; "": the repository's default."""
        inside = f"{self.path}:{self.tag}" if self.tag else self.path
        return inside if self.revision == "main" else f"{inside}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Files of a repository that make one model."""

    kind: Literal["hf", "gguf"]
    # path to open: the folder of the files ("" for the root), or the first part of a GGUF file
    entry: str
    files: tuple[str, ...]


def parse_hub_name(name: str) -> HubReference | None:
    """Parse a name; None: it cannot be a name on the hub. The caller has already looked for a
    local file or folder of that name, which takes precedence."""
    match = _NAME.fullmatch(name)
    # org/model.gguf is a missing file: no repository's name ends so
    if match is None or (not match["path"] and match["repo"].lower().endswith(".gguf")):
        return None
    return HubReference(match["repo"], match["path"].removeprefix("/"), match["tag"] or "")


def quant_of(name: str) -> str:
    """Return the kind at the end of a GGUF file's name, in capitals ("Q4_K_M"); "" without one."""
    stem = _PART.sub("", name.rpartition("/")[2])
    match = _QUANT.search(re.sub(r"\.gguf\Z", "", stem, flags=re.IGNORECASE))
    return match[1].upper() if match else ""


def parts_of(name: str) -> tuple[str, ...]:
    """Return all parts of a split file, in order, by the name of any; else the name alone."""
    match = _PART.search(name)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        return (name,)
    count, stem = int(match[2]), name[: match.start()]
    suffix = name[-len(".gguf") :]
    return tuple(f"{stem}-{each:05d}-of-{match[2]}{suffix}" for each in range(1, count + 1))


def select(reference: HubReference, files: Iterable[str]) -> Selection:
    """Select the model that ``reference`` names among the files of its repository.

    Raises CheckpointError that lists the alternatives.
    """
    names = sorted(files)
    where = f"{reference.repo}/{reference.path}" if reference.path else reference.repo
    if reference.path.lower().endswith(".gguf"):
        if reference.tag:
            raise CheckpointError(f"{where} is a file: leave :{reference.tag} out")
        return _file(reference, names)
    if reference.path in names:
        raise CheckpointError(
            f"{where} is a file that is no model by itself: name a .gguf file, or the folder"
        )
    inside = f"{reference.path}/" if reference.path else ""
    here = [name for name in names if name.startswith(inside)]
    if not here:
        folders = sorted({name.rpartition("/")[0] for name in names} - {""})
        raise CheckpointError(
            f"{reference.repo} has no {reference.path}; "
            + (f"its folders are {_list(folders)}" if folders else "it has no folders")
        )
    if not reference.tag and (found := _folder(inside, here)):
        return Selection("hf", reference.path, found)
    models = _models(here)
    if not models:
        raise CheckpointError(f"{where} has nothing to serve: {_what_there_is(here)}")
    return _gguf(_choose(where, reference.tag, models), names, reference.repo)


def _file(reference: HubReference, names: Sequence[str]) -> Selection:
    if reference.path in names:
        return _gguf(reference.path, names, reference.repo)
    there = [each[0] for each in _models(names).values()]
    raise CheckpointError(
        f"{reference.repo} has no file {reference.path}; "
        + (f"there are {_list(there)}" if there else _what_there_is(names))
    )


def _folder(inside: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the files of a Hugging Face folder, () where it has no safetensors."""
    found = tuple(
        name
        for name in names
        if any(
            fnmatchcase(name[len(inside) :], pattern)
            for pattern in (_MODULE_FILES if "/" in name[len(inside) :] else _FOLDER_FILES)
        )
    )
    weights = any(name.endswith(".safetensors") for name in found)
    return found if weights and f"{inside}config.json" in found else ()


def _models(names: Sequence[str]) -> dict[str, list[str]]:
    """Group GGUF files by name without ``-00001-of-00003``, first parts first."""
    models: dict[str, list[str]] = {}
    for name in names:
        base = name.rpartition("/")[2].lower()
        if base.endswith(".gguf") and not any(word in base for word in _BESIDE):
            models.setdefault(_PART.sub("", name), []).append(name)
    return models


def _choose(where: str, tag: str, models: dict[str, list[str]]) -> str:
    """Return one part of the chosen model."""
    kinds: dict[str, list[str]] = {}
    for parts in models.values():
        kinds.setdefault(quant_of(parts[0]), []).append(parts[0])
    wanted = tag.upper()
    if tag and wanted not in kinds:
        there = sorted(kind for kind in kinds if kind)
        offer = f"there are {_list(there)}" if there else _list([p[0] for p in models.values()])
        raise CheckpointError(f"{where} has no {tag}; {offer}")
    if not tag:
        if len(models) == 1:
            return next(iter(models.values()))[0]
        wanted = next((kind for kind in PREFERRED if kind in kinds), "")
        if not wanted:
            offer = _list([parts[0] for parts in models.values()])
            raise CheckpointError(f"{where} has several GGUF files, name one: {offer}")
    if len(kinds[wanted]) > 1:
        raise CheckpointError(
            f"{where} has several GGUF files of kind {wanted}, name one: {_list(kinds[wanted])}"
        )
    return kinds[wanted][0]


def _gguf(name: str, names: Sequence[str], repo: str) -> Selection:
    parts = parts_of(name)
    if missing := sorted(set(parts) - set(names)):
        raise CheckpointError(f"{repo} lacks parts of a split file: {_list(missing)}")
    return Selection("gguf", parts[0], parts)


def _what_there_is(names: Sequence[str]) -> str:
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        return (
            f"only pickled weights ({_list(pickled)}), which may run any code when they are read. "
            "Look for its safetensors or GGUF version"
        )
    return f"neither safetensors with a config.json nor GGUF files, but {_list(names)}"


def _list(names: Sequence[str], most: int = 24) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
