// Memory for weights, caches and activations: whole pages, huge ones where the kernel grants them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// Zeroed memory, aligned to pages and backed by huge ones where the kernel grants them. Grows on
// demand; growing loses the contents.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) { reserve(bytes); }
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  // throws std::bad_alloc
  void reserve(size_t bytes);
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out pieces of large allocations, so that huge pages serve small matrices too.
class Arena {
 public:
  // zeroed, 64-byte aligned, valid as long as the arena
  uint8_t* take(size_t bytes);
  // bytes handed out
  size_t size() const { return taken_; }

 private:
  std::vector<Memory> chunks_;
  size_t used_ = 0;  // of the last chunk
  size_t taken_ = 0;
};

}  // namespace paceline
