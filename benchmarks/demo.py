"""KernelBench level 2, problem 83 through gnfuse: what it does, that it equals eager, and what it takes.

    make demo            or            python benchmarks/demo.py --batch-size 16

Exits with 1 where anything differs from eager.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from timing import medians
from torch import nn

import gnfuse
from gnfuse.kernelbench import load_module

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "kernelbench_83.py"
console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def main() -> int:
    """The report, the comparison and the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing for each line of the table")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    problem = load_module(EXAMPLE)
    x = torch.randn(arguments.batch_size, 3, 16, 64, 64, device=arguments.device)

    heading("What gnfuse does to it")
    report = gnfuse.explain(fresh_model(problem, x.device), x)
    if sys.stdout.isatty():
        console.print(report)
    else:
        print(report.render(console.width))

    heading("Compared with eager, bit for bit")
    equal = True
    for what, same in comparisons(problem, x[:4]):
        equal &= same
        console.print(f"  {'[green]equal    ' if same else '[bold red]DIFFERENT'}[/]  {what}")

    heading(f"Milliseconds a call, batch {arguments.batch_size}, {arguments.device} (median, the three in turn)")
    console.print(times(problem, x, arguments.seconds))
    return 0 if equal else 1


def heading(title: str) -> None:
    """A line that starts a part."""
    console.print(f"\n[bold underline]{title}[/]\n")


def fresh_model(problem: ModuleType, device: torch.device) -> nn.Module:
    """`Model`, in training mode, the same weights each time."""
    torch.manual_seed(0)
    model: nn.Module = problem.Model(*problem.get_init_inputs())
    return model.to(device)


def comparisons(problem: ModuleType, x: torch.Tensor) -> Iterator[tuple[str, bool]]:
    """What is compared, and whether gnfuse gives what eager gives."""
    with_nan = x.clone()
    with_nan[0, 0, 8, 32, 32] = torch.nan
    for mode in ("training", "evaluation"):
        for title, image in (("", x), (", one NaN in the input", with_nan)):
            model = fresh_model(problem, x.device).train(mode == "training")
            expected, expected_state = run(model, image)
            output, state = run(torch.compile(model, backend="gnfuse"), image)
            nans = f" ({int(expected.isnan().sum())} NaNs in the output)" if title else ""
            yield f"output, {mode}{title}{nans}", same(expected, output)
            yield f"generator state after it, {mode}{title}", same(expected_state, state)
    for title, gamma in (("", 1.0), (", gamma = beta = 0", 0.0)):
        model = fresh_model(problem, x.device)
        nn.init.constant_(model.norm.weight, gamma)
        eager_gradients = gradients(model, model, x)
        for name, gradient in gradients(model, torch.compile(model, backend="gnfuse"), x).items():
            largest = eager_gradients[name].abs().max().item()
            yield f"gradient of {name}{title} (largest {largest:.4g})", same(eager_gradients[name], gradient)


def same(expected: torch.Tensor, result: torch.Tensor) -> bool:
    """Equal values, NaN at the same places, equal strides and dtype."""
    if expected.stride() != result.stride() or expected.dtype != result.dtype:
        return False
    return bool(((expected == result) | ((expected != expected) & (result != result))).all())


@torch.no_grad()
def run(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output for a fixed seed, and the generator's state after it."""
    torch.manual_seed(7)
    output = function(x)
    return output, torch.cuda.get_rng_state() if x.is_cuda else torch.get_rng_state()


def gradients(
    model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The gradients of a fixed random sum of the output, by name."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    output = function(x)
    upstream = torch.randn(output.shape, device=x.device)
    wanted = {"the input": x, **dict(model.named_parameters())}
    return dict(zip(wanted, torch.autograd.grad(output, list(wanted.values()), upstream), strict=True))


def times(problem: ModuleType, x: torch.Tensor, seconds: float) -> Table:
    """Eager, Inductor and gnfuse side by side; the chain alone starts from the convolution's output."""
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("eager", "Inductor", "gnfuse", "gnfuse ÷ Inductor"):
        table.add_column(title, justify="right")
    whole, chain = fresh_model(problem, x.device), fresh_model(problem, x.device)
    with torch.no_grad():
        after_conv = chain.conv(x)
    chain.conv = nn.Identity()
    for title, model, image in (("model", whole, x), ("without its conv", chain, after_conv)):
        for mode in ("training", "evaluation"):
            model.train(mode == "training")
            torch._dynamo.reset()
            functions = {
                "eager": model,
                "Inductor": torch.compile(model),
                "gnfuse": torch.compile(model, backend="gnfuse"),
            }
            with torch.no_grad():
                found = medians({name: partial(function, image) for name, function in functions.items()}, seconds)
            ratio = found["gnfuse"] / found["Inductor"]
            table.add_row(f"{title}, {mode}", *(f"{found[name]:.1f}" for name in functions), f"{ratio:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
