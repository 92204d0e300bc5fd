"""The own-loop example is nanoGPT with about five lines changed, and has the same losses."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(*command: str) -> list[float]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_the_converted_example_trains_like_the_plain_one() -> None:
    plain = losses(str(EXAMPLES / "nanogpt_plain.py"), "20")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert losses(*launcher, str(EXAMPLES / "nanogpt_trimaran.py"), "20") == pytest.approx(plain, rel=1e-5)
    assert len(plain) == 20
    assert plain[-1] < 0.8 * plain[0]


def test_the_conversion_is_about_five_lines() -> None:
    plain, converted = (
        (EXAMPLES / f"nanogpt_{kind}.py").read_text().split('"""', 2)[2].splitlines() for kind in ("plain", "trimaran")
    )
    added = [line for line in difflib.ndiff(plain, converted) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 8, "\n".join(added)
