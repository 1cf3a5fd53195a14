// One struct an op: what it computes and what its derivative does with the gradient, on vectors of float or double.
// The formulas are those of ATen's CPU kernels, so that NaN and infinities come out alike; what each op means is
// written down in gnfuse/kernels/reference.py.
#pragma once

#include "program.h"

#include <cmath>

namespace gnfuse {

// The parameters of a step, broadcast: `a`, `b` rounded to the dtype, `raw_*` as written. Which of them eager's kernels
// use differs from op to op; tests/test_cpu_kernels.py runs every op on all 16-bit values.
template <typename acc>
struct Args {
  explicit Args(const Step& step)
      : a(static_cast<acc>(step.p[0])),
        b(static_cast<acc>(step.p[1])),
        raw_a(static_cast<acc>(step.raw[0])),
        raw_b(static_cast<acc>(step.raw[1])),
        bound(static_cast<acc>(clamp_boundary_gradient())) {}
  Vec<acc> a, b, raw_a, raw_b, bound;
};

template <typename acc>
struct Ops {
  using V = Vec<acc>;
  using A = Args<acc>;

  static V one() {
    return V(acc(1));
  }
  static V zero() {
    return V(acc(0));
  }
  // where(mask, yes, no)
  static V select(const V& mask, const V& yes, const V& no) {
    return V::blendv(no, yes, mask);
  }
  static V sigmoid_of(const V& x) {
    return one() / (one() + x.neg().exp());
  }

  struct Minimum {
    static V forward(V x, const A& p) {
      return at::vec::minimum(x, p.a);
    }
    static V backward(V g, V x, const A& p) {
      return select(x > p.a, zero(), select(x == p.a, g * V(acc(0.5)), g));
    }
  };
  struct Maximum {
    static V forward(V x, const A& p) {
      return at::vec::maximum(x, p.a);
    }
    static V backward(V g, V x, const A& p) {
      return select(x < p.a, zero(), select(x == p.a, g * V(acc(0.5)), g));
    }
  };
  struct Clamp {
    static V forward(V x, const A& p) {
      return at::vec::minimum(at::vec::maximum(x, p.a), p.b);
    }
    static V backward(V g, V x, const A& p) {
      // where() and not a product: a NaN gradient outside the bounds is dropped
      const V at_bound = select(p.bound == zero(), zero(), g * p.bound);
      const V inside = select((x > p.a) & (x < p.b), g, zero());
      return select(((x == p.a) & (x <= p.b)) | ((x == p.b) & (x >= p.a)), at_bound, inside);
    }
  };
  struct Hardtanh {
    static V forward(V x, const A& p) {
      return Clamp::forward(x, p);
    }
    static V backward(V g, V x, const A& p) {
      // with the unrounded bounds, and 0 at NaN, as eager's vectors do (its scalar tails give g there)
      return select((x > p.raw_a) & (x < p.raw_b), g, zero());
    }
  };
  struct Relu {
    static V forward(V x, const A&) {
      return at::vec::maximum(x, zero());
    }
    static V backward(V g, V x, const A&) {
      return select(x <= zero(), zero(), g);
    }
  };
  struct Threshold {
    static V forward(V x, const A& p) {
      return select(x <= p.raw_a, p.b, x);
    }
    static V backward(V g, V x, const A& p) {
      return select(x <= p.raw_a, zero(), g);
    }
  };
  struct LeakyRelu {
    static V forward(V x, const A& p) {
      return select(x > zero(), x, x * p.raw_a);
    }
    static V backward(V g, V x, const A& p) {
      return select(x > zero(), g, g * p.raw_a);
    }
  };
  struct Abs {
    static V forward(V x, const A&) {
      return x.abs();
    }
    static V backward(V g, V x, const A&) {
      // g * sign(x), sign(NaN) = 0
      return g * select(x > zero(), one(), select(x < zero(), V(acc(-1)), zero()));
    }
  };
  struct Neg {
    static V forward(V x, const A&) {
      return x.neg();
    }
    static V backward(V g, V, const A&) {
      return g.neg();
    }
  };
  struct Add {
    static V forward(V x, const A& p) {
      return x + p.a; // eager rounds the scalar of a sum, not that of a product
    }
    static V backward(V g, V, const A&) {
      return g;
    }
  };
  struct Rsub {
    static V forward(V x, const A& p) {
      return p.a - x;
    }
    static V backward(V g, V, const A&) {
      return g.neg();
    }
  };
  struct Mul {
    static V forward(V x, const A& p) {
      return x * p.raw_a;
    }
    static V backward(V g, V, const A& p) {
      return g * p.raw_a;
    }
  };
  struct Div {
    static V forward(V x, const A& p) {
      return x / p.raw_a;
    }
    static V backward(V g, V, const A& p) {
      return g / p.raw_a;
    }
  };
  struct Reciprocal {
    static V forward(V x, const A&) {
      return one() / x;
    }
    static V backward(V g, V x, const A&) {
      const V r = one() / x;
      return g.neg() * (r * r);
    }
  };
  struct Square {
    static V forward(V x, const A&) {
      return x * x;
    }
    static V backward(V g, V x, const A&) {
      return g * (x + x);
    }
  };
  struct Silu {
    static V forward(V x, const A&) {
      return x / (one() + x.neg().exp());
    }
    static V backward(V g, V x, const A&) {
      const V s = sigmoid_of(x);
      return g * s * (one() + x * (one() - s));
    }
  };
  struct Gelu {
    static V forward(V x, const A&) {
      return x * V(acc(0.5)) * (one() + (x * V(acc(M_SQRT1_2))).erf());
    }
    static V backward(V g, V x, const A&) {
      const V cdf = V(acc(0.5)) * (one() + (x * V(acc(M_SQRT1_2))).erf());
      const V pdf = V(acc(M_2_SQRTPI * M_SQRT1_2 * 0.5)) * (x * x * V(acc(-0.5))).exp();
      return g * (cdf + x * pdf);
    }
  };
  struct GeluTanh {
    static V inner(V x) {
      return V(acc(M_SQRT2 * M_2_SQRTPI * 0.5)) * (x + V(acc(0.044715)) * (x * x * x));
    }
    static V forward(V x, const A&) {
      return V(acc(0.5)) * x * (one() + inner(x).tanh());
    }
    static V backward(V g, V x, const A&) {
      const V t = inner(x).tanh();
      const V left = V(acc(0.5)) * x;
      const V d_inner = V(acc(M_SQRT2 * M_2_SQRTPI * 0.5)) * (one() + V(acc(3 * 0.044715)) * (x * x));
      return g * (V(acc(0.5)) * (one() + t) + left * (one() - t * t) * d_inner);
    }
  };
  struct Sigmoid {
    static V forward(V x, const A&) {
      return sigmoid_of(x);
    }
    static V backward(V g, V x, const A&) {
      const V s = sigmoid_of(x);
      return g * (one() - s) * s;
    }
  };
  struct Tanh {
    static V forward(V x, const A&) {
      return x.tanh();
    }
    static V backward(V g, V x, const A&) {
      const V t = x.tanh();
      return g * (one() - t * t);
    }
  };
  struct Hardswish {
    static V forward(V x, const A&) {
      return x * at::vec::minimum(at::vec::maximum(x + V(acc(3)), zero()), V(acc(6))) / V(acc(6));
    }
    static V backward(V g, V x, const A&) {
      const V middle = g * (x / V(acc(3)) + V(acc(0.5)));
      return select(x <= V(acc(-3)), zero(), select(x >= V(acc(3)), g, middle));
    }
  };
  struct Hardsigmoid {
    static V forward(V x, const A&) {
      return at::vec::minimum(at::vec::maximum(x + V(acc(3)), zero()), V(acc(6))) / V(acc(6));
    }
    static V backward(V g, V x, const A&) {
      return select((x > V(acc(-3))) & (x < V(acc(3))), g * V(acc(1.0 / 6.0)), zero());
    }
  };
  struct Elu {
    static V forward(V x, const A& p) {
      return select(x >= zero(), x, x.expm1() * p.raw_a);
    }
    static V backward(V g, V x, const A& p) {
      return select(x > zero(), g, g * p.raw_a * x.exp());
    }
  };
  struct Softplus {
    static V forward(V x, const A& p) {
      const V z = x * p.raw_a;
      return select(z > p.raw_b, x, z.exp().log1p() / p.raw_a);
    }
    static V backward(V g, V x, const A& p) {
      const V e = (x * p.raw_a).exp();
      return select(x * p.raw_a > p.raw_b, g, g * e / (e + one()));
    }
  };
  struct Mish {
    static V forward(V x, const A&) {
      return x * x.exp().log1p().tanh();
    }
    static V backward(V g, V x, const A&) {
      const V s = sigmoid_of(x);
      const V t = x.exp().log1p().tanh();
      return g * (t + x * s * (one() - t * t));
    }
  };
};

} // namespace gnfuse
