"""Settings of an encoder's pooling and scores, read from the files of a checkpoint.

sentence-transformers writes files beside a model: ``modules.json`` lists the modules that an
embedding passes through, ``1_Pooling/config.json`` has the pooling of hidden states, and
``sentence_bert_config.json`` the length of the longest text; older versions named it after the kind
of the model. config.json has the function from a classifier's logits to scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.runtime.pooling.embedding import Pooling
from vllm_module.weights import read_file, read_json
from vllm_module.weights.hub import SENTENCES
from vllm_module.weights.regular_file import is_there
from vllm_module.weights.strict_json import parse_object

Activation = Callable[[torch.Tensor], torch.Tensor]

# Activations by the last component of their class in torch, which cross-encoders of
# sentence-transformers name.
_NAMED: Mapping[str, Activation] = {"Identity": lambda x: x, "Sigmoid": torch.sigmoid}
_POOLINGS: Mapping[str, Pooling] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last",
}  # fmt: skip
_TOKENIZER = "tokenizer_config.json"


class SentenceConfig(NamedTuple):
    """Pooling settings of a checkpoint.

    Attributes:
        pooling: kind of pooling, or ``None`` if it is not implemented.
        problem: the requested pooling, if it is not implemented.
        max_length: largest number of tokens of a text, with special ones; ``None`` for the model's.
        lower_case: True if a text is converted to lower case before it is tokenized.

    """

    pooling: Pooling | None = "mean"
    problem: str = ""
    max_length: int | None = None
    lower_case: bool = False

    @classmethod
    def read(cls, folder: Path) -> SentenceConfig:
        """Read the files of ``folder``; without them, pooling is the mean.

        Where they have no length, it is ``model_max_length`` of tokenizer_config.json, as in
        sentence-transformers.

        Raises ``CheckpointFormatError`` for a file that is damaged.
        """
        pooling, problem = _pooling(folder)
        entries: Mapping[str, Any] = {}
        path = folder / next((name for name in SENTENCES if is_there(folder / name)), SENTENCES[0])
        if is_there(path):
            entries = read_json(path, folder)
        most = entries.get("max_seq_length")
        if most is not None and (type(most) is not int or most < 1):
            raise CheckpointFormatError(
                f"{printable(path)}: max_seq_length should be a number of tokens or null, and is "
                f"{shorten(most)}"
            )
        if most is None and is_there(folder / _TOKENIZER):
            # Without a length of its own, transformers writes 1e30.
            length = read_json(folder / _TOKENIZER, folder).get("model_max_length")
            most = length if type(length) is int and length > 0 else None
        return cls(pooling, problem, most, entries.get("do_lower_case") is True)


def _pooling(folder: Path) -> tuple[Pooling | None, str]:
    """Return the checkpoint's pooling, or ``None`` and the request that is not implemented."""
    path = folder / "modules.json"
    folders = ["1_Pooling"] if is_there(folder / "1_Pooling" / "config.json") else []
    if is_there(path):
        # The file is a list, and the parser takes only objects.
        data = b'{"modules": %b}' % read_file(path, folder)
        modules: Any = parse_object(data, printable(path), "Download it again.")["modules"]
        folders = []
        for module in modules if isinstance(modules, list) else [modules]:
            name, where = (
                module.get(key) if isinstance(module, Mapping) else None for key in ("type", "path")
            )
            if not isinstance(name, str) or not isinstance(where, str):
                raise CheckpointFormatError(
                    f"{printable(path)} should list modules with a type and a path, and has "
                    f"{shorten(module)}"
                )
            kind = name.rpartition(".")[2]
            if kind == "Pooling":
                folders.append(where)
            elif kind not in ("Transformer", "Normalize"):
                return None, f"{printable(path)} asks for a module {shorten(name)}"
    if not folders:
        return "mean", ""
    path = folder / folders[0] / "config.json"
    entries = read_json(path, folder)
    mode = entries.get("pooling_mode")
    flags = (name for name, value in entries.items() if value is True)
    named = [name.removeprefix("pooling_mode_") for name in flags if "pooling_mode_" in name]
    modes = [mode] if isinstance(mode, str) else named
    if len(folders) > 1 or len(modes) != 1 or modes[0] not in _POOLINGS:
        return None, f"{printable(path)} asks for pooling by {' and '.join(modes) or 'nothing'}"
    return _POOLINGS[modes[0]], ""


def classifier_activation(config: Any) -> Activation:
    """Return the function from logits ``[texts, labels]`` to scores.

    A cross-encoder of sentence-transformers names it. Otherwise ``problem_type`` decides, and
    without that the number of classes: several classes exclude each other. Raises
    ``UnsupportedModelError`` for a function that is not implemented.
    """
    settings = getattr(config, "sentence_transformers", None)
    name = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name is not None:
        known = _NAMED.get(str(name).rpartition(".")[2])
        if known is None:
            raise UnsupportedModelError(
                f"config.json asks for the activation {shorten(name)} of classes: only "
                f"{' and '.join(_NAMED)} of torch.nn are implemented"
            )
        return known
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return _NAMED["Identity"]
    if problem == "multi_label_classification" or config.num_labels == 1:
        return torch.sigmoid
    return lambda x: torch.softmax(x, dim=-1)
