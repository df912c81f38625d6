import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capi.data import shards as shards_module
from capi.data.decoding import BrokenImageError, Decoder
from capi.data.loader import BatchShare, Cropping, LoadedBatch, TrainingBatches, load_batches
from capi.data.reader import ImageReader
from capi.data.shards import Shards, make_index, open_shards
from capi.errors import CapiError
from capi.method.masking import MaskSampler, PatchGrid
from tests.data.shard_files import plain, with_webdataset, write_shards, write_tar

COUNTS = [5, 7, 0, 3, 8]


@pytest.fixture
def source(tmp_path: Path) -> Shards:
    return open_shards(write_shards(tmp_path, COUNTS))


def batches(source: Shards, share: BatchShare, window: int | None = None) -> TrainingBatches:
    sampler = MaskSampler(kind="random", ratio=0.5, roll=False, predict=2)
    return TrainingBatches(
        ImageReader(source, Decoder(smallest_side=4)),
        cropping=Cropping(size=(16, 16)),
        share=share,
        masks=lambda keys: sampler(PatchGrid(4, 4), keys),
        seed=3,
        window=window,
    )


def shown(batch: LoadedBatch) -> list[int]:
    assert batch.failure is None
    return batch.images[:, 0, 0, 0].tolist()


def numbers(data: TrainingBatches, step: int) -> list[int]:
    """The images of a step, by the order alone: none of them is read."""
    return data.order.images(step * data.share.batch_size + data.share.samples(0)).tolist()


def test__all_images_are_there_by_number(source: Shards) -> None:
    assert len(source) == 23
    assert [source.read(number) for number in range(23)] == [plain(number) for number in range(23)]
    assert source.name(0) == "000.tar/0000.png"
    assert source.name(12) == "003.tar/0012.png"
    assert source.block_ends.tolist() == [5, 12, 12, 15, 23]
    assert source.sizes().tolist() == [len(plain(number)) for number in range(23)]


def test__webdataset_finds_the_same_images(source: Shards) -> None:
    theirs = with_webdataset([str(path) for path in source.paths])
    assert [sample["png"] for sample in theirs] == [source.read(number) for number in range(23)]


def test__few_open_files_are_enough(source: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "OPEN_FILES", 2)
    few = pickle.loads(pickle.dumps(source))  # noqa: S301 - as a worker that is spawned gets it
    before = len(os.listdir("/proc/self/fd"))
    for number in (0, 22, 6, 13, 1, 21, 7, 14):
        assert few.read(number) == plain(number)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test__the_fingerprint_follows_names_and_members_and_not_the_place(source: Shards, tmp_path: Path) -> None:
    assert open_shards(write_shards(tmp_path / "again", COUNTS)).fingerprint == source.fingerprint
    others = [
        open_shards(write_shards(tmp_path / "fewer", COUNTS[:-1])).fingerprint,
        open_shards(list(reversed(source.paths))).fingerprint,
        open_shards(write_shards(tmp_path / "other", [7, 5, 0, 3, 8])).fingerprint,
    ]
    assert len({source.fingerprint, *others}) == 4


def test__indices_are_made_by_several_processes_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_shards(tmp_path, COUNTS)
    made = open_shards(paths, workers=2)

    def fail(*_: object) -> None:
        raise AssertionError("the headers were scanned again")

    monkeypatch.setattr(shards_module, "make_index", fail)
    assert open_shards(paths).fingerprint == made.fingerprint


def test__one_process_scans_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this one waited, another has made them."""
    paths, lock = write_shards(tmp_path, COUNTS), shards_module.locked

    @contextmanager
    def made_meanwhile(path: Path) -> Iterator[None]:
        with lock(path):
            for shard in paths:
                make_index(shard)
            monkeypatch.setattr(shards_module, "make_index", None)
            yield

    monkeypatch.setattr(shards_module, "locked", made_meanwhile)
    assert len(open_shards(paths)) == 23


@pytest.mark.parametrize("window", [None, 6])
def test__every_image_is_on_exactly_one_process_in_each_pass(source: Shards, window: int | None) -> None:
    whole = batches(source, BatchShare(6), window)
    seen = [number for step in range(23) for number in numbers(whole, step)]
    for start in range(0, 6 * 23, 23):
        assert sorted(seen[start : start + 23]) == list(range(23))
    assert [number for step in range(5) for number in shown(whole[step])] == seen[:30]
    for processes in (2, 3):
        parts = [batches(source, BatchShare(6, 1, process, processes), window) for process in range(processes)]
        steps = [(step, part) for step in range(23) for part in parts]
        assert seen == [number for step, part in steps for number in numbers(part, step)]
        assert [number for part in parts for number in shown(part[4])] == seen[24:30]


# A machine may have fewer cores than workers, and here fewer shards.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test__neither_workers_nor_a_restart_change_the_order(tmp_path: Path) -> None:
    source = open_shards(write_shards(tmp_path, [9, 8]))
    data = batches(source, BatchShare(4), window=1)
    expected = [shown(data[step]) for step in range(10)]
    for workers, start in ((3, 0), (2, 7)):
        loaded = [shown(batch) for (batch,) in load_batches(data, start, 10, workers=workers)]
        assert loaded == expected[start:]


def test__a_shard_that_shrinks_gives_broken_images_and_the_rest_continues(source: Shards) -> None:
    shard = source.paths[4]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    with pytest.raises(BrokenImageError, match="the file ends before byte"):
        source.read(22)
    batch = batches(source, BatchShare(23))[0]
    assert batch.failure is None
    assert batch.broken
    assert all(name.startswith("004.tar/") and "file ends" in reason for name, reason in batch.broken.items())


def test__missing_shards_are_counted_and_the_first_is_named(source: Shards) -> None:
    source.paths[1].unlink()
    source.paths[3].unlink()
    with pytest.raises(CapiError, match=r"2 of 5 shards are missing, the first is .*001\.tar"):
        open_shards(source.paths)


def test__shards_without_images_are_refused(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{number}.tar", {"a.txt": b"text"}) for number in range(2)]
    with pytest.raises(CapiError, match=r"2 shards from .*0\.tar on hold no images"):
        open_shards(paths)
