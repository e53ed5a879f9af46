// Packed weight matrices and where their values come from.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "memory.h"

namespace paceline {

// Numbers of GGUF's types where one exists.
enum class Source : int {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kIQ4_NL = 20, kIQ4_XS = 23,
  kBF16 = 30, kMXFP4 = 39
};

// Bytes of a stored row of `columns` values, or -1 where the type cannot hold such a row.
int64_t source_row_bytes(Source type, int64_t columns);
// `columns` values of a stored row from column `first`, which is a multiple of 32; the row itself holds
// whole blocks of its type.
void decode_row(Source type, const void* row, int64_t first, int64_t columns, float* out);
// The same of one group of 32 columns, of the types whose nibbles are places in a table (tables.cpp).
void decode_table_group(Source type, const uint8_t* row, int64_t group, float* out);

// A weight matrix [rows, columns] in panels; see kernels.h for the layout. Its memory belongs to the
// arena it was made in.
class Matrix {
 public:
  Matrix() = default;
  // Throws std::invalid_argument unless a kind can hold rows of so many columns: 4-bit weights need whole groups
  // of 32, the K kinds and IQ4_XS whole blocks of 256.
  static void check_kind(Weights kind, int64_t columns);
  // throws std::invalid_argument where `check_kind` does
  Matrix(Weights kind, int64_t rows, int64_t columns, Arena& arena);

  Weights kind() const { return kind_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t panel_count() const { return (rows_ + kPanel - 1) / kPanel; }

  // `count` rows that follow each other in one panel, stored `stride` bytes apart. Different rows may be
  // packed from different threads. `scratch`: `pack_scratch()` floats. kQ40 and the K kinds hold blocks of their own
  // type alone, see `takes`.
  void pack_rows(int64_t row, int64_t count, Source type, const void* source, int64_t stride, const Kernels& kernels,
                 float* scratch);
  size_t pack_scratch() const;
  bool takes(Source type) const;
  // f(address, bytes) of its packed values, and of its scales where they lie apart
  template <class F>
  void each_piece(F&& f) {
    f(data_, size_t(panel_count() * panel_bytes_));
    if (scale_) f(scale_, size_t(panel_count()) * kPanel * 4);
  }
  // One row back, as the products see it.
  void unpack_row(int64_t row, const Kernels& kernels, float* out) const;
  Panels view() const;

 private:
  // columns in whole groups of 64
  int64_t padded_columns() const { return (columns_ + kActGroup - 1) / kActGroup * kActGroup; }
  void pack_i8(int64_t row, int64_t count, Source type, const uint8_t* from, int64_t stride, const Kernels& kernels,
               float* scratch);
  void pack_q4(int64_t row, Source type, const void* source, float* scratch);
  void pack_block(int64_t row, const uint8_t* source);
  void unpack_block(int64_t row, float* out) const;
  // those of the kinds of tables.h
  void pack_table(int64_t row, const uint8_t* source);
  void unpack_table(int64_t row, float* out) const;

  Weights kind_ = Weights::kF32;
  int64_t rows_ = 0, columns_ = 0, units_ = 0, panel_bytes_ = 0;
  uint8_t* data_ = nullptr;
  float* scale_ = nullptr;  // kI8, kQ4 and kQ40
};

}  // namespace paceline
