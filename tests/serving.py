"""A server of a tiny model with random weights, in its own processes, and what clients and tests ask of it."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from tests import forked
from tests.runs import PREDICTION
from tests.unit.test_checkpoint_export import save
from tests.vlm_models import perturb
from trimaran.checkpoint import AdapterFacts, whole_modules, write_hf_folder, write_peft_folder
from trimaran.checkpoint.convert.export_peft import peft_tensors
from trimaran.core import AdapterSection, Mesh, Plan, Recipe
from trimaran.data import ByteTokenizer
from trimaran.models import PRESETS, spec_of
from trimaran.nets import LoraLinear, attach_adapter, initialise, initialise_adapter, network_of
from trimaran.runs import RunDirectory, create_run
from trimaran.serve import TrainedWeights, continuation, open_trained, section_of_folder
from trimaran.train import Sampling, TokenSampler, load_trained, save_tokenizer

TOKEN = "a-token-for-tests"
MODEL = "tiny"
SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, max_seq_len=4096)
START_SECONDS = 300.0  # two processes import torch, on a machine that may be busy
ANSWER_SECONDS = 120.0


def save_tiny_model(folder: Path, seed: int = 5) -> Path:
    """Save a decoder with random weights and the byte-level tokenizer, and return the folder."""
    network = network_of(SPEC)
    initialise(network.module, seed=seed, spec=SPEC)
    torch.manual_seed(seed)
    perturb(network.module)
    write_hf_folder(folder, network.disk_config(), network.disk_tensors(), origin=None,
                    add_files=lambda draft: save_tokenizer(ByteTokenizer(), draft))  # fmt: skip
    return folder


def save_adapter(base: Path, folder: Path, seed: int) -> Path:
    """Save a LoRA adapter with random weights over the model in `base`, as PEFT does, and return its folder."""
    section = section_of_folder(base).model_copy(update={"adapter": AdapterSection(rank=4, alpha=16.0)})
    network = load_trained(section, base)
    assert section.adapter is not None
    attach_adapter(network, section.adapter)
    initialise_adapter(network.module, seed=seed)
    torch.manual_seed(seed)
    for layer in network.module.modules():
        if isinstance(layer, LoraLinear):
            torch.nn.init.normal_(layer.lora_B, std=0.5)
    facts = AdapterFacts(section=section, base={}, modules=whole_modules(section, network))
    with torch.no_grad():
        write_peft_folder(folder, facts, peft_tensors(network), add_files=lambda draft: save_tokenizer(
            ByteTokenizer(), draft))  # fmt: skip
    return folder


def new_tiny_run(path: Path) -> RunDirectory:
    """Return a run of the tiny model, without checkpoints."""
    shape = {name: getattr(SPEC, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "max_seq_len")}
    recipe = Recipe.model_validate({"name": MODEL, "model": {"preset": "tiny", "shape": shape}})
    return create_run(path, recipe, Plan(mesh=Mesh(), micro_batch=1, precision="fp32", prediction=PREDICTION))


def add_checkpoint(run: RunDirectory, step: int) -> None:
    """Write the checkpoint of a step, as a rank would. Its weights are random, and differ between steps."""
    spec = spec_of(run.read_recipe().model)
    assert spec is not None
    network = network_of(spec)
    torch.manual_seed(step)
    initialise(network.module, seed=step, spec=spec)
    perturb(network.module)
    save(run.checkpoints, {f"model/{name}": each.detach() for name, each in network.module.named_parameters()},
         step=step, world_size=1)  # fmt: skip


def greedy_text(model: Path, prompt: str, num_tokens: int, *, run: RunDirectory | None = None,
                step: int | None = None) -> str:  # fmt: skip
    """Return what `trimaran generate` answers, computed in this process without the engine."""
    trained = open_trained(TrainedWeights(path=model, run=run, step=step), "fp32", cache=None)
    sampler = TokenSampler(Sampling(temperature=0))
    generation = continuation(trained, prompt, [], sampler, max_tokens=num_tokens)
    generation.stop_ids = frozenset()
    return ByteTokenizer().decode(list(generation)).replace("\ufffd", "")


class RunningServer:
    """A `trimaran serve` process and its engine. Requests carry the token."""

    def __init__(self, process: forked.Forked, url: str) -> None:
        self.process, self.url = process, url
        self.folder = Path()  # of the files of a test
        self.client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=ANSWER_SECONDS)

    def engines(self) -> list[psutil.Process]:
        """Return the processes of the engine's ranks."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in found if "trimaran.serve.engine" in _arguments(each)]

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Return the answer of /v1/completions."""
        answer = self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the objects of a stream."""
        with self.client.stream("POST", path, json={"stream": True, **fields}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        yield from (json.loads(line.removeprefix("data: ")) for line in lines[:-1])

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by name and labels."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("trimaran_serve_"): float(value) for name, value in pairs}

    def is_ready(self) -> bool:
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def wait_idle(self) -> None:
        """Wait until no request runs or waits, and no page is in use."""
        names = ("running_requests", "waiting_requests", "used_pages")
        wait_for(lambda: not any(self.metrics()[name] for name in names), "the server is idle")


def wait_for(condition: Callable[[], object], what: str, *, seconds: float = START_SECONDS) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.02)


@contextmanager
def running_server(model: Path, *options: str, log: Path) -> Iterator[RunningServer]:
    """Start `trimaran serve`, yield it when it is ready, and end it."""
    words = ("serve", str(model), "--json", "--port", "0", "--token", TOKEN, "--name", MODEL, *options)
    with log.open("w") as errors:
        process = forked.start("trimaran", *words, stderr=errors)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()  # it ends if the server dies
        assert "url" in line, f"{line} {log.read_text()}"
        server = RunningServer(process, json.loads(line)["url"])
        with server.client:
            yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            for each in [*_children(process.pid), process]:
                each.kill()
            process.wait()
            process.stdout.close()


def _children(pid: int) -> Sequence[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
