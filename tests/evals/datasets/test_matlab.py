import importlib
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from capi.errors import CapiError
from capi.evals.datasets.files import read_matlab


def test__a_variable_is_read_with_its_structure(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "a.mat", {"found": {"mask": np.eye(3)}, "other": 1})
    np.testing.assert_array_equal(read_matlab(tmp_path / "a.mat", "found").mask, np.eye(3))


def test__files_that_are_missing_broken_or_of_something_else_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"a\.mat is missing"):
        read_matlab(tmp_path / "a.mat", "found")
    (tmp_path / "a.mat").write_bytes(b"no matlab at all" * 20)
    with pytest.raises(CapiError, match="cannot be read as a file of MATLAB"):
        read_matlab(tmp_path / "a.mat", "found")
    scipy.io.savemat(tmp_path / "a.mat", {"other": 1})
    with pytest.raises(CapiError, match='no variable "found"'):
        read_matlab(tmp_path / "a.mat", "found")


def test__without_scipy_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(CapiError, match=r"capi\[sbd\]"):
        read_matlab(tmp_path / "a.mat", "found")
