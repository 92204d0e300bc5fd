"""What all launch targets share: names, the site file, the record of jobs, and the command of a node."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from trimaran.core import Mesh, Plan, Recipe, UserError
from trimaran.launch import (
    TARGET_CLASSES,
    LaunchRequest,
    find_record,
    job_name,
    new_record,
    node_command,
    open_target,
    read_records,
    read_site_file,
    site_path,
    site_section,
    write_record,
)
from trimaran.machine import parse_cluster

HOSTILE = ("$(touch x)", "a b", "'; rm -rf / #", "a\nb", "日本語", "-oProxyCommand=x", "../../etc", "")


class SiteSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: str = ""
    modules: tuple[str, ...] = ()


def request(cluster: str = "2x2xcpu", **fields: object) -> LaunchRequest:
    recipe = Recipe.model_validate({"cluster": cluster, "train": {"global_batch": 8}} | fields)
    plan = Plan(mesh=Mesh(dp_replicate=4), micro_batch=2)
    return LaunchRequest(name="tiny", run_dir=Path("/shared/runs/tiny"), recipe=recipe, plan=plan,
                         cluster=parse_cluster(cluster), site=SiteSection())  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_the_name_of_a_job_is_a_dns_label_whatever_the_run_is_called(name: str) -> None:
    label = job_name(name)
    assert label.isascii()
    assert label[0].isalpha()
    assert len(label) <= 40
    assert all(each.islower() or each.isdigit() or each == "-" for each in label)
    assert not label.endswith("-")


@pytest.mark.parametrize("name", TARGET_CLASSES)
def test_every_target_opens_without_its_optional_packages(name: str) -> None:
    target = open_target(name)
    assert target.name == name
    assert isinstance(target.shares_disk, bool)
    assert all(field.description for field in target.site_model.model_fields.values())
    target.site_model()  # every field has a default


def test_an_unknown_target_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'slurm'"):
        open_target("slrum")


def test_the_command_of_a_node_is_the_same_on_every_node_and_allows_the_ranks_of_the_recipe() -> None:
    command = node_command(request(), python="python3")
    assert command == ["python3", "-m", "trimaran.launch", "/shared/runs/tiny", "--nodes=2", "--ranks-per-node=2",
                       "--address=auto"]  # fmt: skip
    elastic = request(faults={"ranks": [2, 8]})
    assert (elastic.min_nodes, elastic.max_nodes) == (1, 4)
    assert "--min-nodes=1" in node_command(elastic, python="python3")
    assert {"--nodes=4", "--start-nodes=2"} <= set(node_command(elastic, python="python3"))
    assert "--start-nodes" not in " ".join(node_command(elastic, python="python3", nodes=2)), "no more can join"
    alone = node_command(request("2xcpu"), python="python3", launch_folder="/etc/launch")
    assert alone == ["python3", "-m", "trimaran.launch", "/shared/runs/tiny", "--create-from=/etc/launch"]


def test_the_site_file_gives_defaults_and_the_command_line_is_on_top(tmp_path: Path) -> None:
    path = site_path({"XDG_CONFIG_HOME": str(tmp_path)})
    assert read_site_file(path) == {}
    path.parent.mkdir()
    path.write_text("slurm: {partition: gpu, modules: [cuda]}\n")
    tree = read_site_file(path)
    section = site_section(tree, "slurm", SiteSection, ["partition=big"], where=str(path))
    assert section == SiteSection(partition="big", modules=("cuda",))
    assert site_section(tree, "ssh", SiteSection, ["modules=[a, b]"], where=str(path)).modules == ("a", "b")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("slurm: {partitoin: gpu}", "did you mean 'partition'"),
        ("slrum: {}", "did you mean 'slurm'"),
        ("slurm: [1]", "not a mapping"),
        ("- 1", "not a mapping"),
        ("slurm: {partition: !!python/object:os.system x}", "not YAML"),
        ("a: &a [*a]", "alias"),
    ],
)
def test_a_mistake_in_the_site_file_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=what) as raised:
        site_section(read_site_file(path), "slurm", SiteSection, [], where=str(path))
    assert raised.value.code == "L003"
    assert str(path) in raised.value.where


@pytest.mark.parametrize("setting", ["partition", "partitoin=gpu"])
def test_a_wrong_setting_lists_the_fields(setting: str) -> None:
    with pytest.raises(UserError, match="partition") as raised:
        site_section({}, "slurm", SiteSection, [setting], where="")
    assert raised.value.code == "L004"


def test_jobs_are_found_by_id_name_or_run_and_the_newest_comes_first(tmp_path: Path) -> None:
    jobs = [new_record(request(), "slurm", tmp_path, str(number), {"partition": "gpu"}) for number in (1, 2)]
    jobs[1] = replace(jobs[1], submitted=jobs[0].submitted + 1)
    for job in jobs:
        write_record(job, tmp_path / "jobs")
    assert read_records(tmp_path / "jobs") == [jobs[1], jobs[0]]
    assert find_record(tmp_path / "jobs", "slurm-1") == jobs[0]
    for wanted in ("2", "tiny", "/shared/runs/tiny"):
        assert find_record(tmp_path / "jobs", wanted) == jobs[1]
    with pytest.raises(UserError, match="did you mean 'slurm-1'") as raised:
        find_record(tmp_path / "jobs", "slrm-1")
    assert raised.value.code == "L002"


def test_damaged_records_and_other_files_are_left_out(tmp_path: Path) -> None:
    job = new_record(request(), "ray", tmp_path, "raysubmit_../x", {})
    assert "/" not in job.id
    write_record(job, tmp_path)
    (tmp_path / "other.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "slurm-3.json").write_text(json.dumps({"id": "slurm-3"}))
    assert read_records(tmp_path) == [job]
    assert read_records(tmp_path / "missing") == []
