"""What bitsandbytes stores of a 4-bit tensor beside its numbers, as JSON in a tensor of bytes."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_module.errors import WeightReadError
from vllm_module.weights.strict_json import parse_object

LONGEST = 512  # bytes; bitsandbytes writes about 170
NESTED_BLOCKSIZE = 256  # scales in a row that share a scale
_ADVICE = "Quantize the checkpoint again."
_Count = Annotated[int, Field(gt=0)]


class QuantState(BaseModel):
    """The entries that change what the weight is; ``nested_*`` are those of quantized scales."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    quant_type: str
    blocksize: _Count
    shape: list[_Count]
    nested_blocksize: _Count | None = None
    nested_dtype: str | None = None
    nested_offset: float | None = None

    @classmethod
    def parse(cls, stored: torch.Tensor, where: str) -> QuantState:
        """Return what ``stored`` says: uint8 ``[LONGEST]`` on the host, zeros after the text.

        ``where`` begins the messages of errors. No JSON object is a CheckpointFormatError, other
        entries a WeightReadError.
        """
        text = bytes(stored.tolist()).rstrip(b"\0")
        entries = parse_object(text, where, _ADVICE)
        try:
            return cls.model_validate(entries)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            entry = ".".join(map(str, problem["loc"]))
            raise WeightReadError(
                f"{where}: {entry}: {problem['msg']}, got {str(problem['input'])[:100]}. {_ADVICE}"
            ) from None

    def stored(self) -> torch.Tensor:
        """Return the tensor that :meth:`parse` reads, uint8 ``[LONGEST]``."""
        text = self.model_dump_json(exclude_none=True).encode()
        return torch.tensor([*text.ljust(LONGEST, b"\0")], dtype=torch.uint8)

    def check(
        self, where: str, quant_type: str, blocksize: int, shapes: list[list[int]], nested: bool
    ) -> None:
        """Raise WeightReadError unless the tensor is held as it was quantized.

        ``shapes`` are those that it may have: of the slot, or of all slots of a fused layer.
        """
        expected: dict[str, list[object]] = {
            "quant_type": [quant_type],
            "blocksize": [blocksize],
            "shape": [*shapes],
            "nested_blocksize": [NESTED_BLOCKSIZE if nested else None],
            "nested_dtype": ["float32" if nested else None],
        }
        if nested and self.nested_offset is None:
            raise WeightReadError(f"{where}: nested_offset is missing. {_ADVICE}")
        for entry, values in expected.items():
            got = getattr(self, entry)
            if got not in values:
                wanted = " or ".join(map(str, values))
                raise WeightReadError(
                    f"{where}: {entry} is {str(got)[:100]}, expected {wanted}: check that "
                    "config.json and the weights belong together, or quantize the checkpoint again"
                )
