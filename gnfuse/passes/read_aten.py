"""The dialect of ATen overloads: ``torch.export``, ``make_fx`` and AOTAutograd graphs, before and after autograd."""

from __future__ import annotations

import torch

from gnfuse.chain import op
from gnfuse.passes import read_torch as rt
from gnfuse.passes.read import (
    Call,
    DropoutRead,
    Reading,
    Row,
    StepRead,
    Unreadable,
    fake_value,
    row,
    target_name,
)

_A = torch.ops.aten


def native_dropout_equals_dropout(p: float, dtype: torch.dtype) -> bool:
    """Whether ``native_dropout``, which scales by 1/(1-p) in fp32, gives the values of ``F.dropout``, which rounds that
    scale to the dtype first."""
    exact = torch.tensor(1.0 / (1.0 - p), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    noise = torch.ones((), dtype=dtype).div_(1.0 - p)
    return bool(exact.double() == noise.double())


def _native_dropout(call: Call) -> Reading:
    p = call.number("p")
    train = call.get("train", True)
    training = True if train is None else bool(train)
    if not 0.0 <= p <= 1.0:
        raise Unreadable(f"dropout with p = {p} raises in eager")
    if training and p == 1.0:
        raise Unreadable("native_dropout with p = 1 gives plain zeros, unlike dropout")
    fake = fake_value(call.value())
    if training and p > 0 and (fake is None or not native_dropout_equals_dropout(p, fake.dtype)):
        raise Unreadable(
            f"native_dropout scales by 1/(1-{p}) in fp32, which differs from dropout's scale in this dtype"
        )
    return DropoutRead(call.value(), p, training, getitem=True)


def _elu(call: Call) -> Reading:
    if call.number("scale", 1.0) != 1.0 or call.number("input_scale", 1.0) != 1.0:
        raise Unreadable("elu with a scale (selu, celu)")
    return StepRead(call.value(), (op("elu", call.number("alpha", 1.0)),))


def _leaky(call: Call) -> Reading:
    return StepRead(call.value(), (op("leaky_relu", call.number("negative_slope", 0.01)),))


def _cast(call: Call) -> Reading:
    if call.get("dtype") is None:
        raise Unreadable(f"{target_name(call.node)} without a dtype")
    call.only("layout", "device", "pin_memory", "non_blocking", "copy")
    if call.get("memory_format") not in (None, torch.preserve_format):
        raise Unreadable("a copy to another memory format")
    return rt.cast(call.get("dtype"))(call)


_R = rt.ROWS

ROWS: dict[torch._ops.OpOverload, Row] = {
    _A.group_norm.default: row(
        "input num_groups weight bias eps cudnn_enabled", lambda c: rt.group_norm(c, checks_batch=False)
    ),
    _A.native_group_norm.default: rt.NATIVE_GROUP_NORM,
    _A.minimum.default: _R["minimum"],
    _A.min.other: _R["minimum"],
    _A.maximum.default: _R["maximum"],
    _A.max.other: _R["maximum"],
    _A.clamp.default: _R["clamp"],
    _A.clip.default: _R["clip"],
    _A.clamp_min.default: _R["clamp_min"],
    _A.clamp_max.default: _R["clamp_max"],
    _A.relu.default: _R["relu"],
    _A.relu6.default: _R["relu6"],
    _A.hardtanh.default: _R["hardtanh"],
    _A.threshold.default: _R["threshold"],
    _A.leaky_relu.default: row("input negative_slope", _leaky),
    _A.silu.default: _R["silu"],
    _A.gelu.default: _R["gelu"],
    _A.sigmoid.default: _R["sigmoid"],
    _A.tanh.default: _R["tanh"],
    _A.hardswish.default: _R["hardswish"],
    _A.hardsigmoid.default: _R["hardsigmoid"],
    _A.elu.default: row("input alpha scale input_scale", _elu),
    _A.softplus.default: _R["softplus"],
    _A.mish.default: _R["mish"],
    _A.neg.default: _R["neg"],
    _A.negative.default: _R["neg"],
    _A.abs.default: _R["abs"],
    _A.absolute.default: _R["abs"],
    _A.square.default: _R["square"],
    _A.pow.Tensor_Scalar: _R["pow"],
    _A.reciprocal.default: _R["reciprocal"],
    _A.add.Tensor: _R["add"],
    _A.add.Scalar: _R["add"],
    _A.sub.Tensor: _R["sub"],
    _A.sub.Scalar: _R["sub"],
    _A.subtract.Tensor: _R["sub"],
    _A.subtract.Scalar: _R["sub"],
    _A.rsub.Scalar: _R["rsub"],
    _A.mul.Tensor: _R["mul"],
    _A.mul.Scalar: _R["mul"],
    _A.multiply.Tensor: _R["mul"],
    _A.multiply.Scalar: _R["mul"],
    _A.div.Tensor: row("input other", rt.div),
    _A.div.Scalar: row("input other", rt.div),
    _A.divide.Tensor: row("input other", rt.div),
    _A.divide.Scalar: row("input other", rt.div),
    _A.true_divide.Tensor: row("input other", rt.div),
    _A.true_divide.Scalar: row("input other", rt.div),
    _A.clone.default: _R["clone"],
    _A.alias.default: row("input", rt.identity),
    _A.to.dtype: row("input dtype non_blocking copy memory_format", _cast),
    _A._to_copy.default: row("input dtype layout device pin_memory non_blocking memory_format", _cast),
    _A.dropout.default: row("input p training", rt.dropout),
    _A.native_dropout.default: row("input p train", _native_dropout),
    _A.feature_dropout.default: _R["feature_dropout"],
    _A.alpha_dropout.default: _R["alpha_dropout"],
    _A.feature_alpha_dropout.default: _R["feature_alpha_dropout"],
    _A.prelu.default: _R["prelu"],
    _A.glu.default: _R["glu"],
}

ROWS[_A.pow_.Scalar] = rt.written_in_place(_R["pow"])

# In-place overloads have the base's schema with a trailing underscore in the name
for _overload, _base in list(ROWS.items()):
    _packet = getattr(_A, _overload._schema.name.split("::")[1] + "_", None)
    _written = getattr(_packet, _overload._overloadname, None) if _packet is not None else None
    if isinstance(_written, torch._ops.OpOverload) and _written._schema.is_mutable:
        ROWS[_written] = rt.written_in_place(_base)
