"""A small server that shows runs in a browser while they train.

It serves pages that it makes itself, and no file. Bound to loopback it answers only requests that name this machine,
so that a web page from elsewhere cannot reach it under a name of its own.
"""

import contextlib
import errno
import ipaddress
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from capi.errors import CapiError
from capi.report.costs import DEFAULT_COSTS, CostAssumptions
from capi.report.pages.data import RunReport
from capi.report.pages.page import Live, policy
from capi.report.pages.run import CHARTS, Pieces, comparison_pieces, page, run_pieces
from capi.report.run_report import FollowedRun
from capi.types import Names, listed

DEFAULT_PORT = 7431
_REFRESH_SECONDS = 2.0
_UNREADABLE = 'The run cannot be read at the moment. "capi report RUN" on the machine that holds it says why.\n'
_ROUTE = re.compile(r"(?:/run/(\d{1,6}))?/?(?:(?<=/)(parts|part/([a-z]+)))?")


class _Watched:
    """A run and its pieces, made again only where something changed. Requests come from several threads."""

    def __init__(self, run: Path, name: str, costs: CostAssumptions) -> None:
        self.followed = FollowedRun(run, costs, name=name)
        self._lock = threading.Lock()
        self._stamp: tuple[Any, ...] | None = None
        self._report: RunReport | None = None
        self._pieces: Pieces | None = None

    def report(self) -> RunReport:
        with self._lock:
            # Before reading, so that what comes in between is seen next time.
            stamp = self.followed.stamp()
            if self._report is None or stamp != self._stamp:
                self._report, self._pieces, self._stamp = self.followed.read(), None, stamp
            return self._report

    def pieces(self) -> Pieces:
        report = self.report()
        with self._lock:
            if self._pieces is None or self._report is not report:
                self._pieces = run_pieces(report)
            return self._pieces


class WatchServer:
    """Serves runs from a thread of its own between `start` and `stop`."""

    def __init__(
        self,
        runs: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        seconds: float = _REFRESH_SECONDS,
        costs: CostAssumptions = DEFAULT_COSTS,
    ) -> None:
        if not runs:
            raise CapiError("there is no run to watch: give at least one folder of a run")
        names = distinct_names(runs)
        self.seconds = seconds
        self.watched = [_Watched(run, name, costs) for run, name in zip(runs, names, strict=True)]
        self._compared: tuple[list[RunReport], Pieces] | None = None
        self._http = _bind(host, port, self)
        self.only_this_machine = is_loopback(str(self._http.server_address[0]))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)

    @property
    def address(self) -> str:
        """Where the first page is."""
        host, port = self._http.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}/"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def wait(self) -> None:
        """Until `stop` is called, or a signal comes."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def __enter__(self) -> "WatchServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def answer(self, path: str) -> tuple[str, str] | None:
        """The type and text for a path; None where there is nothing. Every path is made here, none is a file's."""
        match = _ROUTE.fullmatch(path)
        number = int(match[1]) if match and match[1] else None
        if match is None or (number is not None and number >= len(self.watched)):
            return None
        pieces = self._pieces(number)
        if match[2] is None:
            home = "/" if len(self.watched) > 1 and number is not None else None
            live = Live("" if number is None else f"/run/{number}", self.seconds, home=home)
            return "text/html", page(pieces, live)
        if match[2] == "parts":
            return "application/json", json.dumps(pieces.digests)
        return _part(pieces, match[3])

    def _pieces(self, number: int | None) -> Pieces:
        if number is None and len(self.watched) > 1:
            return self._comparison([run.report() for run in self.watched])
        return self.watched[number or 0].pieces()

    def _comparison(self, reports: list[RunReport]) -> Pieces:
        """Made again when any of the reports is a new one."""
        compared = self._compared
        if compared is None or any(report is not other for report, other in zip(compared[0], reports, strict=True)):
            links = [f"/run/{index}" for index in range(len(reports))]
            self._compared = compared = (reports, comparison_pieces(reports, links))
        return compared[1]


def watch(
    folders: Names,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    watts: float | None = None,
    carbon: float | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the reports of runs while they train, several compared, until Ctrl-C. `watts`, `carbon`: see `report`.

    Without a port it is the usual one, or a free one where that is taken.
    """
    runs = [Path(folder) for folder in listed(folders)]
    server = WatchServer(runs, host=host, port=port, costs=CostAssumptions(watts, carbon))
    with contextlib.suppress(KeyboardInterrupt), server:
        announce(f"Watching {len(runs)} run{'s' * (len(runs) != 1)} at {server.address} (Ctrl-C ends it)")
        if not server.only_this_machine:
            announce("Everyone who can reach this machine over the network can see this page.")
        server.wait()


def distinct_names(runs: Sequence[Path]) -> list[str]:
    """The names of folders, with as many of their parents as it takes to tell them apart."""
    parts = [run.resolve().parts for run in runs]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        names = [
            name if names.count(name) == 1 else "/".join(part[-depth:]).replace("//", "/")
            for name, part in zip(names, parts, strict=True)
        ]
    return names


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD with what the server makes, and nothing else."""

    # HTTP/1.0, the default: with connections that stay open, a server that was stopped would keep answering.
    server_version, sys_version = "capi", ""
    # Seconds after which a connection that says nothing is closed.
    timeout = 30
    watch: WatchServer

    def do_GET(self) -> None:
        if self.watch.only_this_machine and not _names_this_machine(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "This server answers only under the name of this machine.\n")
            return
        try:
            answer = self.watch.answer(self.path.partition("?")[0])
        except CapiError:
            # The error's text may hold paths, and whoever looks is perhaps on another machine.
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", _UNREADABLE)
            return
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.\n")
        else:
            self._send(HTTPStatus.OK, *answer)

    do_HEAD = do_GET  # noqa: N815 - the names of the standard library

    def do_POST(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "This server only shows.\n", {"Allow": "GET, HEAD"})

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a page that refreshes would fill the terminal."""

    def _send(self, status: HTTPStatus, kind: str, content: str, more: dict[str, str] | None = None) -> None:
        body = content.encode("utf-8", "replace")
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy(live=True) + "; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **(more or {}),
        }
        # A reader who goes away in the middle is no fault.
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    # Another server on the same port must be noticed.
    allow_reuse_port = False

    def server_bind(self) -> None:
        # That of HTTPServer would ask the network for this machine's name.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are no news; anything else is a bug and raises as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _part(pieces: Pieces, name: str) -> tuple[str, str] | None:
    if name == CHARTS:
        content: dict[str, Any] = {"charts": pieces.charts}
    elif name in pieces.sections:
        content = {"html": pieces.sections[name]}
    else:
        return None
    return "application/json", json.dumps({"digest": pieces.digests[name], **content}, allow_nan=False)


def _bind(host: str, port: int | None, watch: WatchServer) -> _Http:
    handler = type("Handler", (_Handler,), {"watch": watch})
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("Http", (_Http,), {"address_family": family})
    for attempt in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            bound: _Http = kind((host, attempt), handler)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if port is None and attempt and taken:
                continue
            reason = getattr(error, "strerror", None) or str(error)
            raise CapiError(
                f"cannot listen at {host}, port {attempt} ({reason}): choose another port or host"
            ) from error
        return bound
    raise AssertionError


def _names_this_machine(host: str) -> bool:
    """Whether a Host header stands for loopback. The port may be another one, where it is forwarded."""
    match = re.fullmatch(r"(\[[0-9a-f:]+\]|[^\[\]:]+)(?::\d+)?", host.strip().lower())
    return match is not None and is_loopback(match[1].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
