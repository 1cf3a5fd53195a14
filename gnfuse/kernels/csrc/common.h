// Types that every part of the CPU kernels shares. No ATen tensors here: the kernels see pointers and sizes.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <memory>

namespace gnfuse {

template <typename acc>
using Vec = at::vec::Vectorized<acc>;

enum class DType : uint8_t { f16, bf16, f32, f64 };

constexpr int64_t item_size(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// Elements that one pass of the block interpreter works on: four float buffers of this size stay in a 32 KiB L1.
constexpr int64_t kBlock = 1024;

// Every scratch buffer is longer by this, so that whole vectors may be read and written past the last element.
constexpr int64_t kPadding = 64;

// Elements that one task works on when a group or a sample is split over threads. It fixes the order of the partial
// sums, so results do not depend on the number of threads.
constexpr int64_t kPart = 32768;

constexpr int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Scratch of one thread, aligned for the widest vectors and not initialised.
template <typename acc>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : data_(static_cast<acc*>(::operator new((size + kPadding) * sizeof(acc), std::align_val_t(64)))) {}
  acc* get() const {
    return data_.get();
  }

 private:
  struct Free {
    void operator()(acc* p) const {
      ::operator delete(p, std::align_val_t(64));
    }
  };
  std::unique_ptr<acc, Free> data_;
};

// One bit an element, in memory order; bits == nullptr keeps every element (no dropout).
struct MaskView {
  const uint8_t* bits = nullptr;
  int64_t first = 0;
};

} // namespace gnfuse
