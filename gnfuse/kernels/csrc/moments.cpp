#include "moments.h"

#include <ATen/native/cpu/moments_utils.h>

#include <algorithm>
#include <cmath>

namespace gnfuse {
namespace {

// ATen sums chunks of 16 vectors by Welford and merges them in a binary tree whose inner nodes sit in a stack: level j
// holds the moments of 2^j chunks. An aligned run of 2^k chunks is a subtree that depends on nothing outside it, so it
// is a part. Merging a node into an empty level is exact, which is why the parts can be put together later.
template <typename acc>
struct Node {
  Vec<acc> m1;
  Vec<acc> m2;
  int64_t count;

  void clear() {
    m1 = Vec<acc>(acc(0));
    m2 = Vec<acc>(acc(0));
    count = 0;
  }
  void add(const Node& other) {
    at::native::AddMomentsVec(other.count, other.m1, other.m2, count, m1, m2);
  }
};

template <typename acc>
const std::array<Vec<acc>, at::native::kChunkSize>& reciprocals() {
  static const auto values = [] {
    std::array<Vec<acc>, at::native::kChunkSize> result;
    for (int i = 0; i < at::native::kChunkSize; ++i) {
      result[i] = Vec<acc>(acc(1) / static_cast<acc>(i + 1));
    }
    return result;
  }();
  return values;
}

// Carries full nodes upwards after `done` chunks (or parts) have gone into level `level`.
template <typename acc>
void carry(Node<acc>* stack, int64_t level, int64_t done, int64_t depth) {
  for (; level + 1 < depth && (done & 1) == 0; ++level, done >>= 1) {
    stack[level + 1].add(stack[level]);
    stack[level].clear();
  }
}

// Welford's running moments of the vectors of one chunk. A vector of a 16-bit type makes two of floats.
template <typename T, typename acc>
struct Running {
  static constexpr int kHalves = sizeof(acc) == sizeof(T) ? 1 : 2;
  Vec<acc> m1[kHalves];
  Vec<acc> m2[kHalves];

  Running() {
    for (int h = 0; h < kHalves; ++h) {
      m1[h] = m2[h] = Vec<acc>(acc(0));
    }
  }
  void add(int h, const Vec<acc>& x, const Vec<acc>& reciprocal) {
    const Vec<acc> delta = x - m1[h];
    m1[h] = at::vec::fmadd(reciprocal, delta, m1[h]);
    m2[h] = at::vec::fmadd(delta, x - m1[h], m2[h]);
  }
  void add(const T* row, const Vec<acc>& reciprocal) {
    if constexpr (kHalves == 1) {
      add(0, Vec<acc>::loadu(row), reciprocal);
    } else {
      const auto pair = at::vec::convert_to_float<T>(Vec<T>::loadu(row));
      add(0, std::get<0>(pair), reciprocal);
      add(1, std::get<1>(pair), reciprocal);
    }
  }
  void merge_into(Node<acc>& node, int64_t count) const {
    for (int h = 0; h < kHalves; ++h) {
      at::native::AddMomentsVec(count, m1[h], m2[h], node.count, node.m1, node.m2);
    }
  }
};

// `width` neighbouring chunks of `count` vectors at once: each is one chain of dependent operations, and side by side they
// hide each other's latency. Their results are merged in order.
template <int width, typename T, typename acc>
void accumulate_together(const T* row, int64_t count, int64_t done, int64_t depth, Node<acc>* stack) {
  constexpr int64_t stride = at::native::kChunkSize * Vec<T>::size();
  Running<T, acc> running[width];
  for (int64_t j = 0; j < count; ++j) {
    const Vec<acc> reciprocal = reciprocals<acc>()[j];
    for (int w = 0; w < width; ++w) {
      running[w].add(row + w * stride + j * Vec<T>::size(), reciprocal);
    }
  }
  for (int w = 0; w < width; ++w) {
    running[w].merge_into(stack[0], count);
    carry(stack, 0, done + w + 1, depth);
  }
}

template <typename T, typename acc>
void accumulate_chunks(const T* row, int64_t vectors, int64_t first, int64_t last, int64_t depth, Node<acc>* stack) {
  constexpr int64_t chunk = at::native::kChunkSize;
  constexpr int width = sizeof(T) == 2 ? 2 : 4; // eight accumulators: what 16 registers hold
  int64_t i = first;
  for (; i + width <= last && (i + width) * chunk <= vectors; i += width) {
    accumulate_together<width>(row + i * chunk * Vec<T>::size(), chunk, i - first, depth, stack);
  }
  for (; i < last; ++i) {
    const int64_t count = std::min<int64_t>(chunk, vectors - i * chunk);
    accumulate_together<1>(row + i * chunk * Vec<T>::size(), count, i - first, depth, stack);
  }
}

// Keeps the compiler from contracting a product and a sum: ATen's binary has no FMA at one place, except for Half. Other
// builds of torch may differ there; statistics_match_eager() finds out.
template <typename acc>
acc not_fused(acc product) {
#if defined(__x86_64__)
  __asm__("" : "+x"(product));
#endif
  return product;
}

template <typename T, typename acc>
std::pair<acc, acc> reduce(const Node<acc>& node, const T* row, int64_t size) {
  constexpr int64_t lanes = Vec<acc>::size();
  const int64_t vectors = size / Vec<T>::size();
  alignas(64) acc m1_lanes[lanes];
  alignas(64) acc m2_lanes[lanes];
  node.m1.store(m1_lanes);
  node.m2.store(m2_lanes);
  int64_t count = 0;
  acc m1 = 0;
  acc m2 = 0;
  for (int64_t i = vectors * Vec<T>::size(); i < size; ++i) {
    const acc x = static_cast<acc>(row[i]);
    const acc delta = x - m1;
    ++count;
    m1 += delta / static_cast<acc>(count);
    const acc square = delta * (x - m1);
    m2 += std::is_same_v<T, c10::Half> ? square : not_fused(square);
  }
  const int64_t per_lane = vectors * Vec<T>::size() / lanes;
  for (int64_t i = 0; i < lanes; ++i) {
    at::native::AddMoments(per_lane, m1_lanes[i], m2_lanes[i], count, m1, m2);
  }
  return {m1, m2 / static_cast<acc>(size)};
}

// Calls `visit(pointer)` with the row's type.
template <typename acc, typename Visit>
auto typed(const void* row, DType dtype, const Visit& visit) {
  if constexpr (sizeof(acc) == 8) {
    return visit(static_cast<const double*>(row));
  } else {
    switch (dtype) {
      case DType::f16:
        return visit(static_cast<const c10::Half*>(row));
      case DType::bf16:
        return visit(static_cast<const c10::BFloat16*>(row));
      default:
        return visit(static_cast<const float*>(row));
    }
  }
}

int64_t ceil_log2(int64_t x) {
  int64_t log2 = 0;
  while ((int64_t(1) << log2) < x) {
    ++log2;
  }
  return log2;
}

} // namespace

template <typename acc>
RowMoments<acc>::RowMoments(DType dtype, int64_t size) : dtype_(dtype), size_(size) {
  vector_ = Vec<acc>::size() * static_cast<int64_t>(sizeof(acc)) / item_size(dtype);
  chunks_ = div_up(size / vector_, at::native::kChunkSize);
  depth_ = ceil_log2(chunks_);
  part_log2_ = ceil_log2(kPart / (at::native::kChunkSize * vector_));
  parts_ = std::max<int64_t>(1, div_up(chunks_, int64_t(1) << part_log2_));
  levels_ = parts_ == 1 ? std::max<int64_t>(1, depth_) : part_log2_ + 1;
}

template <typename acc>
int64_t RowMoments<acc>::state_bytes() const {
  // room for the merged stack behind the parts
  return static_cast<int64_t>(sizeof(Node<acc>)) * (parts_ * levels_ + depth_ + 1);
}

template <typename acc>
void RowMoments<acc>::run_part(const void* row, int64_t part, void* state) const {
  auto* stack = static_cast<Node<acc>*>(state) + part * levels_;
  for (int64_t i = 0; i < levels_; ++i) {
    stack[i].clear();
  }
  const int64_t first = part << part_log2_;
  const int64_t last = std::min(chunks_, (part + 1) << part_log2_);
  typed<acc>(row, dtype_, [&](const auto* x) { accumulate_chunks(x, size_ / vector_, first, last, levels_, stack); });
}

template <typename acc>
std::pair<acc, acc> RowMoments<acc>::finish(const void* row, void* state) const {
  auto* nodes = static_cast<Node<acc>*>(state);
  Node<acc>* stack = nodes;
  if (parts_ > 1) {
    stack = nodes + parts_ * levels_;
    for (int64_t i = 0; i <= depth_; ++i) {
      stack[i].clear();
    }
    for (int64_t part = 0; part < parts_; ++part) {
      const Node<acc>* own = nodes + part * levels_;
      const bool full = ((part + 1) << part_log2_) <= chunks_;
      if (full) {
        stack[part_log2_].add(own[part_log2_]);
        carry(stack, part_log2_, part + 1, depth_);
      } else {
        std::copy(own, own + part_log2_, stack);
      }
    }
  }
  for (int64_t i = 1; i < depth_; ++i) {
    stack[0].add(stack[i]);
  }
  return typed<acc>(row, dtype_, [&](const auto* x) { return reduce(stack[0], x, size_); });
}

template class RowMoments<float>;
template class RowMoments<double>;

} // namespace gnfuse
