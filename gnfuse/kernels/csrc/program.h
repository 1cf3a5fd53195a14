// A chain's text, parsed and made ready for the interpreter.
#pragma once

#include "common.h"

#include <string>
#include <vector>

namespace gnfuse {

enum class OpCode : uint8_t {
  constant,
  minimum,
  maximum,
  clamp,
  hardtanh,
  relu,
  threshold,
  leaky_relu,
  abs,
  neg,
  add,
  rsub,
  mul,
  div,
  rdiv,
  square,
  silu,
  gelu,
  gelu_tanh,
  sigmoid,
  tanh,
  hardswish,
  hardsigmoid,
  elu,
  softplus,
  mish,
  to,
  dropout,
  reciprocal, // the first half of rdiv; never written in a text
  round, // to the dtype that the value has in eager; inserted by the compiler, never written in a text
};

struct Step {
  OpCode code;
  DType from; // dtype of the input, in eager
  DType dtype; // of the output; differs for `to` only
  double raw[2]; // parameters as written
  double p[2]; // and rounded to the input's dtype, as eager's forward compares them
};

// How often a value is rounded to the dtype that it has in eager.
enum class Rounding : uint8_t {
  kinks, // every value up to the last op whose gradient jumps, so that ties fall where eager's do; after it, at the end
  every_step, // after every op and every derivative: eager's own values
};

struct Program {
  std::vector<Step> steps;
  DType in;
  DType out;
  Rounding rounding;
  bool has_constant = false; // the first step is constant(c)
  double constant = 0; // rounded to the input's dtype
  int dropout = -1; // index of the dropout step
  double keep_probability = 1; // 1 - p
  double noise_scale = 1; // what a kept element is multiplied by, rounded to the dtype at that step
  int last_saved = -1; // the last step whose derivative needs its input
};

// The program of a text as `gnfuse.chain.format_steps` writes it. Compiled once per (text, dtype, rounding) and kept for
// the life of the process. Throws std::invalid_argument naming the part that is not a step.
const Program& get_program(const std::string& text, DType in, Rounding rounding = Rounding::kinks);

// The program of the kink ops that `source` starts with (up to the first other op or dropout), every step rounded.
const Program& get_kink_prefix(const std::string& source, DType in);

// The names that the parser knows, for the test that compares them with gnfuse.chain.OPS.
std::vector<std::string> op_names();

// `value` rounded to a dtype and back.
double round_to(double value, DType dtype);

// torch's next release may change the gradient of clamp at its bounds from 1 to 0: gnfuse.kernels.probes asks it.
void set_clamp_boundary_gradient(double value);
double clamp_boundary_gradient();

} // namespace gnfuse
