"""The dialect of ``torch.fx.symbolic_trace``: calls of ``torch.nn`` modules, read from the module's attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize

from gnfuse.chain import op
from gnfuse.passes.read import (
    DropoutRead,
    IdentityRead,
    ModuleFlag,
    ModuleTensor,
    NormRead,
    Reading,
    Refused,
    StepRead,
    Unreadable,
    module_of,
    target_name,
)
from gnfuse.passes.read_torch import ALPHA_DROPOUT, CHANNEL_DROPOUT

ModuleReader = Callable[[Any, Node, str], Reading]


def _step(name: str, *attributes: str) -> ModuleReader:
    def build(module: Any, value: Node, path: str) -> Reading:
        numbers = [getattr(module, a) for a in attributes]
        if not all(isinstance(n, bool | int | float) for n in numbers):
            raise Unreadable(f"{type(module).__name__} ({path}) has a parameter that is not a number")
        return StepRead(value, (op(name, *numbers),), bool(getattr(module, "inplace", False)))

    return build


def _gelu(module: Any, value: Node, path: str) -> Reading:
    return StepRead(value, (op("gelu_tanh" if module.approximate == "tanh" else "gelu"),))


def _dropout(module: Any, value: Node, path: str) -> Reading:
    return DropoutRead(value, float(module.p), ModuleFlag(path), bool(module.inplace))


def _group_norm(module: Any, value: Node, path: str) -> Reading:
    weight = None if module.weight is None else ModuleTensor(f"{path}.weight")
    bias = None if module.bias is None else ModuleTensor(f"{path}.bias")
    return NormRead(value, module.num_groups, weight, bias, float(module.eps), checks_batch=True)


def _refuse(reason: str) -> ModuleReader:
    return lambda module, value, path: Refused(reason)


# Exact types: a subclass may compute something else
MODULES: dict[type[nn.Module], ModuleReader] = {
    nn.GroupNorm: _group_norm,
    nn.Identity: lambda module, value, path: IdentityRead(value),
    nn.ReLU: _step("relu"),
    nn.ReLU6: _step("hardtanh", "min_val", "max_val"),
    nn.Hardtanh: _step("hardtanh", "min_val", "max_val"),
    nn.Threshold: _step("threshold", "threshold", "value"),
    nn.LeakyReLU: _step("leaky_relu", "negative_slope"),
    nn.SiLU: _step("silu"),
    nn.GELU: _gelu,
    nn.Sigmoid: _step("sigmoid"),
    nn.Tanh: _step("tanh"),
    nn.Hardswish: _step("hardswish"),
    nn.Hardsigmoid: _step("hardsigmoid"),
    nn.ELU: _step("elu", "alpha"),
    nn.Softplus: _step("softplus", "beta", "threshold"),
    nn.Mish: _step("mish"),
    nn.Dropout: _dropout,
    nn.Dropout1d: _refuse(CHANNEL_DROPOUT),
    nn.Dropout2d: _refuse(CHANNEL_DROPOUT),
    nn.Dropout3d: _refuse(CHANNEL_DROPOUT),
    nn.AlphaDropout: _refuse(ALPHA_DROPOUT),
    nn.FeatureAlphaDropout: _refuse(ALPHA_DROPOUT),
    nn.PReLU: _refuse("prelu's slope is a learned tensor"),
    nn.GLU: _refuse("glu halves the channels: not a pointwise op"),
    nn.RReLU: _refuse("rrelu draws its own random slopes: not covered"),
}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def read_module(node: Node, gm: GraphModule) -> Reading:
    """What a ``call_module`` node means. A module whose call does more than its class says is refused."""
    module = module_of(node)
    if module is not None and parametrize.is_parametrized(module):
        return Refused(f"{target_name(node)} has parametrized weights, computed at each call")
    reader = MODULES.get(type(module)) if module is not None else None
    if module is None or reader is None:
        return Refused(f"{target_name(node)} is not a pointwise op that gnfuse knows")
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return Refused(f"{target_name(node)} has hooks, which must still run")
    if "forward" in vars(module):
        return Refused(f"{target_name(node)} has a forward of its own")
    if len(node.args) + len(node.kwargs) != 1:
        return Refused(f"{target_name(node)} is called in a form that gnfuse does not know")
    value = next(iter((*node.args, *node.kwargs.values())))
    if not isinstance(value, Node):
        return Refused(f"{target_name(node)} of something that is not a tensor of this graph")
    return reader(module, value, str(node.target))
