"""public-reports.md §2: public reports about dropout, D1 to D20."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from helpers import Outcome
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
    compare,
    noise,
    one,
    randomise,
    relu_dropout,
    statuses,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnfuse


def compiled_outcome(model: nn.Module, inputs: list[Any], inner: str = "aot_eager", **kwargs: Any) -> Outcome:
    owner = copy.deepcopy(model)
    return call(by_compile(owner, inner=inner)[0], inputs, owner=owner, **kwargs)


def test_D1_inductor_around_a_site_leaves_eagers_mask_and_generator() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Dropout(0.5))
    randomise(model)
    site = one(check(model, noise(2, 3, 8, 8), via="compile", inner="inductor"))
    assert site.status == "fused"


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("tail", [relu_dropout, clamp_chain(0.5, 1.0, 0.5)])
def test_D1_a_sites_mask_is_eagers_bit_for_bit(tail: Any, via: str) -> None:
    model, x = Values([1.0] * 64, tail), torch.zeros(2, 64, 5, 7)
    assert one(check(model, x, via=via, exact=True, grad=False)).status != "refused"
    check(model, x, via=via)


def test_D1_an_unmatched_dropout_inside_inductor_does_not_shift_a_sites_mask() -> None:
    class Mixed(Tail):
        def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            unmatched = F.dropout(other, 0.5, True)
            return relu_dropout(self.norm(x)), unmatched

    model = Mixed(8, 4, F.relu)
    inputs = [noise(2, 8, 6, 6), noise(5, 7)]
    want = call(copy.deepcopy(model), inputs)
    owner = copy.deepcopy(model)
    got = call(by_compile(owner, inner="inductor")[0], inputs, owner=owner)
    torch.testing.assert_close(got.outs[0], want.outs[0])
    torch.testing.assert_close(got.grads["norm.bias"], want.grads["norm.bias"])


def test_D1_a_dropout_outside_any_site_is_the_inner_backends() -> None:
    got = call(by_compile(lambda x: F.dropout(x, 0.5, True))[0], [torch.ones(64)])
    want = call(lambda x: F.dropout(x, 0.5, True), [torch.ones(64)])
    compare(got, want, None)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_D2_a_channels_last_convolution_hands_its_strides_to_the_mask(via: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)
            self.to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            return relu_dropout(self.norm(self.conv(x)))

    check(Net(), noise(2, 3, 8, 8).to(memory_format=torch.channels_last), via=via)
    check(Net(), noise(2, 3, 8, 8), via=via)


class Branches(nn.Module):
    """Two sites and other random ops, in an order in which moving any of them would show."""

    def __init__(self, order: str):
        super().__init__()
        self.big, self.small, self.order = nn.GroupNorm(4, 64), nn.GroupNorm(2, 4), order
        randomise(self)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        if self.order == "big first":
            return F.dropout(F.relu(self.big(x)), 0.5, True), F.dropout(F.relu(self.small(y)), 0.5, True)
        if self.order == "crossed":
            a, b = F.relu(self.big(x)), F.relu(self.small(y))
            second = F.dropout(b, 0.5, True)
            return F.dropout(a, 0.5, True), second
        if self.order == "a random op inside the chain":
            a = self.big(x)
            r = torch.rand_like(y)
            a = F.relu(a)
            s = F.dropout(y, 0.3, True)
            return F.dropout(a, 0.5, True), r, s, F.silu(self.small(y))
        a = torch.clamp(torch.minimum(self.big(x), torch.tensor(0.0)), 0.0, 1.0)
        r = torch.rand_like(y)
        return F.dropout(a, 0.5, True), r, F.dropout(F.silu(self.small(y)), 0.2, True)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("order", ["big first", "crossed", "a random op inside the chain", "a fold between"])
def test_D3_random_ops_are_drawn_in_program_order(order: str, via: str) -> None:
    sites = check(Branches(order), noise(2, 64, 6, 6), noise(2, 4, 3, 3), via=via)
    assert "refused" not in statuses(sites)


@pytest.mark.parametrize("consumers", ["small results", "a big last result"])
def test_D3_inductors_scheduler_does_not_move_one_sites_draw_over_anothers(consumers: str) -> None:
    """Its memory pass (reorder_for_peak_memory) would run what frees most first."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.GroupNorm(4, 64), nn.GroupNorm(2, 4), nn.GroupNorm(4, 16)])

        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            a, b, c = (F.dropout(F.silu(norm(x)), 0.5, True) for norm, x in zip(self.norms, inputs, strict=True))
            if consumers == "small results":
                return a.sum(), b * 2, c.mean()
            return c.sum() + b.sum(), torch.cat([a, a], 1).exp().sum()

    model = Sums()
    inputs = [noise(2, 64, 24, 24), noise(2, 4, 3, 3), noise(2, 16, 5, 5)]
    want = call(copy.deepcopy(model), inputs)
    owner = copy.deepcopy(model)
    got = call(by_compile(owner, inner="inductor")[0], inputs, owner=owner)
    assert torch.equal(got.rng, want.rng)
    torch.testing.assert_close(got.outs, want.outs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.grads, want.grads, rtol=1e-4, atol=1e-3)


def test_D3_two_sites_with_equal_arguments_draw_twice() -> None:
    model = Tail(8, 4, lambda h: (relu_dropout(h), relu_dropout(h)))
    check(model, noise(2, 8, 3, 3), via="compile")

    class Twice(Tail):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return relu_dropout(self.norm(x)), relu_dropout(self.norm(x))

    sites = check(Twice(8, 4, F.relu), noise(2, 8, 3, 3), via="compile")
    assert statuses(sites) == ["fused", "fused"]


FEATURE_DROPOUTS = {
    "dropout1d": (lambda h: F.dropout1d(h, 0.5, True), (2, 8, 12)),
    "dropout2d": (lambda h: F.dropout2d(h, 0.5, True), (2, 8, 4, 4)),
    "dropout3d": (lambda h: F.dropout3d(h, 0.5, True), (2, 8, 3, 4, 4)),
    "alpha_dropout": (lambda h: F.alpha_dropout(h, 0.5, True), (2, 8, 4, 4)),
    "feature_alpha_dropout": (lambda h: F.feature_alpha_dropout(h, 0.5, True), (2, 8, 4, 4)),
}


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("name", FEATURE_DROPOUTS)
def test_D4_a_dropout_of_whole_channels_is_never_taken_for_an_elementwise_one(name: str, via: str) -> None:
    drop, shape = FEATURE_DROPOUTS[name]
    bare = one(check(Tail(8, 4, drop), noise(*shape), via=via))
    assert bare.status == "refused"
    assert "dropout" in bare.reason
    after_relu = one(check(Tail(8, 4, lambda h: drop(F.relu(h))), noise(*shape), via=via))
    assert "dropout" not in after_relu.result
    assert "dropout" in after_relu.reason


def test_D4_a_feature_dropout_module_is_refused_too() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), nn.Dropout3d(0.5))
    assert "dropout" in one(check(model, noise(2, 8, 3, 4, 4))).reason


@pytest.mark.parametrize("device", DEVICES)
def test_D5_masks_are_independent_between_channels_and_equal_in_backward(device: str) -> None:
    channels, columns = 64, 1024

    class Checkpointed(Tail):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.transpose(1, 2).contiguous(), use_reentrant=False)

    model = Checkpointed(channels, 8, lambda h: F.dropout(F.gelu(h), 0.5, True))
    nn.init.zeros_(model.norm.weight)
    nn.init.ones_(model.norm.bias)  # every value is gelu(1): a zero is a dropped element
    model = model.to(device)
    x = noise(4, columns, channels).to(device)
    got = compiled_outcome(model, [x], seed_gradient=torch.ones_like)
    kept = (got.outs[0] != 0).double().cpu()
    assert torch.equal(got.rng, call(copy.deepcopy(model), [x]).rng)
    per_channel = kept.mean(dim=(0, 2))
    sigma = 0.5 / math.sqrt(4 * columns)
    assert (per_channel - 0.5).abs().max() < 5 * sigma
    flat = kept.transpose(0, 1).reshape(channels, -1)
    between = torch.corrcoef(flat) - torch.eye(channels, dtype=torch.double)
    assert between.abs().max() < 5 / math.sqrt(4 * columns)
    # d gelu(1) / (1 - p) from each kept element: the backward mask is the forward's
    slope = torch.autograd.functional.jacobian(F.gelu, torch.tensor(1.0)).item() / 0.5
    torch.testing.assert_close(got.grads["norm.bias"].cpu(), (kept.sum(dim=(0, 2)) * slope).float())


@pytest.mark.parametrize("budget", [0.5, 0.0])
@pytest.mark.parametrize(
    "tail",
    [
        lambda h: F.dropout(F.silu(h), 0.5, True),
        lambda h: torch.sin(F.dropout(F.silu(h), 0.5, True)),
        clamp_chain(0.5, 1.0, 0.5),
    ],
)
def test_D6_under_a_memory_budget_a_site_with_dropout_is_refused(tail: Any, budget: float) -> None:
    """torch recomputes random ops there with a new mask, and no op can prevent it: gnfuse must not add to it."""
    x = noise(2, 8, 6, 6)
    model = Tail(8, 4, tail)
    plain = copy.deepcopy(model)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        owner = copy.deepcopy(model)
        compiled, sites = by_compile(owner)
        got = call(compiled, [x], owner=owner)
        torch._dynamo.reset()
        without = call(torch.compile(plain, backend="aot_eager"), [x], owner=plain)
    (site,) = sites()
    assert site.status == "refused" and "activation_memory_budget" in site.reason
    torch.testing.assert_close(got.outs, call(copy.deepcopy(model), [x]).outs)
    torch.testing.assert_close(got.grads, without.grads)


@pytest.mark.parametrize("compiled", ["the block", "the whole"])
@pytest.mark.parametrize("tail", [relu_dropout, clamp_chain(0.0, 1.0, 0.2), clamp_chain(-0.5, 1.0, 0.2)])
def test_D7_recomputation_under_checkpointing_restores_the_mask(tail: Any, compiled: str) -> None:
    class Whole(nn.Module):
        def __init__(self, block: Callable[..., Any]):
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, checkpoint(self.block, x, use_reentrant=False), use_reentrant=False) * 2

    block = Tail(8, 4, tail)
    x = noise(2, 8, 6, 6)
    want = call(Whole(copy.deepcopy(block)), [x])
    mine = copy.deepcopy(block)
    run = Whole(by_compile(mine)[0]) if compiled == "the block" else by_compile(Whole(mine))[0]
    got = call(run, [x], owner=mine)
    assert torch.equal(got.rng, want.rng)
    torch.testing.assert_close(got.outs, want.outs)
    torch.testing.assert_close(got.grads["input 0"], want.grads["input 0"])
    for name in ("norm.weight", "norm.bias"):
        torch.testing.assert_close(got.grads[name], want.grads[f"block.{name}"])


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_D8_p_1_keeps_nan_and_the_sign_of_zero_and_the_generator(via: str) -> None:
    model = Values([1.0, math.nan, math.inf, -1.0], lambda h: F.dropout(torch.clamp_min(h, -2.0), 1.0, True))
    runner = by_rewrite(model)[0] if via == "rewrite" else by_compile(copy.deepcopy(model))[0]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    out = runner(model.zeros())[0, :, 0, 0]
    assert torch.equal(torch.get_rng_state(), before)
    assert out.isnan().tolist() == [False, True, True, False]
    assert out[0] == 0
    assert out[3] == 0
    assert out[3].signbit()
    check(model, model.zeros(), via=via)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_D8_a_wrong_p_raises_even_where_the_value_would_be_a_constant(p: float) -> None:
    tails = (lambda h: F.dropout(F.relu(h), p, True), clamp_chain(0.0, 1.0, p))
    for model in (Tail(8, 4, tail) for tail in tails):
        with pytest.raises(ValueError, match="dropout probability"):
            model(noise(2, 8, 3, 3))
        with pytest.raises(ValueError, match="dropout probability"):
            by_rewrite(model)[0](noise(2, 8, 3, 3))


def test_D10_an_integer_input_raises_as_with_aot_eager() -> None:
    for run in (lambda x: F.dropout(x, 0.5, True), lambda x: relu_dropout(F.group_norm(x, 1))):
        x = torch.ones(2, 4, 3, dtype=torch.int64)
        with pytest.raises(RuntimeError):
            run(x)
        with pytest.raises(RuntimeError):
            by_compile(run)[0](x)


def test_D11_an_eval_dropout_of_a_graph_input_aliases_it_no_worse_than_aot_eager() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x, 0.5, False)
        y += 1
        return x, y

    def results(backend: Callable[..., Any]) -> list[list[float]]:
        x = torch.zeros(3)
        return [t.tolist() for t in (*backend(x), x)]

    want, plain = results(run), results(torch.compile(run, backend="aot_eager"))
    assert want == [[1.0] * 3] * 3
    assert results(by_compile(run)[0]) in (want, plain)


def test_D11_an_eval_dropout_before_a_site_keeps_its_alias_in_a_rewritten_graph() -> None:
    class Model(Tail):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = F.dropout(x, 0.5, False)
            y.add_(1)
            return F.relu(self.norm(x)), x

    check(Model(8, 4, F.relu), noise(2, 8, 3, 3), grad=False)
    check(Model(8, 4, F.relu), noise(2, 8, 3, 3), grad=False, via="compile", inner="eager")


@pytest.mark.gpu
@pytest.mark.parametrize("tail", [relu_dropout, clamp_chain(0.5, 1.0, 0.5)])
def test_D12_each_replay_of_a_cuda_graph_draws_the_next_mask_of_eagers_stream(tail: Any) -> None:
    model = Tail(16, 8, tail).cuda()
    x = noise(4, 16, 32, 32).cuda()
    compiled, _ = by_compile(model)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                compiled(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        torch.cuda.manual_seed(9)
        replays = []
        for _ in range(3):
            graph.replay()
            replays.append(out.clone())
        torch.cuda.manual_seed(9)
        for replay in replays:
            torch.testing.assert_close(replay, model(x))
    assert not torch.equal(replays[0], replays[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.half, torch.bfloat16])
def test_D13_masks_beyond_one_wave_equal_this_devices_eager(dtype: torch.dtype) -> None:
    props = torch.cuda.get_device_properties(0)
    wave = 256 * props.multi_processor_count * (props.max_threads_per_multi_processor // 256)
    for n in (wave - 1, wave + 1, 4 * wave + 5, 9 * wave + 3):
        model = Tail(2, 1, lambda h: F.dropout(F.relu(h) + 1, 0.3, True), dtype=dtype).cuda()
        x = noise(1, 2, n // 2 + 1, dtype=dtype).cuda()
        want, got = call(model, [x], grad=False), compiled_outcome(model, [x], grad=False)
        assert torch.equal(got.outs[0] == 0, want.outs[0] == 0)
        assert torch.equal(got.rng, want.rng)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_D14_the_same_seed_gives_the_same_mask_and_another_seed_another(via: str, device: str) -> None:
    model, x = Tail(8, 4, relu_dropout).to(device), noise(2, 8, 6, 6).to(device)
    runner = by_rewrite(model)[0] if via == "rewrite" else by_compile(model)[0]
    first, second, other = (call(runner, [x], seed=seed).outs[0] for seed in (42, 42, 43))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_D15_vmap_over_a_site_is_as_eager(randomness: str) -> None:
    model, x = Tail(4, 2, relu_dropout), noise(3, 2, 4, 3, 3)

    def run(x: Tensor) -> Tensor:
        return torch.func.vmap(model, randomness=randomness)(x)

    compiled, sites = by_compile(run)
    if randomness == "error":
        for runner in (run, compiled):
            with pytest.raises(RuntimeError, match="randomness error mode"):
                runner(x)
        return
    compare(call(compiled, [x]), call(run, [x]), None)
    assert "folded" not in statuses(sites())
    assert "fused" not in statuses(sites())
    assert_reasons(sites())


@pytest.mark.parametrize("tail", [relu_dropout, clamp_chain(0.5, 1.0, 0.5), F.silu])
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_D15_a_rewritten_graph_under_vmap_is_as_eager_or_raises_clearly(randomness: str, tail: Any) -> None:
    model, x = Tail(4, 2, tail), noise(3, 2, 4, 3, 3)
    gm, _ = by_rewrite(model)
    if randomness == "error" and tail is not F.silu:
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.func.vmap(gm, randomness=randomness)(x)
        return
    want = call(lambda x: torch.func.vmap(model, randomness=randomness)(x), [x], grad=False)
    try:
        got = call(lambda x: torch.func.vmap(gm, randomness=randomness)(x), [x], grad=False)
    except (RuntimeError, NotImplementedError) as refusal:
        assert "vmap" in str(refusal) or "gnfuse" in str(refusal)
    else:
        torch.testing.assert_close(got.outs, want.outs)


def all_notes(report: gnfuse.Report) -> str:
    return " ".join([*report.notes, *(note for site in report.sites for note in site.notes)])


def test_D16_a_training_flag_frozen_at_trace_time_is_reported() -> None:
    class Frozen(Tail):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.relu(self.norm(x)), 0.5, training=self.training)

    model, x = Frozen(8, 4, F.relu), noise(2, 8, 3, 3)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    gm, report = by_rewrite(model)
    assert re.search(r"training flag\b.* frozen.*True", all_notes(report))
    compare(call(gm.eval(), [x]), call(traced.eval(), [x]), call(copy.deepcopy(traced).double(), [x.double()]))


def test_D16_a_dropout_module_still_switches_after_the_rewrite() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), nn.Dropout(0.5))
    x = noise(2, 8, 3, 3)
    gm, report = by_rewrite(model)
    assert one(report.sites).status == "fused"
    assert "frozen" not in all_notes(report)
    assert gm.state_dict().keys() == model.state_dict().keys()
    for mode in (True, False, True):
        wide = copy.deepcopy(model.train(mode)).double()
        compare(call(gm.train(mode), [x]), call(model.train(mode), [x]), call(wide, [x.double()]))


SCALES = {torch.float32: 1.4285714626312256, torch.half: 1.4287109375, torch.bfloat16: 1.4296875}


@pytest.mark.parametrize("via", ["rewrite", "compile"])
@pytest.mark.parametrize("dtype", SCALES)
def test_D19_the_scale_is_rounded_to_the_dtype_and_the_mask_is_that_of_float32(dtype: torch.dtype, via: str) -> None:
    def kept(dtype: torch.dtype) -> Tensor:
        model = Values([1.0] * 4, lambda h: F.dropout(F.relu(h), 0.3, True), dtype=dtype)
        assert one(check(model, model.zeros(5, 5), via=via, exact=True, grad=False)).status == "fused"
        return call(by_rewrite(model)[0], [model.zeros(5, 5)], grad=False).outs[0]

    out = kept(dtype)
    assert set(out.flatten().tolist()) == {0.0, SCALES[dtype]}
    if dtype != torch.float32:
        assert torch.equal(out != 0, kept(torch.float32) != 0)


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_D20_dropped_negatives_are_minus_zero_bitwise(via: str) -> None:
    model, x = Tail(16, 8, clamp_chain(-1.0, 1.0, 0.2)), noise(2, 16, 3, 5)
    want = call(copy.deepcopy(model), [x])
    owner = copy.deepcopy(model)
    runner = by_rewrite(model)[0] if via == "rewrite" else by_compile(owner)[0]
    got = call(runner, [x])
    assert set(want.outs[0].flatten().tolist()) == {-1.25, -0.0}
    assert torch.equal(got.outs[0].view(torch.int32), want.outs[0].view(torch.int32))
    assert one(check(model, x, via=via, exact=True)).status == "folded"


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_D20_dropped_infinities_and_nan_are_nan(via: str) -> None:
    model = Values([math.inf, -math.inf, math.nan, -2.0], lambda h: F.dropout(F.leaky_relu(h, 0.5), 0.5, True))
    want = call(copy.deepcopy(model), [model.zeros()], grad=False).outs[0]
    assert want[:, :2].isnan().any()
    assert want[:, :2].isinf().any()
    check(model, model.zeros(), via=via, exact=True, grad=False)
    check(Values([0.0], clamp_chain(-math.inf, 1.0, 0.5)), torch.zeros(2, 1, 5, 5), via=via, exact=True, grad=False)
