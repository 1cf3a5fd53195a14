"""The ten facts of public-reports.md §0 that decide the design, A to J: each as a rule gnfuse keeps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from public_helpers import (
    Tail,
    Values,
    by_compile,
    by_rewrite,
    call,
    check,
    clamp_chain,
    noise,
    one,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class No83(nn.Module):
    """KernelBench level 2 no. 83 without its convolution."""

    def __init__(self, low: float = 0.0, high: float = 1.0, p: float = 0.2):
        super().__init__()
        self.norm = nn.GroupNorm(8, 16)
        self.low, self.high = low, high
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = torch.min(h, torch.tensor(self.low, device=h.device))
        return self.drop(torch.clamp(h, min=self.low, max=self.high))


def ones(out: Tensor) -> Tensor:
    return torch.ones_like(out)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_A_a_constant_fold_keeps_the_gradient_of_ties_when_gamma_is_zero(via: str) -> None:
    model = No83()
    nn.init.zeros_(model.norm.weight)
    x = noise(2, 16, 4, 6, 6)
    eager = call(copy.deepcopy(model), [x], seed_gradient=ones)
    assert not eager.outs[0].any()
    assert eager.grads["norm.bias"].abs().max() > 100
    assert eager.grads["norm.weight"].abs().max() > 1
    assert one(check(model, x, via=via, exact=True, seed_gradient=ones)).status == "folded"


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_A_the_folded_gradient_is_zero_without_ties(via: str) -> None:
    model, x = No83(), noise(2, 16, 4, 6, 6)
    site = one(check(model, x, via=via, exact=True))
    assert site.status == "folded"
    assert site.guard == "local"
    assert site.proof


@pytest.mark.parametrize(("shape", "groups"), [((2, 1, 1, 5), 1), ((2, 3, 5), 3), ((2, 4, 3), 2), ((2, 8, 5, 5), 4)])
def test_A_ties_of_small_groups_are_where_eagers_group_norm_has_them(shape: tuple[int, ...], groups: int) -> None:
    """Whole numbers repeat, so the bound, one of eager's outputs, ties with several of them, or misses by an ulp."""
    for seed in range(60):
        x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()
        model = Tail(shape[1], groups, F.relu)
        low = model.norm(x).flatten()[seed % x.numel()].item()
        model.tail = clamp_chain(low, low + 1, 0.3)
        assert one(check(model, x, exact=True, seed_gradient=ones)).status == "folded", seed


TIES = {
    "minimum": (lambda h: torch.minimum(h, torch.tensor(1.0)), 1.0),
    "maximum": (lambda h: torch.maximum(h, torch.tensor(1.0)), 1.0),
    "min_of_two": (lambda h: torch.min(h, torch.tensor(1.0)), 1.0),
    "clamp_low": (lambda h: h.clamp(1.0, 2.0), 1.0),
    "clamp_high": (lambda h: h.clamp(0.0, 1.0), 1.0),
    "clamp_min": (lambda h: h.clamp_min(1.0), 1.0),
    "clamp_max": (lambda h: torch.clamp_max(h, 1.0), 1.0),
    "relu": (F.relu, 0.0),
    "relu6_low": (F.relu6, 0.0),
    "relu6_high": (F.relu6, 6.0),
    "hardtanh_low": (F.hardtanh, -1.0),
    "hardtanh_high": (F.hardtanh, 1.0),
    "threshold": (lambda h: F.threshold(h, 0.5, 0.0), 0.5),
    "leaky_relu": (lambda h: F.leaky_relu(h, 0.1), 0.0),
    "abs": (torch.abs, 0.0),
}


@pytest.mark.parametrize("name", TIES)
def test_B_the_gradient_at_a_tie_is_the_running_torchs(name: str) -> None:
    tail, at = TIES[name]
    model = Values([at, math.nextafter(at, -9.0), at - 0.5, at + 0.5], tail)
    check(model, model.zeros(), seed_gradient=ones)


@pytest.mark.parametrize("name", [name for name in TIES if "hardtanh" not in name and "relu6" not in name])
def test_C_the_gradient_at_nan_is_the_running_torchs(name: str) -> None:
    model = Values([math.nan, 0.25, math.nan, 3.0], TIES[name][0])
    check(model, model.zeros(), seed_gradient=ones)


@pytest.mark.parametrize("tail", [F.hardtanh, F.relu6])
def test_C_the_gradient_of_hardtanh_at_nan_is_one_of_eagers_two(tail: Any) -> None:
    """On the CPU eager gives 0 in vector lanes and the upstream gradient in scalar tails, within one tensor."""
    t = torch.full((20,), math.nan, requires_grad=True)
    tail(t).sum().backward()
    assert set(t.grad.tolist()) <= {0.0, 1.0}
    model = Values([math.nan, 0.25], tail)
    want = call(copy.deepcopy(model), [model.zeros()], seed_gradient=ones)
    got = call(by_rewrite(model)[0], [model.zeros()], seed_gradient=ones)
    assert_equal(got.outs[0], want.outs[0])
    at_nan, inside = got.grads["norm.bias"].tolist()
    assert inside == want.grads["norm.bias"][1] == 18
    assert at_nan in (0, 18)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_C_min_then_clamp_gives_nan_with_gradient_zero_at_nan(via: str) -> None:
    model = Values([math.nan, 0.0, -1.0, 1.0], clamp_chain(0.0, 1.0, 0.2))
    eager = call(copy.deepcopy(model), [model.zeros()], seed_gradient=ones)
    assert eager.outs[0][:, 0].isnan().all()
    assert eager.grads["norm.bias"][0] == 0
    assert one(check(model, model.zeros(), via=via, exact=True, seed_gradient=ones)).status == "folded"


LAYOUTS = {
    "contiguous": lambda: noise(4, 8, 6, 5),
    "channels_last": lambda: noise(4, 8, 6, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: noise(4, 8, 5, 6).transpose(2, 3),
    "sliced": lambda: noise(4, 16, 6, 10)[:, ::2, :, 1:6],
    "expanded": lambda: noise(1, 8, 6, 5).expand(4, 8, 6, 5),
    "channels_last_3d": lambda: noise(2, 8, 3, 6, 5).to(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_D_the_mask_is_drawn_in_the_order_of_eagers_strides(layout: str, via: str) -> None:
    check(Tail(8, 4, lambda h: F.dropout(F.relu(h), 0.5, True)), LAYOUTS[layout](), via=via)


@pytest.mark.gpu
def test_E_the_mask_beyond_one_wave_of_threads_is_this_gpus() -> None:
    props = torch.cuda.get_device_properties(0)
    wave = 256 * props.multi_processor_count * (props.max_threads_per_multi_processor // 256)
    for n in (wave // 64, wave // 64 + 1, wave // 16 + 3):
        model = Tail(16, 8, lambda h: F.dropout(F.relu(h) + 1, 0.3, True)).cuda()
        check(model, noise(4, 16, n, 1).cuda(), via="compile")


EDGES = {
    "p=0": (0.0, True, (2, 8, 3, 3)),
    "p=1": (1.0, True, (2, 8, 3, 3)),
    "eval": (0.5, False, (2, 8, 3, 3)),
    "empty batch": (0.5, True, (0, 8, 3, 3)),
    "p=.5": (0.5, True, (2, 8, 3, 3)),
}


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("edge", EDGES)
def test_F_the_generator_moves_exactly_when_eagers_does(edge: str, via: str) -> None:
    p, training, shape = EDGES[edge]
    for tail in (lambda h: F.dropout(F.relu(h), p, training), clamp_chain_with(p, training)):
        model, x = Tail(8, 4, tail), noise(*shape)
        torch.manual_seed(0)
        untouched = torch.get_rng_state()
        moved = not torch.equal(call(copy.deepcopy(model), [x]).rng, untouched)
        assert moved == (edge == "p=.5")
        check(model, x, via=via)  # compares the states too


def clamp_chain_with(p: float, training: bool):
    def tail(h: Tensor) -> Tensor:
        return F.dropout(torch.clamp(torch.minimum(h, torch.tensor(0.0)), 0.0, 1.0), p, training)

    return tail


def test_F_a_dropout_of_a_constant_zero_moves_the_generator_and_later_numbers_stay() -> None:
    class Then(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = No83()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), torch.rand_like(x)

    check(Then(), noise(2, 16, 3, 3), via="compile", exact=True)
    check(Then(), noise(2, 16, 3, 3), exact=True)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_G_dropout_with_p_1_multiplies_by_zero(via: str) -> None:
    model = Values([1.0, math.nan, math.inf, -1.0], lambda h: F.dropout(F.hardtanh(h, -9.0, math.inf), 1.0, True))
    eager = call(copy.deepcopy(model), [model.zeros()], grad=False).outs[0]
    assert eager[0, :, 0, 0].isnan().tolist() == [False, True, True, False]
    assert eager[:, 3].signbit().all()
    check(model, model.zeros(), via=via, exact=True, grad=False)
    runner = by_rewrite(model)[0] if via == "rewrite" else by_compile(copy.deepcopy(model))[0]
    assert torch.equal(
        call(runner, [model.zeros()], grad=False).outs[0].signbit()[:, [0, 3]], eager.signbit()[:, [0, 3]]
    )


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_H_checkpointing_draws_the_same_mask_again(inner: str, reentrant: bool) -> None:
    class Checkpointed(Tail):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    check(Checkpointed(8, 4, lambda h: F.dropout(F.relu(h), 0.5, True)), noise(2, 8, 6, 6), via="compile", inner=inner)


def test_I_a_write_into_an_eval_dropout_of_a_site_is_not_lost_by_the_rewrite() -> None:
    def tail(h: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(h)
        y = F.dropout(h, 0.5, False)
        y.add_(1)
        return h, y

    for body in (tail, lambda h: tail(F.dropout(h, 0.0, True))):
        model = Tail(8, 4, body)
        eager = call(copy.deepcopy(model), [noise(2, 8, 3, 3)], grad=False)
        assert torch.equal(eager.outs[0], eager.outs[1])
        check(model, noise(2, 8, 3, 3), grad=False)


def test_I_a_write_into_an_identity_of_a_site_is_not_lost_by_the_rewrite() -> None:
    class Aliased(Tail):
        def __init__(self) -> None:
            super().__init__(8, 4, F.relu)
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.silu(self.norm(x))
            y = self.same(h)
            y.mul_(2.0)
            return h, y

    check(Aliased(), noise(2, 8, 3, 3), grad=False)


def test_I_a_compiled_write_into_an_eval_dropout_is_no_worse_than_aot_eagers() -> None:
    def tail(h: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(h)
        y = F.dropout(h, 0.5, False)
        y += 1
        return h, y

    model, x = Tail(8, 4, tail), noise(2, 8, 3, 3)
    eager = call(copy.deepcopy(model), [x], grad=False)
    plain = call(torch.compile(copy.deepcopy(model), backend="aot_eager"), [x], grad=False)
    got = call(by_compile(copy.deepcopy(model))[0], [x], grad=False)
    assert_equal(got.outs[1], eager.outs[1])
    assert any(torch.allclose(got.outs[0], allowed.outs[0]) for allowed in (eager, plain))


def test_I_an_in_place_op_after_an_eval_dropout_whose_old_name_is_unused_is_as_eager() -> None:
    def tail(h: Tensor) -> Tensor:
        y = F.dropout(F.silu(h), 0.5, False)
        y.clamp_(-0.1, 0.5)
        return y

    check(Tail(8, 4, tail), noise(2, 8, 3, 3))
    check(Tail(8, 4, tail), noise(2, 8, 3, 3), via="compile")


ZEROS = {
    "minimum": lambda h: torch.minimum(h, torch.tensor(0.0)),
    "clamp": lambda h: h.clamp(0.0, 1.0),
    "relu": F.relu,
    "chain": clamp_chain(0.0, 1.0, 0.0),
}


@pytest.mark.parametrize("channels", [33, 35])
@pytest.mark.parametrize("name", ZEROS)
def test_J_a_zero_is_a_zero_whatever_its_sign_and_tail_or_lane(name: str, channels: int) -> None:
    """-0.0 == 0.0 is the promise: eager itself gives both signs in one tensor, by vector lane."""
    for make in (lambda h: -h, lambda h: h):
        tail = ZEROS[name]
        model = Values([0.0] * channels, lambda h, make=make, tail=tail: tail(make(h)))
        eager = call(copy.deepcopy(model), [model.zeros(1, 1)], grad=False).outs[0]
        assert not eager.any()
        check(model, model.zeros(1, 1), exact=True, grad=False)
