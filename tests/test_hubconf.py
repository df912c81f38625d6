"""The entry points of torch.hub, with nothing but torch and what torch itself needs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capi.zoo.published.registry import RELEASED
from tests.conftest import REFERENCE

ROOT = Path(__file__).parent.parent

# Nothing can be imported but the standard library, torch with what it depends on, and the repository itself.
TORCH_ALONE = """
import importlib.abc, importlib.machinery, importlib.metadata, re, sys, warnings
warnings.simplefilter("ignore")

def closure(name, seen):
    if name not in seen:
        seen.add(name)
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return seen
        for each in needed:
            if "extra ==" not in each:
                closure(re.match(r"[\\w.-]+", each)[0], seen)
    return seen

distributions = {name.lower().replace("-", "_") for name in closure("torch", set())}
allowed = {
    module for module, owners in importlib.metadata.packages_distributions().items()
    if {owner.lower().replace("-", "_") for owner in owners} & distributions
} | set(sys.stdlib_module_names) | {"torch", "capi", "hubconf"}

class TorchAlone(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        # Parts of the standard library that are named after the machine begin with an underscore.
        known = fullname.split(".")[0] in allowed or fullname.startswith("_")
        return importlib.machinery.PathFinder.find_spec(fullname, path, target) if known else None

sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, TorchAlone()]
for name in [name for name in sys.modules if name.split(".")[0] not in allowed and not name.startswith("_")]:
    del sys.modules[name]
"""


def run(code: str, *arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", TORCH_ALONE + code, str(ROOT), *arguments]
    path = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", **environment}
    done = subprocess.run(command, cwd="/", env=path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test__other_libraries_cannot_be_imported_here() -> None:
    code = """
for name in ("numpy", "pydantic", "yaml", "rich", "safetensors", "jaxtyping", "PIL", "huggingface_hub"):
    try:
        __import__(name)
        print(name)
    except ModuleNotFoundError:
        pass
import torch
print(torch.ones(2).sum().item())
"""
    assert run(code) == ["2.0"]


def test__published_models_load_from_the_cache_with_nothing_but_torch(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    for model in RELEASED.values():
        shutil.copy(REFERENCE / "student.pth", folder / model.file)
    code = """
import torch
for name in sys.argv[2:]:
    encoder = torch.hub.load(sys.argv[1], name, source="local")
    print(*encoder(torch.zeros(1, 3, 16, 16)).feature_map.shape)
"""
    lines = run(code, *RELEASED, TORCH_HOME=str(tmp_path))
    assert lines == ["1 2 2 64"] * 4
    assert len(list(folder.glob("*.sha256"))) == 4


def test__a_checkpoint_of_one_s_own_loads_with_nothing_but_torch() -> None:
    code = """
import torch
encoder = torch.hub.load(sys.argv[1], "capi", sys.argv[2], source="local")
print(*encoder(torch.zeros(1, 3, 16, 16)).pooled.shape)
"""
    assert run(code, str(REFERENCE / "student.pth")) == ["1 64"]


@pytest.mark.parametrize("name", RELEASED)
def test__every_published_name_has_an_entry_point_that_says_what_it_is(name: str) -> None:
    import hubconf

    assert RELEASED[name].data in getattr(hubconf, name).__doc__
    assert hubconf.dependencies == ["torch"]


def test__nothing_else_is_taken_for_an_entry_point() -> None:
    import hubconf

    # The rule of torch.hub.list.
    names = [name for name in dir(hubconf) if callable(getattr(hubconf, name)) and not name.startswith("_")]
    assert sorted(names) == sorted(["capi", *RELEASED])
