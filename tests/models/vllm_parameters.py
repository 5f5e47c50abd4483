"""Write the parameters that vLLM's own loader gives a rank: vLLM's interpreter runs this file.

``vllm_parameters.py JOBS`` reads a JSON file with a list of jobs: the ``folder`` of a checkpoint, a
``rank`` of ``size`` ranks, whether ``experts`` are whole on a rank (expert parallel), the ``dtype``
to load in, and a safetensors file ``out``. It writes the rank's parameters to ``out``, before
vLLM processes them, or the reason why vLLM refuses to the file that ends in ``.refused`` instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.models.registry as registry
from safetensors.torch import load_file, save_file
from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.config import set_current_vllm_config as configured
from vllm.distributed import parallel_state
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

# Nothing is computed, so it does not matter which instructions the processor has.
for check in ("is_supported", "can_implement"):
    setattr(CPUFp8BlockScaledMMKernel, check, classmethod(lambda *_: (True, None)))
for kind in ("Fp8", "Int4", "Int8", "Mxfp4"):
    experts = getattr(cpu_moe, f"CPUExperts{kind}")
    experts._supports_current_device = staticmethod(lambda: True)
# A process for each class, 10 s each, is to keep CUDA out of this one. Here is none.
registry._run_in_subprocess = lambda inspect: inspect()


def parameters(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Build vLLM's model of a rank and load the checkpoint with the model's own method."""
    dtype, size = getattr(torch, job["dtype"]), job["size"]
    model_config = ModelConfig(
        model=job["folder"],
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        allow_deprecated_quantization=True,  # fbgemm_fp8
    )
    config = VllmConfig(
        model_config=model_config,
        parallel_config=ParallelConfig(
            tensor_parallel_size=size, enable_expert_parallel=job["experts"]
        ),
        device_config=DeviceConfig("cpu"),
    )
    # Building and loading only ask the groups who and how many they are; nothing is sent.
    for group in (parallel_state.get_tp_group(), parallel_state.get_ep_group()):
        group.rank_in_group, group.world_size = job["rank"], size
    with configured(config), set_default_torch_dtype(dtype):
        model = initialize_model(config)
        for parameter in model.parameters():  # what is not loaded shows
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        files = sorted(Path(job["folder"]).glob("*.safetensors"))
        model.load_weights(pair for file in files for pair in load_file(file).items())
    return {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}


def main(jobs: Path) -> None:
    with configured(VllmConfig()):
        store = f"file://{jobs.with_suffix('.store')}"
        parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    for job in json.loads(jobs.read_text()):
        try:
            save_file(parameters(job), job["out"])
        except Exception as error:  # the test says which refusals are expected
            Path(job["out"]).with_suffix(".refused").write_text(f"{type(error).__name__}: {error}")
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
