"""``torch.compile(backend="gnfuse")``: options, inner backends, dynamic shapes, modes of execution, caches, threads."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Outcome, assert_outcome_equal, assert_outcome_near, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnfuse
from gnfuse.chain import Dropout, Step, op, pretty_step
from gnfuse.report import Site

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    gnfuse.clear_reports()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_internal_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The pass leaves a graph alone after a fault of its own, and logs it: right for users, a failure here."""
    yield
    faults = [r.getMessage() for r in caplog.get_records("call") if "internal fault" in r.getMessage()]
    assert not faults, faults


def pattern_of(*steps: Step) -> str:
    return " → ".join(["group_norm", *map(pretty_step, steps)])


SILU = pattern_of(op("silu"), Dropout(0.2))
FOLD = pattern_of(op("minimum", 0.5), op("clamp", 0.5, 1), Dropout(0.2))


class Net(nn.Module):
    """One site that is fused and one that is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)
        self.dropout = nn.Dropout(0.2)
        with torch.no_grad():
            self.a.weight.normal_(1, 0.3)
            self.b.bias.normal_(0, 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.dropout(F.silu(self.a(x)))
        z = torch.min(self.b(x), torch.tensor(0.5, device=x.device))
        return y, self.dropout(torch.clamp(z, 0.5, 1.0))


def net() -> Net:
    torch.manual_seed(11)
    return Net()


def data(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    return torch.randn(shape or (2, 8, 3, 5), generator=torch.Generator().manual_seed(seed)).to(dtype)


def compiled(fn: Any, **kwargs: Any) -> Any:
    options = kwargs.pop("options", {"inner": "aot_eager"})
    return torch.compile(fn, backend="gnfuse", options=options, **kwargs)


def exact_of(model: nn.Module, *args: Tensor, grad: bool = True) -> Outcome:
    double = copy.deepcopy(model).double()
    return run(double, *[a.double() for a in args], params=double.named_parameters(), grad=grad)


def sites() -> list[Site]:
    return [site for report in gnfuse.reports() for site in report.sites]


def check(model: nn.Module, optimised: Callable[..., Any], *args: Tensor, grad: bool = True) -> Outcome:
    params = list(model.named_parameters())
    eager = run(model, *args, params=params, grad=grad)
    outcome = run(optimised, *args, params=params, grad=grad)
    assert_outcome_near(outcome, eager, exact_of(model, *args, grad=grad))
    return outcome


def assert_both_rewritten(draws: bool = True) -> None:
    found = [(s.status, s.pattern) for s in sites()]
    silu, fold = (SILU, FOLD) if draws else (p.removesuffix(" → dropout(0.2)") for p in (SILU, FOLD))
    assert found == [("fused", silu), ("folded", fold)]


# ---- options ------------------------------------------------------------------------------------------------


def failure(call: Callable[[], Any]) -> tuple[BaseException, str]:
    """The ValueError that ``call`` raises, and its text; Dynamo may wrap what a backend raises."""
    with pytest.raises(Exception) as caught:
        call()
    error: BaseException = caught.value
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    chain = [error, inner]
    assert any(isinstance(e, ValueError) for e in chain), chain
    return error, str(error)


@pytest.mark.parametrize(("wrong", "near"), [("iner", "inner"), ("innner", "inner"), ("max_autotun", "max_autotune")])
def test_unknown_option_of_the_backend_names_it_and_near_ones(wrong: str, near: str) -> None:
    _, text = failure(lambda: compiled(net(), options={wrong: "aot_eager"})(data()))
    assert repr(wrong) in text
    assert repr(near) in text


def test_unknown_option_of_rewrite_names_it_and_near_ones() -> None:
    gm = torch.fx.symbolic_trace(net())
    with pytest.raises(ValueError, match=r"'iner'.*'inner'"):
        gnfuse.rewrite(gm, options={"iner": "aot_eager"})


def test_unknown_option_without_a_near_one_is_still_named() -> None:
    _, text = failure(lambda: compiled(net(), options={"zzqqxx": 1})(data()))
    assert "'zzqqxx'" in text


def test_unknown_inner_backend_is_named_with_the_known_ones() -> None:
    _, text = failure(lambda: compiled(net(), options={"inner": "inductr"})(data()))
    for word in ("inductr", "inductor", "aot_eager", "eager"):
        assert word in text


def test_rewrite_takes_an_options_object_and_a_mapping() -> None:
    for options in (None, {}, {"inner": "eager"}, gnfuse.Options()):
        _, report = gnfuse.rewrite(torch.fx.symbolic_trace(net()), options=options)
        assert report


def test_rewrite_refuses_what_is_no_graph_module() -> None:
    with pytest.raises(TypeError, match="GraphModule"):
        gnfuse.rewrite(net())  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_inner_backend_without_inductor_equals_eager(inner: str, train: bool) -> None:
    model = net().train(train)
    check(model, compiled(model, options={"inner": inner}, fullgraph=True), data())
    assert_both_rewritten(draws=train)


def inductor_settings(**kwargs: Any) -> tuple[dict[str, Any], Any, nn.Module]:
    """Compiles with inner Inductor; the config it saw while it compiled."""
    from torch._inductor import config

    seen: dict[str, Any] = {}

    class Look(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen["max_autotune"] = config.max_autotune
            seen["epilogue_fusion"] = config.epilogue_fusion
            seen["targets"] = [str(n.target) for n in graph.nodes]

        def uuid(self) -> Any:
            return None  # never taken from a cache

    model = nn.GroupNorm(4, 8)

    def f(x: Tensor) -> Tensor:
        return F.dropout(F.silu(model(x)), 0.2) * x

    with config.patch(post_grad_custom_post_pass=Look(), fx_graph_cache=False):
        optimised = torch.compile(f, backend="gnfuse", **kwargs)
        with torch.no_grad():
            outcome = run(optimised, data(), grad=False)
            eager = run(f, data(), grad=False)
    assert_outcome_near(outcome, eager, eager)
    assert [s.status for s in sites()] == ["fused"]
    assert any("gnfuse" in target for target in seen["targets"])
    return seen, optimised, model


def test_default_inner_is_inductor_and_mode_is_handed_on() -> None:
    seen, *_ = inductor_settings(mode="max-autotune-no-cudagraphs")
    assert seen["max_autotune"] is True


def test_inductor_options_are_handed_on() -> None:
    seen, *_ = inductor_settings(options={"epilogue_fusion": False})
    assert seen["epilogue_fusion"] is False
    assert seen["max_autotune"] is False


def test_nested_inductor_option_is_known() -> None:
    inductor_settings(options={"triton.cudagraphs": False})


def test_unknown_mode_is_an_error_that_names_it() -> None:
    optimised = torch.compile(net(), backend="gnfuse", mode="no-such-mode")
    with pytest.raises(Exception, match="no-such-mode"), torch.no_grad():
        optimised(data())


def test_backend_leaves_the_model_as_it_was() -> None:
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = {n: m.training for n, m in model.named_modules()}
    check(model, compiled(model), data())
    assert {n: m.training for n, m in model.named_modules()} == hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert list(model.state_dict()) == list(before)


# ---- modes of execution -------------------------------------------------------------------------------------


def test_train_then_eval_then_train_compiles_each_mode_and_equals_eager() -> None:
    model = net()
    optimised = compiled(model)
    for train in (True, False, True):
        model.train(train)
        check(model, optimised, data())
    assert [s.pattern for s in sites()] == [SILU, FOLD, *(p.removesuffix(" → dropout(0.2)") for p in (SILU, FOLD))]


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_without_grad_equals_eager(inner: str, context: Callable[[], Any], train: bool) -> None:
    model = net().train(train)
    optimised = compiled(model, options={"inner": inner}, fullgraph=True)
    results = []
    for fn in (model, optimised, optimised):
        with context():
            torch.manual_seed(3)
            outs = fn(data())
        results.append(Outcome(outs, {}, torch.get_rng_state()))
    exact = exact_of(model, data(), grad=False)
    torch.manual_seed(3)
    with torch.no_grad():
        exact = Outcome(copy.deepcopy(model).double()(data().double()), {}, exact.rng)
    for outcome in results[1:]:
        assert_outcome_near(outcome, results[0], exact)
        assert all(o.is_inference() == e.is_inference() for o, e in zip(outcome.outs, results[0].outs, strict=True))
    assert_both_rewritten(draws=train)


def test_inference_mode_after_training_and_back() -> None:
    model = net()
    optimised = compiled(model)
    check(model, optimised, data())
    with torch.inference_mode():
        torch.manual_seed(3)
        eager = model(data())
        torch.manual_seed(3)
        outs = optimised(data())
    for o, e in zip(outs, eager, strict=True):
        torch.testing.assert_close(o, e)
    check(model, optimised, data())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cpu_autocast_keeps_eagers_dtypes_and_values(dtype: torch.dtype) -> None:
    """The convolution runs in the low dtype and the CPU's autocast leaves group_norm in it: only the graph says so."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)
            self.norm = nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            y = torch.min(y, torch.tensor(0.3, device=y.device)).clamp(0.3, 0.7)
            return F.dropout(y, 0.2)

    torch.manual_seed(0)
    model = Mixed()
    optimised = compiled(model, fullgraph=True)
    params = list(model.named_parameters())
    results = []
    for fn in (model, optimised):
        with torch.autocast("cpu", dtype):
            results.append(run(fn, data(2, 3, 4, 4), params=params))
    assert results[0].outs[0].dtype == dtype
    assert_outcome_equal(results[1], results[0])
    assert [s.status for s in sites()] == ["folded"]


def test_cpu_autocast_with_a_fused_site_is_as_near_as_eager() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 4, 1))
    optimised = compiled(model, fullgraph=True)
    params = list(model.named_parameters())
    results = []
    for fn in (model, optimised):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(run(fn, data(2, 3, 4, 4), params=params))
    exact = exact_of(model, data(2, 3, 4, 4))
    assert_outcome_near(results[1], results[0], exact, work=torch.bfloat16)
    assert [s.status for s in sites()] == ["fused"]


def test_autocast_region_inside_the_model_equals_eager() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.norm(self.conv(x))
            return F.silu(y).float() + x.mean()

    model = Inside()
    optimised = compiled(model)
    params = list(model.named_parameters())
    eager, outcome = (run(fn, data(2, 3, 4, 4), params=params) for fn in (model, optimised))
    assert_outcome_near(outcome, eager, exact_of(model, data(2, 3, 4, 4)), work=torch.bfloat16)


# ---- shapes and graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_dynamic_shapes_compile_once_for_all_sizes(train: bool) -> None:
    model = net().train(train)
    optimised = compiled(model, dynamic=True, fullgraph=True)
    for shape in [(2, 8, 3, 5), (3, 8, 3, 5), (5, 8, 3, 5), (2, 8, 6, 4), (4, 8, 7, 9)]:
        check(model, optimised, data(*shape))
    assert len(gnfuse.reports()) == 1, "a size must not recompile"
    check(model, optimised, data(1, 8, 3, 5))  # Dynamo itself specialises on 1
    count = len(gnfuse.reports())
    assert count <= 2
    for shape in [(1, 8, 4, 4), (3, 8, 5, 5)]:
        check(model, optimised, data(*shape))
    assert len(gnfuse.reports()) == count
    assert all(s.status in ("fused", "folded") for s in sites())


def test_dynamic_batch_still_raises_where_a_group_has_one_value() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 4), nn.SiLU())
    optimised = compiled(model, dynamic=True)
    check(model, optimised, data(3, 4, 1, 1))
    check(model, optimised, data(2, 4, 1, 1))
    with pytest.raises(ValueError, match="more than 1 value"):
        model(data(1, 4, 1, 1))
    with pytest.raises(Exception, match="more than 1 value"):
        optimised(data(1, 4, 1, 1))


def test_size_change_without_dynamic_recompiles_as_torch_does() -> None:
    model = net()
    optimised = compiled(model)
    for batch in (2, 3, 4, 5, 1):
        check(model, optimised, data(batch, 8, 3, 5))
    assert len(gnfuse.reports()) <= 3


def test_graph_breaks_give_a_report_for_each_graph() -> None:
    first, second = nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(F.silu(self.first(x)), 0.2)
            torch._dynamo.graph_break()
            return F.dropout(torch.relu(self.second(y)), 0.2)

    model = Broken()
    check(model, compiled(model), data())
    assert len(gnfuse.reports()) == 2
    assert [s.pattern for s in sites()] == [SILU, pattern_of(op("relu"), Dropout(0.2))]


def test_graph_break_in_the_middle_of_a_chain_ends_it() -> None:
    norm = nn.GroupNorm(4, 8)

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            y = F.silu(self.norm(x))
            torch._dynamo.graph_break()
            return F.dropout(y.clamp(0.0, 1.0), 0.2)

    model = Middle()
    check(model, compiled(model), data())
    assert [(s.status, s.pattern) for s in sites()] == [("fused", pattern_of(op("silu")))]


def test_graph_break_right_after_the_norm_is_refused() -> None:
    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            torch._dynamo.graph_break()
            return F.silu(y)

    model = After()
    check(model, compiled(model), data())
    assert [s.status for s in sites()] == ["refused"]


def test_fullgraph_with_data_dependent_python_around_is_torchs_own_error() -> None:
    norm = nn.GroupNorm(4, 8)

    def f(x: Tensor) -> Tensor:
        y = F.silu(norm(x))
        return y if y.sum().item() > 0 else -y

    with pytest.raises((torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
        compiled(f, fullgraph=True)(data())


def test_channels_last_model_equals_eager() -> None:
    model = net().to(memory_format=torch.channels_last)
    x = data().to(memory_format=torch.channels_last)
    check(model, compiled(model, fullgraph=True), x)
    assert_both_rewritten()


def test_nan_and_inf_inputs_equal_eager() -> None:
    model = net()
    optimised = compiled(model, fullgraph=True)
    x = data()
    x[0, 0, 0, 0], x[1, 7, 2, 4] = math.nan, math.inf
    check(model, optimised, x)


def test_training_steps_follow_eagers_trajectory_bit_for_bit() -> None:
    """Three SGD steps through a folded site between two linear layers: the same weights and generator at the end."""

    def build() -> nn.Module:
        torch.manual_seed(0)

        class Step3(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 2, 1)
                nn.init.zeros_(self.norm.weight)

            def forward(self, x: Tensor) -> Tensor:
                y = torch.min(self.norm(self.conv(x)), torch.tensor(0.0)).clamp(0.0, 1.0)
                return self.out(F.dropout(y, 0.2))

        return Step3()

    ends = []
    for optimise in (False, True):
        model = build()
        fn = compiled(model, fullgraph=True) if optimise else model
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for step in range(3):
            sgd.zero_grad()
            (fn(data(2, 3, 6, 6, seed=step)) - 1).square().mean().backward()
            sgd.step()
        ends.append((model.state_dict(), torch.get_rng_state()))
    for key, value in ends[0][0].items():
        assert torch.equal(value, ends[1][0][key]), key
    assert torch.equal(ends[0][1], ends[1][1])
    assert [s.status for s in sites()] == ["folded"]


def test_vmap_over_a_site_equals_eager() -> None:
    w, b = torch.linspace(0.5, 1.5, 8), torch.linspace(-0.5, 0.5, 8)

    def f(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda t: F.silu(F.group_norm(t, 4, w, b)))(x)

    def g(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda t: t.clamp(0.0, 1.0))(F.group_norm(x[0], 4, w, b))

    def h(x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: F.silu(F.group_norm(t, 4, w, b)).square().sum())(x[0])

    for fn in (f, g, h):
        torch._dynamo.reset()
        x = torch.stack([data(), data(seed=6)])
        eager = run(fn, x, grad=False)
        assert_outcome_near(run(compiled(fn), x, grad=False), eager, eager)


def test_tensor_subclass_input_is_left_alone_and_equals_eager() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    norm = nn.GroupNorm(4, 8, affine=False)

    def f(x: Tensor) -> Tensor:
        return F.silu(norm(x))

    x = TwoTensor(data(), data(seed=6))
    out, eager = compiled(f)(x), f(x)
    assert type(out) is type(eager)
    for part in ("a", "b"):
        torch.testing.assert_close(getattr(out, part), getattr(eager, part))
    assert [s.status for s in sites()] == ["refused"]
    assert "subclass" in sites()[0].reason


def test_two_models_compiled_side_by_side_do_not_mix() -> None:
    one, two = net(), net().eval()
    with torch.no_grad():
        two.a.weight.fill_(0.5)
    fast_one, fast_two = compiled(one), compiled(two)
    for _ in range(2):
        check(one, fast_one, data())
        check(two, fast_two, data())


def test_explain_traces_and_runs_nothing() -> None:
    model = net()
    x = data().requires_grad_()
    state = torch.get_rng_state()
    report = gnfuse.explain(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert gnfuse.reports() == [], "explain is not the backend"
    assert [(s.status, s.pattern) for s in report.sites] == [("fused", SILU), ("folded", FOLD)]
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    eager = run(model, data(), params=model.named_parameters())
    assert eager.outs[0].shape == (2, 8, 3, 5)


# ---- activation checkpointing -------------------------------------------------------------------------------


def masks_of(fn: Callable[[Tensor], Tensor], norm: nn.GroupNorm) -> tuple[Tensor, Tensor, Tensor]:
    """The mask that forward applied, the one backward used, and the generator state at the end.

    One sample of one pixel: beta's gradient is then the mask times the upstream gradient, channel by channel.
    """
    torch.manual_seed(4)
    norm.zero_grad()
    out = fn(torch.linspace(-1, 1, norm.num_channels).view(1, -1, 1, 1).requires_grad_())
    out.sum().backward()
    assert norm.bias.grad is not None
    forward, backward = out.detach().flatten() != 0, norm.bias.grad != 0
    return forward, backward, torch.get_rng_state()


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpoint_recomputes_the_mask_of_forward(use_reentrant: bool, inner: str) -> None:
    norm = nn.GroupNorm(4, 256)

    def site(t: Tensor) -> Tensor:
        return F.dropout(norm(t) + 30.0, 0.5)

    def f(x: Tensor) -> Tensor:
        return checkpoint(site, x * 1.0, use_reentrant=use_reentrant)

    optimised = compiled(f, options={"inner": inner})
    eager = masks_of(f, norm)
    assert torch.equal(eager[0], eager[1])
    for _ in range(2):
        forward, backward, state = masks_of(optimised, norm)
        assert torch.equal(forward, backward), "backward used another mask than forward"
        assert torch.equal(forward, eager[0])
        assert torch.equal(state, eager[2])
    found = [s.status for s in sites()]
    assert found
    assert set(found) == {"fused"}


def test_checkpoint_around_the_compiled_model_equals_eager() -> None:
    model = net()
    optimised = compiled(model)
    params = list(model.named_parameters())

    def around(fn: Any) -> Callable[[Tensor], Any]:
        return lambda x: checkpoint(fn, x, use_reentrant=False)

    eager, outcome = (run(around(fn), data(), params=params) for fn in (model, optimised))
    assert_outcome_near(outcome, eager, exact_of(model, data()))


def test_checkpoint_with_a_dropout_before_and_after_keeps_all_masks() -> None:
    model = net()

    def f(x: Tensor) -> Any:
        x = F.dropout(x, 0.1)
        y, z = checkpoint(model, x, use_reentrant=False)
        return F.dropout(y, 0.3), z

    params = list(model.named_parameters())
    optimised = compiled(f, fullgraph=True)
    eager, outcome = (run(fn, data(), params=params) for fn in (f, optimised))
    assert_outcome_near(outcome, eager, eager)


# ---- threads ------------------------------------------------------------------------------------------------


def in_threads(call: Callable[[int], Any], count: int = 4) -> list[Any]:
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def work(i: int) -> None:
        try:
            barrier.wait()
            results[i] = call(i)
        except BaseException as error:  # handed to the main thread
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results


def test_threads_calling_one_compiled_model_get_eagers_values() -> None:
    model = net().eval()
    optimised = compiled(model)
    inputs = [data(seed=i) for i in range(4)]
    with torch.no_grad():
        optimised(inputs[0])

        def call(i: int) -> Any:
            with torch.no_grad():
                return [optimised(inputs[i]) for _ in range(5)]

        for x, results in zip(inputs, in_threads(call), strict=True):
            eager = run(model, x, grad=False)
            for outs in results:
                assert_outcome_near(Outcome(outs, {}, eager.rng), eager, exact_of(model, x, grad=False))


def test_threads_share_the_generator_without_losing_or_repeating_a_draw() -> None:
    """Each thread's mask is one of those that as many eager calls draw, each once; the generator ends where they do."""
    norm = nn.GroupNorm(4, 64)

    def f(x: Tensor) -> Tensor:
        return F.dropout(norm(x) + 30.0, 0.5)

    x = data(1, 64, 16, 16)
    optimised = compiled(f, fullgraph=True)
    with torch.no_grad():
        optimised(x)
        torch.manual_seed(9)
        expected = [f(x) != 0 for _ in range(8)]
        end = torch.get_rng_state()

        def call(i: int) -> Any:
            with torch.no_grad():
                return [optimised(x) != 0 for _ in range(2)]

        torch.manual_seed(9)
        masks = [mask for both in in_threads(call) for mask in both]
    assert torch.equal(torch.get_rng_state(), end)
    left = list(expected)
    for mask in masks:
        index = next((i for i, m in enumerate(left) if torch.equal(m, mask)), None)
        assert index is not None, "a mask that eager would not have drawn, or one twice"
        left.pop(index)


# ---- no kernels ---------------------------------------------------------------------------------------------


def test_without_kernels_the_program_runs_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no C++ compiler found (simulated)"
    monkeypatch.setattr(gnfuse.kernels, "available", lambda: reason)
    model = net()
    params = list(model.named_parameters())
    eager, outcome = (run(fn, data(), params=params) for fn in (model, compiled(model)))
    assert_outcome_equal(outcome, eager)
    assert [s.status for s in sites()] == ["refused", "refused"]
    assert all(reason in s.reason for s in sites())
    gm, report = gnfuse.rewrite(torch.fx.symbolic_trace(model))
    assert not report
    assert all(reason in s.reason for s in report.sites)
    assert "gnfuse" not in gm.code


def python(code: str, folder: Path, **env: str) -> dict[str, Any]:
    """Runs ``code`` in a fresh process; its last line of output is JSON."""
    full = {k: v for k, v in os.environ.items() if not k.startswith(("GNFUSE_", "TORCHINDUCTOR_", "CXX"))}
    full |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])} | env
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=full, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


NO_COMPILER = """
import json, torch
import torch.nn.functional as F
norm = torch.nn.GroupNorm(4, 8)
def f(x):
    return F.dropout(F.silu(norm(x)), 0.2)
x = torch.randn(2, 8, 3, 5)
torch.manual_seed(1); eager = f(x); state = torch.get_rng_state()
fast = torch.compile(f, backend="gnfuse", options={"inner": "aot_eager"})
torch.manual_seed(1); out = fast(x)
import gnfuse
sites = [s for r in gnfuse.reports() for s in r.sites]
print(json.dumps({"equal": torch.equal(out, eager), "state": torch.equal(torch.get_rng_state(), state),
                  "status": [s.status for s in sites], "reason": [s.reason for s in sites],
                  "available": gnfuse.kernels.available()}))
"""


def test_process_without_a_compiler_or_a_built_library_runs_and_says_why(tmp_path: Path) -> None:
    """No import of gnfuse before torch.compile: the entry point alone makes the backend known."""
    (tmp_path / "bin").mkdir()
    home = tmp_path / "home"
    home.mkdir()
    found = python(
        NO_COMPILER,
        tmp_path,
        PATH=str(tmp_path / "bin"),
        HOME=str(home),
        XDG_CACHE_HOME=str(home / ".cache"),
        GNFUSE_CACHE_DIR=str(tmp_path / "cache"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    assert found["equal"]
    assert found["state"]
    assert found["status"] == ["refused"]
    assert found["available"]
    assert "compiler" in found["available"]
    assert found["available"] in found["reason"][0]


# ---- caches -------------------------------------------------------------------------------------------------

CACHED = """
import json, sys, torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
torch.manual_seed(0)
norm, other = torch.nn.GroupNorm(4, 8), torch.nn.GroupNorm(2, 8)
def f(x):
    y = F.dropout(F.silu(norm(x)), 0.2)
    z = torch.min(other(x), torch.tensor(0.5, device=x.device)).clamp(0.5, 1.0)
    return y * 2, F.dropout(z, 0.2)
x = torch.randn(2, 8, 3, 5)
def step(fn):
    torch.manual_seed(1)
    norm.zero_grad(); other.zero_grad()
    y, z = fn(x)
    state = torch.get_rng_state()
    (y.sum() + z.sum()).backward()
    return y.detach(), z.detach(), norm.weight.grad, norm.bias.grad, other.bias.grad, state
eager, outcome = step(f), step(torch.compile(f, backend="gnfuse", fullgraph=True))
import gnfuse
near = [torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5) for a, b in zip(eager, outcome)]
masks = torch.equal(eager[0] == 0, outcome[0] == 0) and torch.equal(eager[1], outcome[1])
print(json.dumps({"near": near, "masks": masks,
                  "status": [s.status for r in gnfuse.reports() for s in r.sites],
                  "aot": dict(counters["aot_autograd"]),
                  "inductor": {k: v for k, v in counters["inductor"].items() if "cache" in k}}))
"""


def test_second_process_hits_the_aotautograd_and_fx_graph_caches(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    first, second = python(CACHED, tmp_path, **env), python(CACHED, tmp_path, **env)
    for found in (first, second):
        assert all(found["near"]), found
        assert found["masks"]
        assert found["status"] == ["fused", "folded"]
    assert first["aot"].get("autograd_cache_miss") == 1, first
    assert first["aot"].get("autograd_cache_saved") == 1, first
    assert not first["aot"].get("autograd_cache_bypass"), first
    assert second["aot"].get("autograd_cache_hit") == 1, second
    assert not second["aot"].get("autograd_cache_miss"), second
    assert second["inductor"].get("fxgraph_cache_hit", 0) >= 1, second
    assert not second["inductor"].get("fxgraph_cache_miss"), second
    assert not second["inductor"].get("fxgraph_cache_bypass"), second


def test_inductor_training_step_with_inner_inductor_equals_eager() -> None:
    model = net()
    optimised = torch.compile(model, backend="gnfuse", fullgraph=True)
    check(model, optimised, data())
    assert_both_rewritten()
