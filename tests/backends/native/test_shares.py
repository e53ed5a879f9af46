"""What each member of a team computes of a step, in a program of its own: csrc/row_balance.h, which
deals out rows by how long members took, and csrc/split_kv.h, which cuts attention over long
contexts."""

from __future__ import annotations

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
#include "split_kv.h"
#include "row_balance.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

using namespace paceline;

// Members whose processors are so quick, in rows a second, and who wait for memory for so long at
// least.
struct Machine {
  std::vector<double> speeds;
  double memory = 0;
  double noise = 0;
  std::mt19937 random{7};
  void step(Paces& paces, int64_t rows) {
    const int members = int(speeds.size());
    paces.settle(members);
    for (int i = 0; i < members; ++i) {
      const int64_t own = paces.begin(i + 1, members, rows) - paces.begin(i, members, rows);
      const double chance = 1 + noise * (double(random() % 2001) / 1000 - 1);
      paces.tell(i, std::max(memory, double(own) / speeds[size_t(i)]) * chance);
    }
  }
  void print(const Paces& paces, int64_t rows) const {
    const int members = int(speeds.size());
    for (int i = 0; i < members; ++i)
      std::printf("%ld ", long(paces.begin(i + 1, members, rows) - paces.begin(i, members, rows)));
  }
};

// shares that are not all rows, once each and in order
int uncovered() {
  std::mt19937 random{5};
  int wrong = 0;
  for (int members = 1; members <= 5; ++members) {
    Paces paces(5);
    for (int i = 0; i < 200; ++i) {
      for (int member = 0; member < members; ++member)
        paces.tell(member, 1e-3 + double(random() % 1000));
      paces.settle(members);
      for (int64_t rows : {0, 1, 12, 13, 64, 511}) {
        wrong += paces.begin(0, members, rows) != 0 || paces.begin(members, members, rows) != rows;
        for (int member = 0; member < members; ++member)
          wrong += paces.begin(member, members, rows) > paces.begin(member + 1, members, rows);
      }
    }
  }
  return wrong;
}

// A plan of items with so many rows and keys: how many of its pieces are not what they must be, and
// the largest that could be cut further, as a share of all pairs.
int cut(int members, const std::vector<std::pair<int, int>>& items, double* largest) {
  AttendPlan plan;
  int64_t all = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    AttendItem item{};
    item.sequence = int32_t(i);
    item.rows = items[i].first;
    item.key_begin = int(i % 3) * 96;
    item.key_end = item.key_begin + items[i].second;
    item.part = -1;
    all += pairs_of(item);
    plan.whole.push_back(item);
  }
  cut_long(plan, members);
  int wrong = 0;
  int64_t parts = 0;
  size_t at = 0, merge = 0;
  *largest = 0;
  for (const AttendItem& whole : plan.whole) {
    int key = whole.key_begin;
    const int first = whole.key_begin / kPartKeys;
    const bool merged = merge < plan.merges.size() && plan.merges[merge].sequence == whole.sequence;
    do {
      const AttendItem& piece = plan.items[at++];
      wrong += piece.sequence != whole.sequence || piece.rows != whole.rows;
      wrong += piece.key_begin != key || piece.key_end <= key;
      // parts are whole but for the first and the last, and each has a place of its own
      wrong += key != whole.key_begin && key % kPartKeys != 0;
      wrong += piece.part != (merged ? parts + (key / kPartKeys - first) * kMaxRows : -1);
      if (parts_of(piece.key_begin, piece.key_end) > 1)
        *largest = std::max(*largest, double(pairs_of(piece)) / double(all));
      key = piece.key_end;
    } while (key < whole.key_end && at < plan.items.size());
    wrong += key != whole.key_end;
    if (!merged) continue;
    const int count = parts_of(whole.key_begin, whole.key_end);
    wrong += plan.merges[merge].part != parts || plan.merges[merge].parts != count;
    parts += count * kMaxRows;
    ++merge;
  }
  return wrong + (at != plan.items.size()) + (merge != plan.merges.size()) + (parts != plan.parts);
}

int main(int, char** arguments) {
  const char* what = arguments[1];
  if (!std::strcmp(what, "alike")) {
    Machine machine{{1000, 1000}, 0, 0.05};
    Paces paces(2);
    int uneven = 0;
    for (int i = 0; i < 3000; ++i) {
      machine.step(paces, 64);
      uneven += paces.begin(1, 2, 64) != 32;
    }
    std::printf("%d", uneven);
  }
  if (!std::strcmp(what, "speeds")) {
    Machine machine{{1000, 1000, 400}, 0, 0.05};
    Paces paces(3);
    for (int i = 0; i < std::atoi(arguments[2]); ++i) machine.step(paces, 96);
    machine.print(paces, 96);
  }
  if (!std::strcmp(what, "stopped")) {
    Machine machine{{1000, 1000}};
    Paces paces(2);
    for (int i = 0; i < 50; ++i) machine.step(paces, 64);
    paces.tell(1, 5);
    machine.speeds = {1000, 1000};
    paces.settle(2);
    machine.print(paces, 64);
  }
  if (!std::strcmp(what, "memory")) {
    // of another speed for a while; then both wait for memory, however few rows they have
    Machine machine{{1000, 400}};
    Paces paces(2);
    for (int i = 0; i < 100; ++i) machine.step(paces, 64);
    machine.print(paces, 64);
    machine = {{1000, 1000}, 1};
    for (int i = 0; i < 1000; ++i) machine.step(paces, 64);
    machine.print(paces, 64);
  }
  if (!std::strcmp(what, "uncovered")) std::printf("%d", uncovered());
  if (!std::strcmp(what, "cut")) {
    // rows and keys of each item
    std::vector<std::pair<int, int>> items;
    for (int i = 3; arguments[i]; i += 2)
      items.push_back({std::atoi(arguments[i]), std::atoi(arguments[i + 1])});
    double largest;
    const int wrong = cut(std::atoi(arguments[2]), items, &largest);
    std::printf("%d %.4f", wrong, largest);
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    (folder / "main.cpp").write_text(PROGRAM)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-iquote",
         SOURCES, "main.cpp", "-o", "shares"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "shares"


def run(program: Path, *arguments: object) -> list[float]:
    words = [str(program), *map(str, arguments)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    return [float(word) for word in done.stdout.split()]


def test_members_alike_have_equal_shares_whatever_chance_does(program: Path) -> None:
    assert run(program, "alike") == [0]


def test_shares_follow_speeds_within_tens_of_steps(program: Path) -> None:
    """Equal times would be 40, 40 and 16 rows of 96; equal rows are 32."""
    assert run(program, "speeds", 1) == [32, 32, 32]
    first, second, slow = run(program, "speeds", 40)
    assert first + second + slow == 96
    assert 15 <= slow <= 20
    assert abs(first - second) <= 4


def test_a_member_that_stops_once_keeps_its_rows(program: Path) -> None:
    assert run(program, "stopped") == [32, 32]


def test_where_rows_take_no_time_shares_become_equal_again(program: Path) -> None:
    quick, slow, *then = run(program, "memory")
    assert slow <= 21 and quick + slow == 64
    assert then == [32, 32]


def test_shares_are_all_rows(program: Path) -> None:
    assert run(program, "uncovered") == [0]


SHORT = (3, 120) * 36
LONG = (3, 8000) * 3


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "items",
    [SHORT, SHORT + LONG, LONG, (12, 5000) + (3, 700) * 40, (3, 257), (1, 1), (3, 300) * 7],
    ids=["short", "long beside short", "long", "a prompt", "two parts", "one pair", "few"],
)
def test_a_long_context_is_cut_where_it_would_be_waited_for(
    program: Path, members: int, items: tuple[int, ...]
) -> None:
    wrong, largest = run(program, "cut", members, *items)
    assert wrong == 0
    # a piece of several parts is at most a quarter of a member's share, and two parts more, since
    # keys begin and end inside parts
    part = (
        2 * 256 * max(items[::2]) / sum(a * b for a, b in zip(items[::2], items[1::2], strict=True))
    )
    assert members == 1 or largest <= 1 / (4 * members) + part
