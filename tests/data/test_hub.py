"""Names of the Hub. It cannot be reached from here: the library opens folders on this machine by the same calls."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from capi.data.locations import HubName, open_hub, parse_name
from capi.data.tables import ArrowImages, ParquetImages
from capi.errors import CapiError
from tests.data.shard_files import plain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://owner/name", HubName("owner/name")),
        ("hf://name?split=validation", HubName("name", "validation")),
        (
            "hf://o/n?split=test&column=picture&streaming=true&revision=abc&config=small",
            HubName("o/n", "test", "picture", "abc", "small", streaming=True),
        ),
        ("hf://./folder?streaming=false", HubName("./folder")),
    ],
)
def test__names_are_understood(text: str, expected: HubName) -> None:
    assert parse_name(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://", "is no name of a data set"),
        ("hf://a?split", "is no name of a data set"),
        ("hf://a?split=", "is no name of a data set"),
        ("hf://a?split=x&split=y", "is no name of a data set"),
        ("hf://a?spilt=train", r'no option "spilt"; did you mean "split"\?'),
        ("hf://a?streaming=maybe", "expected true or false"),
    ],
)
def test__other_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        parse_name(text)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, offline, with a cache of its own."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        import huggingface_hub.constants

        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        datasets.disable_progress_bars()
        yield datasets


@pytest.fixture(scope="module")
def folder(datasets: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    images = [Image.fromarray(np.full((12, 12, 3), number, dtype=np.uint8)) for number in range(9)]
    saved = datasets.Dataset.from_dict({"photo": images, "label": list(range(9))})
    saved.save_to_disk(root / "saved", num_shards=2)
    datasets.DatasetDict({"train": saved, "test": saved.select([4])}).save_to_disk(root / "splits")
    (root / "parquet").mkdir()
    saved.to_parquet(root / "parquet" / "train.parquet", batch_size=4)
    saved.select([3, 5]).to_parquet(root / "parquet" / "test.parquet")
    return root


def pixels(content: Path | bytes) -> int:
    import io

    assert isinstance(content, bytes)
    with Image.open(io.BytesIO(content)) as image:
        return image.getpixel((0, 0))[0]  # type: ignore[index, return-value]


@pytest.mark.parametrize("streaming", ["true", "false"])
def test__downloaded_and_streamed_data_sets_hold_the_same_images(folder: Path, streaming: str) -> None:
    name = f"hf://{folder}/parquet?streaming={streaming}"
    source = open_hub(name)
    assert [pixels(source.read(number)) for number in range(len(source))] == list(range(9))
    test = open_hub(f"{name}&split=test&column=photo")
    assert [pixels(test.read(number)) for number in range(len(test))] == [3, 5]
    assert isinstance(source, ParquetImages if streaming == "true" else ArrowImages)
    for wrong, message in (("split=validation", "validation"), ("column=label", "holds int64")):
        with pytest.raises(CapiError, match=message):
            open_hub(f"{name}&{wrong}")


def test__what_datasets_saved_is_opened_as_a_folder(folder: Path) -> None:
    from capi.data.locations import open_images

    for name in ("saved", "splits", "splits/train"):
        source = open_images(folder / name)
        assert [pixels(source.read(number)) for number in range(len(source))] == list(range(9))
    assert len(open_images(folder / "splits" / "test")) == 1


def test__a_part_of_a_split_and_other_formats_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="name a whole split"):
        open_hub(f"hf://{folder}/parquet?split=train[:3]")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(plain(1))
    with pytest.raises(CapiError, match=r"is no set of parquet files, .* leave streaming=true out"):
        open_hub(f"hf://{tmp_path}/photos?streaming=true")


def test__offline_is_reported_at_once(datasets: Any) -> None:
    with pytest.raises(CapiError, match=r"could not be opened \(HF_HUB_OFFLINE is set\): .*check the name"):
        open_hub("hf://nobody/nothing?split=train")
