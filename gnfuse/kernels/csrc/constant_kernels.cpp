#include "constant_kernels.h"

#include "interpreter.h"
#include "lanes.h"
#include "moments.h"
#include "rows.h"
#include "schedule.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace gnfuse {
namespace {

constexpr int64_t kChunk = 65536; // elements a task reads and writes: 256 KiB of float32

template <typename U>
U max_bits(const U* data, int64_t n) {
  constexpr U mask = static_cast<U>(~U(0)) >> 1;
  U result = 0;
  for (int64_t i = 0; i < n; ++i) {
    const U bits = data[i] & mask;
    result = result > bits ? result : bits;
  }
  return result;
}

template <typename U>
void fill_values(U* out, int64_t n, U value) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = value;
  }
}

template <typename U>
void fill_selected(U* out, int64_t n, U kept, U dropped, const MaskView& mask) {
  for (int64_t i = 0; i < n; i += 32) {
    uint64_t word;
    std::memcpy(&word, mask.bits + ((mask.first + i) >> 3), sizeof(word));
    word >>= (mask.first + i) & 7;
    const int64_t count = std::min<int64_t>(32, n - i);
    for (int64_t j = 0; j < count; ++j) {
      out[i + j] = (word >> j) & 1 ? kept : dropped;
    }
  }
}

// The bits of a value in a dtype.
uint64_t value_bits(double value, DType dtype) {
  double wide[1 + kPadding] = {value};
  uint64_t bits = 0;
  store_block<double>(wide, 1, &bits, dtype, 0);
  return bits;
}

// Calls body(uint16_t{}), body(uint32_t{}) or body(uint64_t{}).
template <typename Body>
void with_bits(DType dtype, const Body& body) {
  switch (item_size(dtype)) {
    case 2:
      return body(uint16_t{});
    case 4:
      return body(uint32_t{});
    default:
      return body(uint64_t{});
  }
}

void fill_range(const Fill& fill, int64_t begin, int64_t end) {
  const uint64_t kept = value_bits(fill.kept, fill.dtype);
  const uint64_t dropped = value_bits(fill.dropped, fill.dtype);
  with_bits(fill.dtype, [&](auto zero) {
    using U = decltype(zero);
    U* out = static_cast<U*>(fill.out) + begin;
    if (fill.mask == nullptr) {
      return fill_values(out, end - begin, static_cast<U>(kept));
    }
    fill.mask->require(end);
    fill_selected(out, end - begin, static_cast<U>(kept), static_cast<U>(dropped), fill.mask->at(begin));
  });
}

} // namespace

uint64_t max_magnitude(const void* x, DType dtype, int64_t n) {
  uint64_t result = 0;
  with_bits(dtype, [&](auto zero) { result = max_bits(static_cast<const decltype(zero)*>(x), n); });
  return result;
}

uint64_t magnitude_bits(double value, DType dtype) {
  return value_bits(std::fabs(value), dtype);
}

uint64_t fill_and_scan(const Fill& fill) {
  const int64_t chunks = div_up(fill.n, kChunk);
  const int64_t first = fill.skip != nullptr ? -1 : 0; // ticket -1 moves the generator
  std::atomic<int64_t> ticket{first};
  std::atomic<uint64_t> largest{0};
  run_workers(std::min(worker_count(), chunks - first), [&](int64_t) {
    uint64_t own = 0;
    for (int64_t t; (t = ticket.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
      if (t < 0) {
        fill.skip->skip(fill.n);
        continue;
      }
      const int64_t begin = t * kChunk;
      const int64_t end = std::min(fill.n, begin + kChunk);
      const char* x = static_cast<const char*>(fill.x) + begin * item_size(fill.in);
      own = std::max(own, max_magnitude(x, fill.in, end - begin));
      fill_range(fill, begin, end);
    }
    for (uint64_t seen = largest.load(); seen < own && !largest.compare_exchange_weak(seen, own);) {
    }
  });
  return largest.load();
}

void fill_group_with_nan(void* out, DType dtype, const Shape& shape, bool channels_last, int64_t group) {
  const uint64_t bits = value_bits(std::numeric_limits<double>::quiet_NaN(), dtype);
  const int64_t D = shape.D();
  with_bits(dtype, [&](auto zero) {
    using U = decltype(zero);
    U* data = static_cast<U*>(out);
    if (!channels_last) {
      return fill_values(data + group * shape.group_size(), shape.group_size(), static_cast<U>(bits));
    }
    data += group / shape.G * shape.C * shape.S + group % shape.G * D;
    for (int64_t s = 0; s < shape.S; ++s) {
      fill_values(data + s * shape.C, D, static_cast<U>(bits));
    }
  });
}

void group_magnitudes(const void* x, DType dtype, const Shape& shape, bool channels_last, uint64_t* result) {
  const int64_t D = shape.D();
  at::parallel_for(0, shape.N * shape.G, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const auto at = [&](int64_t element) { return static_cast<const char*>(x) + element * item_size(dtype); };
      if (!channels_last) {
        result[group] = max_magnitude(at(group * shape.group_size()), dtype, shape.group_size());
        continue;
      }
      result[group] = 0;
      const int64_t first = group / shape.G * shape.C * shape.S + group % shape.G * D;
      for (int64_t s = 0; s < shape.S; ++s) {
        result[group] = std::max(result[group], max_magnitude(at(first + s * shape.C), dtype, D));
      }
    }
  });
}

template <typename acc>
bool any_gradient(
    const Shape& shape, double eps, const void* x, const acc* gamma, const acc* beta, const Program& program) {
  const int64_t D = shape.D();
  const int64_t size = shape.group_size();
  const bool affine = gamma != nullptr || beta != nullptr;
  const RowMoments<acc> moments(program.in, size);
  const RowParts parts(D, shape.S);
  const Schedule schedule(shape.N * shape.G, moments.parts(), parts.count(), size * item_size(program.in));
  const int64_t stride = kBlock + kPadding;
  const int64_t scratch_size = 3 * stride + backward_scratch(program, kBlock);
  const int64_t state_bytes = div_up(moments.state_bytes(), 64) * 64;
  const Buffer<uint8_t> states(schedule.slots() * state_bytes);
  const Buffer<acc> coefficients(schedule.slots() * (2 * D + 2));
  const Buffer<acc> scratch(schedule.workers() * scratch_size);
  std::atomic<bool> found{false};

  const auto row = [&](int64_t unit) { return static_cast<const char*>(x) + unit * size * item_size(program.in); };
  const auto statistics = [&](int64_t unit, int64_t part, int64_t slot, int64_t) {
    if (!found.load(std::memory_order_relaxed)) {
      moments.run_part(row(unit), part, states.get() + slot * state_bytes);
    }
  };
  const auto finish = [&](int64_t unit, int64_t slot) {
    if (found.load(std::memory_order_relaxed)) {
      return;
    }
    const auto [mean, var] = moments.finish(row(unit), states.get() + slot * state_bytes);
    const acc rstd = reciprocal_std(var, eps);
    // eager multiplies zero sums by rstd^3 and by the mean
    if (!std::isfinite(mean) || !std::isfinite(rstd * rstd * rstd)) {
      found.store(true, std::memory_order_relaxed);
    }
    acc* scale = coefficients.get() + slot * (2 * D + 2);
    for (int64_t d = 0; d < D; ++d) {
      const int64_t c = unit % shape.G * D + d;
      scale[d] = Affine<acc>::scale(rstd, gamma, c);
      scale[D + d] = Affine<acc>::shift(scale[d], mean, beta, c);
    }
    scale[2 * D] = mean;
    scale[2 * D + 1] = rstd;
  };
  const auto look = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    acc* y = scratch.get() + worker * scratch_size;
    acc* g = y + stride;
    acc* converted = g + stride;
    const acc* scale = coefficients.get() + slot * (2 * D + 2);
    for (int64_t begin = parts.begin(part); begin < parts.end(part); begin += kBlock) {
      if (found.load(std::memory_order_relaxed)) {
        return;
      }
      const int64_t n = std::min(kBlock, parts.end(part) - begin);
      const acc* values = view_block(x, program.in, unit * size + begin, n, converted);
      normalise_rows(
          values, y, begin, n, shape.S, affine ? scale : nullptr, scale + D, scale[2 * D], scale[2 * D + 1]);
      // a NaN gradient becomes 0 exactly where an op drops it whatever it is
      std::fill(g, g + n, std::numeric_limits<acc>::quiet_NaN());
      run_backward(program, y, g, n, {}, converted + stride);
      bool any = false;
      for (int64_t i = 0; i < n; ++i) {
        any |= g[i] != acc(0);
      }
      if (any) {
        found.store(true, std::memory_order_relaxed);
      }
    }
  };
  schedule.run(statistics, finish, look);
  return found.load();
}

template bool any_gradient<float>(const Shape&, double, const void*, const float*, const float*, const Program&);
template bool any_gradient<double>(const Shape&, double, const void*, const double*, const double*, const Program&);

} // namespace gnfuse
