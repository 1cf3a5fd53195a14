"""public-reports.md §3: public reports about clamp, min and max, C1 to C21, each shown through a GroupNorm's site."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from helpers import assert_equal
from public_helpers import (
    DEVICES,
    Tail,
    Values,
    assert_reasons,
    by_compile,
    by_rewrite,
    call,
    check,
    clamp_chain,
    noise,
    one,
)
from torch import Tensor, nn

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.half, torch.bfloat16, torch.double]


def through(
    values: list[float], tail: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Tensor:
    """Checks ``tail`` on ``values`` against eager, bit for bit, and returns gnfuse's value for each of them."""
    model = Values(values, tail, dtype)
    check(model, model.zeros(), exact=True, seed_gradient=torch.ones_like, **kwargs)
    return call(by_rewrite(model)[0], [model.zeros()], grad=False).outs[0][0, :, 0, 0]


def test_C1_nan_on_either_side_wins_and_half_stays_half() -> None:
    left = [-3.0, -1.0, 0.0, 3.0, NAN]
    for op in (torch.minimum, torch.maximum, torch.min, torch.max):
        for bound in (0.0, NAN):
            for order in (False, True):

                def tail(h: Tensor, op: Any = op, bound: float = bound, order: bool = order) -> Tensor:
                    t = torch.tensor(bound)
                    return op(t, h) if order else op(h, t)

                out = through(left, tail, torch.half)
                assert out.dtype == torch.half
                assert out.isnan().tolist() == [bound != bound] * 4 + [True]
    out = through(left, lambda h: torch.clamp_min(h, 0.0), torch.half)
    assert out.isnan().tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_C2_a_nan_bound_makes_everything_nan(via: str) -> None:
    values = [-1.0, 0.0, 2.0, NAN, INF]
    for tail in (
        lambda h: torch.clamp(h, min=NAN),
        lambda h: torch.clamp(h, max=NAN),
        lambda h: torch.clamp(h, 0.0, NAN),
        lambda h: torch.clamp(h, min=torch.tensor(NAN)),
        lambda h: torch.minimum(h, torch.tensor(NAN)),
        clamp_chain(NAN, 1.0, 0.0),
    ):
        assert through(values, tail, via=via).isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 3, 4, 8, 16, 17, 33])
def test_C4_minimum_keeps_nan_at_every_width_and_fmin_is_another_op(width: int, device: str) -> None:
    values = [NAN] * width
    for tail, nan in (
        (lambda h: torch.minimum(h, torch.zeros((), device=h.device)), True),
        (lambda h: torch.fmin(h, torch.zeros((), device=h.device)), False),
        (lambda h: torch.fmax(h, torch.zeros((), device=h.device)), False),
        (lambda h: torch.clamp(torch.fmin(h, torch.zeros((), device=h.device)), 0.0, 1.0), False),
    ):
        model = Values(values, tail).to(device)
        x = model.zeros(1, 1).to(device)
        check(model, x, exact=True, grad=False, via="rewrite" if device == "cpu" else "compile")
        assert call(by_rewrite(model)[0], [x], grad=False).outs[0].isnan().all() == nan


def test_C6_a_nan_with_a_payload_stays_nan() -> None:
    """Payloads are not promised: eager and Inductor lose them on the CPU."""
    payload = torch.tensor([0x7FAB2AC8], dtype=torch.int32).view(torch.float32)
    for tail in (lambda h: torch.minimum(h, torch.tensor(1.0)), clamp_chain(0.0, 1.0, 0.0), F.relu):
        model = Values([0.0, 1.0], tail)
        with torch.no_grad():
            model.norm.bias[:1].copy_(payload)
        check(model, model.zeros(), exact=True, grad=False)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_C7_thirty_five_zeros_of_either_sign_stay_zeros(via: str) -> None:
    for op in (
        lambda h: torch.minimum(h, torch.tensor(0.0)),
        lambda h: h.clamp(0.0, 1.0),
        F.relu,
        F.relu6,
        lambda h: F.hardtanh(h, 0.0, 1.0),
        clamp_chain(0.0, 1.0, 0.0),
    ):
        assert not through([0.0] * 35, lambda h, op=op: op(-h), via=via).any()
        if via == "compile":
            break


SWAPPED = {
    "clamp(1, 0)": (lambda h: torch.clamp(h, 1.0, 0.0), 0.0),
    "no. 83 with (0, -1)": (clamp_chain(0.0, -1.0, 0.0), -1.0),
    "no. 83 with (.5, .2)": (clamp_chain(0.5, 0.2, 0.0), 0.2),
    "clamp_min 1 then clamp_max 0": (lambda h: h.clamp_min(1.0).clamp_max(0.0), 0.0),
}


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("name", SWAPPED)
def test_C8_bounds_in_the_wrong_order_give_the_upper_one_and_keep_nan(name: str, via: str) -> None:
    tail, value = SWAPPED[name]
    out = through([-2.0, -0.5, 0.0, 0.3, 0.7, 2.0, INF, -INF, NAN], tail, via=via)
    assert torch.equal(out[:-1], torch.full((8,), value))
    assert out[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_C9_gradients_at_ties_bounds_and_nan_are_the_running_torchs(dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1.0, 6.0, NAN, -1.0, 0.5]
    for tail in (
        lambda h: torch.minimum(h, torch.tensor(1.0)),
        lambda h: torch.maximum(h, torch.tensor(0.0)),
        lambda h: h.clamp(0.0, 1.0),
        lambda h: h.clamp_min(0.0),
        lambda h: h.clamp_max(6.0),
        F.relu,
        F.relu6,
        F.hardtanh,
        clamp_chain(0.0, 1.0, 0.0),
        clamp_chain(1.0, 6.0, 0.0),
        lambda h: torch.minimum(h, torch.tensor(1.0)).clamp(0.0, 1.0),
    ):
        # hardtanh at NaN: 0 in a vector lane of eager's, the upstream gradient in a scalar tail (test_public_facts.py)
        model = Values([v for v in values if v == v] if tail in (F.relu6, F.hardtanh) else values, tail, dtype)
        got, want = (
            call(run, [model.zeros()], seed_gradient=torch.ones_like).grads["norm.bias"]
            for run in (by_rewrite(model)[0], copy.deepcopy(model))
        )
        # the bias gradient is the tail's own derivative, summed over a channel: exact numbers
        assert_equal(got, want, "gradient of the bias")


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_C9_a_bound_that_wants_a_gradient_gets_half_of_each_tie(via: str) -> None:
    class Bound(Values):
        def __init__(self) -> None:
            super().__init__([1.0, 0.0, 2.0, NAN], F.relu)
            self.bound = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(torch.minimum(self.norm(x), self.bound), 1.0, 2.0)

    model = Bound()
    eager = call(copy.deepcopy(model), [model.zeros()], seed_gradient=torch.ones_like)
    # 9 x 2 ties give half each, the 18 values of 2 all of it; NaN stops at the clamp
    assert eager.grads["bound"] == 9 + 18
    site = one(check(model, model.zeros(), via=via, exact=True, seed_gradient=torch.ones_like))
    assert site.status == "refused"
    assert site.reason


def test_C10_a_degenerate_clamp_has_the_running_torchs_gradient_at_its_one_value() -> None:
    for bound in (0.0, 1.0):
        for tail in (
            lambda h, bound=bound: torch.clamp(h, bound, bound),
            lambda h, bound=bound: h.clamp_min(bound).clamp_max(bound),
            lambda h, bound=bound: F.relu(torch.clamp(h, bound, bound)),
        ):
            out = through([bound, bound + 1, bound - 1, NAN], tail)
            assert torch.equal(out[:3], torch.full((3,), bound))


def test_C11_integers_with_float_bounds_promote_as_eager() -> None:
    def run(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.clamp(x, -0.5, 0.5), F.relu(F.group_norm(h, 2))

    x, h = torch.tensor(1), noise(2, 4, 3, 3)
    got, want = by_compile(run)[0](x, h), run(x, h)
    assert got[0].dtype == torch.float32
    assert got[0] == 0.5
    torch.testing.assert_close(got, want)


def test_C13_bounds_are_rounded_to_the_dtype_before_they_are_compared() -> None:
    assert through([1.0, -1.0], lambda h: h.clamp(max=0.3), torch.bfloat16)[0] == 0.30078125
    assert through([1.0, -1.0], lambda h: h.clamp(max=1e-8), torch.half).tolist() == [0.0, -1.0]
    assert through([1.0, -1.0, 0.0], clamp_chain(1e-8, 1.0, 0.0), torch.half).tolist() == [0.0] * 3
    # 0.3 and 0.3001 are one bf16 number: not "min > max" after rounding, though 0.3001 > 0.3
    swapped = through([1.0, -1.0, 0.30078125], clamp_chain(0.3001, 0.3, 0.0), torch.bfloat16)
    assert set(swapped.tolist()) == {0.30078125}
    # 2048.4 rounds to 2048 in half, 2049.1 to 2050
    assert through([1e4, -1e4], clamp_chain(2048.4, 2049.1, 0.0), torch.half).tolist() == [2048.0] * 2


BOUNDS = {
    "0-dim float64": torch.tensor(0.3, dtype=torch.double),
    "0-dim float32": torch.tensor(0.3),
    "0-dim int": torch.tensor(1),
    "0-dim bool": torch.tensor(True),
    "1-dim float32": torch.tensor([0.3]),
    "1-dim bfloat16": torch.tensor([0.3], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_C14_the_output_dtype_follows_eagers_promotion(kind: str, via: str) -> None:
    bound = BOUNDS[kind]
    values = [0.30078125, 0.25, 1.0, NAN]
    for op in (torch.minimum, torch.maximum):
        out = through(values, lambda h, op=op: op(h, bound.to(h.device)), torch.bfloat16, via=via)
        assert out.dtype == (torch.float32 if kind == "1-dim float32" else torch.bfloat16)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_C15_a_bound_made_on_the_cpu_is_a_known_constant(via: str) -> None:
    def tail(h: Tensor) -> Tensor:
        return torch.clamp(torch.min(h, torch.tensor(0.0)), 0.0, 1.0)

    assert one(check(Tail(8, 4, tail), noise(2, 8, 3, 3), via=via, exact=True)).status == "folded"


def filled(t: Tensor) -> None:
    t[...] = 0.5


WRITES = {
    "add_": lambda t: t.add_(0.5),
    "fill_": lambda t: t.fill_(0.5),
    "through a view": lambda t: t.view(1).add_(0.5),
    "through detach": lambda t: t.detach().add_(0.5),
    "out=": lambda t: torch.add(t, 0.5, out=t),
    "setitem": filled,
}


# symbolic_trace has no item assignment
@pytest.mark.parametrize(
    ("write", "via"), [(w, v) for w in WRITES for v in ("rewrite", "compile") if (w, v) != ("setitem", "rewrite")]
)
def test_C15_a_bound_that_is_written_in_place_is_not_the_constant_it_was_made_as(write: str, via: str) -> None:
    def tail(h: Tensor) -> Tensor:
        t = torch.zeros((), device=h.device)
        WRITES[write](t)
        return torch.clamp(torch.minimum(h, t), 0.0, 1.0)

    check(Tail(8, 4, tail), noise(2, 8, 3, 3), via=via)


@pytest.mark.gpu
def test_C15_a_cpu_bound_costs_no_synchronisation_and_keeps_cuda_graphs() -> None:
    model = Tail(8, 4, lambda h: torch.clamp(torch.min(h, torch.tensor(0.0)), 0.0, 1.0)).cuda()
    x = noise(2, 8, 3, 3).cuda()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="gnfuse", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = compiled(x).clone()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(got, model(x))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_C17_an_unused_clamp_has_no_effect_and_an_in_place_one_has(via: str) -> None:
    def dropped(h: Tensor) -> Tensor:
        h.clamp_min(0.0)
        return F.hardtanh(h, -1.0, 1.0)

    def written(h: Tensor) -> Tensor:
        h.clamp_min_(0.0)
        return F.hardtanh(h, -1.0, 1.0)

    values = [-2.0, -0.5, 0.5, 2.0]
    for tail, want in ((dropped, [-1.0, -0.5, 0.5, 1.0]), (written, [0.0, 0.0, 0.5, 1.0])):
        model = Values(values, tail)
        check(model, model.zeros(), via=via)
        assert call(by_rewrite(model)[0], [model.zeros()], grad=False).outs[0][0, :, 0, 0].tolist() == want


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_C18_only_the_two_tensor_form_of_min_is_pointwise(via: str) -> None:
    class Forms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(7))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a, b, c, d, e, f, g = (norm(x) for norm in self.norms)
            t = torch.tensor(0.5)
            return (
                torch.min(a, 1)[0],
                torch.min(b, t),
                c.min(),
                d.min(dim=1).values,
                torch.max(e, dim=2, keepdim=True).values,
                f.min(t),
                torch.amin(g, 1),
            )

    sites = check(Forms(), noise(2, 8, 3, 3), via=via)
    assert [s.status for s in sites] == ["refused", "fused", "refused", "refused", "refused", "fused", "refused"]
    assert_reasons(sites)


def test_C20_relu_of_a_negative_is_plus_zero() -> None:
    out = through([-1.0] * 35, F.relu)
    assert not out.any()
    assert not out.signbit().any()


SMOOTH = {
    "hardswish": F.hardswish,
    "silu": F.silu,
    "silu by hand": lambda h: h * torch.sigmoid(h),
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "elu": F.elu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
@pytest.mark.parametrize("name", SMOOTH)
def test_C21_nan_is_born_at_infinities_where_eagers_is(name: str, dtype: torch.dtype) -> None:
    high = 1e4 if name == "gelu" else INF  # of +inf eager's erf-gelu is NaN through oneDNN, inf in other layouts
    model = Values([high, -INF, 1.0, NAN, -1e4, 1e4], SMOOTH[name], dtype)
    x = model.zeros(3, 6)
    want = call(copy.deepcopy(model), [x], grad=False).outs[0]
    if name in ("hardswish", "silu", "mish", "gelu"):
        assert want[:, 1].isnan().all()
    check(model, x, grad=False)
    check(Values([1.0, -1e4, 1e4], SMOOTH[name], dtype), model.zeros(3, 6)[:, :3])
    clamped = Values([high, -INF, 1.0, NAN], lambda h: SMOOTH[name](h).clamp(-0.5, 2.0), dtype)
    check(clamped, clamped.zeros(3, 6), grad=False)


def test_C21_no_range_of_a_smooth_op_hides_its_nan_at_an_infinity() -> None:
    """silu is never under -0.28, so clamp(silu, -inf, -1) would be -1: but it is NaN where silu is."""
    for high, tail in (
        (INF, lambda h: torch.clamp(F.silu(h), -5.0, -1.0)),
        (1e4, lambda h: torch.clamp(F.gelu(h), -5.0, -1.0)),
        (INF, lambda h: torch.minimum(torch.clamp_min(F.mish(h), 0.5), torch.tensor(0.5))),
    ):
        model = Values([-INF, high, 0.0, NAN, 3.0], tail)
        check(model, model.zeros(), grad=False)
