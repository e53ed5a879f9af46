"""Metrics of several models together: loads, memory and turns. Those of each model's requests carry
its name and stand with the others of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.models.model import State
from paceline.engine.models.page import TurnUse
from paceline.engine.models.states import ModelStates

__all__ = ["ModelCollector"]


class ModelCollector(Collector):
    """Reads the books when metrics are rendered.

    Args:
        turns: returns the use of turns by name of the model.
    """

    def __init__(
        self, states: ModelStates, turns: Callable[[], Mapping[str, TurnUse]] | None
    ) -> None:
        self._states, self._turns = states, turns

    def collect(self) -> Iterator[Metric]:
        states = self._states
        loads = CounterMetricFamily(
            "paceline:model_loads", "Loads of models, by outcome.", labels=["outcome"]
        )
        for outcome, count in states.loaded.items():
            loads.add_metric([outcome], count)
        yield loads
        evictions = CounterMetricFamily(
            "paceline:model_evictions", "Models unloaded, by reason.", labels=["reason"]
        )
        for reason, count in states.evictions.items():
            evictions.add_metric([reason], count)
        yield evictions
        yield _gauge("paceline:ledger_memory_bytes", "Memory for models.", states.ledger.memory)
        held = GaugeMetricFamily(
            "paceline:ledger_bytes", "Bytes of models in memory.", labels=["model_name", "kind"]
        )
        for name, account in states.ledger.accounts.items():
            for kind, num_bytes in account.by_kind().items():
                held.add_metric([name, kind], num_bytes)
        yield held
        state = GaugeMetricFamily(
            "paceline:model_state", "1 for the state of a model.", labels=["model_name", "state"]
        )
        leases = GaugeMetricFamily(
            "paceline:model_leases", "Requests that hold a model in memory.", labels=["model_name"]
        )
        waiting = GaugeMetricFamily(
            "paceline:model_waiting", "Requests that await a model.", labels=["model_name"]
        )
        seconds = GaugeMetricFamily(
            "paceline:model_load_seconds", "Duration of the latest load.", labels=["model_name"]
        )
        for model in states.models.values():
            for each in State:
                state.add_metric([model.name, each.value], model.state is each)
            leases.add_metric([model.name], len(model.leases))
            waiting.add_metric([model.name], len(model.waiting))
            seconds.add_metric([model.name], model.load_seconds)
        yield from (state, leases, waiting, seconds)
        if self._turns is not None:
            yield from _of_turns(self._turns())


def _of_turns(uses: Mapping[str, TurnUse]) -> Iterator[Metric]:
    used = CounterMetricFamily(
        "paceline:turn_seconds", "Time in which a model computed.", labels=["model_name"]
    )
    waited = CounterMetricFamily(
        "paceline:turn_wait_seconds", "Time in which others did.", labels=["model_name"]
    )
    overruns = CounterMetricFamily(
        "paceline:turn_overruns", "Turns taken from one that hung.", labels=["model_name"]
    )
    for name, use in uses.items():
        used.add_metric([name], use.used_seconds)
        waited.add_metric([name], use.waited_seconds)
        overruns.add_metric([name], use.overruns)
    yield from (used, waited, overruns)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
