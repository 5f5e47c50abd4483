"""Sources of weights: names and handles, each of which is read only when a parameter needs it."""

from vllm_module.weights.buckets import receive_weights, send_weights
from vllm_module.weights.checkpoint import Checkpoint, open_checkpoint
from vllm_module.weights.handle import Destination, Handle, Weight, read_into
from vllm_module.weights.hub import resolve
from vllm_module.weights.os_pages import prefer_huge_pages
from vllm_module.weights.reading import PIECE_BYTES, Readers, read_all, reader_threads
from vllm_module.weights.regular_file import read_file
from vllm_module.weights.strict_json import read_json

__all__ = [
    "PIECE_BYTES",
    "Checkpoint",
    "Destination",
    "Handle",
    "Readers",
    "Weight",
    "open_checkpoint",
    "prefer_huge_pages",
    "read_all",
    "read_file",
    "read_into",
    "read_json",
    "reader_threads",
    "receive_weights",
    "resolve",
    "send_weights",
]
