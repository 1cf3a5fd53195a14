#include "arguments.h"

#include <ATen/ops/empty_like.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gnfuse {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "\"gnfuse::group_norm\" not implemented for '", type, "'");
  }
}

at::ScalarType scalar_type_of(DType dtype) {
  constexpr at::ScalarType types[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  return types[static_cast<int>(dtype)];
}

namespace {

void check_parameter(const char* name, const MaybeTensor& parameter, const Tensor& x) {
  if (parameter.has_value() && parameter->defined()) {
    TORCH_CHECK(
        parameter->dim() == 1 && parameter->numel() == x.size(1),
        "Expected ", name, " to be a vector of size equal to the number of channels in input, but got ", name,
        " of shape ", parameter->sizes(), " and input of shape ", x.sizes());
  }
}

// Eager takes parameters of the input's dtype, or float32 ones with a 16-bit input.
void check_dtypes(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const Tensor& first = weight.defined() ? weight : bias;
  if (!first.defined()) {
    return;
  }
  if (first.scalar_type() != x.scalar_type()) {
    TORCH_CHECK(
        first.scalar_type() == at::kFloat, "mixed dtype (CPU): expect parameter to have scalar type of Float");
    TORCH_CHECK(
        at::isReducedFloatingType(x.scalar_type()), "mixed dtype (CPU): all inputs must share same datatype.");
  }
  TORCH_CHECK(
      !bias.defined() || bias.scalar_type() == first.scalar_type(),
      "expected scalar type ", first.scalar_type(), " but found ", bias.scalar_type());
}

// A large output is fresh memory, and 4 KiB page faults cost more than the arithmetic: benchmarks/cpu_kernels.py's no. 83
// spends over half of its time in them. Ask for 2 MiB pages, as c10 does for every tensor under THP_MEM_ALLOC_ENABLE=1.
void advise_huge_pages(const Tensor& fresh) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t(2) << 20;
  if (static_cast<uintptr_t>(fresh.nbytes()) < 2 * page) {
    return;
  }
  const auto address = reinterpret_cast<uintptr_t>(fresh.mutable_data_ptr());
  const uintptr_t begin = (address + page - 1) / page * page;
  const uintptr_t end = (address + fresh.nbytes()) / page * page;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE); // a hint: failure changes nothing
  }
#endif
}

} // namespace

Input::Input(const Tensor& input, const MaybeTensor& w, const MaybeTensor& b, int64_t num_groups) {
  TORCH_CHECK(input.dim() >= 2, "Expected at least 2 dimensions for input tensor but received ", input.dim());
  TORCH_CHECK(num_groups > 0, "Expected num groups to be greater than 0, got ", num_groups);
  TORCH_CHECK(
      input.size(1) % num_groups == 0,
      "Expected number of channels in input to be divisible by num_groups, but got input of shape ",
      input.sizes(), " and num_groups=", num_groups);
  check_parameter("weight", w, input);
  check_parameter("bias", b, input);
  dtype = dtype_of(input.scalar_type());
  weight = w.has_value() && w->defined() ? w->contiguous() : Tensor();
  bias = b.has_value() && b->defined() ? b->contiguous() : Tensor();
  check_dtypes(input, weight, bias);
  const auto memory_format = input.suggest_memory_format();
  channels_last = memory_format != at::MemoryFormat::Contiguous;
  x = input.contiguous(memory_format);
  int64_t spatial = 1;
  for (const int64_t size : x.sizes().slice(2)) {
    spatial *= size;
  }
  shape = {x.size(0), x.size(1), spatial, num_groups};
}

at::MemoryFormat Input::format() const {
  return channels_last ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

at::TensorOptions Input::statistics_options() const {
  return at::TensorOptions().device(x.device()).dtype(dtype == DType::f64 ? at::kDouble : at::kFloat);
}

Tensor Input::empty_output(DType out) const {
  // as eager's chain: where a size of 1 leaves the format open, its pointwise ops take the contiguous strides
  const auto strides = x.is_contiguous() ? at::MemoryFormat::Contiguous : format();
  Tensor result = at::empty_like(x, x.options().dtype(scalar_type_of(out)), strides);
  advise_huge_pages(result);
  return result;
}

void check_batch_size(const Tensor& x, int64_t num_groups) {
  if (num_groups <= 0 || x.dim() < 2) {
    return; // refused with another message
  }
  int64_t values = x.size(0) * x.size(1) / num_groups;
  std::string sizes = "[" + std::to_string(values) + ", " + std::to_string(num_groups);
  for (const int64_t size : x.sizes().slice(2)) {
    values *= size;
    sizes += ", " + std::to_string(size);
  }
  TORCH_CHECK_VALUE(
      values != 1, "Expected more than 1 value per channel when training, got input size ", sizes, "]");
}

template <typename acc>
Parameter<acc>::Parameter(const Tensor& tensor) : data(nullptr) {
  if (tensor.defined()) {
    holder = tensor.to(sizeof(acc) == 8 ? at::kDouble : at::kFloat);
    data = holder.const_data_ptr<acc>();
  }
}

template struct Parameter<float>;
template struct Parameter<double>;

} // namespace gnfuse
