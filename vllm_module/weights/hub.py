"""Downloading a model's files from the Hugging Face hub."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vllm_module.base.messages import printable_name, shorten, without_secrets
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.formats import FORMATS, Files, Unit, formats_of

# Files of configuration and tokenizer. Weights are added by format: the first format there is,
# without Mistral's consolidated file (the same weights again) and without subfolders (the weights
# in other formats). The exceptions are 1_Pooling, where sentence-transformers has a small file, and
# additional_chat_templates; so a subfolder's name may end in "g" or "ates".
# The vocabulary of the first Qwen is qwen.tiktoken.
SMALL_FILES = ["*.json", "tokenizer*", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
TEMPLATES = "additional_chat_templates/*.jinja"
POOLING = "1_Pooling/config.json"
# What sentence-transformers has called its file of a text's length and case, by versions and kinds
# of models, in the order in which it looks for them.
SENTENCES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
CODE = "*.py"  # downloaded only if the user trusts the code


_GGUF = ("*.gguf",)
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")  # end of the names of a split model's parts


def patterns_of(load_format: str) -> list[tuple[str, ...]]:
    """Return the file name patterns of weights, in the order in which they are looked for.

    Files of each of the patterns in a tuple belong together.
    """
    formats = [FORMATS[name] for name in formats_of(load_format)]
    made_from = [each.made_from for each in formats if isinstance(each, Unit)]
    files = [each for each in formats if isinstance(each, Files)]
    files += [other for name in made_from if isinstance(other := FORMATS.get(name or ""), Files)]
    names: list[tuple[str, ...]] = [(pattern,) for each in files for pattern in each.patterns]
    if len(formats) == 1 and isinstance(only := formats[0], Unit) and only.weights:
        names.append(only.weights)
    return list(dict.fromkeys(names))


_UNWANTED = [
    "*[!gs]/*", "*[!e]s/*", "*[!t]es/*", "*[!a]tes/*",
    *(f"*/{name}" for each in FORMATS for names in patterns_of(each) for name in names),
    "consolidated*", "training_args*", "optimizer*", "scheduler*", "scaler*", "rng_state*",
]  # fmt: skip


def is_small(name: str) -> bool:
    """Return whether a file of a repository is downloaded even when weights are not."""
    wanted = any(fnmatch(name, each) for each in SMALL_FILES)
    return wanted and not any(fnmatch(name, each) for each in _UNWANTED)


@contextmanager
def _tags_are_names() -> Iterator[None]:
    """Refuse answers whose ETags are paths: huggingface_hub names its cached files after them.

    huggingface_hub 2.4 joins them to the cache's path as they are, so a mirror (``HF_ENDPOINT``)
    could have files written anywhere.
    """
    from huggingface_hub import get_session

    def check(response: Any) -> None:
        for header in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
            tag = response.headers.get(header) or ""
            if set(tag.removeprefix("W/")) & set("/\\\0") or tag.strip('W/"') in (".", ".."):
                raise CheckpointFormatError(f"the server's {header} is a path: {shorten(tag)}")

    hooks = get_session().event_hooks["response"]  # the one client that all calls share
    hooks.append(check)
    try:
        yield
    finally:
        hooks.remove(check)


def download(
    model: str,
    revision: str | None,
    patterns: Sequence[tuple[str, ...]] = (),
    *,
    download_dir: str | None,
    token: str | bool | None,
    code: bool = False,
) -> Path:
    """Download a model of the hub, whether or not a path of that name exists; return its folder.

    Weights are the files that match the first of ``patterns`` that matches any.
    """
    # Imported here because the import is slow, and local folders do not need it.
    from huggingface_hub import HfApi, errors, snapshot_download

    def refusal(reason: str) -> CheckpointFormatError:
        at = f" at revision {revision!r}" if revision else ""
        return CheckpointFormatError(f"{model!r}{at}: {reason}")

    if _GGUF in patterns:
        try:
            names = HfApi(token=token).list_repo_files(model, revision=revision)
        except Exception:  # the file may be cached; if not, its download fails for the same reason
            names = []
        models = dict.fromkeys(
            _PART.sub("", name) for name in names if name.endswith(".gguf") and "/" not in name
        )
        if len(models) > 1:
            listed = ", ".join(map(printable_name, list(models)[:20]))
            raise refusal(
                f"it has several models in GGUF files, and none was downloaded: {listed}. Download "
                f"the one to load (hf download {model} FILE), and pass its path"
            )
    try:
        for pattern in patterns or [()]:
            with _tags_are_names():
                folder = snapshot_download(
                    model,
                    revision=revision,
                    cache_dir=download_dir,
                    token=token,
                    allow_patterns=[*pattern, *SMALL_FILES, *([CODE] if code else ())],
                    ignore_patterns=[each for each in _UNWANTED if each not in pattern],
                )
            if any(any(Path(folder).glob(each)) for each in pattern):
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
        said = printable_name(without_secrets(str(error)))
        # Without the error itself, whose message a traceback would show.
        raise refusal(f"the download failed ({said}); {advice}") from None
    return Path(folder)
