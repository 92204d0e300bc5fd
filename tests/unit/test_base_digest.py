"""The digest of an adapter's base is that of all bytes of its files, computed once, and says what has changed."""

import hashlib
import os
from pathlib import Path

import pytest

from trimaran.core import ModelSection, UserError
from trimaran.models import (
    BaseDigest,
    base_difference,
    base_reference,
    compute_base_digest,
    file_digest,
    file_identity,
    initial_digest,
)
from trimaran.train import assigned_files, file_holders

CONFIG = '{"model_type": "llama"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with two files of weights; only its names and bytes matter here."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * 1000)
    weights = '{"a": "model-1.safetensors", "b": "model-2.safetensors"}'
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {weights}}}')
    return folder


def test_the_digest_is_that_of_all_bytes_of_config_and_weights(folder: Path) -> None:
    digest = compute_base_digest(ModelSection(path=str(folder)), 0, None)
    names = ("config.json", "model-1.safetensors", "model-2.safetensors")
    assert digest.files == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    assert digest.initial == ""
    assert compute_base_digest(ModelSection(path=str(folder)), 1, None) == digest, "the seed draws no weight"


def test_a_difference_names_the_file_and_both_digests(folder: Path) -> None:
    section = ModelSection(path=str(folder))
    before = compute_base_digest(section, 0, None).as_dict()
    assert base_difference(before, compute_base_digest(section, 0, None).as_dict()) == ""
    file = folder / "model-2.safetensors"
    file.write_bytes(b"\0" + file.read_bytes()[1:])
    after = compute_base_digest(section, 0, None).as_dict()
    old, new = (each["files"][file.name][:12] for each in (before, after))
    assert base_difference(before, after) == f"{file.name} has other contents (SHA-256 {old}, now {new})"
    (folder / "model.safetensors.index.json").unlink()
    file.rename(folder / "model.safetensors")
    assert "model.safetensors is new" in base_difference(before, compute_base_digest(section, 0, None).as_dict())


def test_a_file_is_hashed_again_only_if_it_has_changed(folder: Path, tmp_path: Path) -> None:
    file, cache, read = folder / "model-1.safetensors", tmp_path / "cache", []
    first = file_digest(file, cache, read.append, settled_ns=-60 * 10**9)  # as if it had been there for a minute
    (note,) = (cache / "base-digests").iterdir()
    assert note.read_text() == f"{first}\n"
    note.write_text("f" * 64)
    assert file_digest(file, cache, read.append) == "f" * 64, "the file is not read again"
    assert read == [1000, 1000], "progress counts a file that is not read too"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(b"\7" * 1000)
    os.utime(file, ns=times)  # size and time are the old ones
    assert file_digest(file, cache) == hashlib.sha256(b"\7" * 1000).hexdigest() != first


def test_a_file_that_has_just_changed_is_not_cached(folder: Path, tmp_path: Path) -> None:
    file_digest(folder / "model-1.safetensors", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changes_while_it_is_read_is_an_error(folder: Path, tmp_path: Path) -> None:
    file = folder / "model-1.safetensors"
    with pytest.raises(UserError, match=r"K048.* it changed while it was read"):
        file_digest(file, None, lambda num_bytes: file.write_bytes(b"other"))  # pyrefly: ignore[bad-argument-type]


def test_random_weights_are_identified_by_shape_and_seed() -> None:
    tiny, wider = ModelSection(preset="tiny"), ModelSection(preset="tiny", shape={"ffn": 768})
    digests = {initial_digest(tiny, 0), initial_digest(tiny, 1), initial_digest(wider, 0)}
    assert len(digests) == 3
    assert initial_digest(ModelSection(preset="tiny"), 0) in digests
    first, second = (BaseDigest(initial=each).as_dict() for each in sorted(digests)[:2])
    assert base_difference(first, second) == "its random weights depend on another shape or seed"


def test_ranks_that_share_a_disk_share_the_files_out(folder: Path) -> None:
    here = {path.name: file_identity(path) for path in folder.glob("model-*")}
    other = {name: [*identity[:-1], identity[-1] + 1] for name, identity in here.items()}  # another machine's copy
    holders = file_holders([here, here, other, other])
    work = [assigned_files(holders, rank=rank) for rank in range(4)]
    assert sorted(work[0] + work[1]) == sorted(work[2] + work[3]) == sorted(here)
    assert all(len(each) == 1 for each in work)
    with pytest.raises(UserError, match=r"K049.*model-1\.safetensors is not on all"):
        file_holders([here, {"model-2.safetensors": [1, 2, 3, 4]}])


def test_a_base_from_the_hub_is_called_by_its_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "060db64"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(CONFIG)
    assert base_reference(ModelSection(path=str(snapshot))) == ("Qwen/Qwen2.5-0.5B", "060db64")
    assert base_reference(ModelSection(preset="tiny")) == (None, None)
