"""Tensors in files: what is written is read, in any order, and unusable folders are refused."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trimaran.core import Plan, UserError
from trimaran.parallel import DiskStore, DiskStream, DiskWeights, LowMemoryAdamW, aligned_buffer, store_of
from trimaran.runs import check_disk_folder, filesystem_of

CPU = torch.device("cpu")
DEFAULTS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wait(futures: list[Any]) -> None:
    for each in futures:
        each.result()


def test_direct_and_mapped_access_see_the_same_values(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1 << 16)
    tensor, buffer = store.allocate((100, 70), torch.float32), aligned_buffer(28_000, pinned=False)
    assert not tensor.any()
    for seed in range(3):  # through the page cache, then past it, and again
        tensor.copy_(numbers(100, 70, seed=seed))
        wait(store.read(tensor, buffer))
        assert torch.equal(buffer[:28_000].view(torch.float32), tensor.view(-1))
        buffer[:28_000].view(torch.float32).mul_(2)
        wait(store.write(tensor, buffer))
        assert torch.equal(tensor, 2 * numbers(100, 70, seed=seed))
        store.release()
        assert torch.equal(tensor, 2 * numbers(100, 70, seed=seed))
    assert [*tmp_path.iterdir()] == []


def test_a_store_lives_as_long_as_its_tensors(tmp_path: Path) -> None:
    tensor = DiskStore(tmp_path, 1 << 13).allocate((1024,), torch.float32)
    assert store_of(tensor[512:]) is not None
    tensor.fill_(3)
    assert store_of(tensor) is not None
    assert store_of(torch.zeros(4)) is None


def test_a_failed_write_is_raised(tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    states = {"exp_avg": DiskStore(tmp_path, 1 << 13, write_at=full).allocate((1024,), torch.float32)}
    stream = DiskStream(CPU)
    for each in stream.stream([states]):
        each["exp_avg"].fill_(1)
    with pytest.raises(OSError, match="no space left"):
        stream.wait()


def test_chunks_in_memory_between_those_on_disk_hide_no_pending_write(tmp_path: Path) -> None:
    def slow_write(*args: Any) -> int:
        time.sleep(0.02)
        return os.pwritev(*args)

    store = DiskStore(tmp_path, 1 << 16, write_at=slow_write)
    on_disk, in_memory = ([{"exp_avg": make((1024,), dtype=torch.float32)} for _ in range(4)]
                          for make in (store.allocate, torch.zeros))  # fmt: skip
    chunks = on_disk[:2] + in_memory + on_disk[2:]  # each slot has one on disk, one in memory, or one after the other
    stream = DiskStream(CPU)
    for turn in range(2):
        for number, each in enumerate(stream.stream(chunks)):
            each["exp_avg"].add_(10 * turn + number)
    stream.wait()
    for number, each in enumerate(chunks):
        assert each["exp_avg"].unique().tolist() == [10 + 2 * number]


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_states_on_disk_change_no_bit(states: str, tmp_path: Path) -> None:
    shapes = ((500, 333), (64,), (300, 512), (64, 1024))  # rows of 333 values end in the middle of a block
    ours, theirs = ([torch.nn.Parameter(numbers(*shape, seed=0)) for shape in shapes] for _ in range(2))
    optimizers = [
        LowMemoryAdamW(
            [{"params": [(str(number), each) for number, each in enumerate(parameters)]}],
            defaults=DEFAULTS, states=states, seed=0, on_host=False, disk=disk, chunk_values=2**15,
        )
        for parameters, disk in ((ours, tmp_path), (theirs, None))
    ]  # fmt: skip
    for step in range(3):
        for parameters in (ours, theirs):
            for each in parameters:
                each.grad = numbers(*each.shape, seed=step)
        for each in optimizers:
            each.step()
    on_disk = 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        mine, other = optimizers[0].state_dict(), optimizers[1].state[b]
        assert mine["state"]
        for key, value in optimizers[0].state[a].items():
            on_disk += store_of(value) is not None
            assert torch.equal(value, other[key])
    assert on_disk >= 6


def test_weights_are_read_as_they_are_in_any_order(tmp_path: Path) -> None:
    weights, sizes = DiskWeights(tmp_path, CPU, slot_bytes=8192), (50_000, 5_000, 2_048, 30_001)
    for size in sizes:
        weights.reserve(4 * size)
    shards = [weights.allocate((size,), torch.float32) for size in sizes]
    for turn in range(2):
        for number, shard in enumerate(shards):
            shard.copy_(numbers(len(shard), seed=10 * turn + number))
        for number, shard in enumerate(shards):  # as a unit of FSDP does
            assert torch.equal(weights.load(shard, shards[number + 1 :]), shard)
        for number in (2, 0, 3):  # and in another order than was said
            assert torch.equal(weights.load(shards[number], shards), shards[number])
        assert torch.equal(weights.load(shards[1]), shards[1])


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="P112"):
        DiskStore(tmp_path, 1 << 60)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    check_disk_folder(str(tmp_path), any_filesystem=True)
    with pytest.raises(UserError, match=r"P110.*no folder"):
        check_disk_folder(str(tmp_path / "none"), any_filesystem=True)
    if os.geteuid() != 0:  # nothing is closed to root
        tmp_path.chmod(0o500)
        with pytest.raises(UserError, match=r"P110.*permission denied"):
            check_disk_folder(str(tmp_path), any_filesystem=True)


def test_filesystems_in_memory_and_on_the_network_are_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    shared = tmp_path / "with space"
    shared.mkdir()
    escaped = str(shared).replace(" ", "\\040")
    mounts.write_text(
        f"20 1 8:1 / / rw - ext4 /dev/vda rw\n21 20 0:5 / {escaped} rw shared:1 - nfs4 server:/x rw\nodd line\n"
    )
    assert filesystem_of(Path("/"), mounts) == "ext4"
    assert filesystem_of(shared, mounts) == "nfs4"
    assert filesystem_of(shared, tmp_path / "none") == ""
    for kind in ("nfs4", "tmpfs", "fuse.sshfs"):
        mounts.write_text(f"20 1 8:1 / / rw - ext4 /dev/vda rw\n21 20 0:5 / {escaped} rw - {kind} server:/x rw\n")
        with pytest.raises(UserError, match=rf"P111.*{kind}"):
            check_disk_folder(str(shared), any_filesystem=False, mounts=mounts)
        check_disk_folder(str(shared), any_filesystem=True, mounts=mounts)
    mounts.write_text("20 1 8:1 / / rw - ext4 /dev/vda rw\n")
    check_disk_folder(str(shared), any_filesystem=False, mounts=mounts)


def test_a_path_alone_offloads_nothing() -> None:
    plan = Plan.model_validate({"disk": {"path": "/scratch"}})
    assert not plan.offloads_to_disk
    assert plan.model_copy(update={"offload": "optimizer"}).offloads_to_disk
    assert not plan.model_copy(update={"offload": "activations"}).offloads_to_disk
