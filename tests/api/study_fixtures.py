from pathlib import Path

import pytest

from capi.api.ablation import Study, ablate, plan_study
from tests.api.studies import QUICK, SMALL, labeled_photos


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return labeled_photos(tmp_path_factory.mktemp("photos") / "data")


@pytest.fixture(scope="session")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study that has been run to its end; nobody may change it."""
    out = tmp_path_factory.mktemp("study") / "out"
    shown = ablate("sinkhorn", SMALL, data=data, out=out, scale="smoke", options=QUICK, device="cpu")
    assert shown is not None
    assert shown.page == out / "sinkhorn.html"
    return plan_study("sinkhorn", SMALL, data=str(data), out=out, scale="smoke", options=QUICK)
