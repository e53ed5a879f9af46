"""Write the fields of the Kubernetes objects that ``deploy/kubernetes/`` uses, for the test that
checks the manifests.

    pip install kubernetes==37.0.2 pyyaml; python scripts/kubernetes_types.py

The client package is generated from the API's OpenAPI description. Of each type that a manifest
touches, all fields are written: name -> [type, whether it is required].
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes import client

ROOT: Final = Path(__file__).parents[1]
OUT: Final = ROOT / "tests" / "deploy" / "kubernetes_types.json"
_KINDS: Final = {
    "apps/v1 Deployment": "V1Deployment",
    "v1 ConfigMap": "V1ConfigMap",
    "v1 PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "v1 Service": "V1Service",
    "policy/v1 PodDisruptionBudget": "V1PodDisruptionBudget",
}


def fields_of(name: str) -> dict[str, list[Any]]:
    """Return the fields of a type as manifests spell them."""
    found = getattr(client, name)
    required = {
        each.serialization_alias or name
        for name, each in found.model_fields.items()
        if each.is_required()
    }
    return {
        found.attribute_map[field]: [kind, found.attribute_map[field] in required]
        for field, kind in found.openapi_types.items()
    }


def visit(value: Any, kind: str, types: dict[str, Any]) -> None:
    """Add the types of a value and of what it holds."""
    if inner := re.fullmatch(r"List\[(.*)\]", kind):
        for each in value:
            visit(each, inner[1], types)
    elif inner := re.fullmatch(r"Dict\[str, (.*)\]", kind):
        for each in value.values():
            visit(each, inner[1], types)
    elif kind.startswith("V1"):
        types.setdefault(kind, fields_of(kind))
        for name, each in value.items():
            visit(each, types[kind][name][0], types)


def _lines(found: dict[str, Any]) -> str:
    """Return JSON with a line for each type."""
    parts = [f' "kinds": {json.dumps(found["kinds"])},\n "types": {{\n']
    rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found["types"].items())]
    return "{\n" + parts[0] + ",\n".join(rows) + "\n }\n}\n"


def main() -> None:
    """Write the file."""
    types: dict[str, Any] = {}
    for path in sorted((ROOT / "deploy/kubernetes").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            visit(document, _KINDS[f"{document['apiVersion']} {document['kind']}"], types)
    OUT.write_text(_lines({"kinds": _KINDS, "types": types}))
    print(f"{OUT.relative_to(ROOT)}: {len(types)} types")


if __name__ == "__main__":
    main()
