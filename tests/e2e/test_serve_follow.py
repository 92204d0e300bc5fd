"""`trimaran serve --follow` over a run that gets new checkpoints, and how a server stops."""

import asyncio
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_serve_faults import LONG, new_client, parts_of, texts_of
from tests.serving import (
    MODEL,
    RunningServer,
    add_checkpoint,
    greedy_text,
    new_tiny_run,
    running_server,
    wait_for,
)
from trimaran.app.main import main
from trimaran.checkpoint.step_dirs import step_path
from trimaran.run import RunDirectory


def fingerprint(server: RunningServer) -> str:
    return server.complete("a", max_tokens=1)["system_fingerprint"]


def test_new_checkpoints_answer_without_a_dropped_request_and_a_stop_lets_requests_finish(tmp_path: Path) -> None:
    run = new_tiny_run(tmp_path / "run")
    add_checkpoint(run, 1)
    with running_server(run.path, "--follow", log=tmp_path / "log") as server:
        assert fingerprint(server) == f"{MODEL}@step-1"
        asyncio.run(_change_in_a_stream(server, run))
        expected = greedy_text(step_path(run.checkpoints, 2), "x", 20, run=run, step=2)
        answer = server.complete("x", max_tokens=20, ignore_eos=True)
        assert (answer["choices"][0]["text"], answer["system_fingerprint"]) == (expected, f"{MODEL}@step-2")
        assert server.metrics()["engine_restarts_total"] == 0
        _add_damaged_checkpoint(run, 3, tmp_path / "elsewhere")
        wait_for(lambda: "step 3 is damaged" in (tmp_path / "log").read_text(), "it is noticed", seconds=60)
        assert server.complete("x", max_tokens=20, ignore_eos=True)["choices"][0]["text"] == expected
        add_checkpoint(run, 4)
        wait_for(lambda: fingerprint(server) == f"{MODEL}@step-4", "the next one answers", seconds=60)
        _stop_in_a_stream(server)


async def _change_in_a_stream(server: RunningServer, run: RunDirectory) -> None:
    """Add a checkpoint while an answer is streamed: it is all from the weights before, and nothing fails."""
    async with new_client(server) as client:
        prints: set[str] = set()
        body = {"prompt": "stream", "stream": True, **LONG, "max_tokens": 400}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            parts = parts_of(answer)
            prints.add((await anext(parts))["system_fingerprint"])
            await asyncio.to_thread(add_checkpoint, run, 2)
            later = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "l"})) for _ in range(4)]
            async for part in parts:
                prints.add(part["system_fingerprint"])
        assert prints == {f"{MODEL}@step-1"}
        assert {(await each).status_code for each in later} == {200}
    wait_for(lambda: fingerprint(server) == f"{MODEL}@step-2", "the new weights answer", seconds=60)


def _add_damaged_checkpoint(run: RunDirectory, step: int, elsewhere: Path) -> None:
    """Add a checkpoint whose weights are not those that were written; it appears at once, as a whole."""
    other = RunDirectory(elsewhere)
    shutil.copytree(run.path, elsewhere, ignore=shutil.ignore_patterns("checkpoints"))
    add_checkpoint(other, step)
    file = max(step_path(other.checkpoints, step).iterdir(), key=lambda each: each.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))
    step_path(other.checkpoints, step).rename(step_path(run.checkpoints, step))


def _stop_in_a_stream(server: RunningServer) -> None:
    """Send SIGTERM while an answer is streamed: it is finished, what comes later is refused."""
    (engine,) = server.engines()

    async def work() -> tuple[str, httpx.Response, httpx.Response]:
        async with new_client(server) as client:
            started = asyncio.Event()
            stream = asyncio.create_task(texts_of(client, started))
            await started.wait()
            engine.suspend()  # so that the stream is still open
            server.process.send_signal(signal.SIGTERM)
            while (probe := await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.02)
            refused = await client.post("/v1/completions", json={"prompt": "late"})
            engine.resume()
            return await stream, refused, probe

    undisturbed = server.complete("stream", **LONG)["choices"][0]["text"]
    text, refused, probe = asyncio.run(work())
    assert text == undisturbed
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "U009")
    assert probe.json() == {"status": "draining"}
    assert server.process.wait(60) == 0
    wait_for(lambda: not engine.is_running(), "the engine ends with its server")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--follow", "--step", "1"], "U014"),
        (["--dry-run"], "U014"),
        (["--adapter", "law"], "U014"),
        (["--adapter", "law=missing"], "U014"),
        (["--host", "no.such.host.invalid"], "W001"),
        (["--step", "5"], "K0"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    tmp_path: Path, options: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_tiny_run(tmp_path / "run")
    add_checkpoint(run, 1)
    assert main(["serve", str(run.path), *options]) == 2
    assert capsys.readouterr().err.startswith(code)


def test_vllm_is_started_with_a_checked_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_tiny_run(tmp_path / "run")
    add_checkpoint(run, 1)
    arguments = ["serve", str(run.path), "--engine", "vllm", "--tp", "2"]
    assert main([*arguments, "--dry-run"]) == 0
    export, *_, command = capsys.readouterr().out.splitlines()
    folder = run.path / "exports" / "step-00000001-hf"
    assert export.startswith(f"trimaran export {run.path} --step 1")
    assert command == f"VLLM_API_KEY=TOKEN vllm serve {folder} --config vllm.yaml"
    if shutil.which("vllm") is None:
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("U013: vLLM is not installed")
