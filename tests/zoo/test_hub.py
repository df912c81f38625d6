"""Ids of the Hub, against a small server that answers as the Hub does, asked by huggingface_hub itself."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from capi.errors import CapiError
from capi.zoo.published.hub import hub_folder, is_hub_id

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODELS: dict[str, dict[str, bytes]] = {
    "someone/capi-small": {
        "config.json": json.dumps({"model_type": "capi"}).encode(),
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"a pickle",
    },
    "someone/other": {"config.json": json.dumps({"model_type": "vit"}).encode(), "model.safetensors": b"weights"},
    "someone/pickled": {"config.json": json.dumps({"model_type": "capi"}).encode(), "pytorch_model.bin": b"a pickle"},
}


class Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        owner, name, _, revision, file = self.path.strip("/").split("/", 4)
        model = MODELS.get(f"{owner}/{name}")
        missing = None
        if model is None:
            missing = "RepoNotFound"
        elif revision not in {"main", COMMIT, "v1"}:
            missing = "RevisionNotFound"
        elif file not in model:
            missing = "EntryNotFound"
        contents = b"" if missing or model is None else model[file]
        self.send_response(404 if missing else 200)
        if missing:
            self.send_header("X-Error-Code", missing)
        else:
            self.send_header("ETag", f'"{hashlib.sha256(contents).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        if body:
            self.wfile.write(contents)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def endpoint(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Counting", (Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test__the_description_and_the_weights_are_fetched_and_nothing_else(endpoint: str, asked: list[str]) -> None:
    folder = hub_folder("someone/capi-small", endpoint=endpoint)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not [request for request in asked if "pickle" in request or ".bin" in request]


def test__a_revision_is_asked_for(endpoint: str, asked: list[str]) -> None:
    hub_folder("someone/capi-small@v1", endpoint=endpoint)
    assert all("/resolve/v1/" in request or COMMIT in request for request in asked)
    with pytest.raises(CapiError, match='someone/capi-small on the Hub has no revision "v2"'):
        hub_folder("someone/capi-small@v2", endpoint=endpoint)


def test__weights_of_another_method_are_not_fetched(endpoint: str, asked: list[str]) -> None:
    with pytest.raises(CapiError, match='is a model of type "vit", not of CAPI'):
        hub_folder("someone/other", endpoint=endpoint)
    assert not [request for request in asked if "safetensors" in request]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("someone/nothing", "there is no someone/nothing, neither a file or folder here nor a model on the Hub"),
        ("someone/pickled", "someone/pickled on the Hub has no model.safetensors"),
    ],
)
def test__what_is_not_there_is_reported_in_one_sentence(endpoint: str, name: str, message: str) -> None:
    with pytest.raises(CapiError, match=message) as caught:
        hub_folder(name, endpoint=endpoint)
    assert "\n" not in str(caught.value)


def test__offline_the_error_names_what_to_fetch(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CapiError, match=r"is not on this machine and the Hub cannot be reached: fetch config\.json"):
        hub_folder("someone/never-seen", endpoint=endpoint)


def test__without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CapiError, match=r"pip install 'capi\[hub\]'"):
        hub_folder("someone/model")


@pytest.mark.parametrize("name", ["owner/name", "owner/name@main", "o-w/n.a_m-e@refs/pr/1"])
def test__ids_are_known_by_their_form(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    [
        "name",
        "a/b/c",
        "/a/b",
        "./a",
        "../a",
        "runs/x.pth",
        "runs/x.safetensors",
        "a/",
        "a/b@",
        "a b/c",
        "a/b:c",
        "a\\b",
        "",
    ],
)
def test__paths_are_no_ids(name: str) -> None:
    assert not is_hub_id(name)
    if name.count("/") != 1 or name.endswith(("/", "@")):
        with pytest.raises(CapiError, match="is no id of the Hub"):
            hub_folder(name)
