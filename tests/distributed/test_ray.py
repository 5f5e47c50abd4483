"""Ranks that Ray places, on a real cluster of two nodes, which are two raylets on this machine."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_module import LLM
from vllm_module.errors import RankError
from vllm_module.runtime.ranks.ray_actors import RayActors

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*ray:FutureWarning")

STAGES = runpy.run_path(str(Path(__file__).parent / "test_pipeline.py"))
PROMPTS = STAGES["PROMPTS"]


@pytest.fixture(scope="module", autouse=True)
def address() -> Iterator[str]:
    """Connect to a cluster of two nodes, with two CPUs and two GPUs each, which need not exist."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written: Path = STAGES["write"](tmp_path_factory.mktemp("ray") / "qwen3", "qwen3")
    return written


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, **settings}
    made: LLM = STAGES["engine"](folder, **given)
    return made


def pids(llm: LLM) -> list[int]:
    """Return the processes of other ranks."""
    name = llm.executor._ranks.processes.name
    return [int(name(rank).split()[3]) for rank in range(1, llm.executor.size)]


def wait_until_gone(processes: list[int]) -> None:
    end = time.monotonic() + 5
    for pid in processes:
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.kill(pid, 0)
                time.sleep(0.02)
            pytest.fail(f"process {pid} is left")
    table = ray.util.placement_group_table()
    assert {each["state"] for each in table.values()} <= {"REMOVED"}


def test_two_engines_give_the_tokens_of_transformers(folder: Path) -> None:
    """Of two ranks and of two stages, one after the other; each leaves nothing behind."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt["prompt_token_ids"])
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append([ids[-6:]])
    for stages in (1, 2):
        with engine(folder, tensor_parallel_size=3 - stages, pipeline_parallel_size=stages) as llm:
            assert STAGES["tokens"](llm, most=6) == expected
            others = pids(llm)
            assert len(others) == 1
            assert others != [os.getpid()]
        wait_until_gone(others)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_an_actor_that_dies_or_is_stopped_is_named(fault: str, folder: Path) -> None:
    with engine(folder, step_timeout=2.0) as llm:
        (pid,) = pids(llm)
        os.kill(pid, getattr(signal, fault))
        begin = time.monotonic()
        how = "died: .*worker process" if fault == "SIGKILL" else "the process is stopped"
        with pytest.raises(RankError, match=rf"rank 1 \(pid {pid} on [\d.]+\) .*{how}") as caught:
            STAGES["tokens"](llm)
        assert caught.value.ranks == (1,)
        assert time.monotonic() - begin < 8
    wait_until_gone([pid])


def _fail(rank: int, which: int) -> None:
    if rank == which:
        raise ValueError("a rank of its own opinion")
    time.sleep(60)


def test_an_actor_that_fails_ends_the_others() -> None:
    released: list[bool] = []
    actors = RayActors(3, torch.device("cpu"), lambda: released.append(True))
    try:
        actors.start(_fail, (2,))
        assert actors.ended.wait(10)
        assert (actors.codes, released) == ({2: 1}, [True])
        assert re.fullmatch(r"rank 2 \(pid .*\) ended with exit code 1", actors.describe(2))
    finally:
        actors.end()
    wait_until_gone([])


def test_what_the_cluster_does_not_have_is_named_at_once(folder: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"5 ranks need 5 CPU, and .* has 4 CPU \(nodes: 2\)"):
        engine(folder, tensor_parallel_size=5)
    assert time.monotonic() - begin < 5


def test_what_others_use_is_waited_for_within_a_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing becomes free in this test, so a minute shows no more than a second.
    monkeypatch.setattr("vllm_module.runtime.ranks.ray_actors._PLACING", 1.0)
    held = ray.util.placement_group([{"CPU": 1}] * 3)
    try:
        assert held.wait(10)
        with pytest.raises(TimeoutError, match=r"2 ranks need 2 CPU, and for 1 s .*1 CPU are free"):
            engine(folder)
    finally:
        ray.util.remove_placement_group(held)
    wait_until_gone([])


def _note(rank: int, path: str) -> None:
    from huggingface_hub import constants  # reads its settings when vllm_module imports it

    noted = os.environ["CUDA_VISIBLE_DEVICES"], constants.HF_HUB_DOWNLOAD_TIMEOUT
    Path(f"{path}/{rank}").write_text(repr(noted))
    time.sleep(60)


def test_each_rank_has_a_gpu_and_the_settings_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an actor may see is what Ray gave it; this process's own device is reserved, too."""
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "77")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")  # not of the actors
    actors = RayActors(3, torch.device("cuda"), lambda: None)
    try:
        assert actors.device in (torch.device("cuda:0"), torch.device("cuda:1"))
        actors.start(_note, (str(tmp_path),))
        end = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        noted = [eval((tmp_path / str(rank)).read_text()) for rank in (1, 2)]
        assert {seconds for _, seconds in noted} == {77}
        mine = ["1", "0"][actors.device.index]
        assert {mine, noted[0][0]} == {"0", "1"}  # of one host, which has no other
        assert noted[1][0] in ("0", "1")
        assert actors.most_on_a_host == 2
    finally:
        actors.end()


def test_an_actor_in_a_placement_group_uses_its_bundles(folder: Path) -> None:
    """As a deployment of Ray Serve does; the group is not removed."""
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )

    @ray.remote(num_cpus=1, scheduling_strategy=strategy)
    class Driver:
        def run(self, size: int) -> Any:
            with STAGES["engine"](
                folder, distributed_executor_backend="ray", tensor_parallel_size=size
            ) as llm:
                return STAGES["tokens"](llm, most=4)

    try:
        driver = Driver.remote()
        with STAGES["engine"](folder) as llm:
            assert ray.get(driver.run.remote(2), timeout=60) == STAGES["tokens"](llm, most=4)
        with pytest.raises(ValueError, match="has 1 bundles with 1 CPU beside bundle 0"):
            ray.get(driver.run.remote(3), timeout=60)
        states = [each["state"] for each in ray.util.placement_group_table().values()]
        assert states.count("CREATED") == 1
        ray.kill(driver)
    finally:
        ray.util.remove_placement_group(group)


DRIVER = """
import os, sys, time, runpy
stages = runpy.run_path(sys.argv[1])
llm = stages["engine"](sys.argv[2], distributed_executor_backend="ray", tensor_parallel_size=2)
print(llm.executor._ranks.processes.name(1).split()[3], flush=True)
if len(sys.argv) > 3:
    time.sleep(60)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_actors_end_with_the_driver(killed: bool, folder: Path, address: str) -> None:
    """Also if it is killed; RAY_ADDRESS says which cluster."""
    command = [
        sys.executable,
        "-c",
        DRIVER,
        str(Path(__file__).parent / "test_pipeline.py"),
        folder,
    ]
    with subprocess.Popen(
        [*command, *["wait"] * killed],
        env=os.environ | {"RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        if killed:
            driver.kill()
        _, errors = driver.communicate(timeout=30)
        assert line.strip().isdigit(), errors
        assert killed or driver.returncode == 0, errors
    wait_until_gone([int(line)])
