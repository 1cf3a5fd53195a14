"""Finds the chains: from each GroupNorm along its users, as far as they are pointwise. Every stop has a reason.

A value may have several names (an in-place op, ``nn.Identity`` and a dropout in eval all return their input), so the
walk keeps the set of nodes that are the current value, and looks at their users in program order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gnfuse.chain import FLOAT_DTYPES, Chain, Dropout, GroupNorm, Op, Step, chain_from_steps, op
from gnfuse.passes import effects
from gnfuse.passes.read import (
    DropoutRead,
    IdentityRead,
    ModuleFlag,
    ModuleTensor,
    NormRead,
    Refused,
    StepRead,
    fake_value,
    module_of,
    read,
    source_line,
    target_name,
)
from gnfuse.passes.read_aten import drawn_dropout

_NORM_TARGETS = (
    F.group_norm, torch.group_norm, torch.ops.aten.group_norm.default, torch.ops.aten.native_group_norm.default,
)  # fmt: skip


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


def is_group_norm(node: Node) -> bool:
    """Whether the node is a GroupNorm in any dialect, readable or not."""
    if node.op == "call_module":
        return isinstance(module_of(node), torch.nn.GroupNorm)
    return node.op == "call_function" and node.target in _NORM_TARGETS


class Positions:
    """Program order and regions of one graph: which nodes lie between two others, and in which mode they run."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self._region: list[int] = []
        self._nesting: list[int] = []
        region = nesting = 0
        for node in self.nodes:
            nesting += effects.changes_nesting(node)
            region += effects.changes_mode(node)
            self._region.append(region)
            self._nesting.append(nesting)

    def same_region(self, a: Node, b: Node) -> bool:
        """Whether no mode (autocast, grad mode, functorch) changes between the two."""
        return self._region[self.index[a]] == self._region[self.index[b]]

    def in_transform(self, node: Node) -> bool:
        """Whether the node runs under a functorch transform."""
        return self._nesting[self.index[node]] > 0

    def between(self, a: Node, b: Node) -> list[Node]:
        """The nodes strictly between the two."""
        return self.nodes[self.index[a] + 1 : self.index[b]]


def matches(gm: GraphModule) -> Iterator[Match | Stop]:
    """Every GroupNorm of the graph: the chain found at it, or the reason why it cannot start one."""
    positions = Positions(gm.graph)
    for node in positions.nodes:
        if is_group_norm(node):
            reading = read(node, gm)
            if isinstance(reading, NormRead):
                yield _start(node, reading, gm, positions)
            else:
                reason = reading.reason if isinstance(reading, Refused) else "not readable as a GroupNorm"
                yield Stop(reason, node)


def tensor_of(ref: object, gm: GraphModule) -> torch.Tensor | None:
    """The (fake or real) tensor behind an argument, where the graph says."""
    if isinstance(ref, ModuleTensor):
        holder = operator.attrgetter(ref.path)(gm)
        return holder if isinstance(holder, torch.Tensor) else None
    if isinstance(ref, Node) and ref.op == "get_attr":
        try:
            holder = operator.attrgetter(str(ref.target))(gm)
        except AttributeError:
            holder = None
        if isinstance(holder, torch.Tensor):
            return holder
    return fake_value(ref)


def _dtype_name(tensor: torch.Tensor | None) -> str | None:
    return None if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _start(node: Node, reading: NormRead, gm: GraphModule, positions: Positions) -> Match | Stop:
    """Check what the norm itself needs, then walk."""
    x = tensor_of(reading.value, gm)
    for what, ref in (("input", reading.value), ("weight", reading.weight), ("bias", reading.bias)):
        tensor = tensor_of(ref, gm)
        if tensor is not None and _is_subclass(tensor):
            return Stop(f"the {what} is a tensor subclass ({type(tensor).__name__})", node)
    if positions.in_transform(node):
        return Stop("it runs under a functorch transform (vmap, grad, jvp)", node)
    if x is not None:
        problem = _input_problem(x, reading.num_groups)
        if problem:
            return Stop(problem, node)
    value, extra = _normalised(node, reading)
    if value is None:
        return Stop("its normalised tensor is not used, or its mean and rstd are", extra or node)
    out = fake_value(value)
    if out is not None and x is not None and out.dtype != x.dtype:
        return Stop(f"it runs under autocast: {x.dtype} in, {out.dtype} out", node)
    norm = GroupNorm(
        reading.num_groups, reading.eps, reading.weight is not None, reading.bias is not None, _dtype_name(x),
        reading.checks_batch,
    )  # fmt: skip
    return _Walk(gm, positions, node, reading, norm, value).run()


def _is_subclass(tensor: torch.Tensor) -> bool:
    return is_traceable_wrapper_subclass(tensor) or type(tensor) not in (
        torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor, torch.nn.Buffer,
    )  # fmt: skip


def _input_problem(x: torch.Tensor, num_groups: int) -> str:
    """Why eager would refuse this input (it then says so itself), or ""."""
    if str(x.dtype).removeprefix("torch.") not in FLOAT_DTYPES:
        return f"its input is {x.dtype}, not one of {', '.join(FLOAT_DTYPES)}"
    if x.layout != torch.strided:
        return f"its input has the layout {x.layout}"
    channels = x.shape[1] if x.dim() >= 2 else None
    if channels is None or num_groups <= 0 or (isinstance(channels, int) and channels % num_groups):
        return f"{num_groups} groups of the shape {tuple(x.shape)}: eager raises"
    return ""


def _normalised(node: Node, reading: NormRead) -> tuple[Node | None, Node | None]:
    """The node that holds the normalised tensor; None, and the offending node, where mean or rstd is used as well."""
    if not reading.getitem:
        return node, None
    value: Node | None = None
    for user in node.users:
        if user.target is not operator.getitem:
            return None, user
        if user.args[1] == 0:
            if value is not None:
                return None, user
            value = user
        elif any(_is_live(u) for u in user.users):
            return None, user
    return value, None


def _is_live(node: Node) -> bool:
    """Whether anything depends on the node; ``make_fx`` leaves dead detach nodes behind mean and rstd."""
    return node.op == "output" or effects.writes(node) or any(_is_live(user) for user in node.users)


_METADATA_ATTRIBUTES = ("device", "dtype", "shape", "ndim", "is_cuda", "layout")
_METADATA_METHODS = ("size", "dim", "numel", "ndimension", "is_floating_point", "nelement")


def reads_only_metadata(node: Node) -> bool:
    """Whether the node reads only what a GroupNorm's output shares with its input: shape, dtype, device."""
    if node.op == "call_method":
        return node.target in _METADATA_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _METADATA_ATTRIBUTES
    return node.target in (
        torch.ops.aten.sym_size.int, torch.ops.aten.sym_size.default, torch.ops.aten.sym_numel.default, torch.numel,
    )  # fmt: skip


class _Walk:
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
        for user in [u for u in users if self._is_metadata(u)]:
            self.match.metadata_users.append(user)
            self.consumed.add(user)
            users.discard(user)
        return sorted(users, key=lambda n: self.positions.index.get(n, 0))

    def _is_metadata(self, user: Node) -> bool:
        if not reads_only_metadata(user):
            return False
        # the dtype is the input's as long as no cast came before
        reads_dtype = user.target is getattr and user.args[1] == "dtype"
        return not (reads_dtype and any(isinstance(s, Op) and s.name == "to" for s in self.steps))

    def _step(self) -> Stop | None:
        pending = self._pending()
        if not pending:
            return Stop("nothing uses the result", self.names[-1])
        first = pending[0]
        if not self.positions.same_region(self.norm_node, first):
            return Stop("an autocast, grad-mode or functorch region begins or ends before this node", first)
        composite = self._composite(pending)
        if composite is not None:
            return composite if isinstance(composite, Stop) else None
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
            item = _only_item_zero(node)
            if item is None:
                return self._undo(Stop("the mask of this dropout is used as well", node))
            self.consumed.update(u for u in node.users)
            self._advance(node)
            result = item
        self._advance(result, keep=keeps_name)
        return None

    def _undo(self, stop: Stop) -> Stop:
        if self.steps and isinstance(self.steps[-1], Dropout):
            self.steps.pop()
            self.match.dropout_node = None
        return stop

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
                if "float64" in (wanted, dtype) and dtype != wanted:
                    if dtype is None or wanted == "float64":
                        return Stop(f"a cast from {dtype or 'an unknown dtype'} to {wanted}", node)
                dtype = wanted
            elif reading.number_bounds:
                problem = _out_of_range(one, dtype)
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
        if dtype is not None and _dtype_name(out) != dtype:
            return f"type promotion: the result is {out.dtype}, the chain computes {dtype}"
        if self.shape is not None and out.dim() != self.shape.dim():
            return f"the result has {out.dim()} dimensions, the GroupNorm's output {self.shape.dim()}"
        return ""

    def _take_dropout(self, node: Node, reading: DropoutRead) -> Stop | None:
        if self._inactive(reading):
            return None
        if reading.p == 1.0:
            if isinstance(reading.training, ModuleFlag):
                return Stop("dropout with p = 1 whose training flag can change", node)
            self.steps.append(op("mul", 0))
            return None
        if self.match.dropout_node is not None:
            return Stop("a second dropout", node)
        if node.op == "call_function" and "example_value" not in node.meta and not isinstance(
            reading.training, ModuleFlag
        ) and not reading.getitem:  # fmt: skip
            self.match.notes.append(f"training flag of {node.name} frozen at trace: {reading.training}")
        self.steps.append(Dropout(reading.p))
        self.match.dropout_node = node
        self.match.training = reading.training
        return None

    def _composite(self, pending: list[Node]) -> bool | Stop | None:
        """Steps written as several nodes: ``x * sigmoid(x)``, and the dropout that ``make_fx`` leaves."""
        for name in self.names:
            drawn = drawn_dropout(name)
            if drawn is not None and set(pending) == {drawn[2][0], drawn[0]}:
                return self._take_drawn(*drawn)
        swish = self._swish(pending)
        if swish is None:
            return None
        gate, product = swish
        self.steps.append(op("silu"))
        self.consumed.update((gate, product))
        self.match.nodes.extend((gate, product))
        self.names = [*self.names, product] if effects.writes(product) else [product]
        return True

    def _take_drawn(self, product: Node, p: float, drawing: tuple[Node, ...]) -> bool | Stop:
        if self.match.dropout_node is not None:
            return Stop("a second dropout", product)
        self.steps.append(Dropout(p))
        self.match.dropout_node = drawing[1]
        self.match.nodes.extend((*drawing, product))
        self.consumed.update((*drawing, product))
        self.names = [product]
        return True

    def _swish(self, pending: list[Node]) -> tuple[Node, Node] | None:
        """(sigmoid, product) where the first two users are ``sigmoid(x)`` and ``x * sigmoid(x)`` and it is safe."""
        if len(pending) < 2:
            return None
        gate, product = pending[0], pending[1]
        reading = read(gate, self.gm)
        if not isinstance(reading, StepRead) or reading.ops != (op("sigmoid"),) or reading.in_place:
            return None
        if set(gate.users) != {product} or product.target not in _PRODUCTS or len(product.args) != 2:
            return None
        in_place = effects.writes(product)
        first, second = product.args
        right = (first in self.names and second is gate) or (first is gate and second in self.names and not in_place)
        if not right or product.kwargs or (len(pending) > 2 and not in_place):
            return None
        return (gate, product) if self.positions.same_region(self.norm_node, product) else None


_PRODUCTS = (
    operator.mul, operator.imul, torch.mul, torch.multiply, torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor,
    "mul", "mul_", "multiply", "multiply_",
)  # fmt: skip


def _only_item_zero(node: Node) -> Node | None:
    """Item 0 of a tuple, where the other items have no live user."""
    value: Node | None = None
    for user in node.users:
        if user.target is not operator.getitem:
            return None
        if user.args[1] == 0 and value is None:
            value = user
        elif user.args[1] == 0 or any(_is_live(u) for u in user.users):
            return None
    return value


_LARGEST = {
    "float16": torch.finfo(torch.float16).max, "bfloat16": torch.finfo(torch.bfloat16).max,
    "float32": torch.finfo(torch.float32).max, "float64": torch.finfo(torch.float64).max,
}  # fmt: skip


def _out_of_range(one: Op, dtype: str | None) -> str:
    """Eager raises for a number that the dtype cannot hold; where the dtype is unknown, fp16 is assumed."""
    largest = _LARGEST[dtype or "float16"]
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
