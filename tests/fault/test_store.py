"""Runs with an object store: lost disks, damaged objects, killed uploads, a store that is gone, a real S3 server."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.fault.harness import Supervised, lines, wait_for
from tests.s3_server import CREDENTIALS, NEEDS_S3, s3_server
from trimaran.app import main
from trimaran.checkpoint import ObjectStore, complete_steps, open_store
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos
SETTINGS = ("train.steps=20", "checkpoint.every=5", "train.deterministic=true")


def completed(store: ObjectStore) -> list[int]:
    return [each.step for each in store.steps() if each.complete]


def run_to_end(path: Path, *settings: str, pause: float = 0.0) -> RunDirectory:
    with Supervised.start(path, *SETTINGS, *settings, pause=pause) as run:
        assert run.process.wait(120) == 0, run.run.agent_log.read_text()
    return RunDirectory(path)


def resume_to_end(run: RunDirectory) -> list[dict[str, object]]:
    """Resume a run to its end, and return the data of its `resume` events."""
    with Supervised.again(run) as again:
        assert again.process.wait(120) == 0, run.agent_log.read_text()
    return [each["data"] for each in lines(run.events(0)) if each["kind"] == "resume"]


def assert_equal_weights(one: RunDirectory, other: RunDirectory) -> None:
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def stop_at(path: Path, step: int, *settings: str) -> RunDirectory:
    with Supervised.start(path, *SETTINGS, *settings, pause=0.1) as run:
        run.wait_for_step(step)
        run.process.terminate()
        assert run.process.wait(60) == 75, run.run.agent_log.read_text()
    return RunDirectory(path)


def test_a_run_directory_that_lost_its_checkpoints_continues_bit_equal_and_damage_is_passed_over(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}/store")
    stopped = stop_at(tmp_path / "run", 12, f"checkpoint.store={store.url}")
    uploaded = completed(store)
    assert max(uploaded) == max(complete_steps(stopped.checkpoints)), "a run that stops waits for the upload"
    shutil.rmtree(stopped.checkpoints)
    newest = tmp_path / "store" / store.steps()[-1].name / "rank-00001.safetensors"
    data = newest.read_bytes()
    newest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (resumed,) = resume_to_end(stopped)
    assert (resumed["tier"], resumed["from_step"]) == ("store", uploaded[-2])
    (refused,) = resumed["refused"]  # pyrefly: ignore[not-iterable]
    assert (refused["tier"], refused["step"]) == ("store", uploaded[-1])
    assert "checksum is wrong" in refused["why"]
    assert_equal_weights(stopped, run_to_end(tmp_path / "undisturbed"))
    assert completed(store)[-1] == 20
    assert store.verify(store.steps()[-1].name) == []


def test_a_damaged_file_on_the_disk_is_replaced_from_the_store(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    stopped = stop_at(tmp_path / "run", 8, f"checkpoint.store={store.url}")
    step = max(complete_steps(stopped.checkpoints))
    (stopped.checkpoints / f"step-{step:08d}" / "rank-00000.safetensors").write_bytes(b"damaged")
    (resumed,) = resume_to_end(stopped)
    assert (resumed["tier"], resumed["from_step"]) == ("store", step)
    assert (stopped.checkpoints / f"refused-step-{step:08d}").is_dir()


def test_a_run_killed_during_an_upload_leaves_complete_checkpoints_and_completes_the_upload_later(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}/store")
    for number in range(3):
        run = RunDirectory(tmp_path / "run")
        settings = (*SETTINGS, f"checkpoint.store={store.url}", "checkpoint.every=1")
        supervised = Supervised.again(run, pause=0.05) if number else Supervised.start(run.path, *settings, pause=0.05)
        with supervised:
            supervised.wait_for_step(4 * number + 3)
            wait_for(lambda: completed(store))
        for stored in store.steps():  # everything was killed at the end of `with`
            assert not stored.complete or store.verify(stored.name) == []
    resume_to_end(run)
    assert completed(store)[-1] == 20
    assert all(each.complete for each in store.steps())
    assert_equal_weights(run, run_to_end(tmp_path / "undisturbed"))


def test_a_store_that_is_gone_stops_a_new_run_but_never_a_running_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder can be here")
    url = f"checkpoint.store=file://{tmp_path}/file/store"
    with Supervised.start(tmp_path / "new", *SETTINGS, url) as new:
        assert new.process.wait(90) == 2
        (error,) = {each["data"]["code"] for each in new.events(0, "error")}
    assert error == "K061", "without a state of its own it would start from step 0 while the store may have one"
    store = tmp_path / "store"
    with Supervised.start(tmp_path / "run", *SETTINGS, f"checkpoint.store=file://{store}", pause=0.1) as run:
        run.wait_for_events(0, "upload", 1)
        store.rename(tmp_path / "taken")
        store.write_text("gone")
        assert run.process.wait(300) == 0, "uploads are tried for a minute"
        failed = [each["data"].get("failed", "") for each in run.events(0, "upload")]
    assert failed[0] == ""
    assert "store" in failed[-1]
    assert (run.run.model / "model.safetensors").exists()
    assert main(["doctor", str(run.run.path), "--json"]) in (0, 1)
    assert "F074" in {each["code"] for each in json.loads(capsys.readouterr().out)["findings"]}


@NEEDS_S3
def test_a_run_on_a_fresh_machine_continues_from_s3_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with s3_server("bucket") as server:
        url = "s3://bucket/team/my-run"
        stopped = stop_at(tmp_path / "lost", 12, f"checkpoint.store={url}")
        store = open_store(url)
        newest = max(complete_steps(stopped.checkpoints))
        assert completed(store)[-1] == newest
        assert store.verify(store.steps()[-1].name) == []
        for file in (each for each in tmp_path.rglob("*") if each.is_file()):
            assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() not in file.read_bytes(), file
        shutil.rmtree(stopped.path)
        assert main(["train", "--set", f"checkpoint.store={url}", "--no-check"]) == 2
        assert f"resume {url}" in capsys.readouterr().err
        assert main(["resume", url, "--run-dir", "fresh", "--no-check", "--quiet"]) == 0
        fresh = RunDirectory(tmp_path / "fresh")
        (resumed,) = [each["data"] for each in lines(fresh.events(0)) if each["kind"] == "resume"]
        assert (resumed["tier"], resumed["from_step"]) == ("store", newest)
        assert completed(store)[-1] == 20
        assert main(["checkpoints", "verify", "fresh", "--store"]) == 0
        assert server.process.poll() is None
    assert_equal_weights(fresh, run_to_end(tmp_path / "undisturbed"))
