"""What every test runs under: two threads, an Inductor cache of this run's own, fresh Dynamo and report state."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Read when torch and its OpenMP load, so set before any test module imports them. Two threads run every parallel path;
# passive waiting keeps test processes side by side from spinning on each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A fault of the pass is a failure here, not a warning
os.environ.setdefault("GNFUSE_RAISE", "1")
# Inductor compiles in this process: starting a pool of compile workers costs more than these small graphs
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """One Inductor cache for the run, shared by its worker processes and by the processes that tests start."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="gnfuse-test-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked ``gpu`` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """No test sees what another compiled or reported, nor where it left the generator."""
    import torch

    import gnfuse

    torch._dynamo.reset()
    gnfuse.clear_reports()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    gnfuse.clear_reports()
