"""GroupNorm chains on the CPU, side by side in one run: eager, Inductor, gnfuse.

python benchmarks/chains.py            writes benchmarks/results/chains.{json,txt}
python benchmarks/chains.py --quick    small tensors and short runs: writes chains-quick.{json,txt}
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import medians
from torch import nn
from torch.nn import functional as F

RESULTS = Path(__file__).resolve().parent / "results"
LAYOUTS = {
    "contiguous": {4: torch.contiguous_format, 5: torch.contiguous_format},
    "channels_last": {4: torch.channels_last, 5: torch.channels_last_3d},
}


class MinClampDropout(nn.Module):
    """The chain of KernelBench level 2, problem 83, without its convolution."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.min(self.norm(x), torch.tensor(0.0, device=x.device))
        return F.dropout(torch.clamp(x, 0.0, 1.0), 0.2, self.training)


class Silu(nn.Module):
    """GroupNorm → SiLU → dropout(p), as in diffusion U-Nets."""

    def __init__(self, channels: int, groups: int, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.silu(self.norm(x)), self.p, self.training)


@dataclass(frozen=True)
class Case:
    """One line of the table; ``goal`` is the largest gnfuse ÷ Inductor that the project asks of itself."""

    name: str
    model: nn.Module
    shape: tuple[int, ...]
    layout: str
    backward: bool
    goal: float


def cases(quick: bool) -> Iterator[Case]:
    """All lines. The quick ones have a quarter of the samples, or of the first spatial size."""
    shape = (8 if quick else 32, 16, 14, 62, 62)
    for mode, goal in (("training", 0.65), ("evaluation", 0.7)):
        model = MinClampDropout(16, 8).train(mode == "training")
        yield Case(f"min, clamp, dropout(.2), {mode}", model, shape, "contiguous", False, goal)
    shapes = ((8, 320, 64, 64, 32), (2, 128, 256, 256, 32), (1, 32, 64, 64, 64, 8))
    for backward in (False, True):
        for *full, groups in shapes:
            size = (full[0], full[1], full[2] // 4, *full[3:]) if quick else tuple(full)
            for layout in LAYOUTS:
                if backward:
                    model = Silu(size[1], groups, 0.1)
                    yield Case("silu, dropout(.1), forward + backward", model, size, layout, True, 0.8)
                else:
                    goal = 1.05 if layout == "contiguous" else 0.8
                    yield Case("silu, forward", Silu(size[1], groups).eval(), size, layout, False, goal)


def measure(case: Case, seconds: float) -> dict[str, float]:
    """Median milliseconds of eager, Inductor and gnfuse, in one run."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(case.shape).to(memory_format=LAYOUTS[case.layout][len(case.shape)])
    backends = {
        "eager": case.model,
        "inductor": torch.compile(case.model, dynamic=False),
        "gnfuse": torch.compile(case.model, backend="gnfuse", dynamic=False),
    }
    steps = {name: step(case, function, x) for name, function in backends.items()}
    with torch.set_grad_enabled(case.backward):
        return medians(steps, seconds)


def step(case: Case, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    """What is timed: a forward, or a forward and a backward to the input, gamma and beta."""
    if not case.backward:
        return lambda: function(x)
    x = x.detach().requires_grad_()
    upstream = torch.randn_like(x)
    wanted = [x, *case.model.parameters()]
    return lambda: torch.autograd.grad(function(x), wanted, upstream)


def machine() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def main() -> int:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tensors, short runs")
    parser.add_argument("--only", default="", help="only the cases whose name, shape and layout contain this")
    parser.add_argument("--seconds", type=float, help="of timing a case (default: 6, quick 0.5)")
    arguments = parser.parse_args()
    seconds = arguments.seconds or (0.5 if arguments.quick else 6.0)
    command = " ".join(["python benchmarks/chains.py", *sys.argv[1:]])
    about = machine()
    lines = [f"# {command}", f"# {', '.join(f'{key} {value}' for key, value in about.items())}"]
    lines.append(
        f"{'milliseconds (median), fp32':72} {'eager':>9} {'Inductor':>9} {'gnfuse':>9} {'gnfuse/Ind.':>11} {'goal':>5}"
    )
    print(*lines, sep="\n", flush=True)
    rows = []
    for case in cases(arguments.quick):
        title = f"{case.name}, {'x'.join(map(str, case.shape))}/{case.model.norm.num_groups}, {case.layout}"
        if arguments.only not in title:
            continue
        found = measure(case, seconds)
        ratio = found["gnfuse"] / found["inductor"]
        rows.append(
            {"case": title, **{f"{name}_ms": ms for name, ms in found.items()}, "ratio": ratio, "goal": case.goal}
        )
        lines.append(f"{title:72} {' '.join(f'{ms:9.2f}' for ms in found.values())} {ratio:11.2f} {case.goal:5.2f}")
        print(lines[-1], flush=True)
    if not arguments.only:
        RESULTS.mkdir(exist_ok=True)
        base = RESULTS / ("chains-quick" if arguments.quick else "chains")
        base.with_suffix(".txt").write_text("\n".join(lines) + "\n")
        base.with_suffix(".json").write_text(json.dumps({"command": command, **about, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
