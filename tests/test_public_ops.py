"""public-reports.md §4: public reports about custom backends and custom ops, B1 to B18."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from public_helpers import (
    Tail,
    Values,
    assert_reasons,
    by_compile,
    by_rewrite,
    call,
    check,
    clamp_chain,
    compare_closely,
    noise,
    one,
    process_group,
    randomise,
    relu_dropout,
    statuses,
)
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import gnfuse
import gnfuse.kernels


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("tail", [relu_dropout, lambda h: F.dropout(torch.sin(h), 0.5, True)])
def test_B1_checkpointing_is_right_with_every_inner_backend(tail: Any, inner: str) -> None:
    class Checkpointed(Tail):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False) * 2

    check(Checkpointed(8, 4, tail), noise(2, 8, 6, 6), via="compile", inner=inner)


LAYOUTS = {
    "contiguous": lambda: noise(4, 8, 6, 5),
    "channels_last": lambda: noise(4, 8, 6, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: noise(2, 8, 3, 6, 5).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: noise(4, 8, 5, 6).transpose(2, 3),
    "sliced": lambda: noise(4, 16, 6, 10)[:, ::2, :, 1:6],
    "sliced channels_last": lambda: noise(4, 8, 6, 10).to(memory_format=torch.channels_last)[..., 2:7],
    "expanded": lambda: noise(1, 8, 6, 5).expand(4, 8, 6, 5),
    "one pixel": lambda: noise(4, 8, 1, 1),
    "one pixel channels_last": lambda: noise(4, 8, 1, 1).to(memory_format=torch.channels_last),
    "rank 2": lambda: noise(4, 8),
    "rank 3 transposed": lambda: noise(4, 6, 8).transpose(1, 2),
}


def op_args(x: Tensor, steps: str, *, weight: bool = True) -> dict[str, Any]:
    affine = noise(x.shape[1]).requires_grad_() if weight else None
    common = {"weight": affine, "bias": affine, "num_groups": 4, "eps": 1e-5, "check_batch": True}
    if "dropout" in steps:
        common.update(training=True, site=0)
    return {"x": x, **common, "chain": steps, "source": steps}


OPS = {
    "silu()": "group_norm_pointwise",
    "relu(); dropout(0.5)": "group_norm_dropout",
}


def loaded(name: str) -> Any:
    gnfuse.kernels.load()
    return getattr(torch.ops.gnfuse, name).default


@pytest.mark.parametrize("steps", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B2_fake_strides_are_real_strides_are_eagers(layout: str, steps: str) -> None:
    op = loaded(OPS[steps])
    x = LAYOUTS[layout]()
    want = F.silu(F.group_norm(x, 4))  # a pointwise op settles the strides of one channel or one pixel
    real = op(**op_args(x, steps))[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = op(**op_args(mode.from_tensor(x), steps))[0]
    assert real.stride() == want.stride()
    assert fake.stride() == want.stride()
    assert fake.shape == real.shape == want.shape


@pytest.mark.parametrize("steps", OPS)
def test_B2_the_ops_pass_opcheck_in_every_layout(steps: str) -> None:
    op = loaded(OPS[steps])
    for layout in ("contiguous", "channels_last", "sliced", "expanded", "one pixel"):
        x = LAYOUTS[layout]().requires_grad_()
        if "dropout" in steps:
            # a random op cannot give the same result twice: opcheck's numerical utility compares two calls
            tests = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(op, (), op_args(x, steps), test_utils=tests)
        else:
            torch.library.opcheck(op, (), op_args(x, steps))


def schemas() -> list[Any]:
    assert gnfuse.kernels.available() is None
    gnfuse.kernels.load()
    found = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("gnfuse::group_norm")]
    assert len(found) >= 4
    return found


def test_B3_no_op_mutates_or_aliases_an_argument() -> None:
    for schema in schemas():
        assert not schema.is_mutable
        assert all(a.alias_info is None for a in [*schema.arguments, *schema.returns])
    x = noise(2, 8, 3, 3)
    kept = x.clone()
    for tail in (F.relu, relu_dropout, clamp_chain(0.0, 1.0, 0.2), lambda h: F.relu(h, inplace=True)):
        out = by_rewrite(Tail(8, 4, tail))[0](x)
        assert torch.equal(x, kept)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_B4_no_name_of_an_op_reads_as_if_it_mutated() -> None:
    for schema in schemas():
        name = schema.name.split("::")[1]
        assert not name.endswith("_")
        assert not name.endswith("_out")
        assert schema.overload_name in ("", "default")


@pytest.mark.parametrize("tail", [F.silu, relu_dropout, clamp_chain(0.0, 1.0, 0.2)])
def test_B5_only_the_gradients_asked_for_are_there(tail: Any) -> None:
    for needs in itertools.product([False, True], repeat=3):
        model = Tail(8, 4, tail)
        gm, _ = by_rewrite(model)
        results = []
        for run in (model, gm):
            run.norm.weight.requires_grad_(needs[1])
            run.norm.bias.requires_grad_(needs[2])
            x = noise(2, 8, 3, 3).requires_grad_(needs[0])
            torch.manual_seed(0)
            out = run(x)
            assert out.requires_grad == any(needs)
            if any(needs):
                out.sum().backward()
            results.append([x.grad, run.norm.weight.grad, run.norm.bias.grad])
        for mine, theirs, needed in zip(results[1], results[0], needs, strict=True):
            assert (mine is not None) == (theirs is not None) == needed
            if needed:
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tail", [F.silu, relu_dropout, clamp_chain(0.0, 1.0, 0.2)])
def test_B5_one_compiled_model_serves_inference_no_grad_and_training_in_turn(tail: Any) -> None:
    model, x = Tail(8, 4, tail), noise(2, 8, 3, 3)
    owner = copy.deepcopy(model)
    compiled, _ = by_compile(owner)
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        outcomes = []
        for run in (model, compiled):
            torch.manual_seed(1)
            with context():
                out = run(x)
            outcomes.append((out, torch.get_rng_state()))
        (want, state), (got, mine) = outcomes
        assert torch.equal(mine, state)
        assert got.requires_grad == want.requires_grad
        assert got.is_inference() == want.is_inference()
        torch.testing.assert_close(got.clone(), want.clone())


class Block(nn.Module):
    def __init__(self, shared: bool = False):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm1 = nn.GroupNorm(4, 8)
        self.norm2 = self.norm1 if shared else nn.GroupNorm(4, 8)
        randomise(self)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm1(self.first(x)))
        return F.dropout(F.relu(self.norm2(self.second(h))), 0.5, True)


@pytest.mark.parametrize("shared", [False, True])
def test_B6_ddps_split_graphs_give_the_same_numbers(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    model, x = Block(shared), noise(2, 3, 8, 8)
    want = call(copy.deepcopy(model), [x])
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)
    with process_group():
        owner = copy.deepcopy(model)
        parallel = nn.parallel.DistributedDataParallel(owner, bucket_cap_mb=1e-5)
        compiled, sites = by_compile(parallel)
        got = call(compiled, [x], owner=owner)
        split = len(gnfuse.reports())
    assert split > 1, "DDPOptimizer did not split this graph"
    assert_reasons(sites())
    assert torch.equal(got.rng, want.rng)
    torch.testing.assert_close(got.outs, want.outs)
    torch.testing.assert_close(got.grads, want.grads, atol=1e-5, rtol=1e-5)


def test_B8_a_hook_added_after_compiling_does_what_it_does_under_aot_eager() -> None:
    def hits(backend: str, **kwargs: Any) -> tuple[int, Tensor]:
        torch._dynamo.reset()
        model, seen = Tail(8, 4, F.relu), []
        compiled = torch.compile(model, backend=backend, **kwargs)
        compiled(noise(2, 8, 3, 3))
        model.norm.register_forward_hook(lambda module, args, out: seen.append(1))
        return len(seen), compiled(noise(2, 8, 3, 3))

    plain, mine = hits("aot_eager"), hits("gnfuse", options={"inner": "aot_eager"})
    assert plain[0] == mine[0]
    torch.testing.assert_close(plain[1], mine[1])


HOOKS = {
    "forward hook": lambda m: m.register_forward_hook(lambda module, args, out: out + 100),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "full backward hook": lambda m: m.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,)),
    "full backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda module, go: (go[0] * 2,)),
}


@pytest.mark.parametrize("where", ["norm", "act", "drop"])
@pytest.mark.parametrize("kind", HOOKS)
def test_B9_a_module_with_a_hook_is_left_alone(kind: str, where: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act, self.drop = nn.GroupNorm(4, 8), nn.ReLU(), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.act(self.norm(x)))

    model, x = Model(), noise(2, 8, 3, 3)
    gm = torch.fx.symbolic_trace(copy.deepcopy(model))
    HOOKS[kind](getattr(model, where))
    HOOKS[kind](getattr(gm, where))
    gm, report = gnfuse.rewrite(gm)
    compare_closely(call(gm, [x]), call(model, [x]))
    site = one(report.sites)
    assert "hook" in site.reason
    if where == "norm":
        assert site.status == "refused"


SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, 20.0, -20.0, 1e-30, math.nan, math.inf, -math.inf]
OP_CALLS = {
    "minimum": lambda h: torch.minimum(h, torch.tensor(1.0)),
    "maximum": lambda h: torch.maximum(h, torch.tensor(-1.0)),
    "clamp": lambda h: h.clamp(-1.0, 1.0),
    "hardtanh": lambda h: F.hardtanh(h, -3.0, 3.0),
    "relu": F.relu,
    "relu6": F.relu6,
    "threshold": lambda h: F.threshold(h, 0.5, -2.0),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.01),
    "abs": torch.abs,
    "neg": torch.neg,
    "add": lambda h: h + 1.5,
    "rsub": lambda h: 1.5 - h,
    "mul": lambda h: h * 3.0,
    "div": lambda h: h / 3.0,
    "rdiv": lambda h: 3.0 / h,
    "square": torch.square,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": lambda h: F.elu(h, 0.7),
    "softplus": F.softplus,
    "mish": F.mish,
}


# eager's gradient of these at NaN depends on the element's vector lane (test_public_facts.py, fact C)
NAN_BY_LANE = ("hardtanh", "relu6", "hardswish", "elu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OP_CALLS)
def test_B11_every_op_has_eagers_gradient_at_special_points(name: str, dtype: torch.dtype) -> None:
    # eager's erf-gelu of +inf depends on the layout: NaN where oneDNN computes it, inf where ATen does
    special = [v for v in SPECIAL if name != "gelu" or v != float("inf")]
    model = Values(special, OP_CALLS[name], dtype)
    if name in NAN_BY_LANE:
        assert one(check(model, model.zeros(), grad=False)).status == "fused"
        model = Values([v for v in SPECIAL if v == v], OP_CALLS[name], dtype)
    assert one(check(model, model.zeros())).status == "fused"


@pytest.mark.parametrize("tail", [F.silu, clamp_chain(0.0, 1.0, 0.2)])
def test_B13_a_half_decoder_under_inference_mode_has_no_nan_where_eager_has_none(tail: Any) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv_in, self.conv_out = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)
            self.norm1, self.norm2 = nn.GroupNorm(8, 32, eps=1e-6), nn.GroupNorm(8, 32, eps=1e-6)
            self.conv = nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, z: Tensor) -> Tensor:
            h = 300 * self.conv_in(z)
            h = h + self.conv(tail(self.norm1(h)))
            h = F.interpolate(h, scale_factor=2.0)
            return self.conv_out(F.silu(self.norm2(h)))

    model, z = Decoder().half().eval(), noise(1, 4, 8, 8).half()
    compiled, sites = by_compile(copy.deepcopy(model))
    with torch.inference_mode():
        torch.manual_seed(0)
        want = model(z)
        torch.manual_seed(0)
        got = compiled(z)
    assert not want.isnan().any()
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert "refused" not in statuses(sites())


@pytest.mark.parametrize("via", ["rewrite", "compile"])
def test_B14_a_video_unit_in_channels_last_3d_works(via: str) -> None:
    with pytest.raises(RuntimeError, match="rank 4"):
        noise(1, 8, 2, 4, 4).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Dropout(0.1), nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0)))
    randomise(model)
    x = noise(1, 8, 4, 5, 5).to(memory_format=torch.channels_last_3d)
    for mode in (True, False):
        assert one(check(model.train(mode), x, via=via)).status == "fused"


def test_B15_an_fsdp_block_with_a_dynamic_batch_is_as_eager_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def gradients(compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Block()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        run = by_compile(model, dynamic=True)[0] if compiled else model
        for n in (2, 3, 5):
            run(noise(n, 3, 8, 8)).sum().backward()
        return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]

    with process_group():
        want, got = gradients(False), gradients(True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_B16_chains_on_both_sides_of_a_graph_break_are_fused() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = F.leaky_relu(F.dropout(self.norms[0](x), 0.1, True), 0.1)
            torch._dynamo.graph_break()
            return F.dropout(torch.clamp(torch.minimum(self.norms[1](x), torch.tensor(0.0)), 0.0, 1.0), 0.1, True)

    sites = check(Broken(), noise(2, 8, 3, 3), via="compile")
    assert statuses(sites) == ["fused", "folded"]
    assert len(gnfuse.reports()) == 2


@pytest.mark.parametrize("tail", [F.silu, relu_dropout])
def test_B18_anomaly_mode_names_gnfuses_backward(tail: Any) -> None:
    gm, _ = by_rewrite(Tail(8, 4, tail))
    x = noise(2, 8, 3, 3).requires_grad_()
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match=r"(?i)(group_?norm|gnfuse).*nan"):
        gm(x).backward(torch.full((2, 8, 3, 3), math.nan))
