"""The first loss of a Hugging Face model is compared with transformers' own forward, which changes nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.cases import slow
from tests.environment import CACHE
from tests.hf_models import EXPERTS, SMALL
from tests.parity import plan_for
from tests.ranks import run_ranks
from trimaran.core import EXIT_DONE, EXIT_USER, Recipe
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker

WIDE: dict[str, Any] = {"vocab_size": 320, "initializer_range": 0.2}


class ScaledConfig(LlamaConfig):
    model_type = "scaled_llama"


class ScaledLlama(LlamaForCausalLM):
    """Computes other logits with transformers' attention than with another one."""

    config_class = ScaledConfig

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **options)
        if self.config._attn_implementation == "sdpa" and isinstance(getattr(out, "logits", None), torch.Tensor):
            out.logits = 2 * out.logits
        return out


class LeakyConfig(LlamaConfig):
    model_type = "leaky_llama"


class LeakyLlama(LlamaForCausalLM):
    """Takes positions and masks, and ignores both."""

    config_class = LeakyConfig

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        return super().forward(input_ids=input_ids, use_cache=False)


class OffsetConfig(GPT2Config):
    model_type = "offset_gpt2"


class OffsetGpt2(GPT2LMHeadModel):
    """Counts positions that it is given from 1, and its own from 0."""

    config_class = OffsetConfig

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        given = None if position_ids is None else position_ids + 1
        return super().forward(input_ids=input_ids, position_ids=given, **options)


class AverageConfig(LlamaConfig):
    model_type = "average_llama"


class AverageLlama(LlamaForCausalLM):
    """Adds the mean over all tokens to the logits of each."""

    config_class = AverageConfig

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.logits = out.logits + out.logits.mean(1, keepdim=True)
        return out


for _kind, _model in {
    ScaledConfig: ScaledLlama,
    LeakyConfig: LeakyLlama,
    OffsetConfig: OffsetGpt2,
    AverageConfig: AverageLlama,
}.items():
    AutoConfig.register(_kind.model_type, _kind)
    AutoModelForCausalLM.register(_kind, _model)

GPT2: dict[str, Any] = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL | WIDE, attention_dropout=0.0),
    "mixture": AutoConfig.for_model("qwen3_moe", **SMALL | WIDE | EXPERTS),
    "dropout": GPT2Config(**GPT2, initializer_range=0.2),  # by default a tenth of everything
    "scaled": ScaledConfig(**SMALL | WIDE),
    "leaky": LeakyConfig(**SMALL | WIDE),
    "offset": OffsetConfig(**GPT2, initializer_range=0.2),
    "average": AverageConfig(**SMALL | WIDE),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first-loss")
    with (folder / "texts.jsonl").open("w") as file:
        for number in range(200):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 11)}) + "\n")
    for name, config in CONFIGS.items():
        config.save_pretrained(folder / name)
    return folder


def train(
    workspace: Path, name: str, plan: dict[str, Any], *, packed: bool = True, model: Any = None, **train: Any
) -> tuple[list[int], RunDirectory]:
    """Train a model for two steps, and return the exit code of each rank and the run."""
    recipe = Recipe.model_validate(
        {
            "model": {"family": "hf", "path": str(workspace / name)} | (model or {}),
            "data": {
                "source": "jsonl",
                "path": str(workspace / "texts.jsonl"),
                "seq_len": 32,
                "isolate_documents": packed,
                "tokenizer": "bytes",
                "workers": 0,
            },
            "train": {"steps": 2, "global_batch": 4, "lr": 3e-3, "evaluate": {"batches": 0}} | train,
            "checkpoint": {"every": "off", "memory": 0},
        }
    )
    path = workspace / "runs" / str(len([*(workspace / "runs").glob("*")]))
    run = create_run(path, recipe, plan_for(recipe, **{"grad_accum": 2} | plan))
    world_size = run.read_plan().mesh.world_size
    return run_ranks(world_size, train_rank, run.path, CACHE), run


def train_rank(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def errors_of(run: RunDirectory) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [each["data"] for each in events if each["kind"] == "error"]


def refusal(workspace: Path, name: str, plan: dict[str, Any], **options: Any) -> dict[str, Any]:
    codes, run = train(workspace, name, plan, **options)
    assert set(codes) == {EXIT_USER}, errors_of(run)
    assert not run.metrics.exists() or not run.metrics.read_text(), "no step was trained"
    (error,) = errors_of(run)
    return error


def steps_of(run: RunDirectory) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [tuple(line[each] for each in ("step", "loss", "grad_norm", "lr", "tokens", "samples")) for line in lines]


LORA = {"adapter": {"kind": "dora", "rank": 4}}
UNCHANGED = [
    ("dropout", {}, {"packed": False}),
    ("mixture", {"dp_shard": 2, "ep": 2}, {}),
    slow(("llama", {"tp": 2, "recompute": "full"}, {"model": LORA})),
    slow(("llama", {"pp": 2}, {})),
    slow(("llama", {"dp_replicate": 2}, {})),
]


@pytest.mark.parametrize(("name", "plan", "options"), UNCHANGED, ids=str)
def test_a_healthy_model_trains_bit_for_bit_as_without_the_check(
    name: str, plan: dict[str, Any], options: dict[str, Any], workspace: Path
) -> None:
    runs = []
    for check in (True, False):
        codes, run = train(workspace, name, plan, check_first_loss=check, **options)
        assert set(codes) == {EXIT_DONE}, errors_of(run)
        runs.append(run)
    checked, unchecked = runs
    assert steps_of(checked) == steps_of(unchecked)
    (file,) = (each.name for each in checked.model.glob("*.safetensors"))
    ours, theirs = (load_file(run.model / file) for run in runs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in theirs)


# Healthy models are checked in every run of test_hf.py and test_hf_pipeline.py, too.
HEALTHY = [
    ("llama", {"precision": "bf16"}, {}),
    ("llama", {"tp": 2}, {"model": LORA}),
    ("llama", {"cp": 2}, {"packed": False}),
    slow(("llama", {"dp_shard": 2, "precision": "bf16"}, {"model": LORA})),
    slow(("llama", {"pp": 2, "dp_shard": 2, "tp": 2, "precision": "bf16"}, {})),
    slow(("mixture", {"tp": 2}, {"packed": False})),
]


@pytest.mark.parametrize(("name", "plan", "options"), HEALTHY, ids=str)
def test_a_healthy_model_is_not_refused(
    name: str, plan: dict[str, Any], options: dict[str, Any], workspace: Path
) -> None:
    codes, run = train(workspace, name, plan, **options)
    assert set(codes) == {EXIT_DONE}, errors_of(run)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"pp": 2},
        slow({"dp_shard": 2, "precision": "bf16"}),
        slow({"tp": 2}),
        slow({"cp": 2}),
        slow({"dp_shard": 2, "tp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_a_model_that_computes_something_else_is_refused_under_every_plan(
    plan: dict[str, Any], workspace: Path
) -> None:
    error = refusal(workspace, "scaled", plan, packed=False)
    assert error["code"] == "M060"
    assert "ScaledLlama" in error["what"]
    assert "check_first_loss" in error["fix"]


def test_other_positions_in_packed_rows_are_refused(workspace: Path) -> None:
    assert refusal(workspace, "offset", {})["code"] == "M061"
    codes, _ = train(workspace, "offset", {}, packed=False)  # where no positions are given
    assert set(codes) == {EXIT_DONE}


def test_documents_that_read_each_other_are_refused(workspace: Path) -> None:
    assert refusal(workspace, "leaky", {})["code"] == "M061"


def test_a_model_that_reads_later_tokens_is_refused(workspace: Path) -> None:
    assert refusal(workspace, "average", {}, packed=False)["code"] == "M062"


def test_the_check_can_be_switched_off(workspace: Path) -> None:
    codes, run = train(workspace, "scaled", {}, packed=False, check_first_loss=False)
    assert set(codes) == {EXIT_DONE}
    assert len(steps_of(run)) == 2


def test_a_trained_adapter_is_compared_with_its_merged_weights(workspace: Path) -> None:
    codes, first = train(workspace, "llama", {}, model=LORA, lr=0.1)
    assert set(codes) == {EXIT_DONE}
    codes, run = train(workspace, "llama", {}, model={"adapter": LORA["adapter"] | {"path": str(first.model)}})
    assert set(codes) == {EXIT_DONE}, errors_of(run)
