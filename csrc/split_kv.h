// Attention over a long context, cut so that no member of a team is left with it when the others are done.
#pragma once
#include <algorithm>

#include "model.h"

namespace paceline {

// parts of kPartKeys keys that a range reaches into
inline int parts_of(int key_begin, int key_end) { return (key_end + kPartKeys - 1) / kPartKeys - key_begin / kPartKeys; }

// pairs of a row and a key, by which time goes
inline int64_t pairs_of(const AttendItem& item) { return int64_t(item.key_end - item.key_begin) * item.rows; }

// Makes the plan's items and merges of its whole ones: those with more than a quarter of a member's share of all pairs
// are cut where parts of keys begin. Who computes parts depends on the step; what is added up in which order does not.
inline void cut_long(AttendPlan& plan, int members) {
  plan.items.clear();
  plan.merges.clear();
  plan.parts = 0;
  int64_t all = 0;
  for (const AttendItem& item : plan.whole) all += pairs_of(item);
  for (const AttendItem& item : plan.whole) {
    const int count = parts_of(item.key_begin, item.key_end);
    const int64_t wanted = members > 1 ? (pairs_of(item) * 4 * members + all - 1) / all : 1;
    const int64_t pieces = std::min<int64_t>(count, wanted);
    if (pieces <= 1) {
      plan.items.push_back(item);
      continue;
    }
    plan.merges.push_back({plan.parts, count, item.rows, item.sequence, item.kv_head, item.row});
    const int first = item.key_begin / kPartKeys;
    for (int64_t i = 0; i < pieces; ++i) {
      const int from = first + int(count * i / pieces), to = first + int(count * (i + 1) / pieces);
      AttendItem piece = item;
      if (i > 0) piece.key_begin = from * kPartKeys;
      if (i + 1 < pieces) piece.key_end = to * kPartKeys;
      piece.part = plan.parts + (from - first) * kMaxRows;
      plan.items.push_back(piece);
    }
    plan.parts += count * kMaxRows;
  }
}

}  // namespace paceline
