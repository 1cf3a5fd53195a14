#include "lanes.h"

#include <cstring>

namespace gnfuse {
namespace {

template <typename T>
void load_16bit(const T* data, int64_t n, float* out) {
  using V = Vec<T>;
  for (int64_t i = 0; i < n; i += V::size()) {
    const auto pair = at::vec::convert_to_float<T>(V::loadu(data + i, std::min<int64_t>(n - i, V::size())));
    std::get<0>(pair).store(out + i);
    std::get<1>(pair).store(out + i + V::size() / 2);
  }
}

template <typename T>
Vec<T> narrow(const float* values) {
  return at::vec::convert_from_float<T>(Vec<float>::loadu(values), Vec<float>::loadu(values + Vec<float>::size()));
}

template <typename T>
void store_16bit(const float* values, int64_t n, T* data) {
  using V = Vec<T>;
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) {
    narrow<T>(values + i).store(data + i);
  }
  if (i < n) {
    narrow<T>(values + i).store(data + i, static_cast<int>(n - i));
  }
}

template <typename T>
void round_16bit(const float* values, float* out, int64_t n) {
  using V = Vec<T>;
  for (int64_t i = 0; i < n; i += V::size()) {
    const auto pair = at::vec::convert_to_float<T>(narrow<T>(values + i));
    std::get<0>(pair).store(out + i);
    std::get<1>(pair).store(out + i + V::size() / 2);
  }
}

// A conversion between any two types, element by element: float64 tensors and `to` from them.
template <typename From, typename To>
void convert(const From* from, int64_t n, To* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<To>(from[i]);
  }
}

template <typename T>
void round_double(const double* values, double* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<double>(static_cast<T>(values[i]));
  }
}

} // namespace

template <>
void load_block<float>(const void* data, DType dtype, int64_t offset, int64_t n, float* out) {
  switch (dtype) {
    case DType::f16:
      return load_16bit(static_cast<const c10::Half*>(data) + offset, n, out);
    case DType::bf16:
      return load_16bit(static_cast<const c10::BFloat16*>(data) + offset, n, out);
    case DType::f32:
      std::memcpy(out, static_cast<const float*>(data) + offset, n * sizeof(float));
      return;
    case DType::f64:
      return convert(static_cast<const double*>(data) + offset, n, out);
  }
}

template <>
void load_block<double>(const void* data, DType dtype, int64_t offset, int64_t n, double* out) {
  switch (dtype) {
    case DType::f16:
      return convert(static_cast<const c10::Half*>(data) + offset, n, out);
    case DType::bf16:
      return convert(static_cast<const c10::BFloat16*>(data) + offset, n, out);
    case DType::f32:
      return convert(static_cast<const float*>(data) + offset, n, out);
    case DType::f64:
      std::memcpy(out, static_cast<const double*>(data) + offset, n * sizeof(double));
      return;
  }
}

template <>
void store_block<float>(const float* values, int64_t n, void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::f16:
      return store_16bit(values, n, static_cast<c10::Half*>(data) + offset);
    case DType::bf16:
      return store_16bit(values, n, static_cast<c10::BFloat16*>(data) + offset);
    case DType::f32:
      std::memcpy(static_cast<float*>(data) + offset, values, n * sizeof(float));
      return;
    case DType::f64:
      return convert(values, n, static_cast<double*>(data) + offset);
  }
}

template <>
void store_block<double>(const double* values, int64_t n, void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::f16:
      return convert(values, n, static_cast<c10::Half*>(data) + offset);
    case DType::bf16:
      return convert(values, n, static_cast<c10::BFloat16*>(data) + offset);
    case DType::f32:
      return convert(values, n, static_cast<float*>(data) + offset);
    case DType::f64:
      std::memcpy(static_cast<double*>(data) + offset, values, n * sizeof(double));
      return;
  }
}

template <>
void round_block<float>(const float* values, float* out, int64_t n, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return round_16bit<c10::Half>(values, out, n);
    case DType::bf16:
      return round_16bit<c10::BFloat16>(values, out, n);
    default:
      if (out != values) {
        std::memcpy(out, values, n * sizeof(float));
      }
  }
}

template <>
void round_block<double>(const double* values, double* out, int64_t n, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return round_double<c10::Half>(values, out, n);
    case DType::bf16:
      return round_double<c10::BFloat16>(values, out, n);
    case DType::f32:
      return round_double<float>(values, out, n);
    case DType::f64:
      if (out != values) {
        std::memcpy(out, values, n * sizeof(double));
      }
  }
}

} // namespace gnfuse
