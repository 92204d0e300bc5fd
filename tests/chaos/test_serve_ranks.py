"""A server of two ranks with an adapter: killed ranks, wrong adapters and prompts that never fit."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.serving import MODEL, TOKEN, RunningServer, running_server, save_adapter, save_tiny_model
from trimaran.app import main

pytestmark = pytest.mark.chaos

PROMPTS = ("def add(", "class ")
LONG = {"max_tokens": 200, "temperature": 0.9, "seed": 4, "ignore_eos": True}


def texts(server: RunningServer, *, kill: int | None) -> list[str]:
    """Return the answers of the base and of the adapter, asked at once; rank `kill` dies while they are written."""

    async def work() -> list[str]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=240) as client:
            bodies = [{"model": name, "prompt": each, **LONG} for name in (MODEL, "poet") for each in PROMPTS]
            asked = [asyncio.create_task(client.post("/v1/completions", json=each)) for each in bodies]
            if kill is not None:
                while not server.metrics()["running_requests"]:
                    await asyncio.sleep(0.01)
                os.kill(server.engines()[kill].pid, signal.SIGKILL)
            answers = [await each for each in asked]
        assert [each.status_code for each in answers] == [200] * 4, [each.text for each in answers]
        return [each.json()["choices"][0]["text"] for each in answers]

    return asyncio.run(work())


def test_two_ranks_with_an_adapter_survive_kills_and_wrong_requests(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "poet", seed=3)
    with running_server(model, "--tp", "2", "--adapter", f"poet={adapter}", log=tmp_path / "log") as server:
        undisturbed = texts(server, kill=None)
        assert undisturbed[0] != undisturbed[2], "the adapter changes the answer"
        for restarts, rank in enumerate((1, 0), 1):
            assert texts(server, kill=rank) == undisturbed, (tmp_path / "log").read_text()
            assert server.metrics()["engine_restarts_total"] == restarts
        for body, status in (
            ({"model": "painter", "prompt": "a"}, 404),
            ({"model": "poet", "prompt": "a" * 100_000}, 400),
            ({"model": "poet", "prompt": "a" * 100_000_000}, 413),
            ({"model": "poet", "prompt": [1 << 40]}, 400),
            ({"model": "../poet", "prompt": "a"}, 404),
        ):
            answer = server.client.post("/v1/completions", json=body)
            assert answer.status_code == status, (status, answer.text[:300])
            assert {"code", "fix"} <= answer.json()["error"].keys()
        assert texts(server, kill=None) == undisturbed


@pytest.mark.parametrize("damage", ["zeros", "cut", "no config", "other shape"])
def test_a_damaged_adapter_is_refused_at_the_start(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "poet", seed=3)
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    if damage == "zeros":
        weights.write_bytes(bytes(weights.stat().st_size))
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no config":
        config.unlink()
    else:
        config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    code = main(["serve", str(model), "--tp", "2", "--adapter", f"poet={adapter}", "--port", "0", "--token", TOKEN])
    shown = capfd.readouterr()
    assert code == 2, shown
    assert "Traceback" not in shown.out + shown.err
    assert "fix:" in shown.err
