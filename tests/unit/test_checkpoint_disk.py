"""What is on the disk: readable by others, and refused when it is not what was written."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.checkpoints import Quick, keep, loads, tensors_of
from trimaran.checkpoint.compare_checkpoints import compare
from trimaran.checkpoint.disk_source import DiskSource, verify
from trimaran.checkpoint.manifest import BLANK, END, DamagedError, Manifest, read_manifest
from trimaran.checkpoint.rank_share import DTYPE_NAMES
from trimaran.checkpoint.shard_index import index_bytes, layout_of, parse_index
from trimaran.checkpoint.step_dirs import headless, newest, prune, refuse, step_path, steps, superfluous, sweep_drafts
from trimaran.core import UserError

SHARDS = {f"rank-0000{rank}{part}.safetensors" for rank in (0, 1) for part in ("", ".frozen")}
FILES = {"index.json", "manifest.json", *SHARDS}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    keep(tmp_path, 1)
    keep(tmp_path, 2)
    return tmp_path


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a checkpoint as somebody would who computes the digest anew."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    change(fields)
    fields["digest"] = "0" * 64
    text = json.dumps(fields, indent=1) + "\n"
    (folder / "manifest.json").write_text(text.replace("0" * 64, sha256(text.encode()).hexdigest()))


def test_a_checkpoint_is_what_it_says(shelf: Path) -> None:
    path = step_path(shelf, 2)
    assert {each.name for each in path.iterdir()} == FILES
    assert verify(path) == []
    assert loads(path, 2)
    assert {each.name for each in shelf.iterdir()} == {"step-00000001", "step-00000002"}
    manifest = read_manifest(path)
    assert manifest.files.keys() == FILES - {"manifest.json"}
    assert manifest == Manifest(step=2, world_size=2, progress={"step": 2, "loss_scale": 1024.0}, files=manifest.files)


def test_others_can_read_it_without_us(shelf: Path) -> None:
    # As docs/guides/checkpoints.md shows it: JSON and safetensors alone.
    path = step_path(shelf, 2)
    index = json.loads((path / "index.json").read_text())
    for key, whole in tensors_of(2).items():
        told = index["tensors"][key]
        assert (told["dtype"], told["shape"]) == (DTYPE_NAMES[whole.dtype], list(whole.shape))
        merged = torch.zeros_like(whole)
        for file, _, *corners in told["parts"]:
            start, size = corners[: whole.ndim], corners[whole.ndim :]
            with safe_open(path / index["files"][file], "pt") as tensors:
                values = tensors.get_tensor(f"{key}@{','.join(map(str, start))}")
            merged[tuple(slice(low, low + n) for low, n in zip(start, size, strict=True))] = values
        assert torch.equal(merged, whole)
    text = (path / "manifest.json").read_text()
    digest = json.loads(text)["digest"]
    assert sha256(text.replace(digest, "0" * 64).encode()).hexdigest() == digest


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("fault", ["short", "empty", "missing", "long", "linked", "a folder"])
def test_a_file_that_is_cut_or_gone_is_named(shelf: Path, name: str, fault: str) -> None:
    path = step_path(shelf, 2) / name
    content = path.read_bytes()
    path.unlink()
    if fault == "linked":
        (shelf / "elsewhere").write_bytes(content)
        path.symlink_to(shelf / "elsewhere")
    elif fault == "a folder":
        path.mkdir()
    elif fault != "missing":
        path.write_bytes({"short": content[:-1], "empty": b"", "long": content + b"\n"}[fault])
    assert name in {damage.file for damage in verify(path.parent)}
    assert verify(step_path(shelf, 1)) == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_single_bit_is_noticed_wherever_it_flips(shelf: Path, name: str) -> None:
    path = step_path(shelf, 2) / name
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 40)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert [damage.file for damage in verify(path.parent)] == [name]
    path.write_bytes(content)
    assert verify(path.parent) == []


def test_shards_that_trade_places_are_noticed(shelf: Path) -> None:
    one, other = (step_path(shelf, 2) / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    one.rename(shelf / "x")
    other.rename(one)
    (shelf / "x").rename(other)
    assert {damage.file for damage in verify(one.parent)} == {one.name, other.name}


@pytest.mark.parametrize("name", sorted(name for name in FILES if "frozen" not in name and name != "index.json"))
def test_a_file_of_another_step_is_noticed(shelf: Path, name: str) -> None:
    shutil.copy(step_path(shelf, 1) / name, step_path(shelf, 2) / name)
    assert name in {damage.file for damage in verify(step_path(shelf, 2))}


def test_a_whole_folder_under_the_name_of_another_step_is_noticed(shelf: Path) -> None:
    step_path(shelf, 1).rename(step_path(shelf, 3))
    assert [str(damage) for damage in verify(step_path(shelf, 3))] == ["manifest.json is of step 1"]


def test_ranks_verify_the_files_that_are_theirs(shelf: Path) -> None:
    bad = step_path(shelf, 2) / "rank-00001.safetensors"
    bad.write_bytes(bytes(bad.stat().st_size))
    assert verify(bad.parent, files=["rank-00000.safetensors"]) == []
    assert verify(bad.parent, files=[bad.name])[0].what == "is not what was written: its sum is wrong"
    assert verify(bad.parent, files=["../x"])[0].what == "is not in the manifest"


def test_a_foreign_file_is_noticed_and_never_read(shelf: Path) -> None:
    touch = f"cos\nsystem\n(S'touch {shelf}/hostile'\ntR."
    (step_path(shelf, 2) / "model.pt").write_text(touch)
    assert [str(damage) for damage in verify(step_path(shelf, 2))] == ["model.pt does not belong here"]
    assert loads(step_path(shelf, 2), 2)
    assert not (shelf / "hostile").exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "rank-00000.safetensors/../../x", "x.pt", "rank-1.safetensors", ""]
)
def test_a_forged_manifest_leads_nowhere_else(shelf: Path, name: str) -> None:
    path = step_path(shelf, 2)
    forge(path, lambda fields: fields["files"].update({name: {"bytes": 1, "sha256": "0" * 63 + "1"}}))
    (damage,) = verify(path)
    assert "which is no file of a checkpoint" in damage.what
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
    ],
)
def test_a_forged_manifest_must_make_sense(shelf: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge(step_path(shelf, 2), change)
    assert verify(step_path(shelf, 2))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[" * 100_000, b"\xff" * 200, b"1" * 10_000])
def test_rubbish_is_no_manifest(shelf: Path, text: bytes) -> None:
    (step_path(shelf, 2) / "manifest.json").write_bytes(text)
    assert [damage.file for damage in verify(step_path(shelf, 2))] == ["manifest.json"]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "{}", '{"format": 1}', "1" * 10_000])
def test_rubbish_with_a_right_digest_is_no_manifest(shelf: Path, text: str) -> None:
    blank = text.encode() + BLANK.encode() + END
    whole = text.encode() + sha256(blank).hexdigest().encode() + END
    (step_path(shelf, 2) / "manifest.json").write_bytes(whole)
    assert [str(damage) for damage in verify(step_path(shelf, 2))] == ["manifest.json is not a manifest"]


def test_a_later_format_is_not_called_damaged(shelf: Path) -> None:
    forge(step_path(shelf, 2), lambda fields: fields.update(format=2))
    with pytest.raises(UserError, match="K008: this checkpoint has format 2"):
        DiskSource(step_path(shelf, 2))
    with pytest.raises(UserError, match=r"K008: there is no checkpoint here: manifest.json is missing"):
        DiskSource(shelf)


@pytest.mark.parametrize(
    ("change", "words"),
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
def test_an_index_that_cannot_be_true_is_refused(shelf: Path, change: Callable[[Any], None], words: str) -> None:
    fields = json.loads((step_path(shelf, 2) / "index.json").read_bytes())
    sizes = {each.name: each.stat().st_size for each in step_path(shelf, 2).iterdir()}
    assert parse_index(json.dumps(fields).encode(), sizes).keys() == tensors_of(2).keys()
    change(fields["tensors"]["model/weight"])
    with pytest.raises(ValueError, match=words):
        parse_index(json.dumps(fields).encode(), sizes)


def test_a_hostile_header_is_not_even_looked_at(shelf: Path) -> None:
    # The index says where tensors are. A head that promises an exabyte changes the sum, and nothing else.
    path = step_path(shelf, 2) / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes((1 << 60).to_bytes(8, "little") + content[8:])
    assert [damage.file for damage in verify(path.parent)] == [path.name]
    assert loads(path.parent, 2)


def test_a_linked_step_is_refused(shelf: Path) -> None:
    step_path(shelf, 3).symlink_to(step_path(shelf, 2))
    assert steps(shelf) == [1, 2]
    assert headless(shelf) == [step_path(shelf, 3)]
    assert [str(each) for each in verify(step_path(shelf, 3))] == ["step-00000003 is a link"]


def test_a_state_that_is_not_covered_once_is_never_written() -> None:
    row = ["model/x", "F32", [4, 2], [0, 0], [2, 2], "rank-00000.safetensors", 128]
    for other, words in (([3, 0], "values are there|reaches out"), ([1, 0], "two parts cover"), ([0, 0], "two parts")):
        rows = [row, ["model/x", "F32", [4, 2], other, [2, 2], "rank-00001.safetensors", 128]]
        with pytest.raises(AssertionError, match=words):
            index_bytes((layout_of(rows),))
    with pytest.raises(AssertionError, match="on another"):
        index_bytes((layout_of([row, [*row[:1], "F16", *row[2:]]]),))


def test_what_is_frozen_is_linked_and_not_written_again(tmp_path: Path) -> None:
    first = keep(tmp_path, 1)
    second = keep(tmp_path, 2, previous=step_path(tmp_path, 1))
    for rank in (0, 1):
        one, two = (step_path(tmp_path, step) / f"rank-0000{rank}.frozen.safetensors" for step in (1, 2))
        assert one.stat().st_ino == two.stat().st_ino
        assert second[rank].num_bytes == first[rank].num_bytes == first[rank].written_bytes
        assert second[rank].written_bytes == first[rank].written_bytes - one.stat().st_size
    assert verify(step_path(tmp_path, 2)) == []
    prune(tmp_path, keep=1, keep_every=0, verified=2, disk=Quick())
    assert steps(tmp_path) == [2]
    assert verify(step_path(tmp_path, 2)) == []
    assert loads(step_path(tmp_path, 2), 2)


def test_a_frozen_file_that_went_bad_is_not_handed_on(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    bad = step_path(tmp_path, 1) / "rank-00000.frozen.safetensors"
    content = bytearray(bad.read_bytes())
    content[-3] ^= 4
    bad.write_bytes(content)
    keep(tmp_path, 2, previous=step_path(tmp_path, 1))
    assert verify(step_path(tmp_path, 2)) == []
    assert loads(step_path(tmp_path, 2), 2)


def test_where_links_do_not_work_it_is_copied(tmp_path: Path) -> None:
    class Linkless(Quick):
        def link(self, old: Path, new: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    keep(tmp_path, 1)
    receipts = keep(tmp_path, 2, previous=step_path(tmp_path, 1), disk=Linkless())
    assert all(receipt.written_bytes == receipt.num_bytes for receipt in receipts)
    assert verify(step_path(tmp_path, 2)) == []


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    before = {each.name: each.stat().st_ino for each in step_path(tmp_path, 1).iterdir()}
    keep(tmp_path, 1, world_size=3)
    assert {each.name: each.stat().st_ino for each in step_path(tmp_path, 1).iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_a_broken_step_makes_way_and_is_kept_aside(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (step_path(tmp_path, 1) / "rank-00001.safetensors").unlink()
    keep(tmp_path, 1, world_size=3)
    assert verify(step_path(tmp_path, 1)) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["refused-step-00000001", "step-00000001"]
    assert "not complete" in json.loads((tmp_path / "refused-step-00000001" / "why.json").read_text())["why"]


def test_refused_ones_do_not_write_over_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        keep(tmp_path, 1)
        refuse(step_path(tmp_path, 1), "a test says so", Quick())
    assert steps(tmp_path) == []
    assert newest(tmp_path) is None
    names = ["refused-step-00000001", "refused-step-00000001-2", "refused-step-00000001-3"]
    assert sorted(each.name for each in tmp_path.iterdir()) == names


def test_the_newest_is_looked_up(shelf: Path) -> None:
    (shelf / ".step-00000009.ab.draft").mkdir()
    (shelf / "step-00000010").mkdir()
    (shelf / "notes").mkdir()
    assert newest(shelf) == 2
    assert [each.name for each in headless(shelf)] == ["step-00000010"]
    assert sweep_drafts(shelf) == [".step-00000009.ab.draft"]
    assert sorted(each.name for each in shelf.iterdir()) == ["notes", "step-00000001", "step-00000002", "step-00000010"]
    assert newest(shelf / "nowhere") is None
    assert sweep_drafts(shelf / "nowhere") == []


def test_old_ones_go_only_when_a_newer_one_is_verified() -> None:
    there = [5, 10, 15, 20, 25]
    assert superfluous(there, keep=2, keep_every=0, verified=25) == [5, 10, 15]
    assert superfluous(there, keep=2, keep_every=10, verified=25) == [5, 15]
    assert superfluous(there, keep=1, keep_every=0, verified=10) == [5]
    assert superfluous(there, keep=9, keep_every=0, verified=25) == []


def test_nothing_goes_for_one_that_is_not_there(shelf: Path) -> None:
    assert prune(shelf, keep=1, keep_every=0, verified=3) == []
    assert prune(shelf, keep=1, keep_every=0, verified=1) == []
    assert prune(shelf, keep=1, keep_every=0, verified=2) == [1]
    assert steps(shelf) == [2]


def test_two_checkpoints_are_compared_however_they_were_cut(tmp_path: Path) -> None:
    keep(tmp_path / "a", 1, world_size=1)
    keep(tmp_path / "b", 1, world_size=3)
    keep(tmp_path / "b", 2, world_size=2)
    assert compare(step_path(tmp_path / "a", 1), step_path(tmp_path / "b", 1)) == []
    found = {each.key: each for each in compare(step_path(tmp_path / "a", 1), step_path(tmp_path / "b", 2))}
    assert found.keys() == {key for key in tensors_of(1) if "frozen" not in key}
    for key, each in found.items():
        one, two = (tensors_of(step)[key].double() for step in (1, 2))
        assert each.largest == pytest.approx((one - two).abs().max().item(), rel=1e-12)
        assert (each.num_different, each.num_values) == (int((one != two).sum()), one.numel())
