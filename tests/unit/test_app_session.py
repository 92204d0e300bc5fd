"""A run on this machine from start to result, with fake ranks that only write the files of a run."""

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


class FakeTraining:
    """`trimaran train` in its own folder, with ranks that run a few lines of Python."""

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

    def _start_local(self, run: RunDirectory, *, warm: bool) -> LocalRun:
        command = [sys.executable, "-c", RANK.replace("{script}", self._script), str(run.path)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with run.agent_log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.ranks.append(LocalRun(run, command, process))
        return self.ranks[-1]


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    return FakeTraining(tmp_path, monkeypatch)


def test_a_run_ends_with_its_result_and_three_commands(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.train("train(journal)") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "step 10/10  loss 1.0000" in shown.out
    assert "loss 5.5000 -> 1.0000 in 10 steps and 1.0 s" in shown.out
    assert "\nnext  trimaran " in shown.out
    assert "finding" not in shown.out


def test_with_json_standard_output_is_one_object(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.train("train(journal)", "--json") == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["exit"], answer["status"], answer["steps"], answer["run_dir"]) == (0, "done", 10, "run")
    assert (answer["first_loss"], answer["final_loss"]) == (5.5, 1.0)
    assert answer["plan"]["mesh"]["dp_replicate"] == 2
    assert "step 10/10" in shown.err


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_run_whose_reader_has_gone_trains_to_its_end(
    training: FakeTraining, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as streams:
        for name in ("stdout", "stderr"):
            streams.setattr(sys, name, open(writer, "w", closefd=False))  # noqa: SIM115 - closed below
        assert training.train("train(journal, pause=0.02)", *more) == 0
        sys.stdout.flush()  # as Python does when it exits
    os.close(writer)
    (ranks,) = training.ranks
    lines = ranks.run.metrics.read_text().splitlines()
    assert (ranks.wait(), json.loads(lines[-1])["step"]) == (0, 10)


def test_a_quiet_run_shows_only_the_result(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.train("train(journal)", "--quiet") == 0
    shown = capsys.readouterr().out
    assert "step 10/10" not in shown
    assert "loss 5.5000 -> 1.0000" in shown


# Half of each step of 0.5 s is spent waiting for one loader process.
STARVED = "steps = 20; train(journal, loader={'waited': 0.25, 'workers': 1, 'depth': 2})"
ALONE = ("--set", "cluster=1xcpu")


@pytest.fixture
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor is polled whenever the files are read."""
    monkeypatch.setattr(run_findings, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(run_findings, "MAX_CPU_FRACTION", 1.0)


@pytest.mark.usefixtures("frequent_polls")
def test_a_finding_is_printed_once_while_the_run_is_live_and_counted_at_its_end(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.train(f"{STARVED}; time.sleep(0.8)", *ALONE) == 0
    live, _, end = capsys.readouterr().out.partition("done  loss")
    assert live.count("! F001 the trainer waits 50% of its time for data") == 1
    assert live.count("\n  fix: trimaran train run/recipe.yaml --set data.workers=") == 1
    assert main(["doctor", "run", "--json"]) == 0
    codes = [each["code"] for each in json.loads(capsys.readouterr().out)["findings"]]
    count = f"{len(codes)} finding{'s' * (len(codes) > 1)}"
    assert end.endswith(f"\n{count} ({', '.join(codes)}); details: trimaran doctor run\n")


@pytest.mark.usefixtures("frequent_polls")
def test_a_quiet_run_has_its_findings_in_the_json_result_only(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.train(STARVED, *ALONE, "--quiet", "--json") == 0
    shown = capsys.readouterr()
    found = next(each for each in json.loads(shown.out)["findings"] if each["code"] == "F001")
    assert found["command"].startswith("trimaran train run/recipe.yaml --set data.workers=")
    assert shown.err == ""


@pytest.mark.usefixtures("frequent_polls")
def test_a_failing_doctor_does_not_disturb_the_run(
    training: FakeTraining, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a broken doctor")

    monkeypatch.setattr(evidence, "read_evidence", fail)
    assert training.train(STARVED) == 0
    shown = capsys.readouterr()
    assert (shown.out.count("a broken doctor"), shown.err) == (1, "")
    assert "done  loss" in shown.out


def test_a_user_error_of_a_rank_is_printed_like_our_own(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    script = 'journal.event("error", code="T030", what="odd tokens", where="data", fix="use others"); sys.exit(1)'
    assert training.train(script) == 2
    assert capsys.readouterr().err == "T030: odd tokens\n  where: data\n  fix:   use others\n"


def test_a_fault_is_printed_with_its_log_and_exit_code(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    log = 'run.log(0).write_text("Traceback\\nOverflow: too much\\n")'
    assert training.train(f'{log}; journal.event("error", type="Overflow", message="too much"); sys.exit(9)') == 9
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "Overflow: too much" in shown.out
    assert "log   run/logs/rank-0.log" in shown.out


def test_if_ranks_die_at_once_the_launcher_log_is_printed(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.train('raise SystemExit("no such device")', "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["exit"] == 1
    assert "no such device" in shown.err


def signal_when(*files: Path, number: signal.Signals = signal.SIGINT) -> threading.Thread:
    """Send Ctrl-C, or another signal, when the first of `files` appears, and again for each of the others."""

    def send() -> None:
        for file in files:
            while not file.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_stops_after_the_step_with_a_result(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    signal_when(Path("run/events/rank-0.jsonl").absolute())
    assert training.train("steps = 1000; train(journal, pause=0.02)", "--set", "train.steps=1000") == 75
    shown = capsys.readouterr().out
    assert "stopping after this step, with a checkpoint; Ctrl-C again to stop at once" in shown
    assert "stopped  loss" in shown
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_sigterms_still_stop_with_a_result(training: FakeTraining) -> None:
    signal_when(Path("run/events/rank-0.jsonl").absolute(), Path("run/stop").absolute(), number=signal.SIGTERM)
    script = "steps = 1000; run.stop_request.touch(); time.sleep(1); train(journal, pause=0.02)"
    assert training.train(script, "--set", "train.steps=1000") == 75


def test_a_second_ctrl_c_kills_the_ranks_at_once(
    training: FakeTraining, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_when(Path("run/events/rank-0.jsonl").absolute(), Path("run/stop").absolute())
    monkeypatch.setattr(local, "END_SECONDS", 0.1)
    assert training.train("signal.signal(signal.SIGQUIT, signal.SIG_IGN); time.sleep(600)", "--quiet") == 130
    assert "stopping at once" in capsys.readouterr().out
    assert training.ranks[0].poll() == -signal.SIGKILL


def test_no_rank_is_left_behind_if_the_live_view_fails(training: FakeTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a broken view")

    monkeypatch.setattr(session, "follow", fail)
    with pytest.raises(RuntimeError, match="a broken view"):
        training.train("time.sleep(600)")
    assert training.ranks[0].poll() == -signal.SIGKILL


def test_a_run_can_be_resumed_from_any_folder(training: FakeTraining) -> None:
    assert training.train("train(journal)") == 0
    assert training.ranks[0].run.read_recipe().data.path == str(Path("text.txt").absolute())


def test_a_killed_supervisor_is_named(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.train("import os; os.kill(os.getpid(), signal.SIGKILL)") == 1
    assert "the supervisor was killed by SIGKILL, and the ranks with it" in capsys.readouterr().out


def test_a_paused_supervisor_is_reported_once(training: FakeTraining, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(stop_signals, "PAUSED_NOTICE_SECONDS", 0.1)
    wake = "subprocess.Popen(['sh', '-c', f'sleep 2; kill -CONT {os.getpid()}'])"
    assert training.train(f"import os, subprocess; {wake}; os.kill(os.getpid(), signal.SIGSTOP); train(journal)") == 0
    assert capsys.readouterr().out.count(f"kill -CONT {training.ranks[0].process.pid}") == 1


def test_a_finished_run_trains_on_to_the_steps_or_epochs_that_a_resume_sets(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "steps = run.read_recipe().train.steps; journal.resume(0); train(journal)"

    def length() -> tuple[int, float]:
        recipe = RunDirectory(Path("run")).read_recipe()
        return recipe.train.steps, recipe.data.epochs

    assert training.train(script, "--set", "data.epochs=1", "--set", "train.steps=500") == 0
    shown = capsys.readouterr().out
    assert "data.epochs 1 ends the run after 5 steps, before train.steps 500" in shown
    assert "in 5 steps" in shown
    assert "--set train.steps=10\n" in shown
    resume = ["resume", "run", "--set"]
    assert main([*resume, "data.epochs=2"]) == 0
    assert (length(), "in 9 steps" in capsys.readouterr().out) == ((9, 2), True)
    assert main([*resume, "data.epochs=2"]) == 0
    assert "this run is done: all 9 steps" in capsys.readouterr().out
    assert main([*resume, "train.steps=18"]) == 0
    shown = capsys.readouterr()
    assert (length(), "in 18 steps" in shown.out) == ((18, 0), True)
    assert "train.steps 18 ends the run now; data.epochs 2 is switched off" in shown.err
    assert main([*resume, "train.steps=18"]) == 0
    assert "--set train.steps=36\n" in capsys.readouterr().out
    assert len(training.ranks) == 3
