"""The answer of `trimaran plan` and how it is printed, with hand-made answers."""

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.runs import PREDICTION
from trimaran.app import (
    CostTerms,
    PlanReport,
    PlanRequest,
    SlowerBy,
    as_dict,
    complete_cluster,
    complete_goal,
    complete_lines,
    complete_model_or_recipe,
    complete_tool,
    main,
    read_cost_terms,
    read_plan_request,
    run_cost_of,
    search_for_tool,
    show_report,
    show_slower,
    show_terms,
    with_files,
    with_goal,
    with_top,
)
from trimaran.core import GIB, Bytes, Mesh, Pipeline, Plan, Seconds, TowerPlan, UserError, templated
from trimaran.machine import parse_cluster
from trimaran.planner import MEANING, PHASE_MEANING, NearMiss, PlanAnswer, no_fit_error

CASES = Path(__file__).parents[2] / "recipes" / "case-studies"


def request_for(what: str = "llama-3-8b", *settings: str, cluster: str = "8xH100") -> PlanRequest:
    return read_plan_request(what, {"cluster": cluster}, settings)


def predicted(plan: Plan, *, gib: float = 40, seconds: float = 2.0) -> Plan:
    cost: dict[str, Any] = {"device_bytes": Bytes(int(gib * GIB)), "step_seconds": Seconds(seconds), "fits": gib <= 79}
    cost["tokens_per_second"] = 2**20 / seconds
    return plan.model_copy(update={"prediction": PREDICTION.model_copy(update=cost)})


BEST = predicted(Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16", grad_accum=32))
SECOND = predicted(
    Plan(mesh=Mesh(dp_shard=4, tp=2), sharding="parameters", recompute=2, precision="bf16", grad_accum=64),
    gib=72,
    seconds=2.5,
)
PIPED = predicted(
    Plan(mesh=Mesh(dp_shard=2, pp=4), pipeline=Pipeline(schedule="interleaved"), grad_accum=128), gib=85, seconds=3.0
)


def report(
    *, request: PlanRequest | None = None, ranked: tuple[Plan, ...] = (BEST, SECOND), **rest: object
) -> PlanReport:
    request = request or request_for()
    answer = PlanAnswer(
        question=request.question,
        ranked=ranked,
        misses=(NearMiss(plan=PIPED, why=templated("6.0 GiB over")),),
        hints=(templated("{hint}: {times}x as fast", hint="one more node", times="1.9"),),
        warnings=("above 88 % full steps slow down",),
        num_considered=1234,
        **rest,  # type: ignore[arg-type]
    )
    return PlanReport(request=request, answer=answer, terms=CostTerms(tokens=1e12, price=2.0))


def printed(shown: PlanReport, *, width: int = 100, top: int = 8) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show_report(shown, console, top=top)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_the_printed_answer_has_the_plans_why_others_lost_and_what_would_help(width: int) -> None:
    text = printed(report(), width=width)
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    for part in ("1,234 plans", "40.0 GiB 51%", "72.0 GiB 91%", "every 2", "1 x 64", "dp_shard 2 x pp 4 interleaved",
                  "6.0 GiB over", "one more node", "warning above 88 %", "±30%"):  # fmt: skip
        assert part in flat, part


def test_only_the_requested_number_of_plans_is_printed() -> None:
    assert "every 2" not in printed(report(), top=1)


def test_if_nothing_fits_the_smallest_plan_and_cluster_are_shown() -> None:
    missing = report(ranked=(), missing_bytes=Bytes(6 * GIB), smallest=parse_cluster("2x8xH100"))
    text = printed(missing)
    for part in ("does not fit", "6.0 GiB a device", "2x8xH100 is enough"):
        assert part in text
    error = no_fit_error(missing.answer)
    assert error.code == "P007"
    assert "too big for the 79.1 GiB of H100" in error.what
    assert "2x8xH100" in error.fix
    found = as_dict(missing, top=3)
    assert (found["fits"], found["plan"], found["smallest_cluster"]) == (False, None, "2x8xH100")
    assert found["error"] == error.as_dict()


def test_json_has_everything_that_is_printed() -> None:
    found = as_dict(report(), top=1)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [each["plan"]["mesh"]["dp_shard"] for each in found["ranked"]] == [8]
    assert found["misses"][0]["why"] == "6.0 GiB over"
    assert found["misses"][0]["prediction"]["step_seconds"] == 3.0
    assert (found["hints"], found["num_considered"]) == (["one more node: 1.9x as fast"], 1234)


def test_another_goal_pins_its_plan_in_the_next_command() -> None:
    plain, thrifty = report(), report(request=with_goal(request_for(), "cost"), part=parse_cluster("4xH100"))
    assert "plan=" not in plain.next_command
    small = predicted(Plan(mesh=Mesh(dp_shard=4), sharding="parameters", precision="bf16", grad_accum=64))
    arguments = shlex.split(replace(thrifty, answer=replace(thrifty.answer, ranked=(small,))).next_command)
    assert "cluster=4xH100" in arguments
    (pins,) = [each for each in arguments if each.startswith("plan=")]
    assert Plan.model_validate(json.loads(pins.removeprefix("plan="))) == small.model_copy(update={"prediction": None})


def test_several_nodes_are_started_with_torchrun() -> None:
    request = request_for(cluster="2x8xH100")
    best = predicted(Plan(mesh=Mesh(dp_shard=16), sharding="parameters", precision="bf16", grad_accum=16))
    assert report(request=request, ranked=(best,)).next_command.startswith("torchrun --nnodes=2 --nproc-per-node=8")


def test_a_plan_that_our_trainer_does_not_support_is_emitted_for_a_tool() -> None:
    request = request_for()
    odd = predicted(Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16"))  # no batch of 256
    command = report(request=request, ranked=(odd,)).next_command
    assert shlex.split(command)[1] == "plan"
    assert shlex.split(command)[-2:] == ["--emit", "accelerate"]


@pytest.mark.parametrize(
    ("text", "tokens"), [("1T", 1e12), ("300B", 3e11), ("1.5t", 1.5e12), ("15e12", 15e12), ("2,000", 2000), ("7", 7)]
)
def test_tokens_are_counts_with_suffixes(text: str, tokens: float) -> None:
    assert read_cost_terms(tokens=text, price=None, mtbf=None).tokens == tokens


@pytest.mark.parametrize("text", ["", "T", "-3B", "1Q", "nan", "inf", "0", "1e99"])
def test_an_invalid_number_of_tokens_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="A013"):
        read_cost_terms(tokens=text, price=None, mtbf=None)


def test_the_cost_of_a_run_is_days_hours_and_money() -> None:
    question, cluster = request_for().question, parse_cluster("8xH100")
    cost = run_cost_of(BEST, question, cluster, CostTerms(tokens=2**20 * 43200, price=3.0))
    assert cost.bill is not None
    assert (cost.bill.days, cost.bill.device_hours, cost.bill.cost) == pytest.approx((1.0, 192.0, 576.0))
    assert cost.goodput is None
    assert run_cost_of(BEST, question, cluster, CostTerms()).as_dict() == {"goodput": None, "bill": None}


def test_failures_make_a_run_longer_and_give_a_save_interval() -> None:
    question, cluster = request_for().question, parse_cluster("8xH100")
    cost = run_cost_of(BEST, question, cluster, CostTerms(tokens=2**20 * 43200, mtbf_hours=1000.0))
    assert cost.goodput is not None
    assert cost.bill is not None
    assert cost.bill.days == pytest.approx(1.0 / cost.goodput.fraction)
    # 12 bytes of each of 8.03e9 parameters at 2 GB/s are 48 s. A failure each 125 h; Young: sqrt(2 x 48 x 45e4).
    assert cost.goodput.interval == pytest.approx((2 * 48.2 * 450_000) ** 0.5, rel=0.02)
    rows = dict(cost.rows)
    assert "save every 1 h 4" in rows["goodput"]
    assert "at" not in rows["bill"]
    answer = cost.as_dict()
    assert answer["bill"]["cost"] is None
    assert answer["goodput"]["assumed"]["restart_seconds"] == 600


def test_a_tool_gets_the_best_plan_that_it_supports() -> None:
    request = request_for("llama-3-8b", "plan.mesh.pp=2")
    with pytest.raises(UserError, match="P061"):
        search_for_tool("accelerate", request.question)  # the user pinned what the tool lacks
    with pytest.raises(UserError, match="P060"):
        search_for_tool("keras", request.question)
    _, emitted = search_for_tool("accelerate", request_for().question)
    assert emitted is not None
    assert emitted.plan.mesh.pp == 1


def test_a_tool_that_does_not_support_the_best_plan_shows_why_and_the_loss(tmp_path: Path) -> None:
    _, emitted = search_for_tool("deepspeed", request_for().question)
    assert emitted is not None
    loss = SlowerBy(why="deepspeed cannot express mesh.tp 2: it has no slices", times=4.2)
    shown = replace(report(), emitted=replace(emitted, loss=loss))
    text = printed(with_files(shown, tmp_path, force=True), width=200)
    assert "deepspeed cannot express mesh.tp 2: it has no slices; this one is 4.2 times slower" in text
    assert as_dict(with_files(shown, tmp_path, force=True), top=1)["emission"]["loss"]["times_slower"] == 4.2


@pytest.mark.parametrize(
    ("times", "expected"), [(4.2, "4.2 times slower"), (1.08, "8% slower"), (1.0, "as fast"), (0.9, "10% faster")]
)
def test_a_ratio_of_step_times_as_text(times: float, expected: str) -> None:
    assert show_slower(times) == expected


def test_a_plan_that_no_tool_supports_has_a_caution() -> None:
    request = request_for(str(CASES / "vlm-26b-8xh100.yaml"), cluster="8xH100")
    odd = {"vision": TowerPlan(sharding="none")}
    best = BEST.model_copy(update={"towers": odd, "grad_accum": 16})
    second = BEST.model_copy(update={"grad_accum": 16})
    shown = report(request=request, ranked=(best, predicted(second, seconds=8.4)))
    assert "cannot express its towers" in shown.caution
    assert "4.2 times slower" in shown.caution
    assert shown.next_command.endswith("--emit accelerate")
    assert as_dict(shown, top=1)["caution"] == shown.caution
    assert report().caution == ""
    assert "another" in report(request=request, ranked=(best,)).caution


def test_a_vision_model_is_planned_and_printed_in_positions(tmp_path: Path) -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64,
              "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 224,
              "patch_size": 14, "num_channels": 3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = request_for(str(tmp_path))
    assert request.question.recipe.data.seq_len == 257
    assert request.question.recipe.train.global_batch == 8 * (2**20 // (257 * 8))
    text = printed(report(request=request))
    assert "4,080 samples of 257: 1.0M positions" in " ".join(text.split())
    assert "positions/s" in text
    assert "tokens/s" not in text


def test_a_recipe_finds_its_files_in_this_folder_and_then_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "recipes"
    beside.mkdir()
    (beside / "mine.yaml").write_text("cluster: machines.yaml\n")
    (beside / "machines.yaml").write_bytes((CASES / "clusters" / "dgx-a100-2.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert read_plan_request("recipes/mine.yaml", {}, []).question.recipe.cluster == str(beside / "machines.yaml")
    (tmp_path / "machines.yaml").write_bytes((CASES / "clusters" / "dgx-a100-4.yaml").read_bytes())
    question = read_plan_request("recipes/mine.yaml", {}, []).question
    assert (question.recipe.cluster, question.cluster.world_size) == ("machines.yaml", 4)


def test_top_requests_more_plans_than_the_default_but_never_fewer() -> None:
    assert with_top(request_for(), 20).question.max_plans == 20
    assert with_top(request_for(), 1).question.max_plans == 8


def test_too_frequent_failures_are_explained() -> None:
    question, cluster = request_for().question, parse_cluster("8xH100")
    cost = run_cost_of(BEST, question, cluster, CostTerms(tokens=1e12, mtbf_hours=0.1))
    assert "the run would never end" in dict(cost.rows)["goodput"]
    assert cost.bill is None


def test_names_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "config.json", "other.json", "lines.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert complete_model_or_recipe("llama-3.2") == ["llama-3.2-1b", "llama-3.2-3b"]
    assert {"tiny", "mine.yaml", "config.json", "folder/"} <= set(complete_model_or_recipe(""))
    assert "other.json" not in complete_model_or_recipe("")
    assert complete_lines("l") == ["lines.jsonl"]
    assert complete_goal("f") == ["fewest-gpus"]
    assert complete_tool("mega") == ["megatron"]
    assert {"4x8xH100", "4x8xH200"} <= set(complete_cluster("4x8xH"))
    assert complete_cluster("au") == ["auto"]


@pytest.mark.parametrize("width", [60, 80, 110, 120, 200])
def test_a_long_meaning_never_truncates_the_name_or_the_value_of_a_term(width: int) -> None:
    cost = {"memory": dict.fromkeys(MEANING, Bytes(17 * GIB)), "time": dict.fromkeys(PHASE_MEANING, Seconds(0.144))}
    drawn = io.StringIO()
    plan = BEST.model_copy(update={"prediction": PREDICTION.model_copy(update=cost)})
    show_terms(plan, Console(file=drawn, width=width, color_system=None))
    lines = drawn.getvalue().splitlines()
    for names, figure in ((MEANING, "17.0 GiB"), (PHASE_MEANING, "144 ms")):
        for name in names:
            assert any(line.startswith(name) and figure in line for line in lines), (name, drawn.getvalue())


def test_a_large_model_without_a_cluster_is_not_planned_for_the_cpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["plan", "llama-3-8b", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["cluster"] == "8xH100"
    assert "no cluster is named and this machine has no GPU: planned for 8xH100; name yours" in shown.err
    assert main(["plan", "llama-3-8b", "--serve"]) == 0
    assert "planned for 8xH100" in capsys.readouterr().err
    small = read_plan_request("tiny", {}, ["plan.precision=fp32"])
    named = read_plan_request("llama-3-8b", {"cluster": "auto"}, [])
    assert [(each.is_reference, each.question.cluster.device.kind) for each in (small, named)] == [(False, "cpu")] * 2
    assert "cluster=8xH100" in read_plan_request("llama-3-8b", {}, []).arguments


@pytest.mark.parametrize(
    ("more", "is_said"), [((), True), (("--cluster", "auto"), False), (("--cluster", "8xH100"), False)]
)
def test_a_recipe_of_a_large_model_for_this_machine_says_so(
    more: tuple[str, ...], is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recipe = tmp_path / "large.yaml"
    recipe.write_text("model: {preset: llama-3.2-1b}\n")
    main(["plan", str(recipe), "--json", *more])
    shown = capsys.readouterr().err
    assert ("planned for this machine, as the recipe's cluster is auto, and it has no GPU" in shown) == is_said


def test_fewer_stages_than_ranks_of_a_pipeline_leave_other_plans_or_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages = ["plan", "tiny", "--cluster", "2xcpu", "--global-batch", "4", "--set", "plan.pipeline.stages=[4]"]
    assert main([*stages, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["mesh"]["pp"] == 1
    assert main([*stages, "--set", "plan.mesh.pp=2"]) == 2
    assert "P011: 1f1b with pp 2 does not allow 1 stages" in capsys.readouterr().err
