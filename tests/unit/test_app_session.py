"""A run on this machine from start to result, with a supervisor that only writes the files of a run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import new_run, start_ranks, step_metrics
from trimaran.app import PAUSED_NOTICE_SECONDS, PausedSupervisorNotice, StopSignals, main
from trimaran.launch import LocalRun
from trimaran.runs import RunDirectory

# Started as the interpreter of the supervisor would be: -m trimaran.launch RUN ... It imports nothing of ours.
SUPERVISOR = """
import json, os, re, signal, sys, time
from pathlib import Path

run = Path(sys.argv[3])
starts, template = json.loads((Path(__file__).parent / "lines.json").read_text())
steps = 10
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: (run / "stop").touch())
signal.pthread_sigmask(signal.SIG_SETMASK, [])  # as the supervisor does when it handles them


def write(name, line):
    (run / name).parent.mkdir(exist_ok=True)
    with (run / name).open("a") as file:
        file.write(json.dumps(line) + "\\n")


def event(kind, step=0, **data):
    write("events/rank-0.jsonl", {**starts[0], "kind": kind, "time": time.time(), "step": step, "data": data})


def train(pause=0.0, **details):
    for step in range(1, steps + 1):
        write("metrics.jsonl", {**template, "step": step, "loss": 6.0 - 0.5 * step, **details})
        time.sleep(pause)
        if (run / "stop").exists():
            event("stop", step=step, reason="asked to stop")
            sys.exit(75)
    event("done", step=step, steps=step, seconds=1.0)


for each in starts:
    write(f"events/rank-{each['rank']}.jsonl", {**each, "time": time.time()})
{script}
"""


class FakeTraining:
    """`trimaran train` in its own folder, with a supervisor that runs a few lines of Python."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        scratch = new_run(folder / "scratch")
        start_ranks(scratch)
        starts = [json.loads(line) for rank in (0, 1) for line in scratch.events(rank).read_text().splitlines()]
        lines = (starts, step_metrics(1, loss=1.0).as_dict())
        (folder / "lines.json").write_text(json.dumps(lines))
        (folder / "python").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {folder}/supervisor.py "$@"\n'
        )
        (folder / "python").chmod(0o755)
        (folder / "text.txt").write_text("some words " * 200)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TRIMARAN_CACHE", str(folder / "cache"))
        monkeypatch.setattr(sys, "executable", str(folder / "python"))

    def train(self, script: str, *more: str) -> int:
        (self._folder / "supervisor.py").write_text(SUPERVISOR.replace("{script}", script))
        settings = ["train.steps=10", "cluster=2xcpu", "data.source=text", "data.path=text.txt", "data.seq_len=16"]
        return main(["train", "--run-dir", "run", *(word for pair in settings for word in ("--set", pair)), *more])


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    return FakeTraining(tmp_path, monkeypatch)


def test_a_run_ends_with_its_result_and_three_commands(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.train("train()") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "step 10/10  loss 1.0000" in shown.out
    assert "loss 5.5000 -> 1.0000 in 10 steps and 1.0 s" in shown.out
    assert "\nnext  trimaran " in shown.out
    assert "finding" not in shown.out


def test_with_json_standard_output_is_one_object(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.train("train()", "--json") == 0
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
        assert training.train("train(pause=0.02)", *more) == 0
        sys.stdout.flush()  # as Python does when it exits
    os.close(writer)
    assert json.loads(RunDirectory(Path("run")).metrics.read_text().splitlines()[-1])["step"] == 10


def test_a_quiet_run_shows_only_the_result(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.train("train()", "--quiet") == 0
    shown = capsys.readouterr().out
    assert "step 10/10" not in shown
    assert "loss 5.5000 -> 1.0000" in shown


# Half of each step of 0.5 s is spent waiting for one loader process.
STARVED = "steps = 20; train(loader={'waited': 0.25, 'workers': 1, 'depth': 2})"
ALONE = ("--set", "cluster=1xcpu")


def test_findings_are_counted_at_the_end(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.train(STARVED, *ALONE) == 0
    end = capsys.readouterr().out
    assert main(["doctor", "run", "--json"]) == 0
    codes = [each["code"] for each in json.loads(capsys.readouterr().out)["findings"]]
    assert "F001" in codes
    count = f"{len(codes)} finding{'s' * (len(codes) > 1)}"
    assert end.endswith(f"\n{count} ({', '.join(codes)}); details: trimaran doctor run\n")


def test_a_quiet_run_has_its_findings_in_the_json_result_only(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.train(STARVED, *ALONE, "--quiet", "--json") == 0
    shown = capsys.readouterr()
    found = next(each for each in json.loads(shown.out)["findings"] if each["code"] == "F001")
    assert found["command"].startswith("trimaran train run/recipe.yaml --set data.workers=")
    assert shown.err == ""


def test_a_user_error_of_a_rank_is_printed_like_our_own(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    script = 'event("error", code="T030", what="odd tokens", where="data", fix="use others"); sys.exit(1)'
    assert training.train(script) == 2
    assert capsys.readouterr().err == "T030: odd tokens\n  where: data\n  fix:   use others\n"


def test_a_fault_is_printed_with_its_log_and_exit_code(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    log = '(run / "logs/rank-0.log").write_text("Traceback\\nOverflow: too much\\n")'
    assert training.train(f'{log}; event("error", type="Overflow", message="too much"); sys.exit(9)') == 9
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
    """Send Ctrl-C, or another signal, when the first of `files` appears, and again for each of the others.

    Not before it is handled: the supervisor of these tests starts much faster than a real one.
    """
    before = signal.getsignal(number)

    def send() -> None:
        for file in files:
            while not file.exists() or signal.getsignal(number) == before:
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_stops_after_the_step_with_a_result(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    signal_when(Path("run/events/rank-0.jsonl").absolute())
    assert training.train("steps = 1000; train(pause=0.02)", "--set", "train.steps=1000") == 75
    shown = capsys.readouterr().out
    assert "stopping after this step, with a checkpoint; Ctrl-C again to stop at once" in shown
    assert "stopped  loss" in shown
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_sigterms_still_stop_with_a_result(training: FakeTraining) -> None:
    signal_when(Path("run/events/rank-0.jsonl").absolute(), Path("run/stop").absolute(), number=signal.SIGTERM)
    script = "steps = 1000; (run / 'stop').touch(); time.sleep(1); train(pause=0.02)"
    assert training.train(script, "--set", "train.steps=1000") == 75


def test_a_second_ctrl_c_ends_the_ranks_at_once(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    signal_when(Path("run/events/rank-0.jsonl").absolute(), Path("run/stop").absolute())
    assert training.train("time.sleep(600)", "--quiet") == 130
    assert "stopping at once" in capsys.readouterr().out


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[LocalRun]:
    """A supervisor that ignores SIGQUIT."""
    command = ["sh", "-c", "trap '' QUIT; echo ready; while :; do sleep 600; done"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    found = LocalRun(new_run(tmp_path / "run"), command, process)
    yield found
    found.kill()


def test_a_supervisor_that_does_not_end_is_killed(supervisor: LocalRun) -> None:
    supervisor.end(seconds=0.05)
    assert supervisor.poll() == -signal.SIGKILL


def test_no_rank_is_left_behind_if_the_live_view_fails(supervisor: LocalRun) -> None:
    with pytest.raises(RuntimeError, match="a broken view"), StopSignals(supervisor, print):
        raise RuntimeError("a broken view")
    assert supervisor.poll() == -signal.SIGKILL


def test_a_run_can_be_resumed_from_any_folder(training: FakeTraining) -> None:
    assert training.train("train()") == 0
    assert RunDirectory(Path("run")).read_recipe().data.path == str(Path("text.txt").absolute())


def test_a_killed_supervisor_is_named(training: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.train("import os; os.kill(os.getpid(), signal.SIGKILL)") == 1
    assert "the supervisor was killed by SIGKILL, and the ranks with it" in capsys.readouterr().out


def test_a_paused_supervisor_is_reported_once(supervisor: LocalRun) -> None:
    now, shown = 0.0, list[str]()
    notice = PausedSupervisorNotice(supervisor, shown.append, clock=lambda: now)
    os.kill(supervisor.process.pid, signal.SIGSTOP)
    until = time.monotonic() + 60
    while not supervisor.is_stopped:
        assert time.monotonic() < until
    for now in (0.0, PAUSED_NOTICE_SECONDS - 0.1, PAUSED_NOTICE_SECONDS, 2 * PAUSED_NOTICE_SECONDS):
        notice.check()
        assert len(shown) == (now >= PAUSED_NOTICE_SECONDS)
    assert f"kill -CONT {supervisor.process.pid}" in shown[0]


def test_a_finished_run_trains_on_to_the_steps_or_epochs_that_a_resume_sets(
    training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = '(run / "recipe.yaml").read_text()'
    metrics = '(run / "metrics.jsonl").write_text("")'
    script = f"steps = int(re.search(r'^  steps: (\\d+)', {recipe}, re.M)[1]); {metrics}; train(); print('trained')"

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
    assert RunDirectory(Path("run")).agent_log.read_text().count("trained") == 3
