"""A run on this machine from its start to its last line, with ranks that only write what ranks write."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trimaran.app.main import main
from trimaran.app.session import session, stop_signals
from trimaran.app.views import run_findings
from trimaran.doctor import evidence
from trimaran.launch import local
from trimaran.launch.local import LocalRun
from trimaran.run import RunDirectory

RANK = """
import signal, sys, time
from dataclasses import replace
from pathlib import Path
from tests.runs import start_ranks, step_metrics
from trimaran.run import Journal, RunDirectory

run = RunDirectory(Path(sys.argv[1]))
steps = 10
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: run.stop_request.touch())


def train(journal, pause=0.0, **details):
    for step in range(1, steps + 1):
        journal.step(replace(step_metrics(step, loss=6.0 - 0.5 * step), details=details))
        time.sleep(pause)
        if run.stop_request.exists():
            journal.event("stop", step=step, reason="asked to stop")
            sys.exit(75)
    journal.event("done", step=step, steps=step, seconds=1.0)


with Journal(run, 0) as journal:
    start_ranks(run)
    {script}
"""


class Stage:
    """`trimaran train` in a folder of its own, with ranks that run a few lines of Python."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks: list[LocalRun] = []
        self._script = ""
        (folder / "text.txt").write_text("some words " * 200)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TRIMARAN_CACHE", str(folder / "cache"))
        monkeypatch.setattr(session, "start_local", self._start_local)

    def train(self, script: str, *more: str) -> int:
        self._script = script
        settings = ["train.steps=10", "cluster=2xcpu", "data.source=text", "data.path=text.txt", "data.seq_len=16"]
        return main(["train", "--run-dir", "run", *(word for pair in settings for word in ("--set", pair)), *more])

    def _start_local(self, run: RunDirectory) -> LocalRun:
        command = [sys.executable, "-c", RANK.replace("{script}", self._script), str(run.path)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with run.agent_log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.ranks.append(LocalRun(run, command, process))
        return self.ranks[-1]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_a_run_ends_with_its_result_and_three_commands(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.train("train(journal)") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "step 10/10  loss 1.0000" in shown.out
    assert "loss 5.5000 -> 1.0000 in 10 steps and 1.0 s" in shown.out
    assert "\nnext  trimaran " in shown.out
    assert "finding" not in shown.out


def test_with_json_standard_output_is_one_object(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.train("train(journal)", "--json") == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["exit"], answer["status"], answer["steps"], answer["run_dir"]) == (0, "done", 10, "run")
    assert (answer["first_loss"], answer["final_loss"]) == (5.5, 1.0)
    assert answer["plan"]["mesh"]["dp_replicate"] == 2
    assert "step 10/10" in shown.err


def test_a_quiet_run_shows_only_the_end(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.train("train(journal)", "--quiet") == 0
    shown = capsys.readouterr().out
    assert "step 10/10" not in shown
    assert "loss 5.5000 -> 1.0000" in shown


# Half of each step of 0.5 s is spent waiting for one loader process.
STARVED = "steps = 20; train(journal, loader={'waited': 0.25, 'workers': 1, 'depth': 2})"
ALONE = ("--set", "cluster=1xcpu")


@pytest.fixture
def curious(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor looks as often as the files are read."""
    monkeypatch.setattr(run_findings, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(run_findings, "MAX_SHARE", 1.0)


@pytest.mark.usefixtures("curious")
def test_a_finding_is_told_once_while_the_run_goes_on_and_counted_at_its_end(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage.train(f"{STARVED}; time.sleep(0.8)", *ALONE) == 0
    live, _, end = capsys.readouterr().out.partition("done  loss")
    assert live.count("! F001 the trainer waits 50% of its time for data") == 1
    assert live.count("\n  fix: trimaran train run/recipe.yaml --set data.workers=") == 1
    assert main(["doctor", "run", "--json"]) == 0
    codes = [each["code"] for each in json.loads(capsys.readouterr().out)["findings"]]
    count = f"{len(codes)} finding{'s' * (len(codes) > 1)}"
    assert end.endswith(f"\nfound {count} ({', '.join(codes)}); more: trimaran doctor run\n")


@pytest.mark.usefixtures("curious")
def test_a_quiet_run_has_its_findings_in_the_answer_only(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.train(STARVED, *ALONE, "--quiet", "--json") == 0
    shown = capsys.readouterr()
    found = next(each for each in json.loads(shown.out)["findings"] if each["code"] == "F001")
    assert found["command"].startswith("trimaran train run/recipe.yaml --set data.workers=")
    assert shown.err == ""


@pytest.mark.usefixtures("curious")
def test_a_doctor_that_fails_leaves_the_run_alone(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall(*_: object, **__: object) -> None:
        raise RuntimeError("the doctor fell over")

    monkeypatch.setattr(evidence, "read_evidence", fall)
    assert stage.train(STARVED) == 0
    shown = capsys.readouterr()
    assert (shown.out.count("the doctor fell over"), shown.err) == (1, "")
    assert "done  loss" in shown.out


def test_a_mistake_that_a_rank_finds_is_told_like_ours(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    script = 'journal.event("error", code="T030", what="odd tokens", where="data", fix="use others"); sys.exit(1)'
    assert stage.train(script) == 2
    assert capsys.readouterr().err == "T030: odd tokens\n  where: data\n  fix:   use others\n"


def test_a_fault_is_told_with_its_log_and_exit_code(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    log = 'run.log(0).write_text("Traceback\\nOverflow: too much\\n")'
    assert stage.train(f'{log}; journal.event("error", type="Overflow", message="too much"); sys.exit(9)') == 9
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "Overflow: too much" in shown.out
    assert "log   run/logs/rank-0.log" in shown.out


def test_ranks_that_die_at_once_leave_the_launchers_words(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.train('raise SystemExit("no such device")', "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["exit"] == 1
    assert "no such device" in shown.err


def press_when(*files: Path, number: signal.Signals = signal.SIGINT) -> threading.Thread:
    """Press Ctrl-C, or send another signal, when the first of `files` appears, and again for each that follows."""

    def press() -> None:
        for file in files:
            while not file.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_stops_after_the_step_and_keeps_the_result(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    press_when(Path("run/events/rank-0.jsonl").absolute())
    assert stage.train("steps = 1000; train(journal, pause=0.02)", "--set", "train.steps=1000") == 75
    shown = capsys.readouterr().out
    assert "stopping after this step, with a checkpoint; Ctrl-C again to stop at once" in shown
    assert "stopped  loss" in shown
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_scheduler_may_ask_twice_and_is_still_left_a_result(stage: Stage) -> None:
    press_when(Path("run/events/rank-0.jsonl").absolute(), Path("run/stop").absolute(), number=signal.SIGTERM)
    script = "steps = 1000; run.stop_request.touch(); time.sleep(1); train(journal, pause=0.02)"
    assert stage.train(script, "--set", "train.steps=1000") == 75


def test_ctrl_c_twice_ends_the_ranks_at_once(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    press_when(Path("run/events/rank-0.jsonl").absolute(), Path("run/stop").absolute())
    monkeypatch.setattr(local, "END_SECONDS", 0.1)
    assert stage.train("signal.signal(signal.SIGQUIT, signal.SIG_IGN); time.sleep(600)", "--quiet") == 130
    assert "stopping at once" in capsys.readouterr().out
    assert stage.ranks[0].poll() == -signal.SIGKILL


def test_no_rank_is_left_behind_when_the_show_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(*_: object, **__: object) -> None:
        raise RuntimeError("the show fell over")

    monkeypatch.setattr(session, "follow", fall)
    with pytest.raises(RuntimeError, match="fell over"):
        stage.train("time.sleep(600)")
    assert stage.ranks[0].poll() == -signal.SIGKILL


def test_a_run_can_be_gone_on_with_from_any_folder(stage: Stage) -> None:
    assert stage.train("train(journal)") == 0
    assert stage.ranks[0].run.read_recipe().data.path == str(Path("text.txt").absolute())


def test_a_killed_supervisor_is_named(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.train("import os; os.kill(os.getpid(), signal.SIGKILL)") == 1
    assert "the supervisor was killed by SIGKILL, and the ranks with it" in capsys.readouterr().out


def test_a_supervisor_that_a_signal_holds_is_told_of_once(stage: Stage, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(stop_signals, "HELD_SECONDS", 0.1)
    wake = "subprocess.Popen(['sh', '-c', f'sleep 2; kill -CONT {os.getpid()}'])"
    assert stage.train(f"import os, subprocess; {wake}; os.kill(os.getpid(), signal.SIGSTOP); train(journal)") == 0
    assert capsys.readouterr().out.count(f"kill -CONT {stage.ranks[0].process.pid}") == 1
