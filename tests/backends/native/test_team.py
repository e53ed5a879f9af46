"""The thread team of the kernels, in a program of its own: csrc/pool.cpp and nothing else.

A member that is kept from its processor is played by one that sleeps in the middle of its work,
which looks the same to the team and depends on nobody else's load.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no compiler"),
]

PROGRAM = r"""
#include "pool.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

using namespace paceline;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}
void sleep_ms(double ms) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

// every item once, and all of a deal before any of the next
int items() {
  for (int threads = 1; threads <= 4; ++threads) {
    Team team(threads);
    for (int64_t count : {0, 1, 3, 17, 1000}) {
      for (int64_t grain : {1, 4, 16}) {
        std::vector<std::atomic<int>> first(size_t(count) + 1), second(size_t(count) + 1);
        std::atomic<int> early{0};
        team.run([&](int member) {
          team.each(member, count, grain, [&](int64_t i) { ++first[size_t(i)]; });
          team.each(member, count, grain, [&](int64_t i) {
            early += first[size_t(count - 1 - i)] != 1;
            ++second[size_t(i)];
          });
        });
        for (int64_t i = 0; i < count; ++i)
          if (first[size_t(i)] != 1 || second[size_t(i)] != 1 || early) return 1;
      }
    }
  }
  return 0;
}

// of 60 items that take a millisecond, of member 1 three, how many member 0 computes
int uneven() {
  Team team(2);
  std::atomic<int> own{0};
  team.run([&](int member) {
    team.each(member, 60, 1, [&](int64_t) {
      sleep_ms(member == 1 ? 3 : 1);
      own += member == 0;
    });
  });
  return own;
}

struct Steps {
  Team team;
  explicit Steps(int threads, const RestTimes& times = {}) : team(threads, times) {}
  // one run of 20 deals, in each of which members from `off_from` on are off their processors so
  // long; whether it computed what it was to
  bool run(double off_ms, int off_from = 1) {
    std::atomic<int64_t> sum{0};
    team.run([&](int member) {
      for (int i = 0; i < 20; ++i) {
        if (member >= off_from) sleep_ms(off_ms);
        team.each(member, 10, 1, [&](int64_t item) { sum += item; });
      }
    });
    return sum == 900;
  }
  // runs until the team has `size` members, for `limit` seconds at most: how long that took, or -1
  double until(int size, double limit, double off_ms, int off_from = 1) {
    const auto began = Clock::now();
    while (since(began) < limit) {
      if (!run(off_ms, off_from)) return -2;
      if (team.size() == size) return since(began);
    }
    return -1;
  }
};

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// processor seconds while a member rests, for several of its pauses, and nothing is to be done
double idle() {
  RestTimes times;
  times.pause = 0.2;
  times.look = 0.4;
  Steps steps(2, times);
  steps.until(1, 20, 2);
  // the first of these sends the member to rest, the others go by meanwhile
  for (int i = 0; i < 4; ++i) {
    steps.run(0);
    sleep_ms(20);
  }
  const double ran = processor_seconds();
  sleep_ms(1500);
  return processor_seconds() - ran;
}

// Runs of teams whose members rest and return all the time, with idle moments between them. What
// went wrong, and how often a team changed its size: times are far below the usual ones.
void stress(double seconds) {
  RestTimes times;
  times.window = 2e-3;
  times.pause = 1e-3;
  times.longest = 4e-3;
  times.settled = 1e-3;
  times.look = 2e-4;
  int64_t lost = 0, twice = 0, absent = 0, changes = 0, runs = 0;
  uint32_t random = 1;
  const auto began = Clock::now();
  for (int number = 0; since(began) < seconds; ++number) {
    const int threads = 2 + number % 3;
    Team team(threads, times);
    for (int run = 0; run < 300 && since(began) < seconds; ++run, ++runs) {
      const int members = team.size();
      const bool off = run % 60 < 30;
      std::atomic<int> items[16] = {}, entered[4] = {};
      team.run([&](int member) {
        ++entered[member];
        for (int deal = 0; deal < 9; ++deal) {
          if (off && member > 0) sleep_ms(0.3);
          team.each(member, 16, 1, [&](int64_t i) { ++items[i]; });
        }
      });
      for (std::atomic<int>& count : items) lost += count < 9, twice += count > 9;
      for (int member = 0; member < threads; ++member)
        absent += entered[member] != (member < members);
      changes += team.size() != members;
      random = random * 1664525 + 1013904223;
      if (random >> 28 == 0) sleep_ms(double(random >> 8 & 1023) / 300);
    }
  }
  for (int64_t number : {lost, twice, absent, changes, runs}) std::printf("%ld ", long(number));
}

// 100 for each of three members that is another thread once they were replaced, and 1 for each item
int renewed() {
  Team team(3);
  std::thread::id before[3], after[3];
  std::atomic<int> runs{0};
  auto see = [&](int member) { before[member] = std::this_thread::get_id(); };
  for (int i = 0; i < 3; ++i) team.run(see);
  team.renew();
  for (int i = 0; i < 3; ++i)
    team.run([&](int member) {
      after[member] = std::this_thread::get_id();
      team.each(member, 10, 1, [&](int64_t) { ++runs; });
    });
  int others = 0;
  for (int member = 0; member < 3; ++member) others += before[member] != after[member];
  return 100 * others + runs;
}

// the error of a team that may have no new threads; it ends as any other
std::string refused() {
  Team team(3);
  // one thread next to this one; the limit holds for other users than root
  if (!geteuid() && setuid(65534)) return "setuid failed";
  const rlimit limit{2, 2};
  setrlimit(RLIMIT_NPROC, &limit);
  try {
    team.renew();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "renewed";
}

int main(int, char** arguments) {
  const char* what = arguments[1];
  if (!std::strcmp(what, "items")) std::printf("%d", items());
  if (!std::strcmp(what, "renewed")) std::printf("%d", renewed());
  if (!std::strcmp(what, "refused")) std::printf("%s", refused().c_str());
  if (!std::strcmp(what, "uneven")) std::printf("%d", uneven());
  if (!std::strcmp(what, "rest")) {
    // a look within a turn of the system's scheduler finds a processor on a busy machine, too
    RestTimes times;
    times.look = 1e-3;
    Steps steps(2, times);
    const double gone = steps.until(1, 20, 2), back = steps.until(2, 60, 0);
    std::printf("%.3f %.3f", gone, back);
  }
  if (!std::strcmp(what, "several")) {
    Steps steps(4);
    std::printf("%.3f", steps.until(2, 30, 2, 2));
  }
  if (!std::strcmp(what, "end")) {
    // with one at rest and one that looks for a processor
    for (int i = 0; i < 2; ++i) {
      Steps steps(3);
      steps.until(1, 20, 2);
      sleep_ms(i * 1005);
    }
    std::printf("ended");
  }
  if (!std::strcmp(what, "idle")) std::printf("%.3f", idle());
  if (!std::strcmp(what, "stress")) stress(std::atof(arguments[2]));
  if (!std::strcmp(what, "share")) {
    // of runs of 30 ms: how many until one is let go, of 1000
    int members = std::atoi(arguments[2]), runs = 0;
    const double share = std::atof(arguments[3]);
    Contention contention(0.1);
    while (++runs < 1000 && !contention.add(members, 0.03, 0.03 * share)) {}
    std::printf("%d", runs);
  }
  if (!std::strcmp(what, "once")) {
    // everything stops for a second in every ten
    Contention contention(0.1);
    bool gone = false;
    for (int i = 0; i < 5000; ++i) gone = gone || contention.add(2, 0.01, i % 1000 ? 0 : 1);
    std::printf("%d", gone);
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("team")
    (folder / "main.cpp").write_text(PROGRAM)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-iquote",
         SOURCES, "main.cpp", SOURCES / "pool.cpp", "-o", "team"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "team"


def run(program: Path, *arguments: object) -> str:
    words = [str(program), *map(str, arguments)]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout


def test_every_item_is_computed_once(program: Path) -> None:
    assert run(program, "items") == "0"


def test_threads_are_replaced_between_runs(program: Path) -> None:
    """All but the caller's, and every item of three runs is computed once."""
    assert run(program, "renewed") == "230"


def test_threads_that_cannot_be_replaced_are_an_error_and_no_abort(program: Path) -> None:
    assert re.match(
        "could start only [01] threads beside the caller's, not 2", run(program, "refused")
    )


def test_a_slow_member_is_helped(program: Path) -> None:
    """Of 60 items 45 by the quicker of two, not its half."""
    assert 36 <= max(int(run(program, "uneven")) for _ in range(3)) <= 55


def test_who_is_in_the_way_rests_and_comes_back(program: Path) -> None:
    gone, back = map(float, run(program, "rest").split())
    # two windows of 0.1 s, then a second of rest and a look for a processor
    assert 0.2 <= gone < 20
    assert 0.9 <= back < 60


def test_as_many_rest_as_are_in_the_way(program: Path) -> None:
    assert 0.4 <= float(run(program, "several")) < 30


def test_a_team_ends_whoever_rests(program: Path) -> None:
    assert run(program, "end") == "ended"


def test_who_rests_sleeps_while_there_is_nothing_to_do(program: Path) -> None:
    """A look for a processor, 0.4 s of computing nothing here, is for when there is work."""
    assert float(run(program, "idle")) < 0.1


def test_no_run_is_lost_or_computed_twice_while_members_come_and_go(program: Path) -> None:
    lost, twice, absent, changes, runs = map(int, run(program, "stress", 4).split())
    assert (lost, twice, absent) == (0, 0, 0)
    # members did rest and return, and runs went on in between; how many there are in a time is a
    # matter of what else the machine does
    assert changes >= 20
    assert runs > changes


@pytest.mark.parametrize(
    ("members", "share", "runs"),
    [
        # two windows of four runs
        (2, 0.9, 8), (2, 0.65, 8), (2, 0.55, 1000), (2, 0.1, 1000),
        (4, 0.35, 8), (4, 0.25, 1000),
        # among many, not for what interrupts cost
        (64, 0.2, 8), (64, 0.1, 1000),
    ],
)  # fmt: skip
def test_what_share_is_too_much(program: Path, members: int, share: float, runs: int) -> None:
    assert int(run(program, "share", members, share)) == runs


def test_a_machine_that_stops_once_is_no_neighbour(program: Path) -> None:
    assert run(program, "once") == "0"
