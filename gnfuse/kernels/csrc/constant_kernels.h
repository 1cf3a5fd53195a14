// The passes over memory that the constant fold needs; neither knows nor cares about the layout.
#pragma once

#include "kernels.h"

namespace gnfuse {

// The largest |x| as bits of x's dtype with the sign cleared. Bits order magnitudes, infinity and NaN on top.
uint64_t max_magnitude(const void* x, DType dtype, int64_t n);

uint64_t magnitude_bits(double value, DType dtype);

// Reads x and writes the constant in one go: out[i] = kept, or `dropped` where the mask says so. Returns max_magnitude(x).
// `skip`, when given, is moved on by n draws meanwhile.
struct Fill {
  const void* x;
  DType in;
  void* out;
  DType dtype;
  int64_t n;
  double kept;
  double dropped;
  MaskStream* mask;
  VectorTwister* skip;
};
uint64_t fill_and_scan(const Fill& fill);

// Writes NaN to the elements of one group.
void fill_group_with_nan(void* out, DType dtype, const Shape& shape, bool channels_last, int64_t group);

// Per (n, g): max_magnitude.
void group_magnitudes(const void* x, DType dtype, const Shape& shape, bool channels_last, uint64_t* result);

// Whether any element of a contiguous x lets a gradient through the kink ops of `program`, or any group has statistics
// that are not finite. Needs statistics that equal eager's.
template <typename acc>
bool any_gradient(
    const Shape& shape, double eps, const void* x, const acc* gamma, const acc* beta, const Program& program);

} // namespace gnfuse
