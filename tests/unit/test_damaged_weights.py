"""A checkpoint with one wrong bit is refused wherever its weights are read."""

from pathlib import Path

import pytest

from tests.serving import add_checkpoint, greedy_text, new_tiny_run
from trimaran.app import main
from trimaran.checkpoint import step_path
from trimaran.serve import TrainedWeights, damage_of, newest_weights


def flip_a_bit(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_generating_exporting_and_serving_refuse_a_checkpoint_with_a_wrong_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_tiny_run(tmp_path / "run")
    for step in (1, 2):
        add_checkpoint(run, step)
    folder = step_path(run.checkpoints, 2)
    assert greedy_text(folder, "x", 3, run=run, step=2)
    flip_a_bit(folder)
    assert "checksum is wrong" in damage_of(TrainedWeights(path=folder, run=run, step=2))
    for command in (["generate", "--prompt", "x"], ["export", "--out", str(tmp_path / "out")]):
        name, *options = command
        assert main([name, str(run.path), "--step", "2", *options]) == 2
        assert "K007" in capsys.readouterr().err
    older = newest_weights(run, besides=[2])
    assert older is not None
    assert older.step == 1
    assert greedy_text(older.path, "x", 3, run=run, step=1)
    assert not (tmp_path / "out").exists()
