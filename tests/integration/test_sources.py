"""Runs on shards, on parquet and on several sources: what they see, and that they resume exactly."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

import capi
from capi.config.files import parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.zoo.run_folder import read_metrics
from tests.data.pictures import encoded, photo


@pytest.fixture
def config(small_config: Config) -> Config:
    tree: dict[str, Any] = small_config.model_dump(mode="json")
    tree["optimization"] |= {"steps": 4, "learning_rate": 0.01}
    tree["data"] |= {"workers": 0, "window": 5}
    tree["run"] |= {"log_steps": 1, "loggers": [], "report": False}
    tree["checkpoint"] |= {"every_steps": 2}
    return parse_config(tree)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    """The same 14 photos in three ways."""
    contents = [encoded(photo(40, 36, seed=number), "JPEG") for number in range(14)]
    (tmp_path / "photos").mkdir()
    for number, content in enumerate(contents):
        (tmp_path / "photos" / f"{number:02d}.jpg").write_bytes(content)
    packed = capi.pack_shards(tmp_path / "photos", tmp_path / "shards", per_shard=3, shuffle=None)
    table = pyarrow.table({"image": contents})
    pyarrow.parquet.write_table(table, tmp_path / "photos.parquet", row_group_size=3)
    return {"shards": packed.pattern, "parquet": str(tmp_path / "photos.parquet"), "photos": str(tmp_path / "photos")}


@pytest.fixture(autouse=True)
def _without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes longer than these runs."""
    monkeypatch.setattr("capi.api.training.draw_curves", lambda *_: None)


class _StoppedError(Exception):
    pass


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(capi.load(run, weights="student").state_dict())


def test__shards_and_tables_train_alike_and_continue_exactly(
    config: Config, sources: dict[str, str], tmp_path: Path
) -> None:
    """Blocks of both have the same images, so all that is computed is the same."""
    for name in ("shards", "parquet"):
        capi.pretrain(config, data=sources[name], out=tmp_path / "runs" / name, device="cpu")
    stopped = tmp_path / "stopped"

    def stop(record: Any) -> None:
        if record["step"] == 3:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        capi.pretrain(config, data=sources["shards"], out=stopped, device="cpu", loggers=[stop])
    workers = parse_config(
        config.model_dump(mode="json") | {"data": config.data.model_dump(mode="json") | {"workers": 1}}
    )
    assert capi.pretrain(workers, data=sources["shards"], out=stopped, device="cpu", resume=True).finished
    expected = weights(tmp_path / "runs" / "shards")
    for run in (tmp_path / "runs" / "parquet", stopped):
        weights_here = weights(run)
        assert all(torch.equal(weights_here[name], value) for name, value in expected.items())
    assert [line["step"] for line in read_metrics(stopped / "metrics.jsonl")] == [1, 2, 3, 4]
    with pytest.raises(CapiError, match="a run resumes with the same images"):
        capi.pretrain(config, data=sources["photos"], out=stopped, device="cpu", resume=True)


def test__several_sources_are_recorded(config: Config, sources: dict[str, str], tmp_path: Path) -> None:
    data = [f"{sources['shards']}@3", f"{sources['photos']}@1"]
    done = capi.pretrain(config, data=data, out=tmp_path / "run", device="cpu")
    record = json.loads((done.path / "run.json").read_text())["data"]
    assert record["images"] == 28
    assert [(each["path"], each["weight"], each["images"]) for each in record["sources"]] == [
        (sources["shards"], 3.0, 14),
        (sources["photos"], 1.0, 14),
    ]
    assert capi.pretrain(config, data=data, out=done.path, device="cpu", resume=True).finished
    other = [f"{sources['shards']}@2", f"{sources['photos']}@1"]
    with pytest.raises(CapiError, match="a run resumes with the same images"):
        capi.pretrain(config, data=other, out=done.path, device="cpu", resume=True)
