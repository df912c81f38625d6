"""Keeping count of images that cannot be read: each is named once, and too many stop the run."""

import logging

from capi.errors import CapiError

_LOG = logging.getLogger("capi")


class BrokenImages:
    """The broken images of a run; at most `limit` of all its images may be."""

    def __init__(self, total: int, limit: float, known: dict[str, str] | None = None) -> None:
        self.total, self.limit = total, limit
        self.known = dict(known or {})

    def note(self, broken: dict[str, str]) -> None:
        """Remember what is new, and stop the run when the limit is passed."""
        for name, reason in broken.items():
            if name not in self.known:
                self.known[name] = reason
                _LOG.warning("%s is left out: %s", name, reason)
        if len(self.known) > self.limit * self.total:
            raise CapiError(
                f"{len(self.known)} of {self.total} images cannot be read, more than data.broken_limit = "
                f"{self.limit:g} allows; {self.examples()}: repair them, or raise the limit"
            )

    def examples(self, most: int = 3) -> str:
        some = [f"{name} ({reason})" for name, reason in list(self.known.items())[:most]]
        return f"for example {', '.join(some)}" if some else ""
