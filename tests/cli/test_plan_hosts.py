"""``plan --nodes``: bytes of each host, counted by hand from headers, and estimates by formulas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

Run = Callable[..., Any]
HIDDEN, LAYERS, VOCAB, BF16 = 32, 3, 130, 2
TP = 4


def shapes(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = list(file.keys())  # it is no mapping
            found |= {name: file.get_slice(name).get_shape() for name in names}
    return found


def kept(name: str, shape: Sequence[int], rank: int, size: int = TP) -> torch.Tensor:
    """Mark the elements of a tensor that a rank keeps, by the rules of Megatron's paper."""
    mask = torch.zeros(*shape, dtype=torch.bool)
    if "norm" in name:
        return ~mask
    dim, parts = int("o_proj" in name or "down_proj" in name), size
    if "k_proj" in name or "v_proj" in name:
        parts, rank = 2, rank // (size // 2)  # two heads of keys and values
    length = shape[dim] // parts
    if "embed" in name or "lm_head" in name:
        length = 192 // size  # the vocabulary is padded to a multiple of 64
    begin = min(rank * length, shape[dim])
    mask.narrow(dim, begin, min(length, shape[dim] - begin)).fill_(True)
    return mask


@pytest.mark.parametrize("nodes", [2, 4])
def test_bytes_of_hosts_are_those_of_the_headers(run: Run, folder: Path, nodes: int) -> None:
    """Each host reads the union of what its ranks keep, and its part of what all ranks read."""
    plan = run("plan", folder, "--tp", TP, "--nodes", nodes, "--json").json
    each = TP // nodes
    once, together = [0] * nodes, [0.0] * nodes
    for name, shape in shapes(folder).items():
        masks = torch.stack([kept(name, shape, rank) for rank in range(TP)])
        count = masks.sum(0)
        for host in range(nodes):
            of_host = masks[host * each : (host + 1) * each]
            once[host] += BF16 * int(of_host.any(0).sum())
            together[host] += BF16 * int((of_host & (count == 1)).sum())
            together[host] += BF16 * int((count > 1).sum()) / nodes
    assert [host["bytes_read"] for host in plan["hosts"]] == once
    assert [host["bytes_read_together"] for host in plan["hosts"]] == pytest.approx(together, abs=1)
    assert sum(together) == plan["checkpoint_bytes"]
    assert sum(once) > plan["checkpoint_bytes"]  # keys and norms are read by several hosts
    for host in plan["hosts"]:
        mine = [plan["ranks"][rank] for rank in host["ranks"]]
        assert host["device_bytes"] == sum(rank["device_bytes"] for rank in mine)
        assert host["kv_cache_tokens"] is None
    assert [host["ranks"] for host in plan["hosts"]] == [
        [*range(host * each, (host + 1) * each)] for host in range(nodes)
    ]


def ring(values: int, ranks: int, per_host: int) -> list[int]:
    """Reduce and gather ``values`` in a ring, chunk by chunk; count what each host sends others."""
    sent = [0] * (ranks // per_host)
    for _ in range(2 * (ranks - 1)):  # steps; in each, every rank sends one of as many chunks
        for rank in range(ranks):
            if rank // per_host != (rank + 1) % ranks // per_host:
                sent[rank // per_host] += values // ranks
    return sent


def test_what_crosses_the_wire_for_a_token(run: Run, folder: Path) -> None:
    """Attention, MLP and embedding are summed in a ring; logits are gathered by half of one."""
    plan = run("plan", folder, "--tp", TP, "--nodes", 2, "--json").json
    summed = ring((2 * LAYERS + 1) * HIDDEN * BF16, TP, 2)
    gathered = [half / 2 for half in ring(192 * BF16, TP, 2)]
    for host, one, two in zip(plan["hosts"], summed, gathered, strict=True):
        assert host["wire"] == {"layers": one + two, "experts": 0.0, "stages": 0.0}
    assert "hosts" not in run("plan", folder, "--tp", TP, "--json").json


def test_stages_on_hosts(run: Run, folder: Path) -> None:
    """Rank 0 is of the last stage. A host sends the next stage two rows from each of its ranks."""
    words = ("--tp", 2, "--pp", 2, "--json", "--memory", "1MB")
    plan = run("plan", folder, *words, "--nodes", 2).json
    last, first = plan["hosts"]
    assert (last["stages"], last["ranks"]) == ([1], [0, 1])
    assert (first["stages"], first["ranks"]) == ([0], [2, 3])
    assert last["wire"] == {"layers": 0.0, "experts": 0.0, "stages": 0.0}
    assert first["wire"] == {"layers": 0.0, "experts": 0.0, "stages": 2 * 2 * HIDDEN * BF16}
    layers = {"0": first, "1": first, "2": last}  # three layers on two stages
    nbytes = {0: 0, 1: 0}
    for name, shape in shapes(folder).items():
        number = re.search(r"layers\.(\d)", name)
        host = layers[number[1]] if number else (first if "embed" in name else last)
        nbytes[host["host"]] += BF16 * torch.Size(shape).numel()
    assert [host["bytes_read"] for host in plan["hosts"]] == [nbytes[0], nbytes[1]]
    for host, stage in ((last, 1), (first, 0)):
        fit = [rank["kv_cache_tokens"] for rank in plan["stages"][stage]["ranks"]]
        assert host["kv_cache_tokens"] == min(fit) > 0
    apart = run("plan", folder, *words, "--nodes", 4).json["hosts"]
    assert [host["wire"]["stages"] for host in apart] == [0, 0] + [2 * HIDDEN * BF16] * 2
    assert all(host["wire"]["layers"] > 0 for host in apart)


def test_experts_on_hosts(run: Run, tmp_path: Path) -> None:
    """Tokens of all ranks are gathered, and what experts compute is summed, in a ring of hosts."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--tp", 2, "--expert-parallel-size", 4, "--nodes", 2, "--load-format", "dummy")
    hosts = run("plan", tmp_path, *words, "--json").json["hosts"]
    # Both ranks of a group have a token and send it: two rows, of a token and of two experts'
    # weights (float32) and numbers (int64), are gathered, and two rows of the result are summed.
    row = HIDDEN * BF16
    each = 3 / 4 * 2 * (row + 2 * (4 + 8)) + 2 * 3 / 4 * 2 * row
    for host in hosts:
        assert host["wire"]["experts"] == pytest.approx(2 * each)  # of two layers
        assert host["wire"]["layers"] == 0.0  # each group of two is on one host
    expert = 3 * HIDDEN * 64 * BF16
    other = hosts[0]["bytes_read"] - 2 * 4 * expert  # of 8 experts, a host has 4, in two layers
    assert [host["bytes_read"] - 2 * 4 * expert for host in hosts] == [other, other]


@pytest.mark.parametrize("experts", [4, 5, 6, 7])
def test_the_fullest_rank_of_a_group_says_how_many_tokens_fit(
    run: Run, tmp_path: Path, experts: int
) -> None:
    """Ranks of one group hold keys of the same tokens; those with an expert more have less room."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "num_local_experts": experts, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory, page = 200_000, 16 * 2 * 2 * 8 * BF16  # 16 tokens: K and V, two layers, one head of 8
    words = ("--tp", 2, "--expert-parallel-size", 4, "--nodes", 2, "--load-format", "dummy")
    plan = run("plan", tmp_path, *words, "--memory", memory, "--json").json
    fit = [(memory - rank["device_bytes"]) // page * 16 for rank in plan["ranks"]]
    assert [host["kv_cache_tokens"] for host in plan["hosts"]] == [min(fit[:2]), min(fit[2:])]
    assert len({*fit}) == (1 if experts % 4 == 0 else 2)


@pytest.mark.parametrize(("tp", "ep", "pp"), [(2, 4, 1), (1, 6, 1), (2, 2, 3), (3, None, 2)])
def test_hosts_divide_the_ranks_of_a_world(
    run: Run, tmp_path: Path, tp: int, ep: int | None, pp: int
) -> None:
    """Ranks that only hold experts count: the world is what torchrun would be told to start."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16",
        "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 192,
        "num_local_experts": 12, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--tp", tp, "--pp", pp, "--load-format", "dummy", "--json"]
    words += [] if ep is None else ["--expert-parallel-size", ep]
    world = max(tp, ep or 0) * pp
    for nodes in range(1, 7):
        ran = run("plan", tmp_path, *words, "--nodes", nodes)
        assert ran.code == (2 if world % nodes else 0), (nodes, ran.err)
        if world % nodes:
            assert f"{world} ranks" in ran.err
        elif nodes > 1:
            assert sum(len(host["ranks"]) for host in ran.json["hosts"]) == world


def test_hosts_that_do_not_divide(run: Run, folder: Path, tmp_path: Path) -> None:
    """Numbers are in the message, and nothing is read; a picture has the hosts."""
    wrong = run("plan", folder, "--tp", 2, "--pp", 2, "--nodes", 3)
    assert wrong.code == 2
    assert "4 ranks (2 stages of 2) cannot be spread evenly over 3 hosts" in wrong.err
    page = tmp_path / "page.html"
    assert run("plan", folder, "--tp", 4, "--nodes", 2, "--html", page).code == 0
    text = page.read_text()
    assert "<b>host 1</b>" in text
    assert "memory of a device, at the peak" in text
    assert run("plan", folder, "--tp", 4, "--html", page).code == 0
    assert "<h2>Hosts</h2>" not in page.read_text()
