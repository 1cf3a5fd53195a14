#include "interpreter.h"

#include "activations.h"
#include "lanes.h"

#include <cstring>

namespace gnfuse {
namespace {

template <typename Op, typename acc>
void map(const Step& step, const acc* from, acc* to, int64_t n) {
  using V = Vec<acc>;
  const Args<acc> args(step);
  for (int64_t i = 0; i < n; i += V::size()) {
    Op::forward(V::loadu(from + i), args).store(to + i);
  }
}

template <typename Op, typename acc>
void map_backward(const Step& step, const acc* x, acc* g, int64_t n) {
  using V = Vec<acc>;
  const Args<acc> args(step);
  for (int64_t i = 0; i < n; i += V::size()) {
    Op::backward(V::loadu(g + i), x == nullptr ? V(acc(0)) : V::loadu(x + i), args).store(g + i);
  }
}

// Calls `visit(Op{})` for the op of a code. constant, to, round and dropout are not among them.
template <typename acc, typename Visit>
void dispatch(OpCode code, const Visit& visit) {
  using O = Ops<acc>;
  switch (code) {
    case OpCode::minimum: return visit(typename O::Minimum{});
    case OpCode::maximum: return visit(typename O::Maximum{});
    case OpCode::clamp: return visit(typename O::Clamp{});
    case OpCode::hardtanh: return visit(typename O::Hardtanh{});
    case OpCode::relu: return visit(typename O::Relu{});
    case OpCode::threshold: return visit(typename O::Threshold{});
    case OpCode::leaky_relu: return visit(typename O::LeakyRelu{});
    case OpCode::abs: return visit(typename O::Abs{});
    case OpCode::neg: return visit(typename O::Neg{});
    case OpCode::add: return visit(typename O::Add{});
    case OpCode::rsub: return visit(typename O::Rsub{});
    case OpCode::mul: return visit(typename O::Mul{});
    case OpCode::div: return visit(typename O::Div{});
    case OpCode::reciprocal: return visit(typename O::Reciprocal{});
    case OpCode::square: return visit(typename O::Square{});
    case OpCode::silu: return visit(typename O::Silu{});
    case OpCode::gelu: return visit(typename O::Gelu{});
    case OpCode::gelu_tanh: return visit(typename O::GeluTanh{});
    case OpCode::sigmoid: return visit(typename O::Sigmoid{});
    case OpCode::tanh: return visit(typename O::Tanh{});
    case OpCode::hardswish: return visit(typename O::Hardswish{});
    case OpCode::hardsigmoid: return visit(typename O::Hardsigmoid{});
    case OpCode::elu: return visit(typename O::Elu{});
    case OpCode::softplus: return visit(typename O::Softplus{});
    case OpCode::mish: return visit(typename O::Mish{});
    case OpCode::rdiv: // compiled to reciprocal and mul
    case OpCode::constant:
    case OpCode::to:
    case OpCode::round:
    case OpCode::dropout:
      return;
  }
}

// The next 32 mask bits from bit `first` on; the bits are followed by at least eight bytes of padding.
inline uint32_t mask_word(const uint8_t* bits, int64_t first) {
  uint64_t word;
  std::memcpy(&word, bits + (first >> 3), sizeof(word));
  return static_cast<uint32_t>(word >> (first & 7));
}

template <typename acc>
Vec<acc> noise_vector(uint32_t word, acc scale) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (sizeof(acc) == 4) {
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(word), _mm512_set1_ps(scale));
  } else {
    return _mm512_maskz_mov_pd(static_cast<__mmask8>(word), _mm512_set1_pd(scale));
  }
#else
  alignas(64) acc noise[Vec<acc>::size()];
  for (int i = 0; i < Vec<acc>::size(); ++i) {
    noise[i] = (word >> i) & 1 ? scale : acc(0);
  }
  return Vec<acc>::loadu(noise);
#endif
}

// x * noise: a product, so that a dropped NaN or infinity is NaN and a dropped negative is -0.0, as in eager.
template <typename acc>
void apply_dropout(const Program& program, const acc* from, acc* to, int64_t n, const MaskView& mask) {
  using V = Vec<acc>;
  const acc scale = static_cast<acc>(program.noise_scale);
  for (int64_t i = 0; i < n; i += V::size()) {
    const V noise = noise_vector<acc>(mask_word(mask.bits, mask.first + i), scale);
    (V::loadu(from + i) * noise).store(to + i);
  }
}

template <typename acc>
void apply_constant(const Step& step, const acc* from, acc* to, int64_t n) {
  using V = Vec<acc>;
  const V value(static_cast<acc>(step.p[0]));
  for (int64_t i = 0; i < n; i += V::size()) {
    const V x = V::loadu(from + i);
    V::blendv(value, x, x.isnan()).store(to + i);
  }
}

template <typename acc>
void apply(const Program& program, const Step& step, const acc* from, acc* to, int64_t n, const MaskView& mask) {
  switch (step.code) {
    case OpCode::constant:
      return apply_constant(step, from, to, n);
    case OpCode::to:
    case OpCode::round:
      return round_block(from, to, n, step.dtype);
    case OpCode::dropout:
      if (mask.bits != nullptr) {
        apply_dropout(program, from, to, n, mask);
      } else if (from != to) {
        std::memcpy(to, from, n * sizeof(acc));
      }
      return;
    default:
      return dispatch<acc>(step.code, [&](auto op) { map<decltype(op)>(step, from, to, n); });
  }
}

} // namespace

template <typename acc>
void run_forward(const Program& program, acc* values, int64_t n, const MaskView& mask) {
  for (const Step& step : program.steps) {
    apply(program, step, values, values, n, mask);
  }
}

int64_t backward_scratch(const Program& program, int64_t n) {
  return std::max(program.last_saved, 0) * (n + kPadding);
}

template <typename acc>
void run_backward(const Program& program, const acc* y, acc* grad, int64_t n, const MaskView& mask, acc* scratch) {
  const int64_t stride = n + kPadding;
  // inputs of step i: y for the first, else what step i - 1 left in the scratch
  const auto input = [&](int i) { return i == 0 ? y : scratch + (i - 1) * stride; };
  for (int i = 0; i < program.last_saved; ++i) {
    apply(program, program.steps[i], input(i), scratch + i * stride, n, mask);
  }
  for (int i = static_cast<int>(program.steps.size()) - 1; i >= 0; --i) {
    const Step& step = program.steps[i];
    switch (step.code) {
      case OpCode::constant:
        std::fill(grad, grad + n, acc(0));
        break;
      case OpCode::round:
        continue; // eager rounds values and gradients at the same places: nothing of its own
      case OpCode::to:
        break;
      case OpCode::dropout:
        if (mask.bits != nullptr) {
          apply_dropout(program, grad, grad, n, mask);
        }
        break;
      default:
        dispatch<acc>(step.code, [&](auto op) {
          map_backward<decltype(op)>(step, i <= program.last_saved ? input(i) : nullptr, grad, n);
        });
    }
    if (program.rounding == Rounding::every_step) {
      round_block(grad, grad, n, step.from);
    }
  }
}

template void run_forward<float>(const Program&, float*, int64_t, const MaskView&);
template void run_forward<double>(const Program&, double*, int64_t, const MaskView&);
template void run_backward<float>(const Program&, const float*, float*, int64_t, const MaskView&, float*);
template void run_backward<double>(const Program&, const double*, double*, int64_t, const MaskView&, double*);

} // namespace gnfuse
