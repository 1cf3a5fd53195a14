"""GroupNorm chains on the CPU: gnfuse's ops against torch.compile(inductor) and eager, side by side.

    python benchmarks/cpu_kernels.py [case substring ...] [--rounds N] [--eager]

Every round times each contender once, in turn, so that a noisy machine disturbs them alike; the table gives medians in
milliseconds, and gnfuse / Inductor as the median of the rounds' ratios. Outputs are fresh tensors, as in a model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gnfuse.chain import parse_steps
from gnfuse.kernels import load
from gnfuse.kernels.reference import group_norm_chain


@dataclass(frozen=True)
class Case:
    """One chain on one shape. ``target`` is the largest ratio that the project accepts."""

    name: str
    shape: tuple[int, ...]
    groups: int
    source: str
    chain: str
    training: bool
    backward: bool
    channels_last: bool
    target: float

    @property
    def label(self) -> str:
        layout = "channels_last" if self.channels_last else "contiguous"
        mode = "forward+backward" if self.backward else "forward"
        size = "x".join(map(str, self.shape))
        return f"{self.name}  {size} G{self.groups} {layout} {'train' if self.training else 'eval'} {mode}"


def cases() -> list[Case]:
    """The cases of the project's target list."""
    constant = "minimum(0.0); clamp(0.0, 1.0); dropout(0.2)"
    size83 = (32, 16, 14, 62, 62)
    result = [
        Case("no. 83", size83, 8, constant, "constant(0.0); dropout(0.2)", True, False, False, 0.65),
        Case("no. 83", size83, 8, constant, "constant(0.0); dropout(0.2)", False, False, False, 0.7),
    ]
    for shape, groups in (((8, 320, 64, 64), 32), ((2, 128, 256, 256), 32), ((1, 32, 64, 64, 64), 8)):
        for channels_last in (False, True):
            target = 0.8 if channels_last else 1.05
            result.append(Case("silu", shape, groups, "silu()", "silu()", False, False, channels_last, target))
    for shape, groups in (((8, 320, 64, 64), 32), ((2, 128, 256, 256), 32), ((1, 32, 64, 64, 64), 8)):
        for channels_last in (False, True):
            text = "silu(); dropout(0.1)"
            result.append(Case("silu+dropout", shape, groups, text, text, True, True, channels_last, 0.8))
    return result


def fused(case: Case, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The case through gnfuse's op."""
    out: Tensor
    if "dropout" in case.chain:
        out = torch.ops.gnfuse.group_norm_dropout(
            x, w, b, case.groups, 1e-5, case.chain, case.source, case.training, 0, True
        )[0]
    else:
        out = torch.ops.gnfuse.group_norm_pointwise(x, w, b, case.groups, 1e-5, case.chain, case.source, True)[0]
    return out


def eager(case: Case, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The case in eager torch."""
    return group_norm_chain(x, w, b, case.groups, 1e-5, parse_steps(case.source), case.training)


def compiled(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The case through Inductor."""
    steps = parse_steps(case.source)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return group_norm_chain(x, w, b, case.groups, 1e-5, steps, case.training)

    return torch.compile(run, backend="inductor")


def measure(case: Case, rounds: int, with_eager: bool) -> dict[str, list[float]]:
    """Seconds per contender and round."""
    torch._dynamo.reset()
    x = torch.randn(case.shape)
    if case.channels_last:
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    w, b = torch.randn(case.shape[1]), torch.randn(case.shape[1])
    leaves = [t.requires_grad_(case.backward) for t in (x, w, b)]
    grad = torch.randn_like(x)
    contenders: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "gnfuse": partial(fused, case),
        "inductor": compiled(case),
    }
    if with_eager:
        contenders["eager"] = partial(eager, case)

    def once(run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        out = run(x, w, b)
        if case.backward:
            torch.autograd.grad(out, leaves, grad)

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.set_grad_enabled(case.backward):
        for run in contenders.values():
            once(run)
            once(run)
        for _ in range(rounds):
            for name, run in contenders.items():
                begin = time.perf_counter()
                once(run)
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="run the cases whose label holds every one of these")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="time eager torch too")
    arguments = parser.parse_args()
    load()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} rounds")
    for case in cases():
        if not all(word in case.label for word in arguments.only):
            continue
        seconds = measure(case, arguments.rounds, arguments.eager)
        ratio = statistics.median(g / i for g, i in zip(seconds["gnfuse"], seconds["inductor"], strict=True))
        medians = "  ".join(f"{name} {statistics.median(times) * 1e3:7.2f}" for name, times in seconds.items())
        verdict = "ok" if ratio <= case.target else "MISSED"
        print(f"{case.label:76s} {medians} ms  ratio {ratio:.3f} (target {case.target}) {verdict}", flush=True)


if __name__ == "__main__":
    main()
