"""``paceline pull``: download a model before it is needed."""

from __future__ import annotations

import argparse

from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.options import DEFAULT_MODEL, resolve_path
from paceline.cli.terminal.table import table

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline pull                          the default model
  paceline pull --list                   short names
  paceline pull qwen3-0.6b               one of them
  paceline pull org/name                 safetensors, or the GGUF file of the usual kind
  paceline pull org/name:Q8_0            the GGUF file of that kind, with all its parts
  paceline pull org/name/file.gguf       that file

The default model goes to $PACELINE_CACHE (default ~/.cache/paceline), what is on the hub to Hugging
Face's cache (HF_HUB_CACHE). Each file is checked against the digest that the hub states; an
interrupted download continues where it stopped. HF_ENDPOINT names a mirror, HF_TOKEN opens gated
models. Files that are here already are kept, unless the hub has a newer version.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model",
        description="Download a model and check its files before it can be used.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"a short name, or one on the hub such as org/name:Q4_K_M; default {DEFAULT_MODEL}",
    )
    parser.add_argument("--list", action="store_true", help="list the short names and stop")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    name, path = resolve_path(args.model, refresh=True)
    print(f"{name}: {path}")
    return 0


def _list() -> int:
    from paceline.checkpoints.hub.cache import HubCache
    from paceline.checkpoints.hub.catalogue import ALIASES, catalogue
    from paceline.checkpoints.hub.names import parse_hub_name
    from paceline.checkpoints.hub.resolve import find_local

    rows = [("NAME", "MODEL", "SIZE", "IFEVAL", "LICENCE", "TRIED", "HERE", "SOURCE")]
    for alias in ALIASES.values():
        here = "yes" if find_local(alias.name) else "no"
        size = f"{alias.gguf_bytes / 1e6:.0f} MB"
        source = f"package {alias.package} {alias.version}"
        score = _percent(alias.ifeval)
        rows.append((alias.name, alias.title, size, score, alias.licence, "yes", here, source))
    for row in catalogue().values():
        reference = parse_hub_name(row.hub)
        there = reference and HubCache.of(reference.repo).checked(reference.within)
        rows.append(
            (
                row.name,
                row.title,
                row.parameters,
                _percent(row.ifeval),
                f"{row.licence}, gated" if row.gated else row.licence,
                "yes" if row.tried else "no",
                "yes" if there else "no",
                row.source,
            )
        )
    print(table(rows))
    print(
        "\nIFEVAL: percent of instructions followed, as the cards of SmolLM2 and SmolLM3 state it "
        "of the model in 16 bits, without thinking.\nTRIED: was served and its answers were read. "
        "Others load if docs/use/models.md lists their architecture."
    )
    return 0


def _percent(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"
