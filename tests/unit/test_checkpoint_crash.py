"""Killed, unplugged or out of room at any moment: what was complete before stays, what is complete loads."""

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
    Board,
    Crash,
    Fragile,
    Quick,
    Unplugged,
    keep,
    loads,
    on_ranks,
    rows_of,
    staged,
    tensors_of,
)
from tests.disks import mounted, remount
from trimaran.checkpoint.disk_source import verify
from trimaran.checkpoint.durable import DurableDisk
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.rank_layout import RankLayout
from trimaran.checkpoint.saver import Order, Outcome, Saver
from trimaran.checkpoint.step_dirs import newest, prune, step_path, steps, sweep_drafts
from trimaran.checkpoint.write_checkpoint import Clerk
from trimaran.core import CheckpointSection, UserError, show_bytes

DISKS = [Fragile, Unplugged]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("template")
    for step in (1, 2):
        keep(folder, step)
    return folder


def every_crash(
    disk_kind: type[Fragile], prepare: Callable[[], None], act: Callable[[DurableDisk], Any]
) -> Iterator[str]:
    """Die at each call that `act` makes, from a fresh start each, and yield what the call was, after the crash."""
    prepare()
    counter = disk_kind()
    act(counter)
    for fuse, name in enumerate(counter.done):
        prepare()
        disk = disk_kind(fuse)
        with pytest.raises(Crash, match=name):
            act(disk)
        if isinstance(disk, Unplugged):
            disk.lose()
        yield f"{fuse}: {name}"
    assert len(counter.done) > 5


def renew(folder: Path, template: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)


def check_newest(folder: Path, allowed: tuple[int, ...], at: str) -> None:
    """Everything that looks complete is, and loads; the newest is one of `allowed`; what is left over can be swept."""
    assert newest(folder) in allowed, at
    for step in steps(folder):
        assert verify(step_path(folder, step)) == [], at
        assert loads(step_path(folder, step), step), at
    sweep_drafts(folder)
    assert all(each.name.startswith(("step-", "refused-")) for each in folder.iterdir()), at


@pytest.mark.parametrize("disk_kind", DISKS)
def test_a_save_may_die_at_any_call(tmp_path: Path, template: Path, disk_kind: type[Fragile]) -> None:
    folder, previous = tmp_path / "checkpoints", step_path(tmp_path / "checkpoints", 2)

    def prepare() -> None:
        renew(folder, template)

    ats = []
    for at in every_crash(disk_kind, prepare, lambda disk: keep(folder, 3, previous=previous, disk=disk)):
        ats.append(at)
        check_newest(folder, (2, 3), at)
        assert steps(folder)[:2] == [1, 2], at
    assert {at.split()[1] for at in ats} >= {"make_folder", "create", "write", "sync", "link", "rename", "sync_folder"}


@pytest.mark.parametrize("disk_kind", DISKS)
def test_a_save_that_has_returned_stays(tmp_path: Path, disk_kind: type[Fragile]) -> None:
    disk = disk_kind()
    keep(tmp_path / "checkpoints", 1, disk=disk)
    if isinstance(disk, Unplugged):
        disk.lose()
    check_newest(tmp_path / "checkpoints", (1,), "after the save")


@pytest.mark.parametrize("disk_kind", DISKS)
@pytest.mark.parametrize("broken", [False, True])
def test_a_save_over_a_step_that_is_there_may_die_at_any_call(
    tmp_path: Path, template: Path, disk_kind: type[Fragile], broken: bool
) -> None:
    folder = tmp_path / "checkpoints"

    def prepare() -> None:
        renew(folder, template)
        if broken:
            (step_path(folder, 2) / "manifest.json").unlink()

    for at in every_crash(disk_kind, prepare, lambda disk: keep(folder, 2, world_size=3, disk=disk)):
        check_newest(folder, (1, 2) if broken else (2,), at)
        assert 1 in steps(folder), at


@pytest.mark.parametrize("disk_kind", DISKS)
def test_retention_may_die_at_any_call(tmp_path: Path, template: Path, disk_kind: type[Fragile]) -> None:
    folder = tmp_path / "checkpoints"

    def prepare() -> None:
        renew(folder, template)

    for at in every_crash(disk_kind, prepare, lambda disk: prune(folder, 1, 0, 2, disk)):
        check_newest(folder, (2,), at)


def save_all(
    folder: Path, steps: list[int], disks: list[DurableDisk], board: Board | None = None
) -> list[list[Outcome]]:
    """Return, for each rank, what came of the saves. Ranks are threads with savers as a run has them."""
    world_size, post = len(disks), board or Board()

    def work(rank: int, gather: Any) -> list[Outcome]:
        rank_layout = RankLayout(rank=rank, local_rank=rank, nodes=(0,) * world_size)
        rules = CheckpointSection(keep=9)
        saver = Saver(folder, rank_layout, post, rules, lambda order: about(order, world_size), disks[rank])
        saver.nonce = "beef"
        for step in steps:
            share, memory = staged(rows_of(tensors_of(step), rank, world_size), rank, world_size, gather)
            saver.start(Order(step=step, share=share, memory=torch.from_numpy(np.asarray(memory))))
            saver.wait()
        return saver.outcomes()

    return on_ranks(world_size, work)


def about(order: Order, world_size: int) -> Manifest:
    return Manifest(step=order.step, world_size=world_size, progress={"step": order.step})


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("size=48k", "", "No space left on device"),
        ("size=1m,nr_inodes=9", "", "No space left on device"),
        ("size=1m", "ro", "Read-only file system"),
    ],
)
def test_a_full_disk_is_named_on_all_ranks_and_costs_nothing_old(
    tmp_path: Path, before: str, after: str, words: str
) -> None:
    with mounted(tmp_path / "disk", before) as place:
        folder = place / "checkpoints"
        keep(folder, 1)
        if after:
            remount(place, after)
        for (outcome,) in save_all(folder, [2], [DurableDisk(), DurableDisk(), DurableDisk()]):
            assert words in outcome.failed
            total = show_bytes(shutil.disk_usage(place).total)
            assert re.search(rf"disk {re.escape(str(place))}: [\d.]+ (B|KiB|MiB) of {total} free", outcome.failed)
        assert [each.name for each in folder.iterdir()] == ["step-00000001"]
        check_newest(folder, (1,), "afterwards")


def test_a_quota_is_named_too(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(UserError, match="K006: the checkpoint cannot be written: File too large"):
            keep(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_newest(tmp_path, (1,), "afterwards")


def test_sixty_four_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    outcomes = [outcome for (outcome,) in save_all(tmp_path, [5], [Quick() for _ in range(64)])]
    assert {outcome.failed for outcome in outcomes} == {""}
    check_newest(tmp_path, (5,), "after the save")
    shards = [each for each in step_path(tmp_path, 5).iterdir() if each.suffix == ".safetensors"]
    assert {outcome.written_bytes for outcome in outcomes} == {sum(each.stat().st_size for each in shards)}


def test_one_rank_that_fails_makes_all_fail(tmp_path: Path) -> None:
    class Torn(Quick):
        def write(self, fd: int, data: memoryview) -> None:
            os.write(fd, data[:7])
            raise OSError(5, "Input/output error")

    keep(tmp_path, 1)
    outcomes = save_all(tmp_path, [2], [Torn() if rank == 63 else Quick() for rank in range(64)])
    assert all("rank 63: the checkpoint cannot be written: Input/output error" in each.failed for (each,) in outcomes)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
    assert {each.failed for (each,) in save_all(tmp_path, [2], [Quick(), Quick()])} == {""}


def test_layouts_are_told_once(tmp_path: Path) -> None:
    board = Board()
    outcomes = save_all(tmp_path, [1, 2, 3], [Quick(), Quick()], board)
    assert [each.failed for each in outcomes[1]] == ["", "", ""]
    told = [len(text) for key, text in board.said.items() if key.endswith("receipt/1")]
    assert told[1] == told[2] < told[0] / 2
    check_newest(tmp_path, (3,), "after three saves")


def test_a_step_that_another_world_left_stays_and_is_verified(tmp_path: Path) -> None:
    keep(tmp_path, 2, world_size=3)
    assert {each.failed for (each,) in save_all(tmp_path, [2], [Quick(), Quick()])} == {""}
    assert len(list(step_path(tmp_path, 2).iterdir())) == 8
    keep(tmp_path, 1, world_size=1)
    assert {each.failed for (each,) in save_all(tmp_path, [1], [Quick(), Quick()])} == {""}
    check_newest(tmp_path, (2,), "afterwards")


def test_a_brief_receipt_of_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    receipt, _ = keep(tmp_path, 1)
    clerk = Clerk()
    with pytest.raises(AssertionError, match="nobody has seen"):
        clerk.read(receipt.text(brief=True))
    assert clerk.read(receipt.text()) == receipt
    assert clerk.read(receipt.text(brief=True)) == receipt
