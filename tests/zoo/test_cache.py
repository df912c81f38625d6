"""The cache of published files, and downloads from a server that behaves and from one that does not."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.zoo.published import cache
from capi.zoo.published.cache import cache_folder, cached_file, download
from capi.zoo.published.registry import RELEASED, ReleasedModel
from tests.zoo.serving import Server, serving

CONTENTS = os.urandom(2 * 2**20 + 17)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(cache, "_PAUSES", (0.001, 0.001))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def model_at(server: Server) -> ReleasedModel:
    return replace(RELEASED["capi_vitl14_lvd"], address=server.address)


def test__the_cache_is_that_of_torch_hub(folder: Path) -> None:
    assert cache_folder() == folder


def test__a_file_is_downloaded_once_and_its_checksum_recorded(folder: Path) -> None:
    with serving(CONTENTS) as server:
        first, second = (cached_file(model_at(server)) for _ in range(2))
    assert first == second == folder / "model.pth"
    assert first.read_bytes() == CONTENTS
    assert len(server.requests) == 1
    record = (folder / "model.pth.sha256").read_text()
    assert record == f"{hashlib.sha256(CONTENTS).hexdigest()}  model.pth\n"
    subprocess.run(["sha256sum", "-c", "model.pth.sha256"], cwd=folder, check=True, capture_output=True)


def test__a_file_that_someone_put_there_is_used_and_recorded(folder: Path) -> None:
    (folder / "model.pth").write_bytes(CONTENTS)
    with serving(b"other") as server:
        assert cached_file(model_at(server)).read_bytes() == CONTENTS
    assert server.requests == []
    assert (folder / "model.pth.sha256").is_file()


def test__a_file_that_changed_here_or_at_its_source_is_not_taken_for_the_old_one(folder: Path) -> None:
    with serving(CONTENTS) as server:
        path = cached_file(model_at(server))
        path.write_bytes(CONTENTS[:-1] + b"x")
        with pytest.raises(CapiError, match=f"is not the file that was first used .*: delete it and {path}.sha256"):
            cached_file(model_at(server))
        path.unlink()
        server.contents = CONTENTS[::-1]
        with pytest.raises(CapiError, match="is not the file that was first used"):
            cached_file(model_at(server))
        path.unlink()
        Path(f"{path}.sha256").unlink()
        assert cached_file(model_at(server)).read_bytes() == CONTENTS[::-1]


def test__a_cache_that_is_kept_by_others_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.pth").write_bytes(CONTENTS)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache, "locked", refused)
    model = replace(RELEASED["capi_vitl14_lvd"], address="https://nowhere.invalid/model.pth")
    assert cached_file(model).read_bytes() == CONTENTS
    (folder / "model.pth").unlink()
    with pytest.raises(CapiError, match=r"cannot be written \(Permission denied\): set TORCH_HOME"):
        cached_file(model)


LOADS = """
import sys
from dataclasses import replace
from capi.zoo.published.cache import cached_file
from capi.zoo.published.registry import RELEASED
print("ready", flush=True)
sys.stdin.readline()
print(len(cached_file(replace(RELEASED["capi_vitl14_lvd"], address=sys.argv[1])).read_bytes()))
"""


def test__two_processes_load_the_same_name_at_once(folder: Path) -> None:
    with serving(CONTENTS, pause=0.3) as server:
        command = [sys.executable, "-c", LOADS, server.address]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate()[0].strip() for process in processes]
    assert outputs == [str(len(CONTENTS))] * 2
    assert len(server.requests) == 1
    assert files(folder) == [".model.pth.lock", "model.pth", "model.pth.sha256"]


def test__what_is_missing_is_asked_for_and_no_more(folder: Path) -> None:
    with serving(CONTENTS, cuts=[100, 2**20, 5]) as server:
        download(server.address, folder / "model.pth")
    assert (folder / "model.pth").read_bytes() == CONTENTS
    ranges = [None, "bytes=100-", f"bytes={100 + 2**20}-", f"bytes={105 + 2**20}-"]
    assert [asked.get("Range") for asked in server.requests] == ranges
    assert files(folder) == ["model.pth"]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("tag", ['"one"', '"two"', 'W/"one"', None])
def test__a_later_call_resumes_the_same_version_and_no_other(folder: Path, tag: str | None, ranges: bool) -> None:
    """A server that has another version, that names none, or that knows no ranges sends everything."""
    target, contents = folder / "model.pth", CONTENTS if tag == '"one"' else CONTENTS[::-1]
    with serving(CONTENTS, cuts=[1000, 0, 0], ranges=ranges) as server:
        with pytest.raises(CapiError, match=f"the connection ended after (0|1000) of {len(CONTENTS)} bytes"):
            download(server.address, target)
        assert not target.exists()
        server.cuts.clear()
        server.contents, server.tag = contents, tag
        download(server.address, target)
    assert target.read_bytes() == contents
    if ranges:
        assert server.requests[-1]["Range"] == "bytes=1000-"


def test__too_much_is_thrown_away(folder: Path) -> None:
    (folder / ".model.pth.partial").write_bytes(CONTENTS + b"more")
    (folder / ".model.pth.partial.tag").write_text('"one"')
    with serving(CONTENTS) as server:
        download(server.address, folder / "model.pth")
    assert (folder / "model.pth").read_bytes() == CONTENTS


def test__transient_errors_are_retried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(cache, "_PAUSES", (1.0, 2.0, 4.0))
    with serving(CONTENTS, codes=[503, 429]) as server:
        download(server.address, folder / "model.pth")
    assert waits == [1, 2]
    with serving(CONTENTS, codes=[500] * 9) as server, pytest.raises(CapiError, match="500"):
        download(server.address, folder / "other.pth")
    assert waits == [1, 2, 1, 2, 4]
    assert len(server.requests) == 4


def test__lasting_errors_are_raised_at_once_with_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waited"))
    with serving(CONTENTS, codes=[404]) as server, pytest.raises(CapiError, match="404") as caught:
        download(server.address, folder / "model.pth")
    assert f"{folder / 'model.pth'} is not on this machine, and {server.address} could not" in str(caught.value)
    assert "put the file from there at that path" in str(caught.value)
    with pytest.raises(CapiError, match="could not be downloaded"):
        download("https://nowhere.invalid/model.pth", folder / "model.pth")
    page = serving(b"<html>log in</html>", kind="text/html; charset=utf-8")
    with page as server, pytest.raises(CapiError, match="a web page, not with a file"):
        download(server.address, folder / "model.pth")
    assert files(folder) == []


def test__a_server_that_is_gone_is_named(folder: Path) -> None:
    with serving(CONTENTS) as server:
        pass
    with pytest.raises(CapiError, match=f"{server.address} could not be downloaded .*refused"):
        download(server.address, folder / "model.pth")


@pytest.mark.parametrize(
    "address",
    ["http://example.org/x", "file:///etc/passwd", "ftp://example.org/x", "http://127.0.0.1.example.org/x", "x"],
)
def test__only_https_is_downloaded(folder: Path, address: str) -> None:
    with pytest.raises(CapiError, match="only https"):
        download(address, folder / "model.pth")
    elsewhere = serving(CONTENTS, redirection=address if ":" in address else "ftp://x/y")
    with elsewhere as server, pytest.raises(CapiError, match=r"only https|not allowed"):
        download(server.address, folder / "model.pth")
    assert files(folder) == []


def test__a_redirection_is_followed_on_this_machine_and_never_to_it(folder: Path) -> None:
    with serving(CONTENTS) as second, serving(b"", redirection=second.address) as first:
        download(first.address, folder / "model.pth")
    assert (folder / "model.pth").read_bytes() == CONTENTS
    outside = cache.urllib.request.Request("https://example.org/x")
    with pytest.raises(CapiError, match="only https"):
        cache._Redirections().redirect_request(outside, None, 302, "", {}, "http://127.0.0.1/y")


@pytest.mark.parametrize("ending", ["", ".tag"])
def test__a_download_is_written_through_no_link(folder: Path, tmp_path: Path, ending: str) -> None:
    target, outside = folder / "model.pth", tmp_path / "outside"
    outside.write_text("precious")
    (folder / f".model.pth.partial{ending}").symlink_to(outside)
    with serving(CONTENTS) as server:
        if ending:
            download(server.address, target)
        else:
            with pytest.raises(CapiError, match="is a symbolic link"):
                download(server.address, target)
    assert outside.read_text() == "precious"
    assert target.exists() == bool(ending)
