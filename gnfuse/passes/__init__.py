"""From an FX graph to a rewritten one: read → match → fold → plan → rewrite, one module each.

`run` is the whole of it; `gnfuse.rewrite` and the backend call it.
"""

from __future__ import annotations

import copy
import logging
import os

from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from gnfuse import kernels
from gnfuse.passes import effects, match, rewrite
from gnfuse.passes.plan import Plan, plan
from gnfuse.passes.positions import Positions
from gnfuse.report import Report, Site

logger = logging.getLogger("gnfuse")


def run(gm: GraphModule, *, apply: bool = True, gain: bool = False) -> Report:
    """Rewrite every site of the graph and of the graphs inside it (bodies of higher-order ops), in place.

    A fault of the pass itself never reaches the caller: the graphs are put back as they were and the report says so
    (``GNFUSE_RAISE=1`` raises instead, for whoever looks for the fault).

    Args:
        gm: any dialect; fake values in ``node.meta`` are used where they are.
        apply: False plans and reports only.
        gain: leave alone what Inductor, which compiles the rest, would run faster.
    """
    saved = [(module, _copied(module.graph)) for _, module in _graph_modules(gm)] if apply else []
    try:
        with _disable_current_modes():  # a backend is called under fake modes, in which constants have no values
            return _run(gm, apply, gain)
    except Exception as fault:
        if os.environ.get("GNFUSE_RAISE") == "1":
            raise
        logger.warning("gnfuse left this graph alone after an internal fault", exc_info=True)
        for module, graph in saved:
            module.graph = graph
        return Report(notes=(f"internal fault, graph left alone: {type(fault).__name__}: {fault}",))


def _copied(graph: Graph) -> Graph:
    """The graph again, with what Dynamo notes on placeholders: a deep copy leaves it out, and AOTAutograd needs it."""
    again = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, again.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return again


def _run(gm: GraphModule, apply: bool, gain: bool) -> Report:
    sites: list[Site] = []
    number: int | None = None
    for path, graph_module in _graph_modules(gm):
        planned = plans(graph_module, path, gain=gain)
        sites.extend(p.site if isinstance(p, Plan) else p for p in planned)
        accepted = [p for p in planned if isinstance(p, Plan)] if apply else []
        if not accepted:
            continue
        kernels.load()
        for one in accepted:
            number = rewrite.next_site(gm) if number is None else number + 1
            rewrite.apply(one, graph_module, number)
        graph_module.graph.lint()
        graph_module.recompile()
    return Report(tuple(sites))


def draws(gm: GraphModule) -> bool:
    """Whether a fused op of the rewritten module, or of a graph inside it, draws a dropout mask."""
    return rewrite.next_site(gm) > 0


def draws_elsewhere(gm: GraphModule) -> bool:
    """Whether another op of the module may draw random numbers."""
    fused = rewrite.fused_ops()
    return any(
        effects.draws(node) and node.target not in fused
        for _, module in _graph_modules(gm)
        for node in module.graph.nodes
    )


def plans(gm: GraphModule, path: str = "", *, gain: bool = False) -> list[Plan | Site]:
    """What would be done at each GroupNorm of this one graph, in program order."""
    positions = Positions(gm.graph)
    return [plan(found, gm, positions, path, gain=gain) for found in match.matches(gm)]


def _graph_modules(gm: GraphModule) -> list[tuple[str, GraphModule]]:
    return [(name, module) for name, module in gm.named_modules() if isinstance(module, GraphModule)]
