"""Manifests for Kubernetes: valid for the API, complete, the same each time, and safe against hostile names."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s_requests import launch_request, workload_of
from tests.pod_runner import expand
from trimaran.app import main
from trimaran.core import UserError, parse_recipe
from trimaran.launch import (
    KubernetesSite,
    KubernetesTarget,
    LaunchRequest,
    Target,
    grace_seconds,
    open_target,
    site_section,
)
from trimaran.runs import dump_plan

VERSION = "1.37"
CORE = {"v1", "batch/v1", "policy/v1", "networking.k8s.io/v1"}
MODELS = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob",
          "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}  # fmt: skip
NO_MODELS = {"PodMonitor", "PodGroup"}  # of operators whose schema no package contains
FULL: dict[str, Any] = {
    "gang": "kueue",
    "queue": "llm",
    "topology": "cloud.example/rack",
    "priority_class": "high",
    "node_selector": {"gpu": "h100"},
    "tolerations": ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
    "rdma": "rdma/hca",
    "memory": "900Gi",
    "env": {"NCCL_SOCKET_IFNAME": "eth0"},
    "pull_secret": "registry",
    "service_account": "trainer",
    "runtime_class": "nvidia",
    "namespace": "llm",
    "storage_class": "fast",
}
METRICS = ("telemetry.prometheus.port=9101", "telemetry.prometheus.host=0.0.0.0")
HOSTILE = [
    'it\'s a: "b" #c',
    "$(touch x) $HOME `id`",
    "$(HF_TOKEN)",
    "x\ny",
    "é中",
    "-- x %s{}",
]


def documents(request: LaunchRequest) -> list[dict[str, Any]]:
    files = KubernetesTarget().render(request).files
    return [tree for text in files.values() for tree in yaml.safe_load_all(text)]


def of_kind(trees: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [each for each in trees if each["kind"] == kind]
    return found


def requests() -> list[Any]:
    gpu = {"cluster": "2x8xH100"}
    volcano = FULL | {"gang": "volcano", "topology": ""}
    sites = {"plain": {}, "gpu": gpu, "full": gpu | FULL, "volcano": gpu | volcano, "runtime": {"runtime": "torch"}}
    quick = {"trainjob-plain", "trainjob-runtime", "jobset-volcano", "job-full"}
    return [
        pytest.param(kind, site, id=f"{kind}-{name}", marks=[] if f"{kind}-{name}" in quick else pytest.mark.slow)
        for kind, (name, site) in product(("trainjob", "jobset", "job"), sites.items())
        if kind == "trainjob" or name in ("full", "volcano")
    ]


@pytest.mark.parametrize(("kind", "site"), requests())
def test_manifests_are_valid_for_the_api_and_for_operators(kind: str, site: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    trees = documents(launch_request(*METRICS, kind=kind, **site))
    for tree in trees:
        if tree["apiVersion"] in CORE:
            kubernetes_validate.validate(tree, VERSION, strict=True)
        else:
            assert tree["kind"] in {*MODELS, *NO_MODELS}
    workload = workload_of(trees)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": workload.pod}
    kubernetes_validate.validate(pod, VERSION, strict=True)
    if workload.spec:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": workload.spec}
        kubernetes_validate.validate(job, VERSION, strict=True)
    survive_the_models_of_their_operators(trees, kind, own_runtime=kind == "trainjob" and not site.get("runtime"))


def survive_the_models_of_their_operators(trees: list[dict[str, Any]], kind: str, *, own_runtime: bool) -> None:
    """The models drop unknown fields without a word, so what comes out is compared with what went in."""
    models = pytest.importorskip("kubeflow_trainer_api.models")

    modelled = [each for each in trees if each["kind"] in MODELS]
    kinds = {
        "job": [],
        "jobset": ["JobSet"],
        "trainjob": ["TrainingRuntime", "TrainJob"] if own_runtime else ["TrainJob"],
    }
    assert [each["kind"] for each in modelled] == kinds[kind]
    for tree in modelled:
        model = getattr(models, MODELS[tree["kind"]]).from_dict(tree)
        assert json.loads(json.dumps(model.to_dict(), default=str)) == tree


def test_the_validation_would_notice_a_wrong_field() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    job = of_kind(documents(launch_request()), "Job")
    job["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "job"])
def test_pods_are_as_operators_expect_them(kind: str) -> None:
    request = launch_request(cluster="2x8xH100", kind=kind)
    trees = documents(request)
    workload = workload_of(trees)
    pod, (node,) = workload.pod, workload.pod["containers"]
    assert workload.pods == workload.spec["completions"] == 2
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > request.save_seconds
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert node["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert node["securityContext"]["readOnlyRootFilesystem"] is True
    assert not {"livenessProbe", "readinessProbe", "startupProbe"} & node.keys()
    assert node["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert node["resources"]["requests"]["nvidia.com/gpu"] == "8"
    kinds = {each["name"]: next(name for name in each if name != "name") for each in pod["volumes"]}
    assert kinds == {"runs": "persistentVolumeClaim", "launch": "configMap", "shm": "emptyDir", "tmp": "emptyDir"}
    assert of_kind(trees, "PodDisruptionBudget")["spec"]["minAvailable"] == 2
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    rules = workload.spec["podFailurePolicy"]["rules"]
    assert [(each["action"], each.get("onExitCodes", {}).get("values")) for each in rules] == [
        ("FailJob", [2, 93]),
        ("Ignore", None),
        ("Ignore", [75]),
    ]


def test_rdma_adds_one_capability_and_its_resource() -> None:
    workload = workload_of(documents(launch_request(cluster="2x8xH100", rdma="rdma/hca")))
    (node,) = workload.pod["containers"]
    assert node["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert node["resources"]["limits"]["rdma/hca"] == node["resources"]["requests"]["rdma/hca"] == "1"


def test_pods_get_the_recipe_and_the_plan_and_create_the_run_from_them() -> None:
    request = launch_request("train.steps=12")
    trees = documents(request)
    data = of_kind(trees, "ConfigMap")["data"]
    assert parse_recipe(data["recipe.yaml"], name="map") == request.recipe
    assert data["plan.json"] == dump_plan(request.plan)
    (node,) = workload_of(trees).pod["containers"]
    assert node["command"] == [
        "python", "-m", "trimaran.launch", "/runs/first", "--create-from=/etc/trimaran/launch",
        "--nodes=2", "--ranks-per-node=2", "--address=auto",
    ]  # fmt: skip
    places = {each["mountPath"]: each.get("subPath") for each in node["volumeMounts"] if each["name"] == "launch"}
    assert places == {f"/etc/trimaran/launch/{each}": each for each in ("recipe.yaml", "plan.json")}


def test_elastic_runs_have_pods_for_the_most_nodes_and_keep_the_fewest() -> None:
    trees = documents(launch_request("faults.ranks=[2, 8]"))
    workload = workload_of(trees)
    assert workload.pods == workload.spec["completions"] == 4
    assert "--min-nodes=1" in workload.pod["containers"][0]["command"]
    assert of_kind(trees, "PodDisruptionBudget")["spec"]["minAvailable"] == 1
    assert workload.spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}


def test_kueue_gets_a_label_and_a_suspended_job() -> None:
    for kind, name in (("trainjob", "TrainJob"), ("jobset", "JobSet"), ("job", "Job")):
        job = of_kind(documents(launch_request(kind=kind, queue="llm", topology="rack")), name)
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "llm"
        assert job["spec"]["suspend"] is True
    assert of_kind(documents(launch_request()), "Job")["spec"]["suspend"] is False


def test_volcano_gets_a_pod_group_of_all_pods() -> None:
    trees = documents(launch_request(kind="job", gang="volcano", queue="llm"))
    assert of_kind(trees, "PodGroup")["spec"] == {"minMember": 2, "queue": "llm"}
    template = of_kind(trees, "Job")["spec"]["template"]
    assert template["spec"]["schedulerName"] == "volcano"
    assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "first"
    runtime = of_kind(documents(launch_request(kind="trainjob", gang="volcano", queue="llm")), "TrainingRuntime")
    assert runtime["spec"]["podGroupPolicy"] == {"volcano": {}}


def test_metrics_are_scraped_only_if_the_run_serves_them() -> None:
    trees = documents(launch_request(*METRICS))
    monitor, policy = of_kind(trees, "PodMonitor"), of_kind(trees, "NetworkPolicy")
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    assert policy["spec"]["ingress"][1] == {"ports": [{"protocol": "TCP", "port": 9101}]}
    assert "PodMonitor" not in {each["kind"] for each in documents(launch_request())}


def test_a_claim_that_is_created_has_a_file_of_its_own() -> None:
    files = KubernetesTarget().render(launch_request(storage_class="fast", context="lab"))
    assert files.submit == [
        ["kubectl", "--context", "lab", "apply", "-f", name] for name in ("storage.yaml", "job.yaml")
    ]
    (claim,) = yaml.safe_load_all(files.files["storage.yaml"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert KubernetesTarget().render(launch_request()).submit == [["kubectl", "apply", "-f", "job.yaml"]]


def test_the_grace_period_follows_from_the_time_of_a_save() -> None:
    assert grace_seconds(launch_request()) > 2 * launch_request().save_seconds


def test_the_same_request_gives_the_same_files() -> None:
    assert KubernetesTarget().render(launch_request()) == KubernetesTarget().render(launch_request())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_reach_the_supervisor_as_they_are(name: str) -> None:
    trees = documents(launch_request(name=name, run_dir=f"/runs/{name}", env={"MARK": name}))
    workload = workload_of(trees)
    (node,) = workload.pod["containers"]
    environ = {"HF_TOKEN": "canary", "HOME": "/tmp"}
    assert [expand(word, environ) for word in node["command"]][3] == f"/runs/{name}"
    (mark,) = [each["value"] for each in node["env"] if each["name"] == "MARK"]
    assert expand(mark, environ) == name
    assert KubernetesSite.model_validate({"namespace": workload.name})  # a DNS label, whatever the name was


def test_no_secret_is_in_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary0123456789canary")
    monkeypatch.setenv("WANDB_API_KEY", "canary-key")
    for kind in ("trainjob", "jobset", "job"):
        text = "".join(KubernetesTarget().render(launch_request(kind=kind)).files.values())
        assert "canary" not in text
        assert "secretKeyRef" in text


def test_a_secret_in_the_site_file_is_refused() -> None:
    """By the name of the variable when the file is read, by its value when the manifest is checked."""
    with pytest.raises(UserError, match="L003") as refusal:
        site_section({"k8s": {"env": {"WANDB_API_KEY": "0123456789"}}}, "k8s", KubernetesSite, [], where="targets.yaml")
    request = launch_request(env={"LOGIN": "hf_0123456789012345678901"})
    errors = [each.error for each in KubernetesTarget().check(request, request.site) if each.error]
    assert [error.code for error in errors] == ["L054"]
    assert "0123456789" not in str(errors) + str(refusal.value)


def test_checks_name_what_is_missing() -> None:
    target = KubernetesTarget()

    def codes(request: LaunchRequest) -> list[str]:
        return [each.error.code for each in target.check(request, request.site) if each.error]

    assert codes(launch_request()) == []
    assert codes(launch_request(image="")) == ["L040"]
    assert codes(launch_request(run_dir="/elsewhere/first")) == ["L041"]
    assert codes(launch_request(image="trimaran:latest")) == ["L056"]
    assert codes(launch_request(image="registry.example:5000/llm/trimaran")) == ["L056"]
    assert codes(launch_request(image=f"registry/trimaran@sha256:{'0' * 64}")) == []
    assert codes(launch_request("telemetry.prometheus.port=9101")) == ["L058"]
    assert codes(launch_request(*METRICS)) == []


def test_a_dry_run_needs_an_image_and_paths_of_the_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "corpus.txt").write_text("some words " * 200)
    dry_run = ["launch", "--on", "kubernetes", "--dry-run", "--set", "cluster=2x8xH100", "--set", "data.source=text"]

    def refused(*more: str) -> list[str]:
        assert main([*dry_run, *more]) in (0, 2)
        return [line for line in capsys.readouterr().err.splitlines() if re.match(r"[LS]0\d\d:", line)]

    local, image = ("--set", "data.path=corpus.txt"), ("--site", "image=registry.example/x:1.0")
    path = "S054: data.path is a path of this machine, which the pods do not have"
    assert refused(*local) == ["L040: Kubernetes needs the container image of the pods", path]
    assert refused(*local, *image) == [path]
    assert refused(*local, "--no-check") == []
    assert main([*dry_run, *image, "--set", "data.path=/runs/corpus.txt"]) == 0
    assert "/runs/corpus.txt is on the volume of the nodes" in capsys.readouterr().err


def test_what_a_dry_run_says_about_paths_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    volume = tmp_path / "volume"
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
              "num_hidden_layers": 2, "num_attention_heads": 8}  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    dry_run = ["launch", "recipe.yaml", "--on", "k8s", "--dry-run", "--site", "image=registry.example/x:1.0",
               "--site", f"runs={volume}", "--set", "cluster=2x8xH100"]  # fmt: skip

    def launch(folder: str, *more: str) -> tuple[int, str]:
        sources = ", ".join(
            f"{{name: {name}, source: chat, path: {folder}{name}.jsonl}}" for name in ("first", "second")
        )
        Path("recipe.yaml").write_text(f"data: {{mixture: [{sources}]}}\n")
        return main([*dry_run, *more]), capsys.readouterr().err

    code, shown = launch("", "--set", "model.path=model")
    assert (code, shown.count("S054")) == (2, 3)
    assert f"fix:   put it on the volume trimaran-runs, mount that at {volume} here too" in shown
    assert f"name it as the pods see it: path: {volume}/first.jsonl in the recipe" in shown
    volume.mkdir()
    (tmp_path / "model").rename(volume / "model")
    code, shown = launch(f"{volume}/", "--set", f"model.path={volume}/model")
    assert (code, f"{volume}/second.jsonl are on the volume of the nodes: the data is not checked" in shown) == (
        0,
        True,
    )


def test_near_names_of_targets_are_understood_or_suggested() -> None:
    assert [open_target(name).name for name in ("Kubernetes", "K8S", "SLURM")] == ["k8s", "k8s", "slurm"]
    with pytest.raises(UserError, match="did you mean 'k8s'"):
        open_target("docker")
    with pytest.raises(UserError, match="did you mean 'slurm'"):
        open_target("slrum")


def test_the_target_is_found_by_name_and_its_section_is_checked() -> None:
    target: Target = open_target("k8s")
    site = site_section({"k8s": {"image": "x:1", "node_selector": {"gpu": "h100"}}}, "k8s", target.site_model,
                        ["kind=job", "volume_claim=scratch"], where="targets.yaml")  # fmt: skip
    assert (site.kind, site.volume_claim, site.image) == ("job", "scratch", "x:1")
    with pytest.raises(UserError, match="kinds"):
        site_section({"k8s": {"kinds": "job"}}, "k8s", target.site_model, [], where="targets.yaml")
    assert all(field.description for field in target.site_model.model_fields.values())


def test_hostile_fields_of_the_site_are_refused() -> None:
    for field, value in (
        ("volume_claim", "a/b"),
        ("namespace", "A b"),
        ("shm", "16 GB"),
        ("env", {"A=B": "x"}),
        ("queue", "A"),
        ("user", 0),
    ):
        with pytest.raises(UserError) as caught:
            site_section({"k8s": {field: value}}, "k8s", KubernetesSite, [], where="targets.yaml")
        assert field in caught.value.what


def test_a_runtime_of_the_site_is_patched_where_the_api_allows_it() -> None:
    (tree,) = [each for each in documents(launch_request(kind="trainjob", runtime="torch-distributed"))
               if each["kind"] == "TrainJob"]  # fmt: skip
    assert tree["spec"]["runtimeRef"] == {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    (patch,) = tree["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == "node"
    assert {"volumes", "securityContext", "terminationGracePeriodSeconds"} <= pod.keys()
    assert Path(tree["spec"]["trainer"]["command"][3]) == Path("/runs/first")


@pytest.mark.parametrize("site", [{"gang": "none", "queue": "a"}, {"gang": "kueue"}, {"topology": "rack"}])
def test_a_queue_that_nothing_uses_is_refused(site: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="L003"):
        site_section({"k8s": site}, "k8s", KubernetesSite, [], where="targets.yaml")


def test_the_guide_has_every_field_with_its_default_and_meaning() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "kubernetes.md").read_text()
    rows = {
        name: (default, meaning)
        for name, default, meaning in re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*) \|$", guide, re.M)
    }
    defaults = KubernetesSite().model_dump(mode="json")
    assert {name: yaml.safe_load(default) for name, (default, _) in rows.items()} == defaults
    assert {name: meaning for name, (_, meaning) in rows.items()} == {
        name: field.description for name, field in KubernetesSite.model_fields.items()
    }


@pytest.mark.parametrize("text", ["", "a: [", "just text", "\x00", "- 1\n", "!!python/object:os.system x"])
def test_launch_files_that_were_damaged_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError, match="L044"):
        KubernetesTarget().submit(launch_request(), tmp_path)


def test_launch_files_that_are_gone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="L044"):
        KubernetesTarget().submit(launch_request(), tmp_path)
