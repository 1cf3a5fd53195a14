"""The small IR that the passes, the proofs and the kernels share: one GroupNorm, pointwise ops, one dropout.

Everything here is a frozen dataclass that knows neither FX nor torch. A chain prints to a text that parses back
(``minimum(0.0); clamp(0.0, 1.0); dropout(0.2)``); that text is what the fused ops take, so a graph stays readable,
a compiled chain can be cached by it, and the C++ and CUDA sides read the same thing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

Param = float | str


class OpSpec(NamedTuple):
    """One pointwise op: its parameters, and what it computes in real numbers (x is the input)."""

    params: tuple[str, ...]
    equation: str


# The one list of pointwise ops. What each means in floats is `kernels/reference.py`; every other table (readers,
# intervals, CPU interpreter, CUDA expressions) has exactly these names, and a test compares the key sets.
OPS: dict[str, OpSpec] = {
    "constant": OpSpec(("value",), "value where x is not NaN, else NaN"),
    # kinks: exact in every dtype, piecewise linear
    "minimum": OpSpec(("bound",), "min(x, bound); the gradient is halved at x = bound"),
    "maximum": OpSpec(("bound",), "max(x, bound); the gradient is halved at x = bound"),
    "clamp": OpSpec(("lo", "hi"), "min(max(x, lo), hi)"),
    "hardtanh": OpSpec(("lo", "hi"), "min(max(x, lo), hi), lo <= hi; the gradient is 0 at both bounds"),
    "relu": OpSpec((), "max(x, 0)"),
    "threshold": OpSpec(("at", "value"), "x if x > at else value"),
    "leaky_relu": OpSpec(("slope",), "x if x > 0 else slope * x"),
    "abs": OpSpec((), "|x|"),
    "neg": OpSpec((), "-x"),
    # arithmetic with a Python scalar
    "add": OpSpec(("c",), "x + c"),
    "rsub": OpSpec(("c",), "c - x"),
    "mul": OpSpec(("c",), "x * c"),
    "div": OpSpec(("c",), "x / c"),
    "rdiv": OpSpec(("c",), "c / x"),
    "square": OpSpec((), "x * x"),
    # smooth activations
    "silu": OpSpec((), "x * sigmoid(x)"),
    "gelu": OpSpec((), "x * Phi(x), Phi the normal distribution function"),
    "gelu_tanh": OpSpec((), "x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))"),
    "sigmoid": OpSpec((), "1 / (1 + exp(-x))"),
    "tanh": OpSpec((), "tanh(x)"),
    "hardswish": OpSpec((), "x * min(max(x + 3, 0), 6) / 6"),
    "hardsigmoid": OpSpec((), "min(max(x + 3, 0), 6) / 6"),
    "elu": OpSpec(("alpha",), "x if x > 0 else alpha * (exp(x) - 1)"),
    "softplus": OpSpec(("beta", "threshold"), "log(1 + exp(beta x)) / beta, and x where beta x > threshold"),
    "mish": OpSpec((), "x * tanh(softplus(x))"),
    # rounding to a dtype
    "to": OpSpec(("dtype",), "x rounded to dtype"),
}

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _check_params(name: str, params: tuple[Param, ...]) -> None:
    spec = OPS.get(name)
    if spec is None:
        raise ValueError(f"unknown pointwise op {name!r}; one of {', '.join(OPS)}")
    if len(params) != len(spec.params):
        raise ValueError(f"{name} takes ({', '.join(spec.params)}), got {params!r}")
    for key, value in zip(spec.params, params, strict=True):
        if key == "dtype":
            if value not in FLOAT_DTYPES:
                raise ValueError(f"to(dtype): dtype is one of {', '.join(FLOAT_DTYPES)}, got {value!r}")
        elif not isinstance(value, float):
            raise TypeError(f"{name}: {key} is a float, got {value!r}")


@dataclass(frozen=True)
class Op:
    """A pointwise op and its parameters (floats, or the dtype name of ``to``)."""

    name: str
    params: tuple[Param, ...] = ()

    def __post_init__(self) -> None:
        _check_params(self.name, self.params)
        # NaN is unequal to itself unless it is the same object: one object makes equal ops equal
        one_nan = tuple(math.nan if isinstance(p, float) and math.isnan(p) else p for p in self.params)
        object.__setattr__(self, "params", one_nan)

    @property
    def floats(self) -> tuple[float, ...]:
        """The parameters as floats; empty for ``to``."""
        return tuple(p for p in self.params if isinstance(p, float))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(p if isinstance(p, str) else repr(p) for p in self.params)})"


def op(name: str, *params: float | int | str) -> Op:
    """``Op`` with its numbers made floats: ``op("clamp", 0, 1)``."""
    return Op(name, tuple(p if isinstance(p, str) else float(p) for p in params))


@dataclass(frozen=True)
class Dropout:
    """A dropout that may draw: 0 < p < 1. Whether it does (training) is known when it runs."""

    p: float

    def __post_init__(self) -> None:
        if not 0.0 < self.p < 1.0:
            raise ValueError(f"an active dropout has 0 < p < 1, got {self.p!r}")

    def __str__(self) -> str:
        return f"dropout({self.p!r})"


Step = Op | Dropout


@dataclass(frozen=True)
class GroupNorm:
    """The GroupNorm a chain starts from.

    Args:
        num_groups: G; the channels C are a multiple of it.
        eps: as written; it is rounded to the input's dtype when used.
        weight, bias: whether gamma and beta are given, each [C].
        dtype: of the input, as a torch name ("float32"), or None when the graph does not say.
        checks_batch: True for ``F.group_norm``/``nn.GroupNorm``, which raise where a group has one value
            (N * C/G * spatial == 1); ``torch.group_norm`` and the ATen ops do not.
    """

    num_groups: int
    eps: float
    weight: bool = True
    bias: bool = True
    dtype: str | None = None
    checks_batch: bool = False

    def __str__(self) -> str:
        return "group_norm"


@dataclass(frozen=True)
class Chain:
    """``after(dropout(before(norm(x))))``; both op tuples apply from left to right."""

    norm: GroupNorm
    before: tuple[Op, ...] = ()
    dropout: Dropout | None = None
    after: tuple[Op, ...] = ()

    def __post_init__(self) -> None:
        if self.dropout is None and self.after:
            raise ValueError("ops after a dropout need the dropout")

    @property
    def steps(self) -> tuple[Step, ...]:
        """All ops and the dropout in the order in which they run."""
        middle: tuple[Step, ...] = (self.dropout,) if self.dropout else ()
        return (*self.before, *middle, *self.after)

    @property
    def text(self) -> str:
        """The steps as the fused ops take them; `parse_steps` reads it back."""
        return format_steps(self.steps)

    def pretty(self) -> str:
        """For people: ``group_norm → minimum(0) → clamp(0, 1) → dropout(0.2)``."""
        return " → ".join([str(self.norm), *map(pretty_step, self.steps)])


def chain_from_steps(norm: GroupNorm, steps: Iterable[Step]) -> Chain:
    """The chain of these steps. Raises ValueError for a second dropout."""
    before: list[Op] = []
    after: list[Op] = []
    dropout: Dropout | None = None
    for step in steps:
        if isinstance(step, Dropout):
            if dropout is not None:
                raise ValueError("a chain has one dropout")
            dropout = step
        elif dropout is None:
            before.append(step)
        else:
            after.append(step)
    return Chain(norm, tuple(before), dropout, tuple(after))


def pretty_number(value: float) -> str:
    """``0.0`` as ``0``, ``0.2`` as ``0.2``, ``-inf`` as ``-inf``."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e16:
        return "-0" if value == 0 and math.copysign(1, value) < 0 else str(int(value))
    return repr(value)


def pretty_step(step: Step) -> str:
    """A step for people: parameters shortened, none shown as no brackets, and open clamp bounds by name."""
    if isinstance(step, Dropout):
        return f"dropout({pretty_number(step.p)})"
    if step.name == "clamp":
        lo, hi = step.floats
        if hi == math.inf:
            return f"clamp_min({pretty_number(lo)})"
        if lo == -math.inf:
            return f"clamp_max({pretty_number(hi)})"
    shown = [p if isinstance(p, str) else pretty_number(p) for p in step.params]
    return f"{step.name}({', '.join(shown)})" if shown else step.name


def pretty_steps(steps: Iterable[Step]) -> str:
    """Steps for people: ``minimum(0) → clamp(0, 1)``, or ``x`` for none."""
    return " → ".join(map(pretty_step, steps)) or "x"


def format_steps(steps: Iterable[Step]) -> str:
    """``minimum(0.0); clamp(0.0, 1.0); dropout(0.2)``: floats as `repr`, which reads back exactly."""
    return "; ".join(map(str, steps))


_STEP = re.compile(r"\s*([a-z_]+)\(([^()]*)\)\s*")


def parse_steps(text: str) -> tuple[Step, ...]:
    """The inverse of `format_steps`. Raises ValueError naming the part that is not a step."""
    steps: list[Step] = []
    for part in text.split(";") if text.strip() else []:
        match = _STEP.fullmatch(part)
        if match is None:
            raise ValueError(f"not a step: {part.strip()!r}")
        name, inside = match.groups()
        words = [w.strip() for w in inside.split(",")] if inside.strip() else []
        if name == "dropout":
            if len(words) != 1:
                raise ValueError(f"dropout takes (p), got ({inside})")
            steps.append(Dropout(float(words[0])))
        else:
            steps.append(Op(name, tuple(w if w in FLOAT_DTYPES else float(w) for w in words)))
    return tuple(steps)
