"""What every test gets: one thread a process, and the folder of example models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported: small tensors gain nothing from threads


@pytest.fixture(scope="session")
def example_models() -> Path:
    return Path(__file__).parent.parent / "examples" / "models"
