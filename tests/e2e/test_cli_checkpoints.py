"""The commands around checkpoints, as typed."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoints import UnsyncedDisk, save_checkpoint, tensors_of
from tests.disks import mounted, remount
from tests.unit.test_checkpoint_export import network_of, state_of
from tests.unit.test_checkpoint_export import save as save_tensors
from trimaran.app import main
from trimaran.checkpoint import DiskSource, checkpoint_list, complete_steps, read_full_tensor, refuse, step_path
from trimaran.core import Mesh, Plan, parse_recipe
from trimaran.models import ModelSpec
from trimaran.nets import decoder_network, load_hf_weights
from trimaran.runs import RunDirectory, create_run, take_lease

SMALL = [
    "model.shape={layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 48}",
    "train.steps=12",
    "checkpoint.keep_every=0",
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    recipe = parse_recipe("name: small", name="test", overrides=SMALL)
    return create_run(tmp_path / "run", recipe, Plan(mesh=Mesh(dp_shard=2), micro_batch=2))


@pytest.fixture
def saved_run(run: RunDirectory) -> RunDirectory:
    """A run with the checkpoints of steps 2, 4 and 6, which share their frozen files."""
    previous = None
    for step in (2, 4, 6):
        save_checkpoint(run.checkpoints, step, previous=previous)
        previous = step_path(run.checkpoints, step)
    return run


@pytest.fixture
def trained(run: RunDirectory) -> RunDirectory:
    """A run with a checkpoint of its real model after seven steps."""
    save_tensors(run.checkpoints, state_of(network_of(run.read_recipe()).module))
    return run


def json_output(capsys: Any, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def damage(path: Path) -> None:
    """Flip a bit in the middle of the first file of tensors."""
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_checkpoints_and_checkpoints_list_show_the_same(saved_run: RunDirectory, capsys: Any) -> None:
    short = json_output(capsys, "checkpoints", str(saved_run.path))
    assert short == json_output(capsys, "checkpoints", "list", str(saved_run.path))
    rows = short["checkpoints"]
    assert [(row["step"], row["status"], row["world_size"]) for row in rows] == [(2, "complete", 2), (4, "complete", 2),
                                                                                (6, "complete", 2)]  # fmt: skip
    assert rows[0]["written_bytes"] == rows[0]["bytes"]
    assert rows[1]["written_bytes"] < rows[1]["bytes"]


def test_the_list_says_what_is_wrong(saved_run: RunDirectory, capsys: Any) -> None:
    folder = saved_run.checkpoints
    refuse(step_path(folder, 2), "rank-00001.safetensors is missing\x1b[2J", UnsyncedDisk())
    (step_path(folder, 4) / "rank-00000.safetensors").write_bytes(b"")
    step_path(folder, 8).symlink_to(step_path(folder, 6))
    (folder / "step-00000009").mkdir()
    (folder / ".step-00000010.abc.draft").mkdir()
    (folder / "step-00000011\x1b[2J").mkdir()
    assert main(["checkpoints", str(saved_run.path)]) == 0
    shown = capsys.readouterr().out
    for line in (
        "step 2 is refused: rank-00001.safetensors is missing",
        "step 4 is damaged: rank-00000.safetensors has 0 bytes instead of ",
        "step 8 is damaged: this checkpoint is damaged: step-00000008 is a link",
        "step 9 is damaged: there is no checkpoint here: manifest.json is missing",
        "1 unfinished: ",
    ):
        assert f"\n{line}" in shown
    assert "step 6 is" not in shown
    assert "\x1b" not in shown


def test_a_run_without_checkpoints_says_so(run: RunDirectory, capsys: Any) -> None:
    assert json_output(capsys, "checkpoints", str(run.path))["checkpoints"] == []
    assert json_output(capsys, "checkpoints", "verify", str(run.path), code=2)["error"]["code"] == "K028"
    assert json_output(capsys, "export", str(run.path), code=2)["error"]["code"] == "K028"


def test_verify_reads_every_byte(saved_run: RunDirectory, capsys: Any) -> None:
    intact = json_output(capsys, "checkpoints", "verify", str(saved_run.path))
    assert [each["damages"] for each in intact["checkpoints"]] == [[], [], []]
    damage(step_path(saved_run.checkpoints, 4))
    found = json_output(capsys, "checkpoints", "verify", str(saved_run.path), code=1)
    assert [bool(each["damages"]) for each in found["checkpoints"]] == [False, True, False]
    assert "rank-00000.safetensors" in found["checkpoints"][1]["damages"][0]
    assert json_output(capsys, "checkpoints", "verify", str(saved_run.path), "6")["checkpoints"][0]["damages"] == []
    assert json_output(capsys, "checkpoints", "verify", str(saved_run.path), "5", code=2)["error"]["code"] == "K028"
    (step_path(saved_run.checkpoints, 6) / "payload.pkl").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    (found,) = json_output(capsys, "checkpoints", "verify", str(saved_run.path), "6", code=1)["checkpoints"]
    assert found["damages"] == ["payload.pkl does not belong here"]


def test_verify_names_a_checkpoint_without_a_manifest(saved_run: RunDirectory, capsys: Any) -> None:
    (step_path(saved_run.checkpoints, 6) / "manifest.json").unlink()
    found = json_output(capsys, "checkpoints", "verify", str(saved_run.path), code=1)["checkpoints"]
    assert [(each["step"], bool(each["damages"])) for each in found] == [(2, False), (4, False), (6, True)]
    assert "manifest.json is missing" in found[-1]["damages"][0]
    (found,) = json_output(capsys, "checkpoints", "verify", str(saved_run.path), "6", code=1)["checkpoints"]
    assert found["damages"]


def test_compare_names_what_differs(saved_run: RunDirectory, capsys: Any) -> None:
    answer = json_output(capsys, "checkpoints", "compare", str(saved_run.path), "2", "4")
    assert (answer["tensors"], answer["identical"]) == (7, 2)
    by_key = {each["key"]: each for each in answer["differences"]}
    assert by_key["optimizer/step/weight"]["largest"] == 2.0
    assert json_output(capsys, "checkpoints", "compare", str(saved_run.path), "4", "4")["differences"] == []
    assert main(["checkpoints", "compare", str(saved_run.path), "2", "4"]) == 0
    assert "optimizer/step/weight: 1 of 1 values differ, at most by 2\n" in capsys.readouterr().out


def test_prune_keeps_the_newest_intact_checkpoint(saved_run: RunDirectory, capsys: Any) -> None:
    arguments = ["checkpoints", "prune", str(saved_run.path), "--keep", "1"]
    assert json_output(capsys, *arguments, "--dry-run")["deleted"] == [2, 4]
    assert complete_steps(saved_run.checkpoints) == [2, 4, 6]
    damage(step_path(saved_run.checkpoints, 6))
    assert json_output(capsys, *arguments) == {"deleted": [2], "kept": [4, 6], "verified": 4, "dry_run": False}
    assert complete_steps(saved_run.checkpoints) == [4, 6]
    damage(step_path(saved_run.checkpoints, 4))
    assert json_output(capsys, *arguments, code=2)["error"]["code"] == "K028"
    assert complete_steps(saved_run.checkpoints) == [4, 6]


def test_a_running_run_is_not_pruned_from_outside(saved_run: RunDirectory, capsys: Any) -> None:
    with take_lease(saved_run):
        assert json_output(capsys, "checkpoints", "prune", str(saved_run.path), "--keep", "1", code=2)["error"]
    assert complete_steps(saved_run.checkpoints) == [2, 4, 6]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        yield disk


def test_a_full_disk_can_be_pruned_and_a_read_only_disk_is_reported(
    saved_run: RunDirectory, small_disk: Path, capsys: Any
) -> None:
    run = RunDirectory(Path(shutil.copytree(saved_run.path, small_disk / "run", symlinks=True)))
    remount(small_disk, "ro")
    for arguments in (["checkpoints", "prune", str(run.path), "--keep", "1"], ["resume", str(run.path)]):
        error = json_output(capsys, *arguments, code=2)["error"]
        assert (error["code"], "Read-only" in error["what"]) == ("D003", True)
    remount(small_disk, "rw")
    with pytest.raises(OSError, match="No space"):
        (small_disk / "rest").write_bytes(bytes(2 << 20))
    assert json_output(capsys, "checkpoints", "prune", str(run.path), "--keep", "1")["deleted"] == [2, 4]


def test_a_checkpoint_that_is_pruned_while_it_is_read_is_replaced_by_a_newer_one(
    saved_run: RunDirectory,
) -> None:
    seen: list[str] = []

    def use(path: Path) -> int:
        seen.append(path.name)
        if len(seen) == 1:
            save_checkpoint(saved_run.checkpoints, 8)
            shutil.rmtree(path)
        return len(checkpoint_list.verify_all(path, lambda _: None))

    path, damages = checkpoint_list.with_step(saved_run.checkpoints, None, use, where="here")
    assert (seen, path.name, damages) == (["step-00000006", "step-00000008"], "step-00000008", 0)


def test_a_checkpoint_that_is_pruned_while_it_is_verified_is_not_damaged(saved_run: RunDirectory) -> None:
    pruned, kept = (step_path(saved_run.checkpoints, step) for step in (4, 6))
    assert checkpoint_list.verify_present(pruned, lambda _: shutil.rmtree(pruned, ignore_errors=True)) is None
    assert checkpoint_list.verify_present(pruned, lambda _: None) is None
    assert checkpoint_list.verify_present(kept, lambda _: None) == []


def test_a_new_run_for_an_import_needs_a_recipe(trained: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    arguments = ["checkpoints", "import", str(tmp_path / "dcp"), "--run-dir", str(tmp_path / "new")]
    error = json_output(capsys, *arguments, code=2)["error"]
    assert (error["code"], "--recipe" in error["fix"]) == ("A001", True)


def test_an_exported_folder_can_be_trained_further(trained: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    answer = json_output(capsys, "export", str(trained.path))
    folder = Path(answer["path"])
    assert answer["step"] == 7
    assert {"config.json", "model.safetensors", "trimaran-tokenizer.json"} <= {each.name for each in folder.iterdir()}
    assert main(["plan", "--set", f"model.path={folder}", "--json"]) == 0
    network = network_of(trained.read_recipe())
    assert isinstance(network.spec, ModelSpec)
    again = decoder_network(network.spec)
    load_hf_weights(again.module, folder)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again.forward({"tokens": tokens})[0], network.forward({"tokens": tokens})[0])
    capsys.readouterr()
    assert json_output(capsys, "export", str(trained.path), code=2)["error"]["code"] == "K024"


def test_a_damaged_checkpoint_is_not_exported(trained: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    damage(step_path(trained.checkpoints, 7))
    error = json_output(capsys, "export", str(trained.path), "--out", str(tmp_path / "out"), code=2)["error"]
    assert error["code"] == "K007"
    assert not (tmp_path / "out").exists()


def test_a_dcp_export_can_be_imported_into_a_new_run(trained: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    out, new = tmp_path / "dcp", tmp_path / "new"
    json_output(capsys, "export", str(trained.path), "--to", "dcp", "--out", str(out))
    settings = [argument for each in SMALL for argument in ("--set", each)]
    answer = json_output(
        capsys, "checkpoints", "import", str(out), "--run-dir", str(new), *settings, "--set", "cluster=1xcpu"
    )
    assert (answer["step"], answer["with_moments"]) == (7, True)
    ours, theirs = DiskSource(Path(answer["path"])), DiskSource(step_path(trained.checkpoints, 7))
    assert ours.index.keys() == theirs.index.keys()
    assert all(torch.equal(read_full_tensor(ours, key), read_full_tensor(theirs, key)) for key in ours.index)
    assert RunDirectory(new).read_recipe().train.steps == 12
    arguments = ["checkpoints", "import", str(out), "--run-dir", str(new)]
    assert json_output(capsys, *arguments, code=2)["error"]["code"] == "K029"
    assert json_output(capsys, *arguments, "--step", "9")["step"] == 9
    assert json_output(capsys, *arguments, "--set", "train.steps=3", code=2)["error"]["code"] == "A001"


def test_exports_and_imports_contain_nothing_of_the_environment(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_of_a_secret")
    out = tmp_path / "dcp"
    json_output(capsys, "export", str(trained.path))
    json_output(capsys, "export", str(trained.path), "--to", "dcp", "--out", str(out))
    json_output(capsys, "checkpoints", "import", str(out), "--run-dir", str(trained.path), "--step", "8")
    for file in (each for each in tmp_path.rglob("*") if each.is_file()):
        assert b"hf_canary_of_a_secret" not in file.read_bytes()


class Touch:
    def __reduce__(self) -> Any:
        return os.system, ("touch canary",)


def test_an_import_executes_nothing_in_the_folder(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    weights = dict(network_of(trained.read_recipe()).module.named_parameters())
    dcp.save({"model": weights, "note": Touch()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    monkeypatch.chdir(tmp_path)
    answer = json_output(capsys, "checkpoints", "import", "dcp", "--run-dir", str(trained.path), "--step", "8")
    assert answer["passed_over"] == ["note"]
    assert not Path("canary").exists()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    error = json_output(capsys, "checkpoints", "import", "dcp", "--run-dir", str(trained.path), "--step", "9", code=2)[
        "error"
    ]
    assert error["code"] == "K021"
    assert not Path("canary").exists()


def test_the_ten_lines_of_the_guide_read_a_checkpoint(saved_run: RunDirectory) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md").read_text()
    lines = guide.partition("```python\n")[2].partition("```")[0]
    path = step_path(saved_run.checkpoints, 6)
    names: dict[str, Any] = {}
    exec(lines.replace("runs/a/checkpoints/step-00000040", str(path)), names)
    assert names["tensors"].keys() == tensors_of(6).keys()
    assert all(torch.equal(names["tensors"][key], each) for key, each in tensors_of(6).items())
