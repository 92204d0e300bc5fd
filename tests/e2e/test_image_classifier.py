"""The image classifier of `examples/`: it learns, and two ranks train what one does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_classifier.py"
OPTIONS = ["--epochs", "4", "--batch", "16", "--size", "16", "--width", "8", "--workers", "0"]


def draw_classes(root: Path) -> None:
    for name in ("circle", "square"):
        (root / name).mkdir(parents=True)
        for number in range(40):
            image = Image.new("RGB", (40, 40), (number, number, number))
            draw = ImageDraw.Draw(image)
            shape = draw.ellipse if name == "circle" else draw.rectangle
            left, top = 4 + number % 9, 4 + number % 7
            shape((left, top, left + 20, top + 20), fill=(150 + number, 200, 90))
            image.save(root / name / f"{number}.png")


@pytest.mark.slow
def test_the_image_classifier_learns_and_two_ranks_equal_one(tmp_path: Path) -> None:
    draw_classes(tmp_path / "pictures")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    losses = []
    for command, out in (([sys.executable], "one"), (torchrun, "two")):
        arguments = [*command, str(EXAMPLE), "pictures", "--out", out, *OPTIONS]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        losses.append([float(each) for each in re.findall(r"held out: loss ([\d.]+)", done.stdout)])
        assert (tmp_path / out / "model.safetensors").is_file()
    assert len(losses[0]) == 4
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=2e-3)


@pytest.mark.slow
def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    done = subprocess.run([sys.executable, str(EXAMPLE), "pictures"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "one for each class" in done.stderr
