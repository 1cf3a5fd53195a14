"""Finds the sites: every GroupNorm of a graph, checked for what it needs itself, with the chain that follows it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from gnfuse.chain import FLOAT_DTYPES, GroupNorm
from gnfuse.passes.positions import Positions
from gnfuse.passes.read import NormRead, Refused, dtype_of, fake_value, module_of, read, tensor_of
from gnfuse.passes.walk import Match, Stop, Walk, first_item

_NORM_TARGETS = (
    F.group_norm,
    torch.group_norm,
    torch.native_group_norm,
    torch.ops.aten.group_norm.default,
    torch.ops.aten.native_group_norm.default,
)


def is_group_norm(node: Node) -> bool:
    """Whether the node is a GroupNorm in any dialect, readable or not."""
    if node.op == "call_module":
        return isinstance(module_of(node), torch.nn.GroupNorm)
    return node.op == "call_function" and node.target in _NORM_TARGETS


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
    value = first_item(node) if reading.getitem else node
    if isinstance(value, Stop):
        return value if value.node is node else Stop(f"mean and rstd: {value.reason}", value.node)
    out = fake_value(value)
    if out is not None and x is not None and out.dtype != x.dtype:
        return Stop(f"it runs under autocast: {x.dtype} in, {out.dtype} out", node)
    norm = GroupNorm(
        reading.num_groups, reading.eps, reading.weight is not None, reading.bias is not None, dtype_of(x),
        reading.checks_batch,
    )  # fmt: skip
    return Walk(gm, positions, node, reading, norm, value).run()


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch._subclasses.FakeTensor)


def _is_subclass(tensor: torch.Tensor) -> bool:
    """Whether the tensor may mean something else by its ops (DTensor, a quantised or nested tensor)."""
    return type(tensor) not in _PLAIN_TENSORS


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
