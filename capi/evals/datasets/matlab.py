"""Files of MATLAB, which some data sets keep their annotations in."""

import importlib
from pathlib import Path
from typing import Any

from capi.errors import CapiError


def read_matlab(path: Path, variable: str) -> Any:
    """A variable of a .mat file, structures simplified to objects with attributes."""
    try:
        reader = importlib.import_module("scipy.io")
    except ImportError as error:
        raise CapiError(f"reading {path} needs an extra: pip install 'capi[sbd]'") from error
    if not path.is_file():
        raise CapiError(f"the file {path} is missing: complete the files")
    try:
        values = reader.loadmat(path, variable_names=[variable], squeeze_me=True, struct_as_record=False)
    except Exception as error:
        # The reader raises whatever it likes about a broken file.
        raise CapiError(f"{path} cannot be read as a file of MATLAB ({error}): complete the files") from error
    if variable not in values:
        raise CapiError(f'{path} holds no variable "{variable}": it is not the file of the official data set')
    return values[variable]
