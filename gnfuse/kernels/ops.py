"""The ops ``torch.ops.gnfuse.*``: loading, fake kernels, autograd. Schemas and CPU kernels are in ``csrc/``.

``chain`` is what the forward computes and ``source`` the function whose gradient is taken, both as texts of
`gnfuse.chain.format_steps`; what each step means is `gnfuse.kernels.reference`. There is no double backward:
differentiating twice raises NotImplementedError. Under vmap the pointwise op runs sample by sample (torch's fallback,
with its warning) and the random one raises NotImplementedError, because the fallback would ignore vmap's `randomness`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from gnfuse.chain import Op, parse_steps
from gnfuse.kernels import probes
from gnfuse.kernels.build import KernelsUnavailable, cache_key, ensure_built, find_library, why_not_buildable

_lock = threading.Lock()
_state: dict[str, str | bool] = {}  # "loaded": True, or "failed": the reason


def load() -> None:
    """Registers ``torch.ops.gnfuse.*``; builds the library if no cache holds it. Later calls do nothing.

    Raises:
        KernelsUnavailable: no library and no way to build one, or it does not load. The first reason is kept.
    """
    if "loaded" in _state:
        return
    with _lock:
        if "loaded" in _state:
            return
        if "failed" in _state:
            raise KernelsUnavailable(str(_state["failed"]))
        try:
            _register(str(ensure_built()))
        except (KernelsUnavailable, OSError, RuntimeError) as error:
            _state["failed"] = str(error)
            raise KernelsUnavailable(str(error)) from error
        _state["loaded"] = True


def available() -> str | None:
    """None when `load` has worked or should work, else the reason why not. Builds nothing and never raises."""
    try:
        if "loaded" in _state:
            return None
        if "failed" in _state:
            return str(_state["failed"])
        return None if find_library(cache_key()) is not None else why_not_buildable()
    except Exception as error:  # a broken environment is a reason too
        return f"{type(error).__name__}: {error}"


def statistics_match_eager() -> bool:
    """Whether our GroupNorm of contiguous inputs equals this torch's in every bit (a probe, run once)."""
    load()
    with _disable_current_modes():
        return bool(torch.ops.gnfuse._statistics_match_eager())


def mask_matches_eager() -> bool:
    """Whether our dropout masks and generator states equal bernoulli_'s (a probe, run once); else ATen draws them."""
    load()
    with _disable_current_modes():
        return bool(torch.ops.gnfuse._mask_matches_eager())


def _register(library: str) -> None:
    torch.ops.load_library(library)
    torch.ops.gnfuse._set_clamp_boundary_gradient(probes.clamp_boundary_gradient())
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"gnfuse::{name}", fake)
    torch.library.register_autograd("gnfuse::group_norm_pointwise", _pointwise_gradient, setup_context=_save_pointwise)
    torch.library.register_autograd("gnfuse::group_norm_dropout", _dropout_gradient, setup_context=_save_dropout)
    for name in ("group_norm_pointwise_backward", "group_norm_dropout_backward"):
        torch.library.register_autograd(f"gnfuse::{name}", _no_double_backward)
    torch.library.register_vmap("gnfuse::group_norm_dropout", _no_vmap)


# ---- fake kernels: shapes, strides and dtypes, for symbolic sizes too


@functools.cache
def _chain_facts(chain: str) -> tuple[bool, torch.dtype | None]:
    """Whether the chain starts with a constant, and the dtype that its last ``to`` gives."""
    steps = parse_steps(chain)
    dtype: torch.dtype | None = None
    for step in steps:
        if isinstance(step, Op) and step.name == "to":
            dtype = getattr(torch, str(step.params[0]))
    first = steps[0] if steps else None
    return isinstance(first, Op) and first.name == "constant", dtype


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, check_batch: bool) -> None:
    torch._check(x.dim() >= 2, lambda: f"Expected at least 2 dimensions for input tensor but received {x.dim()}")
    torch._check(num_groups > 0, lambda: f"Expected num groups to be greater than 0, got {num_groups}")
    torch._check(
        x.shape[1] % num_groups == 0,
        lambda: (
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}"
        ),
    )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            torch._check(
                parameter.dim() == 1 and parameter.shape[0] == x.shape[1],
                lambda name=name, parameter=parameter: (
                    f"Expected {name} to be a vector of size equal to the number of channels in input, but got "
                    f"{name} of shape {list(parameter.shape)} and input of shape {list(x.shape)}"
                ),
            )
    if check_batch:
        values = x.shape[0] * x.shape[1] // num_groups
        for size in x.shape[2:]:
            values = values * size
        if statically_known_true(values == 1):
            sizes = [x.shape[0] * x.shape[1] // num_groups, num_groups, *x.shape[2:]]
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {sizes}")


def _output_like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Empty, with the strides of eager's chain: channels_last if x is, contiguous where a size of 1 leaves it open."""
    suggested = torch._prims_common.suggest_memory_format(x)
    dense = x.contiguous(memory_format=suggested)
    memory_format = torch.contiguous_format if dense.is_contiguous() else suggested
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format)


def _statistics(x: Tensor, num_groups: int, constant: bool) -> Tensor:
    shape = (0,) if constant else (x.shape[0], num_groups)
    return x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _pointwise_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    chain: str,
    source: str,
    check_batch: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, bias, num_groups, check_batch)
    constant, dtype = _chain_facts(chain)
    return _output_like(x, dtype), _statistics(x, num_groups, constant), _statistics(x, num_groups, constant)


def _dropout_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    chain: str,
    source: str,
    training: bool,
    site: int,
    check_batch: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, mean, rstd = _pointwise_fake(x, weight, bias, num_groups, eps, chain, source, check_batch)
    draws = training and not statically_known_true(x.numel() == 0)
    return out, mean, rstd, x.new_empty((_rng_state_size() if draws else 0,), dtype=torch.uint8, device="cpu")


@functools.cache
def _rng_state_size() -> int:
    return torch.Generator().get_state().numel()


def _gradient_fakes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    def channels(wanted: bool, parameter: Tensor | None) -> Tensor:
        like = x if parameter is None else parameter
        return like.new_empty((x.shape[1] if wanted else 0,))

    dx = _output_like(x, None) if output_mask[0] else x.new_empty((0,))
    return dx, channels(output_mask[1], weight), channels(output_mask[2], bias)


def _pointwise_backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    eps: float,
    chain: str,
    source: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradient_fakes(x, weight, bias, output_mask)


def _dropout_backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rng_state: Tensor,
    num_groups: int,
    eps: float,
    chain: str,
    source: str,
    training: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradient_fakes(x, weight, bias, output_mask)


_FAKES: dict[str, Callable[..., Any]] = {
    "group_norm_pointwise": _pointwise_fake,
    "group_norm_dropout": _dropout_fake,
    "group_norm_pointwise_backward": _pointwise_backward_fake,
    "group_norm_dropout_backward": _dropout_backward_fake,
}


# ---- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.num_groups, ctx.eps, ctx.chain, ctx.source = inputs[:7]
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _save_pointwise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output)


def _save_dropout(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output)
    ctx.training = inputs[7]


def _wanted(ctx: Any) -> list[bool]:
    return [bool(needed) for needed in ctx.needs_input_grad[:3]]


def _kept(ctx: Any, gradients: tuple[Tensor, ...], extra: int) -> tuple[Tensor | None, ...]:
    """The gradients asked for, None for the others and for the `extra` arguments that are not tensors."""
    wanted = _wanted(ctx)
    return (*(g if want else None for g, want in zip(gradients, wanted, strict=True)), *[None] * extra)


def _pointwise_gradient(ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    x, weight, bias, mean, rstd = ctx.saved_tensors
    gradients = torch.ops.gnfuse.group_norm_pointwise_backward(
        grad, x, weight, bias, mean, rstd, ctx.num_groups, ctx.eps, ctx.chain, ctx.source, _wanted(ctx)
    )
    return _kept(ctx, gradients, 5)


def _dropout_gradient(ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    x, weight, bias, mean, rstd, rng_state = ctx.saved_tensors
    gradients = torch.ops.gnfuse.group_norm_dropout_backward(
        grad,
        x,
        weight,
        bias,
        mean,
        rstd,
        rng_state,
        ctx.num_groups,
        ctx.eps,
        ctx.chain,
        ctx.source,
        ctx.training,
        _wanted(ctx),
    )
    return _kept(ctx, gradients, 7)


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "gnfuse's fused GroupNorm has no double backward: compile without gnfuse, or leave this GroupNorm alone"
    )


def _no_vmap(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("gnfuse's fused GroupNorm with dropout does not work under vmap: compile without gnfuse")
