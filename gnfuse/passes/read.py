"""What one FX node means, in the words of `gnfuse.chain`: the part that every dialect's table shares.

A table (`read_torch`, `read_aten`, `read_modules`) maps a node's target to a `Row`: the names of its arguments and a
function from the bound `Call` to a `Reading`. A row never raises for what it finds: it raises `Unreadable` with the
reason, which `read` turns into a `Refused`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gnfuse.chain import Op
from gnfuse.passes import constants

NOT_GIVEN = object()


class Unreadable(Exception):
    """The node is a known op in a form that gnfuse leaves alone; the message is the reason."""


@dataclass(frozen=True)
class ModuleFlag:
    """``training`` of the submodule at ``path``, read when the graph runs."""

    path: str


@dataclass(frozen=True)
class ModuleTensor:
    """A parameter or buffer of the graph module, read by a ``get_attr`` node."""

    path: str


TensorRef = Node | ModuleTensor | None


@dataclass(frozen=True)
class NormRead:
    """A GroupNorm of ``x``. ``getitem`` says that the normalised tensor is item 0 of the node's result."""

    value: Node
    num_groups: int
    weight: TensorRef
    bias: TensorRef
    eps: float
    checks_batch: bool
    getitem: bool = False


@dataclass(frozen=True)
class StepRead:
    """Pointwise ops on ``value``. ``bounds``: nodes that only make the op's constants. ``number_bounds``: the
    parameters are Python numbers, which eager refuses when the dtype cannot hold them."""

    value: Node
    ops: tuple[Op, ...]
    in_place: bool = False
    bounds: tuple[Node, ...] = ()
    number_bounds: bool = True


@dataclass(frozen=True)
class DropoutRead:
    """A dropout of ``value``. ``getitem``: the result is item 0 of the node (``native_dropout``)."""

    value: Node
    p: float
    training: bool | ModuleFlag
    in_place: bool = False
    getitem: bool = False


@dataclass(frozen=True)
class IdentityRead:
    """The result is ``value``: the same object (``alias``), or a copy of it."""

    value: Node
    alias: bool = True


@dataclass(frozen=True)
class Refused:
    """A node that ends the chain, and why."""

    reason: str


Reading = NormRead | StepRead | DropoutRead | IdentityRead | Refused


_SYNONYMS = {"self": "input", "train": "training", "group": "num_groups"}


class Call:
    """A node's arguments by name."""

    def __init__(self, node: Node, gm: GraphModule, names: tuple[str, ...], module_path: str = "") -> None:
        self.node = node
        self.gm = gm
        self.module_path = module_path
        if len(node.args) > len(names):
            raise Unreadable(f"{target_name(node)} has more arguments than gnfuse knows")
        self.bound: dict[str, Any] = dict(zip(names, node.args, strict=False))
        for key, value in node.kwargs.items():
            known = key if key in names else _SYNONYMS.get(key, key)
            if known not in names or known in self.bound:
                raise Unreadable(f"{target_name(node)} has an argument {key!r} that gnfuse does not know")
            self.bound[known] = value

    def get(self, key: str, default: Any = None) -> Any:
        """The argument, or the default where it is absent."""
        return self.bound.get(key, default)

    def value(self, key: str = "input") -> Node:
        """The tensor argument."""
        node = self.bound.get(key)
        if not isinstance(node, Node):
            raise Unreadable(f"{target_name(self.node)} of something that is not a tensor of this graph")
        return node

    def optional_tensor(self, key: str) -> Node | None:
        """A tensor argument, or None."""
        given = self.bound.get(key)
        if given is not None and not isinstance(given, Node):
            raise Unreadable(f"the {key} of {target_name(self.node)} is not a tensor of this graph")
        return given

    def number(self, key: str, default: object = NOT_GIVEN) -> float:
        """A Python number."""
        given = self.bound.get(key, default)
        if isinstance(given, bool | int | float):
            return float(given)
        if given is NOT_GIVEN:
            raise Unreadable(f"{target_name(self.node)} without {key}")
        raise Unreadable(f"{key} of {target_name(self.node)} is not a known number: {describe(given)}")

    def optional_number(self, key: str, default: float) -> float:
        """A Python number, or the default where it is None or absent."""
        return default if self.bound.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """A Python bool."""
        given = self.bound.get(key, default)
        if not isinstance(given, bool):
            raise Unreadable(f"{key} of {target_name(self.node)} is not known: {describe(given)}")
        return given

    def only(self, *keys: str) -> None:
        """Refuse where any of these optional arguments is given: gnfuse does not know what it would change."""
        for key in keys:
            if self.bound.get(key) not in (None, False):
                raise Unreadable(f"{target_name(self.node)} with {key}")

    def constant(self, key: str) -> constants.Constant | str:
        """The argument as a constant known now, or the reason why it is not one."""
        return constants.resolve(self.bound.get(key), self.gm)


@dataclass(frozen=True)
class Row:
    """One line of a dialect's table: argument names, how to read the call, whether it writes into its input."""

    names: tuple[str, ...]
    build: Callable[[Call], Reading]
    in_place: bool = False


def row(names: str, build: Callable[[Call], Reading], in_place: bool = False) -> Row:
    """A `Row` from space-separated argument names."""
    return Row(tuple(names.split()), build, in_place)


def describe(value: object) -> str:
    """An argument for a reason: a node by its name, anything else by its value."""
    if isinstance(value, Node):
        return f"{value.name} ({target_name(value)})"
    return repr(value)


def target_name(node: Node) -> str:
    """The op's name for people: ``conv2d``, ``aten.add.Tensor``, ``Conv2d (conv1)``."""
    if node.op == "call_module":
        module = module_of(node)
        kind = type(module).__name__ if module is not None else "module"
        return f"{kind} ({node.target})"
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def module_of(node: Node) -> torch.nn.Module | None:
    """The submodule that a ``call_module`` node calls."""
    owner = node.graph.owning_module
    try:
        return owner.get_submodule(str(node.target)) if owner is not None else None
    except AttributeError:
        return None


_FAKE_KEYS = ("example_value", "val")


def fake_value(node: object) -> torch.Tensor | None:
    """The tensor that tracing recorded for the node (usually a fake one), if any."""
    if not isinstance(node, Node):
        return None
    for key in _FAKE_KEYS:
        value = node.meta.get(key)
        if isinstance(value, torch.Tensor):
            return value
    return None


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


def dtype_of(tensor: torch.Tensor | None) -> str | None:
    """The name of the dtype, "bfloat16", or None."""
    return None if tensor is None else str(tensor.dtype).removeprefix("torch.")


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY = re.compile(r"/(site-packages|dist-packages)/torch/")


def source_line(node: Node) -> str:
    """``file.py:12`` of the user's call, else the module path, else ""."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])] or frames
    if own:
        path, line = own[-1]
        return f"{path.rsplit('/', 1)[-1]}:{line}"
    stack = node.meta.get("nn_module_stack")
    if stack:
        path = list(stack.values())[-1][0]
        return f"module {path}"
    return f"module {node.target}" if node.op == "call_module" else ""


def read(node: Node, gm: GraphModule) -> Reading:
    """What the node means, by the table of its dialect."""
    from gnfuse.passes import read_modules

    if node.op == "output":
        return Refused("the value is returned here")
    try:
        if node.op == "call_module":
            return read_modules.read_module(node, gm)
        found = _row_of(node)
        if found is None:
            return Refused(f"{target_name(node)} is not a pointwise op that gnfuse knows")
        return found.build(Call(node, gm, found.names))
    except Unreadable as why:
        return Refused(str(why))


def _row_of(node: Node) -> Row | None:
    """The line of the table for a function, overload or method."""
    from gnfuse.passes import read_aten, read_torch

    if node.op == "call_method":
        return read_torch.METHODS.get(str(node.target))
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return read_aten.ROWS.get(node.target)
    try:
        return read_torch.FUNCTIONS.get(node.target)
    except TypeError:  # a target that cannot be hashed
        return None


def declared_in_place(node: Node) -> bool | None:
    """Whether the call of a known op writes into its input; None for what is in no table."""
    found = _row_of(node)
    if found is None:
        return None
    arguments = dict(zip(found.names, node.args, strict=False)) | node.kwargs
    return found.in_place or arguments.get("inplace") is True or node.kwargs.get("out") is not None
