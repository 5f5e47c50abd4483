"""The example for LeaderWorkerSet: fields that its API has, and options that the command has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_module.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
# The part of the API, version 1 of github.com/kubernetes-sigs/lws, that concerns an example. A
# tuple has the values of a field, a class its type, and ``Pod`` is a template of a pod.
Pod = "a template of a pod"
SET: dict[str, Any] = {
    "replicas": int,
    "leaderWorkerTemplate": {
        "size": int,
        "leaderTemplate": Pod,
        "workerTemplate": Pod,
        "restartPolicy": (
            "Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None",
        ),
        "subGroupPolicy": {"subGroupPolicyType": str, "subGroupSize": int},
        "volumeClaimTemplates": list,
        "persistentVolumeClaimRetentionPolicy": dict,
    },
    "rolloutStrategy": {
        "type": ("RollingUpdate",),
        "rollingUpdateConfiguration": {"partition": int, "maxUnavailable": int, "maxSurge": int},
    },
    "startupPolicy": ("LeaderCreated", "LeaderReady"),
    "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
}  # fmt: skip
# What Kubernetes has in a pod, as far as an example of a server uses it.
CONTAINER = {
    *("name", "image", "args", "env", "resources", "volumeMounts", "ports"),
    *("readinessProbe", "livenessProbe", "startupProbe", "securityContext"),
}
POD = {"containers", "volumes", "nodeSelector", "tolerations", "terminationGracePeriodSeconds"}
# In the environment of each container.
VARIABLES = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "here"}


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    text = (EXAMPLES / "kubernetes/leaderworkerset.yaml").read_text()
    hosts, service = yaml.safe_load_all(text)
    return hosts, service


def problems(value: Any, schema: Any, path: str) -> list[str]:
    """Return the fields that the schema does not have, or whose values it does not allow."""
    if schema is Pod:
        spec = value["spec"]
        names = [f"{path}.{name}" for name in spec.keys() - POD]
        return names + [
            f"{path}.{name}" for each in spec["containers"] for name in each.keys() - CONTAINER
        ]
    if isinstance(schema, dict):
        found = [f"{path}.{name}" for name in value.keys() - schema.keys()]
        for name in value.keys() & schema.keys():
            found += problems(value[name], schema[name], f"{path}.{name}")
        return found
    right = value in schema if isinstance(schema, tuple) else isinstance(value, schema)
    return [] if right else [f"{path}: {value!r}"]


def test_the_fields_are_those_of_the_api() -> None:
    hosts, _ = documents()
    assert hosts["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert hosts["kind"] == "LeaderWorkerSet"
    assert problems(hosts["spec"], SET, "spec") == []
    wrong = json.loads(json.dumps(hosts["spec"]))
    wrong["leaderWorkerTemplate"] |= {"restartPolicy": "Always", "groupSize": 2}
    assert sorted(problems(wrong, SET, "spec")) == [
        "spec.leaderWorkerTemplate.groupSize",
        "spec.leaderWorkerTemplate.restartPolicy: 'Always'",
    ]


def test_all_hosts_start_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the image takes the arguments, with what LeaderWorkerSet sets in them."""
    hosts, service = documents()
    template = hosts["spec"]["leaderWorkerTemplate"]
    leader, worker = (
        template[each]["spec"]["containers"][0] for each in ("leaderTemplate", "workerTemplate")
    )
    for name in ("image", "args", "resources", "volumeMounts"):
        assert leader[name] == worker[name]
    volumes = [template[each]["spec"]["volumes"] for each in ("leaderTemplate", "workerTemplate")]
    assert volumes[0] == volumes[1]
    _, image = leader["image"].split(":")
    last = (EXAMPLES / f"docker/Dockerfile.{image}").read_text().splitlines()[-1]
    entry = json.loads(last.removeprefix("ENTRYPOINT "))[1:]
    assert leader["args"][1] == f"--tp={template['size'] * 8}"
    assert leader["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    args = [re.sub(r"\$\((\w+)\)", lambda m: VARIABLES[m[1]], each) for each in leader["args"]]
    assert args[0] == "/models/NAME"
    assert main([*entry, str(folder), *args[1:]]) == 2  # of two hosts, none has the number 2
    assert "there are 2 hosts (--nnodes)" in " ".join(capsys.readouterr().err.split())
    port = entry[entry.index("--port") + 1]
    assert leader["ports"] == [{"containerPort": int(port)}]
    assert leader["readinessProbe"]["httpGet"] == {"path": "/ready", "port": int(port)}
    # Another name than that of the service that LeaderWorkerSet makes.
    assert service["metadata"]["name"] != hosts["metadata"]["name"]
    assert service["spec"]["ports"] == [{"port": int(port)}]
    label = "leaderworkerset.sigs.k8s.io"
    assert service["spec"]["selector"] == {
        f"{label}/name": hosts["metadata"]["name"], f"{label}/worker-index": "0",
    }  # fmt: skip
