"""Workloads as one line of text, for the command line.

::

    FILE                                     a trace; its format is recognised
    azure:FILE?speedup=2&scale=0.25          the same; an error for another format
    mooncake:FILE?unit=s&block=16            stamps in seconds, 16 tokens per hash
    lengths:FILE?rate=5&cv=2&n=1000          lengths drawn from any trace, new arrival times
    synthetic:rate=10,cv=4,prompt=lognormal(1020,1.2),output=fixed(128),n=10000
    clients:rate=10,clients=50,skew=1,spread=0.8,prompt=fixed(500),output=fixed(50),n=10000

Options are separated by ``,`` or ``&``; docs/understand/simulator.md explains each. Seconds may be
written ``0.5``, ``0.5s`` or ``500ms``.

This module does not know how arrivals are simulated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from paceline.sim.arrival import Arrival
from paceline.sim.workload import arrivals as times
from paceline.sim.workload import lengths, shaping
from paceline.sim.workload.base import Workload, WorkloadError
from paceline.sim.workload.traces import MOONCAKE_BLOCK, open_trace, read_lengths

__all__ = ["open_workload", "parse_classes", "parse_lengths", "parse_seconds"]

_log = logging.getLogger(__name__)

_TRACES = ("azure", "burstgpt", "arena", "mooncake", "bailian", "recording", "trace")
_GENERATED = ("lengths", "synthetic", "clients")
_KINDS = (*_TRACES, *_GENERATED)


def open_workload(spec: str, *, seed: int = 0) -> Workload:
    """Return the workload that ``spec`` describes; equal specs and seeds give equal arrivals.

    Raises:
        WorkloadError: an unknown kind or option, a value out of range, or a file that does not
            exist or has another format. Rows are checked when they are read.
    """
    kind, body = _kind(spec)
    path: Path | None = None
    text = body
    if kind not in ("synthetic", "clients"):
        name, _, text = body.partition("?")
        path = Path(name)
    options = _Options(spec, text)
    prefix_block = MOONCAKE_BLOCK
    start: Callable[[], Iterator[Arrival]]
    if kind in _TRACES:
        assert path is not None
        trace = open_trace(path, unit=options.text("unit"), block=options.whole("block"))
        if kind not in ("trace", trace.format):
            raise WorkloadError(f"{spec}: {path} is in {trace.format} format, not {kind}")
        if trace.timeless:
            raise WorkloadError(
                f"{spec}: {path} has lengths only; say lengths:{path}?rate=... for arrival times"
            )
        if doubt := trace.doubt():
            _log.warning("%s: %s: unit= says which", path, doubt)
        start, prefix_block = trace.arrivals, trace.prefix_block
    elif kind == "lengths":
        assert path is not None
        pairs = read_lengths(path)
        moments = _moments(options)
        start = partial(_drawn, moments, pairs, seed)
    elif kind == "synthetic":
        moments = _moments(options)
        prompt, output = options.lengths("prompt"), options.lengths("output")
        start = partial(_synthetic, moments, prompt, output, seed)
    else:
        number = options.whole("clients")
        clients = times.draw_clients(
            10 if number is None else number,
            rate=_positive(options, "rate"),
            skew=options.number("skew", 1.0),
            cv=options.number("cv", 1.0),
            cv_spread=options.number("cv_spread", 0.5),
            prompt=options.lengths("prompt"),
            output=options.lengths("output"),
            spread=options.number("spread", 0.5),
            seed=seed,
        )
        start = partial(times.client_arrivals, clients, seed)
    if kind in _GENERATED and not options.names.keys() & {"n", "seconds"}:
        raise WorkloadError(f"{spec}: would never end; say n=REQUESTS or seconds=SECONDS")
    shape = _Shape.read(options)
    options.refuse_rest()
    # wrong values are refused now, not when the first arrival is read
    next(iter(shape.apply(start, seed)), None)
    block = max(1, round(prefix_block * shape.prompt_scale))
    return Workload(spec, block, partial(shape.apply, start, seed))


def _kind(spec: str) -> tuple[str, str]:
    kind, colon, body = spec.partition(":")
    if colon and kind in _KINDS:
        return kind, body
    if Path(spec.partition("?")[0]).exists():
        return "trace", spec
    raise WorkloadError(
        f"{spec!r} is neither a file nor one of {', '.join(k + ':...' for k in _KINDS)}; "
        "for example synthetic:rate=10,prompt=fixed(500),output=fixed(50),n=1000"
    )


# ---------------------------------------------------------------------- generated


def _moments(options: _Options) -> Callable[[Random], Iterator[float]]:
    rate = _positive(options, "rate")
    cv = options.number("cv", 1.0)
    swing = options.number("swing", 0.0)
    if "period" in options.names and not swing:
        raise WorkloadError(f"{options.spec}: period= needs swing= above 0")
    period = options.seconds("period", 86_400.0)
    if swing:
        return partial(times.diurnal, rate, cv, swing=swing, period=period)
    return partial(times.renewal, rate, cv)


def _positive(options: _Options, name: str) -> float:
    value = options.number(name, None)
    if not value > 0:
        raise WorkloadError(f"{options.spec}: {name} must be positive, got {value:g}")
    return value


def _synthetic(
    moments: Callable[[Random], Iterator[float]],
    prompt: lengths.Lengths,
    output: lengths.Lengths,
    seed: int,
) -> Iterator[Arrival]:
    prompts, outputs = Random(f"{seed}/prompts"), Random(f"{seed}/outputs")
    for at in moments(Random(f"{seed}/times")):
        yield Arrival(at, prompt.sample(prompts), output.sample(outputs))


def _drawn(
    moments: Callable[[Random], Iterator[float]], pairs: list[tuple[int, int]], seed: int
) -> Iterator[Arrival]:
    """Yield arrivals whose prompt and output lengths come from one row: rows are drawn."""
    rng = Random(f"{seed}/rows")
    for at in moments(Random(f"{seed}/times")):
        yield Arrival(at, *pairs[rng.randrange(len(pairs))])


# ---------------------------------------------------------------------- shaping


@dataclass(frozen=True, slots=True)
class _Shape:
    """Changes that any workload may have, applied in this order."""

    prompt_scale: float
    output_scale: float
    jitter: float
    speedup: float
    number: int | None
    seconds: float | None
    classes: tuple[shaping.SloMix, ...]
    tenants: tuple[tuple[str, float], ...]
    # number of them, and the exponent of how often each is asked for; None: none
    adapters: int | None
    zipf: float

    @classmethod
    def read(cls, options: _Options) -> _Shape:
        both = options.number("scale", 1.0)
        return cls(
            prompt_scale=both * options.number("prompt_scale", 1.0),
            output_scale=both * options.number("output_scale", 1.0),
            jitter=options.seconds("jitter", 0.0),
            speedup=options.number("speedup", 1.0),
            number=options.whole("n"),
            seconds=options.seconds("seconds", 0.0) or None,
            classes=parse_classes(options.text("classes")),
            tenants=_parse_tenants(options.text("tenants")),
            adapters=(adapters := options.whole("adapters")),
            # without adapters it is an option that nothing reads
            zipf=0.0 if adapters is None else options.number("zipf", 1.1),
        )

    def apply(self, start: Callable[[], Iterator[Arrival]], seed: int) -> Iterator[Arrival]:
        stream = start()
        if self.jitter:
            stream = shaping.jitter(stream, self.jitter, seed)
        if (self.prompt_scale, self.output_scale) != (1.0, 1.0):
            stream = shaping.scale(stream, self.prompt_scale, self.output_scale)
        if self.speedup != 1.0:
            stream = shaping.speed_up(stream, self.speedup)
        if self.classes:
            stream = shaping.with_classes(stream, self.classes, seed)
        if self.tenants:
            stream = shaping.with_tenants(stream, self.tenants, seed)
        if self.adapters is not None:
            stream = shaping.with_adapters(stream, self.adapters, self.zipf, seed)
        return shaping.limit(stream, number=self.number, seconds=self.seconds)


def parse_classes(text: str) -> tuple[shaping.SloMix, ...]:
    """Parse ``chat(3,ttft=0.5,tpot=50ms)+batch(1,deadline=60)``: name(weight, targets)."""
    mixes = []
    for name, arguments in _calls(text):
        values = dict(argument.partition("=")[::2] for argument in arguments[1:])
        if len(values) < len(arguments) - 1:
            raise WorkloadError(f"class {name!r}: one of {', '.join(values)} is given twice")
        unknown = values.keys() - {"ttft", "tpot", "deadline", "priority"}
        if not arguments or unknown:
            wrong = f"unknown {', '.join(sorted(unknown))}" if unknown else "no weight"
            raise WorkloadError(
                f"class {name!r}: {wrong}; write NAME(WEIGHT,ttft=S,tpot=S,deadline=S,priority=N)"
            )
        priority = values.pop("priority", "0")
        targets = {key: parse_seconds(value) for key, value in values.items()}
        weight = _number(arguments[0], f"weight of class {name!r}")
        rank = _whole_number(priority, f"priority of class {name!r}")
        mixes.append(
            shaping.SloMix(
                name,
                weight,
                ttft=targets.get("ttft"),
                tpot=targets.get("tpot"),
                deadline=targets.get("deadline"),
                priority=rank,
            )
        )
    return tuple(mixes)


def _parse_tenants(text: str) -> tuple[tuple[str, float], ...]:
    """Parse ``a(3)+b(1)``."""
    tenants = []
    for name, arguments in _calls(text):
        if len(arguments) != 1:
            raise WorkloadError(f"tenant {name!r}: write NAME(WEIGHT), for example a(3)+b(1)")
        tenants.append((name, _number(arguments[0], f"weight of tenant {name!r}")))
    return tuple(tenants)


def _calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Split ``name(a,b)+name(c)`` into names and arguments; every name occurs once."""
    names: set[str] = set()
    for part in text.split("+") if text else ():
        match = re.fullmatch(r"\s*([\w.-]+)\(([^()]*)\)\s*", part)
        if match is None:
            raise WorkloadError(f"{part!r} is not NAME(...); an example: chat(3,ttft=0.5)+batch(1)")
        if match[1] in names:
            raise WorkloadError(f"{match[1]!r} is given twice in {text!r}")
        names.add(match[1])
        yield match[1], [argument.strip() for argument in match[2].split(",")]


# ---------------------------------------------------------------------- options


def parse_lengths(text: str) -> lengths.Lengths:
    """Parse ``fixed(128)`` or ``128``, ``uniform(1,9)``, ``lognormal(MEDIAN,SIGMA)``,
    ``bimodal(SHORT,LONG,SHARE)``, ``empirical(FILE,prompt)`` or ``empirical(FILE,output)``.

    Raises:
        WorkloadError: any other text.
    """
    match = re.fullmatch(r"\s*(\w+)\((.*)\)\s*", text)
    if match is None:
        return lengths.Fixed(_whole_number(text, "length"))
    name, arguments = match[1], _split(match[2])
    what = f"{name} length"
    if name == "fixed" and len(arguments) == 1:
        return lengths.Fixed(_whole_number(arguments[0], what))
    if name == "uniform" and len(arguments) == 2:
        return lengths.Uniform(*(_whole_number(a, what) for a in arguments))
    if name == "lognormal" and len(arguments) == 2:
        return lengths.Lognormal(*(_number(a, what) for a in arguments))
    if name == "bimodal" and len(arguments) == 3:
        short, long = (parse_lengths(a) for a in arguments[:2])
        return lengths.Bimodal(short, long, _number(arguments[2], "share of short lengths"))
    if name == "empirical" and len(arguments) == 2 and arguments[1] in ("prompt", "output"):
        column = ("prompt", "output").index(arguments[1])
        return lengths.Empirical([pair[column] for pair in read_lengths(Path(arguments[0]))])
    raise WorkloadError(
        f"{text!r} is not a length; known are 128, fixed(128), uniform(1,9), "
        "lognormal(MEDIAN,SIGMA), bimodal(SHORT,LONG,SHARE) and empirical(FILE,prompt|output)"
    )


def parse_seconds(text: str) -> float:
    """Parse ``0.5``, ``0.5s``, ``500ms`` or ``20us``."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+?)\s*(us|ms|s)?\s*", text)
    if match is None:
        raise WorkloadError(f"{text!r} is not a time; write 0.5, 0.5s, 500ms or 20us")
    return _number(match[1], "time") / {"us": 1e6, "ms": 1e3}.get(match[2], 1.0)


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise WorkloadError(f"{what}: {text!r} is not a number") from None
    if not abs(value) < 1e15:
        raise WorkloadError(f"{what}: {text!r} is not finite")
    return value


def _whole_number(text: str, what: str) -> int:
    value = _number(text, what)
    if value != int(value):
        raise WorkloadError(f"{what}: {text!r} is not a whole number")
    return int(value)


def _split(text: str) -> list[str]:
    """Split at ``,`` and ``&`` outside parentheses."""
    parts, depth, last = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter in ",&" and depth == 0:
            parts.append(text[last:index])
            last = index + 1
    parts.append(text[last:])
    return [part.strip() for part in parts if part.strip()]


class _Options:
    """``key=value`` pairs; one that no code has read is an error."""

    def __init__(self, spec: str, text: str) -> None:
        self.spec = spec
        self.names: dict[str, str] = {}
        self._used: set[str] = set()
        for part in _split(text):
            name, equals, value = part.partition("=")
            if not equals or not value:
                raise WorkloadError(f"{spec}: {part!r} is not an option; write NAME=VALUE")
            if name in self.names:
                raise WorkloadError(f"{spec}: {name} is given twice")
            self.names[name] = value

    def text(self, name: str) -> str:
        self._used.add(name)
        return self.names.get(name, "")

    def number(self, name: str, default: float | None) -> float:
        text = self.text(name)
        if text:
            return _number(text, f"{self.spec}: {name}")
        if default is None:
            raise WorkloadError(f"{self.spec}: {name}= is missing")
        return default

    def whole(self, name: str) -> int | None:
        text = self.text(name)
        return _whole_number(text, f"{self.spec}: {name}") if text else None

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        if not text:
            return default
        value = parse_seconds(text)
        if not value > 0:
            raise WorkloadError(f"{self.spec}: {name} must be positive, got {text}")
        return value

    def lengths(self, name: str) -> lengths.Lengths:
        text = self.text(name)
        if not text:
            raise WorkloadError(f"{self.spec}: {name}= is missing, for example {name}=fixed(128)")
        return parse_lengths(text)

    def refuse_rest(self) -> None:
        unknown = sorted(self.names.keys() - self._used)
        if unknown:
            raise WorkloadError(
                f"{self.spec}: unknown option {', '.join(unknown)}; known here are "
                f"{', '.join(sorted(self._used))}"
            )
