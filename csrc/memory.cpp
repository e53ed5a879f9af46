#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace paceline {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
// Huge pages that nothing was written to take no memory, so a chunk may be much larger than a small model; what is
// lost is the rest of a page at the end of each, where the next matrix does not fit
constexpr size_t kArenaChunk = 128 * kHugePage;

}  // namespace

Memory::~Memory() {
  if (data_) munmap(data_, size_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Memory::reserve(size_t bytes) {
  if (bytes <= size_) return;
  // what is used is a multiple of a page; kernels may prefetch, never load, past the end
  const size_t unit = bytes >= kHugePage ? kHugePage : 4096;
  const size_t size = (bytes + unit - 1) / unit * unit;
  if (data_) munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
  // the extra huge page is trimmed again: mmap aligns to small pages only
  const size_t slack = unit == kHugePage ? kHugePage : 0;
  void* p = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  uint8_t* begin = static_cast<uint8_t*>(p);
  const size_t skip = (unit - reinterpret_cast<uintptr_t>(begin) % unit) % unit;
  if (skip) munmap(begin, skip);
  if (slack > skip) munmap(begin + skip + size, slack - skip);
  data_ = begin + skip;
  size_ = size;
#ifdef MADV_HUGEPAGE
  if (slack) madvise(data_, size_, MADV_HUGEPAGE);
#endif
}

uint8_t* Arena::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (chunks_.empty() || chunks_.back().size() - used_ < bytes) {
    chunks_.emplace_back(bytes > kArenaChunk ? bytes : kArenaChunk);
    used_ = 0;
  }
  used_ += bytes;
  taken_ += bytes;
  return chunks_.back().data() + used_ - bytes;
}

}  // namespace paceline
