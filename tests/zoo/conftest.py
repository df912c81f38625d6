"""What tests of several formats share."""

from pathlib import Path

import jaxtyping
import pytest

from capi.models.features import CapiEncoder
from capi.types import Statistics
from capi.zoo.huggingface.files import write_transformers


@pytest.fixture
def sizes_are_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing puts symbols in place of sizes, which the enforced annotations do not take for numbers."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def folder(model: CapiEncoder, tmp_path: Path) -> Path:
    """A folder that was written without the library, for the library to open."""
    model.statistics = Statistics((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    return write_transformers(model, tmp_path / "exported", image_size=32)
