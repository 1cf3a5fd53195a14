"""Interval analysis: which values a chain can have at each point, soundly in floats.

An `Interval` bounds every non-NaN value, infinities included; ``makes_nan`` says whether some op so far may have turned
a non-NaN into a NaN. Kinks (min, max, clamp, ...) round their bounds to the chain's dtype T, and so does the analysis.
Where T is not known its ends are those before rounding, and the values lie in [T(lo), T(hi)]: rounding is monotone, so
comparing unrounded ends is sound. Whatever else reads an end widens it by a margin that covers the rounding of the
coarsest dtype and of the math library (`tests/test_intervals.py` runs every op over every fp16 and bf16 value).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gnfuse.chain import GroupNorm, Op
from gnfuse.passes.rounding import to_dtype

INF = math.inf

# Largest finite value and unit roundoff of each dtype. An unknown dtype may be the smallest and the coarsest of them.
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
           "float64": 1.7976931348623157e308}  # fmt: skip
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# Every result smaller than this may have been rounded to zero or to a subnormal: relative bounds end here
SMALLEST = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
MARGIN = 2.0**-6  # relative; over twice bf16's roundoff, so that it also covers a result computed in two roundings


@dataclass(frozen=True)
class Interval:
    """All non-NaN values lie in [lo, hi]."""

    lo: float = -INF
    hi: float = INF
    makes_nan: bool = False

    @property
    def is_point(self) -> bool:
        """One value. (-0.0 and 0.0 count as one: equality is ``==``.)"""
        return self.lo == self.hi

    @property
    def finite(self) -> bool:
        """No value is infinite."""
        return self.lo > -INF and self.hi < INF

    def within(self, lo: float, hi: float) -> bool:
        """Whether every value lies in [lo, hi]."""
        return lo <= self.lo and self.hi <= hi

    def __str__(self) -> str:
        return f"[{self.lo:g}, {self.hi:g}]"


EVERYTHING = Interval()


def _out(lo: float, hi: float, makes_nan: bool, dtype: str | None) -> Interval:
    """Widened by the margin; near the dtype's largest value to infinity, near its smallest to zero or beyond. An end
    that is exactly 0 stays: products and activations keep the sign of their input."""
    largest, smallest = LARGEST[dtype or "float16"], SMALLEST[dtype or "float16"]

    def widen(value: float, sign: float) -> float:
        if value == 0:
            return value
        if abs(value) < 2 * smallest:
            return 0.0 if value * sign < 0 else sign * 4 * smallest
        moved = value + sign * abs(value) * MARGIN
        return math.copysign(INF, moved) if abs(moved) > largest * (1 - MARGIN) else moved

    wide_lo, wide_hi = widen(lo, -1.0), widen(hi, 1.0)
    return Interval(largest if wide_lo == INF else wide_lo, -largest if wide_hi == -INF else wide_hi, makes_nan)


Transfer = Callable[[Interval, Op, str | None], Interval]


def bounds_of(op: Op, dtype: str | None) -> tuple[float, float] | None:
    """(lo, hi), rounded to the dtype, where the op is ``min(max(x, lo), hi)`` by value, else None. NaN is no bound."""
    p = tuple(to_dtype(value, dtype) for value in op.floats)
    if any(math.isnan(v) for v in p):
        return None
    match op.name:
        case "minimum":
            return -INF, p[0]
        case "maximum":
            return p[0], INF
        case "clamp" | "hardtanh":
            return p[0], p[1]
        case "relu":
            return 0.0, INF
        case "threshold" if p[0] == p[1]:
            return p[0], INF
    return None


def _bounded(x: Interval, op: Op, dtype: str | None) -> Interval:
    limits = bounds_of(op, dtype)
    if limits is None:
        # a NaN bound makes everything NaN, which no interval of numbers says
        return Interval(-INF, INF, True)
    lo, hi = limits
    return Interval(min(max(x.lo, lo), hi), min(max(x.hi, lo), hi), x.makes_nan)


def _threshold(x: Interval, op: Op, dtype: str | None) -> Interval:
    at, value = (to_dtype(v, dtype) for v in op.floats)
    if bounds_of(op, dtype) is not None:
        return _bounded(x, op, dtype)
    if math.isnan(at) or math.isnan(value):
        return Interval(-INF, INF, True)
    if x.hi <= at:
        return Interval(value, value, x.makes_nan)
    if x.lo > at + MARGIN * abs(at) + 4 * SMALLEST[dtype or "float16"]:  # also after rounding both to the dtype
        return x
    return Interval(min(value, at), max(value, x.hi), x.makes_nan)


def _leaky(x: Interval, op: Op, dtype: str | None) -> Interval:
    (slope,) = op.floats
    if x.lo >= 0:
        return x
    if not 0 <= slope < INF or (slope == 0 and x.lo == -INF):
        return Interval(-INF, INF, True)
    below = _out(slope * x.lo, slope * min(x.hi, 0.0), x.makes_nan, dtype)
    return Interval(below.lo, max(below.hi, x.hi, 0.0) if x.hi > 0 else below.hi, x.makes_nan)


def _abs(x: Interval, op: Op, dtype: str | None) -> Interval:
    if x.lo >= 0:
        return x
    if x.hi <= 0:
        return Interval(-x.hi, -x.lo, x.makes_nan)
    return Interval(0.0, max(-x.lo, x.hi), x.makes_nan)


def _neg(x: Interval, op: Op, dtype: str | None) -> Interval:
    return Interval(-x.hi, -x.lo, x.makes_nan)


def _shifted(x: Interval, sign: float, c: float, dtype: str | None) -> Interval:
    """sign * x + c. The sum of two numbers can be far smaller than the rounding of either, so both widen it."""
    if not math.isfinite(c):
        return Interval(-INF, INF, True)
    lo, hi = sorted((sign * x.lo, sign * x.hi))
    grain = 4 * SMALLEST[dtype or "float16"]

    def moved(end: float, direction: float) -> float:
        slack = MARGIN * (abs(end) + abs(c)) + grain if math.isfinite(end) else 0.0
        return end + c + direction * slack

    return _out(moved(lo, -1.0), moved(hi, 1.0), x.makes_nan, dtype)


def _scaled(x: Interval, scale: float, dtype: str | None) -> Interval:
    """scale * x."""
    if not math.isfinite(scale) or (scale == 0 and not x.finite):
        return Interval(-INF, INF, True)
    lo, hi = sorted((scale * x.lo, scale * x.hi))
    return _out(lo, hi, x.makes_nan, dtype)


def _add(x: Interval, op: Op, dtype: str | None) -> Interval:
    return x if op.floats == (0.0,) else _shifted(x, 1.0, op.floats[0], dtype)


def _rsub(x: Interval, op: Op, dtype: str | None) -> Interval:
    return _shifted(x, -1.0, op.floats[0], dtype)


def _mul(x: Interval, op: Op, dtype: str | None) -> Interval:
    return x if op.floats == (1.0,) else _scaled(x, op.floats[0], dtype)


def _div(x: Interval, op: Op, dtype: str | None) -> Interval:
    (c,) = op.floats
    if c == 1.0:
        return x
    return _scaled(x, 1.0 / c, dtype) if c != 0 and math.isfinite(c) else Interval(-INF, INF, True)


def _rdiv(x: Interval, op: Op, dtype: str | None) -> Interval:
    (c,) = op.floats
    away_from_zero = max(x.lo, -x.hi) > 2 * SMALLEST[dtype or "float16"]
    if math.isfinite(c) and c > 0 and away_from_zero and x.finite:
        return _out(c / x.hi, c / x.lo, x.makes_nan, dtype)
    return Interval(-INF, INF, True)


def _square(x: Interval, op: Op, dtype: str | None) -> Interval:
    small = 0.0 if x.lo <= 0 <= x.hi else min(x.lo * x.lo, x.hi * x.hi)
    wide = _out(small * (1 - MARGIN), max(x.lo * x.lo, x.hi * x.hi) * (1 + MARGIN), x.makes_nan, dtype)
    return Interval(max(0.0, wide.lo), wide.hi, x.makes_nan)


def _saturating(lo: float, hi: float) -> Transfer:
    """An increasing activation with values in [lo, hi] that keeps infinities finite (sigmoid, tanh, hardsigmoid)."""

    def transfer(x: Interval, op: Op, dtype: str | None) -> Interval:
        return Interval(0.0 if x.lo >= 0 > lo else lo, 0.0 if x.hi <= 0 < hi and lo < 0 else hi, x.makes_nan)

    return transfer


def _dipping(minimum: float, gated: Callable[[float], float]) -> Transfer:
    """An activation ``x * gate(x)`` (silu, gelu, mish, hardswish): at least ``minimum``, increasing for x >= 0, of the
    sign of x, and NaN where x is infinite on a side where the gate is 0 or the formula is inf * 0."""

    def transfer(x: Interval, op: Op, dtype: str | None) -> Interval:
        makes_nan = x.makes_nan or x.lo == -INF or x.hi == INF
        high = gated(x.hi) if 0 < x.hi < 20 else max(x.hi, 0.0)
        return _out(0.0 if x.lo >= 0 else minimum, high, makes_nan, dtype)

    return transfer


def _elu(x: Interval, op: Op, dtype: str | None) -> Interval:
    (alpha,) = op.floats
    if x.lo >= 0:
        return x
    if not 0 <= alpha < INF:
        return Interval(-INF, INF, True)
    low = _out(-alpha, 0.0, x.makes_nan, dtype).lo
    return Interval(low, max(x.hi, 0.0), x.makes_nan)


def _softplus(x: Interval, op: Op, dtype: str | None) -> Interval:
    beta, _ = op.floats
    if not 0 < beta < INF:
        return Interval(-INF, INF, True)
    return _out(0.0, max(x.hi, 0.0) + 1.0 / beta, x.makes_nan, dtype)


def _to(x: Interval, op: Op, dtype: str | None) -> Interval:
    """The ends as the old dtype rounded them; what the new one cannot hold becomes infinite."""
    target = str(op.params[0])
    return x if dtype == target else _out(x.lo, x.hi, x.makes_nan, target)


def _constant(x: Interval, op: Op, dtype: str | None) -> Interval:
    value = to_dtype(op.floats[0], dtype)
    return Interval(value, value, False) if not math.isnan(value) else Interval(-INF, INF, True)


def _gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# silu ≥ -0.27846, gelu ≥ -0.16998 (tanh form -0.17005), mish ≥ -0.30885, hardswish ≥ -0.375
TRANSFER: dict[str, Transfer] = {
    "constant": _constant,
    "minimum": _bounded,
    "maximum": _bounded,
    "clamp": _bounded,
    "hardtanh": _bounded,
    "relu": _bounded,
    "threshold": _threshold,
    "leaky_relu": _leaky,
    "abs": _abs,
    "neg": _neg,
    "add": _add,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "rdiv": _rdiv,
    "square": _square,
    "silu": _dipping(-0.278465, lambda x: x / (1 + math.exp(-x))),
    "gelu": _dipping(-0.169972, lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2)))),
    "gelu_tanh": _dipping(-0.170041, _gelu_tanh),
    "sigmoid": _saturating(0.0, 1.0),
    "tanh": _saturating(-1.0, 1.0),
    "hardswish": _dipping(-0.375, lambda x: x * min(x + 3, 6) / 6),
    "hardsigmoid": _saturating(0.0, 1.0),
    "elu": _elu,
    "softplus": _softplus,
    "mish": _dipping(-0.308843, lambda x: x * math.tanh(math.log1p(math.exp(x)))),
    "to": _to,
}


def after(x: Interval, op: Op, dtype: str | None) -> Interval:
    """The interval of ``op(x)`` for x in the interval, computed in ``dtype`` (None: not known)."""
    return TRANSFER[op.name](x, op, dtype)


def after_dropout(x: Interval, p: float, dtype: str | None) -> Interval:
    """Zeros among the values, the rest scaled by 1/(1-p); an infinite value times zero is NaN."""
    scaled = _out(x.lo / (1.0 - p), x.hi / (1.0 - p), x.makes_nan or not x.finite, dtype)
    return Interval(min(scaled.lo, 0.0), max(scaled.hi, 0.0), scaled.makes_nan)


_WELFORD_STEPS = 96  # at most 16 updates in a chunk, 2 roundings a merge over a cascade of depth <= 32, 16 lanes


def norm_range(norm: GroupNorm, group_size: int | None) -> Interval:
    """The range of a GroupNorm's output.

    In real numbers |x̂| <= sqrt(m - 1) for m values in a group; in floats (x - mean) * rstd cancels, so that two values
    near 1e6 give 19.8. A bound needs one on |x|, which only fp16 has, and no gamma or beta, which can change. With
    M = 65504 the largest input and u = 2^-24, e = 96 u M bounds the rounding of each x - mean, and e² that of the
    variance: where the true variance is at least 4 e² it is computed to within 3/4 of itself, so |x̂| <= 2 sqrt(m);
    where it is smaller, |x - mean| <= 2 e sqrt(m), and rstd <= 1/sqrt(eps). To either comes the rounding e/sqrt(eps).

    Args:
        norm: with its dtype.
        group_size: m = C/G * spatial, None when it is not known.
    """
    eps = min(norm.eps, to_dtype(norm.eps, norm.dtype))  # CUDA rounds it to the input's dtype (1e-8 is 0), the CPU not
    if norm.dtype != "float16" or norm.weight or norm.bias or group_size is None or not eps > 0:
        return EVERYTHING
    largest_rstd = eps**-0.5
    rounding = _WELFORD_STEPS * ROUNDOFF["float32"] * LARGEST["float16"]
    spread = math.sqrt(group_size)
    limit = max(2.0 * spread, 2.0 * rounding * spread * largest_rstd) + rounding * largest_rstd
    return Interval(-limit, limit) if limit < LARGEST["float16"] else EVERYTHING
