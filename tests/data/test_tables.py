import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from capi.data import tables
from capi.data.decoding import BrokenImageError
from capi.data.order import WindowShuffle, order_of
from capi.data.tables import image_column, open_arrow, open_parquet_files
from capi.errors import CapiError
from tests.data.shard_files import plain

PAIR = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def pairs(numbers: list[int]) -> pyarrow.Table:
    rows = [{"bytes": plain(number), "path": None} for number in numbers]
    return pyarrow.table({"photo": pyarrow.array(rows, PAIR), "label": numbers})


def write_parquet(folder: Path, counts: list[int], group: int = 4) -> list[str]:
    files, start = [], 0
    for number, count in enumerate(counts):
        files.append(str(folder / f"{number}.parquet"))
        pyarrow.parquet.write_table(pairs(list(range(start, start + count))), files[-1], row_group_size=group)
        start += count
    return files


def write_arrow(path: Path, table: pyarrow.Table, *, stream: bool = True, batch: int = 3) -> str:
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return str(path)


def test__parquet_rows_are_read_by_number_and_row_groups_are_blocks(tmp_path: Path) -> None:
    source = open_parquet_files(write_parquet(tmp_path, [10, 3]))
    assert len(source) == 13
    for number in (12, 0, 7, 3, 10, 9):
        assert source.read(number) == plain(number)
    assert source.name(11) == "1.parquet/row 1"
    assert source.block_ends.tolist() == [4, 8, 10, 13]
    order = order_of(source, 0, window=4)
    assert isinstance(order, WindowShuffle)
    again = pickle.loads(pickle.dumps(source))  # noqa: S301 - as a worker that is spawned gets it
    assert again.read(5) == plain(5)


def test__a_row_group_is_decoded_once_while_it_is_kept(tmp_path: Path) -> None:
    files = write_parquet(tmp_path, [12])
    for limit, expected in ((tables.GROUP_CACHE_BYTES, [0, 1, 2]), (1, [0, 1, 0, 1, 2, 0])):
        source, asked = open_parquet_files(files), []
        group = source._group
        source._columns.make = lambda block, asked=asked, group=group: (asked.append(block), group(block))[1]
        source._columns.limit = limit
        for number in (0, 5, 1, 6, 11, 2, 0):
            assert source.read(number) == plain(number)
        assert asked == expected


@pytest.mark.parametrize("stream", [True, False])
def test__arrow_rows_are_read_by_number(tmp_path: Path, stream: bool) -> None:
    files = [
        write_arrow(tmp_path / "a.arrow", pairs(list(range(7))), stream=stream),
        write_arrow(tmp_path / "b.arrow", pairs([7, 8]), stream=stream),
    ]
    source = open_arrow(files)
    assert [source.read(number) for number in range(9)] == [plain(number) for number in range(9)]
    assert source.block_ends.tolist() == [3, 6, 7, 9]
    assert source.name(8) == "b.arrow/row 1"


def test__rows_may_name_a_file_or_hold_nothing(tmp_path: Path) -> None:
    rows = [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": None}, None]
    source = open_arrow([write_arrow(tmp_path / "a.arrow", pyarrow.table({"photo": pyarrow.array(rows, PAIR)}))])
    assert source.read(0) == tmp_path / "a.png"
    for number in (1, 2):
        with pytest.raises(BrokenImageError, match="the row holds no image"):
            source.read(number)


def schema(**columns: Any) -> pyarrow.Schema:
    return pyarrow.schema(list(columns.items()))


@pytest.mark.parametrize(
    ("columns", "wanted", "name"),
    [
        ({"a": pyarrow.int64(), "b": pyarrow.binary()}, None, "b"),
        ({"a": pyarrow.binary(), "b": PAIR}, None, "b"),
        ({"a": PAIR, "image": PAIR}, None, "image"),
        ({"a": PAIR, "b": PAIR}, "b", "b"),
        ({"a": pyarrow.large_binary()}, None, "a"),
    ],
)
def test__the_column_of_images_is_found(columns: dict[str, Any], wanted: str | None, name: str) -> None:
    assert image_column(schema(**columns), wanted, "x.parquet") == name


@pytest.mark.parametrize(
    ("columns", "wanted", "message"),
    [
        ({"a": pyarrow.int64()}, None, r"no column of images among a: name one .* SOURCE\?column=NAME"),
        ({"a": PAIR, "b": PAIR}, None, r"several columns that may be images \(a, b\)"),
        ({"photo": PAIR}, "foto", r'no column "foto"; did you mean "photo"\?'),
        ({"photo": PAIR, "label": pyarrow.int64()}, "label", "holds int64, expected the bytes of image files"),
    ],
)
def test__other_columns_are_refused(columns: dict[str, Any], wanted: str | None, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        image_column(schema(**columns), wanted, "x.parquet")


def test__what_datasets_notes_as_an_image_is_one() -> None:
    noted = b'{"info": {"features": {"b": {"_type": "Image"}, "a": {"_type": "Value"}}}}'
    columns = schema(a=pyarrow.binary(), b=pyarrow.binary())
    assert image_column(columns.with_metadata({"huggingface": noted}), None, "x") == "b"
    with pytest.raises(CapiError, match="several columns"):
        image_column(columns.with_metadata({"huggingface": b"nonsense"}), None, "x")


def test__files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet" * 10)
    (tmp_path / "a.arrow").write_bytes(b"no arrow" * 10)
    for opened, ending in ((open_parquet_files, "parquet"), (open_arrow, "arrow")):
        with pytest.raises(CapiError, match=f"is no {ending} file that can be read"):
            opened([str(tmp_path / f"a.{ending}")])
        with pytest.raises(CapiError, match="there is no file"):
            opened([str(tmp_path / f"nowhere.{ending}")])
    with pytest.raises(CapiError, match="hold no rows"):
        open_parquet_files(write_parquet(tmp_path, [0]))
    (first,) = write_parquet(tmp_path, [2])
    other = str(tmp_path / "other.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), other)
    with pytest.raises(CapiError, match=r"other\.parquet has other columns than"):
        open_parquet_files([first, other])


def test__a_damaged_row_group_is_a_broken_image(tmp_path: Path) -> None:
    (file,) = write_parquet(tmp_path, [12])
    place = pyarrow.parquet.ParquetFile(file).metadata.row_group(1).column(0)
    content = bytearray(Path(file).read_bytes())
    start = place.dictionary_page_offset or place.data_page_offset
    content[start : start + place.total_compressed_size] = b"\xff" * place.total_compressed_size
    Path(file).write_bytes(content)
    source = open_parquet_files([file])
    assert source.read(0) == plain(0)
    with pytest.raises((BrokenImageError, OSError)):
        source.read(5)


def test__the_fingerprint_follows_rows_and_column(tmp_path: Path) -> None:
    base = open_parquet_files(write_parquet(tmp_path, [10, 3])).fingerprint
    (tmp_path / "b").mkdir()
    assert open_parquet_files(write_parquet(tmp_path / "b", [10, 3])).fingerprint == base
    assert open_parquet_files(write_parquet(tmp_path / "b", [10, 4])).fingerprint != base
    assert open_parquet_files(write_parquet(tmp_path / "b", [10, 3], group=5)).fingerprint != base


def test__memory_for_row_groups_is_bounded_by_bytes(tmp_path: Path) -> None:
    source = open_parquet_files(write_parquet(tmp_path, [40], group=1))
    source._columns.limit = 5 * int(source._group(0).nbytes)
    for number in np.random.default_rng(0).permutation(40):
        source.read(int(number))
        assert source._columns.used <= source._columns.limit
    assert tables.GROUP_CACHE_BYTES == 2**30
