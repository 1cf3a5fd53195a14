"""public-reports.md §5: graph forms that the matcher survives, F1 to F14."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from public_helpers import (
    Tail,
    assert_reasons,
    by_rewrite,
    call,
    check,
    compare_closely,
    noise,
    one,
    randomise,
    relu_dropout,
    statuses,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gnfuse

SPELLINGS = {
    "clamp(0, 1)": [
        lambda h: h.clamp(0, 1),
        lambda h: torch.clamp(h, 0, 1),
        lambda h: torch.clamp(h, min=0, max=1),
        lambda h: torch.clamp(input=h, min=0, max=1),
        lambda h: torch.clip(h, 0, 1),
        lambda h: h.clip(0, 1),
        lambda h: h.clip(min=0.0, max=1.0),
        lambda h: h.clamp_(0, 1),
        lambda h: torch.clamp_(h, 0, 1),
    ],
    "clamp_max(1)": [
        lambda h: torch.clamp(input=h, max=1),
        lambda h: torch.clamp(h, None, 1.0),
        lambda h: torch.clamp(h, max=1.0),
        lambda h: h.clamp(None, 1),
        lambda h: torch.clamp_max(h, 1),
        lambda h: h.clamp_max(1.0),
        lambda h: h.clamp_max_(1),
    ],
    "clamp_min(0)": [
        lambda h: torch.clamp_min(h, 0),
        lambda h: h.clamp_min(0.0),
        lambda h: torch.clamp(h, 0),
        lambda h: h.clamp(min=0),
    ],
    "hardtanh(0, 6)": [
        lambda h: F.hardtanh(h, 0, 6),
        lambda h: F.hardtanh(h, min_val=0.0, max_val=6.0),
        F.relu6,
        nn.Hardtanh(0, 6),
        nn.Hardtanh(0, 6, inplace=True),
        nn.ReLU6(),
        nn.ReLU6(inplace=True),
    ],
    "minimum(1)": [
        lambda h: torch.min(h, torch.tensor(1.0)),
        lambda h: torch.min(torch.tensor(1.0), h),
        lambda h: torch.minimum(h, torch.tensor(1.0)),
        lambda h: torch.minimum(torch.ones(()), h),
        lambda h: h.min(torch.tensor(1.0)),
        lambda h: h.minimum(torch.full((), 1.0)),
        lambda h: torch.min(h, other=torch.tensor(1)),
        lambda h: torch.minimum(input=h, other=torch.tensor(1.0)),
        lambda h: torch.min(h, torch.tensor(1.0, device=h.device)),
        lambda h: torch.min(h, torch.full((), 1.0, dtype=h.dtype, device=h.device)),
    ],
    "relu": [F.relu, torch.relu, lambda h: h.relu(), lambda h: h.relu_(), nn.ReLU(), nn.ReLU(inplace=True)],
}
FORMS = [(name, i) for name, forms in SPELLINGS.items() for i in range(len(forms))]


class WithTail(Tail):
    """A tail that may be a module: it then shows as call_module."""

    def __init__(self, tail: Any):
        super().__init__(8, 4, tail)


@pytest.mark.parametrize(("name", "index"), FORMS)
def test_F1_every_spelling_is_the_one_op(name: str, index: int) -> None:
    site = one(check(WithTail(SPELLINGS[name][index]), noise(2, 8, 3, 3)))
    assert site.status == "fused"
    assert site.pattern == f"group_norm → {name}"


@pytest.mark.parametrize("name", SPELLINGS)
def test_F1_every_spelling_is_the_one_op_in_a_dynamo_graph(name: str) -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in SPELLINGS[name])
            self.tails = SPELLINGS[name]

        def forward(self, x: Tensor) -> list[Tensor]:
            return [tail(norm(x)) for norm, tail in zip(self.norms, self.tails, strict=True)]

    sites = check(All(), noise(2, 8, 3, 3), via="compile")
    assert {site.pattern for site in sites} == {f"group_norm → {name}"}
    assert len(sites) == len(SPELLINGS[name])


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_F2_back_to_back_sites_are_both_replaced(via: str) -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.5))
    randomise(model)
    assert statuses(check(model, noise(2, 8, 3, 3), via=via)) == ["fused", "fused"]
    folds = nn.Sequential(
        Tail(8, 4, lambda h: torch.clamp(torch.minimum(h, torch.tensor(0.0)), 0.0, 1.0)), nn.GroupNorm(4, 8), nn.SiLU()
    )
    assert statuses(check(folds, noise(2, 8, 3, 3), via=via)) == ["folded", "fused"]


USERS = {
    "relu to two": (lambda h: two(F.relu(h)), "fused"),
    "norm to two": (lambda h: (F.relu(h), F.silu(h)), "refused"),
    "silu then dropout, silu also returned": (lambda h: both(F.silu(h), relu_dropout), "fused"),
    "cat": (lambda h: torch.cat([F.relu(h), h], 1), "refused"),
    "min to clamp and out": (lambda h: both(torch.minimum(h, torch.tensor(0.0)), lambda m: m.clamp(0, 1)), "fused"),
    "metadata only": (lambda h: F.relu(h) * h.shape[1], "fused"),
}


def two(h: Tensor) -> tuple[Tensor, Tensor]:
    return h + 1, torch.sin(h)


def both(h: Tensor, tail: Any) -> tuple[Tensor, Tensor]:
    return h, tail(h)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("name", USERS)
def test_F4_a_value_with_several_users_ends_the_chain_and_stays(name: str, via: str) -> None:
    tail, status = USERS[name]
    site = one(check(Tail(8, 4, tail), noise(2, 8, 3, 3), via=via))
    assert site.status == status
    if status == "refused":
        assert site.reason


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("training", [True, False])
def test_F5_identities_and_inactive_dropouts_are_looked_through(training: bool, via: str) -> None:
    model = nn.Sequential(
        nn.GroupNorm(4, 8), nn.Identity(), nn.Dropout(0.0), nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.5)
    ).train(training)
    randomise(model)
    site = one(check(model, noise(2, 8, 3, 3), via=via))
    assert site.status == "fused"
    assert "relu" in site.pattern
    assert "dropout(0)" not in site.result


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("training", [True, False])
def test_F6_dropout_before_the_activation_is_one_chain(training: bool, via: str) -> None:
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.Dropout(0.1), nn.LeakyReLU(0.1, inplace=True)).train(training)
    site = one(check(model, noise(2, 8, 3, 4, 5), via=via))
    assert site.status == "fused"
    assert "leaky_relu" in site.pattern
    if training:
        assert site.pattern.index("dropout") < site.pattern.index("leaky_relu")


@pytest.mark.parametrize("returned", ["product", "old name", "both"])
def test_F7_a_hand_written_in_place_swish_keeps_eagers_result_and_old_name(returned: str) -> None:
    def tail(h: Tensor) -> tuple[Tensor, ...]:
        old = h
        h *= torch.sigmoid(h)
        return {"product": (h,), "old name": (old + 1,), "both": (h, old * 2)}[returned]

    def spelled(h: Tensor) -> tuple[Tensor, ...]:
        product = h.mul_(torch.sigmoid(h))
        return {"product": (product,), "old name": (h + 1,), "both": (product, h * 2)}[returned]

    x = noise(2, 8, 3, 3)
    assert_reasons(check(Tail(8, 4, tail), x, via="compile"))
    assert_reasons(check(Tail(8, 4, spelled), x))
    with_dropout = Tail(8, 4, lambda h: F.dropout(tail(h)[0], 0.1, True))
    assert_reasons(check(with_dropout, x, via="compile"))


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_F9_one_module_at_two_places_is_edited_at_the_node_only(via: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.GroupNorm(4, 8), nn.GroupNorm(2, 8), nn.ReLU()
            randomise(self)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a = self.act(self.first(x))  # one activation twice
            b = self.act(self.second(x))
            c = torch.sigmoid(self.first(x * 2))  # one norm twice
            return a, b, c, self.act(x)  # and the activation outside any site

    sites = check(Shared(), noise(2, 8, 3, 3), via=via)
    assert statuses(sites) == ["fused"] * 3
    if via == "rewrite":
        gm, _ = by_rewrite(Shared())
        assert isinstance(gm.get_submodule("act"), nn.ReLU)
        assert gm.state_dict().keys() == Shared().state_dict().keys()


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("form", ["addcmul", "mul then add", "add a residual", "silu then scale"])
def test_F10_tensor_operands_end_the_chain_with_a_reason(form: str, via: str) -> None:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8, affine=form != "addcmul")

        def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            h = self.norm(x)
            if form == "addcmul":
                return F.dropout(F.silu(torch.addcmul(shift, h, scale + 1)), 0.1, True)
            if form == "mul then add":
                return F.dropout(F.silu(h * (1 + scale) + shift), 0.1, True)
            return F.relu(h + x) if form == "add a residual" else F.silu(h) * scale

    site = one(check(Adaptive(), noise(2, 8, 3, 3), noise(2, 8, 1, 1), noise(2, 8, 1, 1, seed=9), via=via))
    assert site.status == ("fused" if form == "silu then scale" else "refused")
    assert site.reason


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_F12_glu_halves_the_channels_and_is_refused(via: str) -> None:
    site = one(check(Tail(8, 1, lambda h: F.glu(h, dim=1)), noise(2, 8, 12), via=via))
    assert site.status == "refused"
    assert "glu" in site.reason
    after = one(check(Tail(8, 1, lambda h: F.glu(F.gelu(h), dim=1)), noise(2, 8, 12), via=via))
    assert after.status == "fused"


@pytest.mark.parametrize("training", [True, False])
def test_F13_a_baked_training_flag_is_said(training: bool) -> None:
    class Baked(Tail):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.relu(self.norm(x)), 0.5, self.training)

    _, report = by_rewrite(Baked(8, 4, F.relu).train(training))
    said = " ".join([*report.notes, *one(report.sites).notes])
    assert re.search(rf"training flag\b.* frozen.*{training}", said)


def test_F14_parametrized_norms_are_left_alone() -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    model = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU())
    randomise(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    x = noise(2, 8, 3, 3)
    gm = torch.fx.symbolic_trace(copy.deepcopy(model))
    gm, report = gnfuse.rewrite(gm)
    compare_closely(call(gm, [x]), call(model, [x]))
    for site in report.sites:
        assert site.status == "refused"
        assert "parametri" in site.reason
    check(model, x, via="compile")


def test_F14_weight_normalised_convolutions_around_a_site_stay() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), nn.GroupNorm(4, 8), nn.ReLU())
    check(model, noise(2, 3, 6, 6), via="compile")


def test_F14_fusing_a_convolution_and_a_batch_norm_around_a_site_is_kept() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv, norm = nn.Conv2d(3, 8, 3).eval(), nn.BatchNorm2d(8).eval()
            self.conv, self.norm = nn.utils.fusion.fuse_conv_bn_eval(conv, norm), nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(self.conv(x)))

    assert one(check(Fused(), noise(2, 3, 6, 6))).status == "fused"
