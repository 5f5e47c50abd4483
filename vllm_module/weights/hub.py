from __future__ import annotations

import errno
import os
from pathlib import Path

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, printable_name
from vllm_module.weights.regular_file import is_there

# Configuration and tokenizer, and weights in the first format that there is. Not Mistral's
# consolidated file, which has the same weights again, and not subfolders, which have other formats
# of the weights. The exception is 1_Pooling, where sentence-transformers keeps a small file: so a
# subfolder's name may end in "g".
SMALL_FILES = ["*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_UNWANTED = [
    "*[!g]/*", *(f"*/{weights}" for weights in _WEIGHTS),
    "consolidated*", "training_args*", "optimizer*", "scheduler*", "scaler*", "rng_state*",
]  # fmt: skip


def resolve(
    model: str,
    revision: str | None,
    *,
    download_dir: str | None = None,
    token: str | bool | None = None,
    weights: bool = True,
) -> Path:
    """Return the local folder of ``model``: a path, or a Hugging Face hub id to download.

    A path that exists is returned unchanged, and ``revision`` (a branch, tag or commit of the hub)
    is ignored. ``download_dir`` replaces the hub's cache, and ``token`` the one that is stored.
    Without ``weights``, only the small files are downloaded. Raises ``CheckpointFormatError``, with
    advice, if ``model`` neither exists nor can be downloaded.
    """
    path = Path(os.path.expanduser(model))
    if is_there(path, follow_links=True):
        return path
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointFormatError(f"the folder {printable(path)} does not exist; check the path")

    # Imported here because the import is slow, and local folders do not need it.
    from huggingface_hub import errors, snapshot_download

    def refusal(reason: str) -> CheckpointFormatError:
        at = f" at revision {revision!r}" if revision else ""
        return CheckpointFormatError(f"{model!r}{at}: {reason}")

    try:
        for pattern in _WEIGHTS if weights else ("",):
            folder = snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                token=token,
                allow_patterns=[*filter(None, (pattern,)), *SMALL_FILES],
                ignore_patterns=_UNWANTED,
            )
            if any(Path(folder).glob(pattern or "*")):
                break
    except errors.HFValidationError as error:
        raise refusal("neither a folder that exists nor an id of the hub (owner/name)") from error
    except errors.GatedRepoError as error:
        raise refusal(
            "its owner asks for consent; accept the terms on its page, then `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise refusal("the hub has the model, but not this revision") from error
    except errors.RepositoryNotFoundError as error:
        raise refusal(
            "no such folder here and no such model on the hub; check the spelling, or "
            "`hf auth login` if it is private",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise refusal(
            "no such folder here, and the hub cannot be reached; check the network, or download "
            "the model where there is one and pass its folder",
        ) from error
    except Exception as error:  # the hub's HTTP and Xet clients have no narrower common class
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free space, or name another disk in HF_HOME" if full else "try again"
        raise refusal(f"the download failed ({printable_name(str(error))}); {advice}") from error
    return Path(folder)
