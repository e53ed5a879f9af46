"""A scheduling policy from another package is chosen by name like a built-in one."""

from importlib.metadata import EntryPoint

import pytest

from paceline.cli.flags import plugins
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core
from paceline.core.policies import POLICIES, FcfsPolicy
from paceline.core.request import Request
from paceline.errors import ConfigError


class LifoPolicy(FcfsPolicy):
    """Last come, first served."""

    def key(self, request: Request) -> float:
        return -request.arrival_time


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (
        EntryPoint("lifo", f"{__name__}:LifoPolicy", plugins.GROUP),
        EntryPoint("broken", f"{__name__}:NoSuchPolicy", plugins.GROUP),
        EntryPoint("fcfs", f"{__name__}:LifoPolicy", plugins.GROUP),
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    monkeypatch.setattr(plugins, "POLICIES", POLICIES)
    for name in ("lifo", "broken"):
        monkeypatch.delitem(POLICIES, name, raising=False)


def settings(policy: str) -> EngineSettings:
    return EngineSettings.of(model_name="null", model_path=None, backend="null", policy=policy)


@pytest.mark.usefixtures("offered")
def test_an_offered_policy_is_used() -> None:
    assert "lifo" in plugins.policy_names()
    core, _ = build_core(settings("lifo"))
    try:
        assert type(core.scheduler.policy).__name__ == "LifoPolicy"
    finally:
        core.close()
        POLICIES.pop("lifo")


@pytest.mark.usefixtures("offered")
def test_a_built_in_name_cannot_be_taken_over() -> None:
    core, _ = build_core(settings("fcfs"))
    try:
        assert type(core.scheduler.policy) is FcfsPolicy
    finally:
        core.close()


@pytest.mark.usefixtures("offered")
def test_a_broken_one_says_whose_it_is() -> None:
    with pytest.raises(ConfigError, match=r"'broken' \(.*NoSuchPolicy\)"):
        build_core(settings("broken"))
