"""Deep copies and pickles of models are independent models, whether loaded or not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.layers import MergedColumnParallelLinear, ParallelLMHead, VocabParallelEmbedding
from vllm_module.testing.checkpoints import assert_same_state, state


class Model(vLLMModule):
    """A model with a tied head. Pickle finds classes by name, so it cannot be inside a test."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(10, 8)
        self.merged = MergedColumnParallelLinear(8, [6, 2], shard_names=["gate", "up"])
        self.plain = nn.BatchNorm1d(8)
        self.head = ParallelLMHead(10, 8)
        self.head.tie_weights(self.embed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.plain(self.merged(self.embed(ids))))


def checkpoint() -> dict[str, torch.Tensor]:
    shapes = {"embed": (10, 8), "gate": (6, 8), "up": (2, 8), "plain": (8,)}
    tensors = {f"{name}.weight": torch.rand(shape) for name, shape in shapes.items()}
    rows = {"gate.bias": 6, "up.bias": 2, "plain.bias": 8}
    rows |= {"plain.running_mean": 8, "plain.running_var": 8}
    tensors |= {name: torch.rand(count) for name, count in rows.items()}
    return tensors | {"plain.num_batches_tracked": torch.tensor(3)}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_independent_of_its_original(copied) -> None:
    """It loads, updates and runs like its original, shares no memory with it, and keeps ties."""
    tensors = checkpoint()
    model = Model().eval()
    unloaded = copied(model)
    model.load_weights(tensors)
    loaded = copied(model)
    unloaded.load_weights(tensors)
    loaded.update_weights({"up.weight": tensors["up.weight"]})
    expected, ids = state(model), torch.arange(3)
    for other in (loaded, unloaded):
        assert other.head.weight is other.embed.weight
        assert_same_state(state(other), expected, "in a copy")
        for path, parameter in model.named_parameters():
            assert type(other.get_parameter(path)) is type(parameter)
            assert vars(other.get_parameter(path)) == vars(parameter)
        assert torch.equal(other(ids), model(ids))
    loaded.load_weights({name: tensor + 1 for name, tensor in tensors.items()})
    assert_same_state(state(model), expected, "after its copy was loaded")
    assert torch.equal(model(ids), unloaded(ids))
