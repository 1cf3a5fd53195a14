"""Point 3 of issue 2: dialect × mode × dtype × scenario of no. 83's chain, each equal to eager in every respect.

Equal means: values bit for bit with NaN at the same places, gradients of the input and of every parameter, the state
of the generator after the call, strides and dtype. Every case also asserts what the report says was done and that the
fused op is in the graph, so that none passes by doing nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from helpers import (  # noqa: F401 - fixtures
    GRAPH_DIALECTS,
    Outcome,
    assert_outcome_equal,
    fused_nodes,
    no_internal_fault,
    one_thread,
    run,
    trace,
)
from torch import Tensor, nn

import gnfuse
from gnfuse.chain import op, pretty_step

NAN, INF = math.nan, math.inf
P = 0.2


class Net(nn.Module):
    """No. 83's network; without ``conv`` the GroupNorm reads the input itself."""

    def __init__(self, a: float, b: float, conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 16, 3) if conv else nn.Identity()
        self.norm = nn.GroupNorm(8, 16)
        self.dropout = nn.Dropout(P)
        self.a, self.b = a, b
        with torch.no_grad():
            self.norm.weight.normal_(1, 0.3)
            self.norm.bias.normal_(0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x = torch.min(x, torch.tensor(self.a, device=x.device))
        x = torch.clamp(x, self.a, self.b)
        return self.dropout(x)


def nothing(net: Net, x: Tensor) -> Tensor:
    return x


def negative_zeros(net: Net, x: Tensor) -> Tensor:
    """-0.0 in the input, in beta and so in GroupNorm's output, next to ordinary values."""
    with torch.no_grad():
        net.norm.bias.fill_(-0.0)
        net.norm.weight[::2] = 0.0
    x.view(-1)[::3] = -0.0
    x[0, : x.shape[1] // 2] = -0.0
    return x


def bad_group(value: float) -> Callable[[Net, Tensor], Tensor]:
    """One non-finite value: in the input, or (behind a convolution) in the convolution's bias, so in one group."""

    def change(net: Net, x: Tensor) -> Tensor:
        if isinstance(net.conv, nn.Conv3d):
            assert net.conv.bias is not None
            with torch.no_grad():
                net.conv.bias[5] = value
        else:
            x[1, 5, 0, 1, 2] = value
        return x

    return change


def gamma_beta_zero(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.norm.weight.zero_()
        net.norm.bias.zero_()
    return x


def channels_last(net: Net, x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last_3d)


@dataclass(frozen=True)
class Scenario:
    a: float
    b: float
    change: Callable[[Net, Tensor], Tensor] = nothing
    result: str = ""  # what the report must say of the constant


SCENARIOS = {
    "a=0": Scenario(0.0, 1.0, result="constant 0"),
    "a=.5": Scenario(0.5, 1.0, result="constant 0.5"),
    "b<a": Scenario(0.5, 0.2, result="constant 0.2"),
    "a=nan": Scenario(NAN, 1.0),
    "b=nan": Scenario(0.5, NAN),
    "-0.0": Scenario(-0.0, 1.0, negative_zeros, result="constant"),
    "nan_in_one_group": Scenario(0.0, 1.0, bad_group(NAN), result="constant 0"),
    "inf_in_one_group": Scenario(0.5, 1.0, bad_group(INF), result="constant 0.5"),
    "gamma=beta=0": Scenario(0.0, 1.0, gamma_beta_zero, result="constant 0"),
    "channels_last": Scenario(0.5, 1.0, channels_last, result="constant 0.5"),
}
BEHIND_CONV = ("a=0", "a=.5", "b<a", "nan_in_one_group", "gamma=beta=0")
CASES = [(name, False) for name in SCENARIOS] + [(name, True) for name in BEHIND_CONV]


def build(scenario: Scenario, conv: bool, train: bool, dtype: torch.dtype) -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    net = Net(scenario.a, scenario.b, conv).to(dtype).train(train)
    x = torch.randn((2, 3, 4, 5, 5) if conv else (2, 16, 2, 3, 3)).to(dtype)
    return net, scenario.change(net, x)


def expected_pattern(scenario: Scenario) -> str:
    steps = op("minimum", scenario.a), op("clamp", scenario.a, scenario.b)
    return " → ".join(["group_norm", *map(pretty_step, steps)])


def check_report(report: gnfuse.Report, scenario: Scenario, draws: bool) -> None:
    assert len(report.sites) == 1, f"one GroupNorm, one site: {report.sites}"
    (site,) = report.sites
    dropout = f" → dropout({P})" if draws else ""
    assert site.pattern.startswith(expected_pattern(scenario) + dropout), site.pattern
    if math.isnan(scenario.a) or math.isnan(scenario.b):  # NaN everywhere: a constant or a kernel, both are right
        assert site.status in ("folded", "fused"), site
        return
    assert site.status == "folded", site
    assert scenario.result in site.result, site.result
    assert site.proof, "a fold has a proof"
    assert site.guard == "local", "a NaN can come in through the input"
    assert report


def parametrize(test: Callable[..., None]) -> Callable[..., None]:
    for name, values in (("dtype", (torch.float32, torch.bfloat16)), ("train", (True, False))):
        ids = [str(v).removeprefix("torch.") if name == "dtype" else ("train" if v else "eval") for v in values]
        test = pytest.mark.parametrize(name, values, ids=ids)(test)
    return pytest.mark.parametrize("case", CASES, ids=[f"{n}{'-conv' if c else ''}" for n, c in CASES])(test)


def assert_draws_as_said(outcome: Outcome, train: bool) -> None:
    """The reference itself is what the case is about: it drew in training and only there."""
    torch.manual_seed(1234)
    assert torch.equal(outcome.rng, torch.get_rng_state()) != train


@pytest.mark.parametrize("dialect", [d for d in GRAPH_DIALECTS if d != "dynamo"])
@parametrize
def test_rewritten_graph_equals_eager(dialect: str, case: tuple[str, bool], train: bool, dtype: torch.dtype) -> None:
    scenario, conv = SCENARIOS[case[0]], case[1]
    net, x = build(scenario, conv, train, dtype)
    traced = trace(dialect, net, x)
    params = list(net.named_parameters())
    grad = traced.grad
    eager = run(net, x, params=params, grad=grad)
    unrewritten = run(traced, x, params=params, grad=grad)
    assert_draws_as_said(eager, train)

    returned, report = gnfuse.rewrite(traced.gm)

    assert returned is traced.gm, "in place"
    # a symbolic_trace graph keeps its dropout module switchable, whatever mode it was traced in
    check_report(report, scenario, draws=train or dialect == "symbolic_trace")
    assert fused_nodes(traced.gm), "nothing was swapped in"
    traced.gm.graph.lint()
    rewritten = run(traced, x, params=params, grad=grad)
    assert_outcome_equal(rewritten, unrewritten)
    # strides of the eager module: AOTAutograd's own graph may differ from it there
    assert_outcome_equal(rewritten, eager, strides=dialect != "aot")


@parametrize
def test_dynamo_backend_equals_eager(case: tuple[str, bool], train: bool, dtype: torch.dtype) -> None:
    scenario, conv = SCENARIOS[case[0]], case[1]
    net, x = build(scenario, conv, train, dtype)
    params = list(net.named_parameters())
    eager = run(net, x, params=params)
    assert_draws_as_said(eager, train)
    torch._dynamo.reset()
    gnfuse.clear_reports()
    compiled = torch.compile(net, backend="gnfuse", options={"inner": "aot_eager"}, fullgraph=True)

    outcome = run(compiled, x, params=params)

    reports = gnfuse.reports()
    assert len(reports) == 1
    check_report(reports[0], scenario, draws=train)
    assert_outcome_equal(outcome, eager)
    again = run(compiled, x, params=params)  # the second call runs what the first one compiled
    assert_outcome_equal(again, eager)
    with torch.no_grad():
        assert_outcome_equal(run(compiled, x, grad=False), run(net, x, grad=False))


def test_rewrites_do_not_mix_up_bounds_of_0_and_minus_0() -> None:
    """The two are equal numbers with unequal results: nothing kept from one rewrite may serve the other."""
    for a in (-0.0, 0.0, -0.0):
        torch.manual_seed(3)
        net = Net(a, 1.0, conv=False).eval()
        traced = trace("symbolic_trace", net, torch.randn(2, 16, 2, 3, 3))
        _, report = gnfuse.rewrite(traced.gm)
        assert report.sites[0].pattern.startswith(expected_pattern(Scenario(a, 1.0)))
        assert ("-0" in report.sites[0].result) == (math.copysign(1, a) < 0), report.sites[0].result
