"""The linter for anybody's Kubernetes manifests: each mistake is found where it is, and nothing else is."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trimaran.core import UserError
from trimaran.launch import KubernetesTarget, lint_manifest

FAULTY = Path(__file__).parents[1] / "manifests" / "faulty-job.yaml"
POD = "Job/llm-training: spec.template.spec"
Tree = dict[str, Any]


def repaired() -> list[Tree]:
    """Return the faulty Job without its mistakes, and the Service that it needs."""
    (job,) = yaml.safe_load_all(FAULTY.read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    spec |= {"parallelism": 2, "completions": 2, "completionMode": "Indexed"}
    pod |= {"restartPolicy": "Never", "subdomain": "llm-training"}
    pod["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "llm-training"},
        "spec": {"clusterIP": "None"},
    }
    return [service, job]


def found(trees: list[Any]) -> list[tuple[str, str]]:
    return [(each.code, each.where) for each in lint_manifest(trees)]


def pod_of(trees: list[Tree]) -> Tree:
    return trees[-1]["spec"]["template"]["spec"]


def node_of(trees: list[Tree]) -> Tree:
    return pod_of(trees)["containers"][0]


def test_the_classical_faulty_job_has_five_findings() -> None:
    checks = KubernetesTarget().check_file(FAULTY)
    assert [(each.error.code, each.error.where) for each in checks if each.error] == [
        ("L045", "Job/llm-training: spec.parallelism"),
        ("L046", "Job/llm-training: spec.completionMode"),
        ("L047", f"{POD}.containers[0].env[0]"),
        ("L048", f"{POD}.containers[0].volumeMounts"),
        ("L049", f"{POD}.restartPolicy"),
    ]
    assert len(checks) == 5
    assert all(each.error and each.error.fix for each in checks)


def test_the_repaired_job_has_none(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(repaired()))
    (check,) = KubernetesTarget().check_file(path)
    assert (check.error, check.found) == (None, "no mistakes in Job/llm-training")


BACKEND = {"name": "PET_RDZV_BACKEND", "value": "c10d"}
CHANGES: list[tuple[str, str, Callable[[list[Tree]], Any]]] = [
    ("L045", "spec.parallelism", lambda trees: trees[-1]["spec"].update(parallelism=3)),
    ("L046", "spec.completionMode", lambda trees: trees[-1]["spec"].pop("completionMode")),
    ("L047", "containers[0].env[0]", lambda trees: trees.pop(0)),
    ("L047", "containers[0].env[0]", lambda trees: trees[0]["spec"].pop("clusterIP")),
    ("L047", "containers[0].env[0]", lambda trees: pod_of(trees).pop("subdomain")),
    ("L048", "containers[0].volumeMounts", lambda trees: node_of(trees)["volumeMounts"].pop()),
    ("L049", "spec.restartPolicy", lambda trees: pod_of(trees).update(restartPolicy="OnFailure")),
    ("L050", "terminationGracePeriodSeconds", lambda trees: pod_of(trees).update(terminationGracePeriodSeconds=10)),
    ("L051", "livenessProbe", lambda trees: node_of(trees).update(livenessProbe={"httpGet": {"port": 80}})),
    ("L052", "resources", lambda trees: node_of(trees)["resources"].update(requests={"nvidia.com/gpu": 4})),
    ("L052", "resources", lambda trees: node_of(trees).update(resources={"requests": {"nvidia.com/gpu": 8}})),
    (
        "L053",
        "containers[0]",
        lambda trees: node_of(trees)["env"].append({"name": "PET_RDZV_BACKEND", "value": "c10d"}),
    ),
    ("L053", "containers[0]", lambda trees: node_of(trees)["command"].insert(1, "--rdzv-backend=c10d")),
    ("L054", "env[3]", lambda trees: node_of(trees)["env"].append({"name": "WANDB_API_KEY", "value": "canary"})),
    ("L054", "env[3]", lambda trees: node_of(trees)["env"].append({"name": "X", "value": f"hf_{'canary' * 4}"})),
    ("L054", "command", lambda trees: node_of(trees)["command"].append(f"--token=hf_{'canary' * 4}")),
    ("L055", "hostNetwork", lambda trees: pod_of(trees).update(hostNetwork=True)),
    ("L055", "privileged", lambda trees: node_of(trees).update(securityContext={"privileged": True})),
    ("L056", "image", lambda trees: node_of(trees).update(image="trainer:latest")),
    ("L056", "image", lambda trees: node_of(trees).update(image="registry.example:5000/llm/trainer")),
]


@pytest.mark.parametrize(
    ("code", "where", "change"), CHANGES, ids=[f"{each[0]}-{at}" for at, each in enumerate(CHANGES)]
)
def test_each_mistake_is_the_only_finding(code: str, where: str, change: Callable[[list[Tree]], Any]) -> None:
    trees = copy.deepcopy(repaired())
    change(trees)
    (error,) = lint_manifest(trees)
    assert error.code == code
    assert error.where.endswith(where)
    assert "canary" not in str(error)


def test_what_is_right_is_not_reported() -> None:
    trees = repaired()
    node_of(trees)["env"][0].update(value="llm-training-0.llm-training.default.svc.cluster.local")
    node_of(trees)["env"] += [{"name": "TOKENIZERS_PARALLELISM", "value": "false"},
                              {"name": "MAX_TOKENS", "value": "8192"},
                              {"name": "API_KEY", "value": "$(FROM_SECRET)"}]  # fmt: skip
    node_of(trees).update(image=f"registry/x@sha256:{'0' * 64}")
    pod_of(trees).update(terminationGracePeriodSeconds=30)
    node_of(trees)["command"].extend(["--rdzv-backend=c10d", "--rdzv-id=job"])
    database = {"restartPolicy": "OnFailure", "containers": [{"image": "postgres:17"}]}
    other = {"kind": "Job", "metadata": {"name": "db"}, "spec": {"template": {"spec": database}}}
    assert found([*trees, other]) == []
    node_of(trees)["command"][1] = "--nnodes=1:4"
    node_of(trees)["env"][0].update(value="10.0.0.7")
    assert found(trees) == []


def test_commands_in_a_shell_script_are_read_too() -> None:
    trees = repaired()
    node_of(trees)["command"] = ["bash", "-c", "set -e\ntorchrun --nnodes 3 \\\n  --rdzv_backend c10d train.py  # x\n"]
    assert [code for code, _ in found(trees)] == ["L045", "L053"]


def test_a_job_set_without_a_restart_policy_has_the_wrong_one() -> None:
    (_, job) = repaired()
    job["spec"]["template"]["spec"].pop("restartPolicy")
    job["spec"].pop("completionMode")  # Indexed by default
    replicated = [{"name": "node", "template": {"spec": job["spec"]}}]
    tree = {"kind": "JobSet", "metadata": {"name": "set"}, "spec": {"replicatedJobs": replicated}}
    path = "spec.replicatedJobs[0].template.spec.template.spec.restartPolicy"
    assert found([tree]) == [("L049", f"JobSet/set: {path}")]


def test_a_pytorch_job_counts_master_and_workers() -> None:
    template = {"spec": pod_of(repaired())}
    roles = {"Master": {"replicas": 1, "template": template}, "Worker": {"replicas": 3, "template": template}}
    tree = {"kind": "PyTorchJob", "metadata": {"name": "old"}, "spec": {"pytorchReplicaSpecs": roles}}
    assert {code for code, _ in found([tree])} == {"L045"}
    roles["Worker"]["replicas"] = 1
    assert found([tree]) == []


def test_a_train_job_is_read_together_with_its_runtime() -> None:
    (_, job) = repaired()
    pod = job["spec"]["template"]["spec"]
    node = pod["containers"][0]
    trainer = {"numNodes": 4, "command": node.pop("command"), "image": node.pop("image")}
    node["name"] = "node"
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    replicated = [{"name": "node", "template": {"metadata": {"labels": labels}, "spec": {"template": {"spec": pod}}}}]
    runtime = {"kind": "TrainingRuntime", "metadata": {"name": "ours"},
               "spec": {"template": {"spec": {"replicatedJobs": replicated}}}}  # fmt: skip
    train_job = {"kind": "TrainJob", "metadata": {"name": "llm"},
                 "spec": {"runtimeRef": {"name": "ours"}, "trainer": trainer}}  # fmt: skip
    assert found([runtime, train_job]) == [("L045", "TrainJob/llm: spec.trainer.numNodes")]
    assert found([train_job]) == [("L045", "TrainJob/llm: spec.trainer.numNodes")]  # the rest is not known
    node["volumeMounts"].pop()
    path = "spec.template.spec.replicatedJobs[0].template.spec.template.spec.containers[0].volumeMounts"
    assert ("L048", f"TrainingRuntime/ours: {path}") in found([runtime, train_job])


MALFORMED = [
    None, 3, "x", [], {}, {"kind": "Job"}, {"kind": "Job", "spec": 3},
    {"kind": "Job", "spec": {"template": {"spec": {"containers": [1, {"env": 2}, None]}}}},
    {"kind": "JobSet", "spec": {"replicatedJobs": {"a": 1}}},
    {"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Master": None}}},
    {"kind": "List", "items": [None, {"kind": "Pod", "spec": []}]},
    {"kind": "TrainJob", "spec": {"trainer": "x"}},
]  # fmt: skip


def test_malformed_objects_are_no_surprise() -> None:
    assert lint_manifest(MALFORMED) == []


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text in ("", "a: [", "just text", "\x00", "a: &x [*x]\n", "!!python/object:os.system x", "- 1\n"):
        path.write_text(text)
        with pytest.raises(UserError, match="L044"):
            KubernetesTarget().check_file(path)
    with pytest.raises(UserError, match="L044"):
        KubernetesTarget().check_file(tmp_path / "missing.yaml")
