"""``torch.compile(model, backend="gnfuse")``: rewrite the Dynamo graph, then hand it to the inner backend."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from gnfuse import passes
from gnfuse.options import split
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
    report = passes.run(gm, gain=ours.inner == "inductor" and ours.only_gains)
    if ours.inner == "inductor":
        patches, notes = _inductor_patches(gm, mode, inner_options)
        report = replace(report, notes=(*report.notes, *notes))
        compiled = _compile_with_inductor(gm, example_inputs, patches)
    else:
        compiled = _compile_without_inductor(ours.inner, gm, example_inputs)
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


def _inductor_patches(
    gm: GraphModule, mode: str | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Inductor's configuration for the rewritten graph, and what the report should say of it."""
    from torch._inductor import list_mode_options

    patches = {**(list_mode_options(mode) if mode is not None else {}), **options}
    patches = {key.replace("-", "_"): value for key, value in patches.items()}
    if not passes.draws(gm):
        return patches, ()
    # Inductor's scheduler moves independent random ops over one another for peak memory: each then draws another's part
    # of the stream
    if patches.get("reorder_for_peak_memory"):
        warnings.warn(
            "gnfuse turns reorder_for_peak_memory off: it would give this graph's dropouts other masks than eager's",
            stacklevel=3,
        )
    patches["reorder_for_peak_memory"] = False
    if not passes.draws_elsewhere(gm):
        return patches, ()
    if "fallback_random" in patches:
        return patches, () if patches["fallback_random"] else (_OTHER_MASKS,)
    # Inductor's own dropouts move the generator otherwise than eager's do, and the fused ones come after them
    patches["fallback_random"] = True
    return patches, ("fallback_random: the random ops that gnfuse left alone draw as in eager, so that its own can",)


_OTHER_MASKS = "fallback_random is off: Inductor's random ops move the generator, and fused dropouts draw other masks"


def _compile_with_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)
    return compiled  # type: ignore[no-any-return]


def _compile_without_inductor(inner: str, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    if inner == "eager" and not _has_higher_order_ops(gm):
        return gm.forward
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, list(example_inputs))


def _has_higher_order_ops(gm: GraphModule) -> bool:
    """Activation checkpointing and its like run right only through AOTAutograd."""
    return any(
        isinstance(node.target, torch._ops.HigherOrderOperator)
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
    )
