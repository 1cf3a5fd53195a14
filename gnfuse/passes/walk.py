"""The walk from a GroupNorm along its users, as far as they are pointwise. Every stop has a reason.

A value may have several names (an in-place op, ``nn.Identity`` and a dropout in eval all return their input), so the
walk keeps the set of nodes that are the current value, and looks at their users in program order.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from gnfuse.chain import Chain, Dropout, GroupNorm, Op, Step, chain_from_steps, op
from gnfuse.kernels import probes
from gnfuse.passes import effects
from gnfuse.passes.composite import Composite, find
from gnfuse.passes.intervals import LARGEST
from gnfuse.passes.positions import Positions
from gnfuse.passes.read import (
    DropoutRead,
    IdentityRead,
    ModuleFlag,
    NormRead,
    Refused,
    StepRead,
    dtype_of,
    fake_value,
    read,
    source_line,
    target_name,
)


@dataclass(frozen=True)
class Stop:
    """Where a walk ended and why."""

    reason: str
    node: Node


@dataclass
class Match:
    """One GroupNorm and the chain that follows it.

    Attributes:
        norm: the GroupNorm node; ``read`` its arguments.
        chain: the ops found.
        training: of the dropout, if the chain has one.
        nodes: the nodes whose work the chain is, in program order (the norm first).
        names: the nodes that are the chain's final value.
        bounds: nodes that only make constants of the chain.
        metadata_users: nodes that read only shape, dtype or device of an intermediate.
        stop: why the walk ended.
        dropout_node: the node that draws.
        dtype: of the result, None where the graph does not say.
        notes: facts for the report.
    """

    norm: Node
    read: NormRead
    chain: Chain
    training: bool | ModuleFlag = True
    nodes: list[Node] = field(default_factory=list)
    names: list[Node] = field(default_factory=list)
    bounds: list[Node] = field(default_factory=list)
    metadata_users: list[Node] = field(default_factory=list)
    stop: Stop | None = None
    dropout_node: Node | None = None
    dtype: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        """``file.py:12`` of the GroupNorm."""
        return source_line(self.norm)


def first_item(node: Node) -> Node | Stop:
    """Item 0 of a node with several results, or why it is not the only one that is used."""
    value: Node | None = None
    for user in node.users:
        if user.target is not operator.getitem:
            return Stop("its results are used as a tuple", user)
        if user.args[1] == 0 and value is None:
            value = user
        elif user.args[1] == 0 or any(effects.is_live(u) for u in user.users):
            return Stop(f"item {user.args[1]} of its results is used as well", user)
    return value or Stop("nothing uses its result", node)


_METADATA_ATTRIBUTES = ("device", "dtype", "shape", "ndim", "is_cuda", "layout")
_METADATA_METHODS = ("size", "dim", "numel", "ndimension", "is_floating_point", "nelement")
_MAKES_NEW = ("new_full", "new_tensor", "new_zeros", "new_ones", "new_empty")  # of the same dtype and device


def reads_only_metadata(node: Node) -> bool:
    """Whether the node reads only what a GroupNorm's output shares with its input: shape, dtype, device."""
    if node.op == "call_method":
        return node.target in _METADATA_METHODS + _MAKES_NEW
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _METADATA_ATTRIBUTES
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.split("::")[1] in _MAKES_NEW:
        return True
    return node.target in (
        torch.ops.aten.sym_size.int, torch.ops.aten.sym_size.default, torch.ops.aten.sym_numel.default, torch.numel,
    )  # fmt: skip


class Walk:
    """One walk from a GroupNorm. ``names`` are the nodes that are the current value."""

    def __init__(
        self, gm: GraphModule, positions: Positions, node: Node, reading: NormRead, norm: GroupNorm, value: Node
    ) -> None:
        self.gm = gm
        self.positions = positions
        self.norm_node = node
        self.steps: list[Step] = []
        self.names = [value]
        self.consumed: set[Node] = set()
        self.dtype = norm.dtype
        self.shape = fake_value(value)
        self.match = Match(node, reading, Chain(norm))
        self.match.nodes = [node] if value is node else [node, value]
        self.norm = norm

    def run(self) -> Match:
        """Walk until something stops it."""
        stop = self._step()
        while stop is None:
            stop = self._step()
        match = self.match
        match.stop = stop
        match.chain = chain_from_steps(self.norm, self.steps)
        match.names = self.names
        match.dtype = self.dtype
        _note_conditioning(match)
        return match

    def _pending(self) -> list[Node]:
        """Users of the current value that are not yet part of the chain, in program order."""
        users = {user for name in self.names for user in name.users} - self.consumed - set(self.names)
        for user in list(users):
            if self._is_metadata(user):
                self.match.metadata_users.append(user)
            elif effects.is_live(user) and not self._asserts_what_is_known(user):
                continue
            self.consumed.add(user)
            users.discard(user)
        return sorted(users, key=lambda n: self.positions.index.get(n, 0))

    def _is_metadata(self, user: Node) -> bool:
        if not reads_only_metadata(user):
            return False
        # the dtype is the input's as long as no cast came before
        reads_shape = user.op == "call_method" and user.target in _METADATA_METHODS
        reads_dtype = not reads_shape and not (user.target is getattr and user.args[1] != "dtype")
        return not (reads_dtype and any(isinstance(s, Op) and s.name == "to" for s in self.steps))

    def _asserts_what_is_known(self, user: Node) -> bool:
        """torch.export asserts the dtype before a cast; the walk has followed it."""
        asserted = user.kwargs.get("dtype")
        return user.target is torch.ops.aten._assert_tensor_metadata.default and (
            isinstance(asserted, torch.dtype) and str(asserted).removeprefix("torch.") == self.dtype
        )

    def _step(self) -> Stop | None:
        pending = self._pending()
        if not pending:
            return Stop("nothing uses the result", self.names[-1])
        first = pending[0]
        if not self.positions.same_region(self.norm_node, first):
            return Stop("an autocast, grad-mode or functorch region begins or ends before this node", first)
        composite = find(self.names, pending, self.gm)
        if composite is not None and self.positions.same_region(self.norm_node, composite.nodes[-1]):
            return self._take_composite(composite)
        reading = read(first, self.gm)
        if isinstance(reading, Refused):
            if len(pending) > 1:
                return self._several(pending)
            return Stop(reading.reason, first)
        if isinstance(reading, NormRead):
            return self._several(pending) if len(pending) > 1 else Stop("the next GroupNorm starts here", first)
        if reading.value not in self.names:
            return Stop(f"{target_name(first)} uses the value as something other than its input", first)
        keeps_name = reading.alias if isinstance(reading, IdentityRead) else reading.in_place or self._inactive(reading)
        if len(pending) > 1 and not keeps_name:
            return self._several(pending)
        return self._take(first, reading, keeps_name)

    @staticmethod
    def _several(pending: list[Node]) -> Stop:
        listed = ", ".join(node.name for node in pending[:4])
        return Stop(f"the value has {len(pending)} users ({listed}): it must exist in memory", pending[0])

    @staticmethod
    def _inactive(reading: StepRead | DropoutRead) -> bool:
        """A dropout that returns its input itself."""
        return isinstance(reading, DropoutRead) and (reading.p == 0.0 or reading.training is False)

    def _take(self, node: Node, reading: StepRead | DropoutRead | IdentityRead, keeps_name: bool) -> Stop | None:
        if isinstance(reading, StepRead):
            stop = self._take_ops(node, reading)
        elif isinstance(reading, DropoutRead):
            stop = self._take_dropout(node, reading)
        else:
            stop = None
        if stop is not None:
            return stop
        result = node
        if isinstance(reading, DropoutRead) and reading.getitem:
            item = first_item(node)
            if not isinstance(item, Node):
                return self._undo(Stop("the mask of this dropout is used as well", node))
            self.consumed.update(node.users)
            self._advance(node)
            result = item
        self._advance(result, keep=keeps_name)
        return None

    def _undo(self, stop: Stop) -> Stop:
        if self.steps and isinstance(self.steps[-1], Dropout):
            self.steps.pop()
            self.match.dropout_node = None
        return stop

    def _take_composite(self, composite: Composite) -> Stop | None:
        if composite.drawing is not None:
            if self.match.dropout_node is not None:
                return Stop("a second dropout", composite.nodes[-1])
            self.match.dropout_node = composite.drawing
        self.steps.append(composite.step)
        self.consumed.update(composite.nodes[:-1])
        self.match.nodes.extend(composite.nodes[:-1])
        self._advance(composite.nodes[-1], keep=composite.in_place)
        return None

    def _advance(self, node: Node, keep: bool = False) -> None:
        self.consumed.add(node)
        self.match.nodes.append(node)
        self.names = [*self.names, node] if keep else [node]

    def _take_ops(self, node: Node, reading: StepRead) -> Stop | None:
        steps: list[Op] = []
        dtype = self.dtype
        for one in reading.ops:
            if one.name == "to":
                wanted = str(one.params[0])
                if reading.bounds:  # a bound of rank >= 1, which may promote
                    if dtype != wanted:
                        return Stop(f"its bound is a 1-element {wanted} tensor, which can promote the result", node)
                    continue
                if wanted == "float64" and dtype != "float64":
                    return Stop(f"a cast from {dtype or 'an unknown dtype'} to {wanted}", node)
                dtype = wanted
            elif reading.number_bounds:
                problem = _out_of_range(one, dtype) or _ignored_nan(one)
                if problem:
                    return Stop(problem, node)
            steps.append(one)
        problem = self._shape_problem(node, dtype)
        if problem:
            return Stop(problem, node)
        self.steps.extend(steps)
        self.dtype = dtype
        self.match.bounds.extend(reading.bounds)
        self.consumed.update(reading.bounds)
        return None

    def _shape_problem(self, node: Node, dtype: str | None) -> str:
        """What the tracer recorded for the node must be what the chain computes."""
        out = fake_value(node)
        if out is None:
            return ""
        if dtype is not None and dtype_of(out) != dtype:
            return f"type promotion: the result is {out.dtype}, the chain computes {dtype}"
        if self.shape is not None and out.dim() != self.shape.dim():
            return f"the result has {out.dim()} dimensions, the GroupNorm's output {self.shape.dim()}"
        return ""

    def _take_dropout(self, node: Node, reading: DropoutRead) -> Stop | None:
        self._note_frozen_flag(node, reading)
        if self._inactive(reading):
            return None
        if reading.p == 1.0:
            if isinstance(reading.training, ModuleFlag):
                return Stop("dropout with p = 1 whose training flag can change", node)
            self.steps.append(op("mul", 0))
            return None
        if self.match.dropout_node is not None:
            return Stop("a second dropout", node)
        self.steps.append(Dropout(reading.p))
        self.match.dropout_node = node
        self.match.training = reading.training
        return None

    def _note_frozen_flag(self, node: Node, reading: DropoutRead) -> None:
        """A traced graph does not see train() and eval() where the flag was an argument. (Dynamo compiles anew.)"""
        if isinstance(reading.training, bool) and reading.p > 0 and "example_value" not in node.meta:
            self.match.notes.append(f"training flag of {node.name} frozen at trace: {reading.training}")


def _ignored_nan(one: Op) -> str:
    """A NaN bound makes everything NaN, except in torch releases that ignore it in places."""
    if any(map(math.isnan, one.floats)) and not probes.nan_bound_makes_nan():
        return f"{one} has a NaN bound, which this torch ignores in places"
    return ""


def _out_of_range(one: Op, dtype: str | None) -> str:
    """Eager raises for a number that the dtype cannot hold; where the dtype is unknown, fp16 is assumed."""
    largest = LARGEST[dtype or "float16"]
    for value in one.floats:
        if largest < abs(value) < float("inf"):
            return f"{one} has a number outside {dtype or 'float16 (the dtype is not known)'}: eager raises"
    return ""


_ILL_CONDITIONED = ("log", "log2", "log10", "rsqrt", "reciprocal", "div", "truediv", "true_divide", "divide", "addcdiv")


def _note_conditioning(match: Match) -> None:
    """A logarithm or a quotient of nearly constant groups magnifies the rounding of the statistics."""
    stop = match.stop
    if stop is not None and target_name(stop.node).split(".")[-1] in _ILL_CONDITIONED:
        match.notes.append(f"ill-conditioned: the consumer is {target_name(stop.node)}, which magnifies rounding")
