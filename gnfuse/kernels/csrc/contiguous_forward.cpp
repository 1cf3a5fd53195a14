// GroupNorm and its chain on contiguous tensors: a unit is one (sample, group), whose elements lie together.
#include "interpreter.h"
#include "kernels.h"
#include "lanes.h"
#include "moments.h"
#include "rows.h"
#include "schedule.h"

namespace gnfuse {

template <typename acc>
void forward_contiguous(const Forward<acc>& f) {
  const Shape& shape = f.shape;
  const int64_t D = shape.D();
  const int64_t size = shape.group_size();
  const DType in = f.program->in;
  const DType out = f.program->out;
  const bool affine = f.gamma != nullptr || f.beta != nullptr;
  const RowMoments<acc> moments(in, size);
  const RowParts parts(D, shape.S);
  const Schedule schedule(shape.N * shape.G, moments.parts(), parts.count(), size * item_size(in));

  // all scratch is allocated here: nothing in the parallel region may throw
  const int64_t state_bytes = div_up(moments.state_bytes(), 64) * 64;
  const Buffer<uint8_t> states(schedule.slots() * state_bytes);
  const Buffer<acc> coefficients(schedule.slots() * 2 * D);
  const Buffer<acc> blocks(schedule.workers() * 2 * (kBlock + kPadding));

  const auto row = [&](int64_t unit) { return static_cast<const char*>(f.x) + unit * size * item_size(in); };
  const auto statistics = [&](int64_t unit, int64_t part, int64_t slot, int64_t) {
    if (f.mask != nullptr && part == 0) {
      f.mask->try_draw((unit + 1) * size); // while nobody draws: do it now, the statistics need no mask
    }
    moments.run_part(row(unit), part, states.get() + slot * state_bytes);
  };
  const auto finish = [&](int64_t unit, int64_t slot) {
    const auto [mean, var] = moments.finish(row(unit), states.get() + slot * state_bytes);
    f.mean[unit] = mean;
    f.rstd[unit] = reciprocal_std(var, f.eps);
    acc* scale = coefficients.get() + slot * 2 * D;
    const int64_t first = unit % shape.G * D;
    for (int64_t d = 0; d < D; ++d) {
      scale[d] = Affine<acc>::scale(f.rstd[unit], f.gamma, first + d);
      scale[D + d] = Affine<acc>::shift(scale[d], mean, f.beta, first + d);
    }
  };
  const auto apply = [&](int64_t unit, int64_t part, int64_t slot, int64_t worker) {
    acc* block = blocks.get() + worker * 2 * (kBlock + kPadding);
    acc* converted = block + kBlock + kPadding;
    const acc* scale = affine ? coefficients.get() + slot * 2 * D : nullptr;
    if (f.mask != nullptr) {
      f.mask->require(unit * size + parts.end(part));
    }
    for (int64_t begin = parts.begin(part); begin < parts.end(part); begin += kBlock) {
      const int64_t n = std::min(kBlock, parts.end(part) - begin);
      const int64_t element = unit * size + begin;
      const acc* x = view_block(f.x, in, element, n, converted);
      // whole vectors are computed where they belong; a block with a tail would run over into its neighbour
      const bool direct = item_size(out) == static_cast<int64_t>(sizeof(acc)) && n % Vec<acc>::size() == 0;
      acc* y = direct ? static_cast<acc*>(f.out) + element : block;
      normalise_rows(x, y, begin, n, shape.S, scale, scale + D, f.mean[unit], f.rstd[unit]);
      run_forward(*f.program, y, n, f.mask == nullptr ? MaskView{} : f.mask->at(element));
      if (!direct) {
        store_block(y, n, f.out, out, element);
      }
    }
  };
  schedule.run(statistics, finish, apply);
}

template void forward_contiguous<float>(const Forward<float>&);
template void forward_contiguous<double>(const Forward<double>&);

} // namespace gnfuse
