// The gradient of GroupNorm and its chain on contiguous tensors.
#include "interpreter.h"
#include "kernels.h"
#include "lanes.h"
#include "rows.h"
#include "schedule.h"

#include <vector>

namespace gnfuse {
namespace {

// Sums of dy and dy * (x - mean) over a row, in vectors of acc (a row inside a block is short), then in double.
template <typename acc>
void sum_row(const acc* dy, const acc* x, acc mean, int64_t n, double* sum_dy, double* sum_dy_x) {
  using V = Vec<acc>;
  const V m(mean);
  V s0(acc(0)), s1(acc(0)), t0(acc(0)), t1(acc(0));
  int64_t i = 0;
  for (; i + 2 * V::size() <= n; i += 2 * V::size()) {
    const V g0 = V::loadu(dy + i);
    const V g1 = V::loadu(dy + i + V::size());
    s0 = s0 + g0;
    s1 = s1 + g1;
    t0 = at::vec::fmadd(g0, V::loadu(x + i) - m, t0);
    t1 = at::vec::fmadd(g1, V::loadu(x + i + V::size()) - m, t1);
  }
  double rest_s = 0;
  double rest_t = 0;
  for (; i < n; ++i) {
    rest_s += dy[i];
    rest_t += static_cast<double>(dy[i]) * (x[i] - mean);
  }
  const auto add = [](const V& a, const V& b) { return a + b; };
  *sum_dy += rest_s + static_cast<double>(at::vec::vec_reduce_all<acc>(add, s0 + s1));
  *sum_dy_x += rest_t + static_cast<double>(at::vec::vec_reduce_all<acc>(add, t0 + t1));
}

} // namespace

template <typename acc>
void backward_contiguous(const Backward<acc>& b) {
  using V = Vec<acc>;
  const Shape& shape = b.shape;
  const int64_t D = shape.D();
  const int64_t S = shape.S;
  const int64_t size = shape.group_size();
  const DType in = b.program->in;
  // dx itself keeps dy between the passes, where it can hold it without rounding; else dy is computed twice
  const bool keeps_dy = item_size(in) == static_cast<int64_t>(sizeof(acc));
  const bool affine = b.gamma != nullptr || b.beta != nullptr;
  const RowParts parts(D, S);
  const int64_t parts2 = b.dx == nullptr ? 0 : parts.count();
  const Schedule schedule(shape.N * shape.G, parts.count(), parts2, 2 * size * item_size(in));

  const int64_t stride = kBlock + kPadding;
  const int64_t scratch_size = 4 * stride + backward_scratch(*b.program, kBlock);
  const Buffer<acc> scratch(schedule.workers() * scratch_size);
  const Buffer<acc> coefficients(schedule.slots() * (3 * D + 2));
  // [unit, channel, split, 2]
  std::vector<double> partial(shape.N * shape.C * parts.splits() * 2, 0.0);

  struct Block {
    const acc* x;
    const acc* dy;
  };
  // dy, the gradient of the GroupNorm output, for n elements from `begin` of a group
  const auto differentiate = [&](int64_t unit, int64_t begin, int64_t n, const acc* scale, acc* space) -> Block {
    acc* y = space;
    acc* g = space + stride;
    acc* converted = space + 2 * stride;
    const int64_t element = unit * size + begin;
    const acc* x = view_block(b.x, in, element, n, converted);
    load_block(b.grad, b.program->out, element, n, g);
    normalise_rows(x, y, begin, n, S, scale, scale + D, b.mean[unit], b.rstd[unit]);
    const MaskView mask = b.mask == nullptr ? MaskView{} : b.mask->at(element);
    run_backward(*b.program, y, g, n, mask, space + 4 * stride);
    return {x, g};
  };
  const auto prepare = [&](int64_t unit, acc* scale) {
    const int64_t first = unit % shape.G * D;
    for (int64_t d = 0; d < D; ++d) {
      scale[d] = Affine<acc>::scale(b.rstd[unit], b.gamma, first + d);
      scale[D + d] = Affine<acc>::shift(scale[d], b.mean[unit], b.beta, first + d);
    }
  };
  if (schedule.shared()) {
    for (int64_t unit = 0; unit < shape.N * shape.G; ++unit) {
      prepare(unit, coefficients.get() + unit * (3 * D + 2));
    }
  }

  const auto sums = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    acc* space = scratch.get() + worker * scratch_size;
    acc* scale = coefficients.get() + slot * (3 * D + 2);
    if (part == 0 && !schedule.shared()) {
      prepare(unit, scale);
    }
    if (b.mask != nullptr) {
      b.mask->require(unit * size + parts.end(part));
    }
    for (int64_t begin = parts.begin(part); begin < parts.end(part); begin += kBlock) {
      const int64_t n = std::min(kBlock, parts.end(part) - begin);
      const Block block = differentiate(unit, begin, n, affine ? scale : nullptr, space);
      const int64_t split = parts.splits() > 1 ? part % parts.splits() : 0;
      for_rows(begin, n, S, [&](int64_t c, int64_t offset, int64_t count) {
        double* sum = partial.data() + ((unit * D + c) * parts.splits() + split) * 2;
        sum_row(block.dy + offset, block.x + offset, b.mean[unit], count, sum, sum + 1);
      });
      if (b.dx != nullptr && keeps_dy) {
        store_block(block.dy, n, b.dx, in, unit * size + begin);
      }
    }
  };
  const auto finish = [&](int64_t unit, int64_t slot) {
    acc* c1 = coefficients.get() + slot * (3 * D + 2) + 2 * D;
    const int64_t first = unit % shape.G * D;
    const double rstd = b.rstd[unit];
    double s1 = 0;
    double s2 = 0;
    for (int64_t d = 0; d < D; ++d) {
      double* sum = partial.data() + (unit * D + d) * parts.splits() * 2;
      for (int64_t split = 1; split < parts.splits(); ++split) {
        sum[0] += sum[2 * split];
        sum[1] += sum[2 * split + 1];
      }
      sum[1] *= rstd;
      const double gamma = b.gamma == nullptr ? 1.0 : static_cast<double>(b.gamma[first + d]);
      c1[d] = static_cast<acc>(rstd * gamma);
      s1 += static_cast<double>(c1[d]) * sum[0]; // of c1 as rounded: a group of one value cancels to 0 exactly
      s2 += gamma * sum[1];
    }
    c1[D] = static_cast<acc>(-s2 * rstd * rstd / static_cast<double>(size));
    c1[D + 1] = static_cast<acc>(-s1 / static_cast<double>(size));
  };
  const auto input_gradient = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    acc* space = scratch.get() + worker * scratch_size;
    const acc* scale = coefficients.get() + slot * (3 * D + 2);
    const acc* c1 = scale + 2 * D;
    const V c2(c1[D]);
    const V c3(c1[D + 1]);
    const V mean(b.mean[unit]);
    acc* result = space + 3 * stride;
    for (int64_t begin = parts.begin(part); begin < parts.end(part); begin += kBlock) {
      const int64_t n = std::min(kBlock, parts.end(part) - begin);
      const int64_t element = unit * size + begin;
      const Block block = keeps_dy
          ? Block{view_block<acc>(b.x, in, element, n, nullptr), view_block<acc>(b.dx, in, element, n, nullptr)}
          : differentiate(unit, begin, n, affine ? scale : nullptr, space);
      for_rows(begin, n, S, [&](int64_t c, int64_t offset, int64_t count) {
        const V a(c1[c]);
        const acc* x = block.x + offset;
        const acc* dy = block.dy + offset;
        acc* out = keeps_dy ? static_cast<acc*>(b.dx) + element + offset : result + offset;
        int64_t i = 0;
        for (; i < count; i += V::size()) {
          const int64_t m = std::min<int64_t>(V::size(), count - i);
          const V centred = V::loadu(x + i, m) - mean;
          (at::vec::fmadd(c2, centred, a * V::loadu(dy + i, m)) + c3).store(out + i, static_cast<int>(m));
        }
      });
      if (!keeps_dy) {
        store_block(result, n, b.dx, in, element);
      }
    }
  };
  schedule.run(sums, finish, input_gradient);

  for (int64_t c = 0; c < shape.C; ++c) {
    b.dbeta[c] = 0;
    b.dgamma[c] = 0;
    for (int64_t n = 0; n < shape.N; ++n) {
      const double* sum = partial.data() + (n * shape.C + c) * parts.splits() * 2;
      b.dbeta[c] += sum[0];
      b.dgamma[c] += sum[1];
    }
  }
}

template void backward_contiguous<float>(const Backward<float>&);
template void backward_contiguous<double>(const Backward<double>&);

} // namespace gnfuse
