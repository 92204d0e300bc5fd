"""`trimaran train --dry-run` says what `trimaran train` would say, without starting it."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hf_models import SMALL
from trimaran.app import main
from trimaran.app.recipe import prepare_data

CASES = Path(__file__).parents[2] / "recipes" / "case-studies"
DETECTOR = {"model_type": "yolos", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "image_size": [32, 32], "patch_size": 8}  # fmt: skip
UNKNOWN = {"model_type": "internvl_chat", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 48, "vocab_size": 320}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def test_a_plan_of_a_thousand_ranks_is_built_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    pins = settings("model.preset=llama-3.2-1b", "model.shape.layers=4", "cluster=128x8xH100", "data.seq_len=4096",
                    "train.global_batch=1024", "plan.mesh={tp: 8, pp: 4, dp_shard: 32}",
                    "plan.sharding=optimizer")  # fmt: skip
    assert main(["train", "--dry-run", "--json", *pins]) == 0
    build = json.loads(capsys.readouterr().out)["build"]
    assert (build["ranks"], build["world_size"], build["not_built"]) == ([0, 1023], 1024, "")
    assert not dist.is_initialized()
    assert not Path("runs").exists()
    shown = prepare_data.show_check(build)
    assert re.match(r"built rank 0 and rank 1,023 of 1,024 without weights in [\d.]+ s: the model accepts", shown)


@pytest.mark.parametrize(("name", "code"), [("vit-10b-detection-8xa100-40gb", "M091"), ("vlm-26b-8xh100", "M024")])
def test_a_case_study_that_transformers_cannot_train_is_refused(
    name: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(CASES / f"{name}.yaml"), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(f"{code}: ")


@pytest.mark.slow
@pytest.mark.parametrize("config", [DETECTOR, UNKNOWN], ids=["detector", "unknown"])
def test_train_refuses_a_model_with_the_words_of_the_dry_run(
    config: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    pins = settings("model.family=hf", f"model.path={folder}", "data.tokenizer=bytes", "data.seq_len=16",
                    "train.global_batch=2", "train.steps=1", "cluster=1xcpu")  # fmt: skip
    assert main(["train", "--dry-run", *pins]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("M091: " if config is DETECTOR else "M024: ")
    assert main(["train", "--quiet", "--no-check", *pins]) == 2
    shown = capsys.readouterr()
    assert message.partition("\n")[0] in shown.err + shown.out


def test_weights_that_do_not_fit_are_refused_without_reading_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**SMALL | {"vocab_size": 320})).save_pretrained(folder)
    pins = settings(f"model.path={folder}", "data.tokenizer=bytes", "data.seq_len=16", "train.global_batch=2",
                    "cluster=2xcpu")  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    assert main(["train", "--dry-run", *pins]) == 2
    assert "M021: the weights do not match the model; missing: model.norm.weight" in capsys.readouterr().err


def test_a_dataset_on_the_hub_is_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    """To fetch it would fail: there is none of this name."""
    pins = settings("data.source=datasets", "data.path=owner/texts", "cluster=2xcpu")
    assert main(["train", "--dry-run", *pins]) == 0
    assert "the dataset is on the Hub: it is not fetched" in capsys.readouterr().out


def test_without_torch_only_the_plan_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # so that it is not found
    assert main(["train", "--dry-run", "--set", "cluster=2xcpu"]) == 0
    assert "not built: torch is not installed here; only the plan is checked" in capsys.readouterr().out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_torchrun_the_first_rank_shows_the_plan_and_none_trains(
    rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("2", "2", rank, rank, "0", "127.0.0.1", "29999"), strict=True):
        monkeypatch.setenv(name, value)
    assert main(["train", "--dry-run", "--json", "--set", "cluster=2xcpu"]) == 0
    output = capsys.readouterr().out
    assert (json.loads(output)["build"]["world_size"] == 2) if rank == "0" else output == ""
    assert not (tmp_path / "runs").exists()
