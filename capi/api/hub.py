"""To the Hub: prepare the folder of a run, make the repository, send it. A dry run stops after the folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from capi.api.share_folder import prepare_folder
from capi.errors import CapiError
from capi.report.card import require_licence
from capi.report.costs import CostAssumptions
from capi.zoo.run_folder import RunFolder
from capi.zoo.weights import Weights

FOLDER = "hub"
_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_MESSAGE = "Upload a CAPI model"


@runtime_checkable
class Hub(Protocol):
    """What is used of huggingface_hub.HfApi."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...

    def repo_info(self, repo_id: str) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any: ...


@dataclass(frozen=True)
class Pushed:
    """The folder, what is in it, and where it went; `address` is None after a dry run."""

    folder: Path
    repo_id: str
    files: tuple[tuple[str, int], ...]
    """Names and bytes."""
    private: bool
    address: str | None

    @property
    def lines(self) -> list[str]:
        """For people."""
        kind = "private" if self.private else "public"
        listed = [
            f"  {name} ({size / 2**20:.1f} MiB)" if size >= 2**20 else f"  {name} ({size / 2**10:.1f} KiB)"
            for name, size in self.files
        ]
        if self.address is None:
            return [
                f"wrote {self.folder}; to the {kind} repository {self.repo_id} would be sent:",
                *listed,
                "nothing was sent: look at README.md, then run the same command without --dry-run",
            ]
        return [f"sent to {self.address} ({kind}):", *listed]


def push(
    run: str | Path,
    name: str,
    *,
    licence: str | None = None,
    data_description: str = "",
    results: Sequence[str | Path] = (),
    photos: bool = False,
    private: bool = False,
    token: str | None = None,
    dry_run: bool = False,
    out: str | Path | None = None,
    weights: Weights = "teacher",
    watts: float | None = None,
    carbon: float | None = None,
    overwrite: bool = False,
    hub: Hub | None = None,
) -> Pushed:
    """Share a run on the Hugging Face Hub as `owner/name`: weights, config and a model card.

    `dry_run` writes the folder and sends nothing. `results` are folders of `evaluate`, beside those within the run. The
    folder is written to `out`, by default RUN/hub, which is replaced each time. Without a `token` that of
    `hf auth login` or of HF_TOKEN is used. `hub` takes the place of huggingface_hub's own client.
    """
    require_repo_id(name)
    if licence is None:
        raise CapiError("a model that others may use needs a licence: --licence apache-2.0, or what its owner decides")
    require_licence(licence)
    run = Path(run)
    RunFolder(run).record()
    if not dry_run and hub is None:
        hub = open_hub(token)
    folder = prepare_folder(
        run,
        run / FOLDER if out is None else Path(out),
        name=name,
        licence=licence,
        weights=weights,
        data_description=data_description,
        results=[Path(folder) for folder in results],
        photos=photos,
        costs=CostAssumptions(watts, carbon),
        overwrite=overwrite or out is None,
    )
    files = tuple((path.name, path.stat().st_size) for path in sorted(folder.iterdir()))
    address = None if dry_run or hub is None else send(hub, folder, name, private=private)
    return Pushed(folder, name, files, private, address)


def require_repo_id(repo_id: str) -> str:
    """`owner/name` as the Hub takes it."""
    parts = repo_id.split("/")
    good = len(parts) == 2 and all(_PART.fullmatch(part) for part in parts)
    if not good or "--" in repo_id or ".." in repo_id or repo_id.endswith(".git"):
        raise CapiError(
            f'"{repo_id}" cannot name a repository: expected owner/name of letters, digits, "-", "_" and ".", such as '
            "ana/capi-vits14"
        )
    return repo_id


def open_hub(token: str | None = None) -> Hub:
    """The client of huggingface_hub, once it is sure that it has a token."""
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise CapiError("capi push needs huggingface_hub: pip install 'capi[hub]' (--dry-run does without)") from error
    if not (token or get_token()):
        raise CapiError("there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN")
    client: Hub = HfApi(token=token)
    return client


def send(hub: Hub, folder: Path, repo_id: str, *, private: bool) -> str:
    """Make the repository if it is not there, put the folder into it as one commit, and say where it is."""
    try:
        address = str(hub.create_repo(repo_id, private=private, exist_ok=True))
        # One that was there before stays as public as it was.
        if private and not hub.repo_info(repo_id).private:
            raise CapiError(f"{repo_id} is there already and is public: nothing was sent; choose another name")
        hub.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message=_MESSAGE)
    except CapiError:
        raise
    except Exception as error:
        raise CapiError(f"{_reason(error, repo_id)}; {folder} is ready for another try") from error
    return address


def _reason(error: Exception, repo_id: str) -> str:
    """What went wrong, in words of ours where the cause is a common one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the Hub does not accept the token: log in with `hf auth login`"
    if status in {403, 404}:
        return f"this token may not write to {repo_id}: use one with the right to write, or another owner"
    # The library's own HTTP client has changed its name before.
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith(("httpx", "requests")):
        return "the Hub cannot be reached: check the connection and that HF_HUB_OFFLINE is not set"
    said = " ".join(str(error).split())[:300] or "no reason given"
    return f"{repo_id} could not be sent ({type(error).__name__}: {said})"
