"""Sources of weights: names and handles, each of which is read only when a parameter needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_module.base.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_module.weights.buckets import receive_weights, send_weights
    from vllm_module.weights.changes import find_changes
    from vllm_module.weights.checkpoint import Checkpoint, open_checkpoint
    from vllm_module.weights.handle import Destination, Handle, TensorHandle, Weight, read_into
    from vllm_module.weights.meeting import init_weight_transfer
    from vllm_module.weights.os_pages import prefer_huge_pages
    from vllm_module.weights.pieces import PIECE_BYTES
    from vllm_module.weights.reading import Readers, read_all, reader_threads
    from vllm_module.weights.regular_file import read_file
    from vllm_module.weights.source import resolve
    from vllm_module.weights.staging import staging_buffers
    from vllm_module.weights.strict_json import read_json
    from vllm_module.weights.update_file import open_update, write_update
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Checkpoint": "vllm_module.weights.checkpoint",
            "Destination": "vllm_module.weights.handle",
            "Handle": "vllm_module.weights.handle",
            "PIECE_BYTES": "vllm_module.weights.pieces",
            "Readers": "vllm_module.weights.reading",
            "TensorHandle": "vllm_module.weights.handle",
            "Weight": "vllm_module.weights.handle",
            "find_changes": "vllm_module.weights.changes",
            "init_weight_transfer": "vllm_module.weights.meeting",
            "open_checkpoint": "vllm_module.weights.checkpoint",
            "open_update": "vllm_module.weights.update_file",
            "prefer_huge_pages": "vllm_module.weights.os_pages",
            "read_all": "vllm_module.weights.reading",
            "read_file": "vllm_module.weights.regular_file",
            "read_into": "vllm_module.weights.handle",
            "read_json": "vllm_module.weights.strict_json",
            "reader_threads": "vllm_module.weights.reading",
            "receive_weights": "vllm_module.weights.buckets",
            "resolve": "vllm_module.weights.source",
            "send_weights": "vllm_module.weights.buckets",
            "staging_buffers": "vllm_module.weights.staging",
            "write_update": "vllm_module.weights.update_file",
        },
    )

__all__ = [
    "PIECE_BYTES",
    "Checkpoint",
    "Destination",
    "Handle",
    "Readers",
    "TensorHandle",
    "Weight",
    "find_changes",
    "init_weight_transfer",
    "open_checkpoint",
    "open_update",
    "prefer_huge_pages",
    "read_all",
    "read_file",
    "read_into",
    "read_json",
    "reader_threads",
    "receive_weights",
    "resolve",
    "send_weights",
    "staging_buffers",
    "write_update",
]
