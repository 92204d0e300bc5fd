"""A kill, a power cut or a full disk at any moment: complete checkpoints stay complete and loadable."""

import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import (
    Crash,
    CrashingDisk,
    LocalStore,
    PowerCutDisk,
    UnsyncedDisk,
    copy_share,
    loads,
    on_ranks,
    rows_of,
    save_checkpoint,
    tensors_of,
)
from tests.disks import mounted, remount
from trimaran.checkpoint import (
    DurableDisk,
    Manifest,
    RankLayout,
    Saver,
    SaveRequest,
    SaveResult,
    WriteReportParser,
    complete_steps,
    newest_step,
    prune,
    remove_drafts,
    step_path,
    verify,
)
from trimaran.core import CheckpointSection, UserError, show_bytes

DISKS = [CrashingDisk, PowerCutDisk]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("template")
    for step in (1, 2):
        save_checkpoint(folder, step)
    return folder


def every_crash(
    disk_kind: type[CrashingDisk], prepare: Callable[[], None], act: Callable[[DurableDisk], Any]
) -> Iterator[str]:
    """Crash at each disk call of `act`, each time from a fresh start, and yield the call after the crash."""
    prepare()
    counter = disk_kind()
    act(counter)
    for index, name in enumerate(counter.done):
        prepare()
        disk = disk_kind(index)
        with pytest.raises(Crash, match=name):
            act(disk)
        if isinstance(disk, PowerCutDisk):
            disk.lose()
        yield f"{index}: {name}"
    assert len(counter.done) > 5


def reset(folder: Path, template: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)


def check_newest(folder: Path, allowed: tuple[int, ...], at: str) -> None:
    """Check that every listed checkpoint loads, that the newest is in `allowed`, and that drafts can be removed."""
    assert newest_step(folder) in allowed, at
    for step in complete_steps(folder):
        assert verify(step_path(folder, step)) == [], at
        assert loads(step_path(folder, step), step), at
    remove_drafts(folder)
    assert all(each.name.startswith(("step-", "refused-")) for each in folder.iterdir()), at


@pytest.mark.parametrize("disk_kind", DISKS)
def test_a_save_may_crash_at_any_call(tmp_path: Path, template: Path, disk_kind: type[CrashingDisk]) -> None:
    folder, previous = tmp_path / "checkpoints", step_path(tmp_path / "checkpoints", 2)

    def prepare() -> None:
        reset(folder, template)

    ats = []
    for at in every_crash(disk_kind, prepare, lambda disk: save_checkpoint(folder, 3, previous=previous, disk=disk)):
        ats.append(at)
        check_newest(folder, (2, 3), at)
        assert complete_steps(folder)[:2] == [1, 2], at
    assert {at.split()[1] for at in ats} >= {"make_folder", "create", "write", "sync", "link", "rename", "sync_folder"}


@pytest.mark.parametrize("disk_kind", DISKS)
def test_a_save_that_has_returned_is_durable(tmp_path: Path, disk_kind: type[CrashingDisk]) -> None:
    disk = disk_kind()
    save_checkpoint(tmp_path / "checkpoints", 1, disk=disk)
    if isinstance(disk, PowerCutDisk):
        disk.lose()
    check_newest(tmp_path / "checkpoints", (1,), "after the save")


@pytest.mark.parametrize("disk_kind", DISKS)
@pytest.mark.parametrize("broken", [False, True])
def test_a_save_over_an_existing_step_may_crash_at_any_call(
    tmp_path: Path, template: Path, disk_kind: type[CrashingDisk], broken: bool
) -> None:
    folder = tmp_path / "checkpoints"

    def prepare() -> None:
        reset(folder, template)
        if broken:
            (step_path(folder, 2) / "manifest.json").unlink()

    for at in every_crash(disk_kind, prepare, lambda disk: save_checkpoint(folder, 2, world_size=3, disk=disk)):
        check_newest(folder, (1, 2) if broken else (2,), at)
        assert 1 in complete_steps(folder), at


@pytest.mark.parametrize("disk_kind", DISKS)
def test_pruning_may_crash_at_any_call(tmp_path: Path, template: Path, disk_kind: type[CrashingDisk]) -> None:
    folder = tmp_path / "checkpoints"

    def prepare() -> None:
        reset(folder, template)

    for at in every_crash(disk_kind, prepare, lambda disk: prune(folder, 1, 0, 2, disk)):
        check_newest(folder, (2,), at)


def save_all(
    folder: Path, steps: list[int], disks: list[DurableDisk], store: LocalStore | None = None
) -> list[list[SaveResult]]:
    """Return the results of the saves for each rank. Ranks are threads, each with a `Saver`."""
    world_size, shared = len(disks), store or LocalStore()

    def work(rank: int, gather: Any) -> list[SaveResult]:
        rank_layout = RankLayout(rank=rank, local_rank=rank, nodes=(0,) * world_size)
        rules = CheckpointSection(keep=9)
        saver = Saver(folder, rank_layout, shared, rules, lambda request: manifest_of(request, world_size), disks[rank],
                      nonce="beef")  # fmt: skip
        for step in steps:
            share, memory = copy_share(rows_of(tensors_of(step), rank, world_size), rank, world_size, gather)
            saver.start(SaveRequest(step=step, share=share, memory=torch.from_numpy(np.asarray(memory))))
            saver.wait()
        saver.close()
        return saver.results()

    return on_ranks(world_size, work)


def manifest_of(request: SaveRequest, world_size: int) -> Manifest:
    return Manifest(step=request.step, world_size=world_size, progress={"step": request.step})


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("size=48k", "", "No space left on device"),
        ("size=1m,nr_inodes=9", "", "No space left on device"),
        ("size=1m", "ro", "Read-only file system"),
    ],
)
def test_a_full_disk_is_named_on_all_ranks_and_older_checkpoints_stay(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    with mounted(tmp_path / "disk", before) as mount:
        folder = mount / "checkpoints"
        save_checkpoint(folder, 1)
        if after:
            remount(mount, after)
        for (result,) in save_all(folder, [2], [DurableDisk(), DurableDisk(), DurableDisk()]):
            assert message in result.failed
            total = show_bytes(shutil.disk_usage(mount).total)
            assert re.search(rf"disk {re.escape(str(mount))}: [\d.]+ (B|KiB|MiB) of {total} free", result.failed)
        assert [each.name for each in folder.iterdir()] == ["step-00000001"]
        check_newest(folder, (1,), "afterwards")


def test_a_quota_is_named_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(UserError, match="K006: the checkpoint cannot be written: File too large"):
            save_checkpoint(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_newest(tmp_path, (1,), "afterwards")


def test_sixty_four_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    results = [result for (result,) in save_all(tmp_path, [5], [UnsyncedDisk() for _ in range(64)])]
    assert {result.failed for result in results} == {""}
    check_newest(tmp_path, (5,), "after the save")
    shards = [each for each in step_path(tmp_path, 5).iterdir() if each.suffix == ".safetensors"]
    assert {result.written_bytes for result in results} == {sum(each.stat().st_size for each in shards)}


def test_one_rank_that_fails_makes_all_fail(tmp_path: Path) -> None:
    class Torn(UnsyncedDisk):
        def write(self, fd: int, data: memoryview) -> None:
            os.write(fd, data[:7])
            raise OSError(5, "Input/output error")

    save_checkpoint(tmp_path, 1)
    results = save_all(tmp_path, [2], [Torn() if rank == 63 else UnsyncedDisk() for rank in range(64)])
    assert all("rank 63: the checkpoint cannot be written: Input/output error" in each.failed for (each,) in results)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
    assert {each.failed for (each,) in save_all(tmp_path, [2], [UnsyncedDisk(), UnsyncedDisk()])} == {""}


def test_layouts_are_sent_once(tmp_path: Path) -> None:
    store = LocalStore()
    results = save_all(tmp_path, [1, 2, 3], [UnsyncedDisk(), UnsyncedDisk()], store)
    assert [each.failed for each in results[1]] == ["", "", ""]
    lengths = [len(text) for key, text in store.texts.items() if key.endswith("report/1")]
    assert lengths[1] == lengths[2] < lengths[0] / 2
    check_newest(tmp_path, (3,), "after three saves")


def test_a_step_saved_with_another_world_size_stays_and_is_verified(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, world_size=3)
    assert {each.failed for (each,) in save_all(tmp_path, [2], [UnsyncedDisk(), UnsyncedDisk()])} == {""}
    assert len(list(step_path(tmp_path, 2).iterdir())) == 8
    save_checkpoint(tmp_path, 1, world_size=1)
    assert {each.failed for (each,) in save_all(tmp_path, [1], [UnsyncedDisk(), UnsyncedDisk()])} == {""}
    check_newest(tmp_path, (2,), "afterwards")


def test_a_brief_report_of_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    report, _ = save_checkpoint(tmp_path, 1)
    parser = WriteReportParser()
    with pytest.raises(AssertionError, match="before its layout"):
        parser.parse(report.text(brief=True))
    assert parser.parse(report.text()) == report
    assert parser.parse(report.text(brief=True)) == report
