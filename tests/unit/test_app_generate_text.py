"""`trimaran generate`: a run, its checkpoints and folders give the same text; options, streaming, chats and JSON."""

import contextlib
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import UnsyncedDisk, copy_share, on_ranks, rows_of
from tests.random_weights import perturb
from tests.runs import new_run
from trimaran.app import generate_command, main
from trimaran.checkpoint import Manifest, commit, draft_path, step_path, write_hf_folder, write_share
from trimaran.core import Recipe, dump_recipe, parse_recipe
from trimaran.data import ByteTokenizer
from trimaran.models import spec_of
from trimaran.nets import Network, initialise, network_of
from trimaran.runs import Journal, RunDirectory
from trimaran.serve import show_generation
from trimaran.train import CachedLogits, Generation, NextTokenModel, Sampling, TokenSampler, save_tokenizer

MODEL = "model: {preset: tiny, shape: {layers: 1, hidden: 32, heads: 2, kv_heads: 1, ffn: 32}}"
SHORT = ("--greedy", "--tokens", "6", "--json")


def network_with(recipe: Recipe, seed: int) -> Network:
    spec = spec_of(recipe.model)
    assert spec is not None
    network = network_of(spec)
    torch.manual_seed(seed)
    initialise(network.module, seed=seed, spec=spec)
    perturb(network.module)
    return network


def save(network: Network, folder: Path) -> Path:
    write_hf_folder(folder, network.disk_config(), network.disk_tensors(), origin=None,
                    add_files=lambda draft: save_tokenizer(ByteTokenizer(), draft))  # fmt: skip
    return folder


def add_checkpoint(run: RunDirectory, network: Network, step: int) -> None:
    tensors = {f"model/{name}": each.detach() for name, each in network.module.named_parameters()}
    ((share, memory),) = on_ranks(1, lambda rank, gather: copy_share(rows_of(tensors, 0, 1), 0, 1, gather))
    draft, disk = draft_path(run.checkpoints, step, "abc123"), UnsyncedDisk()
    reports = [write_share(draft, 0, share, memory, previous=None, disk=disk)]
    commit(draft, step_path(run.checkpoints, step), reports, Manifest(step=step, world_size=1), disk)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that has saved its weights after step 10, and has another, later checkpoint of step 20."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trimaran"])
    toy = new_run(Path("runs/toy"), world_size=1)
    recipe = parse_recipe(f"name: toy\n{MODEL}", name="toy")
    toy.recipe.write_text(dump_recipe(recipe))
    network = network_with(recipe, seed=1)
    save(network, toy.model)
    add_checkpoint(toy, network, 10)
    with Journal(toy, 0) as journal:
        journal.event("saved", step=10, path=str(toy.model), seconds=0.1)
    return toy


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, "--json"]) == 2
    return json.loads(capsys.readouterr().out)["error"]


def test_a_run_a_checkpoint_and_a_folder_generate_the_same(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answer(capsys, "toy", "--prompt", "class ", *SHORT)
    assert first["text"] == "class " + first["completion"]
    assert (first["tokens"], first["prompt_tokens"], first["finish_reason"]) == (6, 6, "length")
    assert first["run_dir"] == "runs/toy"
    assert first["tokens_per_second"] == pytest.approx(first["tokens"] / first["seconds"], rel=0.05)
    places = (("toy", "--step", "10"), (str(run.checkpoints / "step-00000010"),), (str(run.model),))
    again = [answer(capsys, *place, "--prompt", "class ", *SHORT) for place in places]
    assert {each["completion"] for each in again} == {first["completion"]}
    assert [each["run_dir"] for each in again] == ["runs/toy", "runs/toy", None]
    # The weights of a later checkpoint are newer than those that the run has saved.
    later = network_with(run.read_recipe(), seed=2)
    add_checkpoint(run, later, 20)
    newest = answer(capsys, "toy", "--prompt", "class ", *SHORT)
    assert newest["step"] == 20
    assert newest["completion"] != first["completion"]
    assert (
        newest["completion"]
        == answer(capsys, str(save(later, Path("later"))), "--prompt", "class ", *SHORT)["completion"]
    )


def test_text_is_shown_as_it_comes_with_its_prompt(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    expected = answer(capsys, "toy", "--prompt", "class ", "--seed", "3", "--tokens", "9", "--json")["text"]
    written: list[str] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    with contextlib.redirect_stdout(Recorder()):
        assert main(["generate", "toy", "--prompt", "class ", "--seed", "3", "--tokens", "9"]) == 0
    assert "".join(written).replace("\x00", "") == "".join(each for each in expected if each.isprintable() or
                                                           each in "\t\n") + "\n"  # fmt: skip
    assert len(written) > 3


def test_the_default_prompt_is_that_of_the_runs_sample(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "toy", *SHORT)["prompt"] == "def "
    with Journal(run, 0) as journal:
        journal.event("sample", step=10, prompt="Once upon", text="Once upon a time")
    assert answer(capsys, "toy", *SHORT)["prompt"] == "Once upon"
    assert "there is no text to continue" in refused(capsys, str(run.model))["what"]


def test_sampling_options_are_used_and_seeds_repeat(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        return answer(capsys, "toy", "--tokens", "8", "--json", *options)["text"]

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    greedy = text("--greedy")
    assert greedy == text("--temperature", "0") == text("--top-k", "1", "--seed", "5")
    assert refused(capsys, "toy", "--greedy", "--temperature", "1")["where"] == "--temperature"


def test_a_conversation_comes_from_standard_input_and_remembers(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand you?\n/exit\nnever read\n"))
    assert main(["generate", "toy", "--chat", "--greedy", "--tokens", "4"]) == 0
    assert sys.stdin.read() == "never read\n"
    assert capsys.readouterr().out.count("\n") >= 2, "each question has an answer"
    alone = answer(capsys, "toy", "--chat", "--prompt", "hello", "--greedy", "--tokens", "4", "--json")
    assert alone["text"] == alone["completion"]
    assert alone["prompt_tokens"] == len("hello\n")
    with_system = answer(capsys, "toy", "--chat", "--system", "brief", "--prompt", "hello", *SHORT)
    assert with_system["prompt_tokens"] == len("brief\nhello\n")


class InterruptedSampler(TokenSampler):
    """The person presses Ctrl-C while the fourth token is drawn."""

    num_calls = 0

    def next_token(self, logits: torch.Tensor) -> int:
        self.num_calls += 1
        if self.num_calls == 4:
            signal.raise_signal(signal.SIGINT)
        return super().next_token(logits)


def test_ctrl_c_ends_a_text_and_keeps_it(run: RunDirectory) -> None:
    network = network_with(run.read_recipe(), seed=1)
    model = NextTokenModel(CachedLogits(network, torch.device("cpu")), network.max_seq_len)
    found, whole = (
        show_generation(
            Generation(model, tuple(b"def "), make(Sampling(temperature=0)), max_tokens=20), ByteTokenizer(), None
        )
        for make in (InterruptedSampler, TokenSampler)
    )
    assert (found.finish_reason, found.num_tokens, found.exit_code) == ("interrupted", 3, 130)
    assert (whole.finish_reason, whole.num_tokens, whole.exit_code) == ("length", 20, 0)
    assert whole.text.startswith(found.text)


def test_a_model_that_sees_is_shown_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.vlm_models import NATIVE  # noqa: PLC0415 - it imports transformers

    network = network_of(NATIVE)
    initialise(network.module, seed=1, spec=NATIVE)
    folder = save(network, tmp_path / "vlm")
    texts = []
    for seed, size in ((0, (64, 64)), (1, (64, 64)), (0, (128, 64))):
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "image.png")
        texts.append(answer(capsys, str(folder), "--image", str(tmp_path / "image.png"), "--prompt", "hi", *SHORT))
    assert texts[0]["prompt_tokens"] == texts[1]["prompt_tokens"] < texts[2]["prompt_tokens"]
    chat = answer(capsys, str(folder), "--chat", "--image", str(tmp_path / "image.png"), "--prompt", "hi", *SHORT)
    assert chat["prompt_tokens"] == texts[2]["prompt_tokens"] + 1


def test_a_folder_that_our_network_does_not_support_runs_on_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig  # noqa: PLC0415

    from tests.hf_models import SMALL  # noqa: PLC0415

    config = MistralConfig(**SMALL | {"vocab_size": 320}, head_dim=8, sliding_window=6, eos_token_id=[3, 4])
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "mistral")
    save_tokenizer(ByteTokenizer(), tmp_path / "mistral")
    capsys.readouterr()  # transformers imports packages that write to standard output
    found = answer(
        capsys, str(tmp_path / "mistral"), "--prompt", "class and more", "--greedy", "--tokens", "9", "--json"
    )
    prompt = torch.tensor([list(b"class and more")])
    ids = theirs.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=[3, 4, 256], pad_token_id=0)
    ids = [each for each in ids[0, prompt.shape[1] :].tolist() if each not in (3, 4, 256)]
    assert found["tokens"] == len(ids)
    assert found["completion"] == ByteTokenizer().decode(ids).replace("\ufffd", "")


def test_contradicting_options_are_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "toy", "--system", "x")["where"] == "--system"
    assert refused(capsys, "toy", "--chat")["where"] == "--json"
    assert refused(capsys, str(run.model), "--step", "3", "--prompt", "x")["where"] == "--step"
    assert refused(capsys, "toy", "--image", "x.png", "--prompt", "x")["code"] == "A031"
    assert refused(capsys, "toy", "--step", "7", "--prompt", "x")["code"].startswith("K")


def test_the_suggested_command_fits_the_data() -> None:
    def command(*settings: str) -> list[str]:
        found = generate_command(parse_recipe("name: toy", name="toy", overrides=settings), "runs/toy")
        return [] if found is None else found[2:]

    assert command() == ["runs/toy", "--prompt", "class "]
    assert command("data.source=text", "data.path=a.txt") == ["runs/toy"]
    assert command("data.source=chat", "data.path=a.jsonl") == ["runs/toy", "--chat"]
    assert command("data.source=shapes", "model.family=vlm") == ["runs/toy", "--chat", "--image", "FILE"]
    assert command("data.source=scenes", "model.family=perception") == []
