"""Names on the Hub: fetched from a real HTTP server that speaks the Hub's API, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub_server import FakeRepo, HubState, hub_server
from trimaran.core import UserError
from trimaran.models import (
    HubRepo,
    dataset_folder,
    hub_error,
    hub_repo_of,
    is_hub_name,
    near_folder,
    repo_name,
    split_of_folder,
)

WEIGHTS = bytes(range(256)) * 98_304  # 24 MiB: huggingface_hub writes 10 MiB at a time
SHA, DATA_SHA = "0123456789abcdef0123456789abcdef01234567", "f" * 40
SCRIPT = """
import json, sys
from pathlib import Path
from trimaran.core import UserError
from trimaran.models.hub_files import fetch_dataset
from trimaran.models.hub_files import fetch_model, fetch_small_files
from trimaran.models.hub_names import HubRepo

for line in sys.argv[1:]:
    what, name, revision, rest = (line.split(",") + ["", ""])[:4]
    kind = "dataset" if what == "dataset" else "model"
    repo = HubRepo(kind=kind, name=name, revision=revision or None)
    fractions = []
    try:
        if what == "dataset":
            folder = fetch_dataset(repo, Path("cache"), subset=None, split=rest)
        elif what == "all":
            folder = fetch_model(repo, fractions.append)
        else:
            folder = fetch_small_files(repo, only_config=what == "config")
        found = {"folder": str(folder), "files": sorted(each.name for each in folder.iterdir())}
    except UserError as error:
        found = error.as_dict()
    print(json.dumps(found))
"""


@pytest.fixture
def state(tmp_path: Path) -> HubState:
    model, pickled, data = (tmp_path / name for name in ("model", "pickled", "data"))
    for folder in (model, pickled, data / "data"):
        folder.mkdir(parents=True)
    for folder in (model, pickled):
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(WEIGHTS)
    (model / "original").mkdir()
    (model / "original" / "consolidated.safetensors").write_bytes(b"twice")
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}] * 5
    pq.write_table(pa.Table.from_pylist(rows), data / "data" / "train_sft-00000-of-00001.parquet")
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train_sft\n    path: data/train_sft-*\n---\n"
    )
    return HubState(
        repos={
            "Qwen/Tiny": FakeRepo(folder=model, sha=SHA),
            "old/Pickled": FakeRepo(folder=pickled),
            "meta/Gated": FakeRepo(folder=model, gated=True),
            "datasets/HuggingFaceH4/chats": FakeRepo(folder=data, sha=DATA_SHA),
        }
    )


def fetch(tmp_path: Path, endpoint: str, *calls: str, **environment: str) -> list[dict[str, Any]]:
    """Run the calls in a process of their own, because huggingface_hub reads its environment when it is imported."""
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"} | environment
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    command = [sys.executable, "-c", SCRIPT, *calls]
    done = subprocess.run(command, cwd=tmp_path, env=clean | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_is_fetched_without_pickles_and_again_without_a_network(tmp_path: Path, state: HubState) -> None:
    with hub_server(state) as endpoint:
        state.break_after["model.safetensors"] = 15_000_000
        config, whole = fetch(tmp_path, endpoint, "config,Qwen/Tiny", f"all,Qwen/Tiny,{SHA}")
    assert config["files"] == ["config.json"]
    assert config["folder"] == whole["folder"]
    assert hub_repo_of(whole["folder"]) == ("Qwen/Tiny", SHA)
    assert whole["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(whole["folder"]) / "model.safetensors").read_bytes() == WEIGHTS
    assert [name for name, begin in state.ranges if begin != "bytes=0-"] == ["model.safetensors"]  # it continued
    (again,) = fetch(tmp_path, "http://127.0.0.1:9", "all,Qwen/Tiny")  # nothing listens there
    assert again["folder"] == whole["folder"]


def test_every_failure_has_its_error_and_the_command(tmp_path: Path, state: HubState) -> None:
    calls = ("config,Qwen/Absent", "config,meta/Gated", "config,Qwen/Tiny,nope", "all,old/Pickled")
    with hub_server(state) as endpoint:
        absent, gated, revision, pickled = fetch(tmp_path, endpoint, *calls)
    assert [each["code"] for each in (absent, gated, revision, pickled)] == ["M041", "M041", "M041", "M042"]
    assert "no model Qwen/Absent" in absent["what"]
    assert "gated" in gated["what"]
    assert "hf auth login" in gated["fix"]
    assert "no revision 'nope'" in revision["what"]
    assert "pickles" in pickled["what"]
    assert "pytorch_model.bin" not in state.fetched()
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (unreachable,) = fetch(tmp_path, "http://127.0.0.1:9", "all,modls/qwen,v1")
    assert "cannot be reached (did you mean the folder 'models/qwen'?)" in unreachable["what"]
    assert "`hf download modls/qwen --revision v1 --local-dir ./qwen`" in unreachable["fix"]


@pytest.mark.slow
def test_a_split_of_a_dataset_is_stored_under_its_commit(tmp_path: Path, state: HubState) -> None:
    calls = ("dataset,HuggingFaceH4/chats,,train", "dataset,HuggingFaceH4/chats,,train_sft")
    with hub_server(state) as endpoint:
        wrong, stored = fetch(tmp_path, endpoint, *calls)
        state.requests.clear()
        (again,) = fetch(tmp_path, endpoint, f"dataset,HuggingFaceH4/chats,{DATA_SHA},train_sft")
    assert wrong["code"] == "T064"
    assert "train_sft" in wrong["what"]
    folder = tmp_path / stored["folder"]
    assert stored["files"] == ["data.parquet"]
    assert pq.read_table(folder / "data.parquet").num_rows == 5
    assert again["folder"] == stored["folder"]
    assert state.fetched() == set()
    repo, subset, split = split_of_folder(folder) or pytest.fail("the path says what it holds")
    assert (repo.name, repo.revision, subset, split) == ("HuggingFaceH4/chats", DATA_SHA, None, "train_sft")
    assert dataset_folder(tmp_path / "cache", repo, DATA_SHA, subset=None, split=split) == folder


def test_names_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    assert is_hub_name("Qwen/Qwen2.5-0.5B")
    assert not any(map(is_hub_name, ("models/qwen", "models/gone", "./a/b", "/a/b", "../a", "a", "a/b/c", "~/x")))
    assert near_folder("./modls/qwen") == "./models/qwen"
    assert near_folder("models/qwne") == "models/qwen"
    assert near_folder("something/else") == ""
    snapshot = Path("/h/hub/models--Qwen--Qwen2.5-0.5B/snapshots") / SHA
    assert hub_repo_of(snapshot) == ("Qwen/Qwen2.5-0.5B", SHA)
    assert repo_name(snapshot) == "Qwen2.5-0.5B"
    assert hub_repo_of("/models/Qwen2.5-0.5B") is None


def test_a_hub_that_is_switched_off_and_a_full_disk_are_said() -> None:
    repo = HubRepo(kind="model", name="a/b")
    assert "HF_HUB_OFFLINE is set" in hub_error(ConnectionError("no"), repo, is_offline=True).what
    error = hub_error(OSError(28, "No space left on device"), HubRepo(kind="model", name="a/b"), is_offline=False)
    assert isinstance(error, UserError)
    assert "disk is full" in error.what
