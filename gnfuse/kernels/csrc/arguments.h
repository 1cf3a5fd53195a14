// From checked tensors to what the kernels take.
#pragma once

#include "kernels.h"
#include "operators.h"

namespace gnfuse {

DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);

// The input of an op, checked as eager's group_norm checks it.
struct Input {
  Input(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t num_groups);

  Shape shape;
  DType dtype;
  bool channels_last;
  Tensor x; // dense, in the memory format that eager's output has
  Tensor weight; // contiguous, in its own dtype; undefined for none
  Tensor bias;

  at::MemoryFormat format() const;
  at::TensorOptions statistics_options() const; // of mean and rstd
  Tensor empty_output(DType out) const;
};

// F.group_norm's ValueError where a group has one value.
void check_batch_size(const Tensor& x, int64_t num_groups);

// gamma or beta in the kernels' type; keeps the converted copy alive.
template <typename acc>
struct Parameter {
  explicit Parameter(const Tensor& tensor);
  Tensor holder;
  const acc* data;
};

// Calls body(float{}) or body(double{}), the type that the kernels compute in.
template <typename Body>
void with_accumulator(DType dtype, const Body& body) {
  if (dtype == DType::f64) {
    body(double{});
  } else {
    body(float{});
  }
}

} // namespace gnfuse
