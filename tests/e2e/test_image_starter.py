"""The starter for image classification: both forms of it learn, and the binary files of CIFAR-10 are read."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.environment import ROOT
from tests.lessons import Student

images = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "cifar" / "images.py")))
CHANCE = 0.1


def write_records(file: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write a file of CIFAR-10's binary version: each record is a label, and the planes of the three colours."""
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(labels), -1)
    np.concatenate([labels[:, None], planes], axis=1).tofile(file)


def test_the_loop_learns_from_the_binary_files_of_cifar(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    training, test = images.generate(1280, seed=3), images.generate(200, seed=4)
    for number in (1, 2):
        write_records(folder / f"data_batch_{number}.bin", *(each[number - 1 :: 2] for each in training))
    write_records(folder / "test_batch.bin", *test)
    (pixels, labels), again = images.load(folder)
    assert len(labels) == len(pixels) == 1280
    assert all((ours == theirs).all() for ours, theirs in zip(again, test, strict=True))
    printed = Student(tmp_path).run(
        "torchrun --standalone --nproc-per-node 2 examples/cifar/train.py --data cifar-10-batches-bin --epochs 2"
    )
    assert float(re.findall(r"accuracy ([\d.]+)%", printed)[-1]) / 100 > 4 * CHANCE


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_1", b"\x80\x04.", "download the binary version"),  # of the python version
        ("data_batch_1.bin", bytes(3072), "not records of 3,073"),
        ("data_batch_1.bin", b"\x0a" + bytes(3072), "the label 10: it is not CIFAR-10"),
    ],
)
def test_other_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    write_records(tmp_path / "test_batch.bin", *images.generate(2, seed=0))
    with pytest.raises(SystemExit, match=message):
        images.load(tmp_path)


def test_the_recipe_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    student = Student(tmp_path)
    student.run("python examples/cifar/write_samples.py")
    assert "images of" in student.run("trimaran plan examples/cifar/recipe.yaml")


@pytest.mark.slow
def test_commands_of_the_guide_run_as_processes(tmp_path: Path) -> None:
    """The tolerance covers that another processor rounds otherwise, in a hundred steps of training."""
    Student(tmp_path, is_real=True).check("../guides/image-classification.md", tolerance=0.1)
