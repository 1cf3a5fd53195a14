"""The algebra: what a chain can be reduced to, as a table of rules.

Each `Rule` states its equation in real numbers (proved by sympy in `tests/test_fold.py`), its domain in floats (NaN,
signed zero, gradient, dtype, order of bounds), and a function that applies it to the ops at one place. Every rule keeps
the value exactly, in every dtype, for every input that is not NaN; a NaN stays a NaN. "The gradient" says whether the
reduced ops also have the gradient of the old ones: where not, the fused op still differentiates the chain as written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gnfuse.chain import Chain, Op, op, pretty_number, pretty_step, pretty_steps
from gnfuse.passes import intervals
from gnfuse.passes.intervals import Interval, bounds_of
from gnfuse.passes.rounding import shortest, to_dtype
from gnfuse.report import ProofStep


@dataclass(frozen=True)
class Place:
    """Where a rule looks: the ops from here on, those before, and what is known of the value in between."""

    ops: tuple[Op, ...]
    range: Interval
    dtype: str | None
    before: tuple[Op, ...] = ()

    def known(self) -> str:
        """The range, for a note: ``after minimum(0), x is in [-inf, 0]``."""
        return f"{f'after {pretty_steps(self.before)}, ' if self.before else ''}x is in {self.range}"


Applied = tuple[int, tuple[Op, ...], str]  # ops taken, what they become, a note on why the domain holds


@dataclass(frozen=True)
class Rule:
    """One line of the algebra.

    Attributes:
        name: as the report shows it.
        equation: in real numbers.
        domain: where it holds in floats.
        gradient: "equal" everywhere, or where it differs.
        apply: the rule at one place, or None where it does not apply.
    """

    name: str
    equation: str
    domain: str
    gradient: str
    apply: Callable[[Place], Applied | None]


def _constant_range(at: Place) -> Applied | None:
    """A bound that meets the range in one point."""
    first = at.ops[0]
    if first.name == "constant":
        return None
    limits = bounds_of(first, at.dtype)
    if limits is None or at.range.makes_nan:
        return None
    result = intervals.after(at.range, first, at.dtype)
    if not result.is_point or math.isinf(result.lo):
        return None
    value = shortest(result.lo, at.dtype)
    return 1, (op("constant", value),), f"{at.known()}: {pretty_step(first)} maps all of it to {pretty_number(value)}"


def _inside_range(at: Place) -> Applied | None:
    """A bound that the range never reaches."""
    limits = bounds_of(at.ops[0], at.dtype)
    if limits is None or not at.range.within(*limits) or limits[0] > limits[1]:
        return None
    return 1, (), f"{at.known()}, which {pretty_step(at.ops[0])} leaves as it is"


def _threshold_never(at: Place) -> Applied | None:
    first = at.ops[0]
    if first.name != "threshold" or any(math.isnan(v) for v in first.floats):
        return None
    if at.range.lo > first.floats[0] and intervals.after(at.range, first, at.dtype) == at.range:
        return 1, (), f"{at.known()}, above {pretty_number(first.floats[0])}"
    return None


def _nonnegative_identity(at: Place) -> Applied | None:
    """abs, leaky_relu and elu of what is not negative."""
    if at.ops[0].name in ("abs", "leaky_relu", "elu") and at.range.lo >= 0:
        return 1, (), f"{at.known()}, not negative"
    return None


def _compose_bounds(at: Place) -> Applied | None:
    """Two bounds in a row are one."""
    if len(at.ops) < 2:
        return None
    inner, outer = bounds_of(at.ops[0], at.dtype), bounds_of(at.ops[1], at.dtype)
    if inner is None or outer is None or inner[0] > inner[1] or outer[0] > outer[1]:
        return None
    lo, hi = (min(max(end, outer[0]), outer[1]) for end in inner)
    if lo == hi:  # they meet in one point: a constant, which the range rules find
        return None
    merged = _bounds_op(lo, hi, at)
    return 2, (merged,), f"{pretty_step(at.ops[0])} then {pretty_step(at.ops[1])} is {pretty_step(merged)}"


def _bounds_op(lo: float, hi: float, at: Place) -> Op:
    """A bounding op with these ends; one of the two at the place where it already is that."""
    for candidate in at.ops[:2]:
        if bounds_of(candidate, at.dtype) == (lo, hi):
            return candidate
    return op("clamp", shortest(lo, at.dtype), shortest(hi, at.dtype))


def _inverse_pair(at: Place) -> Applied | None:
    if len(at.ops) >= 2 and at.ops[0].name == at.ops[1].name == "neg":
        return 2, (), "the sign flips twice"
    return None


def _even_after_neg(at: Place) -> Applied | None:
    if len(at.ops) >= 2 and at.ops[0].name in ("neg", "abs") and at.ops[1].name in ("abs", "square"):
        return 2, (at.ops[1],), f"{at.ops[1].name} ignores the sign"
    return None


def _neutral(at: Place) -> Applied | None:
    first = at.ops[0]
    if (first.name, first.params) in (("mul", (1.0,)), ("div", (1.0,)), ("add", (0.0,))):
        return 1, (), f"{pretty_step(first)} changes no value"
    return None


def _same_dtype(at: Place) -> Applied | None:
    first = at.ops[0]
    if first.name == "to" and first.params[0] == at.dtype:
        return 1, (), f"x is {at.dtype} already"
    return None


_WIDER = {("float16", "float32"), ("bfloat16", "float32"), ("float16", "float64"), ("bfloat16", "float64"),
          ("float32", "float64")}  # fmt: skip


def _there_and_back(at: Place) -> Applied | None:
    """Widening and narrowing back rounds nothing."""
    if len(at.ops) < 2 or at.ops[0].name != "to" or at.ops[1].name != "to" or at.dtype is None:
        return None
    if (at.dtype, at.ops[0].params[0]) in _WIDER and at.ops[1].params[0] == at.dtype:
        return 2, (), f"every {at.dtype} is a {at.ops[0].params[0]}"
    return None


def _constant_through(at: Place) -> Applied | None:
    """A bound, sign or absolute value of a constant is a constant."""
    if len(at.ops) < 2 or at.ops[0].name != "constant":
        return None
    value, second = to_dtype(at.ops[0].floats[0], at.dtype), at.ops[1]
    limits = bounds_of(second, at.dtype)
    if limits is not None:
        result = min(max(value, limits[0]), limits[1])
    elif second.name == "neg":
        result = -value
    elif second.name == "abs":
        result = abs(value)
    else:
        return None
    result = shortest(result, at.dtype)
    return 2, (op("constant", result),), f"{pretty_step(second)} of {pretty_number(value)} is {pretty_number(result)}"


_ANY_NAN = "a NaN stays a NaN"

RULES: tuple[Rule, ...] = (
    Rule(
        "meeting bounds",
        "min(max(x, lo), hi) = c where every x is <= c = lo, or >= c = hi, or lo > hi = c",
        f"{_ANY_NAN}; no op before may make a NaN; the sign of a zero is not kept; any dtype (rounding is monotone)",
        "differs: at a tie of minimum or maximum with the constant, eager passes half the gradient",
        _constant_range,
    ),
    Rule(
        "inside the range",
        "min(max(x, lo), hi) = x where lo <= x <= hi",
        f"{_ANY_NAN}; the sign of a zero at a zero bound is not kept; any dtype; lo <= hi",
        "differs at x = lo and x = hi, where relu, hardtanh pass 0 and minimum, maximum half",
        _inside_range,
    ),
    Rule(
        "above the threshold",
        "(x if x > at else value) = x where x > at",
        f"{_ANY_NAN}; any dtype, as x stays above after rounding",
        "equal",
        _threshold_never,
    ),
    Rule(
        "not negative",
        "|x| = leaky_relu(x) = elu(x) = x where x >= 0",
        f"{_ANY_NAN}; the sign of a zero is not kept by abs; any dtype",
        "differs at x = 0, where abs passes 0, leaky_relu its slope and elu alpha",
        _nonnegative_identity,
    ),
    Rule(
        "bounds compose",
        "clamp(clamp(x, a, b), c, d) = clamp(x, clamp(a, c, d), clamp(b, c, d)) where a <= b and c <= d",
        f"{_ANY_NAN}; the sign of a zero at a zero bound is not kept; any dtype (rounding is monotone)",
        "differs at the bounds, where minimum, maximum, relu, hardtanh and clamp each have a rule of their own",
        _compose_bounds,
    ),
    Rule("double negation", "-(-x) = x", f"{_ANY_NAN}; any dtype; signed zeros kept", "equal", _inverse_pair),
    Rule(
        "even function",
        "|-x| = |x|, (-x)^2 = x^2, |x|^2 = x^2",
        f"{_ANY_NAN}; any dtype; signed zeros kept",
        "equal",
        _even_after_neg,
    ),
    Rule(
        "neutral element",
        "1 x = x / 1 = x + 0 = x",
        f"{_ANY_NAN}; any dtype; -0.0 + 0 is +0.0",
        "equal",
        _neutral,
    ),
    Rule("same dtype", "to(x) = x where x has the dtype already", "the dtype is known", "equal", _same_dtype),
    Rule(
        "there and back",
        "narrow(widen(x)) = x",
        f"{_ANY_NAN}; fp16 or bf16 through fp32 or fp64, fp32 through fp64; the dtype is known",
        "equal",
        _there_and_back,
    ),
    Rule(
        "constant through",
        "f(c) is a constant where f is min(max(., lo), hi), -., |.|",
        f"{_ANY_NAN}; exact in any dtype, as f commutes with rounding",
        "equal (0)",
        _constant_through,
    ),
)  # fmt: skip

# Ops that a constant's gradient can be taken through bit for bit: they multiply by 0, 1/2 or 1 only. (Not hardtanh: at
# a NaN eager's CPU kernel passes 0 in its vector lanes and the gradient in its scalar tail.)
EXACT_KINKS = frozenset({"minimum", "maximum", "clamp", "relu", "threshold", "abs"})
# Ops whose derivative at a constant is not eager's to the last bit
_INEXACT_DERIVATIVES = frozenset({"sigmoid", "tanh", "rdiv", "square", "gelu", "gelu_tanh", "mish"})


@dataclass(frozen=True)
class Folded:
    """What a chain reduces to: the chain with fewer ops, and the proof, one step a rule applied."""

    chain: Chain
    proof: tuple[ProofStep, ...]

    @property
    def constant(self) -> float | None:
        """The value before the dropout and later ops, where it is one constant for every x that is not NaN."""
        return self.chain.before[0].floats[0] if _starts_with_constant(self.chain.before) else None


def fold(chain: Chain, group_size: int | None = None, *, needs_gradient: bool = True) -> Folded:
    """Apply the rules until none applies.

    Args:
        chain: as matched.
        group_size: values a statistic is taken over (C/G * spatial), where it is known.
        needs_gradient: False where it is known that nobody differentiates the chain. A constant is folded with a
            gradient only where `EXACT_KINKS` make it, and what follows has exact derivatives.
    """
    proof: list[ProofStep] = []
    start = intervals.norm_range(chain.norm, group_size)
    may_fold = not needs_gradient or _exactly_differentiable(chain, start)
    before, reached, dtype = _reduce(chain.before, start, chain.norm.dtype, proof, may_fold)
    after: tuple[Op, ...] = ()
    if chain.dropout is not None:
        reached = intervals.after_dropout(reached, chain.dropout.p, dtype)
        after, _, _ = _reduce(chain.after, reached, dtype, proof, False)
    return Folded(replace(chain, before=before, after=after), tuple(proof))


def _exactly_differentiable(chain: Chain, start: Interval) -> bool:
    """Whether the fused op can give eager's gradient to the last bit, ties and NaNs included: kinks alone make the
    constant, and the ops after it are differentiated exactly there."""
    kinks = tuple(itertools.takewhile(lambda one: one.name in EXACT_KINKS, chain.before))
    made, _, _ = _reduce(kinks, start, chain.norm.dtype, [], True)
    rest = (*chain.before[len(kinks) :], *chain.after)
    return _starts_with_constant(made) and all(one.name not in _INEXACT_DERIVATIVES for one in rest)


def _starts_with_constant(ops: tuple[Op, ...]) -> bool:
    return bool(ops) and ops[0].name == "constant"


def _reduce(
    ops: tuple[Op, ...], start: Interval, dtype: str | None, proof: list[ProofStep], may_fold: bool
) -> tuple[tuple[Op, ...], Interval, str | None]:
    """Rewrite a run of ops to a fixed point; returns it with the range and dtype that it ends in."""
    while True:
        rewritten = _once(ops, start, dtype, proof, may_fold)
        if rewritten is None:
            break
        ops = rewritten
    reached, at_dtype = start, dtype
    for one in ops:
        reached, at_dtype = _past(one, reached, at_dtype)
    return ops, reached, at_dtype


def _past(one: Op, reached: Interval, dtype: str | None) -> tuple[Interval, str | None]:
    return intervals.after(reached, one, dtype), str(one.params[0]) if one.name == "to" else dtype


def _once(
    ops: tuple[Op, ...], start: Interval, dtype: str | None, proof: list[ProofStep], may_fold: bool
) -> tuple[Op, ...] | None:
    """The ops after the first rule that applies anywhere, or None."""
    places = []
    reached, at_dtype = start, dtype
    for i, one in enumerate(ops):
        places.append(Place(ops[i:], reached, at_dtype, ops[:i]))
        reached, at_dtype = _past(one, reached, at_dtype)
    for rule in RULES:
        for place in places:
            applied = rule.apply(place)
            if applied is None or (
                _starts_with_constant(applied[1]) and not (may_fold and _same_dtype_throughout(place))
            ):
                continue
            taken, replacement, note = applied
            kept = (
                () if _starts_with_constant(applied[1]) else place.before
            )  # a constant does not depend on what came before it
            result = (*kept, *replacement, *place.ops[taken:])
            proof.append(ProofStep(rule.name, rule.equation, pretty_steps(ops), pretty_steps(result), note))
            return result
    return None


def _same_dtype_throughout(place: Place) -> bool:
    """No cast came before, so that a constant has the dtype of the chain's input."""
    return all(one.name != "to" for one in place.before)
