"""What a client of a store offers, and how its requests fail."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Version(NamedTuple):
    """What tells whether a file has changed.

    Attributes:
        size: in bytes.
        tag: its ETag or time of change; empty if the server sends neither.
        is_proof: whether other bytes have another tag, as those of a strong ETag have (RFC 9110,
            section 8.8.1).

    """

    size: int
    tag: str
    is_proof: bool


def version_of(size: int, etag: str | None, changed: str | None) -> Version:
    """Return a file's version by its ETag or else its time of change; a server may send neither."""
    tag = etag or changed or ""
    # A server that compresses for some calls such a tag weak, and for others not.
    return Version(size, tag.removeprefix("W/"), bool(etag) and not tag.startswith("W/"))


class Answer(NamedTuple):
    """How many bytes a range had, and the version of the file that it is from."""

    nbytes: int
    version: Version


def ends_before(begin: int) -> str:
    """Return why a file that has no byte ``begin`` is refused."""
    if begin == 0:
        return "it is empty: copy it there again"
    return f"it ends before byte {begin}: open the checkpoint again when nobody writes to it"


class Client(Protocol):
    """Requests for the files of one folder. Any thread may call it; none is tried again here."""

    def close(self) -> None:
        """Close connections that are idle, now or later, and end requests under way if it can."""

    def names(self) -> list[str] | None:
        """List the files of the folder, without those below; ``None`` where that cannot be."""

    def fetch(self, name: str, most: int) -> bytes:
        """Return a whole file. One of more than ``most`` bytes is refused."""

    def read(self, name: str, begin: int, view: memoryview) -> Answer:
        """Read the file's bytes from ``begin`` on into ``view``, fewer where it ends before."""


class BusyError(Exception):
    """A request failed that may succeed later; ``after`` is how many seconds the server asks."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class RefusedError(Exception):
    """A request failed, and would fail again; the text says why, and what to do."""


class MissingError(RefusedError):
    """There is no such file."""


class ForbiddenError(RefusedError):
    """The server asks for credentials, or these do not suffice."""
