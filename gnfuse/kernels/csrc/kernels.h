// What the kernels are given: pointers, sizes and programs. ops.cpp has checked everything.
#pragma once

#include "program.h"
#include "random.h"

namespace gnfuse {

// x is [N, C, spatial] in memory order N, C, S (contiguous) or N, S, C (channels_last).
struct Shape {
  int64_t N, C, S, G;
  int64_t D() const {
    return C / G;
  }
  int64_t group_size() const {
    return D() * S;
  }
  int64_t numel() const {
    return N * C * S;
  }
};

template <typename acc>
struct Forward {
  Shape shape;
  double eps;
  const void* x;
  const acc* gamma; // [C] or nullptr
  const acc* beta;
  void* out;
  acc* mean; // [N, G]
  acc* rstd;
  const Program* program;
  MaskStream* mask; // nullptr: no dropout
};

template <typename acc>
struct Backward {
  Shape shape;
  const void* grad; // of dtype program->out, in x's memory order
  const void* x;
  const acc* gamma;
  const acc* beta;
  const acc* mean;
  const acc* rstd;
  const Program* program;
  MaskStream* mask;
  void* dx; // x's dtype, or nullptr
  double* dgamma; // [C]: always filled
  double* dbeta;
};

template <typename acc>
void forward_contiguous(const Forward<acc>& f);
template <typename acc>
void forward_channels_last(const Forward<acc>& f);
template <typename acc>
void backward_contiguous(const Backward<acc>& b);
template <typename acc>
void backward_channels_last(const Backward<acc>& b);

// y = scale * x + shift with ATen's arithmetic; without gamma and beta it is (x - mean) * rstd.
template <typename acc>
struct Affine {
  static acc scale(acc rstd, const acc* gamma, int64_t c) {
    return gamma == nullptr ? rstd : rstd * gamma[c];
  }
  static acc shift(acc scale, acc mean, const acc* beta, int64_t c) {
    const acc b = beta == nullptr ? acc(0) : beta[c];
#if defined(__FMA__)
    return std::fma(-scale, mean, b); // ATen's compiler contracts here
#else
    return -scale * mean + b;
#endif
  }
};

// 1 / sqrt(max(var, 0) + eps), in double as ATen's kernel does because its eps is a double.
template <typename acc>
acc reciprocal_std(acc var, double eps) {
  return static_cast<acc>(acc(1) / std::sqrt(std::max(var, acc(0)) + eps));
}

} // namespace gnfuse
