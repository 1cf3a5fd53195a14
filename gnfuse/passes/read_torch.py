"""The dialect of torch functions, ``torch.nn.functional``, operators and tensor methods (Dynamo, symbolic_trace)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from gnfuse.chain import FLOAT_DTYPES, Op, op
from gnfuse.passes.read import (
    Call,
    DropoutRead,
    IdentityRead,
    NormRead,
    Reading,
    Refused,
    Row,
    StepRead,
    Unreadable,
    describe,
    row,
    target_name,
)

Builder = Callable[[Call], Reading]


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` as "bfloat16"; Unreadable for what is not one of the chain's dtypes."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, torch.dtype) or name not in FLOAT_DTYPES:
        raise Unreadable(f"a cast to {dtype} leaves the floating dtypes that gnfuse computes in")
    return name


# --- builders: what a call means -------------------------------------------------------------------------------------


def plain(name: str, **params: float) -> Builder:
    """An op whose parameters are numbers with these defaults, in the order of `gnfuse.chain.OPS`."""

    def build(call: Call) -> Reading:
        numbers = [call.number(key, default) for key, default in params.items()]
        return StepRead(call.value(), (op(name, *numbers),), bool(call.get("inplace", False)))

    return build


def extremum(name: str) -> Builder:
    """min/max with a constant on either side. The one-tensor and dim forms are reductions."""

    def build(call: Call) -> Reading:
        left, right = call.get("input"), call.get("other")
        if right is None or isinstance(right, bool | int) or call.get("dim") is not None:
            raise Unreadable(f"this {target_name(call.node)} is a reduction, not the pointwise op")
        bound = call.constant("other")
        value = left
        if isinstance(bound, str):
            flipped = call.constant("input")
            if isinstance(flipped, str):
                raise Unreadable(bound)
            bound, value = flipped, right
        if not isinstance(value, Node):
            raise Unreadable(f"{target_name(call.node)} of something that is not a tensor of this graph")
        return StepRead(
            value,
            (op(name, bound.value), *_promotion(bound.rank, bound.dtype)),
            bounds=bound.nodes,
            number_bounds=bound.dtype is None,
        )

    return build


def _promotion(rank: int, dtype: torch.dtype | None) -> tuple[Op, ...]:
    """A bound of rank >= 1 takes part in type promotion; the matcher compares this marker with the chain's dtype."""
    return (Op("to", (dtype_name(dtype),)),) if rank > 0 and dtype is not None and dtype.is_floating_point else ()


def clamp(call: Call) -> Reading:
    for key in ("min", "max"):
        if isinstance(call.get(key), Node):
            raise Unreadable(f"clamp with a tensor as {key} ({call.get(key).name})")
    if call.get("min") is None and call.get("max") is None:
        raise Unreadable("clamp without bounds raises in eager")
    return StepRead(
        call.value(), (op("clamp", call.optional_number("min", -math.inf), call.optional_number("max", math.inf)),)
    )


def hardtanh(call: Call) -> Reading:
    lo, hi = call.number("min_val", -1.0), call.number("max_val", 1.0)
    if lo > hi:
        raise Unreadable("hardtanh with min_val > max_val raises in eager")
    return StepRead(call.value(), (op("hardtanh", lo, hi),), call.flag("inplace"))


def gelu(call: Call) -> Reading:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    kind = call.get("approximate", "none")
    if kind not in kinds:
        raise Unreadable(f"gelu(approximate={kind!r}) raises in eager")
    return StepRead(call.value(), (op(kinds[kind]),))


def _sides(call: Call) -> tuple[Node | None, float | None, bool]:
    """(tensor, number, flipped) of a binary op; the number is None where both sides are one and the same tensor."""
    left, right = call.get("input"), call.get("other")
    if isinstance(left, Node) and left is right:
        return left, None, False
    if isinstance(left, Node) and isinstance(right, bool | int | float):
        return left, float(right), False
    if isinstance(right, Node) and isinstance(left, bool | int | float):
        return right, float(left), True
    raise Unreadable(f"{target_name(call.node)} with a tensor operand")


def arithmetic(same: Op | None, number: Callable[[float, bool], Op]) -> Builder:
    """A binary op: ``same`` is what op(x, x) means, ``number(c, flipped)`` what op(x, c) or op(c, x) means."""

    def build(call: Call) -> Reading:
        value, c, flipped = _sides(call)
        assert value is not None
        if call.get("rounding_mode") is not None:
            raise Unreadable("div with a rounding mode")
        alpha = call.number("alpha", 1.0)
        if c is None:
            if same is None or alpha != 1.0:
                raise Unreadable(f"{target_name(call.node)} of a tensor with itself")
            return StepRead(value, (same,))
        if alpha != 1.0:
            raise Unreadable(f"{target_name(call.node)} with alpha")
        return StepRead(value, (number(c, flipped),))

    return build


add = arithmetic(op("mul", 2), lambda c, _: op("add", c))
sub = arithmetic(None, lambda c, flipped: op("rsub", c) if flipped else op("add", -c))
mul = arithmetic(op("square"), lambda c, _: op("mul", c))
div = arithmetic(None, lambda c, flipped: op("rdiv", c) if flipped else op("div", c))


def rsub(call: Call) -> Reading:
    if call.number("alpha", 1.0) != 1.0:
        raise Unreadable("rsub with alpha")
    return StepRead(call.value(), (op("rsub", call.number("other")),))


def power(call: Call) -> Reading:
    if call.number("exponent") != 2.0:
        raise Unreadable("a power other than 2")
    return StepRead(call.value(), (op("square"),))


def identity(call: Call) -> Reading:
    return IdentityRead(call.value())


def copy(call: Call) -> Reading:
    if call.get("memory_format") not in (None, torch.preserve_format):
        raise Unreadable("a copy to another memory format")
    return IdentityRead(call.value(), alias=False)


def cast(dtype: torch.dtype) -> Builder:
    return lambda call: StepRead(call.value(), (Op("to", (dtype_name(dtype),)),), number_bounds=False)


def cast_to(call: Call) -> Reading:
    """``x.to(dtype)`` in its spellings; a device, a copy or a memory format is something else."""
    call.only("copy", "memory_format")
    given = [call.get(key) for key in ("first", "second", "dtype", "device") if call.get(key) is not None]
    dtypes = [g for g in given if isinstance(g, torch.dtype)]
    target = dtypes[0] if len(dtypes) == 1 else None
    if target is None or len(given) != 1:
        raise Unreadable(f"to({', '.join(map(describe, given))}): only a cast to one dtype is a pointwise op")
    return StepRead(call.value(), (Op("to", (dtype_name(target),)),), number_bounds=False)


def group_norm(call: Call, *, checks_batch: bool, default_eps: float = 1e-5) -> Reading:
    groups = call.get("num_groups")
    if not isinstance(groups, int):
        raise Unreadable("the number of groups is not a known number")
    weight, bias = call.optional_tensor("weight"), call.optional_tensor("bias")
    return NormRead(call.value(), groups, weight, bias, call.number("eps", default_eps), checks_batch)


def _native_group_norm(call: Call) -> Reading:
    reading = group_norm(call, checks_batch=False)
    return replace(reading, getitem=True) if isinstance(reading, NormRead) else reading


NATIVE_GROUP_NORM = row("input weight bias N C HxW num_groups eps", _native_group_norm)


def dropout(call: Call, *, training: bool = True) -> Reading:
    """``F.dropout`` (training by default) and ``torch.dropout`` (always told). A wrong p raises in eager."""
    p = call.number("p", 0.5)
    if not 0.0 <= p <= 1.0:
        raise Unreadable(f"dropout with p = {p} raises in eager")
    return DropoutRead(call.value(), p, call.flag("training", training), call.flag("inplace"))


def refuse(reason: str) -> Builder:
    return lambda call: Refused(reason)


# --- rows: argument names and builder --------------------------------------------------------------------------------

_BINARY = "input other alpha"
CHANNEL_DROPOUT = "dropout of whole channels draws one value a channel: not covered yet"
ALPHA_DROPOUT = "alpha dropout has a mask and values of its own: not covered yet"

ROWS: dict[str, Row] = {
    "minimum": row("input other", extremum("minimum")),
    "min": row("input other dim keepdim", extremum("minimum")),
    "maximum": row("input other", extremum("maximum")),
    "max": row("input other dim keepdim", extremum("maximum")),
    "clamp": row("input min max", clamp),
    "clip": row("input min max", clamp),
    "clamp_min": row("input min", clamp),
    "clamp_max": row("input max", clamp),
    "relu": row("input inplace", plain("relu")),
    "relu6": row("input inplace", plain("hardtanh", lo=0.0, hi=6.0)),
    "hardtanh": row("input min_val max_val inplace", hardtanh),
    "threshold": row("input threshold value inplace", lambda c: StepRead(
        c.value(), (op("threshold", c.number("threshold"), c.number("value")),), c.flag("inplace"))),
    "leaky_relu": row("input negative_slope inplace", plain("leaky_relu", negative_slope=0.01)),
    "silu": row("input inplace", plain("silu")),
    "gelu": row("input approximate", gelu),
    "sigmoid": row("input", plain("sigmoid")),
    "tanh": row("input", plain("tanh")),
    "hardswish": row("input inplace", plain("hardswish")),
    "hardsigmoid": row("input inplace", plain("hardsigmoid")),
    "elu": row("input alpha inplace", plain("elu", alpha=1.0)),
    "softplus": row("input beta threshold", plain("softplus", beta=1.0, threshold=20.0)),
    "mish": row("input inplace", plain("mish")),
    "neg": row("input", plain("neg")),
    "negative": row("input", plain("neg")),
    "abs": row("input", plain("abs")),
    "absolute": row("input", plain("abs")),
    "square": row("input", plain("square")),
    "pow": row("input exponent", power),
    "reciprocal": row("input", lambda c: StepRead(c.value(), (op("rdiv", 1.0),))),
    "add": row(_BINARY, add),
    "sub": row(_BINARY, sub),
    "subtract": row(_BINARY, sub),
    "rsub": row(_BINARY, rsub),
    "mul": row("input other", mul),
    "multiply": row("input other", mul),
    "div": row("input other rounding_mode", div),
    "divide": row("input other rounding_mode", div),
    "true_divide": row("input other", div),
    "clone": row("input memory_format", copy),
    "float": row("input memory_format", cast(torch.float32)),
    "half": row("input memory_format", cast(torch.float16)),
    "bfloat16": row("input memory_format", cast(torch.bfloat16)),
    "double": row("input memory_format", cast(torch.float64)),
    "to": row("input first second dtype device non_blocking copy memory_format", cast_to),
    "type": row("input dtype", cast_to),
    "dropout": row("input p training inplace", dropout),
    "dropout1d": row("input p training inplace", refuse(CHANNEL_DROPOUT)),
    "dropout2d": row("input p training inplace", refuse(CHANNEL_DROPOUT)),
    "dropout3d": row("input p training inplace", refuse(CHANNEL_DROPOUT)),
    "feature_dropout": row("input p training", refuse(CHANNEL_DROPOUT)),
    "alpha_dropout": row("input p training inplace", refuse(ALPHA_DROPOUT)),
    "feature_alpha_dropout": row("input p training inplace", refuse(ALPHA_DROPOUT)),
    "prelu": row("input weight", refuse("prelu's slope is a learned tensor")),
    "glu": row("input dim", refuse("glu halves the channels: not a pointwise op")),
    "rrelu": row("input lower upper training inplace", refuse("rrelu draws its own random slopes: not covered")),
}  # fmt: skip

# torch.dropout takes train positionally and has no default; its torch.nn.functional sisters default to training=True
# except rrelu. torch.group_norm does not check the batch size.
_NORM_ROWS: dict[Any, Row] = {
    F.group_norm: row("input num_groups weight bias eps", lambda c: group_norm(c, checks_batch=True)),
    torch.group_norm: row(
        "input num_groups weight bias eps cudnn_enabled", lambda c: group_norm(c, checks_batch=False)
    ),
    torch.native_group_norm: NATIVE_GROUP_NORM,
    torch.dropout: row("input p training", dropout),
    torch.dropout_: row("input p training", dropout, in_place=True),
}


def written_in_place(base: Row) -> Row:
    """The form of a row whose result is its input, overwritten."""

    def build(call: Call) -> Reading:
        reading = base.build(call)
        if isinstance(reading, StepRead):
            return replace(reading, in_place=True)
        return replace(reading, in_place=True) if isinstance(reading, DropoutRead) else reading

    return Row(base.names, build, in_place=True)


_NO_METHOD = {
    "relu6", "hardtanh", "threshold", "leaky_relu", "silu", "gelu", "hardswish", "hardsigmoid", "elu", "softplus",
    "mish", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout",
    "feature_alpha_dropout", "glu", "rrelu", "rsub", "add_", "min_", "max_",
}  # fmt: skip
_IN_PLACE = {
    "clamp", "clip", "clamp_min", "clamp_max", "relu", "sigmoid", "tanh", "neg", "negative", "abs", "absolute",
    "square", "pow", "reciprocal", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide",
    "hardtanh", "threshold", "leaky_relu", "silu", "hardswish", "hardsigmoid", "elu", "mish", "dropout",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
}  # fmt: skip

METHODS: dict[str, Row] = {name: r for name, r in ROWS.items() if name not in _NO_METHOD}
METHODS |= {name + "_": written_in_place(ROWS[name]) for name in _IN_PLACE if name not in _NO_METHOD}
# Operators on a tensor, as some torch releases write them into a Dynamo graph
METHODS |= {
    f"__{dunder}__": ROWS[name]
    for dunder, name in (("abs", "abs"), ("neg", "neg"), ("add", "add"), ("radd", "add"), ("sub", "sub"),
                         ("rsub", "rsub"), ("mul", "mul"), ("rmul", "mul"), ("truediv", "div"), ("pow", "pow"))
}  # fmt: skip


def _functions() -> dict[Any, Row]:
    """Every function object that torch keeps under one of the rows' names, with and without the trailing ``_``."""
    table: dict[Any, Row] = {}
    for space in (torch, F, torch._C._nn):
        for name, base in ROWS.items():
            if name in ("float", "half", "bfloat16", "double", "to", "type"):
                continue
            plain_form, in_place = getattr(space, name, None), getattr(space, name + "_", None)
            if callable(plain_form):
                table.setdefault(plain_form, base)
            if callable(in_place):
                table.setdefault(in_place, written_in_place(base))
    return table | _NORM_ROWS


FUNCTIONS: dict[Any, Row] = _functions() | {
    operator.add: row("input other", add),
    operator.sub: row("input other", sub),
    operator.mul: row("input other", mul),
    operator.truediv: row("input other", div),
    operator.pow: row("input exponent", power),
    operator.neg: row("input", plain("neg")),
    operator.pos: row("input", identity),
    operator.abs: row("input", plain("abs")),
    operator.iadd: written_in_place(row("input other", add)),
    operator.isub: written_in_place(row("input other", sub)),
    operator.imul: written_in_place(row("input other", mul)),
    operator.itruediv: written_in_place(row("input other", div)),
    operator.ipow: written_in_place(row("input exponent", power)),
}
