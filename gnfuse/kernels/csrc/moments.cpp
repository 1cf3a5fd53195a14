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

// Welford's running moments of one stream of vectors.
template <typename acc>
struct Running {
  Vec<acc> m1{acc(0)};
  Vec<acc> m2{acc(0)};

  void add(const Vec<acc>& x, const Vec<acc>& reciprocal) {
    const Vec<acc> delta = x - m1;
    m1 = at::vec::fmadd(reciprocal, delta, m1);
    m2 = at::vec::fmadd(delta, x - m1, m2);
  }
  void merge_into(Node<acc>& node, int64_t count) const {
    at::native::AddMomentsVec(count, m1, m2, node.count, node.m1, node.m2);
  }
};

// The vectors of one chunk: one stream, or two where a vector of a 16-bit type makes two of floats.
template <typename T, typename acc>
void accumulate_chunk(const T* row, int64_t count, Node<acc>* stack) {
  Running<acc> a, b;
  for (int64_t j = 0; j < count; ++j) {
    const Vec<acc> reciprocal = reciprocals<acc>()[j];
    const auto x = Vec<T>::loadu(row + j * Vec<T>::size());
    if constexpr (sizeof(T) == 2) {
      const auto pair = at::vec::convert_to_float<T>(x);
      a.add(std::get<0>(pair), reciprocal);
      b.add(std::get<1>(pair), reciprocal);
    } else {
      a.add(x, reciprocal);
    }
  }
  a.merge_into(stack[0], count);
  if constexpr (sizeof(T) == 2) {
    b.merge_into(stack[0], count);
  }
}

// Neighbouring whole chunks that make four streams: each is one chain of dependent operations, and side by side they hide
// each other's latency. Four variables, not an array, which the compiler would keep in memory.
template <typename T>
constexpr int64_t kTogether = sizeof(T) == 2 ? 2 : 4;

template <typename T, typename acc>
void accumulate_together(const T* row, int64_t done, int64_t depth, Node<acc>* stack) {
  constexpr int64_t chunk = at::native::kChunkSize;
  constexpr int64_t stride = chunk * Vec<T>::size();
  Running<acc> a, b, c, d;
  for (int64_t j = 0; j < chunk; ++j, row += Vec<T>::size()) {
    const Vec<acc> reciprocal = reciprocals<acc>()[j];
    if constexpr (sizeof(T) == 2) {
      const auto first = at::vec::convert_to_float<T>(Vec<T>::loadu(row));
      const auto second = at::vec::convert_to_float<T>(Vec<T>::loadu(row + stride));
      a.add(std::get<0>(first), reciprocal);
      b.add(std::get<1>(first), reciprocal);
      c.add(std::get<0>(second), reciprocal);
      d.add(std::get<1>(second), reciprocal);
    } else {
      a.add(Vec<T>::loadu(row), reciprocal);
      b.add(Vec<T>::loadu(row + stride), reciprocal);
      c.add(Vec<T>::loadu(row + 2 * stride), reciprocal);
      d.add(Vec<T>::loadu(row + 3 * stride), reciprocal);
    }
  }
  const auto merge = [&](const Running<acc>& running, bool ends_chunk) {
    running.merge_into(stack[0], chunk);
    if (ends_chunk) {
      carry(stack, 0, ++done, depth);
    }
  };
  merge(a, sizeof(T) != 2);
  merge(b, true);
  merge(c, sizeof(T) != 2);
  merge(d, true);
}

template <typename T, typename acc>
void accumulate_chunks(const T* row, int64_t vectors, int64_t first, int64_t last, int64_t depth, Node<acc>* stack) {
  constexpr int64_t chunk = at::native::kChunkSize;
  constexpr int64_t together = kTogether<T>;
  int64_t i = first;
  for (; i + together <= last && (i + together) * chunk <= vectors; i += together) {
    accumulate_together(row + i * chunk * Vec<T>::size(), i - first, depth, stack);
  }
  for (; i < last; ++i) {
    accumulate_chunk(row + i * chunk * Vec<T>::size(), std::min<int64_t>(chunk, vectors - i * chunk), stack);
    carry(stack, 0, i - first + 1, depth);
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
