"""What several test files build on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.conftest import GOLDEN
from vivace.engine.engine import Engine
from vivace.engine.loading import load_assets


def golden_vectors() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "cosyvoice3-tiny" / "vectors.npz") as packed:
        return dict(packed)


def quiet_engine(folder: Path, *, voices: Path | None = None, **options) -> Engine:
    """An engine without warm-up."""
    return Engine(load_assets(folder, voices_folder=voices), **options)
