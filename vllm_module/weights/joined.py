"""Weights of several sources in one mapping of names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.handle import Weight
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.source import Source, open_weights


class JoinedWeights:
    """A mapping of several sources' tensors; the names of each source begin with its prefix.

    Args:
        sources: pairs of a prefix and a source; the prefix is the path of the module that the
            source's names are below, ``""`` for the model.

    Raises:
        CheckpointFormatError: two sources have a tensor of the same name.

    """

    def __init__(self, sources: Sequence[tuple[str, Source]]) -> None:
        self._parts: list[tuple[str, Source, OpenWeights]] = []
        with ExitStack() as opened:
            self._opened = opened
            for path, source in sources:
                weights = open_weights(source)
                opened.callback(weights.close)
                self._parts.append((f"{path}." if path else "", source, weights))
            self._opened = opened.pop_all()

    @property
    def load_format(self) -> str | None:
        """The format of the first source."""
        return self._parts[0][2].load_format

    @property
    def fingerprint(self) -> str:
        """A hex SHA-256 of the sources' fingerprints."""
        digests = [weights.fingerprint for _, _, weights in self._parts]
        return hashlib.sha256(repr(digests).encode()).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        owner: dict[str, Source] = {}
        for prefix, source, weights in self._parts:
            for name, weight in weights.items():
                full = prefix + name
                if full in owner:
                    raise CheckpointFormatError(
                        f"the tensor {shorten(full)} is in {printable(owner[full].folder)}, and in "
                        f"{printable(source.folder)} too, whose names the model puts below "
                        f"{shorten(prefix)}: change secondary_weights of the model, or remove the "
                        "tensor from one of the two"
                    )
                owner[full] = source
                yield full, weight

    def close(self) -> None:
        """Close all sources."""
        self._opened.close()
