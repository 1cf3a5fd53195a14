"""``torch.compile(model, backend="gnfuse")``: rewrite the Dynamo graph, then hand it to the inner backend."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from gnfuse import passes
from gnfuse.options import Options, split
from gnfuse.report import Report

_reports: list[Report] = []
_reports_lock = threading.Lock()


def gnfuse(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile`` finds under the name "gnfuse".

    Args:
        gm: a Dynamo graph; rewritten in place.
        example_inputs: as Dynamo gives them.
        mode: handed to Inductor ("reduce-overhead", "max-autotune", ...).
        options: gnfuse's own (`Options`); all others must be Inductor's and are handed on.

    Raises:
        ValueError: for an unknown option or inner backend, or a mode that the inner backend has not.
    """
    ours, inner_options = split(options)
    mode = mode or ours.mode
    if mode is not None and ours.inner != "inductor":
        raise ValueError(f"mode={mode!r} needs inner='inductor', not {ours.inner!r}")
    report = passes.run(gm)
    compiled = _compile_inner(ours, gm, example_inputs, mode, inner_options)
    # only now: Dynamo may throw an attempt away half-way through the inner backend, and trace again
    with _reports_lock:
        _reports.append(report)
    _log(report)
    return compiled


def reports() -> list[Report]:
    """What the backend did in this process, one report a compiled graph, oldest first."""
    with _reports_lock:
        return list(_reports)


def clear_reports() -> None:
    """Forget the reports so far."""
    with _reports_lock:
        _reports.clear()


def _log(report: Report) -> None:
    """``GNFUSE_LOG=1`` (or "report") prints every report to stderr, "refused" only those with a refusal."""
    wanted = os.environ.get("GNFUSE_LOG", "")
    if wanted in ("", "0"):
        return
    if wanted == "refused" and all(site.status != "refused" for site in report.sites):
        return
    print(report, file=sys.stderr)


def _compile_inner(
    ours: Options, gm: GraphModule, example_inputs: Sequence[Any], mode: str | None, inner_options: dict[str, Any]
) -> Callable[..., Any]:
    if ours.inner == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode) if mode is not None else {}), **inner_options}
        patches = {key.replace("-", "_"): value for key, value in patches.items()} | _order_of_draws(gm, inner_options)
        compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)
        return compiled  # type: ignore[no-any-return]
    if ours.inner == "eager" and not _has_higher_order_ops(gm):
        return gm.forward
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, list(example_inputs))


def _order_of_draws(gm: GraphModule, inner_options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's scheduler moves independent random ops over one another for peak memory, so that each draws another's
    part of the stream; with a fused dropout in the graph it must keep the program's order."""
    if not passes.draws(gm):
        return {}
    if inner_options.get("reorder_for_peak_memory"):
        warnings.warn(
            "gnfuse turns reorder_for_peak_memory off: it would give this graph's dropouts other masks than eager's",
            stacklevel=2,
        )
    return {"reorder_for_peak_memory": False}


def _has_higher_order_ops(gm: GraphModule) -> bool:
    """Activation checkpointing and its like run right only through AOTAutograd."""
    return any(
        isinstance(node.target, torch._ops.HigherOrderOperator)
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
    )
