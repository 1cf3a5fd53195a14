// Blocks between memory (any dtype) and the interpreter's float or double buffers.
#pragma once

#include "common.h"

namespace gnfuse {

// `n` elements from element `offset` of `data`; the buffer `out` has room for whole vectors (kPadding).
template <typename acc>
void load_block(const void* data, DType dtype, int64_t offset, int64_t n, acc* out);

// `n` elements to element `offset` of `data`, rounded to nearest.
template <typename acc>
void store_block(const acc* values, int64_t n, void* data, DType dtype, int64_t offset);

// Rounds to a dtype and back, in place or from one buffer to another.
template <typename acc>
void round_block(const acc* values, acc* out, int64_t n, DType dtype);

// The elements themselves where memory holds the interpreter's type, else a copy in `scratch`.
template <typename acc>
const acc* view_block(const void* data, DType dtype, int64_t offset, int64_t n, acc* scratch) {
  constexpr DType native = sizeof(acc) == 8 ? DType::f64 : DType::f32;
  if (dtype == native) {
    return static_cast<const acc*>(data) + offset;
  }
  load_block(data, dtype, offset, n, scratch);
  return scratch;
}

} // namespace gnfuse
