// Schemas and CPU kernels. Fake kernels and autograd are in gnfuse/kernels/ops.py.
#include "operators.h"
#include "program.h"

#include <torch/library.h>

namespace {

const std::vector<at::Tag> kTags = {at::Tag::pt2_compliant_tag};
const std::vector<at::Tag> kRandomTags = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};

} // namespace

TORCH_LIBRARY(gnfuse, m) {
  m.def(
      "group_norm_pointwise(Tensor x, Tensor? weight, Tensor? bias, int num_groups, float eps, str chain, str source, "
      "bool check_batch) -> (Tensor out, Tensor mean, Tensor rstd)",
      kTags);
  m.def(
      "group_norm_dropout(Tensor x, Tensor? weight, Tensor? bias, int num_groups, float eps, str chain, str source, "
      "bool training, int site, bool check_batch) -> (Tensor out, Tensor mean, Tensor rstd, Tensor rng_state)",
      kRandomTags);
  m.def(
      "group_norm_pointwise_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
      "int num_groups, float eps, str chain, str source, bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
      kTags);
  m.def(
      "group_norm_dropout_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
      "Tensor rng_state, int num_groups, float eps, str chain, str source, bool training, bool[3] output_mask) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)",
      kTags);
  // for tests and probes
  m.def("_apply_chain(Tensor x, str chain, bool every_step) -> Tensor", kTags);
  m.def("_apply_chain_backward(Tensor grad, Tensor x, str chain, bool every_step) -> Tensor", kTags);
  m.def("_draw_mask(int size, float keep_probability) -> Tensor", kRandomTags);
  m.def("_statistics_match_eager() -> bool", &gnfuse::statistics_match_eager);
  m.def("_mask_matches_eager() -> bool", &gnfuse::mask_matches_eager);
  m.def("_set_clamp_boundary_gradient(float value) -> ()", &gnfuse::set_clamp_boundary_gradient);
  m.def("_op_names() -> str[]", &gnfuse::op_names);
}

TORCH_LIBRARY_IMPL(gnfuse, CPU, m) {
  m.impl("group_norm_pointwise", &gnfuse::group_norm_pointwise);
  m.impl("group_norm_dropout", &gnfuse::group_norm_dropout);
  m.impl("group_norm_pointwise_backward", &gnfuse::group_norm_pointwise_backward);
  m.impl("group_norm_dropout_backward", &gnfuse::group_norm_dropout_backward);
  m.impl("_apply_chain", &gnfuse::apply_chain);
  m.impl("_apply_chain_backward", &gnfuse::apply_chain_backward);
}

TORCH_LIBRARY_IMPL(gnfuse, CompositeExplicitAutograd, m) {
  m.impl("_draw_mask", &gnfuse::draw_mask);
}
