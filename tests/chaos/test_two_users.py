"""Two unprivileged users in one folder of runs: the second gets clear errors, and the first one's run continues."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fault.harness import ROOT, TINY, lines, wait_for
from tests.two_users import User
from trimaran.runs import RunDirectory

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become other users"),
]

FIRST, SECOND = 65501, 65502


def assert_answered(done: subprocess.CompletedProcess[str], code: int, error: str = "") -> None:
    """Fail unless a command ended with this exit code, and a short text with this error code."""
    text = done.stdout + done.stderr
    assert done.returncode == code, (done.args, text)
    assert "Traceback" not in text, (done.args, text)
    assert error in text, (done.args, text)


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every user may write to, as /tmp is; pytest's own folders are closed to others."""
    folder = Path("/var/tmp") / f"trimaran-two-users-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


READS = (["watch", "--json"], ["incidents"], ["checkpoints"], ["doctor"], ["decisions"])
CHANGES = (
    ["resume"],
    ["replan", "--set", "plan.micro_batch=2"],
    ["replan", "--set", "plan.sharding=parameters"],
    ["drill", "--kill", "1", "--yes"],
    ["drill", "--kill-in-change", "1=copy", "--yes"],
    ["profile"],
)


def test_the_second_user_cannot_stop_steal_or_change_the_run_of_the_first(shared: Path) -> None:
    first, second, run = User(FIRST, shared), User(SECOND, shared), RunDirectory(shared / "runs" / "first")
    run.path.parent.mkdir()
    run.path.parent.chmod(0o1777)
    settings = (*TINY, "cluster=2xcpu", "plan.mesh.dp_replicate=2", "train.steps=1000000", "checkpoint.every=50")
    options = [word for each in settings for word in ("--set", each)]
    plugin = {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": "0.1", "PYTHONPATH": str(ROOT)}
    command = ["train", "--run-dir", str(run.path), "--no-check", *options]
    training = first.start(*command, cwd=shared, output=shared / "first.log", **plugin)
    try:
        wait_for(lambda: len(lines(run.metrics)) > 5 or training.poll() is not None, 240)
        assert training.poll() is None, (shared / "first.log").read_text()
        for words in (["history"], ["jobs"], ["plan", *options]):
            assert_answered(second.run(words, cwd=shared), 0)
        for name, *words in (READS[0], CHANGES[0]):  # a run is private
            assert_answered(second.run([name, str(run.path), *words], cwd=shared), 2, "A024")
        run.path.chmod(0o755)  # the first user shows it
        for name, *words in READS:
            assert_answered(second.run([name, str(run.path), *words], cwd=shared), 0)
        for name, *words in CHANGES:
            assert_answered(second.run([name, str(run.path), *words], cwd=shared), 2)
        assert_answered(second.run(command, cwd=shared), 2)
        training.send_signal(signal.SIGTERM)
        assert training.wait(120) == 75, (shared / "first.log").read_text()
    finally:
        for each in psutil.Process(training.pid).children(recursive=True) if training.poll() is None else ():
            each.send_signal(signal.SIGKILL)
        training.kill()
        training.wait()
    steps = [each["step"] for each in lines(run.metrics)]
    assert steps == [*range(1, len(steps) + 1)]
    assert sum("world_size" in each for each in lines(run.attempts)) == 1
    assert not [each for each in run.path.rglob("*") if each.lstat().st_uid != FIRST]
    assert json.loads(run.attempts.read_text().splitlines()[-1])["over"] == 75
