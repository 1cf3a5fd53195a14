// The gradient of GroupNorm and its chain on channels_last tensors.
#include "interpreter.h"
#include "kernels.h"
#include "lanes.h"
#include "schedule.h"
#include "slabs.h"

#include <vector>

namespace gnfuse {
namespace {

// The arrays of a sample that repeat from row to row.
template <typename acc>
struct Coefficients {
  acc* scale; // y = scale * x + shift
  acc* shift;
  acc* mean;
  acc* c1; // dx = c1 * dy + c2 * (x - mean) + c3
  acc* c2;
  acc* c3;
  Coefficients(acc* data, int64_t tile)
      : scale(data), shift(data + tile), mean(data + 2 * tile), c1(data + 3 * tile), c2(data + 4 * tile), c3(data + 5 * tile) {}
};

template <typename acc>
void accumulate_tile(const acc* dy, const acc* x, const acc* mean, acc* sum_dy, acc* sum_dy_x, int64_t n) {
  using V = Vec<acc>;
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) {
    const V g = V::loadu(dy + i);
    (V::loadu(sum_dy + i) + g).store(sum_dy + i);
    at::vec::fmadd(g, V::loadu(x + i) - V::loadu(mean + i), V::loadu(sum_dy_x + i)).store(sum_dy_x + i);
  }
  for (; i < n; ++i) {
    sum_dy[i] += dy[i];
    sum_dy_x[i] += dy[i] * (x[i] - mean[i]);
  }
}

} // namespace

template <typename acc>
void backward_channels_last(const Backward<acc>& b) {
  using V = Vec<acc>;
  const Shape& shape = b.shape;
  const int64_t C = shape.C;
  const int64_t D = shape.D();
  const int64_t G = shape.G;
  const DType in = b.program->in;
  const int64_t sample = C * shape.S;
  const bool keeps_dy = item_size(in) == static_cast<int64_t>(sizeof(acc)); // as in contiguous_backward.cpp
  const bool affine = b.gamma != nullptr || b.beta != nullptr;
  const SlabParts parts(C, shape.S);
  const Schedule schedule(
      shape.N, parts.count(), b.dx == nullptr ? 0 : parts.count(), 2 * sample * item_size(in));

  const int64_t tile = parts.tile() + kPadding;
  const int64_t scratch_size = 6 * tile + backward_scratch(*b.program, parts.tile());
  const Buffer<acc> scratch(schedule.workers() * scratch_size);
  const Buffer<acc> coefficients(schedule.slots() * 6 * tile);
  std::vector<double> partial(schedule.slots() * parts.count() * 2 * C); // sums of dy and dy * (x - mean)
  std::vector<double> totals(shape.N * 2 * C); // per sample: dbeta's and dgamma's terms

  const auto prepare = [&](int64_t unit, int64_t slot) {
    const Coefficients<acc> k(coefficients.get() + slot * 6 * tile, tile);
    for (int64_t c = 0; c < C; ++c) {
      const acc mean = b.mean[unit * G + c / D];
      const acc rstd = b.rstd[unit * G + c / D];
      k.mean[c] = mean;
      k.scale[c] = affine ? Affine<acc>::scale(rstd, b.gamma, c) : rstd;
      k.shift[c] = affine ? Affine<acc>::shift(k.scale[c], mean, b.beta, c) : mean;
    }
    parts.repeat(k.mean);
    parts.repeat(k.scale);
    parts.repeat(k.shift);
  };
  struct Block {
    const acc* x;
    const acc* dy;
  };
  const auto differentiate = [&](int64_t element, int64_t n, const Coefficients<acc>& k, acc* space) -> Block {
    acc* y = space;
    acc* g = space + tile;
    acc* converted = space + 2 * tile;
    const acc* x = view_block(b.x, in, element, n, converted);
    load_block(b.grad, b.program->out, element, n, g);
    for (int64_t i = 0; i < n; i += V::size()) {
      const V v = V::loadu(x + i, std::min<int64_t>(V::size(), n - i));
      const V scale = V::loadu(k.scale + i);
      const V shift = V::loadu(k.shift + i);
      (affine ? at::vec::fmadd(v, scale, shift) : (v - shift) * scale).store(y + i);
    }
    run_backward(*b.program, y, g, n, b.mask == nullptr ? MaskView{} : b.mask->at(element), space + 6 * tile);
    return {x, g};
  };
  if (schedule.shared()) {
    for (int64_t unit = 0; unit < shape.N; ++unit) {
      prepare(unit, unit);
    }
  }
  const auto sums = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    if (part == 0 && !schedule.shared()) {
      prepare(unit, slot);
    }
    acc* space = scratch.get() + worker * scratch_size;
    acc* sum_dy = space + 3 * tile;
    acc* sum_dy_x = space + 4 * tile;
    const Coefficients<acc> k(coefficients.get() + slot * 6 * tile, tile);
    std::fill(sum_dy, sum_dy + parts.tile(), acc(0));
    std::fill(sum_dy_x, sum_dy_x + parts.tile(), acc(0));
    if (b.mask != nullptr) {
      b.mask->require(unit * sample + parts.end(part) * C);
    }
    parts.for_tiles(part, [&](int64_t offset, int64_t n) {
      const int64_t element = unit * sample + offset;
      const Block block = differentiate(element, n, k, space);
      accumulate_tile(block.dy, block.x, k.mean, sum_dy, sum_dy_x, n);
      if (b.dx != nullptr && keeps_dy) {
        store_block(block.dy, n, b.dx, in, element);
      }
    });
    double* result = partial.data() + (slot * parts.count() + part) * 2 * C;
    for (int64_t c = 0; c < C; ++c) {
      double s = 0;
      double t = 0;
      for (int64_t i = c; i < parts.tile(); i += C) {
        s += sum_dy[i];
        t += sum_dy_x[i];
      }
      result[c] = s;
      result[C + c] = t;
    }
  };
  const auto finish = [&](int64_t unit, int64_t slot) {
    const Coefficients<acc> k(coefficients.get() + slot * 6 * tile, tile);
    double* total = totals.data() + unit * 2 * C;
    for (int64_t part = 0; part < parts.count(); ++part) {
      const double* own = partial.data() + (slot * parts.count() + part) * 2 * C;
      for (int64_t i = 0; i < 2 * C; ++i) {
        total[i] += own[i];
      }
    }
    const double size = static_cast<double>(shape.group_size());
    for (int64_t g = 0; g < G; ++g) {
      const double rstd = b.rstd[unit * G + g];
      double s1 = 0;
      double s2 = 0;
      for (int64_t c = g * D; c < (g + 1) * D; ++c) {
        const double gamma = b.gamma == nullptr ? 1.0 : static_cast<double>(b.gamma[c]);
        total[C + c] *= rstd;
        k.c1[c] = static_cast<acc>(rstd * gamma);
        s1 += static_cast<double>(k.c1[c]) * total[c]; // of c1 as rounded: a group of one value cancels to 0 exactly
        s2 += gamma * total[C + c];
      }
      for (int64_t c = g * D; c < (g + 1) * D; ++c) {
        k.c2[c] = static_cast<acc>(-s2 * rstd * rstd / size);
        k.c3[c] = static_cast<acc>(-s1 / size);
      }
    }
    parts.repeat(k.c1);
    parts.repeat(k.c2);
    parts.repeat(k.c3);
  };
  const auto input_gradient = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    acc* space = scratch.get() + worker * scratch_size;
    acc* result = space + 5 * tile;
    const Coefficients<acc> k(coefficients.get() + slot * 6 * tile, tile);
    parts.for_tiles(part, [&](int64_t offset, int64_t n) {
      const int64_t element = unit * sample + offset;
      const Block block = keeps_dy
          ? Block{view_block<acc>(b.x, in, element, n, nullptr), view_block<acc>(b.dx, in, element, n, nullptr)}
          : differentiate(element, n, k, space);
      acc* out = keeps_dy ? static_cast<acc*>(b.dx) + element : result;
      for (int64_t i = 0; i < n; i += V::size()) {
        const int64_t m = std::min<int64_t>(V::size(), n - i);
        const V centred = V::loadu(block.x + i, m) - V::loadu(k.mean + i);
        const V own = V::loadu(k.c1 + i) * V::loadu(block.dy + i, m);
        (at::vec::fmadd(V::loadu(k.c2 + i), centred, own) + V::loadu(k.c3 + i)).store(out + i, static_cast<int>(m));
      }
      if (!keeps_dy) {
        store_block(result, n, b.dx, in, element);
      }
    });
  };
  schedule.run(sums, finish, input_gradient);

  for (int64_t c = 0; c < C; ++c) {
    b.dbeta[c] = 0;
    b.dgamma[c] = 0;
    for (int64_t n = 0; n < shape.N; ++n) {
      b.dbeta[c] += totals[n * 2 * C + c];
      b.dgamma[c] += totals[n * 2 * C + C + c];
    }
  }
}

template void backward_channels_last<float>(const Backward<float>&);
template void backward_channels_last<double>(const Backward<double>&);

} // namespace gnfuse
