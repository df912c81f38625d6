from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.train.cost.memory import Saving
from capi.train.cost.plan import networks
from capi.train.dry_run import check

CPU = torch.device("cpu")


def test__a_run_is_refused_by_its_planned_memory_and_what_saves_memory_is_counted(
    small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = networks(small_config).memory(small_config.optimization.batch_size, Saving()).peak
    monkeypatch.setattr("capi.train.dry_run.memory_of", lambda _: peak - 1)
    with pytest.raises(CapiError, match="a batch of 6 images does not fit the memory"):
        check(small_config, device=CPU, rounds=1)
    for section, savings in (("optimization", {"micro_batches": 3}), ("run", {"activation_checkpointing": "full"})):
        changed = getattr(small_config, section).model_copy(update=savings)
        check(small_config.model_copy(update={section: changed}), device=CPU, rounds=1)


def test__the_planned_memory_is_less_than_a_real_step_takes() -> None:
    config = parse_config({"optimization": {"batch_size": 8}, "model": {"depth": 2}, "clustering": {"prototypes": 512}})
    assert 1e6 < networks(config).memory(8, Saving()).peak < check(config, device=CPU, rounds=1).cost.peak_bytes


def test__checking_with_images_looks_at_them_and_writes_nothing(small_config: Config, tmp_path: Path) -> None:
    for number in range(4):
        Image.fromarray(np.full((20 + number, 30, 3), 100, dtype=np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    before = sorted(tmp_path.iterdir())
    result = check(small_config, data=tmp_path, device=CPU, rounds=1)
    assert result.data is not None
    assert (result.data.total, list(result.data.broken)) == (5, ["broken.png"])
    assert (result.data.smallest, result.data.largest) == ((20, 30), (23, 30))
    assert result.cost.batch_size == 6
    assert result.images_per_second_read
    assert sorted(tmp_path.iterdir()) == before


def test__a_recipe_is_checked_by_name_and_shows_its_cost_in_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = check(
        "tiny4", {"optimization": {"steps": 3, "batch_size": 4}}, clustering={"prototypes": 64}, device=CPU, rounds=1
    )
    assert (result.steps, result.cost.batch_size) == (3, 4)
    shown = repr(result).splitlines()
    assert max(map(len, shown)) <= 80
    assert "for 3 iterations" in " ".join(shown)


def test__what_a_run_would_start_from_must_be_there_and_fit(small_config: Config, reference_checkpoint: Path) -> None:
    for source, message in (("nowhere.pth", "nowhere.pth"), (str(reference_checkpoint), "does not fit|model.width")):
        config = small_config.model_copy(update={"init": small_config.init.model_copy(update={"encoder": source})})
        with pytest.raises(CapiError, match=message):
            check(config, device=CPU, rounds=1)
