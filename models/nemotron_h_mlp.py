"""The MLPs of Nemotron-H: none has a gate, and experts may compute in fewer features."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.layers import (
    ColumnParallelLinear,
    FusedMoE,
    ReplicatedLinear,
    Router,
    RowParallelLinear,
    get_act,
)


class NemotronHMLP(vLLMModule):
    sole_readers = {"x": "up_proj"}

    def __init__(self, config: Any, intermediate_size: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        self.up_proj = ColumnParallelLinear(hidden, intermediate_size, bias)
        self.act_fn = get_act(config.mlp_hidden_act)
        self.down_proj = RowParallelLinear(intermediate_size, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class NemotronHMoE(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, latent, bias = config.hidden_size, config.moe_latent_size, config.mlp_bias
        experts = config.n_routed_experts
        self.gate = Router(
            hidden, experts, params_dtype=torch.float32, e_score_correction_bias=True
        )
        self.experts = FusedMoE(
            experts, config.num_experts_per_tok, latent or hidden, config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            scoring_func="sigmoid",
            e_score_correction_bias=self.gate.e_score_correction_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            activation=config.mlp_hidden_act,
            shard_names=("up_proj", "down_proj"),
        )  # fmt: skip
        self.shared_experts = NemotronHMLP(config, config.moe_shared_expert_intermediate_size)
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        if latent is not None:
            self.fc1_latent_proj = ReplicatedLinear(hidden, latent, bias)
            self.fc2_latent_proj = ReplicatedLinear(latent, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        routed = self.experts(given, self.gate(x))
        routed = routed if self.fc2_latent_proj is None else self.fc2_latent_proj(routed)
        return routed + self.shared_experts(x)
