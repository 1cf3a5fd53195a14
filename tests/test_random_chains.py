"""2,000 random chains against eager: equal where folded, as near to float64 as eager where fused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gnfuse
from gnfuse.chain import Dropout, Op, Step, op
from gnfuse.passes.fold import EXACT_KINKS

EXAMPLES_A_DTYPE = 500
PARTS = 4  # tests of their own, which can run side by side
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# Each op as people write it: functions, methods, in-place forms, modules made on the spot
Spelling = Callable[..., Tensor]
SPELLINGS: dict[str, list[Spelling]] = {
    "minimum": [
        lambda y, a: torch.min(y, torch.tensor(a)),
        lambda y, a: torch.minimum(torch.tensor(a), y),
        lambda y, a: y.min(torch.full((), a)),
    ],
    "maximum": [lambda y, a: torch.max(y, torch.tensor(a)), lambda y, a: y.maximum(torch.tensor(a))],
    "clamp": [
        lambda y, lo, hi: torch.clamp(y, lo, hi),
        lambda y, lo, hi: y.clip(min=lo, max=hi),
        lambda y, lo, hi: y.clamp_(lo, hi),
    ],
    "hardtanh": [lambda y, lo, hi: F.hardtanh(y, lo, hi), lambda y, lo, hi: F.hardtanh(y, lo, hi, inplace=True)],
    "relu": [lambda y: torch.relu(y), lambda y: F.relu(y, inplace=True), lambda y: y.relu()],
    "threshold": [lambda y, at, value: F.threshold(y, at, value)],
    "leaky_relu": [lambda y, s: F.leaky_relu(y, s), lambda y, s: F.leaky_relu(y, s, inplace=True)],
    "abs": [lambda y: y.abs(), lambda y: torch.abs(y), lambda y: abs(y)],
    "neg": [lambda y: -y, lambda y: torch.neg(y)],
    "add": [lambda y, c: y + c, lambda y, c: torch.add(y, c), lambda y, c: y.add_(c)],
    "rsub": [lambda y, c: c - y, lambda y, c: torch.rsub(y, c)],
    "mul": [lambda y, c: y * c, lambda y, c: c * y, lambda y, c: y.mul(c)],
    "div": [lambda y, c: y / c, lambda y, c: torch.div(y, c)],
    "square": [lambda y: y * y, lambda y: y**2, lambda y: torch.square(y)],
    "silu": [lambda y: F.silu(y), lambda y: y * torch.sigmoid(y), lambda y: F.silu(y, inplace=True)],
    "gelu": [lambda y: F.gelu(y)],
    "gelu_tanh": [lambda y: F.gelu(y, approximate="tanh")],
    "sigmoid": [lambda y: torch.sigmoid(y), lambda y: y.sigmoid()],
    "tanh": [lambda y: torch.tanh(y), lambda y: y.tanh()],
    "hardswish": [lambda y: F.hardswish(y)],
    "hardsigmoid": [lambda y: F.hardsigmoid(y)],
    "elu": [lambda y, a: F.elu(y, a)],
    "softplus": [lambda y, b, t: F.softplus(y, b, t)],
    "mish": [lambda y: F.mish(y)],
}
BOUNDS = (0.0, -0.0, 1.0, -1.0, 0.5, 0.3, -0.7, 2.0, 6.0)
KINK_POINTS = {
    "relu": (0.0,), "leaky_relu": (0.0,), "abs": (0.0,), "elu": (0.0,), "hardswish": (-3.0, 3.0),
    "hardsigmoid": (-3.0, 3.0),
}  # fmt: skip


@st.composite
def pointwise(draw: st.DrawFn) -> Op:
    name = draw(st.sampled_from(sorted(SPELLINGS)))
    bound = st.sampled_from(BOUNDS)
    if name in ("clamp", "hardtanh"):
        lo, hi = draw(bound), draw(bound)
        return op(name, *(sorted((lo, hi)) if name == "hardtanh" or draw(st.booleans()) else (lo, hi)))
    if name == "threshold":
        return op(name, draw(bound), draw(bound))
    if name == "softplus":
        return op(name, draw(st.sampled_from((1.0, 0.5, 2.0))), 20.0)
    if name in ("mul", "div", "elu", "leaky_relu"):
        return op(name, draw(st.sampled_from((1.0, 0.5, 0.01, 3.0, 0.3))))
    takes = {"minimum", "maximum", "add", "rsub"}
    return op(name, draw(bound)) if name in takes else op(name)


@dataclass
class Case:
    shape: tuple[int, ...]
    groups: int
    affine: tuple[bool, bool]
    channels_last: bool
    steps: list[Step]
    spellings: list[int]
    second_user: int | None
    training: bool
    special: str
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups, depth = draw(st.sampled_from((1, 2, 3, 8))), draw(st.sampled_from((1, 2, 3, 4)))
    rank = draw(st.integers(2, 5))
    spatial = [draw(st.sampled_from((1, 2, 3, 5, 8))) for _ in range(rank - 2)]
    shape = (draw(st.sampled_from((1, 2, 3))), groups * depth, *spatial)
    if math.prod(shape) // groups == 1:
        shape = (2, *shape[1:])
    steps: list[Step] = [draw(pointwise()) for _ in range(draw(st.integers(0, 4)))]
    if draw(st.booleans()):
        exact = [s for s in steps if isinstance(s, Op) and s.name in EXACT_KINKS]
        a = draw(st.sampled_from(BOUNDS))
        steps = [*exact[:1], op("minimum", a), op("clamp", a, draw(st.sampled_from(BOUNDS)))]
    if draw(st.booleans()):
        steps.insert(draw(st.integers(0, len(steps))), Dropout(draw(st.sampled_from((0.1, 0.2, 0.5)))))
    return Case(
        shape, groups, (draw(st.booleans()), draw(st.booleans())), rank >= 4 and draw(st.booleans()), steps,
        [draw(st.integers(0, 2)) for _ in steps],
        draw(st.none() | st.integers(0, max(len(steps) - 1, 0))) if draw(st.integers(0, 3)) == 0 else None,
        draw(st.booleans()), draw(st.sampled_from(("", "", "", "nan", "inf", "zero affine", "constant group"))),
        draw(st.integers(0, 2**16)),
    )  # fmt: skip


class Chained(nn.Module):
    """The case as a module; with a second user, an intermediate is returned as well."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.case = case
        channels = case.shape[1]
        zero = case.special == "zero affine"
        make = (lambda: torch.zeros(channels)) if zero else (lambda: torch.randn(channels))
        self.weight = nn.Parameter(make().to(dtype)) if case.affine[0] else None
        # eager raises for the gradient of a bias without a weight
        self.bias = nn.Parameter(make().to(dtype), requires_grad=case.affine[0]) if case.affine[1] else None
        self.drop = nn.Dropout(next((s.p for s in case.steps if isinstance(s, Dropout)), 0.0))

    def keep_gradient(self, y: Tensor) -> None:
        """For the float64 run: the gradient at the GroupNorm's output gives x's its scale."""
        if type(y) is Tensor and y.dtype == torch.float64 and y.requires_grad:
            y.register_hook(lambda g: setattr(self, "largest_dy", g.nan_to_num().abs().max().item()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.group_norm(x, self.case.groups, self.weight, self.bias)
        self.keep_gradient(y)
        kept = []
        for i, (step, spelling) in enumerate(zip(self.case.steps, self.case.spellings, strict=True)):
            if i == self.case.second_user:
                kept.append(y * 0.25)
            if isinstance(step, Dropout):
                y = self.drop(y)
            else:
                forms = SPELLINGS[step.name]
                y = forms[spelling % len(forms)](y, *step.floats)
        return (y, *kept)


def make_input(case: Case, dtype: torch.dtype) -> Tensor:
    x = torch.randn(case.shape).to(dtype)
    if x.numel() and case.special in ("nan", "inf"):
        x.view(-1)[case.seed % x.numel()] = float(case.special)
    if case.special == "constant group":
        x[0] = 0.7
    if case.channels_last:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x


@dataclass
class Ran:
    outs: tuple[Tensor, ...]
    grads: list[Tensor | None]
    rng: Tensor


def run(module: nn.Module, x: Tensor, upstream: list[Tensor], seed: int) -> Ran:
    leaf = x.clone().requires_grad_()
    for p in module.parameters():
        p.grad = None
    torch.manual_seed(seed)
    outs = module(leaf)
    rng = torch.get_rng_state()
    torch.autograd.backward(outs, [g.to(o.dtype) for g, o in zip(upstream, outs, strict=False)])
    grads = [leaf.grad, *(p.grad for _, p in sorted(module.named_parameters()))]
    return Ran(tuple(o.detach() for o in outs), grads, rng)


def ambiguous(case: Case, module: Chained, x: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    """(gradient, value): where an op's input, in float64, is so near one of its kinks (or jumps) that rounding decides
    the side it falls on."""
    exact = copy.deepcopy(module).double().train(training)
    y = F.group_norm(x.double(), case.groups, exact.weight, exact.bias)
    grain = 64 * torch.finfo(x.dtype).eps
    kink, jump = (torch.zeros(y.shape, dtype=torch.bool) for _ in range(2))
    with torch.no_grad():
        for step in case.steps:
            if isinstance(step, Dropout):
                continue
            points = (*step.floats[:1],) if step.name == "threshold" else KINK_POINTS.get(step.name, step.floats)
            if step.name in EXACT_KINKS | {"hardtanh"} or step.name in KINK_POINTS:
                for point in points:
                    near = (y - point).abs() <= grain * (1 + y.abs())
                    kink |= near
                    jump |= near & (step.name == "threshold")
            y = SPELLINGS[step.name][0](y, *step.floats)
    return kink, jump


def assert_bit_equal(got: Tensor | None, want: Tensor | None, what: str) -> None:
    assert (got is None) == (want is None), what
    if got is not None and want is not None:
        assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride(), what
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN elsewhere"
        assert bool(((got == want) | want.isnan()).all()), f"{what}: {(got - want).abs().max()}"


def assert_as_near(
    got: Tensor | None, want: Tensor | None, exact: Tensor | None, skip: Tensor | None, scale: float, what: str
) -> None:
    """No farther from float64 than eager by more than rounding at this scale; NaN where float64 has NaN."""
    assert (got is None) == (want is None), what
    if got is None or want is None or exact is None:
        return
    assert got.dtype == want.dtype and got.shape == want.shape, what
    assert bool(got.isnan()[exact.isnan()].all()), f"{what}: a NaN is lost"
    representable = exact.isfinite() & want.isfinite() & (exact.abs() < 0.5 * torch.finfo(got.dtype).max)
    if skip is not None:
        representable &= ~skip
    if not bool(representable.any()):
        return
    assert bool(got.isfinite()[representable].all()), f"{what}: not finite where eager is"
    error, eager_error = ((t.double() - exact).abs()[representable].max().item() for t in (got, want))
    largest = max(exact[representable].abs().max().item(), 1e-3)
    computed_in = torch.promote_types(got.dtype, torch.float32)
    allowed = 1.5 * eager_error + 8 * torch.finfo(got.dtype).eps * largest + 16 * torch.finfo(computed_in).eps * scale
    assert error <= allowed, f"{what}: {error:.3g}, eager {eager_error:.3g}, allowed {allowed:.3g}"


def largest_rstd(case: Case, x: Tensor) -> float:
    groups = x.double().reshape(x.shape[0], case.groups, -1)
    return (groups.var(-1, unbiased=False) + 1e-5).rsqrt().nan_to_num().max().item()


def gradient_scale(case: Case, module: Chained, x: Tensor) -> float:
    """The largest term of dx = rstd gamma dy - ...: what cancels in it leaves rounding of this size."""
    gamma = 1.0 if module.weight is None else module.weight.abs().max().item()
    return float(largest_rstd(case, x) * gamma * module.largest_dy * normalised_terms(case, x))


def normalised_terms(case: Case, x: Tensor) -> float:
    """The largest term of (x - mean) * rstd, which cancels to about 1."""
    return float(1 + largest_rstd(case, x) * x.double().nan_to_num(posinf=0).abs().max().item())


def differentiable(case: Case, dtype: torch.dtype) -> Case:
    """The case, without its in-place spellings where eager itself cannot differentiate them."""
    module, x = Chained(case, dtype), make_input(case, dtype)
    try:
        run(module, x, [torch.ones(x.shape)] * 2, case.seed)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return replace(case, spellings=[0] * len(case.spellings))
    return case


def check(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(case.seed)
    case = differentiable(case, dtype)
    module, x = Chained(case, dtype).train(case.training), make_input(case, dtype)
    kink, jump = ambiguous(case, module, x, case.training)
    rewritten, report = gnfuse.rewrite(torch.fx.symbolic_trace(module), (x,))
    (site,) = report.sites
    assert site.reason, "every site says why its chain ends, or why it is left alone"
    folded = site.status != "fused"
    count = 1 + (case.second_user is not None and case.second_user < len(case.steps))
    upstream = [torch.randn(x.shape) for _ in range(count)]
    if not folded:  # where rounding decides a side, eager's side is not ours to copy: such elements get no gradient
        upstream = [g.masked_fill(kink, 0.0) for g in upstream]
    want, got = (run(m, x, upstream, case.seed) for m in (module, rewritten))
    assert torch.equal(want.rng, got.rng), "the generator is elsewhere"
    for i, (w, g) in enumerate(zip(want.outs, got.outs, strict=True)):
        assert g.stride() == w.stride(), f"output {i}: strides {g.stride()}, eager {w.stride()}"
    if folded:
        for i, (w, g) in enumerate(zip(want.outs, got.outs, strict=True)):
            assert_bit_equal(g, w, f"output {i}")
        for i, (wg, gg) in enumerate(zip(want.grads, got.grads, strict=True)):
            assert_bit_equal(gg, wg, f"gradient {i}")
        return
    in_float64 = copy.deepcopy(module).double()
    exact = run(in_float64, x.double(), upstream, case.seed)
    for i, (w, g, e) in enumerate(zip(want.outs, got.outs, exact.outs, strict=True)):
        # there is nothing more exact than float64 to compare float64 with: allow what x * rstd rounds to
        assert_as_near(g, w, e, jump, largest_rstd(case, x) if dtype == torch.float64 else 1.0, f"output {i}")
    of_x = gradient_scale(case, in_float64, x)
    of_parameters = max(of_x, in_float64.largest_dy * x.shape[0] * normalised_terms(case, x))
    # eager's slope of hardsigmoid is 1/6 rounded to float32, in float64 too
    coarse = 1e8 if dtype == torch.float64 and op("hardsigmoid") in case.steps else 1.0
    for i, (wg, gg, eg) in enumerate(zip(want.grads, got.grads, exact.grads, strict=True)):
        assert_as_near(gg, wg, eg, None, coarse * (of_parameters if i else of_x), f"gradient {i}")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_random_chain_is_as_eager(dtype: torch.dtype, part: int) -> None:
    @seed(part)
    @settings(
        max_examples=EXAMPLES_A_DTYPE // PARTS, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases())
    def every(case: Case) -> None:
        check(case, dtype)

    every()
