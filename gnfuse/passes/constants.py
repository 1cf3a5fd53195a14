"""Which graph values are constants that are known now: the bounds of min and max in all their spellings."""

from __future__ import annotations

import math
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
    if _is_written(arg):
        return f"the bound {arg.name} is written in place, so its value changes"
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


# Of those that hand a constant on, the ones whose result is other memory. (detach_ returns its input, unwritten, and
# every later use goes through it.)
_COPIES = frozenset({
    _ATEN.lift_fresh_copy.default, _ATEN.clone.default, torch.clone, "clone", _ATEN.detach_.default, "detach_", "cuda",
})  # fmt: skip

# Views: a write into one is a write into the constant
_VIEWS = frozenset({
    "view", "reshape", "expand", "squeeze", "unsqueeze", "detach", "alias", "t", "transpose", "permute", "flatten",
    "as_strided", "getitem", "narrow", "select", "view_as", "expand_as", "ravel", "data",
})  # fmt: skip


def _is_written(node: Node) -> bool:
    """Whether some user writes into the tensor or a view of it. (``detach_`` writes nothing.)"""
    from gnfuse.passes import effects
    from gnfuse.passes.read import target_name

    for user in node.users:
        if user.target in _COPIES:
            continue
        if effects.writes_into(user, node):
            return True
        base = target_name(user).removeprefix("aten.").split(".")[0]
        if base in _VIEWS and _is_written(user):
            return True
    return False


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
        elif not isinstance(given, torch.device | str | bool) and not _is_attribute(given, "device"):
            return f"the bound {node.name} is converted in a form that gnfuse does not know"
    return Constant(value, dtype, inner.rank, (node, *inner.nodes))


def _is_attribute(arg: object, name: str) -> bool:
    """Whether the argument is ``tensor.name`` of some tensor of the graph."""
    return isinstance(arg, Node) and arg.target is getattr and arg.args[1] == name


def _attribute(node: Node, gm: GraphModule) -> Constant | str:
    path = str(node.target)
    holder: Any = gm
    for atom in path.split("."):
        holder = getattr(holder, atom, None)
    if not isinstance(holder, torch.Tensor):
        return f"the bound {path} is not a tensor"
    if isinstance(holder, torch.nn.Parameter) or holder.requires_grad:
        return f"the bound {path} is a parameter: it needs a gradient of its own, and its value can change"
    if not _TRACED_LITERAL.match(path) or _is_the_modules_own(node):
        return f"the bound {path} is a buffer, so its value can change after the rewrite"
    if holder.numel() != 1 or holder.device.type == "meta" or not _real(holder.dtype):
        return f"the bound {path} is not one real number"
    try:
        return Constant(float(holder.item()), holder.dtype, holder.dim(), (node,))
    except (RuntimeError, ValueError) as why:  # a fake tensor has no value
        return f"the bound {path} has no value here: {why}"


def _is_the_modules_own(node: Node) -> bool:
    """ATen tracers read a literal through ``lift_fresh_copy``; what they read without it is a tensor of the module,
    which keeps its identity and may change."""
    lifted = (_ATEN.lift_fresh_copy.default, _ATEN.lift_fresh.default)
    return any(isinstance(user.target, torch._ops.OpOverload) and user.target not in lifted for user in node.users)


def _real(dtype: torch.dtype) -> bool:
    return not dtype.is_complex


@dataclass(frozen=True)
class _Maker:
    """How a call makes a constant.

    Attributes:
        parse: (value, rank) from the node.
        default: the dtype where none is given; None: that of the value. "input": that of the tensor it is called on.
    """

    parse: Callable[[Node], tuple[object, int]]
    default: Callable[[], torch.dtype] | str | None = None


def _made(node: Node, maker: _Maker) -> Constant | str:
    try:
        value, rank = maker.parse(node)
        if not isinstance(value, bool | int | float):
            return f"the bound {node.name} is not a known number"
    except (IndexError, KeyError, TypeError, ValueError):
        return f"the bound {node.name} is made in a form that gnfuse does not know"
    dtype = node.kwargs.get("dtype")
    if (dtype is None and maker.default == "input") or _is_attribute(dtype, "dtype"):
        if rank > 0 or not _same_in_every_dtype(value):
            return f"the bound {node.name} has the dtype of another tensor, which may round or promote"
        return Constant(float(value), None, rank, (node,))
    if dtype is None and callable(maker.default):
        dtype = maker.default()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and _real(dtype)):
        return f"the bound {node.name} has the dtype {dtype}"
    made = torch.tensor(value, dtype=dtype)  # rounds as the graph would
    return Constant(float(made.item()), made.dtype, rank, (node,))


def _same_in_every_dtype(value: float) -> bool:
    """Whether no floating dtype rounds the value."""
    exact = float(value)
    return math.isnan(exact) or all(
        float(torch.tensor(exact, dtype=dtype).item()) == exact for dtype in (torch.float16, torch.bfloat16)
    )


def _argument(node: Node, position: int, *names: str) -> object:
    for name in names:
        if name in node.kwargs:
            return node.kwargs[name]
    return node.args[position]


def _literal(node: Node, position: int = 0) -> tuple[object, int]:
    """``torch.tensor(c)``, ``torch.tensor([c])``."""
    if node.kwargs.get("requires_grad"):
        raise ValueError("needs a gradient of its own")
    data = _argument(node, position, "data", "s")
    rank = 0
    while isinstance(data, list | tuple):
        (data,) = data
        rank += 1
    return data, rank


def _rank_of_one(size: object) -> int:
    """The rank of a size that holds one element."""
    if not isinstance(size, list | tuple) or any(not isinstance(n, int) or n != 1 for n in size):
        raise ValueError("more than one element")
    return len(size)


def _filled(value: float, skip: int = 0) -> Callable[[Node], tuple[object, int]]:
    """``torch.zeros(())``, ``torch.zeros(1)``, ``x.new_zeros(())`` (skip = 1)."""

    def parse(node: Node) -> tuple[object, int]:
        sizes = node.args[skip:]
        size = node.kwargs["size"] if "size" in node.kwargs else sizes[0] if len(sizes) == 1 else sizes
        return value, 1 if size == 1 else _rank_of_one(size)

    return parse


def _full(node: Node, skip: int = 0) -> tuple[object, int]:
    return _argument(node, skip + 1, "fill_value"), _rank_of_one(_argument(node, skip, "size"))


def _new_tensor(node: Node) -> tuple[object, int]:
    return _literal(node, 1)


def _new_full(node: Node) -> tuple[object, int]:
    return _full(node, 1)


_DEFAULT = torch.get_default_dtype

_MAKERS: dict[object, _Maker] = {
    torch.tensor: _Maker(_literal),
    torch.as_tensor: _Maker(_literal),
    torch.scalar_tensor: _Maker(_literal, _DEFAULT),
    _ATEN.scalar_tensor.default: _Maker(_literal, _DEFAULT),
    torch.full: _Maker(_full),
    _ATEN.full.default: _Maker(_full),
    torch.zeros: _Maker(_filled(0.0), _DEFAULT),
    _ATEN.zeros.default: _Maker(_filled(0.0), _DEFAULT),
    torch.ones: _Maker(_filled(1.0), _DEFAULT),
    _ATEN.ones.default: _Maker(_filled(1.0), _DEFAULT),
    "new_tensor": _Maker(_new_tensor, "input"),
    "new_full": _Maker(_new_full, "input"),
    _ATEN.new_full.default: _Maker(_new_full, "input"),
    "new_zeros": _Maker(_filled(0.0, 1), "input"),
    _ATEN.new_zeros.default: _Maker(_filled(0.0, 1), "input"),
    "new_ones": _Maker(_filled(1.0, 1), "input"),
    _ATEN.new_ones.default: _Maker(_filled(1.0, 1), "input"),
}
