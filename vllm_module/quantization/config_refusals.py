"""What is said of a ``quantization_config`` of config.json that is refused."""

from __future__ import annotations

from vllm_module.errors import CheckpointFormatError, UnsupportedModelError


def unsupported(where: str, expected: str, got: object) -> UnsupportedModelError:
    """Return the refusal of the entry ``where``."""
    return UnsupportedModelError(
        f"quantization_config.{where} of config.json: expected {expected}, got {str(got)[:300]}"
    )


def invalid(error: Exception) -> CheckpointFormatError:
    """Return the refusal for the problems that a schema found."""
    return CheckpointFormatError(f"quantization_config of config.json is invalid: {error}"[:1000])
