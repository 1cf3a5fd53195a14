"""Graph surgery: the only room that edits a graph. It swaps a plan's nodes for one fused op and keeps all else."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gnfuse.passes import effects
from gnfuse.passes.plan import Plan
from gnfuse.passes.read import ModuleFlag, ModuleTensor, NormRead, fake_value, tensor_of
from gnfuse.passes.read import read as read_node
from gnfuse.passes.walk import Match


def fused_ops() -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """(without dropout, with dropout). The kernels must be loaded."""
    ops: Any = torch.ops.gnfuse
    return ops.group_norm_pointwise.default, ops.group_norm_dropout.default


def next_site(gm: GraphModule) -> int:
    """The first site number that no fused op of the module, or of a graph inside it, has. (0: none draws.)"""
    if not hasattr(torch.ops.gnfuse, "group_norm_dropout"):  # the kernels are not loaded, so nothing is rewritten
        return 0
    _, with_dropout = fused_ops()
    taken = [
        int(node.args[8])
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function" and node.target == with_dropout
    ]
    return max(taken, default=-1) + 1


def apply(plan: Plan, gm: GraphModule, number: int) -> None:
    """Replace the plan's nodes by a fused op. ``number`` keeps two equal random sites from being merged."""
    match, graph = plan.match, gm.graph
    _move_metadata_users(match, gm)
    for node in match.nodes:
        _erase_dead_users(node, graph, keep=set(match.nodes))
    with graph.inserting_before(plan.before):
        fused = _call(plan, gm, number)
        result = graph.call_function(operator.getitem, (fused, 0))
    _copy_meta(match, fused, result)
    for name in match.names:
        name.replace_all_uses_with(result, delete_user_cb=lambda user: user not in match.nodes)
    _erase(match, graph)


def _call(plan: Plan, gm: GraphModule, number: int) -> Node:
    match, graph = plan.match, gm.graph
    read = _read_again(match, gm)
    tensors = [_tensor(graph, gm, ref) for ref in (read.weight, read.bias)]
    head = (read.value, *tensors, read.num_groups, read.eps, plan.chain, plan.source)
    pointwise, with_dropout = fused_ops()
    if match.chain.dropout is None:
        return graph.call_function(pointwise, (*head, read.checks_batch))
    training = _training(graph, match.training)
    return graph.call_function(with_dropout, (*head, training, number, read.checks_batch))


def _read_again(match: Match, gm: GraphModule) -> NormRead:
    """The norm's arguments as they are now: another site's rewrite may have replaced its input."""
    reading = read_node(match.norm, gm)
    assert isinstance(reading, NormRead)
    return reading


def _tensor(graph: Graph, gm: GraphModule, ref: object) -> Node | None:
    if not isinstance(ref, ModuleTensor):
        return ref if isinstance(ref, Node) else None
    node = graph.get_attr(ref.path)
    tensor = tensor_of(ref, gm)
    if tensor is not None and any("val" in n.meta for n in graph.nodes):
        node.meta["val"] = tensor
    return node


def _training(graph: Graph, training: bool | ModuleFlag) -> bool | Node:
    """A module's flag is read each time the graph runs, so that train() and eval() still switch the dropout."""
    if isinstance(training, bool):
        return training
    return graph.call_function(getattr, (graph.get_attr(training.path), "training"))


def _copy_meta(match: Match, fused: Node, result: Node) -> None:
    """The result stands for the chain's last node; the fused op, which has several results, for the same source."""
    last = match.names[-1]
    result.meta = dict(last.meta)
    fused.meta = {key: value for key, value in last.meta.items() if key not in ("example_value", "val", "tensor_meta")}
    if not fused.meta.get("stack_trace") and match.norm.meta.get("stack_trace"):
        fused.meta["stack_trace"] = match.norm.meta["stack_trace"]
    key = next((k for k in ("example_value", "val") if k in last.meta), None)
    if key is not None:
        value = _fake_result(fused)
        if value is not None:
            fused.meta[key] = value


def _fake_result(fused: Node) -> object:
    """The op's results on the recorded fake inputs, None where some are missing or real."""
    args = [fake_value(a) if isinstance(a, Node) else a for a in fused.args]
    if any(isinstance(a, Node) and v is None for a, v in zip(fused.args, args, strict=True)):
        return None
    mode = getattr(args[0], "fake_mode", None)
    if mode is None:
        return None
    with mode, torch.no_grad():
        return fused.target(*(_in_mode(a, mode) for a in args))  # type: ignore[operator]


def _in_mode(arg: Any, mode: Any) -> Any:
    """A tensor of the mode with the argument's size, strides, dtype and device: ``make_fx`` gives each parameter a mode
    of its own."""
    if not isinstance(arg, torch.Tensor) or getattr(arg, "fake_mode", None) is mode:
        return arg
    return torch.empty_strided(arg.size(), arg.stride(), dtype=arg.dtype, device=arg.device)


def _move_metadata_users(match: Match, gm: GraphModule) -> None:
    """What reads only shape, dtype or device of an intermediate reads them of the GroupNorm's input."""
    x = _read_again(match, gm).value
    for user in match.metadata_users:
        for inner in [n for n in user.all_input_nodes if n in match.nodes]:
            user.replace_input_with(inner, x)


def _erase(match: Match, graph: Graph) -> None:
    """The nodes of the chain, and the nodes that made its constants where nothing else uses them."""
    for node in reversed(match.nodes):
        _erase_dead_users(node, graph, keep=set(match.nodes))
        if not node.users:
            graph.erase_node(node)
    for node in match.bounds:
        _erase_unused(node, graph)


def _erase_dead_users(node: Node, graph: Graph, keep: set[Node]) -> None:
    """Users whose own results nothing needs (mean, rstd, a dropout's mask), last first."""
    for user in list(node.users):
        if user not in keep and not effects.is_live(user):
            _erase_dead_users(user, graph, keep)
            graph.erase_node(user)


def _erase_unused(node: Node, graph: Graph) -> None:
    if node.users or node.op in ("placeholder", "output") or node not in graph.nodes:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for made_from in inputs:
        if made_from.op == "get_attr" or made_from.target is getattr:
            _erase_unused(made_from, graph)
