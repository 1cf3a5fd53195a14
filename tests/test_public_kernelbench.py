"""public-reports.md §6 and kernelbench.md: benchmark threads (K1 to K9), no. 83 and its variants, what to leave alone.

The models are KernelBench's problems in our own words, shrunk.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from public_helpers import (
    Tail,
    Values,
    assert_reasons,
    by_compile,
    by_rewrite,
    call,
    chains_of,
    check,
    clamp_chain,
    noise,
    one,
    randomise,
    statuses,
)
from torch import Tensor, nn

NAN, INF = math.nan, math.inf


class No83(nn.Module):
    """Conv3d, GroupNorm, min(x, low), clamp(low, high), dropout: level 2 no. 83."""

    def __init__(self, low: Any = 0.0, high: float = 1.0, p: float = 0.2, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.conv = nn.Conv3d(3, 16, 3, dtype=dtype)
        self.norm = nn.GroupNorm(8, 16, dtype=dtype)
        self.low, self.high, self.drop = low, high, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        h = torch.min(h, torch.tensor(self.low, device=h.device))
        return self.drop(torch.clamp(h, min=self.low, max=self.high))


def image(seed: int = 3) -> Tensor:
    return noise(2, 3, 6, 8, 8, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_K1_no_83_is_folded_to_zero_and_equals_eager_in_every_bit(training: bool, seed: int) -> None:
    site = one(check(No83().train(training), image(seed), via="compile", exact=True, seed=seed))
    assert site.status == "folded"
    assert site.guard == "local"
    assert "constant 0" in site.result
    assert "NaN" in site.result
    assert site.proof
    assert "test_public_kernelbench.py" in site.source


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_K1_no_80_has_no_group_norm_and_is_the_inner_backends(batch: int) -> None:
    class No80(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gemm = nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.gemm(x).max(dim=1, keepdim=True).values
            return F.gelu(x - x.mean(dim=1, keepdim=True))

    assert check(No80(), noise(batch, 16), via="compile", exact=True) == []


class No23(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(3, 24, 3), nn.GroupNorm(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).mean(dim=[1, 2, 3, 4])


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_K1_no_23_is_near_zero_but_not_claimed_constant(via: str) -> None:
    model, x = No23(), image()
    want = call(copy.deepcopy(model), [x], grad=False).outs[0]
    assert want.abs().max() < 1e-5
    site = one(check(model, x, via=via, grad=False))
    assert site.status == "refused"
    assert site.reason
    runner = by_rewrite(model)[0] if via == "rewrite" else by_compile(model)[0]
    assert_equal(call(runner, [x], grad=False).outs[0], want)


def test_K4_an_all_zero_result_would_not_be_no_23s() -> None:
    """KernelBench's tolerance lets zeros pass; here the rounding noise itself has to be eager's."""
    model, x = No23(), image()
    got = call(by_compile(copy.deepcopy(model))[0], [x], grad=False).outs[0]
    assert got.any()
    assert torch.allclose(got, torch.zeros_like(got), atol=1e-2)
    with pytest.raises(AssertionError):
        assert_equal(torch.zeros_like(got), call(model, [x], grad=False).outs[0])


NO_OPS = {
    "no. 2: clamp, times 2, clamp, over 2": lambda h: torch.clamp(torch.clamp(h, 0.0, 1.0) * 2, 0.0, 1.0) / 2,
    "no. 7: leaky_relu after relu": lambda h: F.leaky_relu(F.relu(h), 0.01),
    "no. 34: times 1": lambda h: F.relu(h) * 1.0,
    "no. 97: over 1": lambda h: F.relu(h) / 1.0,
    "no. 57: a lower bound below relu's": lambda h: torch.clamp((F.relu(h) + 3) / 6, 0.0, 1.0),
    "no. 62: x + x": lambda h: double(F.leaky_relu(h, 0.01)),
    "no. 81: clamp after tanh": lambda h: torch.clamp(torch.tanh(h), -1.0, 1.0),
    "no. 92: hardswish after tanh": lambda h: F.hardswish(torch.tanh(h)),
    "no. 95: hardtanh after gelu of tanh": lambda h: F.hardtanh(F.gelu(torch.tanh(h)), -1.0, 1.0),
    "relu6 after clamp(0, 1)": lambda h: F.relu6(torch.clamp(h, 0.0, 1.0)),
    "relu after relu": lambda h: F.relu(F.relu(h)),
}
DROPPED = {
    "no. 7: leaky_relu after relu": "leaky_relu",
    "no. 34: times 1": "mul",
    "no. 97: over 1": "div",
    "no. 81: clamp after tanh": "clamp",
    "no. 95: hardtanh after gelu of tanh": "hardtanh",
    "relu6 after clamp(0, 1)": "hardtanh",
}


def double(h: Tensor) -> Tensor:
    return h + h


@pytest.mark.parametrize("name", NO_OPS)
def test_K2_no_op_steps_keep_values_and_gradients_at_special_points(name: str) -> None:
    tail = NO_OPS[name]
    special = Values([0.0, -0.0, 0.25, 0.5, 1.0, 2.0, -1.0, 6.0, 30.0, -30.0, NAN, INF, -INF], tail)
    check(special, special.zeros(), grad=False)
    finite = Values([0.0, -0.0, 0.25, 0.5, 1.0, 2.0, -1.0, 6.0, 30.0, -30.0, INF, -INF], tail)
    check(finite, finite.zeros())
    assert one(check(Tail(8, 4, tail), noise(2, 8, 5, 5))).status == "fused"


@pytest.mark.parametrize("name", DROPPED)
def test_K2_a_provable_no_op_is_dropped_with_its_proof_where_no_gradient_is_asked_for(name: str) -> None:
    model = Tail(8, 4, NO_OPS[name]).requires_grad_(False)
    compiled, sites = by_compile(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(noise(2, 8, 5, 5)), model(noise(2, 8, 5, 5)))
    site = one(sites())
    assert site.status == "fused"
    assert DROPPED[name] in site.pattern
    assert DROPPED[name] not in site.result
    assert site.proof


METR = {
    "no. 83": (lambda h: clamp_chain(0.0, 1.0, 0.2)(h), "folded"),
    "no. 23": (lambda h: h.mean(dim=[1, 2, 3, 4]), "refused"),
    "no. 27": (lambda h: h.mean(dim=[2, 3, 4]), "refused"),
    "no. 41 of v0": (lambda h: F.relu(h.mean(dim=1, keepdim=True)), "refused"),
}


@pytest.mark.parametrize("name", METR)
def test_K3_of_the_removed_group_norm_problems_only_no_83_is_a_constant(name: str) -> None:
    tail, status = METR[name]
    assert one(check(Tail(16, 8, tail), noise(2, 16, 2, 4, 4), grad=False)).status == status


def test_K5_a_tiny_output_is_right_in_relative_error() -> None:
    model = Tail(8, 4, lambda h: F.silu(h) * 1e-6)
    x = noise(2, 8, 5, 5)
    got = call(by_rewrite(model)[0], [x], grad=False).outs[0]
    want = call(model, [x], grad=False).outs[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-12)
    assert got.any()


def test_K6_zero_parameters_are_not_a_constant() -> None:
    model = Tail(8, 4, F.silu)
    nn.init.zeros_(model.norm.weight)
    nn.init.zeros_(model.norm.bias)
    x = noise(2, 8, 5, 5)
    gm, report = by_rewrite(model)
    assert one(report.sites).status == "fused"
    assert not gm(x).any()
    for run in (model, gm):
        with torch.no_grad():
            run.norm.weight.fill_(1.0)
    torch.testing.assert_close(gm(x), model(x))


def test_K8_an_output_within_a_hundredth_is_not_a_constant() -> None:
    model, x = Tail(8, 4, lambda h: torch.tanh(h) * 0.001), noise(2, 8, 5, 5)
    assert call(copy.deepcopy(model), [x], grad=False).outs[0].abs().max() < 0.01
    assert one(check(model, x)).status == "fused"


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_K9_constants_are_proved_in_train_mode_under_no_grad_too(via: str) -> None:
    assert one(check(No83().train(), image(), via=via, exact=True, grad=False)).status == "folded"


# ---- kernelbench.md §1: every problem with a GroupNorm

PROBLEMS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "35 GN": (lambda h: h, "refused", ""),
    "30 GN_Hardtanh": (lambda h: F.hardtanh(h, -2.0, 2.0), "fused", "hardtanh(-2, 2)"),
    "60 GN_HardSwish": (F.hardswish, "fused", "hardswish"),
    "62 GN_LeakyReLU_Sum": (lambda h: double(F.leaky_relu(h, 0.01)), "fused", "leaky_relu(0.01) → mul(2)"),
    "83 GN_Min_Clamp_Dropout": (clamp_chain(0.0, 1.0, 0.2), "folded", "minimum(0) → clamp(0, 1) → dropout(0.2)"),
    "88 GN_Swish_Multiply_Swish": (lambda h: swish(swish(h) * torch.ones(8, 1, 1, 1)), "fused", "silu"),
    "92 GN_Tanh_HardSwish_Residual": (
        lambda h: torch.logsumexp(F.hardswish(torch.tanh(h)) + torch.ones(8, 1, 1, 1), 1, keepdim=True),
        "fused",
        "tanh → hardswish",
    ),
    "85 GN_Scale_MaxPool_Clamp": (
        lambda h: torch.clamp(F.max_pool3d(h * torch.ones(8, 1, 1, 1), 2), 0.0, 1.0),
        "refused",
        "",
    ),
    "75 GN_Min_BiasAdd": (lambda h: torch.min(h, dim=1, keepdim=True)[0] + torch.ones(1, 8, 1, 1, 1), "refused", ""),
}


def swish(h: Tensor) -> Tensor:
    return torch.sigmoid(h) * h


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_kernelbench_1_each_group_norm_problem_is_as_eager(name: str, via: str) -> None:
    tail, status, pattern = PROBLEMS[name]
    site = one(check(Tail(8, 4, tail), noise(2, 8, 2, 4, 5), via=via))
    assert site.status == status
    assert pattern in site.pattern
    if status == "refused":
        assert site.reason


PROLOGUES = {
    "11 Tanh_MaxPool_GN": lambda x: F.max_pool2d(torch.tanh(x), 2),
    "19 GELU_GN": F.gelu,
    "21 Add_Scale_Sigmoid_GN": lambda x: torch.sigmoid((x + 1) * 2),
    "37 Swish_Sum_GN": lambda x: torch.sigmoid(x) * x + 1,
    "61 ReLU_GN": lambda x: F.relu(x - 10),
    "94 Hardtanh_Mish_GN": lambda x: F.mish(F.hardtanh(x)),
}


@pytest.mark.parametrize("name", PROLOGUES)
def test_kernelbench_1_a_bare_group_norm_at_the_end_is_refused_and_as_eager(name: str) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(PROLOGUES[name](x))

    site = one(check(Ends(), noise(2, 8, 6, 6)))
    assert site.status == "refused"
    assert "nothing to fuse" in site.reason


# ---- kernelbench.md §2: what must not be claimed


def test_kernelbench_2_no_9_is_zero_by_its_init_only_and_not_claimed() -> None:
    """relu((h - 2) * 1.5) after a Linear is 0 for KernelBench's weights; after a GroupNorm it is 0 for most inputs."""

    class No9(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu((self.linear(x) - 2) * 1.5)

    x = noise(4, 16) * 0.1
    assert not call(No9(), [x], grad=False).outs[0].any()
    assert check(No9(), x, via="compile") == []
    model = Tail(8, 1, lambda h: F.relu((h - 9.0) * 1.5))
    nn.init.ones_(model.norm.weight)
    nn.init.zeros_(model.norm.bias)
    assert not call(copy.deepcopy(model), [noise(4, 8, 3, 3)], grad=False).outs[0].any()
    assert one(check(model, noise(4, 8, 3, 3))).status == "fused"
    with torch.no_grad():
        model.norm.bias.fill_(9.5)
    check(model, noise(4, 8, 3, 3))


def test_kernelbench_2_no_36_is_its_bias_by_saturation_only_and_not_claimed() -> None:
    class No36(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bias = nn.ConvTranspose2d(3, 8, 3), nn.Parameter(noise(1, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).min(dim=1, keepdim=True)[0].sum(dim=2, keepdim=True)
            return F.gelu(x) + self.bias

    assert check(No36(), noise(2, 3, 6, 6), via="compile") == []
    model = Tail(8, 1, lambda h: F.gelu(h - 60.0) + 0.5)
    assert set(call(copy.deepcopy(model), [noise(2, 8, 3, 3)], grad=False).outs[0].flatten().tolist()) == {0.5}
    assert one(check(model, noise(2, 8, 3, 3))).status == "fused"
    with torch.no_grad():
        model.norm.bias.fill_(60.0)
    check(model, noise(2, 8, 3, 3))


def test_kernelbench_2_no_58_depends_on_parameter_values_and_is_not_claimed() -> None:
    model = Tail(8, 4, lambda h: torch.clamp(h, -1.0, 1.0) + 0.0)
    with torch.no_grad():
        model.norm.weight.fill_(1e-3)
        model.norm.bias.fill_(5.0)
    assert set(call(copy.deepcopy(model), [noise(2, 8, 3, 3)], grad=False).outs[0].flatten().tolist()) == {1.0}
    assert one(check(model, noise(2, 8, 3, 3))).status == "fused"


@pytest.mark.parametrize(("n", "scale"), [(1, 1e6), (2, 1.0), (5, 1.0)])
def test_kernelbench_3_no_30s_hardtanh_stays_at_any_group_size(n: int, scale: float) -> None:
    """sqrt(n - 1) <= 2 for n <= 5 in real numbers only."""
    model = nn.Sequential(nn.GroupNorm(2, 2 * n), nn.Hardtanh(-2.0, 2.0))
    for x in (scale * noise(64, 2 * n), 1e6 + scale * noise(64, 2 * n)):
        check(model, x, grad=False)
    ((chain, _),) = chains_of(by_rewrite(model)[0])
    assert "hardtanh(-2.0, 2.0)" in chain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernelbench_3_one_element_a_group_is_not_folded_to_beta(dtype: torch.dtype) -> None:
    model = Tail(4, 4, F.relu, dtype=dtype)
    x = (1e6 * noise(64, 4, 1, 1)).to(dtype)
    assert one(check(model, x, exact=True, grad=False)).status == "fused"


# ---- kernelbench.md §4: variants of no. 83

VARIANTS: dict[str, tuple[float, float, float, set[float]]] = {
    "0, 1, p=.2": (0.0, 1.0, 0.2, {0.0}),
    ".5, 1, p=.2": (0.5, 1.0, 0.2, {0.0, 0.625}),
    "-1, 1, p=.2": (-1.0, 1.0, 0.2, {-1.25, 0.0}),
    "0, -1": (0.0, -1.0, 0.0, {-1.0}),
    ".5, .2": (0.5, 0.2, 0.0, {0.20000000298023224}),
    "-inf, 1": (-INF, 1.0, 0.0, {-INF}),
    "nan, 1": (NAN, 1.0, 0.0, set()),
    "0, inf": (0.0, INF, 0.2, {0.0}),
    "1, 1": (1.0, 1.0, 0.0, {1.0}),
}


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("name", VARIANTS)
def test_kernelbench_4_a_variant_of_no_83_folds_to_its_constant(name: str, via: str) -> None:
    low, high, p, values = VARIANTS[name]
    model = No83(low, high, p)
    out = call(copy.deepcopy(model), [image()], grad=False).outs[0]
    assert set(out[~out.isnan()].tolist()) == values
    site = one(check(model, image(), via=via, exact=True))
    assert site.status == "folded" or name in ("-inf, 1", "nan, 1")


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.half, torch.double])
def test_kernelbench_4_no_83_in_every_dtype(dtype: torch.dtype, via: str) -> None:
    site = one(check(No83(dtype=dtype), image().to(dtype), via=via, exact=True))
    assert site.status == "folded"
    # in float64 a bound of torch.tensor(0.3) is not clamp's 0.3: two values, no constant
    two = dtype == torch.double
    site = one(check(No83(0.3, 0.7, dtype=dtype), image().to(dtype), via=via, exact=not two, examples=True))
    assert site.status == ("fused" if two else "folded")


def test_kernelbench_4_gamma_and_beta_of_zero_tie_everything() -> None:
    model = No83()
    nn.init.zeros_(model.norm.weight)
    want = call(copy.deepcopy(model), [image()])
    assert want.grads["norm.bias"].any()
    assert not want.grads["input 0"].any()
    check(model, image(), exact=True)
    check(model, image(), via="compile", exact=True)


def test_kernelbench_4_a_constant_image_is_as_eager_whatever_group_norm_rounds_to() -> None:
    for value in (0.0, 1.0, 0.1, -3.0):
        check(No83(), torch.full((2, 3, 6, 8, 8), value), exact=True)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e20])
def test_kernelbench_4_one_bad_value_poisons_its_own_group_only(bad: float, via: str) -> None:
    model, x = Tail(16, 8, clamp_chain(0.0, 1.0, 0.2)), noise(2, 16, 4, 6, 6)
    x[1, 5, 2, 3, 4] = bad
    out = call(copy.deepcopy(model), [x], grad=False).outs[0]
    assert int(out.isnan().sum()) == (0 if bad == 1e20 else 2 * 144)
    assert one(check(model, x, via=via, exact=True)).status == "folded"


def test_kernelbench_4_eps_zero_makes_a_constant_group_nan() -> None:
    model = Tail(8, 4, clamp_chain(0.0, 1.0, 0.2), eps=0.0)
    x = torch.ones(2, 8, 4, 4)
    x[1] = noise(8, 4, 4)
    assert call(copy.deepcopy(model), [x], grad=False).outs[0].isnan().any()
    check(model, x, exact=True)
    half = Tail(8, 4, clamp_chain(0.0, 1.0, 0.2), eps=1e-8, dtype=torch.half)  # rounds to 0 in half
    check(half, x.half(), exact=True)


def test_kernelbench_4_an_infinite_lower_bound_is_not_min_then_clamp_to_it() -> None:
    model = No83(INF, 1.0, 0.0)
    assert set(call(copy.deepcopy(model), [image()], grad=False).outs[0].flatten().tolist()) == {1.0}
    check(model, image(), exact=True)


def test_kernelbench_4_the_benchmarks_fix_is_not_a_constant() -> None:
    def fixed(h: Tensor) -> Tensor:
        return F.dropout(torch.clamp(torch.min(h, torch.tensor(0.5)), 0.0, 1.0), 0.2, True)

    model = Tail(16, 8, fixed)
    site = one(check(model, noise(2, 16, 4, 6, 6)))
    assert site.status == "fused"
    assert len(set(call(by_rewrite(model)[0], [noise(2, 16, 4, 6, 6)], grad=False).outs[0].flatten().tolist())) > 10


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_kernelbench_4_a_bound_that_may_change_or_wants_a_gradient_is_not_folded(kind: str, via: str) -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(8, 16)
            if kind == "parameter":
                self.low = nn.Parameter(torch.tensor(0.0))
            else:
                self.register_buffer("low", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(torch.clamp(torch.min(self.norm(x), self.low), 0.0, 1.0), 0.2, True)

    model, x = Bound(), noise(2, 16, 4, 6, 6)
    want = call(copy.deepcopy(model), [x])
    assert not want.outs[0].any()
    site = one(check(model, x, via=via, exact=True))
    assert site.status == "refused"
    assert site.reason


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_kernelbench_4_bounds_outside_halfs_range_raise_as_eager(via: str) -> None:
    model, x = Tail(8, 4, clamp_chain(0.0, 1e6, 0.2), dtype=torch.half), noise(2, 8, 4, 4, dtype=torch.half)
    with pytest.raises(RuntimeError) as eagers:
        model(x)
    if via == "rewrite":
        gm, report = by_rewrite(model)
        assert_reasons(report.sites)
        with pytest.raises(RuntimeError) as mine:
            gm(x)
        assert str(mine.value) == str(eagers.value)
    else:
        with pytest.raises(RuntimeError):
            by_compile(model)[0](x)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_kernelbench_4_eval_mode_is_zero_without_a_draw(via: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model = No83().eval()
    runner = by_rewrite(model)[0] if via == "rewrite" else by_compile(model)[0]
    torch.manual_seed(0)
    out = runner(image())
    assert out.requires_grad
    assert not out.any()
    assert torch.equal(torch.get_rng_state(), state)


def test_kernelbench_1_both_groups_of_problems_are_reported_once_each() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in PROBLEMS)
            randomise(self)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [tail(norm(x)) for norm, (tail, _, _) in zip(self.norms, PROBLEMS.values(), strict=True)]

    sites = check(Many(), noise(2, 8, 2, 4, 5), via="compile")
    assert statuses(sites) == [status for _, status, _ in PROBLEMS.values()]
