"""One file from one address: resumed where it was interrupted, and never taken for whole when it is not.

What has come lies beside the target under a hidden name, with the tag that the server gave this version of the file.
Another attempt, now or later, asks for the rest of the same version; a server that has another one by then sends it
from the start. Only https is spoken, and http with this machine itself; a redirection elsewhere is refused.
"""

import http.client
import os
import shutil
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capi.errors import CapiError
from capi.runtime.atomic import atomic_write, open_nofollow, refuse_link
from capi.runtime.retry import retry

# Called with the bytes that are here and the bytes that there are, where that is known.
Report = Callable[[int, int | None], None]

_CHUNK = 2**20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Answers that may be another one in a moment: too early, too many, or the server's own trouble.
_TRANSIENT_CODES = (408, 425, 429, 500, 502, 503, 504)


class TransientError(Exception):
    """Something that may go better the next time."""


class UnreachableError(CapiError):
    """The server could not be reached, or not for long enough."""


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for; an attempt that brought something does not count."""

    attempts: int = 5
    first_wait: float = 1.0
    """Seconds before the second attempt; each later one waits twice as long."""
    timeout: float = 30.0


_USUAL_PATIENCE = Patience()


def download(
    address: str,
    target: Path,
    *,
    patience: Patience = _USUAL_PATIENCE,
    report: Report = lambda *_: None,
    check: Callable[[Path], None] = lambda _: None,
) -> None:
    """Bring a file to `target`, which appears at once and complete.

    `check` looks at the whole file before it gets its name; when it raises, what
    came is thrown away.
    """
    check_address(address)
    partial = partial_of(target)
    # Its name is stable, so that a download can resume.
    refuse_link(partial)
    try:
        retry(
            lambda: _attempt(address, partial, patience.timeout, report),
            pauses=[patience.first_wait * 2**number for number in range(patience.attempts - 1)],
            errors=TransientError,
            progress=lambda: _size(partial),
        )
    except TransientError as error:
        raise UnreachableError(f"{address} could not be downloaded ({error})") from error
    try:
        check(partial)
        os.replace(partial, target)
    except CapiError:
        partial.unlink()
        raise
    finally:
        _tag_file(partial).unlink(missing_ok=True)


def partial_of(target: Path) -> Path:
    """Where a file lies until it is whole."""
    return target.with_name(f".{target.name}.partial")


def check_address(address: str, before: str | None = None) -> None:
    """Refuse an address that could be listened to or changed on its way."""
    parts = urllib.parse.urlsplit(address)
    local = parts.scheme == "http" and parts.hostname in _LOOPBACK
    # Nobody out there sends this machine to itself.
    if parts.scheme == "https" or (local and (before is None or urllib.parse.urlsplit(before).hostname in _LOOPBACK)):
        return
    where = f"{before} leads to {address}, which" if before else address
    raise CapiError(f"{where} is not downloaded: only https addresses are")


class _Redirections(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            check_address(newurl, before=req.full_url)
        except CapiError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _attempt(address: str, partial: Path, timeout: float, report: Report) -> None:
    """Ask for what is missing, and write it as it comes."""
    have, tag = _size(partial), _tag(partial)
    headers = {"User-Agent": "capi", "Accept-Encoding": "identity"}
    if have and tag:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    try:
        with _open(address, headers, timeout) as response:
            start, total = _extent(response, have)
            _check_answer(address, response, partial, start, total)
            _write(response, partial, start, total, report)
    except urllib.error.HTTPError as error:
        error.close()
        if not _is_complete(error, have):
            _fail(address, error, partial)
    except urllib.error.URLError as error:
        _explain(address, error.reason)
    except (http.client.HTTPException, OSError) as error:
        raise TransientError(_said(error)) from error


def _open(address: str, headers: dict[str, str], timeout: float) -> Any:
    request = urllib.request.Request(address, headers=headers)  # noqa: S310 - the address was checked
    handlers: list[Any] = [_Redirections]
    if urllib.parse.urlsplit(address).hostname in _LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout)


def _extent(response: Any, have: int) -> tuple[int, int | None]:
    """Where in the file an answer begins, and how long the whole file is."""
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        unit, _, extent = response.headers.get("Content-Range", "").partition(" ")
        span, _, total = extent.partition("/")
        if unit != "bytes" or span.partition("-")[0] != str(have) or not total.isdecimal():
            raise TransientError("the server sent another part than the one asked for")
        return have, int(total)
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _check_answer(address: str, response: Any, partial: Path, start: int, total: int | None) -> None:
    """What is told before anything is written: a page in place of a file, and a disk that is too small."""
    if response.headers.get_content_type() == "text/html":
        raise CapiError(f"{address} answers with a web page, not with a file: is this network asking for a login?")
    free = shutil.disk_usage(partial.parent).free + (_size(partial) if not start else 0)
    if total is not None and total - start > free:
        raise CapiError(
            f"{partial.parent} has {free / 2**30:.1f} GiB free, and {(total - start) / 2**30:.1f} GiB of {address} are "
            "to come: make room, or set TORCH_HOME to another disk"
        )


def _write(response: Any, partial: Path, start: int, total: int | None, report: Report) -> None:
    done = start
    with _told(partial), open_nofollow(partial, "ab" if start else "wb") as file:
        # After the file was emptied: a tag must not outlive the bytes that it is about.
        atomic_write(_tag_file(partial), _tag_of(response))
        report(done, total)
        while chunk := _chunk(response):
            file.write(chunk)
            done += len(chunk)
            report(done, total)
        file.flush()
        os.fsync(file.fileno())
    if total is not None and done != total:
        raise TransientError(f"the connection ended after {done} of {total} bytes")


def _chunk(response: Any) -> bytes:
    """What comes next; trouble of the network must not be taken for trouble of the disk."""
    try:
        chunk: bytes = response.read(_CHUNK)
    except (http.client.HTTPException, OSError) as error:
        raise TransientError(_said(error)) from error
    return chunk


class _told:  # noqa: N801 - reads as a word in a with statement
    """Turns what a disk says into a sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, OSError):
            raise CapiError(f"{self.path} cannot be written ({error.strerror or error})") from error


def _tag_of(response: Any) -> str:
    """What names this version of a file: a strong ETag, or else the date of its last change."""
    tag: str = response.headers.get("ETag") or ""
    return tag if tag.startswith('"') else response.headers.get("Last-Modified") or ""


def _tag_file(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.tag")


def _tag(partial: Path) -> str:
    try:
        return _tag_file(partial).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_complete(error: urllib.error.HTTPError, have: int) -> bool:
    """Whether there was nothing left to ask for."""
    return error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and (
        error.headers.get("Content-Range") == f"bytes */{have}"
    )


def _fail(address: str, error: urllib.error.HTTPError, partial: Path) -> None:
    if 300 <= error.code < 400:
        raise CapiError(f"{address} leads to something that is not downloaded: only https addresses are") from error
    answer = f"HTTP {error.code} {error.reason}"
    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        partial.unlink(missing_ok=True)
        raise TransientError(answer) from error
    if error.code in _TRANSIENT_CODES:
        raise TransientError(answer) from error
    raise UnreachableError(f"{address} could not be downloaded ({answer})") from error


def _explain(address: str, reason: Any) -> None:
    """Why no answer came. A name that nobody knows, or a certificate that is none, is so at the next attempt too."""
    if isinstance(reason, socket.gaierror | ssl.SSLCertVerificationError):
        raise UnreachableError(f"{address} could not be downloaded ({_said(reason)})")
    raise TransientError(_said(reason))


def _said(reason: Any) -> str:
    return " ".join(str(getattr(reason, "strerror", None) or reason).split()) or type(reason).__name__
