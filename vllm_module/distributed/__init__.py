"""Tensor-parallel groups, and work that succeeds on every rank or fails on every rank."""

from vllm_module.distributed.exchange import together
from vllm_module.distributed.groups import (
    ProcessGroup,
    SimulatedGroup,
    TensorParallelGroup,
    message_group,
    run_ranks,
    tensor_parallel,
    tensor_parallel_group,
)

__all__ = [
    "ProcessGroup",
    "SimulatedGroup",
    "TensorParallelGroup",
    "message_group",
    "run_ranks",
    "tensor_parallel",
    "tensor_parallel_group",
    "together",
]
