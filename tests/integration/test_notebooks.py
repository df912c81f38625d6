"""The notebooks of the docs run from their first cell to the last, in an empty folder and without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run(notebook: Path, folder: Path, steps: int | None = None) -> None:
    """Run the notebook as it is, or with shorter training."""
    text = notebook.read_text(encoding="utf-8")
    if steps is not None:
        text, replaced = re.subn(r"\bSTEPS = \d+", f"STEPS = {steps}", text)
        assert replaced == 1
    (folder / notebook.name).write_text(text, encoding="utf-8")
    # A process of its own, since the libraries of Jupyter warn of each other.
    execute = [str(Path(sys.executable).parent / "jupyter-execute"), "--timeout=600", notebook.name]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "IPYTHONDIR": str(folder / "ipython")}
    done = subprocess.run(execute, cwd=folder, env=offline, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
def test__the_first_notebook_runs(tmp_path: Path) -> None:
    run(next(path for path in NOTEBOOKS if path.stem == "features"), tmp_path, steps=10)


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test__every_notebook_runs_as_it_is(notebook: Path, tmp_path: Path) -> None:
    run(notebook, tmp_path)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test__a_notebook_is_valid_and_holds_no_output(notebook: Path) -> None:
    read = nbformat.read(notebook, as_version=4)
    nbformat.validate(read)
    cells = [cell for cell in read.cells if cell.cell_type == "code"]
    assert cells
    assert not [cell.source for cell in cells if cell.outputs or cell.execution_count]
