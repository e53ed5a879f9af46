"""The model that frames rebuild is the scheduler's state, after every step and whatever happens."""

from __future__ import annotations

import random

import pytest

from paceline.core.policies import POLICIES
from paceline.core.slo import Slo
from paceline.timeline.events import Done, End, Keyframe, Kind, Plan, State
from tests.driving import make_request
from tests.timeline.vectors import guessing
from tests.timeline.watching import Watched


def kinds(watched: Watched) -> set[int]:
    return {e.kind for f in watched.frames if isinstance(f, Plan) for e in f.events}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_and_recomputation(depth: int) -> None:
    watched = Watched(num_blocks=12, depth=depth)
    requests = [make_request(f"r{i}", 10, 16, arrival=100.0) for i in range(4)]
    watched.add(*requests)
    watched.run()
    assert any(r.num_preemptions for r in requests)
    assert {Kind.ADMIT, Kind.CHUNK, Kind.NARROW, Kind.PREEMPT} <= kinds(watched)
    for request in requests:
        watched.check_story(request)


@pytest.mark.parametrize("depth", [1, 2])
def test_swap_to_host_memory_and_back(depth: int) -> None:
    watched = Watched(num_blocks=12, num_host_blocks=32, depth=depth, preemption="swap")
    requests = [make_request(f"r{i}", 10, 16, arrival=100.0) for i in range(4)]
    watched.add(*requests)
    watched.run()
    assert {Kind.SWAP, Kind.FOUND} <= kinds(watched)
    assert any(r.history.num_restored_tokens for r in requests)
    for request in requests:
        watched.check_story(request)
        assert watched.ended[request.request_id].ended.swapped == (  # type: ignore[union-attr]
            request.history.num_restored_tokens
        )


def test_forks_wait_for_their_parents_prompt_and_that_is_no_wait_for_a_place() -> None:
    watched = Watched(max_num_batched_tokens=8)
    parent = make_request("r/0", 30, 6, arrival=100.0)
    forks = [make_request(f"r/{i}", 30, 6, arrival=100.0, fork_of="r/0") for i in (1, 2)]
    watched.add(parent, *forks)
    assert [s.state for s in watched.model.waiting()] == [State.WAIT, State.HELD, State.HELD]
    watched.run()
    for request in (parent, *forks):
        watched.check_story(request)
    held = [s for s in watched.ended["r/1"].spans if s.state is State.HELD]
    # the prompt took four steps of 8 tokens
    assert held and held[0].end - held[0].start > 2 * watched.step_seconds
    told = watched.ended["r/1"].told
    assert told is not None and told.parent == watched.ended["r/0"].number


def test_a_parent_that_ends_before_its_prompt_frees_its_forks() -> None:
    watched = Watched(max_num_batched_tokens=8)
    parent = make_request("r/0", 30, 6, arrival=100.0)
    fork = make_request("r/1", 30, 6, arrival=100.0, fork_of="r/0")
    watched.add(parent, fork)
    watched.step()
    watched.abort("r/0")
    watched.run()
    watched.check_story(fork)
    assert watched.ended["r/0"].end == "abort"


def test_expiry_is_told_apart_from_an_abort() -> None:
    watched = Watched(max_num_seqs=1)
    watched.add(make_request("first", 10, 50, arrival=100.0))
    watched.step()
    watched.add(
        make_request("late", 10, 4, arrival=100.0, slo=Slo(queue_ttl=0.1)),
        make_request("gone", 10, 4, arrival=100.0, slo=Slo(queue_ttl=90.0)),
    )
    watched.step()
    watched.abort("gone")
    watched.run()
    assert {n: s.end for n, s in watched.ended.items()} == {
        "first": "length", "late": "expired", "gone": "abort",
    }  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
def test_demotion_is_told(depth: int) -> None:
    watched = Watched(depth=depth, policy="deadline", max_num_seqs=2, max_num_batched_tokens=16)
    slo = Slo(slo_class="interactive", ttft=0.03, tpot=0.02)
    requests = [make_request(f"r{i}", 40, 8, arrival=100.0, slo=slo) for i in range(8)]
    watched.add(*requests)
    watched.run()
    assert any(r.history.demoted for r in requests)
    for request in requests:
        watched.check_story(request)
        ended = watched.ended[request.request_id].ended
        assert ended is not None and ended.demoted == request.history.demoted
    assert any(seen.demoted for seen in watched.ended.values())


def by_chance(policy: str, seed: int, depth: int) -> Watched:
    """Arrivals, aborts, targets, priorities, tenants and too little memory. The model is held to
    the scheduler after every step, and each request's story to what the engine says of it."""
    random_ = random.Random(f"{policy} {seed}")
    watched = Watched(
        num_blocks=20,
        num_host_blocks=random_.choice((0, 24)),
        depth=depth,
        policy=policy,
        max_num_seqs=random_.choice((3, 6)),
        max_num_batched_tokens=random_.choice((8, 24)),
        preemption=random_.choice(("auto", "recompute")),
    )
    alive: list[str] = []
    slos = (
        Slo(),
        Slo(slo_class="interactive", ttft=0.05, tpot=0.03),
        Slo(slo_class="batch", best_effort=True),
        Slo(slo_class="promise", best_effort=True, deadline=0.5),
        Slo(queue_ttl=0.2),
    )
    for turn in range(60):
        for number in range(random_.choice((0, 0, 1, 2)) if turn < 40 else 0):
            name = f"{turn}.{number}"
            request = make_request(
                f"{name}/0",
                random_.randint(1, 40),
                random_.randint(1, 20),
                arrival=watched.now,
                priority=random_.randint(0, 2),
                tenant=random_.choice(("", "a", "b")),
                slo=random_.choice(slos),
            )
            watched.add(request)
            alive.append(request.request_id)
            if random_.random() < 0.3:
                fork = make_request(
                    f"{name}/1",
                    request.asked.prompt_token_ids,
                    5,
                    arrival=watched.now,
                    fork_of=request.request_id,
                    slo=request.asked.slo,
                    tenant=request.asked.tenant,
                )
                watched.add(fork)
                alive.append(fork.request_id)
        if alive and random_.random() < 0.1:
            watched.abort(alive.pop(random_.randrange(len(alive))))
        watched.step()
    watched.run()
    assert len(watched.ended) == len(watched.requests)
    for name, seen in watched.ended.items():
        request = watched.requests[name]
        if seen.end not in ("abort", "expired"):
            watched.check_story(request)
    return watched


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(3, 8))]
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_whatever_happens(policy: str, seed: int, depth: int) -> None:
    by_chance(policy, seed, depth)


def test_all_of_it_happens() -> None:
    """What the test above says nothing of where it does not come up."""
    told, ends, states = set[int](), set[str](), set[State]()
    for seed in range(6):
        watched = by_chance("deadline", seed, 1 + seed % 2)
        told |= kinds(watched)
        told |= {e.kind for f in watched.frames if isinstance(f, Done) for e in f.events}
        ends |= {seen.end for seen in watched.ended.values()}
        states |= {span.state for seen in watched.ended.values() for span in seen.spans}
    assert {Kind.PREEMPT, Kind.SWAP, Kind.FOUND, Kind.SKIP, Kind.DEMOTE} <= told
    assert {"length", "abort", "expired"} <= ends
    assert {State.HELD, State.PREEMPTED, State.SWAPPED} <= states


@pytest.mark.parametrize("depth", [2, 3])
def test_guesses_that_were_wrong_do_not_count_as_computed(depth: int) -> None:
    """After every step, as ``check`` says; also of one that ends or is aborted under guesses."""
    watched = guessing(depth)
    told = [e for f in watched.frames if isinstance(f, Done) for e in f.events]
    assert {e.kind for e in told} == {Kind.WRONG} and len(told) > 3
    assert Kind.DRAFT in kinds(watched)
    for request in watched.requests.values():
        watched.check_story(request)


def test_a_row_that_verifies_drafts_is_written_and_no_chunk() -> None:
    """Or a lone stream that speculates looks like a prompt that never ends."""
    plans = [frame for frame in guessing(2).frames if isinstance(frame, Plan)]
    verifying = [p for p in plans if any(e.kind == Kind.DRAFT for e in p.events)]
    assert verifying
    for plan in verifying:
        chunks = [event for event in plan.events if event.kind == Kind.CHUNK]
        assert plan.wide == len(chunks)
        assert plan.narrow == plan.tokens - sum(event.value for event in chunks)


def test_a_steady_batch_takes_no_events_and_few_bytes() -> None:
    watched = Watched(max_num_seqs=64, max_num_batched_tokens=512, num_blocks=1024)
    watched.add(*(make_request(f"r{i}", 8, 100, arrival=100.0) for i in range(64)))
    for _ in range(5):
        watched.step()
    before = len(watched.data)
    for _ in range(50):
        watched.step()
    assert (len(watched.data) - before) / 50 < 90
    plans = [f for f in watched.frames if isinstance(f, Plan)][-50:]
    assert all(plan.events == () and plan.narrow == 64 for plan in plans)


def test_a_reader_that_begins_at_a_keyframe_sees_the_same() -> None:
    """With the announcements of those that live, as the server sends them."""
    from paceline.timeline.events import Announce
    from paceline.timeline.model import Model

    watched = Watched(num_blocks=24, step_seconds=0.1)
    watched.add(*(make_request(f"r{i}", 10, 40, arrival=100.0) for i in range(8)))
    for _ in range(40):
        watched.step()
    places = [i for i, f in enumerate(watched.frames) if isinstance(f, Keyframe)]
    assert len(places) >= 2
    late = Model()
    begin = places[-1]
    ended = {f.number for f in watched.frames[:begin] if isinstance(f, End)}
    for frame in watched.frames[:begin]:
        if isinstance(frame, Announce) and frame.number not in ended:
            late.take(frame)
    for frame in watched.frames[begin:]:
        late.take(frame)
    assert late.lanes == watched.model.lanes and late.num_doubts == 0
    for number, seen in watched.model.requests.items():
        found = late.requests[number]
        assert (found.state, found.computed, found.lane) == (seen.state, seen.computed, seen.lane)
        assert abs(found.waited - seen.waited) < 1e-3


def test_the_vectors_are_what_the_codec_and_the_model_say() -> None:
    """Readers in other languages are held to these; a change of the format shows here first, and
    wants another version."""
    import base64
    import json

    from tests.timeline.vectors import FOLDER, meaning

    vectors = json.loads((FOLDER / "timeline.json").read_text())
    for name in ("told", "guessed"):
        data = base64.b64decode(vectors[name]["frames"])
        assert json.loads(json.dumps(meaning(data))) == vectors[name]["meaning"]
    told = vectors["told"]
    assert told["meaning"]["held"] and told["meaning"]["num_refused"] > 0
    states = {state for seen in told["meaning"]["ended"] for state, *_ in seen["spans"]}
    assert {"wait", "held", "chunk", "decode", "preempted"} <= states
