"""The URL of a checkpoint's folder, and the names of its files in messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PosixPath
from urllib.parse import urlsplit

from vllm_module.base.messages import printable_name
from vllm_module.errors import CheckpointFormatError

BUCKETS = ("az", "gs", "s3")
REPLICA = "replica"  # of an engine's weights, by HTTP
TOKEN = "VLLM_MODULE_REPLICA_TOKEN"
WEB = ("http", "https", REPLICA)
SCHEMES = (*BUCKETS, *WEB, "hf")

_ADVICE = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the account of the machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "HF_TOKEN, or `hf auth login`",
    REPLICA: f"{TOKEN}, the token of LLM.serve_weights",
}


class StorePath(PosixPath):
    """The URL of a file where a path names it: its components, and its text in messages.

    There is no such file on this machine.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's files are.

    Attributes:
        scheme: in lower case.
        host: of a web server, with the port; the bucket or container of a store; of the hub, the
            owner.
        folder: below it, without slashes around it.
        revision: of the hub.

    """

    scheme: str
    host: str
    folder: str
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return "/".join(filter(None, (f"{self.scheme}://{self.host}", self.folder))) + at

    @property
    def path(self) -> StorePath:
        """The path that stands for the folder."""
        return StorePath(str(self))

    def file(self, name: str) -> StorePath:
        """Return the path that stands for the file ``name`` of the folder."""
        return StorePath(f"{self}/{name}")

    @property
    def credentials(self) -> str:
        """What to set where a server asks who is there."""
        host = urlsplit(f"//{self.host}").hostname  # entries have no ports
        return _ADVICE.get(self.scheme, f"an entry for {host} in ~/.netrc")


def parse_file(url: str, suffixes: tuple[str, ...]) -> tuple[str, str | None]:
    """Take the file off a URL that names one with such a suffix: ``hf://owner/name/x.gguf``."""
    folder, _, name = url.rpartition("/")
    components = len(list(filter(None, folder.partition("://")[2].split("/"))))
    least = 2 if folder.lower().startswith("hf://") else 1
    return (folder, name) if name.endswith(suffixes) and components >= least else (url, None)


def parse(url: str, revision: str | None = None) -> Place:
    """Take a URL of a known scheme apart.

    Secrets in it, such as ``user:password@`` and ``?token=``, are refused, because URLs are shown.
    The refusal is a CheckpointFormatError, and shows neither.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    # Not by urlsplit, which drops tabs and line ends.
    location = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, _, folder = location.partition("/")
    _, at, host = host.rpartition("@")
    shown = f"{scheme}://{host}/{folder}".rstrip("/")

    def refuse(problem: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"{printable_name(shown)}: {problem}")

    place = Place(scheme, host, folder.strip("/"))
    if at or location != rest:
        what = "a user name or password" if at else "a query (?) or fragment (#)"
        raise refuse(
            f"the URL has {what}, and messages show URLs: take it out, and give credentials by "
            f"{place.credentials}"
        )
    if not host or not rest.isprintable() or "\\" in rest:
        raise refuse(f"expected {scheme}://{_shape(scheme)}, in printable characters")
    if place.folder and {"", ".", ".."} & set(place.folder.split("/")):
        raise refuse("a component of the path is empty, '.' or '..': write the folder in full")
    if scheme == "hf":
        name, at, own = place.folder.partition("@")
        if not name or "/" in name or (at and not own):
            raise refuse("expected hf://owner/name or hf://owner/name@revision")
        if own and revision not in (None, own):
            raise refuse(f"the URL asks for revision {own!r}, and the argument for {revision!r}")
        return Place(scheme, host, name, own or revision)
    if revision is not None:
        raise refuse(f"revision {revision!r} was asked for, and only the hub has revisions")
    if scheme in WEB:
        try:
            parts = urlsplit(f"{scheme}://{host}")
            valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            valid = False
        if not valid:
            raise refuse("its host or port is not valid; check the spelling")
    return place


def _shape(scheme: str) -> str:
    if scheme == "hf":
        return "owner/name"
    if scheme == REPLICA:
        return "host:port"
    return "host/folder" if scheme in WEB else "bucket/folder"
