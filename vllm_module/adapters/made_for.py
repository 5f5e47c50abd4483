"""Whether an adapter was made for another model than the one that it is loaded for.

PEFT's files have the name of the base, and nothing of its weights. Siblings of one shape, such as a
base model and its chat model, take each other's adapters without an error.
"""

from __future__ import annotations

import re
from pathlib import Path

from vllm_module.adapters.config import AdapterConfig
from vllm_module.base.messages import printable, shorten
from vllm_module.errors import UnsupportedModelError
from vllm_module.weights.digests import digest_of_all, stored_digests

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
# Ends of names that say how weights are stored, of which an adapter knows nothing.
_STORED = re.compile(
    r"(?:[-_.](?:unsloth|bnb|[2-8]-?bits?|fp\d+|mxfp[48]|nvfp4|nf4|bf16|u?int[48]|awq|gptq|gguf|mlx|"
    r"w\d+a\d+\w*|\d+g|dynamic|block|quantized|sharded|autoround|hf))+$",
    re.IGNORECASE,
)
_OWNER = re.compile(r"^meta-(?=llama)", re.IGNORECASE)  # in the older names of Llama 3 and 3.1


def check_base(config: AdapterConfig, folder: Path, served_config: object) -> None:
    """Raise ``UnsupportedModelError`` if an adapter is of another model than that of ``folder``.

    It is where its settings have a ``base_digest`` (the last line of ``vllm-module digest``) that
    is not the model's, whose tensors' digests are in ``digests.json``. Without one, it is where the
    adapter's base and the model are both of the hub, and their names differ: not only in their
    owners, or in how the weights are stored; nor is it the one that the model's ``served_config``
    says it was made of. Of a folder with any other name, nothing is known.
    """
    if config.base_digest is not None:
        _check_digest(config.base_digest, folder)
        return
    served, wanted = hub_id(folder), config.base_model_name_or_path
    wanted = hub_id(Path(wanted)) or wanted if wanted else None
    if served is None or wanted is None or not _HUB_ID.fullmatch(wanted) or Path(wanted).exists():
        return
    trained = getattr(served_config, "_name_or_path", None)
    if _model(wanted) not in (_model(served), _model(str(trained or ""))):
        raise UnsupportedModelError(
            f"the adapter was made for {printable(wanted)}, and the model is {printable(served)}: "
            "load the adapter of this model; if that is the same one under another name, take "
            "base_model_name_or_path out of adapter_config.json"
        )


def hub_id(folder: Path) -> str | None:
    """Return the id of the model whose snapshot of the hub a folder is, or ``None``."""
    cached = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not cached.startswith("models--"):
        return None
    return cached.removeprefix("models--").replace("--", "/", 1)


def _model(name: str) -> str:
    """Return what two ids of one model share: no owner, and nothing of how weights are stored."""
    return _OWNER.sub("", _STORED.sub("", name.rpartition("/")[2])).lower()


def _check_digest(wanted: str, folder: Path) -> None:
    stored = stored_digests(folder)
    if stored is None or len(stored) > 1:
        raise UnsupportedModelError(
            f"the adapter has a base_digest, and {printable(folder)} has no digests.json of a "
            "whole checkpoint to compare it with: write one by vllm-module digest CKPT --out, or "
            "take base_digest out of adapter_config.json"
        )
    found = digest_of_all(stored[0].items())
    if found != wanted:
        raise UnsupportedModelError(
            f"the adapter was made for a model with the digest {shorten(wanted)}, and the one in "
            f"{printable(folder)} has {found}: load the adapter of this model"
        )
