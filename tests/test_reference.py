"""gnfuse/kernels/reference.py: the tables of ops agree, and its steps mean what their equations say."""

from __future__ import annotations

import math

import pytest
import torch

from gnfuse.chain import OPS, Dropout, op, parse_steps
from gnfuse.kernels import load, reference


def test_reference_has_exactly_the_ops_of_the_ir() -> None:
    assert set(reference.OPS) == set(OPS)


def test_cpp_parser_knows_exactly_the_ops_of_the_ir_and_dropout() -> None:
    load()
    assert set(torch.ops.gnfuse._op_names()) == {*OPS, "dropout"}


@pytest.mark.parametrize(
    ("text", "x", "expected"),
    [
        ("minimum(0.5)", 2.0, 0.5),
        ("maximum(0.5)", -2.0, 0.5),
        ("clamp(0.5, 0.1)", 0.3, 0.1),  # min > max gives max
        ("hardtanh(-1.0, 1.0)", 7.0, 1.0),
        ("threshold(0.1, 20.0)", 0.1, 20.0),
        ("leaky_relu(0.1)", -2.0, -0.2),
        ("rsub(1.0)", 3.0, -2.0),
        ("rdiv(1.0)", 4.0, 0.25),
        ("softplus(1.0, 20.0)", 30.0, 30.0),
        ("elu(2.0)", -1.0, 2.0 * math.expm1(-1.0)),
        ("constant(0.25)", 9.0, 0.25),
    ],
)
def test_step_means_its_equation(text: str, x: float, expected: float) -> None:
    (step,) = parse_steps(text)
    result = reference.apply_step(torch.tensor([x], dtype=torch.float64), step, False)
    assert result.item() == pytest.approx(expected, abs=1e-15)


def test_constant_keeps_nan() -> None:
    result = reference.apply_step(torch.tensor([math.nan, 1.0]), op("constant", 2.0), False)
    assert result[0].isnan() and result[1] == 2.0


def test_dropout_draws_only_in_training() -> None:
    x = torch.ones(64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert torch.equal(reference.apply_step(x, Dropout(0.5), False), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert (reference.apply_step(x, Dropout(0.5), True) == 0).any()
