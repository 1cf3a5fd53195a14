#include "constant.h"

#include "constant_kernels.h"
#include "generator.h"
#include "interpreter.h"
#include "lanes.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>


#include <cmath>

namespace gnfuse {
namespace {

// What the steps after the constant make of it, each rounded as eager rounds it; `mask` as for run_forward.
double constant_value(const Program& program, const MaskView& mask) {
  double result = 0;
  with_accumulator(program.in, [&](auto zero) {
    using acc = decltype(zero);
    const Buffer<acc> block(1);
    std::fill(block.get(), block.get() + kPadding, acc(0));
    run_forward<acc>(program, block.get(), 1, mask);
    result = static_cast<double>(block.get()[0]);
  });
  return result;
}

// The largest |value| of a parameter, infinity when one is not finite.
double largest(const Tensor& parameter, double without) {
  if (!parameter.defined()) {
    return without;
  }
  const Tensor wide = parameter.to(at::kDouble);
  double result = 0;
  for (int64_t i = 0; i < wide.numel(); ++i) {
    const double magnitude = std::fabs(wide.const_data_ptr<double>()[i]);
    result = std::isfinite(magnitude) ? std::max(result, magnitude) : INFINITY;
  }
  return result;
}

// A bound L such that eager's GroupNorm output holds no NaN where all |x| < L; 0 when there is none.
//
// With m = max |x|, M the group's size and F the largest finite float (double for float64):
//  - statistics: every deviation from a running mean is at most 2m, so sums of squares stay below 4 M m^2; they and the
//    channels_last path's E[x^2], E[x]^2 are finite when 8 M m^2 <= F. Then rstd <= 1/sqrt(eps) =: r.
//  - y = a x + (beta - a mean), |a| <= r max|gamma|, |mean| <= 2m: no term and no sum leaves the finite range when
//    4 r max|gamma| m <= F/4 and |beta| <= F/4; without an infinity and with finite a there is no NaN.
double safe_magnitude(const Input& input, double eps) {
  const double F = input.dtype == DType::f64 ? 1.7e308 : 3.4e38;
  const double gamma = largest(input.weight, 1.0);
  const double beta = largest(input.bias, 0.0);
  // a denormal or zero eps gives an infinite rstd for a constant group; so may one that an older torch rounds first
  if (!(round_to(eps, input.dtype) > 0) || eps < 1e-30 || !(gamma <= F / 4) || !(beta <= F / 4)) {
    return 0;
  }
  const double r = 1.0 / std::sqrt(eps);
  const double statistics = std::sqrt(F / (8.0 * static_cast<double>(input.shape.group_size())));
  return std::min(statistics, gamma > 0 ? F / (16.0 * r * gamma) : statistics);
}

std::tuple<Tensor, Tensor, Tensor> eager_group_norm(const Input& input, double eps) {
  const auto& s = input.shape;
  return at::native_group_norm(input.x, input.weight, input.bias, s.N, s.C, s.S, s.G, eps);
}

// Where the fast guard could not tell: puts NaN where eager's GroupNorm output is NaN.
void mark_nan(const Input& input, double eps, double limit, const Tensor& out, DType dtype) {
  const auto& shape = input.shape;
  std::vector<uint64_t> magnitudes(shape.N * shape.G);
  group_magnitudes(input.x.const_data_ptr(), input.dtype, shape, input.channels_last, magnitudes.data());
  const uint64_t infinity = magnitude_bits(INFINITY, input.dtype);
  bool sure = limit > 0;
  for (const uint64_t magnitude : magnitudes) {
    sure = sure && (magnitude >= infinity || magnitude < magnitude_bits(limit, input.dtype));
  }
  if (!sure) {
    const Tensor y = std::get<0>(eager_group_norm(input, eps));
    out.masked_fill_(at::isnan(y), NAN);
    return;
  }
  for (int64_t group = 0; group < shape.N * shape.G; ++group) {
    if (magnitudes[group] >= infinity) {
      fill_group_with_nan(out.mutable_data_ptr(), dtype, shape, input.channels_last, group);
    }
  }
}

template <typename acc>
void differentiate(const Program& program, const Tensor& y, const Tensor& grad, MaskStream* mask, const Tensor& dy) {
  const int64_t numel = y.numel();
  at::parallel_for(0, div_up(numel, kPart), 1, [&](int64_t first, int64_t last) {
    const Buffer<acc> values(kBlock);
    const Buffer<acc> g(kBlock);
    const Buffer<acc> scratch(backward_scratch(program, kBlock));
    for (int64_t begin = first * kPart; begin < std::min(numel, last * kPart); begin += kBlock) {
      const int64_t n = std::min(kBlock, numel - begin);
      load_block<acc>(y.const_data_ptr(), program.in, begin, n, values.get());
      load_block<acc>(grad.const_data_ptr(), program.out, begin, n, g.get());
      run_backward<acc>(
          program, values.get(), g.get(), n, mask == nullptr ? MaskView{} : mask->at(begin), scratch.get());
      store_block<acc>(g.get(), n, dy.mutable_data_ptr(), program.in, begin);
    }
  });
}

// Eager's own kernels, and eager's rounding of every value and derivative in between.
std::tuple<Tensor, Tensor, Tensor> exact_backward(
    const Input& input, const Tensor& grad, double eps, const std::string& source, const Tensor* state,
    std::array<bool, 3> wanted) {
  const auto& s = input.shape;
  const Program& program = get_program(source, input.dtype, Rounding::every_step);
  const auto [y, mean, rstd] = eager_group_norm(input, eps);
  const auto mask = state == nullptr ? nullptr : replay_mask(*state, s.numel(), program.keep_probability);
  if (mask != nullptr) {
    mask->require(s.numel());
  }
  const Tensor dy = at::empty_like(input.x);
  with_accumulator(input.dtype, [&](auto zero) { differentiate<decltype(zero)>(program, y, grad, mask.get(), dy); });
  // dx is always asked for: ATen's channels_last kernel writes it without looking whether it is wanted (torch 2.13)
  auto result = at::native_group_norm_backward(
      dy, input.x, mean, rstd, input.weight, s.N, s.C, s.S, s.G, {true, wanted[1], wanted[2]});
  const auto like = [&](const Tensor& gradient, const Tensor& of) {
    const auto type = of.defined() ? of.scalar_type() : input.x.scalar_type();
    return gradient.defined() ? gradient.to(type) : at::empty({0}, input.x.options().dtype(type));
  };
  return {like(std::get<0>(result), input.x), like(std::get<1>(result), input.weight), like(std::get<2>(result), input.bias)};
}

template <typename acc>
bool chain_is_dead(const Input& input, double eps, const std::string& source) {
  const Parameter<acc> gamma(input.weight);
  const Parameter<acc> beta(input.bias);
  return !any_gradient<acc>(
      input.shape, eps, input.x.const_data_ptr(), gamma.data, beta.data, get_kink_prefix(source, input.dtype));
}

bool gradient_is_zero(const Input& input, double eps, const std::string& source) {
  if (input.channels_last || !statistics_match_eager() || !std::isfinite(largest(input.weight, 1.0))) {
    return false;
  }
  bool dead = false;
  with_accumulator(input.dtype, [&](auto zero) { dead = chain_is_dead<decltype(zero)>(input, eps, source); });
  return dead;
}

template <typename acc>
bool same_as_eager(at::ScalarType type) {
  // one vector and a bit, many chunks, several parts of the cascade; with and without parameters
  for (const int64_t spatial : {21, 1700, 60000}) {
    for (const bool affine : {false, true}) {
      const auto options = at::TensorOptions().dtype(type);
      auto generator = at::detail::createCPUGenerator(7);
      const Tensor x = at::randn({2, 4, spatial}, generator, at::kFloat).add_(0.5).to(type);
      const MaybeTensor weight = affine ? MaybeTensor(at::randn({4}, generator, at::kFloat).to(type)) : std::nullopt;
      const MaybeTensor bias = affine ? MaybeTensor(at::randn({4}, generator, at::kFloat).to(type)) : std::nullopt;
      const Input input(x, weight, bias, 2);
      const Tensor expected = std::get<0>(eager_group_norm(input, 1e-5));
      const Tensor out = at::empty_like(x);
      const Tensor statistics = at::empty({2, 4}, input.statistics_options());
      const Parameter<acc> gamma(input.weight);
      const Parameter<acc> beta(input.bias);
      acc* mean = statistics.mutable_data_ptr<acc>();
      forward_contiguous<acc>(
          {input.shape, 1e-5, x.const_data_ptr(), gamma.data, beta.data, out.mutable_data_ptr(), mean, mean + 4,
           &get_program("", input.dtype), nullptr});
      if (!out.equal(expected)) {
        return false;
      }
    }
  }
  return true;
}

} // namespace

bool statistics_match_eager() {
  static const bool matches = same_as_eager<float>(at::kFloat) && same_as_eager<float>(at::kHalf) &&
      same_as_eager<float>(at::kBFloat16) && same_as_eager<double>(at::kDouble);
  return matches;
}

Tensor constant_forward(const Input& input, double eps, const std::string& chain, Tensor* state) {
  const Program& program = get_program(chain, input.dtype, Rounding::every_step);
  Tensor out = input.empty_output(program.out);
  const int64_t n = input.shape.numel();
  if (n == 0) {
    return out;
  }
  const bool draws = state != nullptr;
  constexpr uint8_t ones[16] = {1};
  constexpr uint8_t zeros[16] = {0};
  const double kept = constant_value(program, draws ? MaskView{ones, 0} : MaskView{});
  const double dropped = draws ? constant_value(program, {zeros, 0}) : kept;
  Fill fill{input.x.const_data_ptr(), input.dtype, out.mutable_data_ptr(), program.out, n, kept, dropped, nullptr, nullptr};
  uint64_t magnitude = 0;
  if (draws && kept != dropped) {
    ForwardMask mask(n, program.keep_probability);
    fill.mask = &mask.stream();
    magnitude = fill_and_scan(fill);
    mask.commit();
    *state = mask.state_before();
  } else {
    // the mask makes no difference: the generator moves on all the same
    GeneratorSkip skip(draws ? n : 0, program.keep_probability);
    fill.skip = skip.twister();
    magnitude = fill_and_scan(fill);
    if (draws) {
      skip.commit();
      *state = skip.state_before();
    }
  }
  const double limit = safe_magnitude(input, eps);
  if (!(limit > 0) || magnitude >= magnitude_bits(limit, input.dtype)) {
    mark_nan(input, eps, limit, out, program.out);
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> constant_backward(
    const Input& input, const Tensor& grad, double eps, const std::string& source, const Tensor* state,
    std::array<bool, 3> wanted) {
  if (input.shape.numel() > 0 && !gradient_is_zero(input, eps, source)) {
    return exact_backward(input, grad, eps, source, state, wanted);
  }
  const auto zeros = [&](bool want, const Tensor& parameter) {
    const auto options = parameter.defined() ? parameter.options() : input.x.options();
    return at::zeros({want ? input.shape.C : 0}, options);
  };
  Tensor dx = wanted[0] ? input.empty_output(input.dtype).zero_() : at::empty({0}, input.x.options());
  return {dx, zeros(wanted[1], input.weight), zeros(wanted[2], input.bias)};
}

} // namespace gnfuse
