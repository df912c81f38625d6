"""A folder that runs the explorer as a Space of the Hugging Face Hub, with a pushed model.

app.py             starts the explorer; `python app.py FOLDER` tries it on this machine
requirements.txt   what the package needs there
README.md          what the Hub reads about the Space
capi/              the package, at this very version
prototypes.safetensors, photos/   of the run, where there are any
"""

import importlib.metadata
import re
import shutil
import sys
from pathlib import Path

import yaml
from safetensors.torch import save_file

import capi
from capi.errors import CapiError
from capi.report.card import MARK
from capi.report.explorer.page import prototypes_of
from capi.runtime.atomic import atomic_folder, atomic_write
from capi.zoo.run_folder import RunFolder

PROTOTYPES, PHOTOS = "prototypes.safetensors", "photos"
_EXTRAS = {"demo", "explore", "hub"}
_APP = '''"""The explorer of {name}. `python app.py FOLDER` takes the model of a folder instead of the Hub's."""

import os
import sys
from pathlib import Path

import capi

here = Path(__file__).parent
prototypes = here / "{prototypes}"
capi.explore(
    sys.argv[1] if len(sys.argv) > 1 else "{name}",
    sorted((here / "{photos}").glob("*")),
    prototypes=prototypes if prototypes.exists() else None,
    # The Hub serves the page to others; anywhere else it stays on this machine.
    host="0.0.0.0" if "SPACE_ID" in os.environ else "127.0.0.1",
    port=int(os.environ.get("GRADIO_SERVER_PORT", "7860")),
)
'''
_README = """\
---
{head}---
{mark}

Look around in what the model `{name}` sees: click a patch, compare, hide a part of an image.

A private model needs the secret `HF_TOKEN` in the settings of this Space, with a token that may read it.
"""


def prepare_space(run: Path, out: Path, *, name: str, licence: str, photos: bool = False) -> Path:
    """Write what a Space for the model `name` (owner/name) holds; the folder appears complete or not at all.

    With `photos` it shows the training images that the run's report shows, else those of the demo.
    """
    head = {
        "title": name.partition("/")[2],
        "sdk": "gradio",
        "sdk_version": _version_of_gradio(),
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "app_file": "app.py",
        "license": licence,
        "models": [name],
    }
    prototypes = prototypes_of(run)
    with atomic_folder(out.resolve()) as partial:
        atomic_write(partial / "app.py", _APP.format(name=name, prototypes=PROTOTYPES, photos=PHOTOS))
        atomic_write(partial / "requirements.txt", "".join(f"{line}\n" for line in _requirements()))
        text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
        atomic_write(partial / "README.md", _README.format(head=text, mark=MARK, name=name))
        package = Path(capi.__file__).parent
        shutil.copytree(package, partial / "capi", ignore=shutil.ignore_patterns("__pycache__"))
        if prototypes is not None:
            tensors = {"weight": prototypes.weight, "bias": prototypes.bias}
            save_file({key: value for key, value in tensors.items() if value is not None}, partial / PROTOTYPES)
        if photos:
            (partial / PHOTOS).mkdir()
            for path in sorted((RunFolder(run).pictures / "snapshots").glob("photo_*.jpg")):
                shutil.copyfile(path, partial / PHOTOS / path.name)
    return out


def _version_of_gradio() -> str:
    try:
        return importlib.metadata.version("gradio")
    except importlib.metadata.PackageNotFoundError as error:
        raise CapiError("--space writes the version of gradio: pip install 'capi[explore]'") from error


def _requirements() -> list[str]:
    """What the package and the extras of the explorer need, but for gradio, which the Space's own setup brings."""
    needed = []
    for line in importlib.metadata.requires("capi") or []:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        ours = requirement.startswith(("capi", "gradio"))
        if not ours and (extra is None or extra[1] in _EXTRAS):
            needed.append(requirement.strip())
    return needed
