#include "program.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>

namespace gnfuse {
namespace {

struct Spec {
  const char* name;
  OpCode code;
  int params;
  bool kink; // piecewise linear, with a gradient that jumps
};

constexpr Spec kSpecs[] = {
    {"constant", OpCode::constant, 1, false},
    {"minimum", OpCode::minimum, 1, true},
    {"maximum", OpCode::maximum, 1, true},
    {"clamp", OpCode::clamp, 2, true},
    {"hardtanh", OpCode::hardtanh, 2, true},
    {"relu", OpCode::relu, 0, true},
    {"threshold", OpCode::threshold, 2, true},
    {"leaky_relu", OpCode::leaky_relu, 1, true},
    {"abs", OpCode::abs, 0, true},
    {"neg", OpCode::neg, 0, false},
    {"add", OpCode::add, 1, false},
    {"rsub", OpCode::rsub, 1, false},
    {"mul", OpCode::mul, 1, false},
    {"div", OpCode::div, 1, false},
    {"rdiv", OpCode::rdiv, 1, false},
    {"square", OpCode::square, 0, false},
    {"silu", OpCode::silu, 0, false},
    {"gelu", OpCode::gelu, 0, false},
    {"gelu_tanh", OpCode::gelu_tanh, 0, false},
    {"sigmoid", OpCode::sigmoid, 0, false},
    {"tanh", OpCode::tanh, 0, false},
    {"hardswish", OpCode::hardswish, 0, false},
    {"hardsigmoid", OpCode::hardsigmoid, 0, false},
    {"elu", OpCode::elu, 1, false},
    {"softplus", OpCode::softplus, 2, false},
    {"mish", OpCode::mish, 0, false},
    {"to", OpCode::to, 1, false},
    {"dropout", OpCode::dropout, 1, false},
};

std::string strip(const std::string& text) {
  const auto first = text.find_first_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(strip(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return parts;
}

DType parse_dtype(const std::string& word) {
  if (word == "float16") return DType::f16;
  if (word == "bfloat16") return DType::bf16;
  if (word == "float32") return DType::f32;
  if (word == "float64") return DType::f64;
  throw std::invalid_argument("to(dtype): no such dtype: '" + word + "'");
}

struct ParsedStep {
  const Spec* spec;
  double params[2] = {0, 0};
  DType to = DType::f32;
};

ParsedStep parse_step(const std::string& part) {
  const size_t open = part.find('(');
  if (open == std::string::npos || part.back() != ')') {
    throw std::invalid_argument("not a step: '" + part + "'");
  }
  const std::string name = part.substr(0, open);
  const auto* spec = std::find_if(std::begin(kSpecs), std::end(kSpecs), [&](const Spec& s) { return name == s.name; });
  if (spec == std::end(kSpecs)) {
    throw std::invalid_argument("unknown op: '" + name + "'");
  }
  ParsedStep step{spec};
  const std::string inside = strip(part.substr(open + 1, part.size() - open - 2));
  const auto words = inside.empty() ? std::vector<std::string>{} : split(inside, ',');
  if (static_cast<int>(words.size()) != spec->params) {
    throw std::invalid_argument("wrong number of parameters: '" + part + "'");
  }
  if (spec->code == OpCode::to) {
    step.to = parse_dtype(words[0]);
    return step;
  }
  for (size_t i = 0; i < words.size(); ++i) {
    size_t used = 0;
    try {
      step.params[i] = std::stod(words[i], &used); // reads inf, -inf and nan as Python writes them
    } catch (const std::out_of_range&) { // a subnormal double
      step.params[i] = std::strtod(words[i].c_str(), nullptr);
      used = words[i].size();
    } catch (const std::invalid_argument&) {
    }
    if (used != words[i].size()) {
      throw std::invalid_argument("not a number: '" + words[i] + "' in '" + part + "'");
    }
  }
  return step;
}

std::vector<ParsedStep> parse(const std::string& text) {
  std::vector<ParsedStep> steps;
  if (!strip(text).empty()) {
    for (const auto& part : split(text, ';')) {
      steps.push_back(parse_step(part));
    }
  }
  return steps;
}

bool is_rounded_after(OpCode code) {
  // these give values of the dtype when they get some; leaky_relu multiplies
  switch (code) {
    case OpCode::minimum:
    case OpCode::maximum:
    case OpCode::clamp:
    case OpCode::hardtanh:
    case OpCode::relu:
    case OpCode::threshold:
    case OpCode::abs:
    case OpCode::neg:
      return true;
    default:
      return false;
  }
}

bool derivative_needs_input(OpCode code) {
  switch (code) {
    case OpCode::constant:
    case OpCode::neg:
    case OpCode::add:
    case OpCode::rsub:
    case OpCode::mul:
    case OpCode::div:
    case OpCode::to:
    case OpCode::round:
    case OpCode::dropout:
      return false;
    default:
      return true;
  }
}

class Compiler {
 public:
  Compiler(DType in, Rounding rounding, int64_t kinks = 0) : rounding_(rounding), kinks_to_come_(kinks), now_(in) {
    program_.in = program_.out = in;
    program_.rounding = rounding;
    // a GroupNorm output is computed in float (double for float64 inputs): rounding matters below that
    wide_ = in == DType::f64 ? DType::f64 : DType::f32;
    rounded_ = in == wide_;
  }

  void add(const ParsedStep& step) {
    const OpCode code = step.spec->code;
    if (code == OpCode::constant && !program_.steps.empty()) {
      throw std::invalid_argument("constant(value) comes first in a chain");
    }
    if (code == OpCode::dropout && program_.dropout >= 0) {
      throw std::invalid_argument("a chain has one dropout");
    }
    if (rounding_ == Rounding::every_step || kinks_to_come_ > 0 || code == OpCode::to) {
      round(now_);
    }
    kinks_to_come_ -= step.spec->kink ? 1 : 0;
    if (code == OpCode::to) {
      push({OpCode::to, now_, step.to, {0, 0}, {0, 0}}); // rounds, so the value is one of the new dtype
      now_ = step.to;
      return;
    }
    if (code == OpCode::rdiv) { // torch computes c / x as reciprocal(x) * c
      push({OpCode::reciprocal, now_, now_, {0, 0}, {0, 0}});
      rounded_ = now_ == wide_;
      if (rounding_ == Rounding::every_step || kinks_to_come_ > 0) {
        round(now_);
      }
    }
    Step out{code == OpCode::rdiv ? OpCode::mul : code, now_, now_, {step.params[0], step.params[1]}, {0, 0}};
    out.p[0] = round_to(out.raw[0], now_);
    out.p[1] = round_to(out.raw[1], now_);
    if (code == OpCode::constant) {
      program_.has_constant = true;
      program_.constant = out.p[0];
    } else if (code == OpCode::dropout) {
      set_dropout(step.params[0]);
    }
    push(out);
    rounded_ = (rounded_ && is_rounded_after(code)) || code == OpCode::constant || now_ == wide_;
  }

  Program finish() {
    if (rounding_ == Rounding::every_step) {
      round(now_);
    }
    program_.out = now_;
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      if (derivative_needs_input(program_.steps[i].code)) {
        program_.last_saved = static_cast<int>(i);
      }
    }
    return std::move(program_);
  }

 private:
  void push(const Step& step) {
    program_.steps.push_back(step);
  }

  void round(DType dtype) {
    if (!rounded_) {
      push({OpCode::round, dtype, dtype, {0, 0}, {0, 0}});
      rounded_ = true;
    }
  }

  void set_dropout(double p) {
    if (!(p > 0 && p < 1)) {
      throw std::invalid_argument("a dropout step has 0 < p < 1");
    }
    program_.dropout = static_cast<int>(program_.steps.size());
    program_.keep_probability = 1 - p;
    // eager divides a mask of ones by 1 - p: in float for the 16-bit dtypes, then rounds
    program_.noise_scale = now_ == DType::f64 ? 1.0 / (1 - p) : 1.0f / static_cast<float>(1 - p);
    program_.noise_scale = round_to(program_.noise_scale, now_);
  }

  Program program_;
  Rounding rounding_;
  int64_t kinks_to_come_;
  DType now_; // the dtype that the value has in eager
  DType wide_;
  bool rounded_; // whether the value is one of dtype now_
};

Program compile(const std::string& text, DType in, Rounding rounding) {
  const auto steps = parse(text);
  const auto kinks = std::count_if(steps.begin(), steps.end(), [](const ParsedStep& step) { return step.spec->kink; });
  Compiler compiler(in, rounding, kinks);
  for (const auto& step : steps) {
    compiler.add(step);
  }
  return compiler.finish();
}

Program compile_kink_prefix(const std::string& text, DType in) {
  Compiler compiler(in, Rounding::every_step);
  for (const auto& step : parse(text)) {
    if (!step.spec->kink) {
      break;
    }
    compiler.add(step);
  }
  return compiler.finish();
}

// Programs by text. A graph holds few chains and runs them many times: nothing is ever evicted.
class Cache {
 public:
  template <typename Make>
  const Program& get(const std::string& text, int slot, const Make& make) {
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      const auto found = maps_[slot].find(text);
      if (found != maps_[slot].end()) {
        return *found->second;
      }
    }
    auto made = std::make_unique<Program>(make());
    std::unique_lock<std::shared_mutex> lock(mutex_);
    return *maps_[slot].try_emplace(text, std::move(made)).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Program>> maps_[12];
};

Cache& cache() {
  static Cache instance;
  return instance;
}

std::atomic<double> clamp_gradient{1.0};

} // namespace

double round_to(double value, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return static_cast<float>(c10::Half(static_cast<float>(value)));
    case DType::bf16:
      return static_cast<float>(c10::BFloat16(static_cast<float>(value)));
    case DType::f32:
      return static_cast<float>(value);
    default:
      return value;
  }
}

const Program& get_program(const std::string& text, DType in, Rounding rounding) {
  const int slot = static_cast<int>(in) * 3 + static_cast<int>(rounding);
  return cache().get(text, slot, [&] { return compile(text, in, rounding); });
}

const Program& get_kink_prefix(const std::string& source, DType in) {
  return cache().get(source, static_cast<int>(in) * 3 + 2, [&] { return compile_kink_prefix(source, in); });
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const auto& spec : kSpecs) {
    names.emplace_back(spec.name);
  }
  return names;
}

void set_clamp_boundary_gradient(double value) {
  clamp_gradient.store(value);
}

double clamp_boundary_gradient() {
  return clamp_gradient.load(std::memory_order_relaxed);
}

} // namespace gnfuse
