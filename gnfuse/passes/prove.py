"""Proofs by sympy of the equations in `gnfuse.passes.fold`.

An identity between terms of min and max holds for all reals if it holds in every weak ordering of its symbols: in a
fixed ordering each min and max is one of its arguments, so each side is one symbol, and equal symbols are those on one
level. `holds` therefore goes through the orderings, with the levels 0, 1, ... for the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
from sympy import Max, Min, Piecewise, Symbol

X, A, B, C, D = sympy.symbols("x a b c d", real=True)


def clamp(x: Any, lo: Any, hi: Any) -> Any:
    """torch.clamp as a sympy term: the upper bound wins."""
    return Min(Max(x, lo), hi)


def orderings(symbols: Sequence[Symbol]) -> Iterator[dict[Symbol, sympy.Integer]]:
    """Every weak ordering of the symbols: each on its level."""
    for levels in _weak_orderings(len(symbols)):
        yield {s: sympy.Integer(level) for s, level in zip(symbols, levels, strict=True)}


def _weak_orderings(n: int) -> Iterator[tuple[int, ...]]:
    """Assignments of n items to levels 0..k with no level empty."""
    if n == 0:
        yield ()
        return
    for rest in _weak_orderings(n - 1):
        top = max(rest, default=-1)
        for level in range(top + 1):
            yield (*rest, level)
        for level in range(top + 2):  # a level of its own, below the old one of that number
            yield (*(old + 1 if old >= level else old for old in rest), level)


def holds(left: Any, right: Any, where: Sequence[Any] = ()) -> bool:
    """Whether ``left == right`` for all reals for which the relations ``where`` hold.

    Raises:
        ValueError: a side has something other than symbols, Min, Max and Piecewise in it.
    """
    for side in (left, right):
        if any(node.is_Add or node.is_Mul or node.is_Pow for node in sympy.preorder_traversal(side)):
            raise ValueError(f"not a term of min and max: {side}")
    symbols = sorted(sympy.Tuple(left, right, *where).free_symbols, key=str)
    return all(
        bool(left.xreplace(levels) == right.xreplace(levels))
        for levels in orderings(symbols)
        if all(relation.xreplace(levels) == sympy.true for relation in where)
    )


def min_then_clamp(order: str) -> Any:
    """What ``clamp(min(x, a), a, b)`` is for symbolic bounds, derived and proved.

    Args:
        order: "known" (a <= b holds), "violated" (a > b holds), "unknown".

    Returns:
        The reduced term: a, b, or min(a, b).

    Raises:
        ValueError: for another order.
    """
    reduced, where = {"known": (A, [A <= B]), "violated": (B, [A > B]), "unknown": (Min(A, B), [])}.get(
        order, (None, [])
    )
    if reduced is None:
        raise ValueError(f"order is known, violated or unknown, got {order!r}")
    if not holds(clamp(Min(X, A), A, B), reduced, where):
        raise AssertionError(f"clamp(min(x, a), a, b) is not {reduced} where a <= b is {order}")
    return reduced


def _meeting_bounds() -> bool:
    return (
        holds(clamp(X, A, B), A, [X <= A, A <= B])
        and holds(clamp(X, A, B), B, [X >= B, A <= B])
        and holds(clamp(X, A, B), B, [A > B])
        and holds(Max(Min(X, A), B), B, [A <= B])
        and holds(Min(Max(X, A), B), B, [A >= B])
    )


def _inside_range() -> bool:
    return (
        holds(clamp(X, A, B), X, [A <= X, X <= B]) and holds(Min(X, A), X, [X <= A]) and holds(Max(X, A), X, [X >= A])
    )


def _above_threshold() -> bool:
    return (
        sympy.simplify(Piecewise((X, X > A), (B, True)).subs(X, A + Symbol("gap", positive=True)) - A).is_positive
        is True
    )


def _not_negative() -> bool:
    y, slope, alpha = Symbol("y", nonnegative=True), Symbol("s", real=True), Symbol("alpha", real=True)
    leaky = Piecewise((y, y > 0), (slope * y, True))
    elu = Piecewise((y, y > 0), (alpha * (sympy.exp(y) - 1), True))
    positive = Symbol("p", positive=True)
    return all(
        sympy.simplify(term.subs(y, at) - at) == 0
        for term in (sympy.Abs(y), leaky, elu)
        for at in (positive, sympy.S.Zero)
    )


def _bounds_compose() -> bool:
    return holds(clamp(clamp(X, A, B), C, D), clamp(X, clamp(A, C, D), clamp(B, C, D)), [A <= B, C <= D])


def _double_negation() -> bool:
    return bool(sympy.simplify(-sympy.Mul(-1, X) - X) == 0)


def _even_function() -> bool:
    pairs = (
        (sympy.Abs(-X), sympy.Abs(X)),
        ((-X) ** 2, X**2),
        (sympy.Abs(X) ** 2, X**2),
        (sympy.Abs(sympy.Abs(X)), sympy.Abs(X)),
    )
    return all(sympy.simplify(left - right) == 0 for left, right in pairs)


def _neutral_element() -> bool:
    return all(sympy.simplify(term - X) == 0 for term in (1 * X, X / 1, X + 0))


# (significand bits, least exponent, greatest exponent) of m * 2^e with an integer m below 2^bits
_FORMATS = {
    "float16": (11, -24, 5),
    "bfloat16": (8, -133, 120),
    "float32": (24, -149, 104),
    "float64": (53, -1074, 971),
}


def _representable(narrow: str, wide: str) -> bool:
    """Every m 2^e of the narrow format is an m' 2^e' of the wide one: with e' = max(e, least), m' = m 2^(e - e')."""
    (bits, least, greatest), (wide_bits, wide_least, wide_greatest) = _FORMATS[narrow], _FORMATS[wide]
    m, e = sympy.symbols("m e", integer=True)
    same = sympy.simplify(m * 2**e - (m * 2 ** (e - wide_least)) * 2**wide_least) == 0
    fits = bits <= wide_bits and wide_least <= least and bits + greatest <= wide_bits + wide_greatest
    return bool(same and fits)


def _there_and_back() -> bool:
    pairs = (
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float64"),
        ("bfloat16", "float64"),
        ("float32", "float64"),
    )
    return all(_representable(narrow, wide) for narrow, wide in pairs)


def _same_dtype() -> bool:
    return all(_representable(name, name) for name in _FORMATS)


def _constant_through() -> bool:
    """Rounding r is monotone and odd, so it commutes with min, max, - and |.|: a bound of a rounded constant is the
    rounded bound. (This is also why the bounds rules hold in any dtype.)"""
    ra, rb = sympy.symbols("ra rb", real=True)  # r(a), r(b)
    monotone = sympy.And(
        sympy.Implies(A < B, ra <= rb), sympy.Implies(A > B, ra >= rb), sympy.Implies(sympy.Eq(A, B), sympy.Eq(ra, rb))
    )
    rounded_min = Piecewise((ra, A <= B), (rb, True))
    rounded_max = Piecewise((rb, A <= B), (ra, True))
    return holds(rounded_min, Min(ra, rb), [monotone]) and holds(rounded_max, Max(ra, rb), [monotone])


PROOFS: dict[str, Callable[[], bool]] = {
    "meeting bounds": _meeting_bounds,
    "inside the range": _inside_range,
    "above the threshold": _above_threshold,
    "not negative": _not_negative,
    "bounds compose": _bounds_compose,
    "double negation": _double_negation,
    "even function": _even_function,
    "neutral element": _neutral_element,
    "same dtype": _same_dtype,
    "there and back": _there_and_back,
    "constant through": _constant_through,
}
"""The proof of each rule of `gnfuse.passes.fold.RULES`, by its name."""
