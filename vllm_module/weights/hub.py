from __future__ import annotations

import errno
import os
from pathlib import Path

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, printable_name

# Weights, configuration and tokenizer. Not subfolders (other formats of the same weights) nor
# Mistral's consolidated file, which holds them all once more.
_WANTED = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]


def resolve(model: str, revision: str | None) -> Path:
    """Give the local folder of ``model``: a path, or an id of the Hugging Face hub to download.

    What exists locally is returned as it is, and ``revision`` (a branch, tag or commit of the
    hub) does not concern it. What neither exists nor can be downloaded is a
    CheckpointFormatError that says what to do.
    """
    path = Path(os.path.expanduser(model))
    if os.path.exists(path):
        return path
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointFormatError(f"the folder {printable(path)} does not exist; check the path")

    # Imported here because it takes long, and local folders do not need it.
    from huggingface_hub import errors, snapshot_download

    def refuse(what: str) -> CheckpointFormatError:
        at = f" at revision {revision!r}" if revision else ""
        return CheckpointFormatError(f"{model!r}{at}: {what}")

    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except errors.HFValidationError as error:
        raise refuse("neither a folder that exists nor an id of the hub (owner/name)") from error
    except errors.GatedRepoError as error:
        raise refuse(
            "its owner asks for consent; accept the terms on its page, then `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise refuse("the hub has the model, but not this revision") from error
    except errors.RepositoryNotFoundError as error:
        raise refuse(
            "no such folder here and no such model on the hub; check the spelling, or "
            "`hf auth login` if it is private",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise refuse(
            "no such folder here, and the hub cannot be reached; check the network, or download "
            "the model where there is one and pass its folder",
        ) from error
    except Exception as error:  # those of its clients for HTTP and Xet share nothing narrower
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free space, or name another disk in HF_HOME" if full else "try again"
        raise refuse(f"the download failed ({printable_name(str(error))}); {advice}") from error
    return Path(folder)
