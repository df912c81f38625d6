"""Real processes with real loaders: each image is read by exactly one of them in every pass over the data."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import capi
from capi.runtime.processes import Processes
from tests.data.pictures import encoded
from tests.integration.launched import start, succeeded
from tests.integration.samples_driver import BATCH_SIZE, IMAGES, STEPS, read

WORLD = 3
PASSES = STEPS * BATCH_SIZE // IMAGES


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Images of one grey value each, their numbers: in a folder, in shards and in a table."""
    folder = tmp_path_factory.mktemp("sources")
    contents = [encoded(np.full((50, 50, 3), number, np.uint8), "PNG") for number in range(IMAGES)]
    (folder / "images").mkdir()
    for number, content in enumerate(contents):
        (folder / "images" / f"{number:02d}.png").write_bytes(content)
    packed = capi.pack_shards(folder / "images", folder / "shards", per_shard=4, shuffle=None)
    pyarrow.parquet.write_table(pyarrow.table({"image": contents}), folder / "all.parquet", row_group_size=4)
    return [str(folder / "images"), packed.pattern, str(folder / "all.parquet")]


@pytest.mark.long
def test__every_image_is_read_by_one_process_in_each_pass(sources: list[str], tmp_path: Path) -> None:
    succeeded(start(WORLD, "-m", "tests.integration.samples_driver", str(tmp_path / "read.json"), *sources))
    everyone = json.loads((tmp_path / "read.json").read_text())
    assert len(everyone) == WORLD
    for name, alone in read(sources, Processes()).items():
        # Processes have equal parts of each batch, in their order.
        together = [[number for process in everyone for number in process[name][step]] for step in range(STEPS)]
        assert together == alone, name
        passes = np.array(together).reshape(PASSES, IMAGES)
        assert (np.sort(passes) == np.arange(IMAGES)).all(), name
        assert (passes[0] != passes[1]).any(), name
