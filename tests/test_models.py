"""Blocks and small networks as real models build them (models.md), by hand in plain torch, against eager.

Each is run in train and eval mode: outputs, gradients, generator state, and how many sites end how, and why.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Outcome
from public_helpers import assert_reasons, by_compile, by_rewrite, call, noise, randomise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnfuse


def assert_close(got: Outcome, want: Outcome) -> None:
    """Another mask or rule is off by the size of the numbers; float32 rounding through a few layers is not."""
    assert torch.equal(got.rng, want.rng), "the generator does not end where eager leaves it"
    assert got.grads.keys() == want.grads.keys()
    pairs = list(zip(got.outs, want.outs, strict=True)) + [(got.grads[k], want.grads[k]) for k in want.grads]
    largest = max(float(theirs.abs().max()) for _, theirs in pairs if theirs is not None and theirs.numel())
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            # a gradient that is 0 but for rounding (a bias before a norm of its own) is as exact as its terms
            scale = max(float(theirs.abs().max()) if theirs.numel() else 0.0, 0.01 * largest)
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5 * scale)


def check_model(
    model: nn.Module, *inputs: Tensor, inner: str = "aot_eager", modes: tuple[bool, ...] = (True, False), **kwargs: Any
) -> list[gnfuse.Site]:
    """Compares in each mode and returns the sites of the first mode's graphs."""
    randomise(model)
    first: list[gnfuse.Site] = []
    for training in modes:
        eager, owner = copy.deepcopy(model).train(training), copy.deepcopy(model).train(training)
        compiled, sites = by_compile(owner, inner=inner, **kwargs)
        assert_close(call(compiled, inputs, owner=owner), call(eager, inputs))
        first = first or sites()
        assert_reasons(sites())
    return first


def counts(sites: list[gnfuse.Site]) -> dict[str, int]:
    return dict(Counter(site.status for site in sites))


class ResBlock(nn.Module):
    """diffusers' ResnetBlock2D/3D: norm, silu, conv, + time, norm, (scale-shift,) silu, dropout, conv, + shortcut."""

    def __init__(
        self, cin: int, cout: int, *, dims: int = 2, p: float = 0.1, groups: int = 4, scale_shift: bool = False
    ):
        super().__init__()
        conv = nn.Conv3d if dims == 3 else nn.Conv2d
        self.norm1, self.norm2 = nn.GroupNorm(groups, cin, eps=1e-6), nn.GroupNorm(groups, cout, eps=1e-6)
        self.conv1, self.conv2 = conv(cin, cout, 3, padding=1), conv(cout, cout, 3, padding=1)
        self.time = nn.Linear(16, 2 * cout if scale_shift else cout)
        self.drop, self.act, self.scale_shift = nn.Dropout(p), nn.SiLU(), scale_shift
        self.shortcut = nn.Identity() if cin == cout else conv(cin, cout, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(self.act(self.norm1(x)))
        t = self.time(self.act(t))
        t = t.reshape(*t.shape, *([1] * (x.ndim - 2)))
        if self.scale_shift:
            scale, shift = torch.chunk(t, 2, dim=1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h + t)
        h = self.conv2(self.drop(self.act(h)))
        return self.shortcut(x) + h


def test_a_diffusion_res_block_has_two_fused_sites() -> None:
    sites = check_model(ResBlock(8, 16), noise(2, 8, 8, 8), noise(2, 16))
    assert counts(sites) == {"fused": 2}
    assert "silu → dropout(0.1)" in sites[1].pattern


def test_a_res_block_with_dropout_zero_ends_its_chain_at_the_activation() -> None:
    sites = check_model(ResBlock(8, 8, p=0.0), noise(2, 8, 8, 8), noise(2, 16))
    assert counts(sites) == {"fused": 2}
    assert all("dropout" not in site.result for site in sites)


def test_a_channels_last_res_block_is_fused_and_keeps_its_layout() -> None:
    model = ResBlock(8, 16).to(memory_format=torch.channels_last)
    x = noise(2, 8, 8, 8).to(memory_format=torch.channels_last)
    assert counts(check_model(model, x, noise(2, 16))) == {"fused": 2}


def test_a_res_block_with_a_dynamic_batch_is_as_eager() -> None:
    model = ResBlock(8, 8)
    randomise(model)
    owner = copy.deepcopy(model)
    compiled, sites = by_compile(owner, dynamic=True)
    for n in (2, 3, 5):
        inputs = (noise(n, 8, 8, 8), noise(n, 16))
        assert_close(call(compiled, inputs, owner=owner), call(model, inputs))
    assert counts(sites()) == {"fused": 2}


def test_a_scale_shift_block_refuses_the_second_site_for_its_tensor_operand() -> None:
    sites = check_model(ResBlock(8, 16, scale_shift=True), noise(2, 8, 8, 8), noise(2, 16))
    assert [s.status for s in sites] == ["fused", "refused"]
    assert "tensor" in sites[1].reason
    assert "mul" in sites[1].stopped_at + sites[1].node


def monai_unit(order: str, act: nn.Module, dims: int, p: float = 0.1) -> nn.Sequential:
    """MONAI's Convolution with its ADN block: "NDA" is norm, dropout, activation."""
    conv, width = (nn.Conv3d, 8) if dims == 3 else (nn.Conv2d, 8)
    parts = {"N": nn.GroupNorm(2, width), "D": nn.Dropout(p), "A": act}
    unit = nn.Sequential(conv(3, width, 3, padding=1))
    for letter in order:
        unit.add_module(letter, parts[letter])
    unit.add_module("next", conv(width, 4, 3, padding=1))
    return unit


MONAI = {
    "NDA leaky_relu": ("NDA", lambda: nn.LeakyReLU(0.1, inplace=True), "dropout(0.1) → leaky_relu(0.1)"),
    "NDA relu": ("NDA", nn.ReLU, "dropout(0.1) → relu"),
    "NAD leaky_relu": ("NAD", lambda: nn.LeakyReLU(0.1, inplace=True), "leaky_relu(0.1) → dropout(0.1)"),
    "NAD relu6": ("NAD", nn.ReLU6, "hardtanh(0, 6) → dropout(0.1)"),
    "NA elu": ("NA", lambda: nn.ELU(inplace=True), "elu(1)"),
}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", MONAI)
def test_a_monai_unit_is_one_fused_site_in_either_order(name: str, dims: int) -> None:
    order, act, pattern = MONAI[name]
    sites = check_model(monai_unit(order, act(), dims), noise(2, 3, *[6] * dims))
    assert counts(sites) == {"fused": 1}
    assert pattern in sites[0].pattern


def test_a_monai_unit_inside_inductor_keeps_eagers_mask() -> None:
    (site,) = check_model(monai_unit("NAD", nn.ReLU6(), 2), noise(2, 3, 6, 6), inner="inductor", modes=(True,))
    assert site.status == "fused"


def test_monais_default_prelu_ends_the_chain() -> None:
    (site,) = check_model(monai_unit("NDA", nn.PReLU(), 3), noise(2, 3, 6, 6, 6))
    assert "prelu" in site.reason
    assert "prelu" not in site.result


class NormAct(nn.Module):
    """timm's GroupNormAct: F.group_norm with its own weights, an Identity where dropout could be, the activation."""

    def __init__(self, channels: int, groups: int, act: nn.Module):
        super().__init__()
        self.weight, self.bias = nn.Parameter(1 + noise(channels)), nn.Parameter(noise(channels, seed=5))
        self.groups, self.drop, self.act = groups, nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, self.groups, self.weight, self.bias, 1e-5)
        return self.act(self.drop(x))


class PreActBottleneck(nn.Module):
    """timm's resnetv2: the first activation feeds the shortcut's convolution and the block's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = NormAct(8, 4, nn.ReLU(inplace=True)), NormAct(16, 4, nn.ReLU(inplace=True))
        self.down, self.conv1, self.conv2 = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        return self.conv2(self.norm2(self.conv1(h))) + self.down(h)


def test_a_timm_pre_activation_block_is_fused_through_its_identities() -> None:
    sites = check_model(PreActBottleneck(), noise(2, 8, 7, 5))
    assert counts(sites) == {"fused": 2}
    assert all(site.pattern == "group_norm → relu" for site in sites)
    _, report = by_rewrite(PreActBottleneck())
    assert counts(list(report.sites)) == {"fused": 2}


class Residual(nn.Module):
    """ResNet's BasicBlock with GroupNorm: the second norm is added to the shortcut in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2, self.act = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        h += x
        return self.act(h)


def test_a_residual_block_fuses_the_first_norm_and_refuses_the_one_with_the_addition() -> None:
    sites = check_model(Residual(), noise(2, 8, 7, 5))
    assert [s.status for s in sites] == ["fused", "refused"]
    assert "tensor" in sites[1].reason


class Swish(nn.Module):
    """Chameleon's VQ-VAE block: h *= sigmoid(h), then dropout and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 8, eps=1e-6), nn.GroupNorm(4, 8, eps=1e-6)
        self.conv1, self.conv2, self.drop = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        h *= torch.sigmoid(h)
        h = self.norm2(self.conv1(h))
        h *= torch.sigmoid(h)
        return x + self.conv2(self.drop(h))


def test_a_hand_written_in_place_swish_block_is_as_eager_and_explained() -> None:
    sites = check_model(Swish(), noise(2, 8, 6, 6))
    assert len(sites) == 2
    assert all(site.status == "fused" and "silu" in site.pattern for site in sites) or all(s.reason for s in sites)


class AdaptiveNorm(nn.Module):
    """k-diffusion's AdaGN: a norm without parameters, addcmul with a mapped condition, gelu, conv, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mapper, self.conv, self.drop = nn.Linear(16, 16), nn.Conv2d(8, 8, 3, padding=1), nn.Dropout2d(0.1)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        weight, bias = self.mapper(cond)[..., None, None].chunk(2, dim=1)
        h = F.group_norm(x, 2, eps=1e-5)
        return x + self.drop(self.conv(F.gelu(torch.addcmul(bias, h, weight + 1))))


def test_an_adaptive_norm_is_refused_at_its_addcmul() -> None:
    (site,) = check_model(AdaptiveNorm(), noise(2, 8, 6, 6), noise(2, 16))
    assert site.status == "refused"
    assert "addcmul" in site.reason + site.stopped_at


class DemucsLayer(nn.Module):
    """Demucs' encoder layer: conv, norm, gelu, 1x1 conv to twice the channels, norm, glu; rank 3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rewrite = nn.Conv1d(2, 8, 8, 4), nn.Conv1d(8, 16, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.GroupNorm(1, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.norm2(self.rewrite(F.gelu(self.norm1(self.conv(x))))), dim=1)


def test_a_demucs_layer_fuses_its_gelu_and_refuses_its_glu() -> None:
    sites = check_model(DemucsLayer(), noise(2, 2, 64))
    assert [s.status for s in sites] == ["fused", "refused"]
    assert "glu" in sites[1].reason + sites[1].stopped_at


class SqueezeExcite(nn.Module):
    """MobileNetV3 with GroupNorm: hardswish with two users (the pooled branch and the product)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.Hardswish(inplace=True)
        self.squeeze, self.expand = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.conv(x)))
        s = F.adaptive_avg_pool2d(h, 1)
        return h * F.hardsigmoid(self.expand(F.relu(self.squeeze(s))))


def test_a_squeeze_excite_block_keeps_its_activation_for_both_users() -> None:
    (site,) = check_model(SqueezeExcite(), noise(2, 3, 8, 7))
    assert site.status == "fused"
    assert site.pattern == "group_norm → hardswish"


class Attention(nn.Module):
    """A U-Net's attention: the norm feeds a reshape."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, channels),
            nn.Linear(channels, 3 * channels),
            nn.Linear(channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        h = self.out(F.scaled_dot_product_attention(q, k, v))
        return x + h.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """A DDPM-style U-Net: two levels, a res block each way, attention in the middle (2-D), norm-silu-conv out."""

    def __init__(self, dims: int):
        super().__init__()
        conv = nn.Conv3d if dims == 3 else nn.Conv2d
        block = {"dims": dims, "p": 0.1, "groups": 4}
        self.inp, self.down = conv(1, 8, 3, padding=1), conv(8, 8, 3, stride=2, padding=1)
        self.enc, self.mid, self.dec = ResBlock(8, 8, **block), ResBlock(8, 16, **block), ResBlock(24, 8, **block)
        self.attention = Attention(16) if dims == 2 else nn.Identity()
        self.norm, self.out = nn.GroupNorm(4, 8), conv(8, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = self.enc(self.inp(x), t)
        h = self.attention(self.mid(self.down(skip), t))
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.dec(torch.cat([h, skip], dim=1), t)
        return self.out(F.silu(self.norm(h)))


def unet_inputs(dims: int, n: int = 2) -> tuple[Tensor, Tensor]:
    return noise(n, 1, *[8] * dims), noise(n, 16)


def test_a_2d_unet_fuses_every_chain_and_refuses_only_the_attention_norm() -> None:
    sites = check_model(UNet(2), *unet_inputs(2))
    assert counts(sites) == {"fused": 7, "refused": 1}
    assert sum("dropout(0.1)" in site.pattern for site in sites) == 3
    (refused,) = (site for site in sites if site.status == "refused")
    assert "nothing to fuse" in refused.reason or refused.reason


def test_a_3d_unet_fuses_every_chain() -> None:
    sites = check_model(UNet(3), *unet_inputs(3))
    assert counts(sites) == {"fused": 7}


def test_a_checkpointed_unet_draws_its_masks_again_in_backward() -> None:
    class Checkpointed(UNet):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            skip = checkpoint(self.enc, self.inp(x), t, use_reentrant=False)
            h = checkpoint(self.mid, self.down(skip), t, use_reentrant=False)
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            return self.out(F.silu(self.norm(self.dec(torch.cat([h, skip], dim=1), t))))

    sites = check_model(Checkpointed(3), *unet_inputs(3), modes=(True,))
    assert counts(sites) == {"fused": 7}
    assert {site.graph for site in sites} != {""}


def test_three_steps_of_training_a_unet_follow_eagers() -> None:
    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = UNet(2)
        run = by_compile(model)[0] if compiled else model
        optimiser, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
        for step in range(3):
            torch.manual_seed(step)
            loss = (run(*unet_inputs(2)) - 1).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        return losses

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


def test_a_unet_in_bf16_is_as_near_to_float32_as_eager() -> None:
    model = UNet(2).to(torch.bfloat16).eval()
    inputs = [x.to(torch.bfloat16) for x in unet_inputs(2)]
    true = call(copy.deepcopy(model).float(), [x.float() for x in inputs], grad=False).outs[0]
    got = call(by_compile(copy.deepcopy(model))[0], inputs, grad=False).outs[0]
    want = call(model, inputs, grad=False).outs[0]
    assert got.dtype == torch.bfloat16
    assert (got.float() - true).abs().max() <= 1.5 * (want.float() - true).abs().max() + 0.01


def test_a_model_without_a_group_norm_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.Dropout(0.1))
    assert check_model(model, noise(2, 3, 6, 6)) == []
    gm = torch.fx.symbolic_trace(model)
    before = str(gm.graph)
    gm, report = gnfuse.rewrite(gm)
    assert str(gm.graph) == before
    assert not report


def test_explain_counts_the_sites_of_a_unet_and_runs_nothing() -> None:
    model = UNet(2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    report = gnfuse.explain(model, *unet_inputs(2))
    assert torch.equal(torch.get_rng_state(), state)
    # what the default backend would do: at this size only the sites that draw a mask are worth a kernel of their own
    assert counts(list(report.sites)) == {"fused": 3, "refused": 5}
    assert all("dropout" in site.pattern for site in report.sites if site.status == "fused")
    assert sum("no gain over Inductor" in site.reason for site in report.sites) == 4
    assert all(site.source for site in report.sites)
    assert gnfuse.reports() == []
