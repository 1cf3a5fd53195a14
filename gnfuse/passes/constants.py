"""Which graph values are constants that are known now: the bounds of min and max in all their spellings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Constant:
    """A constant scalar, as the op that reads it sees it.

    Attributes:
        value: after rounding to the constant's own dtype.
        dtype: None for a Python number.
        rank: 0 for a number or a 0-dim tensor; a tensor of rank >= 1 takes part in type promotion.
        nodes: the graph nodes that make it.
    """

    value: float
    dtype: torch.dtype | None
    rank: int
    nodes: tuple[Node, ...] = ()


# Names under which tracers store literals. A user's own buffers and parameters may change after the rewrite.
_TRACED_LITERAL = re.compile(r"(^|.*[._])(_tensor_constant\d+|lifted_tensor_\d+)$")

_ATEN = torch.ops.aten
# Ops that hand a constant on unchanged: target -> nothing but a first argument, a device, or a copy
_PASS_ON: frozenset[object] = frozenset({
    _ATEN.lift_fresh_copy.default, _ATEN.lift_fresh.default, _ATEN.detach.default, _ATEN.detach_.default,
    _ATEN.clone.default, _ATEN.alias.default, torch.clone, torch.detach, "clone", "detach", "detach_", "contiguous",
    "cpu", "cuda",
})  # fmt: skip


def resolve(arg: object, gm: GraphModule) -> Constant | str:
    """The constant that ``arg`` is, or the reason why its value is not known."""
    if isinstance(arg, bool | int | float):
        return Constant(float(arg), None, 0)
    if not isinstance(arg, Node):
        return f"the bound is {arg!r}"
    if arg.op == "placeholder":
        return f"the bound {arg.name} is an input of the graph, so its value can change"
    if arg.op == "get_attr":
        return _attribute(arg, gm)
    if arg.op in ("call_function", "call_method"):
        if arg.target in _PASS_ON:
            return _chained(arg, resolve(arg.args[0] if arg.args else None, gm))
        if arg.target == "to":
            return _moved(arg, resolve(arg.args[0], gm))
        maker = _MAKERS.get(arg.target) if isinstance(arg.target, str) or callable(arg.target) else None
        if maker is not None:
            return _made(arg, maker)
    return f"the bound {arg.name} is computed, so its value is not known"


def _chained(node: Node, inner: Constant | str) -> Constant | str:
    if isinstance(inner, str):
        return inner
    return Constant(inner.value, inner.dtype, inner.rank, (node, *inner.nodes))


def _moved(node: Node, inner: Constant | str) -> Constant | str:
    """``constant.to(device)`` or ``constant.to(dtype)``."""
    if isinstance(inner, str):
        return inner
    value, dtype = inner.value, inner.dtype
    for given in (*node.args[1:], *node.kwargs.values()):
        if isinstance(given, torch.dtype) and _real(given):
            value, dtype = float(torch.tensor(value, dtype=given).item()), given
        elif not isinstance(given, torch.device | str | bool) and not _is_device(given):
            return f"the bound {node.name} is converted in a form that gnfuse does not know"
    return Constant(value, dtype, inner.rank, (node, *inner.nodes))


def _is_device(arg: object) -> bool:
    return isinstance(arg, Node) and arg.target is getattr and arg.args[1] == "device"


def _attribute(node: Node, gm: GraphModule) -> Constant | str:
    path = str(node.target)
    holder: Any = gm
    for atom in path.split("."):
        holder = getattr(holder, atom, None)
    if not isinstance(holder, torch.Tensor):
        return f"the bound {path} is not a tensor"
    if isinstance(holder, torch.nn.Parameter) or holder.requires_grad:
        return f"the bound {path} is a parameter: it needs a gradient of its own, and its value can change"
    if not _TRACED_LITERAL.match(path):
        return f"the bound {path} is a buffer, so its value can change after the rewrite"
    if holder.numel() != 1 or holder.device.type == "meta" or not _real(holder.dtype):
        return f"the bound {path} is not one real number"
    try:
        return Constant(float(holder.item()), holder.dtype, holder.dim(), (node,))
    except (RuntimeError, ValueError) as why:  # a fake tensor has no value
        return f"the bound {path} has no value here: {why}"


def _real(dtype: torch.dtype) -> bool:
    return not dtype.is_complex


def _made(node: Node, maker: Callable[[Node], tuple[object, int, torch.dtype | None]]) -> Constant | str:
    try:
        value, rank, dtype = maker(node)
    except (IndexError, KeyError, TypeError, ValueError):
        return f"the bound {node.name} is made in a form that gnfuse does not know"
    if not isinstance(value, bool | int | float) or (dtype is not None and not _real(dtype)):
        return f"the bound {node.name} is not a known number"
    made = torch.tensor(value, dtype=dtype)  # rounds as the graph would
    return Constant(float(made.item()), made.dtype, rank, (node,))


def _arg(node: Node, position: int, *names: str) -> object:
    for name in names:
        if name in node.kwargs:
            return node.kwargs[name]
    return node.args[position]


def _dtype(node: Node) -> torch.dtype | None:
    dtype = node.kwargs.get("dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError
    return dtype


def _literal(node: Node) -> tuple[object, int, torch.dtype | None]:
    """``torch.tensor(c)``, ``torch.tensor([c])``."""
    if node.kwargs.get("requires_grad"):
        raise ValueError
    data = _arg(node, 0, "data", "s")
    rank = 0
    while isinstance(data, list | tuple):
        (data,) = data
        rank += 1
    return data, rank, _dtype(node)


def _rank_of_one(size: object) -> int:
    """The rank of a size that holds one element."""
    if not isinstance(size, list | tuple) or any(not isinstance(n, int) or n != 1 for n in size):
        raise ValueError
    return len(size)


def _filled(value: float) -> Callable[[Node], tuple[object, int, torch.dtype | None]]:
    def make(node: Node) -> tuple[object, int, torch.dtype | None]:
        size = node.kwargs["size"] if "size" in node.kwargs else node.args[0] if len(node.args) == 1 else node.args
        return value, _rank_of_one(size), _dtype(node) or torch.get_default_dtype()

    return make


def _full(node: Node) -> tuple[object, int, torch.dtype | None]:
    return _arg(node, 1, "fill_value"), _rank_of_one(_arg(node, 0, "size")), _dtype(node)


def _scalar_tensor(node: Node) -> tuple[object, int, torch.dtype | None]:
    return _arg(node, 0, "s"), 0, _dtype(node) or torch.get_default_dtype()


_MAKERS: dict[object, Callable[[Node], tuple[object, int, torch.dtype | None]]] = {
    torch.tensor: _literal,
    torch.as_tensor: _literal,
    torch.scalar_tensor: _scalar_tensor,
    _ATEN.scalar_tensor.default: _scalar_tensor,
    torch.full: _full,
    _ATEN.full.default: _full,
    torch.zeros: _filled(0.0),
    _ATEN.zeros.default: _filled(0.0),
    torch.ones: _filled(1.0),
    _ATEN.ones.default: _filled(1.0),
}
