"""Runs a model eagerly and through gnfuse, and compares all that semantics.md promises.

Two ways in: `by_rewrite` (`torch.fx.symbolic_trace` and `gnfuse.rewrite`, no Dynamo) and `by_compile`
(`torch.compile(backend="gnfuse")`). The expected side is always eager torch, or float64 torch for errors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import Outcome, assert_outcome_equal, assert_outcome_near, flat, fused_nodes, upstream
from torch import Tensor, nn

import gnfuse

# for tests of what both devices must show
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Made = tuple[Callable[..., Any], Callable[[], list[gnfuse.Site]]]


def fresh(x: Any, grad: bool) -> Any:
    """A leaf with x's values and strides."""
    if not isinstance(x, Tensor):
        return x
    if 0 in x.stride():
        leaf = x.detach()  # expanded: elements share memory and cannot be written one by one
    else:
        leaf = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x.detach())
    return leaf.requires_grad_() if grad and x.is_floating_point() else leaf


def generator_state(inputs: Sequence[Any]) -> Tensor:
    """The state of the default generator of the inputs' device."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in inputs)
    return torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()


def call(
    run: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    owner: nn.Module | None = None,
    grad: bool = True,
    seed: int = 0,
    seed_gradient: Callable[[Tensor], Tensor] = upstream,
) -> Outcome:
    """Calls ``run`` on fresh leaves under ``seed``; with ``grad``, runs backward too."""
    owner = owner if owner is not None else run if isinstance(run, nn.Module) else None
    leaves = [fresh(x, grad) for x in inputs]
    named: dict[str, Tensor] = dict(owner.named_parameters()) if owner is not None else {}
    for p in named.values():
        p.grad = None
    torch.manual_seed(seed)
    with torch.set_grad_enabled(grad):
        outs = flat(run(*leaves))
    rng = generator_state(leaves)
    live = [(o, seed_gradient(o.cpu()).to(o.device)) for o in outs if o.requires_grad]
    if grad and live:
        torch.autograd.backward([o for o, _ in live], [g for _, g in live])
    named.update({f"input {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})
    return Outcome(tuple(o.detach() for o in outs), {name: t.grad for name, t in named.items()} if grad else {}, rng)


def by_rewrite(model: nn.Module, *examples: Any) -> tuple[torch.fx.GraphModule, gnfuse.Report]:
    """symbolic_trace, then `gnfuse.rewrite`. The model itself stays as it is.

    Examples are needed only where no parameter says the dtype and device of a GroupNorm.
    """
    gm = torch.fx.symbolic_trace(copy.deepcopy(model))
    gm.training = model.training
    return gnfuse.rewrite(gm, examples or None)


def by_compile(run: Callable[..., Any], *, inner: str = "aot_eager", **compile_kwargs: Any) -> Made:
    """Compiles ``run`` and returns it with a function that lists the sites of all graphs compiled since."""
    torch._dynamo.reset()
    gnfuse.clear_reports()
    options = {"inner": inner, **compile_kwargs.pop("options", {})}
    compiled = torch.compile(run, backend="gnfuse", options=options, **compile_kwargs)
    return compiled, lambda: [site for report in gnfuse.reports() for site in report.sites]


def relu_dropout(h: Tensor) -> Tensor:
    return F.dropout(F.relu(h), 0.5, True)


def float64_of(model: nn.Module, inputs: Sequence[Any]) -> tuple[nn.Module, list[Any]]:
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    return copy.deepcopy(model).double(), wide


def compare(got: Outcome, eager: Outcome, exact: Outcome | None) -> None:
    """Everything in ``got`` against eager's: bit for bit without ``exact``, else by its error against ``exact``."""
    if exact is None:
        assert_outcome_equal(got, eager)
        return
    # where float64 itself is not finite, eager alone decides
    outs = tuple(torch.where(x.isfinite(), x, e.double()) for x, e in zip(exact.outs, eager.outs, strict=True))
    grads = {
        n: None if x is None else torch.where(x.isfinite(), x, eager.grads[n].double()) for n, x in exact.grads.items()
    }
    assert_outcome_near(got, eager, Outcome(outs, grads, exact.rng))
    for mine, theirs in zip(got.outs, eager.outs, strict=True):
        infinite = theirs.isinf()
        assert torch.equal(mine[infinite], theirs[infinite]), "an infinity has another sign than eager's"


def check(
    model: nn.Module,
    *inputs: Any,
    via: str = "rewrite",
    exact: bool = False,
    grad: bool = True,
    seed: int = 0,
    inner: str = "aot_eager",
    examples: bool = False,
    seed_gradient: Callable[[Tensor], Tensor] = upstream,
    **compile_kwargs: Any,
) -> list[gnfuse.Site]:
    """Runs model eagerly and through gnfuse, compares, and returns the report's sites.

    ``examples`` hands the inputs to `gnfuse.rewrite`, as a model without parameters needs anyway.

    ``exact`` asks for eager's bits; otherwise errors against float64 are compared with eager's. A CUDA dropout draws
    another mask in float64, so there the comparison is with eager alone.
    """
    eager_model = copy.deepcopy(model)
    options: dict[str, Any] = {"grad": grad, "seed": seed, "seed_gradient": seed_gradient}
    eager = call(eager_model, inputs, **options)
    if via == "rewrite":
        gm, report = by_rewrite(model, *(inputs if examples or not dict(model.named_parameters()) else ()))
        got, sites = call(gm, inputs, **options), list(report.sites)
    else:
        owner = copy.deepcopy(model)
        compiled, sites_now = by_compile(owner, inner=inner, **compile_kwargs)
        got = call(compiled, inputs, owner=owner, **options)
        sites = sites_now()
    if any(isinstance(x, Tensor) and x.is_cuda for x in inputs) and any("dropout" in s.pattern for s in sites):
        compare_closely(got, eager)
    elif exact:
        compare(got, eager, None)
    else:
        wide, wide_inputs = float64_of(model, inputs)
        compare(got, eager, call(wide, wide_inputs, **options))
    return sites


def compare_closely(got: Outcome, eager: Outcome) -> None:
    """The same generator state, and values within float32 rounding of eager's: a mask or a rule that differs shows."""
    assert torch.equal(got.rng, eager.rng), "the generator does not end where eager leaves it"
    torch.testing.assert_close(got.outs, eager.outs, equal_nan=True)
    torch.testing.assert_close(got.grads, eager.grads, atol=1e-5, rtol=1e-5, equal_nan=True)


def chains_of(gm: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """``chain`` and ``source`` of each fused op of a rewritten graph."""
    found = []
    for node in fused_nodes(gm):
        names = [argument.name for argument in node.target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        found.append((given["chain"], given["source"]))
    return found


def statuses(sites: Sequence[gnfuse.Site]) -> list[str]:
    return [site.status for site in sites]


def one(sites: Sequence[gnfuse.Site]) -> gnfuse.Site:
    assert len(sites) == 1, f"one site expected: {[(s.status, s.pattern) for s in sites]}"
    return sites[0]


def assert_reasons(sites: Sequence[gnfuse.Site]) -> None:
    """Every refusal says why, and at which node."""
    for site in sites:
        if site.status == "refused":
            assert site.reason, f"{site.pattern} is refused without a reason"
            assert site.node


class Values(nn.Module):
    """A GroupNorm whose output is a list of chosen values, one a channel, followed by ``tail``.

    On an input of zeros GroupNorm gives beta exactly, so ``tail`` sees the values themselves, through a real site.
    """

    def __init__(self, values: Sequence[float], tail: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.norm = nn.GroupNorm(1, len(values), dtype=dtype)
        with torch.no_grad():
            self.norm.bias.copy_(torch.tensor(values, dtype=torch.float64).to(dtype))
        self.tail = tail

    def zeros(self, *spatial: int) -> Tensor:
        return torch.zeros(2, self.norm.num_channels, *(spatial or (3, 3)), dtype=self.norm.weight.dtype)

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.norm(x))


class Tail(nn.Module):
    """GroupNorm with random affine parameters, followed by ``tail``."""

    def __init__(self, channels: int, groups: int, tail: Callable[[Tensor], Any], eps: float = 1e-5, **kwargs: Any):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=eps, **kwargs)
        randomise(self.norm)
        self.tail = tail

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.norm(x))


def randomise(module: nn.Module, seed: int = 7) -> None:
    """Random affine parameters for every GroupNorm: the default ones and zeros hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm):
            for p, centre in ((norm.weight, 1.0), (norm.bias, 0.0)):
                if p is not None:
                    with torch.no_grad():
                        p.copy_(centre + 0.5 * torch.randn(p.shape, generator=generator))


def noise(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def clamp_chain(low: float, high: float, p: float) -> Callable[[Tensor], Tensor]:
    """The tail of KernelBench level 2 no. 83: min(x, low), clamp(low, high), dropout(p)."""

    def tail(h: Tensor) -> Tensor:
        h = torch.min(h, torch.tensor(low, device=h.device))
        return nn.functional.dropout(torch.clamp(h, min=low, max=high), p, True)

    return tail


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
