"""Models on the Hugging Face Hub by their id, `owner/name` or `owner/name@revision`.

Only the description and the safetensors file are fetched, never a pickle, and the weights only once the description
says that they are CAPI's. huggingface_hub does the rest: its cache, its locks, its resuming, its login.
"""

import re
from pathlib import Path
from typing import Any

from capi.errors import CapiError
from capi.runtime.documents import read_object
from capi.zoo.huggingface.files import CONFIG, MODEL_TYPE, WEIGHTS

_ID = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
# Endings of files: a path that leads nowhere is no id.
_FILES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".onnx", ".yaml", ".yml", ".py")


def is_hub_id(name: str) -> bool:
    """Whether a name may be an id of the Hub."""
    return _ID.fullmatch(name) is not None and not name.endswith(_FILES)


def hub_folder(name: str, *, endpoint: str | None = None, kind: str | None = MODEL_TYPE) -> Path:
    """The folder with the description and the weights of a model on the Hub, fetched if they are not here yet.

    The description must speak of a model of type `kind`; None takes any, which whoever reads the folder must check.
    """
    match = _ID.fullmatch(name)
    if match is None:
        raise CapiError(f'"{name}" is no id of the Hub: expected owner/name or owner/name@revision')
    config = _fetch(name, match, CONFIG, endpoint)
    model_type = _model_type(config)
    if kind is not None and model_type != kind:
        raise CapiError(
            f'{name} on the Hub is a model of type "{model_type}", not of CAPI: only those can be loaded by id'
        )
    weights = _fetch(name, match, WEIGHTS, endpoint)
    if weights.parent != config.parent:
        raise CapiError(f"{name} changed on the Hub while it was fetched: load it again")
    return config.parent


def _fetch(name: str, match: re.Match[str], file: str, endpoint: str | None) -> Path:
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError as error:
        raise CapiError(
            f"there is no {name} on this machine; if it is an id of the Hub, that needs: pip install 'capi[hub]'"
        ) from error
    try:
        return Path(hf_hub_download(match["repository"], file, revision=match["revision"], endpoint=endpoint))
    except errors.GatedRepoError as error:
        raise CapiError(
            f"{name} is open only to those who were let in: ask on its page, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CapiError(
            f"there is no {name}, neither a file or folder here nor a model on the Hub (a private one needs `hf auth "
            "login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CapiError(f'{match["repository"]} on the Hub has no revision "{match["revision"]}"') from error
    except errors.LocalEntryNotFoundError as error:
        raise CapiError(
            f"{name} is not on this machine and the Hub cannot be reached: fetch {CONFIG} and {WEIGHTS} of it "
            "elsewhere into a folder, and load that folder"
        ) from error
    except errors.EntryNotFoundError as error:
        raise CapiError(f"{name} on the Hub has no {file}: only models with {CONFIG} and {WEIGHTS} are read") from error
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise CapiError(f"{name} could not be fetched from the Hub ({said})") from error


def _model_type(config: Path) -> Any:
    try:
        return read_object(config).get("model_type")
    except CapiError:
        return None
