"""The files of published models, in the cache that torch.hub has too: `$TORCH_HOME/hub/checkpoints`.

A file that is there is used, whoever put it there. When it is first used its checksum is written beside it, in the
format of `sha256sum`; from then on it must agree. One process downloads while others wait for it.

A download lies under a hidden name until it is complete, with the tag that the server gave this version of the file.
Another attempt, now or later, asks for the rest of the same version. Only https is downloaded, and http from this
machine itself.
"""

import hashlib
import http.client
import logging
import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import torch.hub
from torch.hub import tqdm  # type: ignore[attr-defined]

from capi.errors import CapiError
from capi.runtime.atomic import atomic_write, open_nofollow, refuse_link
from capi.runtime.lock import locked
from capi.runtime.retry import retry
from capi.zoo.published.registry import ReleasedModel

_LOG = logging.getLogger("capi")
# Seconds before each retry. An attempt that brought something begins them again.
_PAUSES = (1.0, 2.0, 4.0, 8.0)
_TIMEOUT = 30.0
_CHUNK = 2**20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Timeout, range not satisfiable (then all is asked for again), too early, too many requests, trouble of the server.
_TRANSIENT_CODES = (408, 416, 425, 429, 500, 502, 503, 504)


def cache_folder() -> Path:
    """Where torch.hub keeps checkpoints."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def cached_file(model: ReleasedModel) -> Path:
    """The file of a published model: from the cache, or else downloaded into it."""
    target = cache_folder() / model.file
    record = target.with_name(f"{target.name}.sha256")
    try:
        if not (target.is_file() and record.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = target.with_name(f".{target.name}.lock")
            with locked(lock, waiting=f"another process is making {target}: waiting for it"):
                if not target.is_file():
                    _LOG.info("downloading %s to %s", model.address, target)
                    download(model.address, target)
                if not record.is_file():
                    atomic_write(record, f"{_checksum(target)}  {target.name}\n")
    except OSError as error:
        # A cache that others keep may be used without being changed.
        if not target.is_file():
            raise CapiError(
                f"{target.parent} cannot be written ({error.strerror}): set TORCH_HOME to a folder that can"
            ) from error
    if record.is_file() and record.read_text(errors="replace").split()[:1] != [_checksum(target)]:
        raise CapiError(
            f"{target} is not the file that was first used under this name: delete it and {record}, then it is "
            "downloaded again"
        )
    return target


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def download(address: str, target: Path) -> None:
    """Bring a file to `target`, which appears at once and complete. An interrupted download is resumed."""
    _check_address(address, local=True)
    partial = target.with_name(f".{target.name}.partial")
    # Its name is stable, so that a download can resume.
    refuse_link(partial)
    try:
        retry(
            lambda: _attempt(address, partial),
            pauses=_PAUSES,
            errors=(OSError, http.client.HTTPException),
            progress=lambda: partial.stat().st_size if partial.is_file() else 0,
        )
    except (OSError, http.client.HTTPException, _LastingError) as error:
        raise CapiError(
            f"{target} is not on this machine, and {address} could not be downloaded ({error}): put the file from "
            "there at that path, and it is used"
        ) from error
    os.replace(partial, target)
    _tag_file(partial).unlink()


def _attempt(address: str, partial: Path) -> None:
    """Ask for what is missing, and write it as it comes."""
    tag = _tag_file(partial).read_text() if _tag_file(partial).is_file() else ""
    have = partial.stat().st_size if tag and partial.is_file() else 0
    headers = {"Range": f"bytes={have}-", "If-Range": tag} if have else {}
    request = urllib.request.Request(address, headers={"User-Agent": "capi", **headers})  # noqa: S310 - it was checked
    try:
        response = urllib.request.build_opener(_Redirections).open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            partial.unlink(missing_ok=True)
        elif error.code not in _TRANSIENT_CODES:
            raise _LastingError(str(error)) from error
        raise
    except urllib.error.URLError as error:
        # A name that nobody knows and an invalid certificate are so at the next attempt too.
        if isinstance(error.reason, socket.gaierror | ssl.SSLCertVerificationError):
            raise _LastingError(str(error.reason)) from error
        raise
    with response:
        if response.headers.get_content_type() == "text/html":
            raise CapiError(f"{address} answers with a web page, not with a file: is this network asking for a login?")
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise OSError("the server sent another part than the one asked for")
        with open_nofollow(partial, "ab" if resumed else "wb") as file:
            # After the file was emptied: a tag must not outlive the bytes that it is about.
            etag = response.headers.get("ETag") or ""
            atomic_write(_tag_file(partial), etag if etag.startswith('"') else "")
            _write(response, file)


def _write(response: Any, file: IO[bytes]) -> None:
    """Append an answer to what is there, with a progress bar in a terminal."""
    start, length = file.tell(), response.headers.get("Content-Length")
    total = start + int(length) if length else None
    quiet = not sys.stderr.isatty()
    with tqdm(total=total, initial=start, disable=quiet, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
    if total not in (None, file.tell()):
        raise ConnectionError(f"the connection ended after {file.tell()} of {total} bytes")
    file.flush()
    os.fsync(file.fileno())


def _tag_file(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.tag")


class _LastingError(Exception):
    """What a retry does not change."""


class _Redirections(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        # Nobody out there sends this machine to itself.
        _check_address(newurl, local=urlsplit(req.full_url).hostname in _LOOPBACK)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_address(address: str, *, local: bool) -> None:
    """Refuse an address whose file could be changed on its way."""
    parts = urlsplit(address)
    if parts.scheme != "https" and not (local and parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise CapiError(f"{address} is not downloaded: only https addresses are")
