"""Images in the rows of parquet and arrow files, as `datasets` and others write them.

The column holds the bytes of image files, or pairs of bytes and path as `datasets` has it. Arrow files are mapped into
memory and read row by row. Parquet gives whole row groups: these are decoded when one of their images is wanted, and
the last ones are kept. Both need pyarrow (extra `parquet`); nothing is unpickled.
"""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capi.data.decoding import BrokenImageError
from capi.data.shards import OPEN_FILES, WINDOW
from capi.errors import CapiError, nearest
from capi.runtime.cache import Cache
from capi.runtime.documents import READING_THREADS, parse_json
from capi.runtime.image_files import is_below

# Few, since each worker keeps the decoded row groups of the window that it reads from.
PARQUET_WINDOW = 4096
# Decoded row groups that a worker keeps.
GROUP_CACHE_BYTES = 2**30


class TableImages:
    """What arrow and parquet files share: rows that are numbered through all files."""

    usual_window = WINDOW

    def __init__(
        self, files: Sequence[str], rows: Sequence[Sequence[int]], column: str, folders: Sequence[Path] = ()
    ) -> None:
        """`rows` are, for each file, those of its blocks: record batches or row groups.

        Rows that name a file are read if it lies below the folder of the table, or below one of `folders`.
        """
        self.files, self.column, self.folders = list(files), column, tuple(folders)
        self.file_ends = np.cumsum([sum(counts) for counts in rows], dtype=np.int64)
        self.block_ends = np.cumsum([count for counts in rows for count in counts], dtype=np.int64)
        self.first_blocks = np.cumsum([0, *(len(counts) for counts in rows)], dtype=np.int64)
        if not len(self):
            raise CapiError(f"{files[0]} and the files beside it hold no rows: expected images")
        self._keep()

    def __len__(self) -> int:
        return int(self.file_ends[-1]) if len(self.file_ends) else 0

    def name(self, index: int) -> str:
        file, row = _find(self.file_ends, index)
        return f"{os.path.basename(self.files[file])}/row {row}"

    def read(self, index: int) -> Path | bytes:
        folder = Path(self.files[int(_find(self.file_ends, index)[0])]).parent
        part, row = _find(self._ends, index)
        return _content(self._columns[part][row].as_py(), folder, (folder, *self.folders))

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.column}\n{self.block_ends.tolist()}\n".encode())
        for file in self.files:
            digest.update(f"{os.path.basename(file)}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    # Where the parts end that are read as one, and the column of each: bytes or paths of images, or both.
    _ends: npt.NDArray[np.int64]
    _columns: Cache[Any]

    @abstractmethod
    def _keep(self) -> None:
        """Set `_ends` and `_columns`. Nothing is open at first, and nothing opened goes to another process."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not isinstance(value, Cache)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._keep()


class ArrowImages(TableImages):
    """Rows of arrow files, mapped into memory."""

    def _keep(self) -> None:
        self._ends = self.file_ends
        self._columns = Cache(lambda file: read_arrow(self.files[file]).column(self.column), limit=OPEN_FILES)


class ParquetImages(TableImages):
    """Rows of parquet files, here or behind an address, decoded a row group at a time."""

    usual_window = PARQUET_WINDOW

    def _keep(self) -> None:
        self._opened: Cache[Any] = Cache(lambda file: open_parquet(self.files[file]), limit=OPEN_FILES)
        self._ends = self.block_ends
        self._columns = Cache(self._group, limit=GROUP_CACHE_BYTES, weigh=lambda column: int(column.nbytes))

    def _group(self, block: int) -> Any:
        file = int(np.searchsorted(self.first_blocks, block, side="right")) - 1
        group = block - int(self.first_blocks[file])
        try:
            # Its threads do not survive the fork of a worker.
            table = self._opened[file].read_row_group(group, columns=[self.column], use_threads=False)
        except (OSError, CapiError):
            raise
        except Exception as error:
            if "://" in self.files[file]:
                # Connections fail with errors of many libraries; as this one they are retried.
                raise OSError(str(error)) from error
            raise BrokenImageError(f"row group {group} of {self.files[file]} cannot be read ({error})") from error
        return table.column(self.column)


def open_arrow(files: Sequence[str], column: str | None = None, folders: Sequence[Path] = ()) -> ArrowImages:
    """The images of arrow files, in this order."""
    require_pyarrow()
    tables = [read_arrow(file) for file in files]
    schema = _same_schema(files, [table.schema for table in tables])
    rows = [[batch.num_rows for batch in table.to_batches()] for table in tables]
    return ArrowImages(files, rows, image_column(schema, column, files[0]), folders)


def open_parquet_files(files: Sequence[str], column: str | None = None) -> ParquetImages:
    """The images of parquet files, in this order; their footers are read at once."""
    require_pyarrow()
    with ThreadPoolExecutor(READING_THREADS) as pool:
        opened = list(pool.map(_footer, files))
    schema = _same_schema(files, [schema for schema, _ in opened])
    return ParquetImages(files, [rows for _, rows in opened], image_column(schema, column, files[0]))


def _footer(file: str) -> tuple[Any, list[int]]:
    with open_parquet(file) as opened:
        metadata = opened.metadata
        return opened.schema_arrow, [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def open_parquet(file: str) -> Any:
    """A parquet file, here or behind an address that fsspec knows."""
    import pyarrow
    import pyarrow.parquet

    try:
        if "://" in file:
            import fsspec

            return pyarrow.parquet.ParquetFile(fsspec.open(file).open())
        return pyarrow.parquet.ParquetFile(file)
    except FileNotFoundError as error:
        raise CapiError(f"there is no file {file}") from error
    except (pyarrow.ArrowException, OSError) as error:
        # The library raises an error without a number for a footer that is damaged.
        if getattr(error, "errno", None) is not None:
            raise
        raise CapiError(f"{file} is no parquet file that can be read ({error}): fetch or write it again") from error


def read_arrow(file: str) -> Any:
    """The table of an arrow file, mapped into memory: a stream, as `datasets` writes it, or a file with a footer."""
    import pyarrow

    try:
        mapped = pyarrow.memory_map(file)
        beginning = mapped.read(6)
        mapped.seek(0)
        opened = pyarrow.ipc.open_file if beginning == b"ARROW1" else pyarrow.ipc.open_stream
        return opened(mapped).read_all()
    except FileNotFoundError as error:
        raise CapiError(f"there is no file {file}") from error
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise CapiError(f"{file} is no arrow file that can be read ({error}): fetch or write it again") from error


def image_column(schema: Any, wanted: str | None, file: str) -> str:
    """The column that was named, or the one that holds images."""
    if wanted is not None:
        if wanted not in schema.names:
            raise CapiError(
                f'{file} has no column "{wanted}"{nearest(wanted, schema.names)} (it has {", ".join(schema.names)})'
            )
        if not (_is_pair(schema.field(wanted).type) or _is_binary(schema.field(wanted).type)):
            raise CapiError(
                f'the column "{wanted}" of {file} holds {schema.field(wanted).type}, expected the bytes of image files'
            )
        return wanted
    pairs = [field.name for field in schema if _is_pair(field.type)]
    columns = _declared(schema) or pairs or [field.name for field in schema if _is_binary(field.type)]
    if len(columns) > 1 and "image" in columns:
        return "image"
    if len(columns) != 1:
        what = f"several columns that may be images ({', '.join(columns)})" if columns else "no column of images"
        raise CapiError(
            f"{file} has {what} among {', '.join(schema.names)}: name one that holds the bytes of image files, as "
            "SOURCE?column=NAME"
        )
    return columns[0]


def require_pyarrow() -> None:
    """Say which extra reads tables, where it is missing."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise CapiError("parquet and arrow files need an extra: pip install 'capi[parquet]'") from error


def _declared(schema: Any) -> list[str]:
    """Columns that `datasets` noted as images."""
    try:
        noted = parse_json((schema.metadata or {})[b"huggingface"], "the table")["info"]["features"]
        return [name for name in schema.names if noted.get(name, {}).get("_type") == "Image"]
    except (KeyError, ValueError, AttributeError, TypeError):
        return []


def _is_binary(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def _is_pair(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_struct(kind)) and kind.get_field_index("bytes") >= 0


def _same_schema(files: Sequence[str], schemas: Sequence[Any]) -> Any:
    for file, schema in zip(files, schemas, strict=True):
        if not schema.equals(schemas[0]):
            raise CapiError(f"{file} has other columns than {files[0]}: give files of one data set")
    return schemas[0]


def _content(value: Any, folder: Path, allowed: Sequence[Path]) -> Path | bytes:
    """The bytes of a row, or the file that it names, which must lie in one of the allowed folders."""
    if isinstance(value, bytes):
        return value
    if value is None:
        raise BrokenImageError("the row holds no image")
    if value["bytes"] is not None:
        return bytes(value["bytes"])
    if not value.get("path"):
        raise BrokenImageError("the row holds no image")
    path = str(value["path"])
    if "\0" in path or not is_below(folder / path, allowed):
        raise BrokenImageError(f"the row names {path}, which does not lie below the folder of the table")
    return folder / path


def _find(ends: npt.NDArray[np.int64], index: int) -> tuple[int, int]:
    """The part that an image lies in, and its number there."""
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)
