"""The files that the targets ray and sky write, and their checks before anything is submitted."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from trimaran.app import write_files
from trimaran.core import UserError, parse_recipe
from trimaran.launch import LaunchRequest, RaySection, RayTarget, SkySection, SkyTarget, new_record, site_section
from trimaran.launch.targets import ray_target as ray_module
from trimaran.launch.targets import sky_target as sky_module
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import choose

HOSTILE = ["it's", 'a "b" c', "$(touch x)", "`touch x`", "a\nb", "größe 模型", "-rf", "a;b&c|d", "{{x}} %s ${HOME}"]
SECRET = "canary-91c2"


def request(
    section: RaySection | SkySection, *settings: str, run_dir: str = "/runs/toy", run_exists: bool = True
) -> LaunchRequest:
    recipe = parse_recipe("", name="test", overrides=["cluster=2x2xcpu", "model.preset=tiny", *settings])
    cluster = parse_cluster(recipe.cluster)
    return LaunchRequest(
        name="toy",
        run_dir=Path(run_dir),
        recipe=recipe,
        plan=choose(recipe, spec_of(recipe.model), cluster),
        cluster=cluster,
        site=section,
        run_exists=run_exists,
        secrets=("HF_TOKEN",),
    )


def codes(target: RayTarget | SkyTarget, asked: LaunchRequest | None, section: RaySection | SkySection) -> list[str]:
    return [each.error.code for each in target.check(asked, section) if each.error]


def test_a_ray_job_says_what_runs_on_each_node_and_the_script_is_ours() -> None:
    section = RaySection(address="http://head:8265", resources={"rack": 1})
    files = RayTarget().render(request(section, "faults.ranks=[2, 8]"))
    job = json.loads(files.files["job.json"])
    assert (job["nodes"], job["min_nodes"], job["max_nodes"]) == (2, 1, 4)
    assert job["resources_per_node"] == {"CPU": 2, "rack": 1}
    assert job["environment"] == {"OMP_NUM_THREADS": "1"}, "Ray would give each rank the threads of the whole node"
    assert job["arguments"][:3] == ["-m", "trimaran.launch", "/runs/toy"]
    assert files.files["ray_job.py"] == Path(ray_module.__file__).with_name("ray_job.py").read_text()
    (command,) = files.submit
    assert command[:4] == ["ray", "job", "submit", "--address=http://head:8265"]
    assert command[-4:] == ["--", "python", "ray_job.py", "job.json"]
    stop = json.loads(next(word for word in command if "runtime-env" in word).partition("=")[2])
    assert int(stop["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > job["stop_seconds"], "Ray kills after three seconds"


def test_a_ray_job_on_gpus_reserves_them_and_creates_the_run_from_its_folder() -> None:
    files = RayTarget().render(request(RaySection(), "cluster=2x8xH100", run_exists=False))
    job = json.loads(files.files["job.json"])
    assert job["resources_per_node"] == {"CPU": 8, "GPU": 8}
    assert "--create-from=." in job["arguments"]


def test_nodes_of_a_local_ray_cluster_have_addresses_of_their_own() -> None:
    job = json.loads(RayTarget().render(request(RaySection(address="local"))).files["job.json"])
    assert job["node_addresses"] == ["127.0.0.2", "127.0.0.3"]
    (command,) = RayTarget().render(request(RaySection(address="local"))).submit
    assert command[:2] == ["env", "RAY_AUTH_MODE=token"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_reach_the_supervisor_as_they_are(name: str, tmp_path: Path) -> None:
    folder = f"/runs/{name}"
    job = json.loads(RayTarget().render(request(RaySection(), run_dir=folder)).files["job.json"])
    assert job["arguments"][2] == folder
    asked = request(SkySection(bucket="s3://b", environment={"A": name}), run_dir=f"{tmp_path}/{name}")
    files = SkyTarget().render(asked)
    assert yaml.safe_load(files.files["job.yaml"])["envs"] == {"A": name}
    words = _words_of_the_supervisor(files.files["node.sh"], tmp_path)
    assert words[:3] == ["-m", "trimaran.launch", f"{tmp_path}/{name}"]
    assert not (tmp_path / "x").exists()


def _words_of_the_supervisor(script: str, folder: Path) -> list[str]:
    """Return the arguments that a node's script gives to Python, which is replaced by a script that prints them."""
    for name, text in (("python", f'#!/bin/sh\nprintf "%s\\0" "$@" > {shlex.quote(str(folder))}/words\n'),
                       ("node.sh", script.replace(sky_module.BUCKET_PATH, f"{folder}/bucket"))):  # fmt: skip
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    ours = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    subprocess.run(["bash", "node.sh"], cwd=folder, env=os.environ | ours, check=True, timeout=60)
    return (folder / "words").read_bytes().decode().split("\0")[:-1]


def test_secrets_are_passed_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for target, section in ((RayTarget(), RaySection()), (SkyTarget(), SkySection(bucket="s3://b"))):
        files = target.render(request(section))
        assert SECRET not in json.dumps([dict(files.files), [*map(list, files.submit)]])
        assert files == target.render(request(section)), "the same request gives the same files"
    assert list(SkyTarget().render(request(SkySection())).submit[0][5:7]) == ["--secret", "HF_TOKEN"]


def test_a_ray_launch_is_refused_without_the_package_or_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert codes(RayTarget(), None, RaySection()) == ["L060"]
    installed: Any = module_from_spec(ModuleSpec("ray", loader=None))
    installed.__version__ = "0"
    monkeypatch.setitem(sys.modules, "ray", installed)
    assert codes(RayTarget(), None, RaySection()) == ["L061"]
    gpus = request(RaySection(address="local"), "cluster=2x8xH100")
    assert codes(RayTarget(), gpus, gpus.site) == ["L061"]
    assert codes(RayTarget(), request(RaySection(address="local")), RaySection(address="local")) == []


def test_a_sky_job_names_its_resources_and_keeps_the_run_in_a_bucket() -> None:
    section = SkySection(bucket="s3://kept", infra="aws", use_spot=True)
    files = SkyTarget().render(request(section, "cluster=2x8xH100"))
    task = yaml.safe_load(files.files["job.yaml"])
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("toy", 2, ".")
    assert task["resources"] == {
        "infra": "aws",
        "accelerators": "H100:8",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]},
    }
    assert task["file_mounts"] == {"/trimaran-bucket": {"source": "s3://kept", "mode": "MOUNT_CACHED"}}
    assert "--own-disk" in files.files["node.sh"]
    assert "TRIMARAN_RUN_TOKEN" in files.submit[0]
    shared = SkyTarget().render(request(SkySection(volume="disk"), "cluster=2x8xH100"))
    assert yaml.safe_load(shared.files["job.yaml"])["volumes"] == {"/tmp/trimaran-runs": "disk"}
    assert "--own-disk" not in shared.files["node.sh"]


def test_a_sky_launch_needs_the_tool_a_storage_and_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert codes(SkyTarget(), request(SkySection()), SkySection()) == ["L070", "L072", "L073"]
    asked = SkySection(bucket="s3://b", setup="pip install ./trimaran.whl")
    assert codes(SkyTarget(), request(asked), asked) == ["L070"]
    task = yaml.safe_load(SkyTarget().render(request(SkySection())).files["job.yaml"])
    assert "setup" not in task  # no package of an index is installed unless somebody names it


def test_a_rule_about_two_fields_of_the_site_file_is_named() -> None:
    with pytest.raises(UserError, match="name a volume or a bucket, not both") as refusal:
        site_section({"sky": {"volume": "a", "bucket": "s3://b"}}, "sky", SkySection, [], where="targets.yaml")
    assert (refusal.value.code, refusal.value.where) == ("L003", "sky in targets.yaml")


def test_launch_files_that_cannot_be_written_are_an_error_of_the_user() -> None:
    asked = request(SkySection())
    with pytest.raises(UserError, match="cannot be written: No such file") as refusal:
        write_files(SkyTarget().render(asked), asked, Path("/proc/job"))
    assert refusal.value.code == "L008"


def test_what_sky_prints_becomes_the_job_and_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = json.dumps([{"job_id": 7, "status": "RECOVERING", "failure_reason": None}, {"job_id": 8, "status": "X"}])
    tool = tmp_path / "sky"
    tool.write_text(
        f'#!/bin/sh\nenv | grep TOKEN > {tmp_path}/env; printf "%s\\n" "$@" >> {tmp_path}/words\n'
        f"case $2 in launch) echo 'Managed Job ID: 7';; queue) echo '{queue}';; *) exit 1;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    target, asked = SkyTarget(), request(SkySection(bucket="s3://b"))
    native_id, details = target.submit(asked, tmp_path)
    token = (tmp_path / "env").read_text().partition("TRIMARAN_RUN_TOKEN=")[2].strip()
    assert len(token) > 30
    assert token not in (tmp_path / "words").read_text() + json.dumps(details)
    job = new_record(asked, "sky", tmp_path, native_id, details)
    assert (job.native_id, target.state(job).state, target.state(job).native) == ("7", "running", "RECOVERING")
    with pytest.raises(UserError, match="sky jobs cancel"):
        target.stop(job)


@pytest.mark.parametrize(("guide", "model"), [("ray", RaySection), ("skypilot", SkySection)])
def test_a_guide_has_every_field_with_its_default(guide: str, model: type[RaySection | SkySection]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / f"{guide}.md").read_text()
    for name, field in model.model_fields.items():
        assert f"| `{name}` | `{field.get_default(call_default_factory=True)!r}` |" in text


@pytest.mark.slow  # SkyPilot takes seconds to import
@pytest.mark.skipif(not shutil.which("sky"), reason="SkyPilot is not installed")
@pytest.mark.parametrize("cluster", ["2x2xcpu", "2x8xH100"])
@pytest.mark.parametrize("storage", [{"bucket": "s3://kept"}, {"volume": "disk"}])
def test_skypilot_reads_the_job_file(cluster: str, storage: dict[str, str], tmp_path: Path) -> None:
    section = SkySection(use_spot=True, environment={"A": "it's"}, **storage)
    files = SkyTarget().render(request(section, f"cluster={cluster}"))
    for name, text in files.files.items():
        (tmp_path / name).write_text(text)
    program = """if True:
        import json, sys, yaml, sky
        from sky.utils import common_utils, schemas
        tree = yaml.safe_load(open('job.yaml'))
        common_utils.validate_schema(tree, schemas.get_task_schema(), 'no task: ')
        common_utils.validate_schema(tree['resources'], schemas.get_resources_schema(), 'no resources: ')
        tree.pop('file_mounts', None), tree.pop('volumes', None)  # these ask the cloud
        task = sky.Task.from_yaml_config(tree)
        resources = list(task.resources)[0]
        print(json.dumps([task.name, task.num_nodes, task.envs, resources.accelerators, resources.cpus]))
    """
    python = str(Path(shutil.which("sky") or "").resolve().with_name("python"))
    done = subprocess.run([python, "-c", program], cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    accelerators, cpus = ({"H100": 8}, None) if "H100" in cluster else (None, "2+")
    assert json.loads(done.stdout.splitlines()[-1]) == ["toy", 2, {"A": "it's"}, accelerators, cpus]
