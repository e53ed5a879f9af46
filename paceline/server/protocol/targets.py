"""Targets of a request: ``slo`` in the body, or llm-d's headers.

::

    "slo": "interactive"                                    a class
    "slo": {"ttft_ms": 500, "tpot_ms": 50}                  targets
    "slo": {"class": "batch", "deadline_ms": 600000}        a class with one target changed
    "slo": {"queue_ttl_ms": 30000}                          drop it if not started by then

    x-llm-d-slo-ttft-ms, x-llm-d-slo-tpot-ms                targets that the body does not set
    x-llm-d-inference-ttl                                   drop it if not started by then: "30s"
    x-llm-d-inference-fairness-id                           the tenant

    "service_tier": "flex" | "priority"                     the class batch | interactive
    "safety_identifier", "user", "metadata.user_id"         the tenant, if neither a key nor a
                                                            header names it

The older header names ``x-slo-ttft-ms``, ``x-slo-tpot-ms`` and ``x-gateway-inference-fairness-id``
mean the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from paceline.core.slo import MAX_SECONDS, Slo
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_number, check_string, show
from paceline.server.protocol import schemas
from paceline.server.protocol.schemas import Schema

__all__ = [
    "CALLER_FIELDS",
    "CLASSES",
    "SERVICE_TIERS",
    "named_tenant",
    "parse_service_tier",
    "parse_slo",
    "parse_tenant",
    "slo_schema",
    "with_headers",
]

# targets of a class, unless the request overrides them
CLASSES: Final[Mapping[str, Slo]] = {
    "interactive": Slo(slo_class="interactive", ttft=1.0, tpot=0.1),
    "standard": Slo(slo_class="standard"),
    "batch": Slo(slo_class="batch", best_effort=True),
}

_TARGETS: Final = ("ttft_ms", "tpot_ms", "itl_ms", "deadline_ms", "queue_ttl_ms")
_TTL_HEADER: Final = "x-llm-d-inference-ttl"
# milliseconds per unit of a Go duration such as "1m30s"
_UNITS: Final = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_MAX_TENANT_CHARS: Final = 128
_HEADERS: Final = {
    "ttft_ms": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "tpot_ms": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
}
# fields of OpenAI's bodies that name the caller, the newer one first
CALLER_FIELDS: Final = ("safety_identifier", "user")
# by OpenAI's tier in a request: the tier served, and the class unless slo names one
SERVICE_TIERS: Final[Mapping[str, tuple[str, str | None]]] = {
    "auto": ("default", None),
    "default": ("default", None),
    # a tier that OpenAI sells in advance; no effect here
    "scale": ("default", None),
    "flex": ("flex", "batch"),
    "priority": ("priority", "interactive"),
}
_TENANT_HEADERS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")


def with_headers(body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the body with targets from headers added where it has none."""
    found: dict[str, Any] = {}
    for target, names in _HEADERS.items():
        name = next((name for name in names if name in headers), None)
        if name is not None:
            found[target] = _milliseconds(headers[name], name)
    if _TTL_HEADER in headers:
        found["queue_ttl_ms"] = _duration(headers[_TTL_HEADER])
    if not found:
        return body
    slo = body.get("slo")
    if slo is None:
        slo = {}
    elif type(slo) is str:
        slo = {"class": slo}
    elif type(slo) is not dict:
        # left for the parser of the body, which refuses it with its own message
        return body
    # a null in the body counts as absent
    own = {name: value for name, value in slo.items() if value is not None}
    return body | {"slo": found | own}


def _milliseconds(value: str, name: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidRequestError(
            f"header {name} must be a number of milliseconds, got {show(value)}", name
        ) from None


def _duration(value: str) -> float:
    """Return the milliseconds of a Go duration."""
    parts = _PART.findall(value) if len(value) <= 64 else []
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise InvalidRequestError(
            f"header {_TTL_HEADER} must be a duration such as 30s or 1m30s, got {show(value)}",
            _TTL_HEADER,
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def parse_service_tier(value: Any, name: str, _: object) -> tuple[str, str | None]:
    """Return the tier that the answer names, and the class it stands for or None. Raises
    InvalidRequestError."""
    tier = check_string(value, name, 1, 64)
    if tier not in SERVICE_TIERS:
        raise InvalidRequestError(
            f"{name} must be one of {', '.join(SERVICE_TIERS)}, got {show(tier)}", name
        )
    return SERVICE_TIERS[tier]


def slo_schema(classes: Iterable[str]) -> Schema:
    """Return the schema of ``parse_slo``'s input."""
    target = schemas.nullable(schemas.number(0, MAX_SECONDS * 1e3, above=True))
    named = schemas.string(*classes)
    fields = {"class": schemas.nullable(named), **dict.fromkeys(_TARGETS, target)}
    return {"anyOf": [named, schemas.closed(schemas.record({}, fields))]}


def parse_slo(
    value: Any, classes: Mapping[str, Slo] = CLASSES, tier_class: str | None = None
) -> Slo:
    """Return the targets of one request, with the server's classes. Raises InvalidRequestError.

    Args:
        tier_class: the class that the request's service tier stands for.
    """
    if value is None:
        return classes[tier_class or "standard"]
    if type(value) is str:
        value = {"class": value}
    if type(value) is not dict:
        raise InvalidRequestError(
            f"slo must be a class name or an object, got {show(value)}", "slo"
        )
    unknown = sorted(set(value) - {"class", *_TARGETS})
    if unknown:
        raise InvalidRequestError(
            f"slo has unknown fields {', '.join(map(show, unknown[:4]))}; it knows class, "
            f"{', '.join(_TARGETS)}",
            "slo",
        )
    name = value.get("class")
    if name is not None and tier_class is not None:
        raise InvalidRequestError(
            f"slo names class {show(name)} and service_tier stands for {tier_class}: give one of "
            "the two",
            "service_tier",
        )
    name = (tier_class or "standard") if name is None else check_string(name, "slo.class", 1, 64)
    if name not in classes:
        raise InvalidRequestError(
            f"slo.class must be one of {', '.join(classes)}, got {show(name)}", "slo.class"
        )
    base = classes[name]
    seconds = {
        target: None
        if value.get(target) is None
        else check_number(value[target], f"slo.{target}") / 1e3
        for target in _TARGETS
    }
    return Slo(
        slo_class=name,
        best_effort=base.best_effort,
        ttft=base.ttft if seconds["ttft_ms"] is None else seconds["ttft_ms"],
        tpot=base.tpot if seconds["tpot_ms"] is None else seconds["tpot_ms"],
        itl=base.itl if seconds["itl_ms"] is None else seconds["itl_ms"],
        deadline=base.deadline if seconds["deadline_ms"] is None else seconds["deadline_ms"],
        queue_ttl=base.queue_ttl if seconds["queue_ttl_ms"] is None else seconds["queue_ttl_ms"],
    )


def parse_tenant(headers: Mapping[str, str]) -> str:
    """Return the tenant that a header names, else "". Raises InvalidRequestError."""
    value = next((headers[name] for name in _TENANT_HEADERS if name in headers), "")
    if len(value) > _MAX_TENANT_CHARS:
        raise InvalidRequestError(
            f"header {_TENANT_HEADERS[0]} may have {_MAX_TENANT_CHARS} characters, "
            f"got {len(value)}",
            _TENANT_HEADERS[0],
        )
    return value


def named_tenant(body: Any, *names: str) -> str:
    """Return the tenant from the first of these fields that holds a name; "" if none does, or
    ``body`` is not an object. A long name is replaced by its digest."""
    for value in map(body.get, names) if type(body) is dict else ():
        if type(value) is str and value:
            if len(value) <= _MAX_TENANT_CHARS:
                return value
            return "sha256:" + hashlib.sha256(value.encode(errors="replace")).hexdigest()[:32]
    return ""
