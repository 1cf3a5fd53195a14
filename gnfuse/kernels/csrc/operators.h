// The ops on tensors, as the schemas in registration.cpp state them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace gnfuse {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor> group_norm_pointwise(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t num_groups, double eps,
    std::string chain, std::string source, bool check_batch);

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_dropout(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t num_groups, double eps,
    std::string chain, std::string source, bool training, int64_t site, bool check_batch);

std::tuple<Tensor, Tensor, Tensor> group_norm_pointwise_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
    const Tensor& rstd, int64_t num_groups, double eps, std::string chain, std::string source,
    std::array<bool, 3> output_mask);

std::tuple<Tensor, Tensor, Tensor> group_norm_dropout_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
    const Tensor& rstd, const Tensor& rng_state, int64_t num_groups, double eps, std::string chain,
    std::string source, bool training, std::array<bool, 3> output_mask);

// For tests and probes.
Tensor apply_chain(const Tensor& x, std::string chain, bool every_step);
Tensor apply_chain_backward(const Tensor& grad, const Tensor& x, std::string chain, bool every_step);
Tensor draw_mask(int64_t size, double keep_probability);
bool statistics_match_eager();
bool mask_matches_eager();

} // namespace gnfuse
