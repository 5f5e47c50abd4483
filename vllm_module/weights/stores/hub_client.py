"""The hub: its small files come through huggingface_hub, ranges of weights over HTTP."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.hub import download
from vllm_module.weights.stores.client import RefusedError
from vllm_module.weights.stores.http_client import HttpClient
from vllm_module.weights.stores.place import Place

_OFFLINE = (
    "weights of hf:// are read from the hub, and HF_HUB_OFFLINE is set: unset it, or name the "
    "model without hf://, whose files are taken from the hub's cache"
)


def small_files(place: Place, *, download_dir: str | None, token: str | bool | None) -> Path:
    """Return the folder of the hub's cache with the small files of a commit, after a download."""
    return download(
        f"{place.host}/{place.folder}",
        place.revision,
        download_dir=download_dir,
        token=token,
    )


def hub_client(place: Place, token: str | bool | None) -> HttpClient:
    """Return the client of a repository at one revision, with the token that is given or stored.

    It refuses each request where huggingface_hub would make none.
    """
    # Imported here because the import is slow, and others do not need it.
    from huggingface_hub import constants, get_token, hf_hub_url

    repository = f"{place.host}/{place.folder}"
    known = token if isinstance(token, str) else None if token is False else get_token()
    endpoint = urlsplit(constants.ENDPOINT)

    def url_of(name: str) -> str:
        if constants.HF_HUB_OFFLINE:
            raise RefusedError(_OFFLINE)
        return hf_hub_url(repository, name, revision=place.revision)

    def authorization(url: SplitResult) -> str | None:
        same = (url.scheme, url.netloc) == (endpoint.scheme, endpoint.netloc)
        return f"Bearer {known}" if known and same else None

    return HttpClient(place, url_of, authorization, follows=True)


def names(place: Place, token: str | bool | None) -> list[str]:
    """List the files of a repository."""
    from huggingface_hub import HfApi, errors

    try:
        files = HfApi(token=token).list_repo_files(
            f"{place.host}/{place.folder}", revision=place.revision
        )
    except errors.OfflineModeIsEnabled as error:
        raise CheckpointFormatError(f"{place}: {_OFFLINE}") from error
    except Exception as error:  # the hub's clients have no narrower common class
        raise CheckpointFormatError(
            f"{place}: its files could not be listed ({type(error).__name__}); try again"
        ) from error
    return [name for name in files if "/" not in name]
