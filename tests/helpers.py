"""What the suite shares: one module traced in each FX dialect, and comparisons with eager that miss nothing."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

# ---- running ------------------------------------------------------------------------------------------------


@dataclass(repr=False)  # pytest would print the tensors
class Outcome:
    """One call: what it returned, the gradients by name, and where the default generator ended."""

    outs: tuple[Tensor, ...]
    grads: dict[str, Tensor | None]
    rng: Tensor


def upstream(like: Tensor, seed: int = 7) -> Tensor:
    """A fixed upstream gradient, the same numbers for every dtype and layout, off the default generator."""
    g = torch.randn(like.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return g.to(like.dtype)


def flat(value: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor))


def run(
    fn: Callable[..., Any],
    *args: Any,
    params: Iterable[tuple[str, Tensor]] = (),
    grad: bool = True,
    seed: int = 1234,
) -> Outcome:
    """Calls ``fn`` on copies of ``args`` (layout kept) under a fixed seed; with ``grad``, backward from every output.

    The gradients are those of ``params`` (whose ``.grad`` is cleared before and after) and of the floating ``args``,
    named ``arg0``, ``arg1``, ...
    """
    params = list(params)
    fresh = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    leaves = {f"arg{i}": a for i, a in enumerate(fresh) if isinstance(a, Tensor) and a.is_floating_point()}
    for _, p in params:
        p.grad = None
    if grad:
        for leaf in leaves.values():
            leaf.requires_grad_()
    torch.manual_seed(seed)
    with torch.set_grad_enabled(grad):
        outs = flat(fn(*fresh))
    rng = torch.get_rng_state()
    if grad:
        wanted = [o for o in outs if o.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [upstream(o) for o in wanted])
    grads = {name: None if t.grad is None else t.grad.detach().clone() for name, t in [*params, *leaves.items()]}
    for _, p in params:
        p.grad = None
    return Outcome(tuple(o.detach() for o in outs), grads if grad else {}, rng)


# ---- comparing ----------------------------------------------------------------------------------------------


def assert_equal(actual: Tensor | None, expected: Tensor | None, what: str = "value", strides: bool = True) -> None:
    """``==`` with NaN at the same places; dtype, shape and (optionally) strides the same."""
    if actual is None or expected is None:
        assert actual is expected, f"{what}: one is None: {actual} / {expected}"
        return
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, eager {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, eager {tuple(expected.shape)}"
    if strides:
        assert actual.stride() == expected.stride(), f"{what}: strides {actual.stride()}, eager {expected.stride()}"
    nan_a, nan_e = actual.isnan(), expected.isnan()
    assert torch.equal(nan_a, nan_e), f"{what}: NaN at {int(nan_a.sum())} places, eager {int(nan_e.sum())}"
    same = (actual == expected) | nan_e
    if not bool(same.all()):
        first = f"first {actual[~same][:3].tolist()}, eager {expected[~same][:3].tolist()}"
        raise AssertionError(f"{what}: {int((~same).sum())} of {same.numel()} differ, {first}")


def assert_outcome_equal(actual: Outcome, expected: Outcome, strides: bool = True) -> None:
    """Outputs, gradients and generator: all bit for bit."""
    assert len(actual.outs) == len(expected.outs)
    for i, (a, e) in enumerate(zip(actual.outs, expected.outs, strict=True)):
        assert_equal(a, e, f"output {i}", strides)
    assert torch.equal(actual.rng, expected.rng), "the generator is not where eager leaves it"
    assert actual.grads.keys() == expected.grads.keys()
    for name, e in expected.grads.items():
        assert_equal(actual.grads[name], e, f"gradient of {name}", strides=False)


def assert_near(
    actual: Tensor, eager: Tensor, exact: Tensor, what: str, ulps: float = 4.0, work: torch.dtype | None = None
) -> None:
    """The error against float64 is at most 1.5 times eager's and a few ulps of the result's scale; same non-finites.

    ``work``: the dtype whose ulps count, where the values on the way were of a lower one than the result (autocast).
    """
    assert actual.dtype == eager.dtype, f"{what}: dtype {actual.dtype}, eager {eager.dtype}"
    assert actual.shape == eager.shape, f"{what}: shape {tuple(actual.shape)}, eager {tuple(eager.shape)}"
    if not eager.is_floating_point():  # a mask, an integer, a complex number: no rounding of ours is in it
        assert_equal(actual, eager, what, strides=False)
        return
    for kind, test in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        assert torch.equal(test(actual), test(eager)), f"{what}: {kind} elsewhere than eager's"
    finite = eager.isfinite()
    if not bool(finite.any()):
        return
    exact = exact[finite].double()
    error = float((actual[finite].double() - exact).abs().max())
    allowed = 1.5 * float((eager[finite].double() - exact).abs().max())
    allowed += ulps * torch.finfo(work or eager.dtype).eps * float(exact.abs().max())
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def assert_outcome_near(
    actual: Outcome, eager: Outcome, exact: Outcome, strides: bool = True, work: torch.dtype | None = None
) -> None:
    """Outputs and gradients as near to float64 as eager's; generator, strides and dtypes equal."""
    assert len(actual.outs) == len(eager.outs) == len(exact.outs)
    for i, (a, e, x) in enumerate(zip(actual.outs, eager.outs, exact.outs, strict=True)):
        if strides:
            assert a.stride() == e.stride(), f"output {i}: strides {a.stride()}, eager {e.stride()}"
        assert_near(a, e, x, f"output {i}", work=work)
    assert torch.equal(actual.rng, eager.rng), "the generator is not where eager leaves it"
    assert actual.grads.keys() == eager.grads.keys()
    for name, e in eager.grads.items():
        a, x = actual.grads[name], exact.grads[name]
        assert (a is None) == (e is None), f"gradient of {name}: one is None"
        if a is not None and e is not None and x is not None:
            assert_near(a, e, x, f"gradient of {name}", ulps=16.0, work=work)


# ---- tracing ------------------------------------------------------------------------------------------------

GRAPH_DIALECTS = ("symbolic_trace", "dynamo", "export", "pre_dispatch", "make_fx", "aot")
"""The graphs that `gnfuse.rewrite` is given directly; "aot" is a no_grad forward without decompositions."""


@dataclass(repr=False)
class Traced:
    """A graph, and how to call it: ``args`` as recorded at tracing, ``slots`` saying which of them are the inputs."""

    gm: torch.fx.GraphModule
    args: list[Any]
    slots: list[int]
    grad: bool = True
    nodes: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        self.nodes = frozenset(n.name for g in all_graphs(self.gm) for n in g.graph.nodes)

    def __call__(self, *inputs: Any) -> Any:
        args = list(self.args)
        for slot, value in zip(self.slots, inputs, strict=True):
            args[slot] = value
        return self.gm(*args)

    def original(self) -> Traced:
        """A copy of the graph as it is now, sharing its parameters."""
        return Traced(torch.fx.GraphModule(self.gm, copy.deepcopy(self.gm.graph)), self.args, self.slots, self.grad)


def all_graphs(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    return [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]


def _slots(args: Sequence[Any], inputs: Sequence[Tensor]) -> list[int]:
    found = []
    for x in inputs:
        same = [
            i
            for i, a in enumerate(args)
            if a is x or (isinstance(a, Tensor) and a.data_ptr() == x.data_ptr() and a.shape == x.shape)
        ]
        found.append(same[0])
    return found


class Capture:
    """A Dynamo backend that keeps each graph and the arguments of its first call, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.args: list[list[Any]] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        index = len(self.graphs)
        self.graphs.append(gm)
        self.args.append([])

        def call(*args: Any) -> Any:
            if not self.args[index]:
                self.args[index] = list(args)
            return gm(*args)

        return call


def dynamo_graph(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Traced:
    """The graph that a backend gets (the first one), with the arguments Dynamo called it with."""
    torch._dynamo.reset()
    capture = Capture()
    state = torch.get_rng_state()
    torch.compile(fn, backend=capture, dynamic=dynamic)(*inputs)
    torch.set_rng_state(state)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return Traced(capture.graphs[0], capture.args[0], _slots(capture.args[0], tensors))


def aot_graph(fn: Callable[..., Any], *inputs: Any) -> Traced:
    """AOTAutograd's forward graph in no_grad, nothing decomposed."""
    torch._dynamo.reset()
    capture = Capture()
    state = torch.get_rng_state()
    with torch.no_grad():
        torch.compile(fn, backend=aot_autograd(fw_compiler=lambda gm, ex: make_boxed_func(capture(gm, ex))))(*inputs)
    torch.set_rng_state(state)
    return Traced(capture.graphs[0], capture.args[0], _slots(capture.args[0], inputs), grad=False)


def trace(dialect: str, module: nn.Module, *inputs: Tensor) -> Traced:
    """``module`` as a graph of one of `GRAPH_DIALECTS`; the generator is left where it was."""
    inputs = tuple(x.detach().clone() for x in inputs)  # tracing in-place code writes to its inputs
    state = torch.get_rng_state()
    try:
        if dialect == "symbolic_trace":
            return Traced(torch.fx.symbolic_trace(module), [None] * len(inputs), list(range(len(inputs))))
        if dialect == "dynamo":
            return dynamo_graph(module, *inputs)
        if dialect == "aot":
            return aot_graph(module, *inputs)
        if dialect == "export":
            gm: Any = torch.export.export(module, inputs).module()
        else:
            gm = make_fx(module, pre_dispatch=dialect == "pre_dispatch")(*inputs)
        return Traced(gm, [None] * len(inputs), list(range(len(inputs))))
    finally:
        torch.set_rng_state(state)


# ---- reading a rewritten graph ------------------------------------------------------------------------------


def fused_nodes(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The gnfuse ops in a graph and in the bodies under it, in order."""
    return [
        n
        for g in all_graphs(gm)
        for n in g.graph.nodes
        if n.op == "call_function" and str(n.target).startswith("gnfuse.")
    ]


def count_target(gm: torch.fx.GraphModule, *words: str) -> int:
    """Nodes whose target's text has one of ``words``, getitem left out."""
    return sum(
        any(w in str(n.target) for w in words)
        for g in all_graphs(gm)
        for n in g.graph.nodes
        if n.op.startswith("call") and n.target is not operator.getitem
    )


# ---- fixtures: a test file that imports them has them for all of its tests ---------------------------------------


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """ATen splits even a tiny GroupNorm over threads: 15 ms instead of 20 us where both cores are busy otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_internal_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The pass leaves a graph alone after a fault of its own, and logs it: right for users, a failure here."""
    yield
    faults = [r.getMessage() for r in caplog.get_records("call") if "internal fault" in r.getMessage()]
    assert not faults, faults
