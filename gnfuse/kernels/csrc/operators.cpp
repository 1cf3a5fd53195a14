#include "operators.h"

#include "arguments.h"
#include "constant.h"
#include "generator.h"
#include "interpreter.h"
#include "kernels.h"
#include "lanes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace gnfuse {
namespace {

Tensor nothing(const at::TensorOptions& options) {
  return at::empty({0}, options);
}

const Program& checked_program(const std::string& text, DType in, bool has_dropout) {
  const Program& program = get_program(text, in);
  TORCH_CHECK_VALUE((program.dropout >= 0) == has_dropout, has_dropout
      ? "group_norm_dropout takes a chain with one dropout, got '"
      : "group_norm_pointwise takes a chain without dropout, got '", text, "'");
  return program;
}

struct ForwardResult {
  Tensor out, mean, rstd;
};

template <typename acc>
void run_kernel(const Input& input, double eps, const Program& program, MaskStream* mask, ForwardResult& result) {
  const Parameter<acc> gamma(input.weight);
  const Parameter<acc> beta(input.bias);
  const Forward<acc> f{
      input.shape, eps, input.x.const_data_ptr(), gamma.data, beta.data, result.out.mutable_data_ptr(),
      result.mean.template mutable_data_ptr<acc>(), result.rstd.template mutable_data_ptr<acc>(), &program, mask};
  input.channels_last ? forward_channels_last(f) : forward_contiguous(f);
}

// Whether sums of squares may have overflowed in eager's channels_last kernel, which subtracts E[x]^2 from E[x^2] in
// float: what it then gives (NaN or beta) is its own.
template <typename acc>
bool may_overflow(const Shape& shape, const ForwardResult& result) {
  const acc* mean = result.mean.template const_data_ptr<acc>();
  const acc* rstd = result.rstd.template const_data_ptr<acc>();
  const double limit = static_cast<double>(std::numeric_limits<acc>::max()) / 8;
  bool safe = true;
  for (int64_t i = 0; i < shape.N * shape.G; ++i) {
    const double m = mean[i];
    const double r = rstd[i];
    safe = safe && (m * m + 1 / (r * r)) * static_cast<double>(shape.group_size()) < limit;
  }
  return !safe; // NaN statistics are not safe either
}

// The chain on eager's own GroupNorm output: slow, and rarely needed.
template <typename acc>
void forward_through_eager(
    const Input& input, double eps, const Program& program, MaskStream* mask, ForwardResult& result) {
  const auto& s = input.shape;
  const auto [y, mean, rstd] =
      at::native_group_norm(input.x, input.weight, input.bias, s.N, s.C, s.S, s.G, eps);
  result.mean.copy_(mean);
  result.rstd.copy_(rstd);
  const Buffer<acc> block(kBlock);
  for (int64_t begin = 0; begin < s.numel(); begin += kBlock) {
    const int64_t n = std::min(kBlock, s.numel() - begin);
    load_block<acc>(y.const_data_ptr(), program.in, begin, n, block.get());
    run_forward<acc>(program, block.get(), n, mask == nullptr ? MaskView{} : mask->at(begin));
    store_block<acc>(block.get(), n, result.out.mutable_data_ptr(), program.out, begin);
  }
}

ForwardResult general_forward(const Input& input, double eps, const Program& program, MaskStream* mask) {
  const auto& shape = input.shape;
  ForwardResult result{input.empty_output(program.out), {}, {}};
  if (shape.numel() == 0) {
    result.mean = at::zeros({shape.N, shape.G}, input.statistics_options());
    result.rstd = at::full({shape.N, shape.G}, NAN, input.statistics_options());
    return result;
  }
  result.mean = at::empty({shape.N, shape.G}, input.statistics_options());
  result.rstd = at::empty({shape.N, shape.G}, input.statistics_options());
  with_accumulator(input.dtype, [&](auto acc) {
    run_kernel<decltype(acc)>(input, eps, program, mask, result);
    if (input.channels_last && may_overflow<decltype(acc)>(shape, result)) {
      forward_through_eager<decltype(acc)>(input, eps, program, mask, result); // all of the mask has been drawn
    }
  });
  return result;
}

// Gradients that nobody asked for are returned with size 0.
std::tuple<Tensor, Tensor, Tensor> gradients_without_values(const Input& input, std::array<bool, 3> wanted, bool zeros) {
  const auto& x = input.x;
  const auto options = [&](const Tensor& parameter) { return parameter.defined() ? parameter.options() : x.options(); };
  const auto channels = [&](bool want, const Tensor& parameter) {
    const int64_t size = want ? input.shape.C : 0;
    return zeros ? at::zeros({size}, options(parameter)) : at::empty({size}, options(parameter));
  };
  Tensor dx = wanted[0] ? input.empty_output(input.dtype) : nothing(x.options());
  if (zeros && wanted[0]) {
    dx.zero_();
  }
  return {dx, channels(wanted[1], input.weight), channels(wanted[2], input.bias)};
}

template <typename acc>
void run_backward_kernel(
    const Input& input, const Tensor& grad, const Tensor& mean, const Tensor& rstd, const Program& program,
    MaskStream* mask, const Tensor& dx, double* dgamma, double* dbeta) {
  const Parameter<acc> gamma(input.weight);
  const Parameter<acc> beta(input.bias);
  const Backward<acc> b{
      input.shape, grad.const_data_ptr(), input.x.const_data_ptr(), gamma.data, beta.data,
      mean.const_data_ptr<acc>(), rstd.const_data_ptr<acc>(), &program, mask,
      dx.numel() == 0 ? nullptr : dx.mutable_data_ptr(), dgamma, dbeta};
  input.channels_last ? backward_channels_last(b) : backward_contiguous(b);
}

std::tuple<Tensor, Tensor, Tensor> general_backward(
    const Input& input, const Tensor& grad, const Tensor& mean, const Tensor& rstd, const Program& program,
    MaskStream* mask, std::array<bool, 3> wanted) {
  auto result = gradients_without_values(input, wanted, input.shape.numel() == 0);
  if (input.shape.numel() == 0 || !(wanted[0] || wanted[1] || wanted[2])) {
    return result;
  }
  const Tensor sums = at::empty({2, input.shape.C}, input.x.options().dtype(at::kDouble));
  double* dgamma = sums.mutable_data_ptr<double>();
  double* dbeta = dgamma + input.shape.C;
  with_accumulator(input.dtype, [&](auto acc) {
    run_backward_kernel<decltype(acc)>(
        input, grad, mean.contiguous(), rstd.contiguous(), program, mask, std::get<0>(result), dgamma, dbeta);
  });
  if (wanted[1]) {
    std::get<1>(result).copy_(sums.select(0, 0));
  }
  if (wanted[2]) {
    std::get<2>(result).copy_(sums.select(0, 1));
  }
  return result;
}

// The gradient in the memory order of x, whatever it came in.
Tensor dense_gradient(const Tensor& grad, const Input& input, const Program& program) {
  TORCH_CHECK(
      grad.sizes() == input.x.sizes() && grad.scalar_type() == scalar_type_of(program.out),
      "the gradient has shape ", grad.sizes(), " and dtype ", grad.scalar_type(), ", expected ", input.x.sizes(),
      " and ", scalar_type_of(program.out));
  if (grad.strides() == input.x.strides() && input.x.is_non_overlapping_and_dense()) {
    return grad;
  }
  return grad.contiguous(input.format());
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm_pointwise(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t num_groups, double eps,
    std::string chain, std::string source, bool check_batch) {
  if (check_batch) {
    check_batch_size(x, num_groups);
  }
  const Input input(x, weight, bias, num_groups);
  const Program& program = checked_program(chain, input.dtype, false);
  if (program.has_constant) {
    Tensor out = constant_forward(input, eps, chain, nullptr);
    return {out, nothing(input.statistics_options()), nothing(input.statistics_options())};
  }
  const auto result = general_forward(input, eps, program, nullptr);
  return {result.out, result.mean, result.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_dropout(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t num_groups, double eps,
    std::string chain, std::string source, bool training, int64_t /*site*/, bool check_batch) {
  if (check_batch) {
    check_batch_size(x, num_groups);
  }
  const Input input(x, weight, bias, num_groups);
  const Program& program = checked_program(chain, input.dtype, true);
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const bool draws = training && input.shape.numel() > 0;
  const auto statistics = input.statistics_options();
  if (program.has_constant) {
    Tensor state = nothing(bytes);
    Tensor out = constant_forward(input, eps, chain, draws ? &state : nullptr);
    return {out, nothing(statistics), nothing(statistics), state};
  }
  if (!draws) {
    const auto result = general_forward(input, eps, program, nullptr);
    return {result.out, result.mean, result.rstd, nothing(bytes)};
  }
  ForwardMask mask(input.shape.numel(), program.keep_probability);
  const auto result = general_forward(input, eps, program, &mask.stream());
  mask.commit();
  return {result.out, result.mean, result.rstd, mask.state_before()};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_pointwise_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
    const Tensor& rstd, int64_t num_groups, double eps, std::string chain, std::string source,
    std::array<bool, 3> output_mask) {
  const Input input(x, weight, bias, num_groups);
  const Program& program = checked_program(source, input.dtype, false);
  const Tensor dense = dense_gradient(grad, input, program);
  if (get_program(chain, input.dtype).has_constant) {
    return constant_backward(input, dense, eps, source, nullptr, output_mask);
  }
  return general_backward(input, dense, mean, rstd, program, nullptr, output_mask);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_dropout_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
    const Tensor& rstd, const Tensor& rng_state, int64_t num_groups, double eps, std::string chain,
    std::string source, bool training, std::array<bool, 3> output_mask) {
  const Input input(x, weight, bias, num_groups);
  const Program& program = checked_program(source, input.dtype, true);
  const Tensor dense = dense_gradient(grad, input, program);
  const bool draws = training && input.shape.numel() > 0;
  if (get_program(chain, input.dtype).has_constant) {
    return constant_backward(input, dense, eps, source, draws ? &rng_state : nullptr, output_mask);
  }
  const auto mask = draws ? replay_mask(rng_state, input.shape.numel(), program.keep_probability) : nullptr;
  return general_backward(input, dense, mean, rstd, program, mask.get(), output_mask);
}

Tensor apply_chain(const Tensor& x, std::string chain, bool every_step) {
  const DType in = dtype_of(x.scalar_type());
  const Program& program = get_program(chain, in, every_step ? Rounding::every_step : Rounding::kinks);
  const Tensor dense = x.contiguous();
  Tensor out = at::empty_like(dense, dense.options().dtype(scalar_type_of(program.out)));
  with_accumulator(in, [&](auto zero) {
    using acc = decltype(zero);
    const Buffer<acc> block(kBlock);
    for (int64_t begin = 0; begin < x.numel(); begin += kBlock) {
      const int64_t n = std::min(kBlock, x.numel() - begin);
      load_block<acc>(dense.const_data_ptr(), in, begin, n, block.get());
      run_forward<acc>(program, block.get(), n, {});
      store_block<acc>(block.get(), n, out.mutable_data_ptr(), program.out, begin);
    }
  });
  return out;
}

Tensor apply_chain_backward(const Tensor& grad, const Tensor& x, std::string chain, bool every_step) {
  const DType in = dtype_of(x.scalar_type());
  const Program& program = get_program(chain, in, every_step ? Rounding::every_step : Rounding::kinks);
  const Tensor dense = x.contiguous();
  const Tensor g = grad.contiguous();
  TORCH_CHECK(g.scalar_type() == scalar_type_of(program.out) && g.sizes() == x.sizes());
  Tensor out = at::empty_like(dense);
  with_accumulator(in, [&](auto zero) {
    using acc = decltype(zero);
    const Buffer<acc> y(kBlock);
    const Buffer<acc> dy(kBlock);
    const Buffer<acc> scratch(backward_scratch(program, kBlock));
    for (int64_t begin = 0; begin < x.numel(); begin += kBlock) {
      const int64_t n = std::min(kBlock, x.numel() - begin);
      load_block<acc>(dense.const_data_ptr(), in, begin, n, y.get());
      load_block<acc>(g.const_data_ptr(), program.out, begin, n, dy.get());
      run_backward<acc>(program, y.get(), dy.get(), n, {}, scratch.get());
      store_block<acc>(dy.get(), n, out.mutable_data_ptr(), in, begin);
    }
  });
  return out;
}

} // namespace gnfuse
