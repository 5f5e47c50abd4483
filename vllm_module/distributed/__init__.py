"""Tensor-parallel groups, and work that succeeds on every rank or fails on every rank."""

from vllm_module.distributed.exchange import failure_of_others, together
from vllm_module.distributed.expert_groups import (
    ExpertParallelGroup,
    OwnTokens,
    data_parallel,
    expert_parallel,
    expert_parallel_group,
)
from vllm_module.distributed.groups import (
    PipelineStage,
    ProcessGroup,
    SimulatedGroup,
    TensorParallelGroup,
    message_group,
    pipeline_parallel,
    run_ranks,
    surrounding_group,
    surrounding_stage,
    tensor_parallel,
    tensor_parallel_group,
)
from vllm_module.distributed.pipe import StagePipe
from vllm_module.distributed.waits import Waiting

__all__ = [
    "ExpertParallelGroup",
    "OwnTokens",
    "PipelineStage",
    "ProcessGroup",
    "SimulatedGroup",
    "StagePipe",
    "TensorParallelGroup",
    "Waiting",
    "data_parallel",
    "expert_parallel",
    "expert_parallel_group",
    "failure_of_others",
    "message_group",
    "pipeline_parallel",
    "run_ranks",
    "surrounding_group",
    "surrounding_stage",
    "tensor_parallel",
    "tensor_parallel_group",
    "together",
]
