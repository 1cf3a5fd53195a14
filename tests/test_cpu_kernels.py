"""The C++ kernels on the CPU: values, gradients, masks and generator states against eager torch and float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from gnfuse.chain import parse_steps
from gnfuse.kernels import load, ops, reference

load()
G = torch.ops.gnfuse
EPS = 1e-5
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIXTEEN_BIT = [torch.bfloat16, torch.float16]


def to_layout(x: Tensor, channels_last: bool) -> Tensor:
    if channels_last and x.dim() in (4, 5):
        return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x


def fused(x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, source: str, chain: str, train: bool) -> Tensor:
    if "dropout" in source:
        return G.group_norm_dropout(x, w, b, groups, EPS, chain, source, train, 0, False)[0]
    return G.group_norm_pointwise(x, w, b, groups, EPS, chain, source, False)[0]


def run_eager(x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, source: str, train: bool) -> Tensor:
    return reference.group_norm_chain(x, w, b, groups, EPS, parse_steps(source), train)


def fresh(*tensors: Tensor | None) -> list[Tensor | None]:
    return [
        None if t is None else t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors
    ]


def gradients(out: Tensor, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, [t for t in inputs if t is not None], grad))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN for NaN, and equal layouts; the sign of a zero is not compared."""
    alike = (a == b) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and a.stride() == b.stride() and bool(alike.all())


def error(a: Tensor, exact: Tensor) -> float:
    return (a.double() - exact).abs().max().item() if a.numel() else 0.0


# ---- GroupNorm itself


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_group_norm_equals_eager_in_every_bit(dtype: torch.dtype) -> None:
    assert ops.statistics_match_eager()
    shapes = [(2, 8, 5, 7), (2, 8, 16), (1, 2, 40000), (2, 320, 16, 16), (3, 6, 1, 1), (5, 12), (1, 4, 131072 + 5)]
    for shape, scale in itertools.product(shapes, (1.0, 100.0)):
        x = (torch.randn(shape) * scale + 3).to(dtype)
        for w, b in itertools.product((None, torch.randn(shape[1]).to(dtype)), repeat=2):
            ours = G.group_norm_pointwise(x, w, b, 2, EPS, "", "", False)
            expected = torch.native_group_norm(x, w, b, shape[0], shape[1], x[0, 0].numel(), 2, EPS)
            assert torch.equal(ours[0], expected[0])
            assert torch.equal(ours[1].to(expected[1].dtype), expected[1])
            assert torch.equal(ours[2].to(expected[2].dtype), expected[2])


@pytest.mark.parametrize("threads", [1, 2])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    x, w, b = torch.randn(2, 8, 150, 150), torch.randn(8), torch.randn(8)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            for layout in (False, True):
                torch.manual_seed(0)
                inputs = fresh(to_layout(x, layout), w, b)
                out = fused(*inputs, 2, "silu(); dropout(0.3)", "silu(); dropout(0.3)", True)
                results.append([out, *gradients(out, inputs, torch.ones_like(out))])
    finally:
        torch.set_num_threads(before)
    for i in (0, 1):
        assert all(torch.equal(a, c) for a, c in zip(results[i], results[i + 2], strict=True))


SHAPES = [
    ((2, 8, 5, 7), 4),
    ((3, 6, 4, 5, 3), 2),
    ((2, 320, 9, 9), 32),
    ((5, 12), 3),
    ((2, 3, 1, 1), 1),
    ((1, 8, 70000), 8),
    ((1, 6, 300, 301), 2),
    ((4, 30, 1), 30),
    ((2, 6, 2, 2, 3, 2), 3),
    ((2, 1, 33, 1), 1),
    ((2, 1030, 3, 3), 5),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_as_close_to_float64_as_eagers(dtype: torch.dtype, channels_last: bool) -> None:
    resolution = torch.finfo(dtype).eps
    for (shape, groups), source in itertools.product(SHAPES, ("silu()", "gelu(); mul(0.5); dropout(0.2); elu(0.7)")):
        torch.manual_seed(len(shape))
        x = to_layout((torch.randn(shape) * 2 + 0.3).to(dtype), channels_last)
        w, b = torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)
        grad = torch.randn(shape).to(dtype)
        results = []
        for kind in ("fused", "eager", "exact"):
            inputs = fresh(*(t.double() if kind == "exact" else t for t in (x, w, b)))
            torch.manual_seed(9)
            out = (
                fused(*inputs, groups, source, source, True)
                if kind == "fused"
                else run_eager(*inputs, groups, source, True)
            )
            results.append([out, *gradients(out, inputs, grad.to(out.dtype))])
        for name, ours, eagers, exact in zip(("out", "dx", "dw", "db"), *results, strict=True):
            # sums of many terms of size 1 may cancel, and float64 has only itself to be compared with
            room = resolution * (5000 if dtype == torch.float64 else 4) * (exact.abs().max().item() + 1)
            assert error(ours, exact) <= 1.5 * error(eagers, exact) + room, (name, shape, source)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_float32_parameters_with_a_16_bit_input(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(2, 8, 6, 6).to(dtype), torch.randn(8), torch.randn(8)
    inputs = fresh(x, w, b)
    out = fused(*inputs, 4, "silu()", "silu()", False)
    grads = gradients(out, inputs, torch.ones_like(out))
    assert [t.dtype for t in (out, *grads)] == [dtype, dtype, torch.float32, torch.float32]
    expected = run_eager(x.double(), w.double(), b.double(), 4, "silu()", False)
    assert error(out, expected) <= 4 * torch.finfo(dtype).eps * expected.abs().max().item()


@pytest.mark.parametrize("x_last", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "channels_last", "expanded", "transposed"])
def test_every_layout_of_the_gradient(kind: str, x_last: bool) -> None:
    x, w, b = torch.randn(2, 8, 6, 5), torch.randn(8), torch.randn(8)
    grad = {
        "contiguous": torch.randn(2, 8, 6, 5),
        "channels_last": torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(()).expand(2, 8, 6, 5),
        "transposed": torch.randn(2, 8, 5, 6).transpose(2, 3),
    }[kind]
    inputs = fresh(to_layout(x, x_last), w, b)
    ours = gradients(fused(*inputs, 4, "silu()", "silu()", False), inputs, grad)
    exact = fresh(x.double(), w.double(), b.double())
    expected = gradients(run_eager(*exact, 4, "silu()", False), exact, grad.double())
    for a, e in zip(ours, expected, strict=True):
        assert error(a, e) < 2e-5 * (1 + e.abs().max().item())


def test_large_means_do_not_cancel_in_channels_last() -> None:
    for mean in (1e3, 1e5):
        x = to_layout(mean + torch.randn(2, 8, 40, 40), True)
        exact = run_eager(x.double(), None, None, 2, "", False)
        out = fused(x, None, None, 2, "", "", False)
        assert error(out, exact) < 20 * torch.finfo(torch.float32).eps * mean


def test_empty_inputs() -> None:
    for shape in ((0, 4, 3, 3), (2, 4, 0, 3)):
        inputs = fresh(torch.randn(shape), torch.randn(4), torch.randn(4))
        state = torch.get_rng_state()
        out = fused(*inputs, 2, "silu(); dropout(0.5)", "silu(); dropout(0.5)", True)
        assert torch.equal(torch.get_rng_state(), state) and out.shape == shape
        dx, dw, db = gradients(out, inputs, torch.ones_like(out))
        assert dx.shape == shape and not dw.any() and not db.any()


def test_nan_and_infinity_reach_their_whole_group_and_no_other() -> None:
    for bad, layout in itertools.product((math.nan, math.inf), (False, True)):
        x = torch.randn(2, 8, 5, 7)
        x[0, 1, 2, 3] = bad
        inputs, expected = fresh(to_layout(x, layout), torch.randn(8), torch.randn(8)), []
        out = fused(*inputs, 4, "relu()", "relu()", False)
        expected = run_eager(*inputs, 4, "relu()", False)
        assert torch.equal(out.isnan(), expected.isnan())
        grads = zip(
            gradients(out, inputs, torch.ones_like(out)), gradients(expected, inputs, torch.ones_like(out)), strict=True
        )
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in grads)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("value", [1e19, 1e20, 1e30, 3e38])
def test_huge_finite_values_give_nan_where_eager_does(value: float, channels_last: bool) -> None:
    x = torch.randn(2, 8, 5, 7)
    x[0, 0, 0, 0] = value
    x[1] *= value / 10
    x = to_layout(x, channels_last)
    w, b = torch.randn(8), torch.randn(8)
    out, expected = fused(x, w, b, 2, "", "", False), run_eager(x, w, b, 2, "", False)
    assert torch.equal(out.isnan(), expected.isnan())


# ---- the interpreter: every op on every 16-bit value, with gradients

OPS_TEXTS = [
    "minimum(0.3)",
    "minimum(0.0)",
    "minimum(nan)",
    "maximum(0.3)",
    "clamp(-0.3,0.7)",
    "clamp(0.0,inf)",
    "clamp(-inf,0.7)",
    "clamp(0.5,0.1)",
    "clamp(nan,1.0)",
    "clamp(0.5,0.5)",
    "hardtanh(-0.3,0.7)",
    "hardtanh(0.0,6.0)",
    "hardtanh(-0.1,0.1)",
    "relu()",
    "threshold(0.3,-1.7)",
    "threshold(0.1,0.3)",
    "leaky_relu(0.01)",
    "leaky_relu(0.3)",
    "abs()",
    "neg()",
    "add(0.3)",
    "rsub(0.3)",
    "mul(0.3)",
    "div(0.3)",
    "rdiv(0.3)",
    "square()",
    "silu()",
    "gelu()",
    "gelu_tanh()",
    "sigmoid()",
    "tanh()",
    "hardswish()",
    "hardsigmoid()",
    "elu(1.0)",
    "elu(0.3)",
    "softplus(1.0,20.0)",
    "softplus(0.7,3.0)",
    "mish()",
    "to(float16)",
    "to(bfloat16)",
    "to(float32)",
]
# gelu: eager's contiguous kernel is oneDNN's, which gives NaN at +inf and flushes subnormals; ATen's does neither
NOT_EXACT = {"gelu()"}
# derivatives that eager takes in several roundings, or from the rounded result
DERIVATIVE_NOT_EXACT = {"rdiv(0.3)", "square()", "gelu()", "gelu_tanh()", "sigmoid()", "tanh()", "mish()"}


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("text", OPS_TEXTS)
def test_op_on_every_16_bit_value(text: str, dtype: torch.dtype) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    (step,) = parse_steps(text)
    x = values.clone().requires_grad_()
    expected = reference.apply_step(x, step, False)
    grad = torch.randn(65536).to(expected.dtype)
    (dx,) = torch.autograd.grad(expected, x, grad)
    ours = G._apply_chain(values, text, True)
    ours_dx = G._apply_chain_backward(grad, values, text, True)
    normal = values.isfinite() & (values.abs() >= torch.finfo(dtype).tiny * 4)
    if text in NOT_EXACT:
        small = normal & (values.abs() < 100)
        torch.testing.assert_close(ours[small], expected.detach()[small])
    else:
        assert same(ours, expected.detach())
    if text in DERIVATIVE_NOT_EXACT:
        moderate = normal & (values.abs() < 100) & (values.abs() > 0.01)
        torch.testing.assert_close(ours_dx[moderate], dx[moderate], atol=2e-2, rtol=2e-2)
    else:
        exact = ours_dx.float()[~dx.isnan()], dx.float()[~dx.isnan()]
        assert torch.equal(ours_dx.isnan(), dx.isnan())
        torch.testing.assert_close(*exact, atol=1e-6, rtol=2.1 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("text", OPS_TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_op_on_wide_dtypes(text: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and text == "to(float32)":
        text = "mul(1.5); to(float32)"
    x = torch.cat([torch.randn(3000) * 3, torch.tensor([0.0, 0.3, 0.7, -0.3, 0.1, -3, 3, 20, 0.5, -50, 90])]).to(dtype)
    leaf = x.clone().requires_grad_()
    expected = leaf
    for step in parse_steps(text):
        expected = reference.apply_step(expected, step, False)
    grad = torch.randn(x.shape).to(expected.dtype)
    (dx,) = torch.autograd.grad(expected, leaf, grad)
    # gelu: oneDNN's error against float64 is 1.2e-6 here, ours 4.7e-7
    torch.testing.assert_close(G._apply_chain(x, text, False), expected.detach(), rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(G._apply_chain_backward(grad, x, text, False), dx, rtol=1e-5, atol=2e-6, equal_nan=True)


# ---- dropout: eager's mask, eager's generator


@pytest.mark.parametrize("before", [0, 1, 2, 311, 623, 624])
def test_mask_and_generator_state_are_eagers(before: int) -> None:
    assert ops.mask_matches_eager()
    for size, keep in itertools.product((1, 2, 63, 64, 65, 311, 312, 313, 1000, 65536, 200003), (0.1, 0.5, 0.8)):
        torch.manual_seed(size)
        torch.randint(0, 10, (before,), dtype=torch.int32)  # moves the twister by `before` words
        state = torch.get_rng_state()
        expected = torch.empty(size).bernoulli_(keep).bool()
        expected_state = torch.get_rng_state()
        torch.set_rng_state(state)
        bits = G._draw_mask(size, keep)
        mask = ((bits[:, None] >> torch.arange(8)) & 1).flatten()[:size].bool()
        assert torch.equal(mask, expected)
        assert torch.equal(torch.get_rng_state(), expected_state)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_values_are_eagers(dtype: torch.dtype, channels_last: bool) -> None:
    for shape, p in itertools.product(((2, 6, 5, 7), (1, 4, 300, 301), (3, 5, 1, 3)), (0.1, 0.3, 0.5)):
        x = to_layout(torch.randn(shape).to(dtype), channels_last)
        source = f"clamp(0.5, 0.5); dropout({p}); abs()"  # exact whatever the statistics
        results = []
        for run in (fused, run_eager):
            torch.manual_seed(5)
            args = (source, source) if run is fused else (source,)
            results.append((run(x, None, None, 1, *args, True), torch.get_rng_state()))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_eval_neither_drops_nor_draws() -> None:
    x = torch.randn(2, 4, 5, 5)
    state = torch.get_rng_state()
    out = fused(x, None, None, 2, "dropout(0.5)", "dropout(0.5)", False)
    assert torch.equal(out, torch.group_norm(x, 2)) and torch.equal(torch.get_rng_state(), state)


def test_dropped_nan_and_infinity_are_nan() -> None:
    x = torch.randn(2, 4, 8, 8)
    x[0, 0, 0, 0] = math.nan
    b = torch.tensor([0.0, 0.0, math.inf, 0.0])
    torch.manual_seed(1)
    ours = fused(x, None, b, 2, "dropout(0.5)", "dropout(0.5)", True)
    torch.manual_seed(1)
    expected = run_eager(x, None, b, 2, "dropout(0.5)", True)
    assert torch.equal(ours.isnan(), expected.isnan()) and torch.equal(ours.isinf(), expected.isinf())


# ---- the constant fold: equal to eager in every bit

FOLDS = [
    ("minimum(0.0); clamp(0.0, 1.0); dropout(0.2)", "constant(0.0); dropout(0.2)"),
    ("minimum(0.5); clamp(0.5, 1.0); dropout(0.2)", "constant(0.5); dropout(0.2)"),
    ("minimum(0.3); clamp(0.3, 1.0); silu(); dropout(0.1); add(0.3)", "constant(0.3); silu(); dropout(0.1); add(0.3)"),
    ("clamp(0.3, 0.1)", "constant(0.1)"),
    ("minimum(nan)", "constant(nan)"),
    ("minimum(0.5); clamp(0.5, 1.0); to(float16); gelu_tanh()", "constant(0.5); to(float16); gelu_tanh()"),
]
KINDS = ["plain", "nan", "inf", "zero parameters", "huge", "all huge", "ties", "bad parameters", "nan gradient"]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_constant_fold_equals_eager(kind: str, dtype: torch.dtype, channels_last: bool) -> None:
    narrow = dtype == torch.float16
    for (shape, groups), (source, chain), train in itertools.product(
        (((2, 8, 5, 7), 4), ((2, 8, 4, 9, 10), 2)), FOLDS, (True, False)
    ):
        torch.manual_seed(len(chain))
        x, w, b = torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
        grad = torch.randn(shape)
        if kind in ("nan", "inf"):
            x[0, 1].view(-1)[3] = float(kind)
        elif kind == "zero parameters":
            w.zero_()
            b.zero_()
        elif kind == "huge":
            x[0, 0].view(-1)[2] = 6e4 if narrow else 3e38
        elif kind == "all huge":
            x *= 1e4 if narrow else 1e38
        elif kind == "ties":
            x = x.mul(2).round().div(2)
        elif kind == "bad parameters":
            w[1], b[2] = math.nan, math.inf
        elif kind == "nan gradient":
            grad[0, 0].view(-1)[:4] = math.nan
        inputs = fresh(to_layout(x.to(dtype), channels_last), w.to(dtype), b.to(dtype))
        results = []
        for run in ("eager", "fused"):
            torch.manual_seed(5)
            if run == "eager":
                out = run_eager(*inputs, groups, source, train)
            else:
                out = fused(*inputs, groups, source, chain, train)
            state = torch.get_rng_state()
            results.append(([out, *gradients(out, inputs, grad.to(out.dtype))], state))
        (expected, expected_state), (ours, state) = results
        assert torch.equal(state, expected_state)
        for name, a, e in zip(("out", "dx", "dw", "db"), ours, expected, strict=True):
            assert same(a, e), (name, shape, source, train)


def test_constant_fold_without_parameters_and_with_an_eps_of_zero() -> None:
    x = torch.randn(2, 4, 3, 3)
    x[0, :2] = 7.0  # a constant group: eps 0 makes it NaN
    for eps in (0.0, 1e-45, 1e-12, 1.0):
        args = (x, None, None, 2, eps, "constant(0.0)", "minimum(0.0); clamp(0.0, 1.0)", False)
        expected = torch.group_norm(x, 2, eps=eps).clamp(max=0.0).clamp(0.0, 1.0)
        assert same(G.group_norm_pointwise(*args)[0], expected)


def test_zero_initialised_gamma_ties_every_element() -> None:
    # pytorch#184572: eager's bias gradient is not zero here, though the output is
    inputs = fresh(torch.randn(2, 16, 4, 6, 6), torch.zeros(16), torch.zeros(16))
    source = "minimum(0.0); clamp(0.0, 1.0)"
    grads = gradients(fused(*inputs, 8, source, "constant(0.0)", False), inputs, torch.ones(2, 16, 4, 6, 6))
    expected = gradients(run_eager(*inputs, 8, source, False), inputs, torch.ones(2, 16, 4, 6, 6))
    assert expected[2].abs().max() > 100
    assert all(same(a, e) for a, e in zip(grads, expected, strict=True))
