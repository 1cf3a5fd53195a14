"""The pass as a function: `rewrite` on any FX graph, `explain` on any callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from gnfuse import passes
from gnfuse.options import Options, own_options
from gnfuse.report import Report


def rewrite(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> tuple[GraphModule, Report]:
    """Rewrite every GroupNorm site of an FX graph, in place.

    Args:
        gm: from ``torch.fx.symbolic_trace``, Dynamo, ``torch.export(...).module()``, ``make_fx`` or AOTAutograd.
        example_inputs: the graph's inputs (only shapes, dtypes and devices are read). Needed where the graph has no
            fake values of its own and no parameters, and for everything that depends on a shape or dtype.
        options: gnfuse's own options.

    Returns:
        The same module, and the report: one `Site` for each GroupNorm. ``state_dict`` keys, ``train()``/``eval()``
        switching and ``node.meta`` stay; where no site is rewritten the graph is not touched.

    Raises:
        TypeError: ``gm`` is not a GraphModule.
        ValueError: an unknown option.
    """
    if not isinstance(gm, GraphModule):
        raise TypeError(f"rewrite() takes a torch.fx.GraphModule, got {type(gm).__name__}: trace the module first")
    own_options(options)
    if example_inputs is not None:
        _record_fake_values(gm, example_inputs)
    return gm, passes.run(gm)


def _record_fake_values(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Propagate fake tensors through a graph that has none. What cannot be propagated stays unknown."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    if any(key in node.meta for node in gm.graph.nodes for key in ("example_value", "val")):
        return
    try:
        FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*example_inputs)
    except Exception:  # - data-dependent code, or inputs that do not fit: the graph says less, that is all
        for node in gm.graph.nodes:
            node.meta.pop("val", None)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """What ``backend="gnfuse"`` would do with ``fn(*args, **kwargs)``: traces it, computes no graph, changes no tensor
    and no generator.

    Python code of ``fn`` around the traced graphs does run; where a graph breaks it sees zeros. Like
    ``torch._dynamo.explain``, this resets Dynamo's caches: what is compiled already compiles again at its next call.

    Returns:
        One report for all of its graphs.
    """
    found: list[Report] = []

    def plan_only(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(passes.run(gm, apply=False, gain=True))
        return lambda *inputs: _pretend(gm)

    torch._dynamo.reset()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.compile(fn, backend=plan_only)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return Report(tuple(s for r in found for s in r.sites), tuple(n for r in found for n in r.notes))


def _pretend(gm: GraphModule) -> tuple[Any, ...]:
    """Zeros in the place of the graph's outputs."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    return tuple(_zeros_for(value) for value in output.args[0])


def _zeros_for(value: object) -> object:
    recorded = value.meta.get("example_value") if isinstance(value, torch.fx.Node) else value
    if isinstance(recorded, torch.Tensor):
        size, stride = [int(n) for n in recorded.size()], [int(n) for n in recorded.stride()]
        made = torch.empty_strided(size, stride, dtype=recorded.dtype, device=recorded.device).zero_()
        return made.requires_grad_(recorded.requires_grad)
    return int(recorded) if isinstance(recorded, torch.SymInt) else recorded
