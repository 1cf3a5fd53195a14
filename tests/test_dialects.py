"""Every spelling of every op in every dialect, and every trap of dialects.md.

A spelling is checked twice: the report's pattern names the normalised op, and the rewritten graph gives eager's
outputs, gradients and generator state (as near to float64 as eager where the site is fused, bit for bit where folded).
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (  # noqa: F401 - fixtures
    Outcome,
    Traced,
    all_graphs,
    assert_near,
    assert_outcome_equal,
    assert_outcome_near,
    count_target,
    dynamo_graph,
    fused_nodes,
    no_internal_fault,
    one_thread,
    run,
    trace,
    upstream,
)
from torch import Tensor, nn

import gnfuse
from gnfuse.chain import Dropout, Op, Step, op, pretty_step
from gnfuse.report import Report, Site

T = torch.tensor
FX, DYNAMO, EXPORT, PRE, MAKE_FX, AOT = "symbolic_trace", "dynamo", "export", "pre_dispatch", "make_fx", "aot"
FOUR = (FX, DYNAMO, PRE, MAKE_FX)
PYTHON = (FX, DYNAMO)
ATEN = (PRE, MAKE_FX)
SIX = (FX, DYNAMO, EXPORT, PRE, MAKE_FX, AOT)


class Block(nn.Module):
    """GroupNorm, then ``f``: a function of one tensor, or the class of a module to make."""

    def __init__(self, f: Callable[..., Any], groups: int = 4, channels: int = 8) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.f = f() if isinstance(f, type) or getattr(f, "makes_module", False) else f
        with torch.no_grad():
            self.norm.weight.normal_(1, 0.3)
            self.norm.bias.normal_(0, 0.3)

    def forward(self, x: Tensor) -> Any:
        return self.f(self.norm(x))


def module(cls: type[nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """A maker of ``cls(*args, **kwargs)`` that `Block` recognises."""

    def make() -> nn.Module:
        return cls(*args, **kwargs)

    make.makes_module = True  # type: ignore[attr-defined]
    return make


def data(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (2, 8, 3, 5), generator=generator).to(dtype)


def exact_of(block: nn.Module, *args: Tensor, grad: bool = True) -> Outcome:
    """``block`` in float64 on the same numbers under the same seed (the CPU draws the same masks in every dtype)."""
    double = copy.deepcopy(block).double()
    return run(double, *[a.double() for a in args], params=double.named_parameters(), grad=grad)


def has_backward(block: nn.Module, *args: Tensor) -> bool:
    """False where eager's own backward raises: an op without a derivative, or a value it needs was written to."""
    try:
        run(block, *args, params=block.named_parameters())
    except RuntimeError as error:
        known = "derivative", "inplace operation", "does not have a device"  # the last: a GroupNorm with a bias alone
        if any(text in str(error) for text in known):
            return False
        raise
    return True


def pattern_of(*steps: Step) -> str:
    return " → ".join(["group_norm", *map(pretty_step, steps)])


@dataclass(repr=False)
class Checked:
    traced: Traced
    report: Report
    before: Outcome
    after: Outcome

    @property
    def site(self) -> Site:
        assert len(self.report.sites) == 1, self.report.sites
        return self.report.sites[0]


def check(
    dialect: str,
    block: nn.Module,
    *args: Tensor,
    exact: Outcome | bool | None = None,
    like_module: bool = True,
    grad: bool = True,
    strides: bool = True,
    example_inputs: bool = False,
) -> Checked:
    """Rewrites ``block``'s graph and compares it with the graph as it was and with the module.

    Folded everywhere: bit for bit. Else as near to ``exact`` (float64) as eager; ``exact=False`` says that there is no
    float64 reference, and compares with eager within a few ulps.
    """
    torch.manual_seed(0)
    traced = trace(dialect, block, *args)
    params = list(block.named_parameters())
    grad = grad and traced.grad and has_backward(block, *args)
    before = run(traced, *args, params=params, grad=grad)
    _, report = gnfuse.rewrite(traced.gm, args if example_inputs else None)
    traced.gm.graph.lint()
    for g in all_graphs(traced.gm):
        g.graph.lint()
    after = run(traced, *args, params=params, grad=grad)
    assert bool(report) == bool(fused_nodes(traced.gm)), "the report and the graph disagree"
    for site in report.sites:
        assert site.pattern.startswith("group_norm"), site
        assert site.status != "refused" or site.reason, "a refusal without a reason"
    references = [before]
    if like_module:
        references.append(run(block, *args, params=params, grad=grad))
    for reference in references:
        if all(site.status != "fused" for site in report.sites):
            assert_outcome_equal(after, reference, strides=strides and dialect != AOT)
        else:
            if exact is False:
                x = reference
            else:
                x = exact if isinstance(exact, Outcome) else exact_of(block, *args, grad=grad)
            assert_outcome_near(after, reference, x, strides=strides and dialect != AOT)
    return Checked(traced, report, before, after)


def assert_stops(checked: Checked, *steps: Step) -> None:
    """The chain is ``steps`` and ends with a reason at a node that the graph had; no step: the site is refused."""
    site = checked.site
    assert site.pattern == pattern_of(*steps), site
    assert site.status == ("fused" if steps else "refused"), site
    assert site.reason, "every stop says why"
    named = site.stopped_at or (site.node if not steps else "")
    assert named in checked.traced.nodes, f"{named!r} is no node of the graph as it was"


# ---- spellings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    name: str
    f: Callable[..., Any]
    steps: tuple[Step, ...]
    dialects: tuple[str, ...] = SIX
    exact: Callable[..., Any] | None = None  # float64 meaning where ``f`` would round

    def __str__(self) -> str:
        return self.name


def augmented(operation: Callable[[Any, Any], Any], c: float) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        return operation(x, c)

    return f


def spell(
    text: str, *steps: Step, dialects: tuple[str, ...] = SIX, exact: Callable[..., Any] | None = None
) -> Spelling:
    """A spelling given as Python source of an expression in ``x``, which is also its name."""
    scope = {"torch": torch, "F": F, "nn": nn, "T": T, "module": module, "operator": operator}
    source = text if text.startswith("module(") else f"lambda x: {text}"
    return Spelling(text, eval(source, scope), steps, dialects, exact)


def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


MINIMUM = [
    spell(text, op("minimum", 0.5))
    for text in (
        "torch.min(x, T(0.5))",
        "torch.min(T(0.5), x)",
        "torch.min(input=x, other=T(0.5))",
        "torch.min(x, other=T(0.5))",
        "torch.minimum(x, T(0.5))",
        "torch.minimum(T(0.5), x)",
        "torch.minimum(input=x, other=T(0.5))",
        "x.min(T(0.5))",
        "x.min(other=T(0.5))",
        "x.minimum(T(0.5))",
        "T(0.5).minimum(x)",
        "torch.min(x, torch.tensor(0.5, device=x.device))",
        "torch.min(x, torch.tensor(0.5, dtype=x.dtype, device=x.device))",
        "torch.min(x, torch.full((), 0.5))",
        "torch.min(x, torch.full((), 0.5, dtype=x.dtype, device=x.device))",
        "torch.min(x, torch.full([], fill_value=0.5))",
        "torch.min(x, x.new_tensor(0.5))",
        "torch.min(x, x.new_full((), 0.5))",
        "torch.min(x, torch.as_tensor(0.5))",
        "torch.min(x, torch.scalar_tensor(0.5))",
        "torch.min(x, torch.tensor(0.5, dtype=torch.float64))",
        "torch.min(x, torch.tensor(0.5, dtype=torch.float16))",
    )
] + [
    spell("torch.minimum(x, torch.zeros(()))", op("minimum", 0)),
    spell("torch.minimum(x, torch.zeros((), device=x.device, dtype=x.dtype))", op("minimum", 0)),
    spell("torch.minimum(torch.ones(()), x)", op("minimum", 1)),
    spell("torch.minimum(x, T(1))", op("minimum", 1)),
    spell("torch.min(x, torch.full((), 1))", op("minimum", 1)),
    spell("torch.min(x, x.new_zeros(()))", op("minimum", 0)),
    spell("torch.min(x, x.new_ones(()))", op("minimum", 1)),
    spell("torch.minimum(x, T(float('inf')))", op("minimum", math.inf)),
]
MAXIMUM = [
    spell(text, op("maximum", -0.5))
    for text in (
        "torch.max(x, T(-0.5))",
        "torch.max(T(-0.5), x)",
        "torch.max(input=x, other=T(-0.5))",
        "torch.maximum(x, T(-0.5))",
        "torch.maximum(T(-0.5), x)",
        "torch.maximum(input=x, other=T(-0.5))",
        "x.max(T(-0.5))",
        "x.maximum(T(-0.5))",
        "x.maximum(other=T(-0.5))",
        "torch.max(x, torch.full((), -0.5, device=x.device))",
    )
]
BOTH = op("clamp", -0.5, 0.75)
LOW, HIGH = op("clamp", -0.5, math.inf), op("clamp", -math.inf, 0.75)
CLAMP = (
    [
        spell(text, BOTH)
        for text in (
            "torch.clamp(x, -0.5, 0.75)",
            "torch.clamp(x, min=-0.5, max=0.75)",
            "torch.clamp(input=x, max=0.75, min=-0.5)",
            "torch.clamp(x, -0.5, max=0.75)",
            "torch.clip(x, -0.5, 0.75)",
            "torch.clip(x, min=-0.5, max=0.75)",
            "x.clamp(-0.5, 0.75)",
            "x.clamp(min=-0.5, max=0.75)",
            "x.clip(-0.5, 0.75)",
            "x.clamp_(-0.5, 0.75)",
            "x.clip_(-0.5, 0.75)",
            "torch.clamp_(x, -0.5, 0.75)",
            "torch.clip_(x, -0.5, 0.75)",
        )
    ]
    + [
        spell(text, LOW)
        for text in (
            "torch.clamp(x, -0.5)",
            "torch.clamp(x, min=-0.5)",
            "torch.clamp(x, -0.5, None)",
            "torch.clip(x, min=-0.5)",
            "torch.clamp_min(x, -0.5)",
            "torch.clamp_min(x, min=-0.5)",
            "torch.clamp_min_(x, -0.5)",
            "x.clamp(min=-0.5)",
            "x.clamp_min(-0.5)",
            "x.clamp_min_(-0.5)",
        )
    ]
    + [
        spell(text, HIGH)
        for text in (
            "torch.clamp(x, None, 0.75)",
            "torch.clamp(x, max=0.75)",
            "torch.clamp(input=x, max=0.75)",
            "torch.clamp_max(x, 0.75)",
            "torch.clamp_max(x, max=0.75)",
            "torch.clamp_max_(x, 0.75)",
            "x.clip(max=0.75)",
            "x.clamp_max(0.75)",
            "x.clamp_max_(0.75)",
        )
    ]
    + [spell("torch.clamp(x, -1, 1)", op("clamp", -1, 1)), spell("x.clamp(0, 2)", op("clamp", 0, 2))]
)
HARDTANH = [
    spell("F.relu6(x)", op("hardtanh", 0, 6)),
    spell("F.relu6(x, inplace=True)", op("hardtanh", 0, 6)),
    spell("module(nn.ReLU6)", op("hardtanh", 0, 6)),
    spell("module(nn.ReLU6, inplace=True)", op("hardtanh", 0, 6)),
    spell("F.hardtanh(x)", op("hardtanh", -1, 1)),
    spell("F.hardtanh(x, -0.5, 0.75)", op("hardtanh", -0.5, 0.75)),
    spell("F.hardtanh(input=x, min_val=-0.5, max_val=0.75)", op("hardtanh", -0.5, 0.75)),
    spell("F.hardtanh(x, -0.5, 0.75, inplace=True)", op("hardtanh", -0.5, 0.75)),
    spell("F.hardtanh_(x, -0.5, 0.75)", op("hardtanh", -0.5, 0.75)),
    spell("module(nn.Hardtanh)", op("hardtanh", -1, 1)),
    spell("module(nn.Hardtanh, -0.5, 0.75)", op("hardtanh", -0.5, 0.75)),
    spell("module(nn.Hardtanh, -0.5, 0.75, inplace=True)", op("hardtanh", -0.5, 0.75)),
]
RELU = [
    spell(text, op("relu"))
    for text in (
        "torch.relu(x)",
        "torch.relu_(x)",
        "F.relu(x)",
        "F.relu(input=x)",
        "F.relu(x, True)",
        "F.relu(x, inplace=True)",
        "F.relu_(x)",
        "x.relu()",
        "x.relu_()",
        "module(nn.ReLU)",
        "module(nn.ReLU, inplace=True)",
    )
]
THRESHOLD = [
    spell(text, op("threshold", 0.1, -0.3))
    for text in (
        "F.threshold(x, 0.1, -0.3)",
        "F.threshold(x, threshold=0.1, value=-0.3)",
        "F.threshold(x, 0.1, -0.3, inplace=True)",
        "F.threshold_(x, 0.1, -0.3)",
        "torch.threshold(x, 0.1, -0.3)",
        "torch.threshold_(x, 0.1, -0.3)",
        "module(nn.Threshold, 0.1, -0.3)",
        "module(nn.Threshold, 0.1, -0.3, inplace=True)",
    )
]
ACTIVATIONS = [
    *[
        spell(text, op("leaky_relu", slope))
        for text, slope in (
            ("F.leaky_relu(x)", 0.01),
            ("F.leaky_relu(x, 0.1)", 0.1),
            ("F.leaky_relu(x, negative_slope=0.1)", 0.1),
            ("F.leaky_relu(x, 0.1, inplace=True)", 0.1),
            ("F.leaky_relu_(x, 0.1)", 0.1),
            ("module(nn.LeakyReLU)", 0.01),
            ("module(nn.LeakyReLU, 0.1)", 0.1),
            ("module(nn.LeakyReLU, 0.1, inplace=True)", 0.1),
        )
    ],
    *[
        spell(text, op("silu"))
        for text in (
            "F.silu(x)",
            "F.silu(x, inplace=True)",
            "module(nn.SiLU)",
            "module(nn.SiLU, inplace=True)",
            "x * torch.sigmoid(x)",
            "torch.sigmoid(x) * x",
            "x * x.sigmoid()",
            "torch.mul(x, F.sigmoid(x))",
            "x.sigmoid().mul(x)",
        )
    ],
    spell("F.gelu(x)", op("gelu")),
    spell("F.gelu(x, approximate='none')", op("gelu")),
    spell("module(nn.GELU)", op("gelu")),
    spell("F.gelu(x, approximate='tanh')", op("gelu_tanh")),
    spell("module(nn.GELU, 'tanh')", op("gelu_tanh")),
    spell("module(nn.GELU, approximate='tanh')", op("gelu_tanh")),
    *[
        spell(text, op("sigmoid"))
        for text in (
            "torch.sigmoid(x)",
            "torch.sigmoid_(x)",
            "F.sigmoid(x)",
            "x.sigmoid()",
            "x.sigmoid_()",
            "module(nn.Sigmoid)",
        )
    ],
    *[
        spell(text, op("tanh"))
        for text in ("torch.tanh(x)", "torch.tanh_(x)", "F.tanh(x)", "x.tanh()", "x.tanh_()", "module(nn.Tanh)")
    ],
    spell("F.hardswish(x)", op("hardswish")),
    spell("F.hardswish(x, inplace=True)", op("hardswish")),
    spell("module(nn.Hardswish)", op("hardswish")),
    spell("module(nn.Hardswish, inplace=True)", op("hardswish")),
    spell("F.hardsigmoid(x)", op("hardsigmoid")),
    spell("F.hardsigmoid(x, inplace=True)", op("hardsigmoid")),
    spell("module(nn.Hardsigmoid)", op("hardsigmoid")),
    spell("module(nn.Hardsigmoid, inplace=True)", op("hardsigmoid")),
    spell("F.elu(x)", op("elu", 1)),
    spell("F.elu(x, 0.7)", op("elu", 0.7)),
    spell("F.elu(x, alpha=0.7, inplace=True)", op("elu", 0.7)),
    spell("F.elu_(x, 0.7)", op("elu", 0.7)),
    spell("module(nn.ELU)", op("elu", 1)),
    spell("module(nn.ELU, 0.7)", op("elu", 0.7)),
    spell("module(nn.ELU, alpha=0.7, inplace=True)", op("elu", 0.7)),
    spell("F.softplus(x)", op("softplus", 1, 20)),
    spell("F.softplus(x, 2.0, 1.5)", op("softplus", 2, 1.5)),
    spell("F.softplus(x, beta=2, threshold=1.5)", op("softplus", 2, 1.5)),
    spell("module(nn.Softplus)", op("softplus", 1, 20)),
    spell("module(nn.Softplus, beta=2, threshold=1.5)", op("softplus", 2, 1.5)),
    spell("F.mish(x)", op("mish")),
    spell("F.mish(x, inplace=True)", op("mish")),
    spell("module(nn.Mish)", op("mish")),
    spell("module(nn.Mish, inplace=True)", op("mish")),
]
ARITHMETIC = [
    *[
        spell(text, op("neg"))
        for text in ("-x", "torch.neg(x)", "torch.negative(x)", "x.neg()", "x.neg_()", "operator.neg(x)")
    ],
    *[
        spell(text, op("add", 1.5))
        for text in (
            "x + 1.5",
            "1.5 + x",
            "torch.add(x, 1.5)",
            "torch.add(input=x, other=1.5)",
            "x.add(1.5)",
            "x.add_(1.5)",
            "operator.iadd(x, 1.5)",
        )
    ],
    *[
        spell(text, op("add", -1.5))
        for text in ("x - 1.5", "torch.sub(x, 1.5)", "torch.subtract(x, 1.5)", "x.sub(1.5)", "x.sub_(1.5)")
    ],
    spell("operator.isub(x, 1.5)", op("add", -1.5)),
    spell("1.5 - x", op("rsub", 1.5)),
    spell("torch.rsub(x, 1.5)", op("rsub", 1.5)),
    *[
        spell(text, op("mul", 2.5))
        for text in (
            "x * 2.5",
            "2.5 * x",
            "torch.mul(x, 2.5)",
            "torch.multiply(x, 2.5)",
            "x.mul(2.5)",
            "x.mul_(2.5)",
            "operator.imul(x, 2.5)",
        )
    ],
    spell("x * 3", op("mul", 3)),
    spell("x + x", op("mul", 2)),
    spell("torch.add(x, x)", op("mul", 2)),
    *[
        spell(text, op("div", 2.5))
        for text in (
            "x / 2.5",
            "torch.div(x, 2.5)",
            "torch.true_divide(x, 2.5)",
            "x.div(2.5)",
            "x.div_(2.5)",
            "operator.itruediv(x, 2.5)",
        )
    ],
    spell("2.5 / (x.abs() + 1)", op("abs"), op("add", 1), op("rdiv", 2.5), dialects=PYTHON),
    *[spell(text, op("abs")) for text in ("abs(x)", "torch.abs(x)", "torch.absolute(x)", "x.abs()", "x.abs_()")],
    *[
        spell(text, op("square"))
        for text in (
            "x * x",
            "x ** 2",
            "x ** 2.0",
            "torch.mul(x, x)",
            "torch.square(x)",
            "torch.pow(x, 2)",
            "x.square()",
            "x.square_()",
            "x.pow(2)",
            "x.pow_(2)",
        )
    ],
]


def same(x: Tensor) -> Tensor:
    return x


CASTS = [
    spell(text, op("to", dtype), exact=same)
    for dtype, texts in {
        "bfloat16": (
            "x.bfloat16()",
            "x.to(torch.bfloat16)",
            "x.to(dtype=torch.bfloat16)",
            "x.type(torch.bfloat16)",
        ),
        "float16": ("x.half()", "x.to(torch.float16)"),
    }.items()
    for text in texts
] + [
    spell("torch.relu(x).bfloat16().float()", op("relu"), op("to", "bfloat16"), op("to", "float32"), exact=relu),
]
DROPOUT = [
    spell(text, op("relu"), Dropout(0.2))
    for text in (
        "F.dropout(torch.relu(x), 0.2)",
        "F.dropout(torch.relu(x), p=0.2)",
        "F.dropout(torch.relu(x), 0.2, True)",
        "F.dropout(input=torch.relu(x), p=0.2, training=True)",
        "F.dropout(torch.relu(x), 0.2, True, False)",
        "torch.dropout(torch.relu(x), 0.2, True)",
        "module(nn.Sequential, nn.ReLU(), nn.Dropout(0.2))",
        "module(nn.Sequential, nn.ReLU(), nn.Identity(), nn.Dropout(0.2), nn.Identity())",
        "module(nn.Sequential, nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Dropout(0.2))",
    )
] + [
    spell("F.dropout(x + 1.5, 0.2, inplace=True)", op("add", 1.5), Dropout(0.2)),
    spell("F.dropout(x + 1.5, 0.2, True, True)", op("add", 1.5), Dropout(0.2)),
    spell("torch.dropout_(x + 1.5, 0.2, True)", op("add", 1.5), Dropout(0.2)),
    spell(
        "module(nn.Sequential, nn.LeakyReLU(0.1), nn.Dropout(p=0.2, inplace=True))", op("leaky_relu", 0.1), Dropout(0.2)
    ),
    spell("torch.relu(F.dropout(x, 0.2))", Dropout(0.2), op("relu")),
    spell("module(nn.Sequential, nn.Dropout(0.2), nn.LeakyReLU(0.1))", Dropout(0.2), op("leaky_relu", 0.1)),
    spell("F.dropout(F.silu(x), 0.2).clamp(-1, 1) * 2", op("silu"), Dropout(0.2), op("clamp", -1, 1), op("mul", 2)),
    spell("F.dropout(F.silu(x), 0.2).tanh() * 2", op("silu"), Dropout(0.2), op("tanh"), op("mul", 2)),
    spell("torch.relu(F.dropout(x, 0.2, training=False))", op("relu")),
    spell("torch.relu(F.dropout(x, 0.2, False))", op("relu")),
    spell("torch.relu(F.dropout(x, 0.0))", op("relu")),
    spell("torch.relu(torch.dropout(x, 0.2, False))", op("relu")),
    # make_fx multiplies by a tensor of zero; AOTAutograd's native_dropout draws and gives plain zeros: own tests below
    spell("F.dropout(torch.relu(x), 1.0)", op("relu"), op("mul", 0), dialects=(FX, DYNAMO, EXPORT, PRE)),
]
TABLES: dict[str, list[Spelling]] = {
    "minimum": MINIMUM,
    "maximum": MAXIMUM,
    "clamp": CLAMP,
    "hardtanh": HARDTANH,
    "relu": RELU,
    "threshold": THRESHOLD,
    "activations": ACTIVATIONS,
    "arithmetic": ARITHMETIC,
    "casts": CASTS,
    "dropout": DROPOUT,
}
SPELLINGS = [spelling for table in TABLES.values() for spelling in table]


def block_of(f: Callable[..., Any]) -> Block:
    torch.manual_seed(11)
    return Block(f)


class Table(nn.Module):
    """The spellings side by side in one graph, so that a table is traced once: block i reads ``x[i]``."""

    def __init__(self, spellings: Sequence[Spelling], exact: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block_of((s.exact or s.f) if exact else s.f) for s in spellings)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [block(x[i]) for i, block in enumerate(self.blocks)]


@dataclass(repr=False)
class TableResult:
    spellings: list[Spelling]
    sites: tuple[Site, ...]
    fused: int
    eager: Outcome
    unrewritten: Outcome
    rewritten: Outcome
    exact: Outcome

    def of(self, outcome: Outcome, i: int) -> Outcome:
        """What ``outcome`` says of spelling i alone."""
        grads = {n: g for n, g in outcome.grads.items() if n.startswith(f"blocks.{i}.")}
        if outcome.grads.get("arg0") is not None:
            grads["x"] = outcome.grads["arg0"][i]  # type: ignore[index]
        return Outcome((outcome.outs[i],), grads, outcome.rng)


def spellings_in(table: str, dialect: str) -> list[Spelling]:
    """Those that ``dialect`` has. AOTAutograd has turned most into one by then: every third, as it is slow to trace."""
    there = [s for s in TABLES[table] if dialect in s.dialects]
    return there[::3] if dialect == AOT and table != "dropout" else there


@functools.cache
def table_result(table: str, dialect: str, dtype: torch.dtype) -> TableResult:
    spellings = spellings_in(table, dialect)
    block, double = Table(spellings).to(dtype), Table(spellings, exact=True).to(dtype).double()
    x = torch.stack([data(seed=20 + i, dtype=dtype) for i in range(len(spellings))])
    traced = trace(dialect, block, x)
    params, grad = list(block.named_parameters()), traced.grad
    eager = run(block, x, params=params, grad=grad)
    unrewritten = run(traced, x, params=params, grad=grad)
    _, report = gnfuse.rewrite(traced.gm)
    traced.gm.graph.lint()
    rewritten = run(traced, x, params=params, grad=grad)
    exact = run(double, x.double(), params=double.named_parameters(), grad=grad)
    return TableResult(spellings, report.sites, len(fused_nodes(traced.gm)), eager, unrewritten, rewritten, exact)


def check_spelling(table: str, spelling: Spelling, dialect: str, dtype: torch.dtype) -> None:
    result = table_result(table, dialect, dtype)
    found, expected = len(result.sites), len(result.spellings)
    assert found == expected, "one site for each GroupNorm, in the graph's order"
    i = result.spellings.index(spelling)
    site = result.sites[i]
    assert site.pattern == pattern_of(*spelling.steps), site
    assert site.status == "fused", site
    assert result.fused == expected
    rewritten, exact = result.of(result.rewritten, i), result.of(result.exact, i)
    assert_outcome_near(rewritten, result.of(result.eager, i), exact, strides=dialect != AOT)
    assert_outcome_near(rewritten, result.of(result.unrewritten, i), exact)


CASES = [(table, spelling) for table, spellings in TABLES.items() for spelling in spellings]
IN_BFLOAT16 = [(table, spelling) for table, spelling in CASES if table != "casts"]  # there they would be nothing


def check_in(dialects: Sequence[str], table: str, spelling: Spelling, dtype: torch.dtype) -> None:
    """`check_spelling` in each of ``dialects`` that has the spelling, so that one failure names all of its dialects."""
    failures = []
    for dialect in dialects:
        if spelling in spellings_in(table, dialect):
            try:
                check_spelling(table, spelling, dialect, dtype)
            except Exception as error:
                failures.append(f"{dialect}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("table", "spelling"), CASES, ids=[str(s) for _, s in CASES])
def test_spelling_is_read_and_equals_eager(table: str, spelling: Spelling) -> None:
    check_in(SIX, table, spelling, torch.float32)


@pytest.mark.parametrize(("table", "spelling"), IN_BFLOAT16, ids=[str(s) for _, s in IN_BFLOAT16])
def test_spelling_in_bfloat16_equals_eager(table: str, spelling: Spelling) -> None:
    check_in((FX, MAKE_FX), table, spelling, torch.bfloat16)


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize(
    "text",
    [
        "torch.add(x, 1.5, alpha=2)",
        "x + T(1.5)",
        "x * T(2.0)",
        "torch.clamp(x, T(-0.5), T(0.75))",
        "torch.clamp(x, min=T(-0.5))",
        "torch.min(x, T([0.5]))",
        "torch.min(x, torch.full((1,), 0.5))",
        "torch.min(x, torch.tensor(0.5).expand(5))",
        "torch.special.expit(x)",
        "x.to(x.device, torch.bfloat16)",
        "x.float()",
        "x.double()",
        "x.clamp(float('-inf'), float('inf'))",
        "x.reciprocal()",
        "x.pow(3)",
        "x.pow(1)",
        "x + 0",
        "x * 1",
        "x + True",
        "F.threshold(x, float('nan'), 1.0)",
        "F.hardtanh(x, 0.0, 0.0)",
        "F.softplus(x, beta=-1.0)",
        "F.leaky_relu(x, -0.5)",
        "F.elu(x, -0.5)",
        "F.elu(x, 0.0)",
        "x.to('cpu')",
        "x.contiguous()",
        "x.clone()",
        "x.detach().relu()",
        "F.normalize(x)",
        "(x > 0).to(x.dtype)",
        "x.to(torch.int32)",
        "x * 2j",
        "torch.where(x > 0, x, 0.1 * x)",
        "F.rrelu(x, 0.1, 0.3, training=True)",
    ],
)
def test_odd_spelling_is_never_wrong(text: str, dialect: str) -> None:
    """Whether it is read or not is free; the result, dtype, gradients and generator are not."""
    f = spell(text).f
    try:
        block_of(f)(data())
    except Exception:
        pytest.fail("eager itself rejects this spelling: no case")
    check(dialect, block_of(f), data(), exact=False)


def test_bfloat16_gradient_through_a_kink_after_rounded_steps_is_as_near_as_eagers() -> None:
    """Over many inputs, as one value may round over the bound by chance: mean error at most 1.5 times eager's."""
    block = block_of(lambda x: F.dropout(F.silu(x), 0.2).clamp(-1, 1) * 2).bfloat16()
    gm = torch.fx.symbolic_trace(block)
    gnfuse.rewrite(gm)
    params = list(block.named_parameters())
    errors = {"eager": 0.0, "gnfuse": 0.0}
    for seed in range(40):
        x = data(dtype=torch.bfloat16, seed=seed)
        exact = exact_of(block, x).grads["norm.weight"]
        for name, fn in (("eager", block), ("gnfuse", gm)):
            grad = run(fn, x, params=params).grads["norm.weight"]
            assert grad is not None
            assert exact is not None
            errors[name] += float((grad.double() - exact).abs().max()) / 40
    assert errors["gnfuse"] <= 1.5 * errors["eager"], errors


# ---- GroupNorm itself ---------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, 8))
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.f(x, self.weight, self.bias))


class Wrapped(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x))


def without_bias(norm: nn.GroupNorm) -> nn.GroupNorm:
    """As ``GroupNorm(bias=False)`` in the releases that have it."""
    norm.bias = None
    return norm


NORMS: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: Wrapped(nn.GroupNorm(4, 8)),
    "module_eps": lambda: Wrapped(nn.GroupNorm(4, 8, eps=1e-2)),
    "module_without_affine": lambda: Wrapped(nn.GroupNorm(4, 8, affine=False)),
    "module_without_bias": lambda: Wrapped(without_bias(nn.GroupNorm(4, 8))),
    "F_positional": lambda: Functional(lambda x, w, b: F.group_norm(x, 4, w, b, 1e-3)),
    "F_default_eps": lambda: Functional(lambda x, w, b: F.group_norm(x, 4, w, b)),
    "F_keywords": lambda: Functional(lambda x, w, b: F.group_norm(input=x, num_groups=4, weight=w, bias=b, eps=1e-3)),
    "F_no_affine": lambda: Functional(lambda x, w, b: F.group_norm(x, 4)),
    "F_weight_only": lambda: Functional(lambda x, w, b: F.group_norm(x, 4, w)),
    "F_bias_only": lambda: Functional(lambda x, w, b: F.group_norm(x, 4, None, b)),
    "torch_group_norm": lambda: Functional(lambda x, w, b: torch.group_norm(x, 4, w, b, 1e-3)),
    "torch_group_norm_keywords": lambda: Functional(
        lambda x, w, b: torch.group_norm(x, 4, weight=w, bias=b, eps=1e-3, cudnn_enabled=False)
    ),
    "native_group_norm": lambda: Functional(lambda x, w, b: torch.native_group_norm(x, w, b, 2, 8, 15, 4, 1e-3)[0]),
}


@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize("form", NORMS)
def test_group_norm_forms_are_found(form: str, dialect: str) -> None:
    # a symbolic_trace graph without a parameter says nothing of dtype and device: the inputs do
    checked = check(dialect, NORMS[form](), data(), example_inputs=dialect == FX)
    assert (checked.site.status, checked.site.pattern) == ("fused", pattern_of(op("relu")))


@pytest.mark.parametrize("dialect", SIX)
def test_lone_group_norm_is_refused_with_a_reason(dialect: str) -> None:
    checked = check(dialect, Block(lambda x: x), data())
    assert checked.site.status == "refused"
    assert "nothing to fuse" in checked.site.reason
    assert not checked.report


@pytest.mark.parametrize("dialect", FOUR)
def test_group_norm_into_a_convolution_is_refused(dialect: str) -> None:
    checked = check(dialect, Block(module(nn.Conv2d, 8, 4, 1)), data())
    assert_stops(checked)


@pytest.mark.parametrize("dialect", FOUR)
def test_graph_without_group_norm_is_left_as_it_is(dialect: str) -> None:
    traced = trace(dialect, nn.Sequential(nn.BatchNorm2d(8).eval(), nn.ReLU(), nn.Dropout(0.2)), data())
    code = traced.gm.code
    gm, report = gnfuse.rewrite(traced.gm)
    assert gm is traced.gm
    assert report.sites == ()
    assert not report
    assert gm.code == code


class OwnGroupNorm(nn.GroupNorm):
    """A subclass with another forward: not the op."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3 + 1


def test_leaf_subclass_of_group_norm_with_its_own_forward_is_not_the_op() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, OwnGroupNorm) or super().is_leaf_module(m, name)

    block = Wrapped(OwnGroupNorm(4, 8))
    gm = torch.fx.GraphModule(block, Tracer().trace(block))
    eager = run(block, data(), params=block.named_parameters())
    gnfuse.rewrite(gm)
    assert_outcome_equal(run(gm, data(), params=block.named_parameters()), eager)


# ---- the bound ----------------------------------------------------------------------------------------------


class WithBound(nn.Module):
    """``kind``: where the bound of min comes from."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
        self.kind = kind
        if kind == "parameter":
            self.bound = nn.Parameter(T(0.5))
        elif kind == "module attribute":
            self.bound = T(0.5)
        else:
            self.register_buffer("bound", T(0.5), persistent=kind == "buffer")

    def forward(self, x: Tensor) -> Tensor:
        return torch.min(torch.relu(self.norm(x)), self.bound).clamp(0.0, 1.0)


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize("kind", ["buffer", "non-persistent buffer", "parameter", "module attribute"])
def test_tensor_of_the_module_is_no_constant_bound(kind: str, dialect: str) -> None:
    block = WithBound(kind)
    checked = check(dialect, block, data())
    if kind != "module attribute":
        assert_stops(checked, op("relu"))
    params = [(n, p) for n, p in block.named_parameters()]
    with torch.no_grad():
        block.bound.fill_(0.125)
    bound = getattr(checked.traced.gm, "bound", None)
    if isinstance(bound, Tensor) and bound is not block.bound:
        bound.data.fill_(0.125)
    eager = run(block, data(), params=params)
    assert_outcome_near(run(checked.traced, data(), params=params), eager, exact_of(block, data()))


class TwoInputs(nn.Module):
    def __init__(self, f: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
        self.f = f

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.f(self.norm(x), other)


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize(
    "f",
    [
        lambda y, t: torch.min(torch.relu(y), t),
        lambda y, t: torch.relu(y).clamp(min=t),
        lambda y, t: torch.relu(y).clamp(t - 1, t),
        lambda y, t: torch.relu(y) + t,
        lambda y, t: torch.relu(y) * t,
        lambda y, t: t / (torch.relu(y) + 1),
    ],
    ids=["min", "clamp_min", "clamp", "add", "mul", "div"],
)
@pytest.mark.parametrize("shape", [(), (1, 8, 1, 1)], ids=["0-dim", "per-channel"])
def test_tensor_input_is_no_constant(shape: tuple[int, ...], f: Callable[..., Any], dialect: str) -> None:
    block = TwoInputs(f)
    checked = check(dialect, block, data(), data(*shape, seed=9).abs() + 0.25 if shape else T(0.5))
    assert checked.site.status == "fused"
    assert checked.site.pattern.startswith(pattern_of(op("relu")))
    assert checked.site.reason
    again = data(*shape, seed=10).abs() + 0.5 if shape else T(0.75)  # another value of it
    exact = exact_of(block, data(), again)
    params = list(block.named_parameters())
    assert_outcome_near(
        run(checked.traced, data(), again, params=params), run(block, data(), again, params=params), exact
    )


@pytest.mark.parametrize("dialect", FOUR)
def test_one_element_1d_bound_that_promotes_ends_the_chain(dialect: str) -> None:
    block = Block(lambda x: torch.min(torch.relu(x), torch.tensor([0.5]))).bfloat16()
    checked = check(dialect, block, data(dtype=torch.bfloat16))
    assert checked.after.outs[0].dtype == torch.float32
    assert checked.site.pattern == pattern_of(op("relu"))
    assert checked.site.reason


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_0_dim_bound_of_a_wider_dtype_keeps_bfloat16(dtype: torch.dtype, dialect: str) -> None:
    block = Block(lambda x: torch.min(torch.relu(x), torch.tensor(1, dtype=dtype))).bfloat16()
    checked = check(dialect, block, data(dtype=torch.bfloat16))
    assert checked.after.outs[0].dtype == torch.bfloat16
    assert checked.site.pattern == pattern_of(op("relu"), op("minimum", 1))


@pytest.mark.parametrize("dialect", FOUR)
def test_bound_written_in_place_is_not_its_first_value(dialect: str) -> None:
    def f(x: Tensor) -> Tensor:
        bound = torch.zeros((), dtype=x.dtype)
        bound.add_(0.5)
        return torch.min(torch.relu(x), bound).clamp(0.0, 1.0)

    def g(x: Tensor) -> Tensor:
        bound = torch.tensor(0.0)
        bound.fill_(0.5)
        return torch.min(torch.relu(x), bound).clamp(0.0, 1.0)

    for function in (f, g):
        checked = check(dialect, Block(function), data())
        assert float(checked.after.outs[0].max()) == 0.5


@pytest.mark.parametrize("dialect", FOUR)
def test_bound_written_in_place_after_its_use(dialect: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        bound = torch.zeros((), dtype=x.dtype)
        y = torch.min(torch.relu(x), bound).clamp(0.0, 1.0)
        bound.add_(0.5)
        return y, bound + 0

    check(dialect, Block(f), data())


@pytest.mark.parametrize("dialect", [DYNAMO, EXPORT, PRE, MAKE_FX, AOT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bounds_are_compared_after_rounding_to_the_dtype(dtype: torch.dtype, dialect: str) -> None:
    """0.3 as a float32 tensor is 0.30000001192..., as clamp's Python number 0.3: one number once rounded."""
    block = Block(lambda x: torch.min(x, torch.tensor(0.3)).clamp(0.3, 0.7)).to(dtype)
    checked = check(dialect, block, data(dtype=dtype))
    assert checked.site.status == "folded", checked.site


def test_bounds_are_not_rounded_to_a_dtype_that_the_graph_does_not_fix() -> None:
    """In float64 the two are two numbers, and a symbolic_trace graph may be moved there after the rewrite."""
    block = Block(lambda x: torch.min(x, torch.tensor(0.3)).clamp(0.3, 0.7))
    gm = torch.fx.symbolic_trace(block)
    gnfuse.rewrite(gm)
    block, gm = copy.deepcopy(block).double(), gm.double()
    eager = run(block, data(dtype=torch.float64), params=block.named_parameters())
    assert eager.outs[0].unique().numel() > 1
    assert_outcome_near(run(gm, data(dtype=torch.float64), params=gm.named_parameters()), eager, eager)


def test_sym_float_bound_is_no_constant() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor, high: float) -> Tensor:
        return F.group_norm(x, 4, w, b).relu().clamp(0.0, high)

    w, b = torch.linspace(0.5, 1.5, 8), torch.linspace(-0.5, 0.5, 8)
    torch._dynamo.reset()
    gnfuse.clear_reports()
    compiled = torch.compile(f, backend="gnfuse", options={"inner": "aot_eager"}, dynamic=True)
    for high in (0.3, 0.7, 0.3, 1.1, 2.5):
        assert_outcome_equal(run(compiled, data(), w, b, high, grad=False), run(f, data(), w, b, high, grad=False))
    assert all(site.pattern.startswith(pattern_of(op("relu"))) for r in gnfuse.reports() for site in r.sites)


@pytest.mark.parametrize("dialect", PYTHON)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bound_outside_the_dtype_range_still_raises(dtype: torch.dtype, dialect: str) -> None:
    """min(x, 0) → clamp(0, 1e39) would be the constant 0, but eager rejects the bound."""
    block = Block(lambda x: torch.min(x, torch.tensor(0.0)).clamp(0.0, 1e39)).to(dtype)
    x = data(dtype=dtype)
    with pytest.raises(RuntimeError):
        block(x)
    if dialect == FX:
        gm = torch.fx.symbolic_trace(block)
        gnfuse.rewrite(gm)
        with pytest.raises(RuntimeError):
            gm(x)
        return
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="gnfuse", options={"inner": "aot_eager"})
    with pytest.raises(Exception, match=r"overflow|convert"):
        compiled(x)


def test_wrong_dropout_p_still_raises() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.norm(x).clamp_max(0.0).clamp(0.0, 1.0), 1.5)

    gm = torch.fx.symbolic_trace(Wrong())
    gnfuse.rewrite(gm)
    with pytest.raises(ValueError, match="probability"):
        gm(data())


# ---- users --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize(
    "f",
    [
        lambda y: torch.min(y, torch.tensor(0.5, device=y.device)).clamp(0.5, 1.0),
        lambda y: torch.min(y, torch.tensor(0.5, dtype=y.dtype)).clamp(0.5, 1.0),
        lambda y: torch.min(y, torch.full((), 0.5, device=y.device, dtype=y.dtype)).clamp(0.5, 1.0),
        lambda y: torch.min(y, y.new_full((), 0.5)).clamp(0.5, 1.0),
        lambda y: torch.min(y, y.new_tensor(0.5)).clamp(0.5, 1.0),
    ],
    ids=["device", "dtype", "device+dtype", "new_full", "new_tensor"],
)
def test_bound_that_reads_metadata_of_the_group_norm_does_not_end_the_chain(
    f: Callable[..., Any], dialect: str
) -> None:
    checked = check(dialect, Block(f), data())
    assert checked.site.pattern == pattern_of(op("minimum", 0.5), op("clamp", 0.5, 1))
    assert checked.site.status == "folded"


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize(
    "f",
    [
        lambda y: torch.relu(y).reshape(y.shape[0], -1),
        lambda y: torch.relu(y).reshape(y.size(0), -1),
        lambda y: torch.relu(y).reshape(y.size()[0], -1),
        lambda y: torch.relu(y) + torch.zeros(y.shape[1:]),
        lambda y: torch.relu(y) + torch.ones((), device=y.device, dtype=y.dtype) * 0.5,
        lambda y: torch.relu(y).sum(dim=y.dim() - 1),
        lambda y: torch.relu(y).sum(dim=y.ndim - 1),
        lambda y: (torch.relu(y), torch.zeros(1, dtype=y.dtype)),
        lambda y: (torch.relu(y), y.numel()),
        lambda y: (torch.relu(y), y.dtype, y.device),
    ],
    ids=["shape", "size(0)", "size()", "shape[1:]", "device", "dim()", "ndim", "dtype", "numel", "returned"],
)
def test_users_of_metadata_are_not_users_of_the_value(f: Callable[..., Any], dialect: str) -> None:
    checked = check(dialect, Block(f), data())
    assert checked.site.status == "fused"
    assert checked.site.pattern.startswith(pattern_of(op("relu")))


def test_metadata_assertions_of_export_do_not_end_the_chain() -> None:
    checked = check(
        EXPORT, Block(lambda y: torch.relu(y).half()), data(), exact=exact_of(Block(relu), data()), grad=False
    )
    assert checked.site.pattern == pattern_of(op("relu"), op("to", "float16"))


@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize(
    ("f", "steps"),
    [
        (lambda y: (torch.relu(y), y), ()),
        (lambda y: (torch.relu(y), y * 2), ()),
        (lambda y: (F.silu(y), torch.tanh(y)), ()),
        (lambda y: torch.relu(y) + y.mean(), ()),
        (lambda y: (lambda r: (F.dropout(r, 0.2), r))(torch.relu(y)), (op("relu"),)),
        (lambda y: (lambda r: (r.clamp(max=0.5), r.sum(1)))(torch.relu(y)), (op("relu"),)),
        (lambda y: (lambda r: torch.cat([r, r.clamp(max=0.5)], 1))(torch.relu(y)), (op("relu"),)),
        (lambda y: (lambda d: (d * 2, d))(F.dropout(torch.relu(y), 0.2)), (op("relu"), Dropout(0.2))),
    ],
    ids=["norm-returned", "norm-used", "two-acts", "mean", "dropout", "sum", "cat", "after-dropout"],
)
def test_second_user_of_a_value_ends_the_chain_and_keeps_its_value(
    f: Callable[..., Any], steps: tuple[Step, ...], dialect: str
) -> None:
    assert_stops(check(dialect, Block(f), data()), *steps)


@pytest.mark.parametrize("dialect", SIX)
def test_folded_value_with_a_second_user_of_its_input_is_right(dialect: str) -> None:
    """min(y, 0) → clamp(0, 1) is constant, but y itself is returned too."""
    checked = check(dialect, Block(lambda y: (torch.min(y, torch.tensor(0.0)).clamp(0.0, 1.0), y)), data())
    assert checked.site.reason


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize(
    "text",
    [
        "torch.min(x)",
        "torch.min(x, 1)[0]",
        "torch.min(x, dim=1)[0]",
        "torch.min(x, 1, keepdim=True)[0]",
        "x.min()",
        "x.min(1)[0]",
        "x.min(dim=1).values",
        "torch.max(x)",
        "torch.max(x, 1).values",
        "x.max(dim=-1, keepdim=True)[0]",
        "torch.amin(x, 1)",
        "torch.amax(x, (1, 2))",
        "x.sum()",
        "x.mean((2, 3))",
    ],
)
def test_reduction_is_not_the_pointwise_op(text: str, dialect: str) -> None:
    inner = spell(text).f
    assert_stops(check(dialect, Block(lambda y: inner(torch.relu(y))), data()), op("relu"))


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize(
    "text",
    [
        "torch.fmin(x, T(0.5))",
        "torch.fmax(x, T(0.5))",
        "F.glu(x, 1)",
        "F.prelu(x, T([0.25]))",
        "torch.addcmul(x, T(2.0), T(3.0))",
        "torch.div(x, 0.3, rounding_mode='floor')",
        "torch.div(x, 0.3, rounding_mode='trunc')",
        "x // 0.3",
        "x % 0.3",
        "torch.softmax(x, 1)",
        "x > 0.5",
        "x * 2j",
        "x.to(torch.int32)",
        "x.reshape(2, -1)",
        "x.transpose(1, 2)",
        "x[:, :4]",
        "torch.cat([x, x], 1)",
        "F.max_pool2d(x, 2)",
        "F.alpha_dropout(x, 0.2, training=True)",
        "F.feature_alpha_dropout(x, 0.2, training=True)",
        "F.dropout2d(x, 0.2)",
        "module(nn.Dropout2d, 0.2)",
        "module(nn.AlphaDropout, 0.2)",
        "module(nn.FeatureAlphaDropout, 0.2)",
        "module(nn.PReLU)",
        "module(nn.GLU, 1)",
    ],
)
def test_what_is_not_in_the_language_ends_the_chain_with_a_reason(text: str, dialect: str) -> None:
    f = spell(text).f
    inner = f() if getattr(f, "makes_module", False) else f

    class Then(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, y: Tensor) -> Any:
            return self.inner(torch.relu(y))

    # alpha dropout's affine constants are no float64 reference of float32
    assert_stops(check(dialect, Block(module(Then)), data(), exact=False), op("relu"))


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize(("f", "rank"), [(F.dropout1d, 3), (F.dropout3d, 5)], ids=["dropout1d", "dropout3d"])
def test_feature_dropout_is_refused_by_name(f: Callable[..., Tensor], rank: int, dialect: str) -> None:
    x = data(2, 8, *(3,) * (rank - 2))
    checked = check(dialect, Block(lambda y: f(torch.relu(y), 0.2, training=True)), x)
    assert_stops(checked, op("relu"))
    if dialect in PYTHON:
        assert "dropout" in checked.site.reason.lower(), checked.site.reason


@pytest.mark.parametrize("dialect", FOUR)
def test_second_dropout_is_refused_and_draws_after_the_first(dialect: str) -> None:
    checked = check(dialect, Block(lambda y: F.dropout(F.dropout(torch.relu(y), 0.2), 0.4)), data())
    assert_stops(checked, op("relu"), Dropout(0.2))


# ---- modules ------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
        self.act = nn.SiLU()
        self.dropout = nn.Dropout(0.2)
        with torch.no_grad():
            self.norm.weight.normal_(1, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.act(self.norm(x)))


@pytest.mark.parametrize("traced_in", ["train", "eval"])
def test_train_and_eval_still_switch_the_dropout_after_a_rewrite(traced_in: str) -> None:
    block = Chain().train(traced_in == "train")
    gm = torch.fx.symbolic_trace(block)
    params = list(block.named_parameters())
    _, report = gnfuse.rewrite(gm)
    assert report.sites[0].pattern == pattern_of(op("silu"), Dropout(0.2))
    torch.manual_seed(1234)
    start = torch.get_rng_state()
    for train in (True, False, True):
        outcome = run(gm.train(train), data(), params=params)
        eager = run(block.train(train), data(), params=params)
        assert_outcome_near(outcome, eager, exact_of(block, data()))
        assert torch.equal(outcome.rng, start) is not train


@pytest.mark.parametrize("training", [True, False])
def test_toggling_only_the_dropout_submodule_still_works(training: bool) -> None:
    block = Chain().train(training)
    gm = torch.fx.symbolic_trace(block)
    gnfuse.rewrite(gm)
    params = list(block.named_parameters())
    for m in (gm, block):
        m.get_submodule("dropout").train(not training)
    outcome, eager = run(gm, data(), params=params), run(block, data(), params=params)
    assert_outcome_near(outcome, eager, exact_of(block, data()))
    zeros = int((outcome.outs[0] == 0).sum())
    assert (zeros > 10) is not training


@pytest.mark.parametrize("dialect", [FX, EXPORT, PRE, MAKE_FX])
def test_state_dict_keys_are_kept_and_its_values_are_used(dialect: str) -> None:
    block = Chain().eval()
    traced = trace(dialect, block, data())
    keys, parameters = list(traced.gm.state_dict()), [n for n, _ in traced.gm.named_parameters()]
    _, report = gnfuse.rewrite(traced.gm)
    assert report
    assert list(traced.gm.state_dict()) == keys
    assert [n for n, _ in traced.gm.named_parameters()] == parameters
    if dialect == FX:
        assert list(traced.gm.state_dict()) == list(block.state_dict())
    new = {k: torch.full_like(v, 0.25) for k, v in traced.gm.state_dict().items()}
    traced.gm.load_state_dict(new)
    with torch.no_grad():
        block.norm.weight.fill_(0.25)
        block.norm.bias.fill_(0.25)
    params = list(block.named_parameters())
    eager = run(block, data(), params=params, grad=False)
    assert_outcome_near(run(traced, data(), params=params, grad=False), eager, exact_of(block, data(), grad=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_symbolic_trace_graph_moved_to_another_dtype_after_the_rewrite(dtype: torch.dtype) -> None:
    """.1 and .3 round otherwise in each dtype; min(x, .1) → clamp(.1, .3) is a constant in all of them."""
    for f in (
        lambda y: F.dropout(torch.min(y, torch.tensor(0.1)).clamp(0.1, 0.3), 0.2),
        lambda y: F.dropout(torch.min(y, torch.tensor(0.1)).clamp(0.10000001, 0.3), 0.2),
        lambda y: F.dropout(F.silu(y).clamp(-0.1, 0.3), 0.2),
    ):
        block = block_of(f)
        gm = torch.fx.symbolic_trace(block)
        gnfuse.rewrite(gm)
        block, gm = copy.deepcopy(block).to(dtype), copy.deepcopy(gm).to(dtype)
        eager = run(block, data(dtype=dtype), params=block.named_parameters())
        outcome = run(gm, data(dtype=dtype), params=gm.named_parameters())
        assert_outcome_near(outcome, eager, exact_of(block, data(dtype=dtype)) if dtype != torch.float64 else eager)


def test_deepcopy_of_a_rewritten_graph_module_works() -> None:
    block = Chain()
    gm = torch.fx.symbolic_trace(block)
    gnfuse.rewrite(gm)
    clone = copy.deepcopy(gm)
    outcome, original = (run(m, data(), params=m.named_parameters()) for m in (clone, gm))
    assert_outcome_equal(outcome, original)
    assert clone.get_submodule("norm") is not gm.get_submodule("norm")


@pytest.mark.parametrize(
    "shape", [(1, 8, 2, 2), (3, 8, 4, 4), (2, 8), (2, 8, 7), (2, 8, 2, 3, 4), (0, 8, 3, 5)], ids=str
)
def test_symbolic_trace_graph_takes_other_shapes_and_ranks(shape: tuple[int, ...]) -> None:
    for f in (lambda y: F.dropout(F.silu(y), 0.2), lambda y: F.dropout(torch.min(y, T(0.5)).clamp(0.5, 1.0), 0.2)):
        block = block_of(f)
        gm = torch.fx.symbolic_trace(block)
        gnfuse.rewrite(gm)
        x = data(*shape)
        eager = run(block, x, params=block.named_parameters())
        outcome = run(gm, x, params=block.named_parameters())
        assert_outcome_near(outcome, eager, exact_of(block, x))


def test_one_value_per_group_raises_as_group_norm_does() -> None:
    x = torch.ones(1, 4, 1, 1)
    for f in (relu, lambda y: torch.min(y, T(0.0)).clamp(0.0, 1.0)):
        gm = torch.fx.symbolic_trace(Block(f, groups=4, channels=4))
        gnfuse.rewrite(gm)
        with pytest.raises(ValueError, match="more than 1 value"):
            gm(x)
        assert gm(torch.ones(2, 4, 1, 1)).shape == (2, 4, 1, 1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dialect", FOUR)
def test_modules_shared_at_two_places(dialect: str, inplace: bool) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)
            self.other = nn.GroupNorm(2, 8)
            self.act = nn.ReLU(inplace=inplace)
            self.dropout = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.dropout(self.act(self.norm(x)))
            z = self.dropout(self.act(self.other(y + x)))
            return self.act(self.norm(z) - 0.5)

    checked = check(dialect, Shared(), data())
    patterns = [s.pattern for s in checked.report.sites]
    one = pattern_of(op("relu"), Dropout(0.2))
    assert patterns == [one, one, pattern_of(op("add", -0.5), op("relu"))]
    assert [s.status for s in checked.report.sites] == ["fused"] * 3


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("register", [*HOOKS, "register_full_backward_pre_hook"])
@pytest.mark.parametrize("where", ["norm", "act", "dropout"])
def test_module_with_hooks_is_refused_and_its_hook_still_runs(where: str, register: str) -> None:
    block = Chain()
    calls: list[str] = []

    def hook(m: nn.Module, *args: Any) -> Any:
        calls.append(where)
        if register == "register_forward_hook":
            return args[1] + 100
        return None

    getattr(block.get_submodule(where), register)(hook)
    gm = torch.fx.symbolic_trace(block)
    calls.clear()
    params = list(block.named_parameters())
    eager = run(block, data(), params=params)
    expected = len(calls)
    assert expected
    _, report = gnfuse.rewrite(gm)
    calls.clear()
    outcome = run(gm, data(), params=params)
    assert len(calls) == expected
    (site,) = report.sites
    assert site.pattern == pattern_of(*{"norm": (), "act": (), "dropout": (op("silu"),)}[where])
    assert site.status == ("fused" if where == "dropout" else "refused")
    assert "hook" in site.reason
    if where == "dropout":
        assert_outcome_near(outcome, eager, eager)
    else:
        assert_outcome_equal(outcome, eager)


@pytest.mark.parametrize("style", ["parametrize", "weight_norm"])
def test_parametrized_module_is_refused_and_still_parametrized(style: str) -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    block = Chain()
    if style == "parametrize":
        nn.utils.parametrize.register_parametrization(block.norm, "weight", Double())
    else:
        block.norm.weight.data = block.norm.weight.data.view(8)
        nn.utils.parametrizations.weight_norm(block.norm)
    gm = torch.fx.symbolic_trace(block)
    eager = run(block, data(), params=block.named_parameters())
    _, report = gnfuse.rewrite(gm)
    outcome = run(gm, data(), params=block.named_parameters())
    assert all(s.status == "refused" and "parametri" in s.reason for s in report.sites)
    assert_outcome_equal(outcome, eager)


def test_dropout_flag_frozen_at_trace_time_is_noted() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(torch.relu(self.norm(x)), 0.2, self.training)

    gm = torch.fx.symbolic_trace(Frozen())
    _, report = gnfuse.rewrite(gm)
    (site,) = report.sites
    assert any("train" in note for note in site.notes), site.notes
    gm.eval()  # torch's own behaviour: the flag is frozen, and stays so
    torch.manual_seed(1)
    before = torch.get_rng_state()
    gm(data())
    assert not torch.equal(torch.get_rng_state(), before)


# ---- graph hygiene ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize("kind", ["folded", "fused"])
def test_rewriting_twice_changes_nothing(kind: str, dialect: str) -> None:
    f = {
        "folded": lambda y: F.dropout(torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0), 0.2),
        "fused": lambda y: F.dropout(F.silu(y), 0.2),
    }[kind]
    checked = check(dialect, Block(f), data())
    assert checked.site.status == kind
    gm = checked.traced.gm
    code, nodes = gm.code, [(n.name, n.target) for n in gm.graph.nodes]
    returned, report = gnfuse.rewrite(gm)
    assert returned is gm
    assert not report
    assert (gm.code, [(n.name, n.target) for n in gm.graph.nodes]) == (code, nodes)


@pytest.mark.parametrize("dialect", SIX)
def test_group_norm_and_chain_are_gone_after_a_rewrite(dialect: str) -> None:
    checked = check(dialect, Block(lambda y: F.dropout(F.silu(y), 0.2)), data())
    gm = checked.traced.gm
    assert len(fused_nodes(gm)) == 1
    assert (
        count_target(gm, "aten.silu", "aten.native_group_norm", "aten.group_norm", "bernoulli", "native_dropout") == 0
    )
    names = {getattr(n.target, "__name__", "") for n in gm.graph.nodes if n.op == "call_function"}
    assert not names & {"group_norm", "silu", "dropout"}
    assert "norm" not in [n.target for n in gm.graph.nodes if n.op == "call_module"]


@pytest.mark.parametrize("dialect", [DYNAMO, EXPORT, PRE, MAKE_FX, AOT])
@pytest.mark.parametrize("kind", ["folded", "fused"])
def test_meta_is_kept_on_what_replaces_a_node(kind: str, dialect: str) -> None:
    f = {
        "folded": lambda y: torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0) @ torch.ones(5, 2),
        "fused": lambda y: F.silu(y).bfloat16() @ torch.ones(5, 2).bfloat16(),
    }[kind]
    traced = trace(dialect, Block(f), data().to(memory_format=torch.channels_last))
    key = "example_value" if dialect == DYNAMO else "val"
    consumer = next(
        n for n in traced.gm.graph.nodes if "matmul" in n.name or n.name.startswith(("mm", "bmm", "view", "clone"))
    )
    last = next(a for a in consumer.all_input_nodes if a.meta[key].shape == (2, 8, 3, 5))
    old, others = last.meta, {n.name: dict(n.meta) for n in traced.gm.graph.nodes}
    _, report = gnfuse.rewrite(traced.gm)
    assert report.sites[0].status == kind
    new = next(a for a in consumer.all_input_nodes if a.meta[key].shape == (2, 8, 3, 5))
    value, was = new.meta[key], old[key]
    assert (value.shape, value.dtype, value.stride()) == (was.shape, was.dtype, was.stride())
    for n in [new, *fused_nodes(traced.gm)]:
        assert key in n.meta, f"{n.name} has no {key}"
        if "stack_trace" in old:
            assert n.meta.get("stack_trace"), f"{n.name} has lost its stack trace"
        if "nn_module_stack" in old:
            assert n.meta.get("nn_module_stack"), f"{n.name} has lost its module stack"
    for n in traced.gm.graph.nodes:
        if n.name in others and n is not new and not str(n.target).startswith("gnfuse"):
            assert others[n.name].keys() <= n.meta.keys(), n.name


@pytest.mark.parametrize("dialect", SIX)
def test_back_to_back_sites_are_both_rewritten(dialect: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.silu(self.b(F.dropout(torch.relu(self.a(x)), 0.2))), 0.4)

    checked = check(dialect, Two(), data())
    assert [s.pattern for s in checked.report.sites] == [
        pattern_of(op("relu"), Dropout(0.2)),
        pattern_of(op("silu"), Dropout(0.4)),
    ]
    assert len(fused_nodes(checked.traced.gm)) == 2


def test_site_names_its_source_line() -> None:
    class Located(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return torch.relu(y)

    line = Located.forward.__code__.co_firstlineno + 1
    traced = trace(DYNAMO, Located(), data())
    _, report = gnfuse.rewrite(traced.gm)
    assert report.sites[0].source.endswith(f"test_dialects.py:{line}")


# ---- in place and aliasing ----------------------------------------------------------------------------------


def old_name_relu(y: Tensor) -> Tensor:
    torch.relu_(y)
    return y


def old_name_chain(y: Tensor) -> tuple[Tensor, Tensor]:
    a = F.relu(y, inplace=True)
    b = a.clamp_(max=0.5)
    return y, b * 2


def old_name_then_more(y: Tensor) -> Tensor:
    y.mul_(2)
    y.clamp_(-1, 1)
    return F.silu(y) + y


def old_name_read_before(y: Tensor) -> tuple[Tensor, Tensor]:
    before = y * 1.5
    y.relu_()
    return before, y


def written_after_chain(y: Tensor) -> Tensor:
    z = torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0)
    z.add_(1)
    z[0].fill_(7.0)
    return z


def swish_in_place(y: Tensor) -> Tensor:
    y *= torch.sigmoid(y)
    return y


def view_written(y: Tensor) -> Tensor:
    v = y.view(-1)
    v[:5].fill_(3.0)
    return torch.relu(y)


def view_written_after(y: Tensor) -> tuple[Tensor, Tensor]:
    v = y.view(2, -1)
    r = F.silu(y)
    v.add_(1)
    return r, y


@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize(
    "f",
    [
        old_name_relu,
        old_name_chain,
        old_name_then_more,
        old_name_read_before,
        written_after_chain,
        swish_in_place,
        view_written,
        view_written_after,
    ],
    ids=lambda f: f.__name__,
)
def test_in_place_chains_give_eagers_values_under_every_name(f: Callable[..., Any], dialect: str) -> None:
    block = Block(f)
    check(dialect, block, data())


@pytest.mark.parametrize("dialect", [FX, DYNAMO, EXPORT, PRE, MAKE_FX])
@pytest.mark.parametrize("through", ["eval dropout", "p=0", "Identity"])
def test_write_through_what_aliases_its_input_reaches_the_input(through: str, dialect: str) -> None:
    passing: dict[str, Callable[[], nn.Module]] = {
        "eval dropout": lambda: nn.Dropout(0.5).eval(),
        "p=0": lambda: nn.Dropout(0.0),
        "Identity": nn.Identity,
    }

    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)
            self.through = passing[through]()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.relu(self.norm(x))
            z = self.through(y)
            z.add_(1)
            return y, z

    for alias in (Alias(), Alias().eval()):
        once = dialect == DYNAMO and through == "Identity"  # one object under both names: Dynamo returns it once
        checked = check(dialect, alias, data(), grad=False, like_module=not once, exact=False if once else None)
        eager = run(alias, data(), grad=False)
        for out in checked.after.outs:
            assert_near(out, eager.outs[0], eager.outs[1], "output")


@pytest.mark.parametrize("dialect", [FX, DYNAMO, PRE, MAKE_FX])
def test_write_to_an_alias_of_the_group_norm_before_the_chain(dialect: str) -> None:
    """The alias comes from a dropout that does nothing; the chain reads the norm's output after the write."""

    def f(y: Tensor) -> tuple[Tensor, Tensor]:
        z = F.dropout(y, 0.5, False)
        z.add_(1)
        return torch.relu(y), z

    check(dialect, Block(f), data(), grad=False)


class InputWritten(nn.Module):
    def __init__(self, how: str, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
        self.how, self.f = how, f

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        v = h.view(-1)
        y = self.norm(h)
        if self.how == "add_":
            h.add_(1)
        elif self.how == "view":
            v.mul_(h.sum())
        elif self.how == "copy_":
            h.copy_(torch.full_like(h, float("nan")))
        else:
            h[0].fill_(5.0)
        return self.f(y), h


@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize("how", ["add_", "view", "copy_", "setitem"])
@pytest.mark.parametrize("kind", ["folded", "fused"])
def test_input_of_group_norm_written_before_the_rest_of_the_chain(kind: str, how: str, dialect: str) -> None:
    f = {"folded": lambda y: torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0), "fused": lambda y: torch.relu(y)}[kind]
    check(dialect, InputWritten(how, f), data(), grad=False)


@pytest.mark.parametrize("dialect", SIX)
def test_weight_of_group_norm_written_before_the_rest_of_the_chain(dialect: str) -> None:
    class WeightWritten(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            w = w * 1
            y = F.group_norm(x, 4, w, None)
            w.zero_()
            return torch.relu(y), w

    check(dialect, WeightWritten(), data(), torch.linspace(0.5, 1.5, 8), grad=False)


# ---- randomness ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", FOUR)
@pytest.mark.parametrize(
    "f",
    [
        lambda y: (lambda r: (F.dropout(r, 0.2), r)[1])(torch.relu(y)),
        lambda y: (F.dropout(torch.relu(y), 0.2), y.new_ones(2))[1],
        lambda y: (F.dropout(torch.min(y, T(0.0)).clamp(0.0, 1.0), 0.2), y.new_ones(2))[1],
    ],
    ids=["dropout", "site", "folded-site"],
)
def test_dropout_whose_result_is_unused_still_moves_the_generator(f: Callable[..., Any], dialect: str) -> None:
    checked = check(dialect, Block(f), data())
    torch.manual_seed(1234)
    assert not torch.equal(checked.after.rng, torch.get_rng_state())


@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize("folded", [False, True])
def test_random_ops_keep_their_order(folded: bool, dialect: str) -> None:
    """The site's GroupNorm comes first, another random op next, the site's dropout last; and the other way round."""

    def steps(y: Tensor) -> Tensor:
        return torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0) if folded else F.silu(y)

    class Order(nn.Module):
        def __init__(self, late: bool) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 8)
            self.late = late

        def forward(self, x: Tensor) -> Any:
            y = steps(self.norm(x))
            if not self.late:
                y = F.dropout(y, 0.2)
            z = F.dropout(x + 1, 0.4)
            noise = torch.rand_like(x)
            if self.late:
                y = F.dropout(y, 0.2)
            return y, z, noise

    for late in (True, False):
        checked = check(dialect, Order(late), data(), exact=False)
        # before a random op or after it: read, or ended with a reason, but the chain before is done in both
        assert checked.site.status == ("folded" if folded else "fused")


@pytest.mark.parametrize("inner", ["aot_eager"])
@pytest.mark.parametrize("folded", [False, True])
def test_equal_sites_with_equal_arguments_draw_different_masks(folded: bool, inner: str) -> None:
    block = nn.GroupNorm(4, 8)

    def site(x: Tensor) -> Tensor:
        y = block(x)
        y = torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0) if folded else y + 3
        return F.dropout(y, 0.2)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return site(x), site(x)

    torch._dynamo.reset()
    gnfuse.clear_reports()
    compiled = torch.compile(f, backend="gnfuse", options={"inner": inner}, fullgraph=True)
    params = list(block.named_parameters())
    for grad in (True, False):
        eager = run(f, data(), params=params, grad=grad)
        outcome = run(compiled, data(), params=params, grad=grad)
        assert not torch.equal(outcome.outs[0], outcome.outs[1])
        if folded:
            assert_outcome_equal(outcome, eager)
        else:
            exact_params = copy.deepcopy(block).double()
            assert_outcome_near(outcome, eager, eager)
            del exact_params
    assert [s.status for s in gnfuse.reports()[0].sites] == ["folded" if folded else "fused"] * 2


@pytest.mark.parametrize("dialect", FOUR)
def test_dropout_with_p_1_is_a_product_with_zero(dialect: str) -> None:
    """NaN survives it, the generator does not move."""
    x = data()
    x[0, 0, 0, 0] = math.nan
    checked = check(dialect, Block(lambda y: F.dropout(torch.relu(y), 1.0)), x)
    assert int(checked.after.outs[0].isnan().sum()) == 2 * 15
    torch.manual_seed(1234)
    assert torch.equal(checked.after.rng, torch.get_rng_state())


def test_native_dropout_with_p_1_stays_what_the_aot_graph_computes() -> None:
    """It draws, and gives plain zeros."""
    x = data()
    x[0, 0, 0, 0] = math.nan
    checked = check(AOT, Block(lambda y: F.dropout(torch.relu(y), 1.0)), x, like_module=False)
    assert int(checked.after.outs[0].isnan().sum()) == int(checked.before.outs[0].isnan().sum())


# ---- regions and bodies -------------------------------------------------------------------------------------


def test_activation_checkpoint_body_is_rewritten() -> None:
    from torch.utils.checkpoint import checkpoint

    block = Chain()

    def f(x: Tensor) -> Tensor:
        return checkpoint(block, x * 2, use_reentrant=False)

    traced = dynamo_graph(f, data())
    _, report = gnfuse.rewrite(traced.gm)
    (site,) = report.sites
    assert site.status == "fused"
    assert site.pattern == pattern_of(op("silu"), Dropout(0.2))
    assert site.graph, "the path of the body"
    body = traced.gm.get_submodule(site.graph)
    assert isinstance(body, torch.fx.GraphModule)
    assert fused_nodes(body)
    body.graph.lint()


def test_cond_branches_are_rewritten_and_equal_eager() -> None:
    norm = nn.GroupNorm(4, 8)

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: F.silu(norm(t)), lambda t: torch.relu(norm(t)), (x,))

    torch._dynamo.reset()
    gnfuse.clear_reports()
    compiled = torch.compile(f, backend="gnfuse", options={"inner": "aot_eager"}, fullgraph=True)
    for x in (data().abs(), -data().abs()):
        eager = run(f, x, grad=False)
        assert_outcome_near(run(compiled, x, grad=False), eager, eager)
    sites = [s for r in gnfuse.reports() for s in r.sites]
    assert sorted({s.pattern for s in sites}) == [pattern_of(op("relu")), pattern_of(op("silu"))]
    assert all(s.status == "fused" and s.graph for s in sites)


@pytest.mark.parametrize("region", ["no_grad", "enable_grad", "autocast"])
def test_region_that_starts_between_norm_and_rest_ends_the_chain(region: str) -> None:
    norm = nn.GroupNorm(4, 8)
    inside: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "enable_grad": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }

    def f(x: Tensor) -> Tensor:
        y = torch.relu(norm(x))
        if region == "enable_grad":
            with torch.no_grad():
                y = norm(x)
                with torch.enable_grad():
                    return y.clamp(0.0, 1.0) * x
        with inside[region]():
            z = y.clamp(0.0, 0.5)
        return z * 2 + x

    params = list(norm.named_parameters())
    eager = run(f, data(), params=params)
    traced = dynamo_graph(f, data())
    _, report = gnfuse.rewrite(traced.gm)
    outcome = run(traced, data(), params=params)
    assert_outcome_near(outcome, eager, eager)
    first = report.sites[0]
    if region != "enable_grad":
        assert first.pattern == pattern_of(op("relu"))
        assert first.reason


def test_whole_chain_inside_a_region_keeps_its_grad_mode() -> None:
    norm = nn.GroupNorm(4, 8)

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.dropout(F.silu(norm(x)), 0.2)
        return y * x

    params = list(norm.named_parameters())
    eager = run(f, data(), params=params)
    traced = dynamo_graph(f, data())
    gnfuse.rewrite(traced.gm)
    outcome = run(traced, data(), params=params)
    assert_outcome_near(outcome, eager, eager)
    assert all(outcome.grads[n] is None for n, _ in params)


class Native(nn.Module):
    """torch.native_group_norm with its mean and rstd used elsewhere."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
        self.f = f

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, rstd = torch.native_group_norm(x, self.norm.weight, self.norm.bias, 2, 8, 15, 4, 1e-5)
        return self.f(y), mean * 2, rstd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dialect", SIX)
@pytest.mark.parametrize("kind", ["folded", "fused"])
def test_mean_and_rstd_of_native_group_norm_used_elsewhere(kind: str, dialect: str, dtype: torch.dtype) -> None:
    f = {"folded": lambda y: torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0), "fused": F.silu}[kind]
    check(dialect, Native(f).to(dtype), data(dtype=dtype), grad=False)


# ---- layouts ------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat([x, x], 3)[..., ::2],
    "channel_slice": lambda x: torch.cat([x, x], 1)[:, 3:11],
    "batch_first_permuted": lambda x: x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    "expanded": lambda x: x[:1].expand(2, 8, 3, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["folded", "fused"])
def test_layout_of_the_input_reaches_output_and_mask_as_in_eager(kind: str, layout: str) -> None:
    f = {
        "folded": lambda y: F.dropout(torch.min(y, torch.tensor(0.5)).clamp(0.5, 1.0), 0.2),
        "fused": lambda y: F.dropout(F.silu(y), 0.2),
    }[kind]
    block = block_of(f)
    x = LAYOUTS[layout](data())
    params = list(block.named_parameters())
    gm = torch.fx.symbolic_trace(block)
    _, report = gnfuse.rewrite(gm)
    assert report.sites[0].status == kind

    def call(m: nn.Module, x: Tensor, params: Any) -> Outcome:
        # the layout as it is, which a clone would not keep; and a leaf, as eager's GroupNorm crashes in the backward of
        # a channels_last input that needs no gradient (torch 2.13)
        x = x.detach().requires_grad_()
        torch.manual_seed(1234)
        out = m(x)
        rng = torch.get_rng_state()
        leaves = {**dict(params), "x": x}
        grads = torch.autograd.grad(out, list(leaves.values()), upstream(out))
        return Outcome((out.detach(),), dict(zip(leaves, grads, strict=True)), rng)

    eager, outcome = call(block, x, params), call(gm, x, params)
    double = copy.deepcopy(block).double()
    strided = torch.empty_strided(x.shape, x.stride(), dtype=torch.float64)
    if layout != "expanded":
        strided.copy_(x)
    else:
        strided = x[:1].double().expand(2, 8, 3, 5)
    exact = call(double, strided, list(double.named_parameters()))
    if kind == "folded":
        assert_outcome_equal(outcome, eager)
    else:
        assert_outcome_near(outcome, eager, exact)


def test_expected_texts_name_ops_of_the_ir() -> None:
    """The table above is about the IR: each op but the fold's own constant is spelled at least once."""
    from gnfuse.chain import OPS

    spelled = {s.name for spelling in SPELLINGS for s in spelling.steps if isinstance(s, Op)}
    assert set(OPS) - spelled == {"constant"}
