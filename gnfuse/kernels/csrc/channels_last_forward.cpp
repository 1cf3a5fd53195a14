// GroupNorm and its chain on channels_last tensors: a unit is one sample, vectorised over its channels.
#include "interpreter.h"
#include "kernels.h"
#include "lanes.h"
#include "schedule.h"
#include "slabs.h"

namespace gnfuse {
namespace {

// Mean and sum of squared deviations of one group in one part.
struct GroupMoments {
  double mean;
  double m2;
};

// Sums of x - shift and its square, elementwise over a tile.
template <typename acc>
void accumulate_tile(const acc* x, const acc* shift, acc* sum, acc* square, int64_t n) {
  using V = Vec<acc>;
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) {
    const V d = V::loadu(x + i) - V::loadu(shift + i);
    (V::loadu(sum + i) + d).store(sum + i);
    at::vec::fmadd(d, d, V::loadu(square + i)).store(square + i);
  }
  for (; i < n; ++i) {
    const acc d = x[i] - shift[i];
    sum[i] += d;
    square[i] += d * d;
  }
}

} // namespace

template <typename acc>
void forward_channels_last(const Forward<acc>& f) {
  using V = Vec<acc>;
  const Shape& shape = f.shape;
  const int64_t C = shape.C;
  const int64_t D = shape.D();
  const int64_t G = shape.G;
  const DType in = f.program->in;
  const DType out = f.program->out;
  const int64_t sample = C * shape.S;
  const bool affine = f.gamma != nullptr || f.beta != nullptr;
  const SlabParts parts(C, shape.S);
  const Schedule schedule(shape.N, parts.count(), parts.count(), sample * item_size(in));

  const int64_t tile = parts.tile() + kPadding;
  const Buffer<acc> scratch(schedule.workers() * 4 * tile);
  const Buffer<acc> coefficients(schedule.slots() * 2 * tile);
  const Buffer<GroupMoments> moments(schedule.slots() * parts.count() * G);

  // Per channel, deviations are taken from the part's first row: no cancellation, however large the mean.
  const auto statistics = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    if (f.mask != nullptr && part == 0) {
      f.mask->try_draw((unit + 1) * sample);
    }
    acc* shift = scratch.get() + worker * 4 * tile;
    acc* sum = shift + tile;
    acc* square = sum + tile;
    acc* converted = square + tile;
    const int64_t first = unit * sample + parts.begin(part) * C;
    load_block(f.x, in, first, C, shift);
    parts.repeat(shift);
    std::fill(sum, sum + parts.tile(), acc(0));
    std::fill(square, square + parts.tile(), acc(0));
    parts.for_tiles(part, [&](int64_t element, int64_t n) {
      accumulate_tile(view_block(f.x, in, unit * sample + element, n, converted), shift, sum, square, n);
    });
    const double rows = static_cast<double>(parts.end(part) - parts.begin(part));
    GroupMoments* result = moments.get() + (slot * parts.count() + part) * G;
    for (int64_t g = 0; g < G; ++g) {
      double mean = 0;
      double m2 = 0;
      for (int64_t d = 0; d < D; ++d) {
        const int64_t c = g * D + d;
        double s = 0;
        double q = 0;
        for (int64_t i = c; i < parts.tile(); i += C) {
          s += sum[i];
          q += square[i];
        }
        // Welford's merge of a channel (rows values) into the d channels before it
        const double channel_mean = shift[c] + s / rows;
        const double delta = channel_mean - mean;
        mean += delta / static_cast<double>(d + 1);
        m2 += std::max(q - s * s / rows, 0.0) + delta * delta * rows * static_cast<double>(d) / static_cast<double>(d + 1);
      }
      result[g] = {mean, m2};
    }
  };
  const auto finish = [&](int64_t unit, int64_t slot) {
    acc* scale = coefficients.get() + slot * 2 * tile;
    acc* shift = scale + tile;
    for (int64_t g = 0; g < G; ++g) {
      double count = 0;
      double mean = 0;
      double m2 = 0;
      for (int64_t part = 0; part < parts.count(); ++part) {
        const GroupMoments& own = moments.get()[(slot * parts.count() + part) * G + g];
        const double n = static_cast<double>((parts.end(part) - parts.begin(part)) * D);
        const double delta = own.mean - mean;
        count += n;
        mean += delta * n / count;
        m2 += own.m2 + delta * delta * n * (count - n) / count;
      }
      const acc m = f.mean[unit * G + g] = static_cast<acc>(mean);
      const acc r = f.rstd[unit * G + g] = reciprocal_std(static_cast<acc>(m2 / count), f.eps);
      for (int64_t c = g * D; c < (g + 1) * D; ++c) {
        scale[c] = affine ? Affine<acc>::scale(r, f.gamma, c) : r;
        shift[c] = affine ? Affine<acc>::shift(scale[c], m, f.beta, c) : m;
      }
    }
    parts.repeat(scale);
    parts.repeat(shift);
  };
  const auto apply = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    acc* y = scratch.get() + worker * 4 * tile;
    acc* converted = y + tile;
    const acc* scale = coefficients.get() + slot * 2 * tile;
    const acc* shift = scale + tile;
    if (f.mask != nullptr) {
      f.mask->require(unit * sample + parts.end(part) * C);
    }
    parts.for_tiles(part, [&](int64_t element, int64_t n) {
      const acc* x = view_block(f.x, in, unit * sample + element, n, converted);
      for (int64_t i = 0; i < n; i += V::size()) {
        const V v = V::loadu(x + i, std::min<int64_t>(V::size(), n - i));
        const V a = V::loadu(scale + i);
        const V b = V::loadu(shift + i);
        (affine ? at::vec::fmadd(v, a, b) : (v - b) * a).store(y + i);
      }
      run_forward(*f.program, y, n, f.mask == nullptr ? MaskView{} : f.mask->at(unit * sample + element));
      store_block(y, n, f.out, out, unit * sample + element);
    });
  };
  schedule.run(statistics, finish, apply);
}

template void forward_channels_last<float>(const Forward<float>&);
template void forward_channels_last<double>(const Forward<double>&);

} // namespace gnfuse
