// The constant fold: a chain that gives one value wherever the GroupNorm output is not NaN.
#pragma once

#include "arguments.h"

namespace gnfuse {

// The output. `state`, when given, says that a dropout mask is drawn (or the generator moved as if), and receives the
// generator's state before.
Tensor constant_forward(const Input& input, double eps, const std::string& chain, Tensor* state);

// Eager's gradients of `source` bit for bit. `state` as the forward returned it, nullptr without a draw.
std::tuple<Tensor, Tensor, Tensor> constant_backward(
    const Input& input, const Tensor& grad, double eps, const std::string& source, const Tensor* state,
    std::array<bool, 3> wanted);

} // namespace gnfuse
