"""The notebooks of the docs run from their first cell to the last, in an empty folder and without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test__every_notebook_runs_as_it_is(notebook: Path, tmp_path: Path) -> None:
    shutil.copy(notebook, tmp_path)
    # A process of its own, since the libraries of Jupyter warn of each other.
    execute = [str(Path(sys.executable).parent / "jupyter-execute"), "--timeout=600", notebook.name]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(execute, cwd=tmp_path, env=offline, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test__a_notebook_is_valid_and_holds_no_output(notebook: Path) -> None:
    read = nbformat.read(notebook, as_version=4)
    nbformat.validate(read)
    cells = [cell for cell in read.cells if cell.cell_type == "code"]
    assert cells
    assert not [cell.source for cell in cells if cell.outputs or cell.execution_count]
