"""Interval analysis is sound: no fp16 or bf16 value leaves the interval that its op promises."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gnfuse.chain import OPS, GroupNorm, Op, op
from gnfuse.kernels import reference
from gnfuse.passes import intervals
from gnfuse.passes.intervals import EVERYTHING, TRANSFER, Interval

PARAMS: dict[str, list[tuple[float, ...]]] = {
    "constant": [(0.3,), (-7.0,)],
    "minimum": [(0.3,), (-2.0,), (math.nan,), (math.inf,)],
    "maximum": [(0.3,), (-2.0,), (math.nan,)],
    "clamp": [(0.0, 1.0), (-0.3, 0.7), (1.0, 0.0), (-math.inf, 3.0), (math.nan, 1.0)],
    "hardtanh": [(-1.0, 1.0), (0.0, 6.0)],
    "threshold": [(0.3, -0.7), (1.0, 20.0), (0.5, 0.5), (-1.0, 0.0)],
    "leaky_relu": [(0.01,), (0.0,), (2.0,), (-0.5,)],
    "add": [(0.3,), (-1000.0,), (0.0,), (math.inf,)],
    "rsub": [(0.3,), (1000.0,)],
    "mul": [(0.3,), (-1000.0,), (1.0,), (0.0,), (1e-4,), (math.nan,)],
    "div": [(0.3,), (-1000.0,), (1.0,), (0.0,)],
    "rdiv": [(1.0,), (0.0,), (-2.0,)],
    "elu": [(1.0,), (2.0,), (-1.0,)],
    "softplus": [(1.0, 20.0), (0.5, 3.0)],
}
INPUTS = [
    EVERYTHING,
    Interval(0.0, math.inf),
    Interval(-math.inf, 0.0),
    Interval(-0.3, 0.7),
    Interval(0.3, 0.7),
    Interval(-5.0, -0.001),
    Interval(0.0, 0.0),
    Interval(2.0, 300.0),
    Interval(1e-7, 2e-6),
]
CASES = [
    op(name, *params)
    for name in OPS
    if name != "to"
    for params in PARAMS.get(name, [()])
] + [Op("to", (dtype,)) for dtype in ("float16", "bfloat16", "float32")]  # fmt: skip


def values_of(x: Interval, dtype: torch.dtype) -> torch.Tensor:
    """Every value of the dtype in the interval, whose ends are rounded to the dtype first."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    lo, hi = (torch.tensor(end, dtype=torch.float64).to(dtype) for end in (x.lo, x.hi))
    return every[(every >= lo) & (every <= hi)]


def test_every_op_has_a_transfer() -> None:
    assert set(TRANSFER) == set(OPS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("step", CASES, ids=str)
def test_no_value_leaves_the_interval(step: Op, dtype: str) -> None:
    for start, known in itertools.product(INPUTS, (dtype, None)):
        x = values_of(start, getattr(torch, dtype))
        if step.name == "rdiv" and not x.numel():
            continue
        y = reference.apply_step(x, step, training=True)
        promised = intervals.after(start, step, known)
        born = y.isnan() & ~x.isnan()
        assert promised.makes_nan or not born.any(), f"{start} {known}: NaN from {x[born][:3]}"
        lo, hi = (torch.tensor(end, dtype=torch.float64).to(y.dtype) for end in (promised.lo, promised.hi))
        outside = ~y.isnan() & ~((y >= lo) & (y <= hi))
        assert not outside.any(), f"{start} {known}: {x[outside][:3]} -> {y[outside][:3]}, not in {promised}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_no_value_leaves_the_interval_of_a_dropout(p: float, dtype: torch.dtype) -> None:
    for start in INPUTS:
        x = values_of(start, dtype)
        for y in (x * 0, x * torch.ones_like(x).div_(1 - p)):
            promised = intervals.after_dropout(start, p, None)
            assert promised.makes_nan or not y.isnan().any()
            lo, hi = (torch.tensor(end, dtype=torch.float64).to(dtype) for end in (promised.lo, promised.hi))
            assert ((y.isnan()) | ((y >= lo) & (y <= hi))).all()


ADVERSARIES = {
    "constant": lambda m: torch.full((m,), 65504.0),
    "one outlier": lambda m: torch.full((m,), 65472.0).index_fill(0, torch.tensor([m // 2]), 65504.0),
    "two sides": lambda m: torch.where(torch.arange(m) % 2 == 0, 65504.0, -65504.0),
    "outlier from zero": lambda m: torch.zeros(m).index_fill(0, torch.tensor([0]), 65504.0),
    "tiny outlier": lambda m: torch.zeros(m).index_fill(0, torch.tensor([m - 1]), 6e-8),
    "noise near the top": lambda m: 65000 + 32 * torch.randint(0, 15, (m,)).float(),
}


@pytest.mark.parametrize("m", [1, 2, 7, 1024, 40960])
@pytest.mark.parametrize("kind", list(ADVERSARIES))
def test_an_fp16_group_norm_stays_in_its_range(kind: str, m: int) -> None:
    torch.manual_seed(0)
    norm = GroupNorm(1, 1e-5, weight=False, bias=False, dtype="float16")
    promised = intervals.norm_range(norm, m)
    assert promised.finite
    x = ADVERSARIES[kind](m).half().reshape(1, 1, m)
    y = torch.group_norm(x, 1, eps=1e-5)
    assert (y.abs() <= promised.hi).all()


def test_a_group_norm_whose_eps_rounds_to_zero_has_no_range() -> None:
    assert intervals.norm_range(GroupNorm(1, 1e-8, False, False, "float16"), 64) == EVERYTHING
