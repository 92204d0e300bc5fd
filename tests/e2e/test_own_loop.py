"""The examples for one's own loop: scripts for one device, and the same on ranks with a few changed lines."""

import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import trimaran.loop.loop  # noqa: F401, imported once before ranks are forked
from tests.ranks import run_ranks
from trimaran.core import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--n_layer=1", "--batch_size=3", "--block_size=8", "--gradient_accumulation_steps=2", "--eval_iters=2",
         "--eval_interval=2", "--max_iters=4")  # fmt: skip


def run_script(script: str, *options: str, edits: tuple[tuple[str, str], ...] = ()) -> str:
    """Return what a script prints on this rank, and the UserError that ends it. `edits` are replaced in its text."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    path, out = EXAMPLES / script, io.StringIO()
    text = path.read_text()
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *options]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        try:
            exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
        except UserError as error:
            return out.getvalue() + str(error)
    return out.getvalue()


def on_ranks(ranks: int, script: str, *options: str) -> list[float]:
    """Return the losses and accuracies that the main rank prints; the others print nothing."""
    main, *others = run_ranks(ranks, run_script, script, *options)
    assert not any(others)
    return numbers_of(main)


def numbers_of(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"(?:loss|accuracy) ([\d.]+)", text)]


def evaluations_of(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"(?:train|val) loss ([\d.]+)", text)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-5), ("float16", 1e-3), pytest.param("bfloat16", 1e-2, marks=pytest.mark.slow)],
)
def test_nanogpt_trains_as_before_on_one_and_two_ranks(dtype: str, tolerance: float, tmp_path: Path) -> None:
    """With autocast, and with a scaler in fp16. The tolerance is that of the dtype."""
    options = (*SMALL, f"--dtype={dtype}")
    (plain,) = run_ranks(1, run_script, "nanogpt/train_plain.py", *options, f"--out_dir={tmp_path}/plain")
    expected = evaluations_of(plain)
    assert len(expected) == 6
    for ranks in (1, 2):
        main, *_ = run_ranks(ranks, run_script, "nanogpt/train.py", *options, f"--out_dir={tmp_path}/{ranks}")
        assert evaluations_of(main) == pytest.approx(expected, rel=tolerance)


def test_nanogpt_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    folder = f"--out_dir={tmp_path}/out"
    first = on_ranks(2, "nanogpt/train.py", *SMALL, folder)
    again = on_ranks(1, "nanogpt/train.py", *SMALL, folder, "--init_from=resume", "--max_iters=6")
    assert again[2] < first[2]
    assert len(again) == 2 + 2 + 2, "an evaluation, two steps, an evaluation"


def test_nanogpts_evaluation_on_the_main_rank_alone_is_caught(tmp_path: Path) -> None:
    """Its batches come from torch's generator, so the main rank then trains on others than the rest."""
    alone = (("if iter_num % eval_interval == 0:", "if iter_num % eval_interval == 0 and loop.is_main:"),)
    for printed in run_ranks(2, run_edited, alone, f"--out_dir={tmp_path}/none"):
        assert "P045: ranks hold different global batches in step 0: rank 1 holds other rows than rank 0" in printed
        assert "an evaluation on the main rank alone" in printed


def run_edited(edits: tuple[tuple[str, str], ...], folder: str) -> str:
    return run_script("nanogpt/train.py", *SMALL, folder, edits=edits)


def test_nanogpt_is_converted_by_twelve_lines() -> None:
    plain, converted = (
        (EXAMPLES / "nanogpt" / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("train_plain.py", "train.py")
    )
    changed = [line for line in difflib.ndiff(plain, converted) if line.startswith("+ ") and line[2:].strip()]
    assert len(changed) <= 12, "\n".join(changed)


def test_mnist_trains_as_before_on_one_and_two_ranks(tmp_path: Path) -> None:
    """130 samples in batches of 64: the last one has two rows. The scheduler and the order are those of the script."""
    options = ("--epochs=2", "--samples=130")
    expected = on_ranks(1, "mnist_plain.py", *options, f"--folder={tmp_path}/plain")
    assert len(expected) == 2 * (3 + 2)
    for ranks, sharding in ((1, "none"), (2, "none"), (3, "parameters")):
        folder = f"--folder={tmp_path}/{ranks}"
        losses = on_ranks(ranks, "mnist.py", *options, folder, f"--sharding={sharding}", "--save-every=100")
        assert losses == pytest.approx(expected, rel=1e-5)


def test_mnist_resumes_exactly_within_an_epoch_on_another_number_of_ranks(tmp_path: Path) -> None:
    """With random moves of the digits, which are the same on any number of ranks."""
    options = ("--epochs=2", "--samples=200", "--random-moves")
    whole = on_ranks(1, "mnist.py", *options, f"--folder={tmp_path}/whole", "--save-every=100")
    parts = (*options, f"--folder={tmp_path}/parts")
    resumed = on_ranks(2, "mnist.py", *parts, "--save-every=6", "--stop-at=6")
    resumed += on_ranks(1, "mnist.py", *parts, "--save-every=100")
    assert resumed == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "ranks", "sharding"),
    [
        (7, 2, "none"),
        (2, 3, "none"),
        pytest.param(7, 1, "none", marks=pytest.mark.slow),
        pytest.param(7, 2, "parameters", marks=pytest.mark.slow),
    ],
)
def test_dcgan_trains_as_before_on_any_number_of_ranks(rows: int, ranks: int, sharding: str, tmp_path: Path) -> None:
    """Ranks have different numbers of rows, or none. BatchNorm uses the statistics of all."""
    options = ("--steps=6", f"--rows={rows}")
    expected = on_ranks(1, "dcgan_plain.py", *options, f"--folder={tmp_path}/plain")
    assert len(expected) == 12
    converted = (*options, f"--folder={tmp_path}/out", f"--sharding={sharding}")
    losses = on_ranks(ranks, "dcgan.py", *converted)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert on_ranks(ranks, "dcgan.py", *converted) == losses[-2:], "it resumes after step 5"


@pytest.mark.slow
def test_an_example_runs_under_torchrun(tmp_path: Path) -> None:
    """Also that a rank that has ended is named to one that calls the loop alone at the end of the script."""
    script = tmp_path / "mnist.py"
    text = (EXAMPLES / "mnist.py").read_text()
    script.write_text(text.replace("weights = loop.state_dict()\n", "weights = loop.is_main and loop.state_dict()\n"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), "--epochs=1", "--samples=64", f"--folder={tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (
        "P046: rank 0 made loop.state_dict(), which needs all ranks, but rank 1 has reached the end of its script"
        in (done.stderr)
    )
    assert len(numbers_of(done.stdout)) == 3


def test_the_pipeline_example_learns_on_two_ranks() -> None:
    main, other = run_ranks(2, run_script, "pipeline.py")
    losses = [float(line.split()[-1]) for line in main.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert "loss" not in other
