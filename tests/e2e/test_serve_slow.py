"""`trimaran serve` with what takes long: a run that trains meanwhile, a model that sees, many clients."""

import asyncio
import base64
import io
import os
import signal
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import numpy as np
import pytest
from benchmarks.serve_load import measure
from PIL import Image

from tests import forked, vlm_models
from tests.e2e.test_serve_faults import LONG, new_client, texts_of
from tests.serving import RunningServer, greedy_text, running_server, save_tiny_model, wait_for
from trimaran.checkpoint import newest_step, write_hf_folder
from trimaran.data import ByteTokenizer
from trimaran.nets import initialise, network_of
from trimaran.serve import Conversation, TrainedWeights, open_trained
from trimaran.train import Sampling, TokenSampler, save_tokenizer

pytestmark = pytest.mark.slow


def test_under_load_with_kills_no_answer_is_wrong_and_nothing_is_left() -> None:
    found = measure(600, 64, 2, max_queue=32)
    assert found["ok"], found
    assert found["kills"] == found["restarts"] == 2
    assert found["after"]["rss_mib"] < found["before"]["rss_mib"] + 50


@pytest.mark.parametrize("option", ["--tp", "--pp"])
def test_two_ranks_answer_as_one_process_does_and_survive_the_death_of_one(tmp_path: Path, option: str) -> None:
    model = save_tiny_model(tmp_path / "model")
    with running_server(model, option, "2", log=tmp_path / "log") as server:
        answer = server.complete("def add(", max_tokens=24, ignore_eos=True)
        assert answer["choices"][0]["text"] == greedy_text(model, "def add(", 24)
        undisturbed = server.complete("stream", **LONG)["choices"][0]["text"]

        async def work() -> str:
            async with new_client(server) as client:
                started = asyncio.Event()
                stream = asyncio.create_task(texts_of(client, started))
                await started.wait()
                os.kill(server.engines()[1].pid, signal.SIGKILL)
                return await stream

        assert asyncio.run(work()) == undisturbed
        assert server.metrics()["engine_restarts_total"] == 1


def test_a_run_is_followed_while_it_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("train.steps=60", "checkpoint.every=10", "data.seq_len=64", "train.global_batch=4")
    words = ("train", "--warm", "--run-dir", str(run), "--no-check")
    more = [word for each in settings for word in ("--set", each)]
    training = forked.start("trimaran", *words, *more, stdout=DEVNULL, stderr=DEVNULL)
    try:
        wait_for(lambda: newest_step(run / "checkpoints") is not None, "the first checkpoint")
        with running_server(run, "--follow", log=tmp_path / "log") as server:
            answers: list[dict[str, Any]] = []

            def is_last(server: RunningServer = server) -> bool:
                answers.append(server.complete("def ", max_tokens=8))
                return answers[-1]["system_fingerprint"].endswith("step-60")

            wait_for(is_last, "the last step answers")
            assert server.metrics()["engine_restarts_total"] == 0
        assert training.wait(120) == 0
    finally:
        training.kill()
        training.wait()


def test_a_model_that_sees_gets_images_in_messages(tmp_path: Path) -> None:
    spec, folder = vlm_models.SPECS["native"], tmp_path / "model"
    network = network_of(spec)
    initialise(network.module, seed=5, spec=spec)
    vlm_models.perturb(network.module)
    write_hf_folder(folder, network.disk_config(), network.disk_tensors(), origin=None,
                    add_files=lambda draft: save_tokenizer(ByteTokenizer(), draft))  # fmt: skip
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    picture = io.BytesIO()
    Image.fromarray(pixels).save(picture, "PNG")
    (tmp_path / "one.png").write_bytes(picture.getvalue())
    trained = open_trained(TrainedWeights(path=folder), "fp32", cache=None)
    conversation = Conversation(trained)
    sampler = TokenSampler(Sampling(temperature=0))
    expected = list(conversation.ask("What is this?", [tmp_path / "one.png"], sampler, max_tokens=8))
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, "logprobs": True}
    with running_server(folder, log=tmp_path / "log") as server:
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == ByteTokenizer().decode(expected).replace("\ufffd", "")
        assert len(choice["logprobs"]["content"]) == len(expected)
        bad = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        refused = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": bad}]})
        assert refused.json()["error"]["code"] == "U004"
