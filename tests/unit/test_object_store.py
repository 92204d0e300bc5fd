"""Checkpoints in an object store, on a real folder through fsspec: complete or absent, whatever fails."""

import errno
import json
import os
import shutil
import signal
import threading
import tracemalloc
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoints import Crash, LocalStore, loads, save_checkpoint
from tests.fault.harness import wait_for
from trimaran.checkpoint import (
    MANIFEST,
    NUM_TRANSFERS,
    DamagedError,
    FileRecord,
    Manifest,
    ObjectStore,
    RankLayout,
    StoreClient,
    StoreError,
    StoreRequests,
    StoreUploads,
    UploadResult,
    complete_steps,
    manifest_bytes,
    open_store,
    read_manifest,
    refuse_ordered,
    step_path,
)
from trimaran.core import CheckpointSection, UserError, parse_recipe

OWNER = {"run": "0123456789abcdef", "host": "a", "path": "/runs/a", "time": 1.0}
OTHER = OWNER | {"run": "fedcba9876543210", "path": "/runs/b"}


class FaultyFiles(LocalFileSystem):
    """A local folder that fails with `error` at its n-th call, from 0, and at the `length` - 1 calls after it."""

    protocol = "faulty"
    cachable = False

    def __init__(self, *, fail_at: int = -1, length: int = 1, error: BaseException | None = None) -> None:
        super().__init__()
        self.fail_at, self.length, self.error, self.calls = fail_at, length, error or OSError("connection lost"), 0

    def count_call(self) -> None:
        self.calls += 1
        if self.fail_at <= self.calls - 1 < self.fail_at + self.length:
            raise self.error

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        self.count_call()
        file = super()._open(path, mode, block_size, **kwargs)
        return FaultyFile(self, file) if "w" in mode else file


def _counted(name: str) -> Any:
    def call(self: FaultyFiles, *args: Any, **kwargs: Any) -> Any:
        self.count_call()
        return getattr(LocalFileSystem, name)(self, *args, **kwargs)

    return call


for _name in ("ls", "makedirs", "mv", "rm", "rm_file", "cp_file"):
    setattr(FaultyFiles, _name, _counted(_name))


class FaultyFile:
    """A file that is written by half when the file system fails."""

    def __init__(self, files: FaultyFiles, file: Any) -> None:
        self._files, self.f = files, file

    def write(self, data: bytes) -> int:
        try:
            self._files.count_call()
        except BaseException:
            self.f.write(data[: len(data) // 2])
            self.f.flush()
            raise
        return self.f.write(data)

    def __enter__(self) -> "FaultyFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.count_call()
        self.f.close()


def store_in(folder: Path, **faults: Any) -> ObjectStore:
    return ObjectStore(f"file://{folder}", FaultyFiles(**faults), str(folder), has_folders=True)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2, whose frozen tensors are equal."""
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, 1)
    save_checkpoint(folder, 2, previous=step_path(folder, 1))
    return folder


def put(store: ObjectStore, folder: Path, step: int, **options: Any) -> int:
    path = step_path(folder, step)
    sent = store.upload(path, read_manifest(path).files, **options)
    store.publish(path)
    return sent


def complete_in(store: ObjectStore) -> list[int]:
    return [each.step for each in store.steps() if each.complete]


def test_a_checkpoint_comes_back_from_the_store_bit_for_bit(local: Path, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store/run")
    assert store.steps() == []
    assert put(store, local, 1) == read_manifest(step_path(local, 1)).num_bytes
    (stored,) = store.steps()
    assert (stored.step, stored.complete, store.verify(stored.name)) == (1, True, [])
    manifest, text = store.read_manifest(stored.name)
    target = step_path(tmp_path / "fresh", 1)
    assert store.fetch(stored.name, manifest.files, target) == []
    (target / MANIFEST).write_bytes(text)
    assert loads(target, 1)
    assert {each.name for each in target.iterdir()} == {each.name for each in step_path(local, 1).iterdir()}


def test_wherever_an_upload_is_killed_the_store_shows_no_half_of_a_checkpoint(local: Path, tmp_path: Path) -> None:
    object_store_calls = FaultyFiles()
    counting = ObjectStore("file://x", object_store_calls, str(tmp_path / "counting"), has_folders=True)
    put(counting, local, 1)
    assert object_store_calls.calls > 15
    for number in range(object_store_calls.calls):
        folder = tmp_path / f"killed-{number}"
        with pytest.raises((Crash, StoreError)):
            put(store_in(folder, fail_at=number, length=10**6, error=Crash("killed")), local, 1)
        after = store_in(folder)
        for stored in after.steps():
            assert not stored.complete or after.verify(stored.name) == [], number
        put(after, local, 1)  # the next attempt
        (stored,) = after.steps()
        assert stored.complete, number
        assert after.verify(stored.name) == [], number


def test_an_upload_that_fails_is_tried_again_and_then_gives_up_without_a_trace(local: Path, tmp_path: Path) -> None:
    path, notices = step_path(local, 1), list[str]()
    flaky = store_in(tmp_path / "flaky", fail_at=3, length=2)
    put(flaky, local, 1, delays=(0.0, 0.0, 0.0), notify=notices.append)
    assert complete_in(flaky) == [1]
    assert "connection lost; trying again in 0 s" in notices[0]
    down = store_in(tmp_path / "down", fail_at=3, length=10**6)
    with pytest.raises(StoreError, match="connection lost"):
        down.upload(path, read_manifest(path).files, delays=(0.0, 0.0))
    with pytest.raises(StoreError, match="have not arrived"):
        store_in(tmp_path / "down").publish(path)
    assert complete_in(store_in(tmp_path / "down")) == []


def test_a_full_store_keeps_its_older_checkpoints_and_leftovers_go_with_the_next(local: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    put(store_in(folder), local, 1)
    full = store_in(folder, fail_at=6, length=10**6, error=OSError(errno.ENOSPC, "No space left on device"))
    path = step_path(local, 2)
    with pytest.raises(StoreError, match="No space left"):
        full.upload(path, read_manifest(path).files)
    store = store_in(folder)
    assert complete_in(store) == [1]
    assert len(store.steps()) == 2, "what was uploaded of step 2 is left"
    store.remove_unfinished("step-00000003-00000000")
    assert [each.step for each in store.steps()] == [1]


def test_damage_in_the_store_is_found_by_length_and_by_checksum(local: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    put(store, local, 1)
    (stored,) = store.steps()
    folder = tmp_path / "store" / stored.name
    name = "rank-00001.safetensors"
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [str(each) for each in store.verify(stored.name)] == [
        f"{name} is not what was written: its checksum is wrong"
    ]
    (folder / name).write_bytes(whole[:-1])
    records = read_manifest(step_path(local, 1)).files
    (damage,) = store.fetch(stored.name, records, tmp_path / "target")
    assert damage.file == name
    assert "bytes instead of" in damage.what
    assert not (tmp_path / "target").exists()
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes().replace(b'"term": 0', b'"term": 1'))
    with pytest.raises(DamagedError, match="digest"):
        store.read_manifest(stored.name)


def test_damage_on_the_disk_is_not_uploaded(local: Path, tmp_path: Path) -> None:
    file = step_path(local, 1) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    store = store_in(tmp_path / "store")
    with pytest.raises(DamagedError, match="checksum is wrong"):
        put(store, local, 1)
    assert complete_in(store) == []


def test_unchanged_files_are_copied_within_the_store(local: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    put(store, local, 1)
    (first,) = store.steps()
    before, after = (read_manifest(step_path(local, step)) for step in (1, 2))
    changed = {name: record.bytes for name, record in after.files.items() if before.files[name] != record}
    assert changed.keys() == {"rank-00000.safetensors", "rank-00001.safetensors"}, "and not the frozen files"
    assert put(store, local, 2, previous=(first.name, before)) == sum(changed.values())
    assert store.verify(store.steps()[1].name) == []
    assert put(store, local, 2) == 0, "what is there is not sent again"


def test_the_store_keeps_what_the_run_keeps(tmp_path: Path) -> None:
    folder, store = tmp_path / "checkpoints", store_in(tmp_path / "store")
    for step in range(1, 7):
        save_checkpoint(folder, step)
        put(store, folder, step)
    shutil.copytree(step_path(folder, 2), tmp_path / "store" / "step-00000002-0badc0de")
    (tmp_path / "store" / "step-00000002-0badc0de" / MANIFEST).unlink()
    store.prune(store.steps()[-1].name, keep=2, keep_every=3)
    assert [each.step for each in store.steps()] == [3, 5, 6]


def test_a_step_that_is_saved_again_replaces_the_one_before(local: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    put(store, local, 2)
    path = step_path(local, 2)
    manifest = read_manifest(path)
    (path / MANIFEST).write_bytes(manifest_bytes(Manifest(step=2, time=9.0, files=manifest.files, recipe="name: y\n")))
    put(store, local, 2)
    assert len(store.steps()) == 2
    newest = next(each.name for each in store.steps() if store.read_manifest(each.name)[0].time == 9.0)
    store.prune(newest, keep=2, keep_every=0)
    assert [each.name for each in store.steps()] == [newest]


def test_states_that_turned_out_to_be_bad_are_refused_in_the_store_and_never_removed(
    local: Path, tmp_path: Path
) -> None:
    store = store_in(tmp_path / "store")
    put(store, local, 1)
    put(store, local, 2)
    assert store.refuse_later(1, before=-1.0) == [], "what was saved after the run went back is good"
    (bad,) = store.refuse_later(1, before=1.0)
    assert complete_in(store) == [1]
    store.prune(store.steps()[0].name, keep=1, keep_every=0)
    assert [each.name for each in store.steps()] == [store.steps()[0].name, bad]


def test_an_upload_takes_little_memory(tmp_path: Path) -> None:
    folder, num_bytes = step_path(tmp_path, 1), 16 << 20
    folder.mkdir()
    data = os.urandom(num_bytes)
    files = {name: FileRecord(num_bytes, sha256(data).hexdigest()) for name in ("rank-00000.safetensors", "index.json")}
    for name in files:
        (folder / name).write_bytes(data)
    (folder / MANIFEST).write_bytes(manifest_bytes(Manifest(step=1, files=files)))
    store = open_store(f"file://{tmp_path}/store", block_bytes=1 << 19)
    tracemalloc.start()
    try:
        put(store, tmp_path, 1)
        (stored,) = store.steps()
        store.fetch(stored.name, files, tmp_path / "target")
        assert store.verify(stored.name) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * NUM_TRANSFERS << 19


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("bucket/run", "is a URL of fsspec"),
        ("s3://key:secret@bucket/run", "does not belong in a recipe"),
        ("sftp://me:pw@host/run", "does not belong in a recipe"),
        ("file://runs/a", "begins with a slash"),
        ("s3://bucket/run?key=x", "is a URL of fsspec"),
    ],
)
def test_a_store_that_is_not_a_url_or_has_a_secret_is_refused(url: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_recipe("", name="test", overrides=[f"checkpoint.store={json.dumps(url)}"])


def test_a_missing_backend_names_its_package() -> None:
    recipe = parse_recipe("", name="test", overrides=["checkpoint.store=adl://me@store/run/"])
    assert recipe.checkpoint.store == "adl://me@store/run"
    with pytest.raises(UserError, match=r"K060[^$]*adlfs[^$]*pip install adlfs, on every machine"):
        open_store(recipe.checkpoint.store)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StoreClient]:
    found = StoreClient(f"file://{tmp_path}/store", delays=(0.0,))
    yield found
    found.close()


def test_the_process_survives_failures_and_is_replaced_when_killed(
    local: Path, tmp_path: Path, client: StoreClient
) -> None:
    (tmp_path / "store").write_text("a file is no store")
    with pytest.raises(StoreError, match="store"):
        client.call("claim", owner=OWNER, take_over=False)
    (tmp_path / "store").unlink()
    assert client.call("claim", owner=OWNER, take_over=False) is None
    assert client.call("claim", owner=OTHER, take_over=False)["path"] == "/runs/a"
    (process,) = [each for each in psutil.Process().children() if each.name() == "trimaran-store"]
    process.send_signal(signal.SIGSTOP)  # so that the request is under way when it is killed
    kill = threading.Timer(0.5, process.send_signal, [signal.SIGKILL])
    kill.start()
    with pytest.raises(StoreError, match="ended with code -9"):
        client.call("steps")
    kill.join()
    assert client.call("steps") == {}
    path = step_path(local, 1)
    names = list(read_manifest(path).files)
    assert client.call("upload", folder=str(path), files=names, clean=True)["sent_bytes"] > 0
    assert "taken over" in client.call("publish", folder=str(path), owner=OTHER, keep=1, keep_every=0)
    assert client.call("publish", folder=str(path), owner=OWNER, keep=1, keep_every=0) == {"is_new": True}
    assert list(client.call("steps")) == ["1"]


class DirectClient:
    """Stands for the process, in this one: `StoreUploads` calls it from its thread."""

    def __init__(self, url: str, **faults: str) -> None:
        self.url, self.faults, self._answers = url, faults, list[dict[str, Any]]()
        self._requests = StoreRequests(url, self._answers.append)

    def call(self, do: str, report_progress: Any = None, **fields: Any) -> Any:
        if do in self.faults:
            raise StoreError(self.faults[do])
        self._requests.handle({"do": do, "delays": [], **fields})
        answer = self._answers.pop()
        if "error" in answer:
            raise StoreError(answer["error"])
        return answer["result"]


def uploads_of(folder: Path, url: str, *ranks: dict[str, str] | DirectClient) -> list[StoreUploads]:
    """Return the uploads of nodes with one rank each on a shared disk; `ranks` are the faults or the client of each."""
    messages, nodes = LocalStore(), tuple(range(len(ranks)))
    return [
        StoreUploads(
            folder,
            RankLayout(rank=rank, local_rank=0, nodes=nodes),
            messages,
            client if isinstance(client, DirectClient) else DirectClient(url, **client),  # pyrefly: ignore
            CheckpointSection(keep=1),
            owner=OWNER,
            nonce="ab",
        )
        for rank, client in enumerate(ranks)
    ]


def finished(nodes: list[StoreUploads]) -> list[UploadResult]:
    wait_for(lambda: all(each.wait(1.0) for each in nodes))
    return nodes[0].results()


def test_every_node_uploads_its_part_and_the_first_completes_it(local: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    nodes = uploads_of(local, url, {}, {})
    nodes[0].skip()
    results = list[UploadResult]()
    for step in (1, 2):  # the next one is ordered when all nodes are done with the last
        for each in nodes:
            each.start(step)
        results += finished(nodes)
    first, second = results
    assert second.failed == ""
    manifest = read_manifest(step_path(local, 1))
    assert (first.step, first.failed, first.skipped, first.bytes) == (1, "", 1, manifest.num_bytes)
    assert second.sent_bytes < second.bytes == manifest.num_bytes
    store = open_store(url)
    assert complete_in(store) == [2], "retention follows checkpoint.keep"
    for each in nodes:
        each.start(2)
    assert finished(nodes) == [], "the store has it: nothing to report"


def test_if_one_node_fails_the_checkpoint_is_not_complete_and_the_next_is_tried(local: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    failing = DirectClient(url, upload="connection lost")
    nodes = uploads_of(local, url, {}, failing)
    for each in nodes:
        each.start(1)
    (result,) = finished(nodes)
    assert (result.step, result.failed) == (1, "connection lost")
    assert complete_in(open_store(url)) == []
    failing.faults.clear()
    for each in nodes:
        each.start(2)
    (result,) = finished(nodes)
    assert (result.step, result.failed) == (2, "")
    assert [each.step for each in open_store(url).steps()] == [2], "what was left of step 1 is gone"


def test_a_store_that_another_run_directory_has_taken_over_is_left_alone(local: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    nodes = uploads_of(local, url, {})
    nodes[0].start(1)
    assert finished(nodes)[0].failed == ""
    open_store(url).claim(OTHER)
    nodes[0].start(2)
    assert "another run directory writes to this store: /runs/b on a" in finished(nodes)[0].failed
    nodes[0].refuse_later(0)
    finished(nodes)
    assert complete_steps(local) == [1, 2]
    assert complete_in(open_store(url)) == [1]


def test_an_order_to_refuse_outlives_the_run_that_gave_it(local: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    put(open_store(url), local, 1)
    put(open_store(url), local, 2)
    nodes = uploads_of(local, url, {"refuse_later": "connection lost"})
    nodes[0].refuse_later(1)
    (result,) = finished(nodes)
    assert result.failed == "connection lost"
    assert complete_in(open_store(url)) == [1, 2]
    refuse_ordered(DirectClient(url), local)  # pyrefly: ignore[bad-argument-type]
    assert complete_in(open_store(url)) == [1]
    refuse_ordered(DirectClient(url, refuse_later="not again"), local)  # pyrefly: ignore[bad-argument-type]
