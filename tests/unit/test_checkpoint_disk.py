"""Checkpoints on disk: readable without Trimaran, and refused if they are not what was written."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.checkpoints import UnsyncedDisk, loads, save_checkpoint, tensors_of
from trimaran.checkpoint import (
    FILE_END,
    ZERO_DIGEST,
    DamagedError,
    DiskSource,
    Manifest,
    compare,
    complete_steps,
    index_bytes,
    layout_of,
    newest_step,
    parse_index,
    prune,
    read_manifest,
    refuse,
    remove_drafts,
    step_path,
    steps_to_prune,
    verify,
    without_manifest,
)
from trimaran.core import UserError
from trimaran.parallel import DTYPE_NAMES

SHARDS = {f"rank-0000{rank}{part}.safetensors" for rank in (0, 1) for part in ("", ".frozen")}
FILES = {"index.json", "manifest.json", *SHARDS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    save_checkpoint(tmp_path, 1)
    save_checkpoint(tmp_path, 2)
    return tmp_path


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a checkpoint and recompute its digest, as an attacker would."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    change(fields)
    fields["digest"] = "0" * 64
    text = json.dumps(fields, indent=1) + "\n"
    (folder / "manifest.json").write_text(text.replace("0" * 64, sha256(text.encode()).hexdigest()))


def test_a_checkpoint_has_the_files_of_its_manifest(folder: Path) -> None:
    path = step_path(folder, 2)
    assert {each.name for each in path.iterdir()} == FILES
    assert verify(path) == []
    assert loads(path, 2)
    assert {each.name for each in folder.iterdir()} == {"step-00000001", "step-00000002"}
    manifest = read_manifest(path)
    assert manifest.files.keys() == FILES - {"manifest.json"}
    assert manifest == Manifest(step=2, world_size=2, progress={"step": 2, "loss_scale": 1024.0}, files=manifest.files)


def test_a_checkpoint_can_be_read_without_trimaran(folder: Path) -> None:
    # As docs/guides/checkpoints.md shows it: JSON and safetensors alone.
    path = step_path(folder, 2)
    index = json.loads((path / "index.json").read_text())
    for key, full in tensors_of(2).items():
        entry = index["tensors"][key]
        assert (entry["dtype"], entry["shape"]) == (DTYPE_NAMES[full.dtype], list(full.shape))
        merged = torch.zeros_like(full)
        for file, _, *corners in entry["parts"]:
            start, size = corners[: full.ndim], corners[full.ndim :]
            with safe_open(path / index["files"][file], "pt") as tensors:
                values = tensors.get_tensor(f"{key}@{','.join(map(str, start))}")
            merged[tuple(slice(low, low + n) for low, n in zip(start, size, strict=True))] = values
        assert torch.equal(merged, full)
    text = (path / "manifest.json").read_text()
    digest = json.loads(text)["digest"]
    assert sha256(text.replace(digest, "0" * 64).encode()).hexdigest() == digest


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("fault", ["short", "empty", "missing", "long", "linked", "a folder"])
def test_a_file_that_is_truncated_or_missing_is_named(folder: Path, name: str, fault: str) -> None:
    path = step_path(folder, 2) / name
    content = path.read_bytes()
    path.unlink()
    if fault == "linked":
        (folder / "elsewhere").write_bytes(content)
        path.symlink_to(folder / "elsewhere")
    elif fault == "a folder":
        path.mkdir()
    elif fault != "missing":
        path.write_bytes({"short": content[:-1], "empty": b"", "long": content + b"\n"}[fault])
    assert name in {damage.file for damage in verify(path.parent)}
    assert verify(step_path(folder, 1)) == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_flipped_bit_is_found_in_any_file(folder: Path, name: str) -> None:
    path = step_path(folder, 2) / name
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 40)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert [damage.file for damage in verify(path.parent)] == [name]
    path.write_bytes(content)
    assert verify(path.parent) == []


def test_swapped_files_are_found(folder: Path) -> None:
    one, other = (step_path(folder, 2) / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    assert {damage.file for damage in verify(one.parent)} == {one.name, other.name}


@pytest.mark.parametrize("name", sorted(name for name in FILES if "frozen" not in name and name != "index.json"))
def test_a_file_of_another_step_is_found(folder: Path, name: str) -> None:
    shutil.copy(step_path(folder, 1) / name, step_path(folder, 2) / name)
    assert name in {damage.file for damage in verify(step_path(folder, 2))}


def test_a_folder_with_the_name_of_another_step_is_found(folder: Path) -> None:
    step_path(folder, 1).rename(step_path(folder, 3))
    assert [str(damage) for damage in verify(step_path(folder, 3))] == ["manifest.json is of step 1"]


def test_only_the_named_files_are_verified(folder: Path) -> None:
    bad = step_path(folder, 2) / "rank-00001.safetensors"
    bad.write_bytes(bytes(bad.stat().st_size))
    assert verify(bad.parent, files=["rank-00000.safetensors"]) == []
    assert verify(bad.parent, files=[bad.name])[0].what == "is not what was written: its checksum is wrong"
    assert verify(bad.parent, files=["../x"])[0].what == "is not in the manifest"


def test_an_unexpected_file_is_found_and_never_read(folder: Path) -> None:
    touch = f"cos\nsystem\n(S'touch {folder}/hostile'\ntR."
    (step_path(folder, 2) / "model.pt").write_text(touch)
    assert [str(damage) for damage in verify(step_path(folder, 2))] == ["model.pt does not belong here"]
    assert loads(step_path(folder, 2), 2)
    assert not (folder / "hostile").exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "rank-00000.safetensors/../../x", "x.pt", "rank-1.safetensors", ""]
)
def test_a_forged_manifest_cannot_name_other_files(folder: Path, name: str) -> None:
    path = step_path(folder, 2)
    forge(path, lambda fields: fields["files"].update({name: {"bytes": 1, "sha256": "0" * 63 + "1"}}))
    (damage,) = verify(path)
    assert "which is not a file of a checkpoint" in damage.what
    with pytest.raises(DamagedError):
        DiskSource(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(step=-1),
        lambda fields: fields.update(step="2"),
        lambda fields: fields.update(files=[]),
        lambda fields: fields.pop("progress"),
        lambda fields: fields.update(extra=1),
        lambda fields: fields["files"].pop("index.json"),
        lambda fields: fields["files"]["rank-00000.safetensors"].update(bytes=-1),
        lambda fields: fields["files"]["rank-00000.safetensors"].update(bytes=1 << 70),
        lambda fields: fields["files"]["rank-00000.safetensors"].update(sha256="x"),
        lambda fields: fields.update(time=float("nan")),
        lambda fields: fields.update(time=float("inf")),
        lambda fields: fields.update(time=-1.0),
        lambda fields: fields.update(term=-1),
        lambda fields: fields.update(world_size=0),
        lambda fields: fields["progress"].update(guard={"mean": float("nan")}),
        lambda fields: fields["progress"].update(guard={"good_steps": -1}),
        lambda fields: fields["progress"].update(seed=1 << 70),
        lambda fields: fields["progress"].update(data="\x1b[2J"),
        lambda fields: fields["progress"].update(deep=[[[[[[[[[[1]]]]]]]]]]),
    ],
)
def test_a_forged_manifest_must_be_valid(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge(step_path(folder, 2), change)
    assert verify(step_path(folder, 2))


@pytest.mark.parametrize("name", ["../../x\x1b", "model/../../x", "/etc/x", "model/x\n", "model/\u202ex", "m" * 5000])
def test_a_forged_index_cannot_have_a_name_that_is_a_path_or_not_printable(folder: Path, name: str) -> None:
    path = step_path(folder, 2)
    index = json.loads((path / "index.json").read_text())
    index["tensors"][name] = index["tensors"].pop(next(iter(index["tensors"])))
    text = json.dumps(index).encode()
    (path / "index.json").write_bytes(text)
    record = {"bytes": len(text), "sha256": sha256(text).hexdigest()}
    forge(path, lambda fields: fields["files"].update({"index.json": record}))
    (damage,) = verify(path)
    assert damage.what.startswith("is invalid: the tensor name")
    assert str(damage).isprintable()


def test_a_tensor_name_that_could_not_be_read_again_is_not_written() -> None:
    row = ["model/x\x1b", "fp32", [1], [0], [1], "rank-00000.safetensors", 0]
    with pytest.raises(UserError, match="K006: the checkpoint cannot be written: the tensor name"):
        index_bytes((layout_of([row]),))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[" * 100_000, b"\xff" * 200, b"1" * 10_000])
def test_garbage_is_not_a_manifest(folder: Path, text: bytes) -> None:
    (step_path(folder, 2) / "manifest.json").write_bytes(text)
    assert [damage.file for damage in verify(step_path(folder, 2))] == ["manifest.json"]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "{}", '{"format": 1}', "1" * 10_000])
def test_garbage_with_a_right_digest_is_not_a_manifest(folder: Path, text: str) -> None:
    blank = text.encode() + ZERO_DIGEST.encode() + FILE_END
    forged = text.encode() + sha256(blank).hexdigest().encode() + FILE_END
    (step_path(folder, 2) / "manifest.json").write_bytes(forged)
    assert [str(damage) for damage in verify(step_path(folder, 2))] == ["manifest.json is not a manifest"]


def test_a_later_format_is_not_called_damaged(folder: Path) -> None:
    forge(step_path(folder, 2), lambda fields: fields.update(format=99))
    with pytest.raises(UserError, match="K008: this checkpoint has format 99"):
        DiskSource(step_path(folder, 2))
    with pytest.raises(UserError, match=r"K008: there is no checkpoint here: manifest.json is missing"):
        DiskSource(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor["parts"][0].__setitem__(1, 1 << 40), "lies outside of"),
        (lambda tensor: tensor["parts"][0].__setitem__(1, -8), "are not all counts"),
        (lambda tensor: tensor["parts"][0].__setitem__(0, 9), "is not an index"),
        (lambda tensor: tensor["parts"].pop(), "15 of 30 values"),
        (lambda tensor: tensor["parts"].__setitem__(1, tensor["parts"][0]), "two parts cover"),
        (lambda tensor: tensor["parts"][1].__setitem__(2, 5), "reaches out"),
        (lambda tensor: tensor["parts"][0].append(1), "another number of dimensions"),
        (lambda tensor: tensor.update(shape=[1 << 40, 1 << 40]), "values are there"),
        (lambda tensor: tensor.update(dtype="Q4"), "is not an index"),
    ],
)
def test_an_invalid_index_is_refused(folder: Path, change: Callable[[Any], None], message: str) -> None:
    fields = json.loads((step_path(folder, 2) / "index.json").read_bytes())
    sizes = {each.name: each.stat().st_size for each in step_path(folder, 2).iterdir()}
    assert parse_index(json.dumps(fields).encode(), sizes).keys() == tensors_of(2).keys()
    change(fields["tensors"]["model/weight"])
    with pytest.raises(ValueError, match=message):
        parse_index(json.dumps(fields).encode(), sizes)


def test_a_forged_safetensors_header_is_never_read(folder: Path) -> None:
    # The index says where tensors are. A header that claims an exabyte changes the checksum, and nothing else.
    path = step_path(folder, 2) / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes((1 << 60).to_bytes(8, "little") + content[8:])
    assert [damage.file for damage in verify(path.parent)] == [path.name]
    assert loads(path.parent, 2)


def test_a_linked_step_is_refused(folder: Path) -> None:
    step_path(folder, 3).symlink_to(step_path(folder, 2))
    assert complete_steps(folder) == [1, 2]
    assert without_manifest(folder) == [step_path(folder, 3)]
    assert [str(each) for each in verify(step_path(folder, 3))] == ["step-00000003 is a link"]


def test_a_tensor_that_is_not_covered_once_is_never_written() -> None:
    row = ["model/x", "F32", [4, 2], [0, 0], [2, 2], "rank-00000.safetensors", 128]
    for other, message in (
        ([3, 0], "values are there|reaches out"),
        ([1, 0], "two parts cover"),
        ([0, 0], "two parts"),
    ):
        rows = [row, ["model/x", "F32", [4, 2], other, [2, 2], "rank-00001.safetensors", 128]]
        with pytest.raises(AssertionError, match=message):
            index_bytes((layout_of(rows),))
    with pytest.raises(AssertionError, match="on another"):
        index_bytes((layout_of([row, [*row[:1], "F16", *row[2:]]]),))


def test_frozen_files_are_linked_and_not_written_again(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, 1)
    second = save_checkpoint(tmp_path, 2, previous=step_path(tmp_path, 1))
    for rank in (0, 1):
        one, two = (step_path(tmp_path, step) / f"rank-0000{rank}.frozen.safetensors" for step in (1, 2))
        assert one.stat().st_ino == two.stat().st_ino
        assert second[rank].num_bytes == first[rank].num_bytes == first[rank].written_bytes
        assert second[rank].written_bytes == first[rank].written_bytes - one.stat().st_size
    assert verify(step_path(tmp_path, 2)) == []
    prune(tmp_path, keep=1, keep_every=0, verified=2, disk=UnsyncedDisk())
    assert complete_steps(tmp_path) == [2]
    assert verify(step_path(tmp_path, 2)) == []
    assert loads(step_path(tmp_path, 2), 2)


def test_a_damaged_frozen_file_is_not_linked(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1)
    bad = step_path(tmp_path, 1) / "rank-00000.frozen.safetensors"
    content = bytearray(bad.read_bytes())
    content[-3] ^= 4
    bad.write_bytes(content)
    save_checkpoint(tmp_path, 2, previous=step_path(tmp_path, 1))
    assert verify(step_path(tmp_path, 2)) == []
    assert loads(step_path(tmp_path, 2), 2)


def test_frozen_files_are_written_where_links_do_not_work(tmp_path: Path) -> None:
    class Linkless(UnsyncedDisk):
        def link(self, old: Path, new: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    save_checkpoint(tmp_path, 1)
    reports = save_checkpoint(tmp_path, 2, previous=step_path(tmp_path, 1), disk=Linkless())
    assert all(report.written_bytes == report.num_bytes for report in reports)
    assert verify(step_path(tmp_path, 2)) == []


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1)
    before = {each.name: each.stat().st_ino for each in step_path(tmp_path, 1).iterdir()}
    save_checkpoint(tmp_path, 1, world_size=3)
    assert {each.name: each.stat().st_ino for each in step_path(tmp_path, 1).iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_a_broken_step_is_renamed_and_saved_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1)
    (step_path(tmp_path, 1) / "rank-00001.safetensors").unlink()
    save_checkpoint(tmp_path, 1, world_size=3)
    assert verify(step_path(tmp_path, 1)) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["refused-step-00000001", "step-00000001"]
    assert "incomplete" in json.loads((tmp_path / "refused-step-00000001" / "why.json").read_text())["why"]


def test_refused_checkpoints_do_not_overwrite_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        save_checkpoint(tmp_path, 1)
        refuse(step_path(tmp_path, 1), "a test says so", UnsyncedDisk())
    assert complete_steps(tmp_path) == []
    assert newest_step(tmp_path) is None
    names = ["refused-step-00000001", "refused-step-00000001-2", "refused-step-00000001-3"]
    assert sorted(each.name for each in tmp_path.iterdir()) == names


def test_the_newest_complete_step_is_found(folder: Path) -> None:
    (folder / ".step-00000009.ab.draft").mkdir()
    (folder / "step-00000010").mkdir()
    (folder / "notes").mkdir()
    assert newest_step(folder) == 2
    assert [each.name for each in without_manifest(folder)] == ["step-00000010"]
    assert remove_drafts(folder) == [".step-00000009.ab.draft"]
    assert sorted(each.name for each in folder.iterdir()) == [
        "notes",
        "step-00000001",
        "step-00000002",
        "step-00000010",
    ]
    assert newest_step(folder / "nowhere") is None
    assert remove_drafts(folder / "nowhere") == []


def test_old_steps_are_pruned_only_if_a_newer_one_is_verified() -> None:
    steps = [5, 10, 15, 20, 25]
    assert steps_to_prune(steps, keep=2, keep_every=0, verified=25) == [5, 10, 15]
    assert steps_to_prune(steps, keep=2, keep_every=10, verified=25) == [5, 15]
    assert steps_to_prune(steps, keep=1, keep_every=0, verified=10) == [5]
    assert steps_to_prune(steps, keep=9, keep_every=0, verified=25) == []


def test_nothing_is_pruned_for_a_step_that_does_not_exist(folder: Path) -> None:
    assert prune(folder, keep=1, keep_every=0, verified=3) == []
    assert prune(folder, keep=1, keep_every=0, verified=1) == []
    assert prune(folder, keep=1, keep_every=0, verified=2) == [1]
    assert complete_steps(folder) == [2]


def test_two_checkpoints_are_compared_whatever_their_sharding(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", 1, world_size=1)
    save_checkpoint(tmp_path / "b", 1, world_size=3)
    save_checkpoint(tmp_path / "b", 2, world_size=2)
    assert compare(step_path(tmp_path / "a", 1), step_path(tmp_path / "b", 1)) == []
    found = {each.key: each for each in compare(step_path(tmp_path / "a", 1), step_path(tmp_path / "b", 2))}
    assert found.keys() == {key for key in tensors_of(1) if "frozen" not in key}
    for key, each in found.items():
        one, two = (tensors_of(step)[key].double() for step in (1, 2))
        assert each.largest == pytest.approx((one - two).abs().max().item(), rel=1e-12)
        assert (each.num_different, each.num_values) == (int((one != two).sum()), one.numel())
