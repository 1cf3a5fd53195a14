"""Steps that are several nodes: ``x * sigmoid(x)``, and the dropout that ``make_fx`` and AOTAutograd leave."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gnfuse.chain import Dropout, Step, op
from gnfuse.passes import effects
from gnfuse.passes.read import StepRead, read

_A = torch.ops.aten


@dataclass(frozen=True)
class Composite:
    """One step over several nodes.

    Attributes:
        step: what they compute.
        nodes: all of them in program order; the last one is the result.
        drawing: the one that draws random numbers.
    """

    step: Step
    nodes: tuple[Node, ...]
    drawing: Node | None = None

    @property
    def in_place(self) -> bool:
        """Whether the result is the input, overwritten."""
        return effects.writes(self.nodes[-1])


def find(names: list[Node], pending: list[Node], gm: GraphModule) -> Composite | None:
    """The composite step that the first two users of a value make, if they do.

    Args:
        names: the nodes that are the value.
        pending: its users in program order. More than the composite's two are right only after a write in place, when
            they use the result.
        gm: the graph module.
    """
    if len(pending) < 2:
        return None
    found = _swish(names, pending[0], pending[1], gm)
    for name in names:
        found = found or _drawn_dropout(name, pending[:2])
    return found if found is not None and (len(pending) == 2 or found.in_place) else None


_PRODUCTS = (
    operator.mul, operator.imul, torch.mul, torch.multiply, _A.mul.Tensor, _A.mul_.Tensor, "mul", "mul_", "multiply",
    "multiply_",
)  # fmt: skip


def _swish(names: list[Node], gate: Node, product: Node, gm: GraphModule) -> Composite | None:
    """``x * sigmoid(x)``, in either order; ``x *= sigmoid(x)``."""
    reading = read(gate, gm)
    if not isinstance(reading, StepRead) or reading.ops != (op("sigmoid"),) or reading.in_place:
        return None
    if product.target not in _PRODUCTS or len(product.args) != 2 or product.kwargs:
        return None
    if {user for user in gate.users if effects.is_live(user)} != {product}:
        return None
    first, second = product.args
    in_order = first in names and second is gate
    swapped = first is gate and second in names and not effects.writes(product)
    if not (in_order or swapped):
        return None
    return Composite(op("silu"), (gate, product))


def _drawn_dropout(value: Node, users: list[Node]) -> Composite | None:
    """``value * div_(bernoulli_(empty_like(value), keep), keep)``."""
    for drawn in users:
        if drawn.target is not _A.empty_like.default or drawn.args != (value,):
            continue
        bernoulli = _only_user(drawn, (_A.bernoulli_.float, _A.bernoulli.p))
        scaled = _only_user(bernoulli, (_A.div_.Scalar, _A.div.Scalar, _A.div.Tensor))
        product = _only_user(scaled, (_A.mul.Tensor, _A.mul_.Tensor))
        if bernoulli is None or scaled is None or product is None or product not in users:
            continue
        keep = bernoulli.args[1]
        if not isinstance(keep, float) or scaled.args[1] != keep or not 0.0 < keep < 1.0:
            continue
        p = _drop_of(keep)
        in_order = product.args == (value, scaled)
        swapped = product.args == (scaled, value) and product.target is _A.mul.Tensor
        if 1.0 - p == keep and (in_order or swapped):
            return Composite(Dropout(p), (drawn, bernoulli, scaled, product), bernoulli)
    return None


def _only_user(node: Node | None, targets: tuple[object, ...]) -> Node | None:
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _drop_of(keep: float) -> float:
    """The p as it was written: the shortest one for which 1 - p is ``keep``, where 1 - keep itself is
    0.19999999999999996."""
    exact = 1.0 - keep
    return next((p for p in (float(f"{exact:.{digits}g}") for digits in range(1, 17)) if 1.0 - p == keep), exact)
