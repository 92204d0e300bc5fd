"""Plans with an adapter: what fits, what is refused, what is proposed, and what other tools get."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from tests.hf_models import save_model
from trimaran.app import (
    CostTerms,
    PlanReport,
    PlanRequest,
    adapter_setting,
    as_dict,
    build_plan_report,
    main,
    read_plan_request,
    show_report,
)
from trimaran.core import GIB, Plan, UserError
from trimaran.planner import PEFT_FILE, no_fit_error, predicted, search
from trimaran.planner.emit import emit


def request(what: str, cluster: str, *settings: str, adapter: str = "", batch: int = 32) -> PlanRequest:
    shortcuts = {"cluster": cluster, "data.seq_len": 2048, "train.global_batch": batch}
    return read_plan_request(what, shortcuts, [*([adapter_setting(adapter)] if adapter else []), *settings])


WHOLE = ("plan.mesh.cp=1", "plan.mesh.pp=1")  # fewer plans to search


def test_a_70b_model_fits_on_four_a100_with_lora_and_on_one_with_4_bit_weights() -> None:
    assert not search(request("llama-3.1-70b", "4xA100-80GB", *WHOLE, "plan.offload=none").question).ranked
    lora = search(request("llama-3.1-70b", "4xA100-80GB", *WHOLE, "plan.offload=none", adapter="lora:16").question)
    best = lora.ranked[0].prediction
    assert best is not None
    assert best.fits
    # 70.55e9 frozen weights and 207e6 of an adapter, sharded over four devices or split by tp and pp.
    assert best.memory["weights"] == pytest.approx((2 * 70.55e9 + 4 * 207.1e6) / 4, rel=0.05)
    assert best.flops_per_step < 0.7 * 6 * 70.55e9 * 32 * 2048 * 1.1
    packed = search(request("llama-3.1-70b", "1xA100-80GB", *WHOLE, "plan.offload=none", adapter="qlora").question)
    assert packed.ranked
    found = packed.ranked[0].prediction
    assert found is not None
    assert 37 * GIB < found.memory["weights"] < 42 * GIB
    unpacked = request("llama-3.1-70b", "1xA100-80GB", *WHOLE, "plan.offload=none", adapter="lora")
    assert not search(unpacked.question).ranked


def test_if_no_plan_fits_an_adapter_is_proposed_with_the_memory_it_needs() -> None:
    answer = search(request("llama-3.1-70b", "2xA100-80GB", *WHOLE).question)
    assert not answer.ranked
    hint = next(each for each in answer.hints if "adapter" in each)
    what = "train a LoRA adapter, not the whole model, with --set model.adapter.kind=lora"
    assert hint.startswith(f"{what}: a plan fits in")
    assert "--set model.adapter.kind=lora" in no_fit_error(answer).fix
    on_one = search(request("llama-3.1-70b", "1xA100-80GB", *WHOLE, "plan.offload=none").question)
    assert any("--set model.adapter.base=4bit: a plan fits" in each for each in on_one.hints)
    lora = search(request("llama-3.1-70b", "1xA100-80GB", *WHOLE, "plan.offload=none", adapter="lora").question)
    assert any(each.startswith("set model.adapter.base to 4bit") for each in lora.hints)
    # The proposed setting is one: the same question with it gets a plan.
    assert search(request("llama-3.1-70b", "2xA100-80GB", *WHOLE, "model.adapter.kind=lora").question).ranked


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["plan.precision=fp8"], "P066"),
        (["plan.engine=deepspeed"], "P064"),
        (["model.adapter.base=4bit", "plan.mesh.tp=2"], "P065"),
        (["model.adapter.base=4bit", "plan.offload=parameters"], "P065"),
    ],
)
def test_what_no_adapter_can_run_with_is_refused_before_anything_starts(settings: list[str], code: str) -> None:
    with pytest.raises(UserError) as error:
        search(request("llama-3.1-8b", "8xH100", *settings, adapter="lora").question)
    assert error.value.code == code


@pytest.mark.parametrize("text", ["loar", "lora:", "lora:x", "lora:0", "qlora:-1", "lora:16:2"])
def test_an_unknown_adapter_is_an_error(text: str) -> None:
    with pytest.raises(UserError) as error:
        adapter_setting(text)
    assert (error.value.code, error.value.where) == ("A013", "--adapter")


def test_the_answer_shows_what_is_trained_and_says_which_plan_is_first() -> None:
    report = build_plan_report(
        request("llama-3.1-8b", "2xH100", adapter="dora:8"), CostTerms(mtbf_hours=50_000), tool=None
    )
    console = Console(file=io.StringIO(), width=120)
    show_report(report, console, top=8)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "DoRA of rank 8 on q_proj, k_proj" in text
    # 22,347,776 in checkpoints of twelve bytes each are written in a moment.
    assert report.cost is not None
    assert report.cost.goodput is not None
    assert report.cost.goodput.lost["checkpoints"] < 1e-3
    found = as_dict(report, top=8)
    assert found["model"]["trained_parameters"] == 20_971_520 + 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    assert found["model"]["adapter"]["rank"] == 8
    assert "model.adapter={kind: dora, rank: 8}" in found["next"]


def test_a_first_plan_that_is_not_the_fastest_is_explained() -> None:
    asked = request("llama-3.1-8b", "8xH100")
    answer = search(asked.question)
    fastest = min(answer.ranked, key=lambda plan: plan.prediction.step_seconds if plan.prediction else 0.0)
    for ranked, explained in (((fastest, *answer.ranked[1:]), False), ((answer.ranked[-1], fastest), True)):
        report = PlanReport(request=asked, answer=replace(answer, ranked=ranked), terms=CostTerms())
        console = Console(file=io.StringIO(), width=120)
        show_report(report, console, top=8)
        assert isinstance(console.file, io.StringIO)
        assert ("the simplest of those within 5% of the fastest" in console.file.getvalue()) == explained


def test_tools_that_train_whole_models_refuse_an_adapter() -> None:
    question = request("llama-3.1-8b", "8xH100", adapter="lora", batch=8).question
    plan = Plan.model_validate({"mesh": {"dp_shard": 8}, "sharding": "parameters", "precision": "bf16"})
    for tool in ("torchtitan", "megatron"):
        with pytest.raises(UserError, match="cannot express an adapter") as error:
            emit(tool, plan, question)
        assert error.value.code == "P061"
    packed = request("llama-3.1-8b", "8xH100", adapter="qlora", batch=8).question
    for tool in ("accelerate", "hf-trainer", "deepspeed"):
        assert PEFT_FILE in emit(tool, plan, question).files
        with pytest.raises(UserError, match="this base of an adapter"):
            emit(tool, plan, packed)
    assert "get_peft_model" in " ".join(emit("accelerate", plan, question).notes)


def test_the_emitted_peft_config_trains_as_many_parameters_as_planned(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "llama")
    asked = request(str(folder), "1xH100", "data.seq_len=64", adapter="dora:4", batch=4)
    plan = predicted(Plan(micro_batch=4, precision="bf16"), asked.question)
    files = emit("hf-trainer", plan, asked.question).files
    compile(files["train.py"], "train.py", "exec")
    assert "get_peft_model(model, LoraConfig(**json.load(file)))" in files["train.py"]
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  it takes seconds to import

    config = LoraConfig(**json.loads(files[PEFT_FILE]))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    assert asked.question.outline is not None
    assert model.get_nb_trainable_parameters()[0] == asked.question.outline.trained_parameters


def test_a_dry_run_refuses_a_rank_that_is_larger_than_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "--dry-run", "--set", "model.preset=tiny", "--set", "model.adapter.rank=4096"]
    assert main(asked) == 2
    assert "M052" in capsys.readouterr().err
    assert main(["plan", "tiny", "--cluster", "1xH100", "--adapter", "lora:4096"]) == 2
    assert "M052" in capsys.readouterr().err
