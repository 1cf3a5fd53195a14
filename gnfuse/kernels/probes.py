"""What this torch does where releases or builds differ: small experiments, each run at first use and kept.

Never a comparison of version numbers. ``gnfuse doctor`` lists `PROBES` with their outcomes; the first line of each
docstring is its description.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes


def _gradient_at(value: float, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> float:
    # a probe may first run inside no_grad, inference mode, or a compiler's fake tensor mode
    with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
        x = torch.tensor([value], dtype=dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
    return float(gradient)


@functools.cache
def clamp_boundary_gradient() -> float:
    """Gradient of clamp exactly at a bound (1 to torch 2.13, 0 in a later release)."""
    return _gradient_at(1.0, lambda x: x.clamp(0.0, 1.0), torch.float32)


@functools.cache
def minimum_tie_gradient() -> float:
    """Gradient of minimum and maximum where both sides are equal (half)."""
    return _gradient_at(0.0, lambda x: torch.minimum(x, torch.zeros(())), torch.float32)


@functools.cache
def relu_boundary_gradient() -> float:
    """Gradient of relu, relu6, hardtanh and threshold exactly at the bound (0)."""
    return _gradient_at(0.0, torch.relu, torch.float32)


@functools.cache
def nan_bound_makes_nan() -> bool:
    """Whether clamp with a NaN bound is NaN everywhere, in vector lanes and scalar tails (not in every release)."""
    with _disable_current_modes():
        values = [torch.zeros(67, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
        nan = float("nan")
        bounds = ((nan, 1.0), (0.0, nan), (nan, None), (None, nan))
        return all(bool(torch.clamp(x, lo, hi).isnan().all()) for x in values for lo, hi in bounds)


@functools.cache
def statistics_match_eager() -> bool:
    """Whether gnfuse's GroupNorm of a contiguous input equals this torch's in every bit."""
    from gnfuse.kernels import ops

    return ops.statistics_match_eager()


@functools.cache
def mask_matches_eager() -> bool:
    """Whether gnfuse draws eager's dropout masks itself (else ATen draws them, slower)."""
    from gnfuse.kernels import ops

    return ops.mask_matches_eager()


PROBES: dict[str, Callable[[], float | bool]] = {
    "clamp_boundary_gradient": clamp_boundary_gradient,
    "minimum_tie_gradient": minimum_tie_gradient,
    "relu_boundary_gradient": relu_boundary_gradient,
    "nan_bound_makes_nan": nan_bound_makes_nan,
    "statistics_match_eager": statistics_match_eager,
    "mask_matches_eager": mask_matches_eager,
}
