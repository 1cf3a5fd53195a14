"""KernelBench level 2, problem 83: Conv3d → GroupNorm → min → clamp → Dropout, and a solution that gnfuse compiles.

    python examples/kernelbench_83.py --batch-size 8

runs the usual check: for several seeds, equal weights and the same dropout seed, `ModelNew` agrees with `Model`
within atol = rtol = 1e-4, in training and in evaluation mode.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import nn

batch_size = 128
in_channels, out_channels = 3, 16
depth, height, width = 16, 64, 64
kernel_size = 3
groups = 8
min_value, max_value = 0.0, 1.0
dropout_p = 0.2


class Model(nn.Module):
    """The network as the problem states it."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        groups: int,
        min_value: float,
        max_value: float,
        dropout_p: float,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.norm = nn.GroupNorm(groups, out_channels)
        self.dropout = nn.Dropout(dropout_p)
        self.min_value = min_value
        self.max_value = max_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in_channels, D, H, W] to [N, out_channels, D', H', W']."""
        x = self.conv(x)
        x = self.norm(x)
        x = torch.min(x, torch.tensor(self.min_value, device=x.device))
        x = torch.clamp(x, min=self.min_value, max=self.max_value)
        return self.dropout(x)


class ModelNew(Model):
    """The same network through ``torch.compile(backend="gnfuse")``: same constructor, same state_dict keys.

    `torch.nn.Module.compile` compiles at the first call and leaves the compiled function out of copies and pickles,
    so each of those compiles anew.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compile(backend="gnfuse")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.compile(backend="gnfuse")


def get_inputs() -> list[torch.Tensor]:
    """The arguments of ``forward``."""
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs() -> list[Any]:
    """The arguments of the constructor."""
    return [in_channels, out_channels, kernel_size, groups, min_value, max_value, dropout_p]


@torch.no_grad()
def check(seed: int, training: bool, device: str) -> float:
    """The largest difference between the two models for one seed; raises AssertionError where they disagree."""
    torch.manual_seed(seed)
    model = Model(*get_init_inputs()).to(device).train(training)
    new = ModelNew(*get_init_inputs()).to(device).train(training)
    new.load_state_dict(model.state_dict())
    inputs = [x.to(device) for x in get_inputs()]
    torch.manual_seed(seed)
    expected = model(*inputs)
    torch.manual_seed(seed)
    result = new(*inputs)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    return (result - expected).abs().max().item()


def main() -> int:
    """Runs the check for every seed and mode."""
    global batch_size
    parser = argparse.ArgumentParser(description="checks ModelNew against Model")
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    batch_size = arguments.batch_size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failures = 0
    for training in (True, False):
        for seed in range(arguments.seeds):
            title = f"{device}, batch {batch_size}, {'train' if training else 'eval'}, seed {seed}"
            try:
                print(f"{title}: equal within 1e-4, largest difference {check(seed, training, device)}")
            except AssertionError as error:
                failures += 1
                print(f"{title}: DIFFERENT\n{error}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
