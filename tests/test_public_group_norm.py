"""public-reports.md §1: reports about group_norm under torch.compile and in fused kernels: accuracy and layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from public_helpers import (
    DEVICES,
    Tail,
    by_compile,
    by_rewrite,
    call,
    check,
    clamp_chain,
    noise,
    one,
)
from torch import Tensor, nn


class NormNormLog(nn.Module):
    """Eval BatchNorm, ELU, GroupNorm, log(clamp): the log shows what GroupNorm leaves of a constant group."""

    def __init__(self, before: nn.Module, groups: int, channels: int):
        super().__init__()
        self.bn, self.gn = before, nn.GroupNorm(groups, channels)
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.elu(self.bn(x))
        return torch.log(self.gn(h).clamp(min=1e-6)), h


def constant_channels(*shape: int) -> Tensor:
    return noise(*shape[:2]).reshape(*shape[:2], *([1] * (len(shape) - 2))).expand(shape).contiguous()


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_G1_the_log_of_a_constant_group_is_eagers(via: str) -> None:
    model, x = NormNormLog(nn.BatchNorm1d(10), 10, 10), torch.ones(6, 10, 12)
    assert one(check(model, x, via=via, exact=True, grad=False)).status == "fused"


def test_G1_inductor_around_the_site_does_not_decompose_its_group_norm() -> None:
    model, x = NormNormLog(nn.BatchNorm1d(10), 10, 10), torch.ones(6, 10, 12)
    with torch.no_grad():
        got, h = by_compile(copy.deepcopy(model), inner="inductor")[0](x)
        # Inductor's BatchNorm may round otherwise: eager's GroupNorm of what Inductor's gave
        want = torch.log(F.group_norm(h, 10, model.gn.weight, model.gn.bias).clamp(min=1e-6))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("groups", [8, 4, 1])
@pytest.mark.parametrize("kind", ["constant channels", "random"])
def test_G2_the_log_after_a_2d_group_norm_is_eagers(kind: str, groups: int) -> None:
    x = constant_channels(4, 8, 6, 6) if kind == "constant channels" else noise(4, 8, 6, 6)
    check(NormNormLog(nn.BatchNorm2d(8), groups, 8), x, exact=True, grad=False)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("consumer", ["addcdiv", "div", "log"])
def test_G3_a_division_by_a_group_norm_is_as_eager_and_the_report_warns(consumer: str, via: str) -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.gn = nn.BatchNorm2d(8).eval(), nn.GroupNorm(4, 8)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            small = torch.abs(self.gn(self.bn(x))) + 1e-4
            if consumer == "addcdiv":
                return torch.addcdiv(x, t, small)
            return t / small if consumer == "div" else torch.log(small)

    site = one(check(Divides(), constant_channels(2, 8, 5, 5), noise(2, 8, 5, 5), via=via, exact=True, grad=False))
    assert site.status == "fused"
    assert "ill-conditioned" in " ".join(site.notes)


def test_G5_a_group_of_millions_of_elements_is_within_1e_5_of_float64() -> None:
    x = torch.rand(1, 8, 72, 64, 64, generator=torch.Generator().manual_seed(0))
    model = Tail(8, 1, F.relu)
    check(model, x)
    got = call(by_rewrite(model)[0], [x], grad=False).outs[0]
    true = call(copy.deepcopy(model).double(), [x.double()], grad=False).outs[0]
    assert (got - true).abs().max() / true.abs().max() < 1e-5


@pytest.mark.gpu
def test_G5_a_group_of_38_million_elements_is_within_1e_5_of_float64_on_the_gpu() -> None:
    x = torch.rand(1, 8, 72, 256, 256, generator=torch.Generator().manual_seed(0)).cuda()
    model = Tail(8, 1, F.relu).cuda()
    got = call(by_compile(model)[0], [x], grad=False).outs[0]
    true = call(copy.deepcopy(model).double(), [x.double()], grad=False).outs[0]
    assert (got - true).abs().max() / true.abs().max() < 1e-5


SPREADS = {
    "mean 1e4": lambda: 1e4 + noise(1, 8, 32, 32),
    "mean 1e6": lambda: 1e6 + noise(1, 8, 32, 32),
    "all ones": lambda: torch.ones(1, 8, 32, 32),
    "one channels_last mean 1e4": lambda: (1e4 + noise(1, 8, 32, 32)).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tail", [F.relu, F.silu])
@pytest.mark.parametrize("spread", SPREADS)
def test_G6_a_large_mean_costs_no_more_accuracy_than_in_eager(spread: str, tail: Any, device: str) -> None:
    model, x = Tail(8, 2, tail).to(device), SPREADS[spread]().to(device)
    via = "rewrite" if device == "cpu" else "compile"
    check(model, x, via=via, grad=False)
    assert call(by_rewrite(model)[0], [x], grad=False).outs[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("huge", [1e18, 1e19, 1e20, 1e38, 3e38])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_G7_a_huge_element_overflows_the_variance_as_in_eager(layout: Any, huge: float, device: str) -> None:
    x = noise(2, 8, 6, 6)
    x[0, 0, 0, 0] = huge
    x = x.to(device, memory_format=layout)
    plain = Tail(8, 4, F.relu).to(device)
    out = call(copy.deepcopy(plain), [x], grad=False).outs[0]
    if huge == 1e20 and device == "cpu":
        beta = F.relu(plain.norm.bias[:2]).detach()
        assert torch.equal(out[0, :2], beta[:, None, None].expand(2, 6, 6))
    got = call(by_compile(copy.deepcopy(plain))[0], [x], grad=False).outs[0]
    assert torch.equal(got.isnan(), out.isnan())
    torch.testing.assert_close(got, out, equal_nan=True)
    folded = one(check(Tail(8, 4, clamp_chain(0.0, 1.0, 0.2)).to(device), x, exact=True, grad=False))
    if device == "cpu":
        assert folded.status == "folded"


def test_G7_gradients_of_a_folded_chain_with_a_huge_element_are_eagers() -> None:
    x = noise(2, 8, 6, 6)
    x[0, 0, 0, 0] = 1e20
    model = Tail(8, 4, clamp_chain(0.0, 1.0, 0.2))
    check(model, x, exact=True)
    nn.init.zeros_(model.norm.bias)
    check(model, x, exact=True)  # rstd is 0, GN is +-0.0: every element of the group is a tie


@pytest.mark.parametrize("device", DEVICES)
def test_G9_the_square_of_a_half_does_not_overflow(device: str) -> None:
    x = torch.full((1, 4, 8, 8), 300.0).half()
    x[0, 0, 0, 0] = -300.0
    via = "rewrite" if device == "cpu" else "compile"
    check(Tail(4, 2, F.relu, dtype=torch.half).to(device), x.to(device), via=via, grad=False)
    pair = torch.tensor([6e4, -6e4]).half().reshape(1, 2, 1, 1).to(device)
    model = Tail(2, 1, lambda h: F.hardtanh(h, -2.0, 2.0), dtype=torch.half, affine=False).to(device)
    check(model, pair, via=via, grad=False)
    got = call(by_rewrite(model)[0], [pair], grad=False).outs[0]
    assert got.flatten().tolist() == pytest.approx([1.0, -1.0], abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_G10_a_half_group_of_more_than_65504_elements_counts_in_float(dtype: torch.dtype) -> None:
    model, x = Tail(2, 1, F.silu, dtype=dtype), noise(1, 2, 256, 256, dtype=dtype) + 1
    check(model, x)
    got = call(by_rewrite(model)[0], [x], grad=False).outs[0]
    want = call(copy.deepcopy(model).float(), [x.float()], grad=False).outs[0]
    torch.testing.assert_close(got.float(), want, atol=5e-3 if dtype == torch.half else 4e-2, rtol=1e-2)


CHANNELS_LAST = {
    "2d": lambda: noise(4, 32, 24, 24).to(memory_format=torch.channels_last),
    "3d": lambda: noise(2, 32, 5, 6, 7).to(memory_format=torch.channels_last_3d),
    "2d of one pixel": lambda: noise(4, 32, 1, 1).to(memory_format=torch.channels_last),
    "2d of one channel a group": lambda: noise(2, 8, 7, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("layout", CHANNELS_LAST)
def test_G11_output_strides_are_those_of_the_running_torchs_group_norm(layout: str, via: str, device: str) -> None:
    x = CHANNELS_LAST[layout]().to(device)
    check(Tail(x.shape[1], 8, F.silu).to(device), x, via=via)  # compares strides
    check(Tail(x.shape[1], 8, lambda h: F.dropout(h.clamp(0, 1), 0.3, True)).to(device), x, via=via)


@pytest.mark.parametrize("device", DEVICES)
def test_G12_the_weight_gradient_of_bf16_channels_last_is_as_near_as_eagers(device: str) -> None:
    x = noise(16, 128, 32, 32, dtype=torch.bfloat16).to(device, memory_format=torch.channels_last)
    via = "rewrite" if device == "cpu" else "compile"
    check(Tail(128, 32, F.silu, dtype=torch.bfloat16).to(device), x, via=via)


@pytest.mark.parametrize("shape", [(1, 960, 12, 12), (2, 64, 42, 42)])
def test_G14_a_channels_last_site_is_fused_or_refused_with_a_reason(shape: tuple[int, ...]) -> None:
    """Its speed is measured in benchmarks/, not here."""
    sites = check(Tail(shape[1], 32, F.silu), noise(*shape).to(memory_format=torch.channels_last))
    assert one(sites).status == "fused" or one(sites).reason
