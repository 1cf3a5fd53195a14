"""Decides, site by site, what to do: fold, fuse, or leave alone, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node

from gnfuse import kernels
from gnfuse.chain import Chain, format_steps, pretty_steps
from gnfuse.passes import effects
from gnfuse.passes.fold import Folded, fold
from gnfuse.passes.gain import Work, why_slower
from gnfuse.passes.guard import guard_of
from gnfuse.passes.positions import Positions
from gnfuse.passes.read import fake_value, source_line, tensor_of
from gnfuse.passes.walk import Match, Stop
from gnfuse.report import Site


@dataclass(frozen=True)
class Plan:
    """What to put in the place of one match.

    Attributes:
        match: the nodes.
        chain: what the forward computes, as the fused op takes it.
        source: the chain as written, whose gradient is taken.
        before: the node before which the fused op goes.
        site: its line of the report.
    """

    match: Match
    chain: str
    source: str
    before: Node
    site: Site


def plan(
    found: Match | Stop, gm: GraphModule, positions: Positions, graph: str = "", *, gain: bool = False
) -> Plan | Site:
    """The plan for one GroupNorm, or the refusal; with ``gain``, also of what Inductor would run faster."""
    if isinstance(found, Stop):
        return Site(
            "refused", found.node.name, "group_norm", "unchanged", graph, source=source_line(found.node),
            reason=found.reason, stopped_at=found.node.name,
        )  # fmt: skip
    reason, at = _why_not(found, gm)
    if reason:
        return _refusal(found, graph, reason, at)
    before = _place(found, positions)
    if before is None:
        reason = "a random op or a write lies between the ops of the chain: they cannot run as one"
        return _refusal(found, graph, reason, found.names[-1])
    folded = fold(found.chain, _group_size(found), needs_gradient=_needs_gradient(found))
    slower = _why_slower(found, folded) if gain else ""
    if slower:
        return _refusal(found, graph, slower, found.norm)
    return _accept(found, folded, before, graph)


def _refusal(found: Match, graph: str, reason: str, at: Node) -> Site:
    return Site(
        "refused", found.norm.name, found.chain.pretty(), "unchanged", graph, source=found.source, reason=reason,
        stopped_at=at.name, notes=tuple(found.notes),
    )  # fmt: skip


def _why_not(found: Match, gm: GraphModule) -> tuple[str, Node]:
    """The first precondition that fails, and the node it fails at; "" when all hold."""
    assert found.stop is not None
    if not found.chain.steps:
        return f"nothing to fuse: {found.stop.reason}", found.stop.node
    device = _device(found, gm)
    if device is None:
        return "the graph does not say on which device it runs: give rewrite() example_inputs", found.norm
    unsupported = _unsupported(device)
    if unsupported:
        return unsupported, found.norm
    if found.chain.dropout is not None and torch._functorch.config.activation_memory_budget < 1:
        return "under activation_memory_budget the backward may run a random op again, with another mask", found.norm
    return "", found.norm


def _device(found: Match, gm: GraphModule) -> torch.device | None:
    """The input's device; without fake values, that of the parameters, of which a module's ops use one device."""
    for ref in (found.read.value, found.read.weight, found.read.bias):
        tensor = tensor_of(ref, gm)
        if tensor is not None:
            return tensor.device
    return next((p.device for p in gm.parameters()), None)


def _unsupported(device: torch.device) -> str:
    """Why the fused ops cannot run on the device, or "". The first site builds the kernels, or finds that it cannot."""
    if device.type != "cpu":
        return f"no fused kernel for {device.type} tensors yet"
    return kernels.available() or ""


def _place(found: Match, positions: Positions) -> Node | None:
    """The node before which the fused op may go, or None.

    As late as possible, so that a dropout is drawn where it was drawn. It may not cross a write (into x, say), and the
    draw may not cross another random op.
    """
    mine = {*found.nodes, *found.bounds}
    norm, last, drawing = found.nodes[0], found.nodes[-1], found.dropout_node

    def free(a: Node, b: Node, crossed: Callable[[Node], bool]) -> bool:
        first, second = sorted((a, b), key=positions.index.__getitem__)
        return not any(crossed(n) for n in positions.between(first, second) if n not in mine)

    def writes(n: Node) -> bool:
        return effects.writes(n) and not effects.writes_to_its_own(n)

    def draws(n: Node) -> bool:
        return drawing is not None and effects.draws(n)

    for place in [last] if drawing is None else [last, drawing]:
        if free(norm, place, writes) and free(drawing or place, place, draws):
            return place
    return norm if free(norm, drawing or norm, draws) else None


def _group_size(found: Match) -> int | None:
    """C/G * spatial where all of it is known."""
    x = fake_value(found.read.value)
    sizes = [] if x is None else [n for n in x.shape[1:] if isinstance(n, int)]
    if x is None or len(sizes) != x.dim() - 1:
        return None
    return int(math.prod(sizes)) // found.read.num_groups


def _needs_gradient(found: Match) -> bool:
    """Whether somebody may differentiate the chain. Only Dynamo knows: it compiles anew when this changes."""
    value = found.norm.meta.get("example_value")
    return value.requires_grad if isinstance(value, torch.Tensor) else True


def _why_slower(found: Match, folded: Folded) -> str:
    """Why the site would not gain, or "". It is kept where its size is not known or its consumer magnifies rounding."""
    x = fake_value(found.read.value)
    if x is None or not all(isinstance(n, int) for n in x.shape) or any("ill-conditioned" in n for n in found.notes):
        return ""
    draws = found.chain.dropout is not None and found.training is not False
    channels_last = not x.is_contiguous() and suggest_memory_format(x) != torch.contiguous_format
    dtype = found.chain.norm.dtype or "float32"
    constant = folded.constant is not None
    return why_slower(Work(x.numel(), dtype, channels_last, draws, constant))


def _accept(found: Match, folded: Folded, before: Node, graph: str) -> Plan:
    assert found.stop is not None
    traffic_before, traffic_after = _bytes(found, folded)
    site = Site(
        "fused" if folded.constant is None else "folded", found.norm.name, found.chain.pretty(), _result(folded),
        graph, folded.proof, guard_of(folded), found.source, found.stop.reason,
        found.stop.node.name, tuple(found.notes), traffic_before, traffic_after,
    )  # fmt: skip
    return Plan(found, folded.chain.text, format_steps(found.chain.steps), before, site)


def _result(folded: Folded) -> str:
    chain, value = folded.chain, folded.constant
    if value is None:
        return f"one kernel: {pretty_steps(chain.steps)}" if chain.steps else "one kernel: group_norm"
    rest = chain.before[1:]
    shown = f"constant {value!r}" + (f" → {pretty_steps(rest)}" if rest else "")
    if chain.dropout is not None and not _zero_whatever_is_drawn(chain):
        shown += f" → {pretty_steps((chain.dropout, *chain.after))}"
    return f"{shown} where not NaN"


def _zero_whatever_is_drawn(chain: Chain) -> bool:
    return len(chain.before) == 1 and chain.before[0].floats == (0.0,) and not chain.after


# Tensor passes of eager on the CPU: GroupNorm reads twice and writes, a pointwise op reads and writes, dropout writes
# the noise, scales it in place, and multiplies
_NORM_PASSES, _OP_PASSES, _DROPOUT_PASSES = 3, 2, 6
_CACHED_GROUP = 1 << 20  # bytes: a group that stays in a core's cache is read from memory once


def _bytes(found: Match, folded: Folded) -> tuple[int | None, int | None]:
    """Memory traffic of the forward, op by op and after the rewrite; None where a size is unknown."""
    x, size = fake_value(found.read.value), _group_size(found)
    if x is None or size is None or not isinstance(x.shape[0], int):
        return None, None
    one_pass = x.numel() * x.element_size()
    drops = found.chain.dropout is not None and found.training is not False
    ops = len(found.chain.before) + len(found.chain.after)
    before = _NORM_PASSES + _OP_PASSES * ops + (_DROPOUT_PASSES if drops else 0)
    reads_once = folded.constant is not None or size * x.element_size() <= _CACHED_GROUP
    return before * one_pass, (2 if reads_once else 3) * one_pass
