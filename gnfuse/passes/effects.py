"""What a node does besides computing its result: it draws random numbers, writes into a tensor, or changes a mode."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from gnfuse.passes.read import declared_in_place, module_of

_RANDOM_NAMES = frozenset({
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout", "native_dropout", "rrelu", "rrelu_", "bernoulli", "bernoulli_", "rand", "rand_like",
    "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "normal_", "uniform_", "multinomial",
    "poisson", "binomial", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "gumbel_softmax",
    "scaled_dot_product_attention", "multi_head_attention_forward", "manual_seed", "set_rng_state",
    "fractional_max_pool2d", "fractional_max_pool3d",
})  # fmt: skip

_IN_PLACE_OPERATORS = frozenset({
    operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift,
})  # fmt: skip

_MODE_NAMES = frozenset({
    "_enter_autocast", "_exit_autocast", "_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode",
    "_exit_inference_mode", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable",
})  # fmt: skip

_MODULES_WITHOUT_RANDOMNESS = (
    torch.nn.Linear, torch.nn.modules.conv._ConvNd, torch.nn.GroupNorm, torch.nn.LayerNorm, torch.nn.Identity,
    torch.nn.modules.batchnorm._NormBase, torch.nn.ReLU, torch.nn.Hardtanh, torch.nn.SiLU, torch.nn.GELU,
    torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.modules.pooling._MaxPoolNd, torch.nn.modules.pooling._AvgPoolNd,
    torch.nn.Upsample, torch.nn.Flatten, torch.nn.LeakyReLU, torch.nn.ELU, torch.nn.Softplus, torch.nn.Hardswish,
    torch.nn.Hardsigmoid, torch.nn.Mish, torch.nn.Threshold,
)  # fmt: skip


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def draws(node: Node) -> bool:
    """Whether the node may draw from a generator. What is not known to be harmless counts as drawing."""
    if node.op == "call_module":
        return not isinstance(module_of(node), _MODULES_WITHOUT_RANDOMNESS)
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        base = node.target._schema.name.split("::")[1]
        return torch.Tag.nondeterministic_seeded in node.target.tags or base in _RANDOM_NAMES
    return _name(node) in _RANDOM_NAMES


def writes(node: Node) -> bool:
    """Whether the node may write into one of its inputs. What is not known counts as writing."""
    declared = declared_in_place(node)
    if declared is not None:
        return declared
    if node.op == "call_module":
        return bool(getattr(module_of(node), "inplace", False)) or not isinstance(
            module_of(node), _MODULES_WITHOUT_RANDOMNESS
        )
    if node.op == "call_method":
        return _name(node).endswith("_") and not _name(node).endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    name = _name(node)
    return (
        node.target in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("inplace") is True
        or "out" in node.kwargs
        or (bool(node.args) and node.args[-1] is True)  # F.celu(x, 1.0, True): inplace is the last argument
    )


def writes_into(node: Node, tensor: Node) -> bool:
    """Whether the node may write into this tensor: it writes, and the tensor is the argument it writes to."""
    if tensor not in node.all_input_nodes or not writes(node):
        return False
    if node.op == "call_method" or isinstance(node.target, torch._ops.OpOverload) or node.target in _IN_PLACE_OPERATORS:
        return bool(node.args) and node.args[0] is tensor
    return True


def writes_to_its_own(node: Node) -> bool:
    """Whether all that the node writes into is a tensor that the graph itself made anew, by an ATen op (``empty_like``
    and the noise of a dropout, say): nothing else can be that memory."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], Node):
        return False
    origin = node.args[0]
    while isinstance(origin.target, torch._ops.OpOverload) and _hands_on(origin.target):
        if not origin.args or not isinstance(origin.args[0], Node):
            return False
        origin = origin.args[0]
    return isinstance(origin.target, torch._ops.OpOverload) and "empty" in origin.target._schema.name


def _hands_on(target: torch._ops.OpOverload) -> bool:
    """Whether the result is, or is a view of, the first argument."""
    return any(returned.alias_info is not None for returned in target._schema.returns)


def is_live(node: Node) -> bool:
    """Whether the program would notice if the node were gone. (``make_fx`` leaves dead detach and clone nodes.)"""
    if node.op == "output" or node.is_impure() or writes(node) or draws(node):
        return True
    return any(is_live(user) for user in node.users)


def changes_mode(node: Node) -> bool:
    """Whether the node enters or leaves an autocast, grad-mode or functorch region."""
    return node.op == "call_function" and (_name(node) in _MODE_NAMES or changes_nesting(node) != 0)


def changes_nesting(node: Node) -> int:
    """+1 where a functorch transform (vmap, grad, jvp) begins, -1 where it ends."""
    if node.op != "call_function":
        return 0
    name = _name(node)
    if name.endswith("_increment_nesting"):
        return 1
    return -1 if name.endswith("_decrement_nesting") else 0
