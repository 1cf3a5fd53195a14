"""What each step of a chain and each op means: the contract, in eager torch.

Where the fused ops fold to a constant they equal this bit for bit; where they compute, their error against float64 is
no larger than this one's. Gradients are autograd's of the same expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from gnfuse.chain import Dropout, Step


def _bound(x: Tensor, value: float) -> Tensor:
    """A 0-dim tensor that rounds to x's dtype and does not promote it."""
    return torch.tensor(value, dtype=x.dtype, device=x.device)


# Keys are those of gnfuse.chain.OPS; each takes x and the step's parameters.
OPS: dict[str, Callable[..., Tensor]] = {
    "constant": lambda x, value: torch.where(x.isnan(), x, _bound(x, value)),
    "minimum": lambda x, bound: torch.minimum(x, _bound(x, bound)),
    "maximum": lambda x, bound: torch.maximum(x, _bound(x, bound)),
    "clamp": lambda x, lo, hi: torch.clamp(x, lo, hi),
    "hardtanh": lambda x, lo, hi: F.hardtanh(x, lo, hi),
    "relu": lambda x: torch.relu(x),
    "threshold": lambda x, at, value: F.threshold(x, at, value),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "abs": lambda x: torch.abs(x),
    "neg": lambda x: torch.neg(x),
    "add": lambda x, c: x + c,
    "rsub": lambda x, c: c - x,
    "mul": lambda x, c: x * c,
    "div": lambda x, c: x / c,
    "rdiv": lambda x, c: c / x,
    "square": lambda x: torch.square(x),
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": lambda x: torch.sigmoid(x),
    "tanh": lambda x: torch.tanh(x),
    "hardswish": lambda x: F.hardswish(x),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "elu": lambda x, alpha: F.elu(x, alpha),
    "softplus": lambda x, beta, threshold: F.softplus(x, beta, threshold),
    "mish": lambda x: F.mish(x),
    "to": lambda x, dtype: x.to(getattr(torch, dtype)),
}


def apply_step(x: Tensor, step: Step, training: bool) -> Tensor:
    """One step on a tensor of any shape, in x's dtype or that of ``to``. A dropout draws where ``training`` is set."""
    if isinstance(step, Dropout):
        return F.dropout(x, step.p, training)
    return OPS[step.name](x, *step.params)


def group_norm_chain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    steps: Iterable[Step],
    training: bool,
) -> Tensor:
    """``steps`` of ``group_norm(x)``.

    Args:
        x: [N, C, ...], floating, of any strides.
        weight, bias: [C] in x's dtype (float32 also with a 16-bit x), or None.
        num_groups: divides C.
        eps: added to the variance.
        steps: `gnfuse.chain` steps, applied from left to right.
        training: whether a dropout draws.
    """
    y = torch.group_norm(x, num_groups, weight, bias, eps)
    for step in steps:
        y = apply_step(y, step, training)
    return y
