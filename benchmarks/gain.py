"""Where a fused site gains over Inductor and where it does not: the sizes behind `gnfuse/passes/gain.py`.

python benchmarks/gain.py       writes benchmarks/results/gain.txt
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from timing import medians
from torch import Tensor, nn
from torch.nn import functional as F

RESULT = Path(__file__).resolve().parent / "results" / "gain.txt"
SIZES = ((2, 64, 16, 16), (1, 320, 32, 32), (4, 320, 64, 64), (16, 320, 64, 64))
CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu, dropout": lambda y: F.dropout(F.silu(y), 0.1, True),
    "min, clamp": lambda y: torch.clamp(torch.min(y, torch.tensor(0.0)), 0.0, 1.0),
}
# (chain, dtype, channels_last, with gradient)
KINDS = (
    ("silu", torch.float32, False, False),
    ("silu", torch.float32, False, True),
    ("silu", torch.float32, True, False),
    ("silu", torch.float32, True, True),
    ("silu", torch.bfloat16, False, False),
    ("silu", torch.bfloat16, False, True),
    ("silu", torch.bfloat16, True, False),
    ("silu, dropout", torch.float32, False, False),
    ("silu, dropout", torch.float32, False, True),
    ("min, clamp", torch.float32, False, False),
)


class Chain(nn.Module):
    """GroupNorm with 32 groups and what follows it."""

    def __init__(self, channels: int, tail: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.tail = nn.GroupNorm(32, channels, dtype=dtype), tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.norm(x))


def step(model: Callable[[Tensor], Tensor], x: Tensor, gradient: bool, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            if gradient:
                leaf = x.detach().requires_grad_()
                model(leaf).sum().backward()
            else:
                with torch.no_grad():
                    model(x)

    return run


def row(chain: str, dtype: torch.dtype, channels_last: bool, gradient: bool, shape: tuple[int, ...]) -> str:
    torch._dynamo.reset()
    model = Chain(shape[1], CHAINS[chain], dtype)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(shape).to(dtype).contiguous(memory_format=memory_format)
    calls = max(1, 200_000 // x.numel())
    compiled = {
        "Inductor": torch.compile(model),
        "gnfuse": torch.compile(model, backend="gnfuse", options={"only_gains": False}),
    }
    times = medians({name: step(f, x, gradient, calls) for name, f in compiled.items()}, seconds=0.7)
    inductor, ours = (times[name] * 1e3 / calls for name in ("Inductor", "gnfuse"))
    name = f"{chain}, {str(dtype)[6:]}, {'channels_last' if channels_last else 'contiguous'}"
    name += ", forward + backward" if gradient else ", forward"
    return f"{name:<60}{'x'.join(map(str, shape)):>16}{inductor:>12.1f}{ours:>12.1f}{ours / inductor:>8.2f}"


def main() -> None:
    lines = [
        f"# python benchmarks/gain.py   (torch {torch.__version__}, {torch.get_num_threads()} threads)",
        f"{'microseconds (median)':<60}{'':>16}{'Inductor':>12}{'gnfuse':>12}{'ratio':>8}",
    ]
    print(*lines, sep="\n")
    for kind in KINDS:
        for shape in SIZES:
            lines.append(row(*kind, shape))
            print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
