"""Two machines without a shared disk and one object store: one of them, or both, lose their disks."""

import shutil
from pathlib import Path

import pytest

from tests.chaos.test_nodes import ROOT_NEEDED
from tests.chaos.test_own_disks import OwnDisks, assert_equal_to_one_machine, logs
from tests.fault.harness import lines
from trimaran.checkpoint import complete_steps, open_store, step_path

pytestmark = [pytest.mark.chaos, ROOT_NEEDED]


@pytest.mark.parametrize("lost", ["one", "both"])
def test_machines_with_new_disks_continue_from_the_store_as_on_one_machine(tmp_path: Path, lost: str) -> None:
    settings = ("train.steps=30", "plan.mesh.dp_shard=2")
    store = open_store(f"file://{tmp_path}/store")
    disks = OwnDisks(tmp_path, *settings, f"checkpoint.store={store.url}")
    with disks.start() as machines:
        machines.wait_for_step(12)
        machines.all[0].request_stop()
        assert [each.wait(60) for each in machines.all] == [75, 75], logs(machines)
    step = max(complete_steps(disks.head.checkpoints))
    (stored,) = [each for each in store.steps() if each.step == step]
    assert stored.complete
    assert {"rank-00000.safetensors", "rank-00001.safetensors", "index.json"} < stored.sizes.keys()
    shutil.rmtree(disks.other.path)
    metrics = disks.head.metrics.read_bytes()
    if lost == "both":
        shutil.rmtree(disks.head.checkpoints)
        disks.head.metrics.unlink()
    with disks.start() as machines:
        assert [each.wait(90) for each in machines.all] == [0, 0], logs(machines)
    resumed = [each["data"] for each in lines(disks.head.events(0)) if each["kind"] == "resume"]
    tier = "store" if lost == "both" else "disk"  # the head's manifest is on its disk, and files of the other are not
    assert [(each["tier"], each["from_step"], each["refused"]) for each in resumed] == [(tier, step, [])]
    last = max(complete_steps(disks.head.checkpoints))
    assert [each.step for each in store.steps()][-1] == last == 30
    assert store.verify(store.steps()[-1].name) == []
    assert not (step_path(disks.head.checkpoints, last) / "rank-00001.safetensors").exists()
    if lost == "both":  # compare also the losses before, whose file was lost with the disk
        disks.head.metrics.write_bytes(metrics + disks.head.metrics.read_bytes())
    assert_equal_to_one_machine(disks.head, tmp_path / "alone", *settings)
