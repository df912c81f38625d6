"""Downloads from a server that behaves and from one that does not."""

import os
from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.zoo.published import downloads
from capi.zoo.published.downloads import Patience, UnreachableError, check_address, download, partial_of
from tests.zoo.serving import serving

CONTENTS = os.urandom(3 * 2**20 + 17)
QUICK = Patience(attempts=3, first_wait=0.001, timeout=5.0)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test__a_file_arrives_with_one_request(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    with serving(CONTENTS) as server:
        download(server.address, tmp_path / "model.pth", report=lambda *state: seen.append(state))
    assert (tmp_path / "model.pth").read_bytes() == CONTENTS
    assert files(tmp_path) == ["model.pth"]
    assert len(server.requests) == 1
    assert seen[0] == (0, len(CONTENTS))
    assert seen[-1] == (len(CONTENTS), len(CONTENTS))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test__what_is_missing_is_asked_for_and_no_more(tmp_path: Path) -> None:
    with serving(CONTENTS, cuts=[100, 2**20, 5]) as server:
        download(server.address, tmp_path / "model.pth", patience=QUICK)
    assert (tmp_path / "model.pth").read_bytes() == CONTENTS
    assert [asked.get("Range") for asked in server.requests] == [
        None,
        "bytes=100-",
        f"bytes={100 + 2**20}-",
        f"bytes={105 + 2**20}-",
    ]
    assert files(tmp_path) == ["model.pth"]


def test__a_later_call_goes_on_where_an_earlier_one_ended(tmp_path: Path) -> None:
    target = tmp_path / "model.pth"
    with serving(CONTENTS, cuts=[1000, 0, 0, 0]) as server:
        with pytest.raises(UnreachableError, match=f"the connection ended after 1000 of {len(CONTENTS)} bytes"):
            download(server.address, target, patience=QUICK)
        assert not target.exists()
        assert partial_of(target).read_bytes() == CONTENTS[:1000]
        server.cuts.clear()
        download(server.address, target, patience=QUICK)
    assert server.requests[-1]["Range"] == "bytes=1000-"
    assert target.read_bytes() == CONTENTS


@pytest.mark.parametrize("tag", ['"two"', None, 'W/"one"'])
def test__another_version_is_taken_from_the_start(tmp_path: Path, tag: str | None) -> None:
    target = tmp_path / "model.pth"
    with serving(CONTENTS, cuts=[1000, 0, 0, 0]) as server:
        with pytest.raises(UnreachableError):
            download(server.address, target, patience=QUICK)
        server.cuts.clear()
        server.contents, server.tag = CONTENTS[::-1], tag
        download(server.address, target, patience=QUICK)
    assert target.read_bytes() == CONTENTS[::-1]


def test__a_server_without_ranges_sends_it_all_again(tmp_path: Path) -> None:
    with serving(CONTENTS, cuts=[1000], ranges=False) as server:
        download(server.address, tmp_path / "model.pth", patience=QUICK)
    assert (tmp_path / "model.pth").read_bytes() == CONTENTS


def test__without_a_tag_nothing_is_resumed(tmp_path: Path) -> None:
    with serving(CONTENTS, cuts=[1000], tag=None) as server:
        download(server.address, tmp_path / "model.pth", patience=QUICK)
    assert [asked.get("Range") for asked in server.requests] == [None, None]
    assert (tmp_path / "model.pth").read_bytes() == CONTENTS


def test__a_file_that_came_whole_and_got_no_name_is_not_fetched_again(tmp_path: Path) -> None:
    target = tmp_path / "model.pth"
    partial_of(target).write_bytes(CONTENTS)
    downloads._tag_file(partial_of(target)).write_text('"one"')
    with serving(CONTENTS) as server:
        download(server.address, target, patience=QUICK)
    assert target.read_bytes() == CONTENTS
    assert len(server.requests) == 1


def test__too_much_is_thrown_away(tmp_path: Path) -> None:
    target = tmp_path / "model.pth"
    partial_of(target).write_bytes(CONTENTS + b"more")
    downloads._tag_file(partial_of(target)).write_text('"one"')
    with serving(CONTENTS) as server:
        download(server.address, target, patience=QUICK)
    assert target.read_bytes() == CONTENTS


def test__trouble_that_passes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with serving(CONTENTS, codes=[503, 429]) as server:
        download(server.address, tmp_path / "model.pth", patience=Patience(attempts=3, first_wait=1.0))
    assert waits == [1, 2]
    with serving(CONTENTS, codes=[500] * 9) as server, pytest.raises(UnreachableError, match="HTTP 500"):
        download(server.address, tmp_path / "other.pth", patience=Patience(attempts=4, first_wait=1.0))
    assert waits == [1, 2, 1, 2, 4]
    assert len(server.requests) == 4


@pytest.mark.parametrize("code", [403, 404, 410])
def test__trouble_that_stays_is_told_at_once(tmp_path: Path, code: int) -> None:
    with serving(CONTENTS, codes=[code] * 9) as server, pytest.raises(UnreachableError, match=f"HTTP {code}") as caught:
        download(server.address, tmp_path / "model.pth")
    assert len(server.requests) == 1
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == []


def test__nobody_there_is_told(tmp_path: Path) -> None:
    with serving(CONTENTS) as server:
        pass
    with pytest.raises(UnreachableError, match="refused"):
        download(server.address, tmp_path / "model.pth", patience=QUICK)


def test__a_name_that_nobody_knows_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(UnreachableError, match="could not be downloaded"):
        download("https://nowhere.invalid/model.pth", tmp_path / "model.pth")


def test__a_web_page_is_no_file(tmp_path: Path) -> None:
    page = serving(b"<html>log in</html>", kind="text/html; charset=utf-8")
    with page as server, pytest.raises(CapiError, match="a web page, not with a file"):
        download(server.address, tmp_path / "model.pth")
    assert files(tmp_path) == []


def test__a_disk_that_is_too_small_is_told_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: Usage)
    with serving(CONTENTS) as server, pytest.raises(CapiError, match="make room, or set TORCH_HOME"):
        download(server.address, tmp_path / "model.pth")
    assert files(tmp_path) == []


def test__a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    partial_of(tmp_path / "model.pth").mkdir()
    with serving(CONTENTS) as server, pytest.raises(CapiError, match="cannot be written"):
        download(server.address, tmp_path / "model.pth", patience=QUICK)


def test__what_does_not_pass_the_check_is_thrown_away(tmp_path: Path) -> None:
    def check(path: Path) -> None:
        assert path.read_bytes() == CONTENTS
        raise CapiError("not this one")

    with serving(CONTENTS) as server, pytest.raises(CapiError, match="not this one"):
        download(server.address, tmp_path / "model.pth", check=check)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "address",
    [
        "http://example.org/x",
        "file:///etc/passwd",
        "ftp://example.org/x",
        "data:,x",
        "http://127.0.0.1.example.org/x",
        "x",
    ],
)
def test__only_https_is_spoken(tmp_path: Path, address: str) -> None:
    with pytest.raises(CapiError, match="only https"):
        download(address, tmp_path / "model.pth")
    elsewhere = serving(CONTENTS, redirection=address if ":" in address else "ftp://x/y")
    with elsewhere as server, pytest.raises(CapiError, match="only https"):
        download(server.address, tmp_path / "model.pth")
    assert files(tmp_path) == []


def test__the_outside_does_not_lead_to_this_machine() -> None:
    check_address("http://localhost:8000/x")
    check_address("https://example.org/x", before="https://example.com/y")
    check_address("http://127.0.0.1/x", before="http://localhost/y")
    with pytest.raises(CapiError, match=r"https://example\.org/x leads to http://127\.0\.0\.1/y, which is not"):
        check_address("http://127.0.0.1/y", before="https://example.org/x")


def test__a_redirection_on_this_machine_is_followed(tmp_path: Path) -> None:
    with serving(CONTENTS) as second, serving(b"", redirection=second.address) as first:
        download(first.address, tmp_path / "model.pth")
    assert (tmp_path / "model.pth").read_bytes() == CONTENTS


@pytest.mark.parametrize("ending", ["", ".tag"])
def test__a_download_is_written_through_no_link(tmp_path: Path, ending: str) -> None:
    target, outside = tmp_path / "cache" / "model.pth", tmp_path / "outside"
    target.parent.mkdir()
    outside.write_text("precious")
    link = partial_of(target)
    link.with_name(link.name + ending).symlink_to(outside)
    with serving(CONTENTS) as server:
        if ending:
            download(server.address, target, patience=QUICK)
        else:
            with pytest.raises(CapiError, match="is a symbolic link"):
                download(server.address, target, patience=QUICK)
    assert outside.read_text() == "precious"
    assert target.exists() == bool(ending)
