import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from capi.errors import CapiError
from capi.report.watch import DEFAULT_PORT, WatchServer, distinct_names, is_loopback, watch
from tests.browser import browser, page  # noqa: F401
from tests.report.run_folders import add_pictures, append, make_run, record, records


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / name, records(8), steps=100) for name in ("first", "second")]


@pytest.fixture
def server(runs: list[Path]) -> Iterator[WatchServer]:
    with WatchServer(runs, port=0, seconds=0.1) as started:
        yield started


@pytest.fixture
def single(runs: list[Path]) -> Iterator[WatchServer]:
    with WatchServer(runs[:1], port=0, seconds=0.1) as started:
        yield started


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    port = int(server.address.rsplit(":", 1)[1].strip("/"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def test__the_page_of_a_run_is_served(single: WatchServer) -> None:
    status, content, headers = ask(single, "/")
    assert status == 200
    assert "<h1>first</h1>" in content
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"


def test__several_runs_are_compared_and_each_has_its_page(server: WatchServer) -> None:
    content = ask(server, "/")[1]
    assert 'href="/run/0"' in content
    assert 'href="/run/1"' in content
    assert "<h1>second</h1>" in ask(server, "/run/1")[1]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/run/2",
        "/run/-1",
        "/run/99999999999",
        "/run/0/../../config.yaml",
        "/run/0/config.yaml",
        "/run/0parts",
        "/run/0/part/nothing",
        "/part/",
        "/%2e%2e/run.json",
        "//first/metrics.jsonl",
        "/favicon.ico",
    ],
)
def test__other_paths_are_not_found(server: WatchServer, path: str) -> None:
    status, content, _ = ask(server, path)
    assert status == 404
    assert content == "There is no such page.\n"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]:1"]
)
def test__foreign_hosts_are_refused(single: WatchServer, host: str) -> None:
    assert ask(single, "/", Host=host)[0] == 403
    assert ask(single, "/parts", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test__names_of_this_machine_are_answered(single: WatchServer, host: str) -> None:
    assert ask(single, "/", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test__only_reading_is_allowed(single: WatchServer, method: str) -> None:
    status, _, headers = ask(single, "/", method)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"


def test__head_answers_without_content(single: WatchServer) -> None:
    status, content, headers = ask(single, "/", "HEAD")
    assert (status, content) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test__only_what_changed_gets_another_digest(single: WatchServer, runs: list[Path]) -> None:
    before = json.loads(ask(single, "/parts")[1])
    assert json.loads(ask(single, "/parts")[1]) == before
    append(runs[0], record(45))
    after = json.loads(ask(single, "/run/0/parts")[1])
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"state", "health", "cost", "charts"}
    part = json.loads(ask(single, "/part/charts")[1])
    assert part["digest"] == after["charts"]
    loss = next(chart for chart in part["charts"]["charts"] if chart["key"] == "student_loss")
    assert loss["lines"][0]["steps"][-1] == 45


def test__a_run_that_vanishes_is_reported_and_the_server_lives_on(server: WatchServer, runs: list[Path]) -> None:
    (runs[1] / "run.json").unlink()
    status, content, _ = ask(server, "/run/1/parts")
    assert status == 503
    assert "cannot be read" in content
    assert runs[1].name not in content
    assert ask(server, "/run/0")[0] == 200


def test__a_folder_that_is_no_run_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="is no run"):
        WatchServer([tmp_path])
    with pytest.raises(CapiError, match="no run to watch"):
        WatchServer([])


def test__a_taken_port_is_reported_or_avoided(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CapiError, match="another port"):
            WatchServer(runs, port=port)
        monkeypatch.setattr("capi.report.watch.DEFAULT_PORT", port)
        with WatchServer(runs) as server:
            assert not server.address.endswith(f":{port}/")
            assert ask(server, "/")[0] == 200
    assert DEFAULT_PORT > 1024
    with pytest.raises(CapiError, match="cannot listen"):
        WatchServer(runs, port=70000)


def test__the_server_listens_on_loopback_alone(single: WatchServer) -> None:
    assert single.address.startswith("http://127.0.0.1:")
    assert single.only_this_machine


def test__names_are_lengthened_until_they_differ() -> None:
    paths = [Path("/a/x/run"), Path("/b/x/run"), Path("/c/other")]
    assert distinct_names(paths) == ["a/x/run", "b/x/run", "other"]
    assert distinct_names([Path("/a/run"), Path("/a/run")]) == ["/a/run", "/a/run"]


def test__control_c_ends_it_cleanly(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def interrupted(server: WatchServer) -> None:
        assert ask(server, "/")[0] == 200
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "wait", interrupted)
    watch(runs[:1], port=0, announce=said.append)
    match = re.search(r"Watching 1 run at http://127.0.0.1:(\d+)/", said[0])
    assert match
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(match[1])), timeout=5)


def test__waiting_ends_when_the_server_is_stopped(runs: list[Path]) -> None:
    server = WatchServer(runs, port=0)
    server.start()
    waiting = threading.Thread(target=server.wait)
    waiting.start()
    assert waiting.is_alive()
    server.stop()
    waiting.join(5)
    assert not waiting.is_alive()


def test__everyone_is_warned_of_an_open_address(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(WatchServer, "wait", lambda _: None)
    watch(runs, host="0.0.0.0", port=0, announce=said.append)  # noqa: S104 - what is tested
    assert "over the network" in said[1]


# ---- in a browser


def test__new_points_appear_without_losing_the_zoom(page: Page, single: WatchServer, runs: list[Path]) -> None:  # noqa: F811
    page.goto(single.address)
    expect(page.locator('[data-part="state"]')).to_contain_text("step 40 of 100")
    page.locator(".zoombar input").first.fill("20")
    page.locator(".zoombar input").first.press("Enter")
    page.locator(".zoombar input").first.blur()
    append(runs[0], record(45, brand_new=2.0), record(50, brand_new=3.0, position_share=0.9))
    expect(page.locator('[data-part="state"]')).to_contain_text("step 50 of 100")
    chart = page.locator('[data-chart="student_loss"]')
    expect(chart.locator(".legend")).to_contain_text("step 50")
    expect(page.locator('[data-chart="brand_new"] .inside path.line')).to_have_count(1)
    assert [field.input_value() for field in page.locator(".zoombar input").all()] == ["20", "40"]
    page.get_by_role("button", name="Show all").click()
    assert page.locator(".zoombar input").last.input_value() == "50"


def test__pictures_and_alarms_appear_while_a_run_continues(page: Page, single: WatchServer, runs: list[Path]) -> None:  # noqa: F811
    page.goto(single.address)
    expect(page.locator(".emergence figure")).to_have_count(0)
    add_pictures(runs[0])
    append(runs[0], *(record(step, position_share=0.9) for step in range(45, 75, 5)))
    expect(page.locator(".emergence figure")).to_have_count(2)
    expect(page.locator(".timeline")).to_be_visible()
    expect(page.locator(".alarms li")).to_contain_text("Position in the features")


def test__two_runs_are_drawn_over_each_other(page: Page, server: WatchServer) -> None:  # noqa: F811
    page.goto(server.address)
    chart = page.locator('[data-chart="student_loss"]')
    expect(chart.locator(".inside path.line")).to_have_count(2)
    assert chart.locator(".legend").inner_text().split()[-4:-1:2] == ["first", "second"]
    page.get_by_role("link", name="second").click()
    expect(page.locator("h1")).to_have_text("second")
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("h1")).to_have_text("2 runs")


def test__a_server_that_is_gone_is_reported(page: Page, runs: list[Path]) -> None:  # noqa: F811
    with WatchServer(runs, port=0, seconds=0.1) as server:
        page.goto(server.address)
        expect(page.locator(".inside").first).to_be_visible()
    expect(page.locator("#banner")).to_contain_text("does not answer")
    expect(page.locator(".inside").first).to_be_visible()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test__loopback_is_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", "localhost.example.org", ""])  # noqa: S104
def test__any_other_host_may_be_reached_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)
