"""A server of one file on this machine, which counts what it is asked and can be asked to misbehave."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Server:
    """What is served, and what was asked for."""

    contents: bytes
    tag: str | None = '"one"'
    # How many bytes an answer brings before the connection ends, for each answer in turn; then all of them.
    cuts: list[int] = field(default_factory=list)
    # Codes to answer with in place of the file, in turn.
    codes: list[int] = field(default_factory=list)
    redirection: str | None = None
    kind: str = "application/octet-stream"
    ranges: bool = True
    pause: float = 0
    requests: list[dict[str, str]] = field(default_factory=list)
    address: str = ""


@contextmanager
def serving(contents: bytes, **settings: Any) -> Iterator[Server]:
    """The server, while the block runs; `address` is that of its file."""
    server = Server(contents, **settings)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": server}))
    server.address = f"http://127.0.0.1:{http.server_port}/model.pth"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Server

    def do_GET(self) -> None:
        self.state.requests.append(dict(self.headers))
        if self.state.pause:
            threading.Event().wait(self.state.pause)
        if self.state.redirection:
            self._answer(302, b"", Location=self.state.redirection)
        elif self.state.codes:
            self._answer(self.state.codes.pop(0), b"")
        else:
            self._send_file()

    def _send_file(self) -> None:
        asked, total = self.headers.get("Range"), len(self.state.contents)
        valid = self.headers.get("If-Range") == self.state.tag
        start = int(asked[6:-1]) if asked and valid and self.state.ranges else 0
        if start and start >= total:
            self._answer(416, b"", **{"Content-Range": f"bytes */{total}"})
            return
        headers = {"Content-Type": self.state.kind}
        if self.state.tag:
            headers["ETag"] = self.state.tag
        if start:
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        self._answer(206 if start else 200, self.state.contents[start:], **headers)

    def _answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        cuts = self.state.cuts
        self.wfile.write(body[: cuts.pop(0)] if cuts and body else body)

    def log_message(self, *_: Any) -> None:
        pass
