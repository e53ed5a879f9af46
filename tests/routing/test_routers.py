import pytest

from paceline.errors import ConfigError
from paceline.routing import LeastOutstanding, PrefixAffinity, RoundRobin, make_router


def test_routers() -> None:
    turn = RoundRobin()
    assert [turn.choose((), [0.0] * 3) for _ in range(4)] == [0, 1, 2, 0]
    assert LeastOutstanding().choose((), [5.0, 2.0, 2.0]) == 1
    sticky = PrefixAffinity(spread=100.0, ratio=1.5)
    chat = (1, 2, 3)
    assert sticky.choose(chat, [9.0, 0.0, 9.0]) == 1
    # a longer conversation follows, though that engine is no longer the least loaded
    assert sticky.choose((1, 2, 3, 4), [0.0, 90.0, 0.0]) == 1
    # until it is overloaded
    assert sticky.choose(chat, [10.0, 500.0, 0.0]) == 2
    # the same piece elsewhere in a prompt is another prefix
    assert sticky.choose((3,), [0.0, 5.0, 0.0]) == 0
    with pytest.raises(ConfigError, match="unknown router 'x'; known: least-outstanding"):
        make_router("x")


def test_a_router_forgets_the_prefixes_used_longest_ago() -> None:
    sticky = PrefixAffinity(memory=2)
    for piece in (1, 2, 3):
        sticky.choose((piece,), [1.0, 0.0])
    assert sticky.choose((1,), [0.0, 1.0]) == 0
    assert sticky.choose((3,), [0.0, 1.0]) == 1
