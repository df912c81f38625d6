"""A folder that was written without the library, for the library to open."""

from pathlib import Path

import pytest

from capi.models.features import CapiEncoder
from capi.transformers_files import write_transformers
from capi.types import Statistics


@pytest.fixture
def folder(model: CapiEncoder, tmp_path: Path) -> Path:
    model.statistics = Statistics((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    return write_transformers(model, tmp_path / "exported", image_size=32)
