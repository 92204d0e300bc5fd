"""Special files in place of each kind of file that a command reads: one clear error, and no command waits."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.checkpoints import save_checkpoint
from tests.runs import finished_run
from tests.special_files import KINDS, no_longer_than, put
from trimaran.app import main
from trimaran.checkpoint import DcpSource, step_path
from trimaran.core import DataSection, UserError
from trimaran.data import (
    BadSampleError,
    ImageFiles,
    TokenShards,
    json_rows,
    prepare,
    read_quarantine,
    read_tar,
    text_of,
)
from trimaran.models import weight_files
from trimaran.runs import RunDirectory, append_line, read_request, request_file

LIMIT_SECONDS = 30.0
NOT_LINKS = [kind for kind in KINDS if kind != "link"]  # a person may name a link


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    with no_longer_than(LIMIT_SECONDS):
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return finished_run(tmp_path / "run")


def refusal(capsys: Any, *arguments: str) -> str:
    """Run a command that must end with the exit code 2, and return what it printed."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    return printed.err + printed.out


@pytest.mark.parametrize("kind", NOT_LINKS)
def test_recipes_clusters_and_plans(tmp_path: Path, kind: str, capsys: Any) -> None:
    file = tmp_path / "x.yaml"
    put(kind, file)
    assert KINDS[kind] in refusal(capsys, "plan", str(file))
    assert KINDS[kind] in refusal(capsys, "plan", "--set", f"cluster={file}")
    if kind != "fifo":
        assert KINDS[kind] in refusal(capsys, "predict", str(file))


def test_predict_reads_a_fifo_as_a_shell_makes_one(tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("{}\n"), daemon=True)
    writer.start()
    assert main(["predict", str(tmp_path / "pipe"), "--json"]) == 0
    assert "error" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", NOT_LINKS)
def test_models(tmp_path: Path, kind: str, capsys: Any) -> None:
    put(kind, tmp_path / "config.json")
    refusal(capsys, "plan", "--set", f"model.path={tmp_path}", "--set", "model.family=hf")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        put(kind, tmp_path / name)
        with pytest.raises(UserError, match=KINDS[kind].replace("(", r"\(")):
            weight_files(tmp_path)
        (tmp_path / name).rmdir() if kind == "folder" else (tmp_path / name).unlink()


def test_a_model_folder_of_links_works(tmp_path: Path) -> None:
    """In a Hugging Face cache every file of a model is a link to a blob."""
    save_file({"x": torch.ones(1)}, tmp_path / "blob")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert weight_files(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-00000.safetensors", "rank-00001.safetensors"])
def test_checkpoints(run: RunDirectory, kind: str, name: str, capsys: Any) -> None:
    save_checkpoint(run.checkpoints, 2)
    save_checkpoint(run.checkpoints, 4)
    put(kind, step_path(run.checkpoints, 4) / name)
    assert main(["checkpoints", "verify", str(run.path)]) == 1
    assert name in capsys.readouterr().out
    assert main(["checkpoints", str(run.path)]) == 0
    if name.startswith("rank"):
        assert main(["checkpoints", "compare", str(run.path), "2", "4"]) != 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_imports(tmp_path: Path, kind: str, name: str) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    put(kind, tmp_path / "dcp" / name)
    with pytest.raises(UserError) as caught:
        DcpSource(tmp_path / "dcp")
    assert caught.value.code == "K020"


@pytest.mark.parametrize("kind", KINDS)
def test_required_files_of_a_run(run: RunDirectory, kind: str, capsys: Any) -> None:
    for file in (run.plan, run.recipe):
        put(kind, file)
        for command in ("doctor", "report"):
            assert KINDS[kind] in refusal(capsys, command, str(run.path))
        assert KINDS[kind] in refusal(capsys, "resume", str(run.path))
        (file.rmdir() if kind == "folder" else file.unlink())
        if kind == "link":
            file.with_name(f"{file.name}.elsewhere").rename(file)
        else:
            break  # the other file is no longer reached


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_of_a_run_are_never_waited_for(run: RunDirectory, kind: str, capsys: Any) -> None:
    for file in (run.metrics, run.incidents, run.events(0), run.events(1), run.log(0), run.agent_log):
        put(kind, file)
    put(kind, request_file(run))
    put(kind, run.lease / "term-000001.json")
    for command in ("incidents", "doctor", "report", "watch"):
        assert main([command, str(run.path)]) in (0, 1, 2)
    assert read_request(run) is None
    with pytest.raises(UserError, match=KINDS[kind]):
        append_line(run.incidents, {"id": "i-0001"})
    put(kind, run.quarantine)
    with pytest.raises(UserError, match="T021"):
        read_quarantine(run.quarantine)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", NOT_LINKS)
def test_data(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "x.jsonl"
    put(kind, file)
    if kind != "folder":
        with pytest.raises(UserError, match="T004"):
            prepare(DataSection(source="text", path=str(file)), cache=tmp_path / "cache")
    (bad,) = [row for _, row, _ in json_rows(file, float)]
    assert isinstance(bad, BadSampleError)
    assert KINDS[kind] in str(bad)
    with pytest.raises(BadSampleError, match=KINDS[kind].replace("(", r"\(")):
        text_of(file)
    (sample,) = read_tar(file, "text", float)
    assert KINDS[kind] in (sample.bad or "")
    images = ImageFiles(tmp_path, np.array([[len(file.name), 4, 0]]), np.frombuffer(file.name.encode(), np.uint8))
    with pytest.raises(OSError, match=KINDS[kind].replace("(", r"\(")):
        images.read(0, 0, 4)


@pytest.mark.parametrize("kind", NOT_LINKS)
def test_packed_shards(tmp_path: Path, kind: str) -> None:
    (tmp_path / "text").write_text("one two three\n" * 100)
    section = DataSection(source="text", path=str(tmp_path / "text"))
    for pattern, code in (("*.tokens", "T015"), ("*.documents", "T015"), ("meta.json", "T014")):
        folder = prepare(section, cache=tmp_path / f"cache-{pattern[1:]}")
        put(kind, next(folder.glob(pattern)))
        with pytest.raises(UserError, match=code):
            TokenShards.open(folder)
