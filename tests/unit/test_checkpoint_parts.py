"""Large files of a checkpoint are written, verified and read in parts, by several threads."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import Crash, CrashingDisk, UnsyncedDisk, copy_share, on_ranks, plain_tensor, rows_of
from tests.disks import mounted
from tests.unit.test_checkpoint_disk import forge
from trimaran.checkpoint import (
    CHUNK_BYTES,
    DiskSource,
    DurableDisk,
    Manifest,
    PartLoader,
    commit,
    complete_steps,
    draft_path,
    file_parts,
    fill_matched,
    match_shards,
    read_manifest,
    step_path,
    verify,
    write_share,
)
from trimaran.core import UserError
from trimaran.parallel import RankShare, SplitWeight, TensorShard, build_share, split_fp32

PART_BYTES, TEST_CHUNK_BYTES = 24576, 12288


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(file_parts, "CHUNK_BYTES", TEST_CHUNK_BYTES)


def tensors_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(190, 101, generator=generator),
        "model/half": torch.randn(70, 33, generator=generator).to(torch.bfloat16),
        "model/frozen.weight": torch.randn(130, 77, generator=torch.Generator().manual_seed(1)),
        "optimizer/exp_avg/weight": torch.randn(190, 101, generator=generator),
        "optimizer/step/weight": torch.tensor(float(step)),
        "optimizer/codes/weight": torch.randint(256, (77, 13), generator=generator).to(torch.uint8),
    }


def save(folder: Path, step: int, *, world_size: int = 2, disk: DurableDisk | None = None, **options: Any) -> Path:
    shares = on_ranks(world_size, lambda rank, gather: copy_share(
        rows_of(tensors_of(step), rank, world_size), rank, world_size, gather))  # fmt: skip
    draft, disk = draft_path(folder, step, "abc123"), disk or UnsyncedDisk()
    options = {"previous": None} | options
    reports = [
        write_share(draft, rank, share, memory, disk=disk, **options) for rank, (share, memory) in enumerate(shares)
    ]
    commit(draft, step_path(folder, step), reports, Manifest(step=step, progress={"step": step}), disk)
    return step_path(folder, step)


def load(path: Path, *, world_size: int = 3) -> tuple[list[str], bool]:
    """Return the damage that three ranks find while they load the checkpoint, and whether they have its values."""
    source, damages, is_equal = DiskSource(path), [], True
    for rank in range(world_size):
        wanted = rows_of(tensors_of(source.step), rank, world_size)
        held = [TensorShard(key=each.key, tensor=torch.zeros_like(plain_tensor(each)), shape=each.shape,
                            start=each.start) for each in wanted]  # fmt: skip
        loader = PartLoader(source, match_shards(held, source))
        mine = sorted(source.manifest.files)[rank::world_size]
        damages += [str(each) for each in loader.run(mine, lambda: None, num_threads=2)]
        fill_matched(loader.rest, source, lambda: None, num_threads=2)
        pairs = zip(held, wanted, strict=True)
        is_equal &= all(torch.equal(plain_tensor(one), plain_tensor(other)) for one, other in pairs)
    return damages, is_equal


def test_a_large_file_has_a_checksum_for_each_part(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    files = read_manifest(path).files
    assert {name for name, each in files.items() if each.part_sha256} == {
        f"rank-0000{rank}.safetensors" for rank in (0, 1)
    }
    assert json.loads((path / "manifest.json").read_text())["format"] == 2, "older versions must not rename it"
    record = files["rank-00000.safetensors"]
    assert len(record.part_sha256) == -(-record.bytes // PART_BYTES) > 2
    assert record.bytes % file_parts.BLOCK_BYTES, "the end is not a whole block"
    assert verify(path) == []
    assert load(path) == ([], True)
    assert load_file(path / "rank-00000.safetensors")["model/weight@0,0"].equal(tensors_of(1)["model/weight"][:95])


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_any_number_of_ranks_loads_the_parts(tmp_path: Path, world_size: int) -> None:
    assert load(save(tmp_path, 1, world_size=3), world_size=world_size) == ([], True)


def test_a_checkpoint_of_an_older_version_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", 1 << 30)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    fields = json.loads((path / "manifest.json").read_text())
    assert fields["format"] == 1
    assert all(record.keys() == {"bytes", "sha256"} for record in fields["files"].values())
    assert verify(path) == []
    assert load(path) == ([], True)


def test_damage_in_any_part_is_found_before_its_values_are_used(tmp_path: Path) -> None:
    path = save(tmp_path, 1, world_size=1)
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    for position in range(5, len(content), PART_BYTES // 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        assert [damage.file for damage in verify(path)] == [file.name]
        wanted = rows_of(tensors_of(1), 0, 1)
        held = [TensorShard(key=each.key, tensor=torch.full_like(plain_tensor(each), 3), shape=each.shape,
                            start=each.start) for each in wanted]  # fmt: skip
        source = DiskSource(path)
        (damage,) = PartLoader(source, match_shards(held, source)).run([file.name], lambda: None, num_threads=3)
        assert damage.file == file.name
        for one, other in zip(held, wanted, strict=True):
            values, saved = plain_tensor(one), plain_tensor(other)
            assert ((values == 3) | (values == saved)).all(), "a damaged value was copied"
    file.write_bytes(content[:-1])
    assert [damage.what for damage in verify(path)] == [f"has {len(content) - 1:,} bytes instead of {len(content):,}"]
    file.unlink()
    assert [str(damage) for damage in verify(path)] == [f"{file.name} is missing"]
    assert load(path, world_size=1)[0] == [f"{file.name} is missing"]


def test_weights_in_two_halves_are_filled_from_the_parts(tmp_path: Path) -> None:
    source, full = DiskSource(save(tmp_path, 1)), tensors_of(1)["model/weight"]
    upper, lower = (torch.zeros_like(each) for each in split_fp32(full))
    strided = torch.zeros(101, 190).T
    shards = [TensorShard(key="model/weight", tensor=each, shape=(190, 101), start=(0, 0))
              for each in (SplitWeight(upper, lower), strided)]  # fmt: skip
    loader = PartLoader(source, match_shards(shards, source))
    assert loader.run([], lambda: None, num_threads=2) == []
    left = sum(size[0] for _, regions in loader.rest for _, _, size in regions)
    assert 0 < left < 20, "only rows that are in two parts, of both tensors, are left"
    fill_matched(loader.rest, source, lambda: None, num_threads=1)
    assert SplitWeight(upper, lower).joined().equal(full)
    assert strided.equal(full)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["part_sha256"].pop(),
        lambda record: record["part_sha256"].append("1" * 64),
        lambda record: record["part_sha256"].__setitem__(0, "0" * 63),
        lambda record: record.update(part_bytes=0),
        lambda record: record.update(part_bytes=-4096),
        lambda record: record.update(part_bytes="4096"),
        lambda record: record.update(sha256="1" * 64),
        lambda record: record.pop("part_bytes"),
    ],
)
def test_a_forged_list_of_checksums_is_refused(tmp_path: Path, change: Any) -> None:
    path = save(tmp_path, 1)
    forge(path, lambda fields: change(fields["files"]["rank-00000.safetensors"]))
    (damage,) = verify(path)
    assert str(damage) == "manifest.json has no valid length and checksum of rank-00000.safetensors"


class FaultyDisk(UnsyncedDisk):
    """A disk that does something wrong with its n-th write of a part."""

    def __init__(self, fault: str, number: int = 3) -> None:
        self.fault, self.number, self.num_threads = fault, number, 1

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self.number -= 1
        if self.number:
            return super().write_at(fd, data, offset)
        if self.fault == "lost":
            return None
        if self.fault == "torn":
            return super().write_at(fd, data[: len(data) // 2], offset)
        if self.fault == "elsewhere":
            return super().write_at(fd, data, offset - 4096)
        flipped = bytearray(data)
        flipped[len(flipped) // 2] ^= 4
        buffer = file_parts.ThreadBuffer().of()[: len(data)]
        buffer[:] = flipped
        return super().write_at(fd, buffer, offset)


@pytest.mark.parametrize("fault", ["lost", "torn", "elsewhere"])
@pytest.mark.parametrize("reads_back_all", [False, True])
def test_a_write_that_did_not_arrive_is_found_at_once(tmp_path: Path, fault: str, reads_back_all: bool) -> None:
    disk = FaultyDisk(fault)
    disk.reads_back_all = reads_back_all
    with pytest.raises(UserError, match=r"K006: .*the file on disk is not what was written"):
        save(tmp_path, 1, disk=disk)
    assert complete_steps(tmp_path) == []


def test_a_bit_that_the_disk_flips_is_found_when_all_is_read_back(tmp_path: Path) -> None:
    disk = FaultyDisk("flipped")
    disk.reads_back_all = True
    with pytest.raises(UserError, match=r"K006: .*the file on disk is not what was written"):
        save(tmp_path / "all", 1, disk=disk)
    # A sample cannot find it. No load and no `trimaran checkpoints verify` accepts the file.
    path = save(tmp_path / "sample", 1, disk=FaultyDisk("flipped"))
    assert [each.what for each in verify(path)] == ["is not what was written: its checksum is wrong"]
    assert load(path)[0]


def test_memory_that_changes_during_the_save_is_found(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 14)
    shard = TensorShard(key="model/x", tensor=tensor, shape=tuple(tensor.shape), start=(0,))
    share, memory = build_share([shard], [(0, len(tensor))]), torch.zeros(1 << 16, dtype=torch.uint8)

    class Changing(UnsyncedDisk):
        num_threads = 1

        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            super().write_at(fd, data, offset)
            memory[12345] += 1

    with pytest.raises(UserError, match=r"memory of the share changed while it was written"):
        write_share(tmp_path / "x", 0, share, memory.numpy().data, previous=None, disk=Changing())


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_file_system_without_direct_io_is_written_through_the_page_cache(tmp_path: Path, when: str) -> None:
    class Buffered(UnsyncedDisk):
        def open_direct(self, path: Path) -> tuple[int, bool]:
            return super().open_direct(path) if when == "write" else (self.open_buffered(path), False)

        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            if os.get_blocking(fd) and _is_direct(fd):
                raise OSError(errno.EINVAL, "Invalid argument")
            super().write_at(fd, data, offset)

    path = save(tmp_path, 1, disk=Buffered())
    assert verify(path) == []
    assert load(path) == ([], True)


def _is_direct(fd: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:\t")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def test_a_save_in_parts_may_crash_at_any_call(tmp_path: Path) -> None:
    class Disk(CrashingDisk):
        num_threads = 1

        def reserve(self, fd: int, num_bytes: int) -> None:
            self.count_call("reserve")
            super().reserve(fd, num_bytes)

        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            self.count_call("write_at")
            super().write_at(fd, data, offset)

    counter = Disk()
    save(tmp_path / "whole", 1, world_size=1, disk=counter)
    assert counter.done.count("write_at") > 5
    for index in range(len(counter.done)):
        with pytest.raises(Crash):
            save(tmp_path / str(index), 1, world_size=1, disk=Disk(index))
        for step in complete_steps(tmp_path / str(index)):
            assert verify(step_path(tmp_path / str(index), step)) == []


def test_frozen_files_of_one_size_in_parts_are_linked_only_if_they_are_equal(tmp_path: Path) -> None:
    first = save(tmp_path, 1, world_size=1)
    second = save(tmp_path, 2, world_size=1, previous=first)
    name = "rank-00000.frozen.safetensors"
    assert read_manifest(first).files[name].part_sha256
    assert (first / name).stat().st_ino == (second / name).stat().st_ino
    content = bytearray((first / name).read_bytes())
    content[-3] ^= 1
    (second / name).write_bytes(content)  # of the first, too: it is the same file
    third = save(tmp_path, 3, world_size=1, previous=second)
    assert (third / name).stat().st_ino != (second / name).stat().st_ino
    assert verify(third) == []


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    class Counting(UnsyncedDisk):
        num_writes = 0

        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            self.num_writes += 1

    disk = Counting()
    with mounted(tmp_path / "disk", "size=64k") as mount:
        with pytest.raises(UserError, match="K006: the checkpoint cannot be written: No space left on device"):
            save(mount, 1, world_size=1, disk=disk)
        assert disk.num_writes == 0


def test_a_save_takes_little_memory_besides_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # parts of 64 MiB
    num_bytes = 192 << 20
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    tensor = memory.view(torch.float32)
    shard = TensorShard(key="model/x", tensor=tensor, shape=tuple(tensor.shape), start=(0,))
    share, disk = RankShare(build_share([shard], [(0, len(tensor))]).items, num_bytes), UnsyncedDisk()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is used now
    before = _status("VmHWM")
    report = write_share(tmp_path / "x", 0, share, memory.numpy().data, previous=None, disk=disk)
    bound = disk.num_threads * CHUNK_BYTES + (16 << 20)
    assert _status("VmHWM") - before < bound < num_bytes // 2
    assert [len(each.part_sha256) for each in report.files.values()] == [4]


def _status(name: str) -> int:
    """Return a memory size of this process, in bytes."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def test_threads_stop_after_the_first_error() -> None:
    done: list[int] = []

    def work(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        done.append(item)
        return 2 * item

    with pytest.raises(ValueError, match="three"):
        file_parts.map_in_threads(work, range(1000), num_threads=2)
    assert len(done) < 1000
    reports: list[int] = []
    items = random.Random(0).sample(range(100), 100)
    result = file_parts.map_in_threads(
        lambda item: -item, items, num_threads=5, while_waiting=lambda: reports.append(1)
    )
    assert result == [-item for item in items]
    assert reports
