"""What `plan` answers and how it is drawn, from answers made by hand."""

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.runs import PREDICTION
from trimaran.app.request.emit_files import SlowerBy, search_for, show_slower
from trimaran.app.request.options import complete_cluster, complete_goal, complete_lines, complete_tool, complete_what
from trimaran.app.request.plan_answer import Report, as_dict, with_files, with_goal, with_top
from trimaran.app.request.plan_request import Asked, ask_about
from trimaran.app.request.run_cost import Terms, account_of, read_terms
from trimaran.app.views.plan_answer_view import show_report
from trimaran.app.views.plan_view import show_terms
from trimaran.core import GIB, Bytes, Mesh, Pipeline, Plan, Seconds, UserError
from trimaran.core.plan import TowerPlan
from trimaran.hardware import parse_cluster
from trimaran.planner import NearMiss, PlanAnswer
from trimaran.planner.choose import refusal
from trimaran.planner.explain import MEANING, PHASE_MEANING

CASES = Path(__file__).parents[2] / "recipes" / "case-studies"


def asked_about(what: str = "llama-3-8b", *settings: str, cluster: str = "8xH100") -> Asked:
    return ask_about(what, {"cluster": cluster}, settings)


def predicted(plan: Plan, *, gib: float = 40, seconds: float = 2.0) -> Plan:
    cost = {"device_bytes": Bytes(int(gib * GIB)), "step_seconds": Seconds(seconds), "fits": gib <= 79}
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


def report(*, asked: Asked | None = None, ranked: tuple[Plan, ...] = (BEST, SECOND), **rest: object) -> Report:
    asked = asked or asked_about()
    answer = PlanAnswer(
        question=asked.question,
        ranked=ranked,
        misses=(NearMiss(plan=PIPED, why="6.0 GiB over"),),
        hints=("one more node: 1.9x as fast",),
        warnings=("above 88 % full steps slow down",),
        num_considered=1234,
        **rest,  # type: ignore[arg-type]
    )
    return Report(asked=asked, answer=answer, terms=Terms(tokens=1e12, price=2.0))


def drawn(told: Report, *, width: int = 100, top: int = 8) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show_report(told, console, top=top)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_the_drawing_tells_the_plans_why_others_lost_and_what_would_help(width: int) -> None:
    text = drawn(report(), width=width)
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    for words in ("1,234 plans", "40.0 GiB 51%", "72.0 GiB 91%", "every 2", "1 x 64", "dp_shard 2 x pp 4 interleaved",
                  "6.0 GiB over", "one more node", "warning above 88 %", "give or take 30%"):  # fmt: skip
        assert words in flat, words


def test_only_as_many_plans_are_drawn_as_were_asked_for() -> None:
    assert "every 2" not in drawn(report(), top=1)


def test_without_a_plan_the_leanest_and_the_smallest_cluster_are_told() -> None:
    missing = report(ranked=(), missing_bytes=Bytes(6 * GIB), smallest=parse_cluster("2x8xH100"))
    text = drawn(missing)
    for words in ("does not fit", "6.0 GiB a device", "2x8xH100 would do"):
        assert words in text
    error = refusal(missing.answer)
    assert error.code == "P007"
    assert "too big for the 79.1 GiB of H100" in error.what
    assert "2x8xH100" in error.fix
    found = as_dict(missing, top=3)
    assert (found["fits"], found["plan"], found["smallest_cluster"]) == (False, None, "2x8xH100")
    assert found["error"] == error.as_dict()


def test_json_has_everything_that_is_drawn() -> None:
    found = as_dict(report(), top=1)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [each["plan"]["mesh"]["dp_shard"] for each in found["ranked"]] == [8]
    assert found["misses"][0]["why"] == "6.0 GiB over"
    assert found["misses"][0]["prediction"]["step_seconds"] == 3.0
    assert (found["hints"], found["num_considered"]) == (["one more node: 1.9x as fast"], 1234)


def test_another_goal_pins_its_plan_in_the_next_command() -> None:
    plain, thrifty = report(), report(asked=with_goal(asked_about(), "cost"), part=parse_cluster("4xH100"))
    assert "plan=" not in plain.next_command
    small = predicted(Plan(mesh=Mesh(dp_shard=4), sharding="parameters", precision="bf16", grad_accum=64))
    words = shlex.split(replace(thrifty, answer=replace(thrifty.answer, ranked=(small,))).next_command)
    assert "cluster=4xH100" in words
    (pins,) = [word for word in words if word.startswith("plan=")]
    assert Plan.model_validate(json.loads(pins.removeprefix("plan="))) == small.model_copy(update={"prediction": None})


def test_several_nodes_are_started_by_torchrun() -> None:
    asked = asked_about(cluster="2x8xH100")
    best = predicted(Plan(mesh=Mesh(dp_shard=16), sharding="parameters", precision="bf16", grad_accum=16))
    assert report(asked=asked, ranked=(best,)).next_command.startswith("torchrun --nnodes=2 --nproc-per-node=8")


def test_a_plan_that_our_trainer_does_not_run_is_for_other_tools() -> None:
    asked = asked_about()
    odd = predicted(Plan(mesh=Mesh(dp_shard=8), sharding="parameters", precision="bf16"))  # no batch of 256
    command = report(asked=asked, ranked=(odd,)).next_command
    assert shlex.split(command)[1] == "plan"
    assert shlex.split(command)[-2:] == ["--emit", "accelerate"]


@pytest.mark.parametrize(
    ("text", "tokens"), [("1T", 1e12), ("300B", 3e11), ("1.5t", 1.5e12), ("15e12", 15e12), ("2,000", 2000), ("7", 7)]
)
def test_tokens_are_counts_with_suffixes(text: str, tokens: float) -> None:
    assert read_terms(tokens=text, price=None, mtbf=None).tokens == tokens


@pytest.mark.parametrize("text", ["", "T", "-3B", "1Q", "nan", "inf", "0", "1e99"])
def test_what_is_no_count_of_tokens_is_told(text: str) -> None:
    with pytest.raises(UserError, match="A013"):
        read_terms(tokens=text, price=None, mtbf=None)


def test_an_account_is_days_hours_and_money() -> None:
    question, cluster = asked_about().question, parse_cluster("8xH100")
    account = account_of(BEST, question, cluster, Terms(tokens=2**20 * 43200, price=3.0))
    assert account.bill is not None
    assert (account.bill.days, account.bill.device_hours, account.bill.cost) == pytest.approx((1.0, 192.0, 576.0))
    assert account.goodput is None
    assert account_of(BEST, question, cluster, Terms()).as_dict() == {"goodput": None, "bill": None}


def test_failures_make_a_run_longer_and_say_how_often_to_save() -> None:
    question, cluster = asked_about().question, parse_cluster("8xH100")
    account = account_of(BEST, question, cluster, Terms(tokens=2**20 * 43200, mtbf_hours=1000.0))
    assert account.goodput is not None
    assert account.bill is not None
    assert account.bill.days == pytest.approx(1.0 / account.goodput.share)
    # 12 bytes of each of 8.03e9 parameters at 2 GB/s are 48 s. A failure each 125 h; Young: sqrt(2 x 48 x 45e4).
    assert account.goodput.interval == pytest.approx((2 * 48.2 * 450_000) ** 0.5, rel=0.02)
    words = dict(account.words)
    assert "save every 1 h 4" in words["goodput"]
    assert "at" not in words["bill"]
    told = account.as_dict()
    assert told["bill"]["cost"] is None
    assert told["goodput"]["assumed"]["restart_seconds"] == 600


def test_a_tool_gets_the_best_plan_that_it_can_express() -> None:
    asked = asked_about("llama-3-8b", "plan.mesh.pp=2")
    with pytest.raises(UserError, match="P061"):
        search_for("accelerate", asked.question)  # a person pinned what the tool lacks
    with pytest.raises(UserError, match="P060"):
        search_for("keras", asked.question)
    _, form = search_for("accelerate", asked_about().question)
    assert form is not None
    assert form.plan.mesh.pp == 1


def test_a_tool_that_cannot_have_the_best_plan_says_why_and_what_that_costs(tmp_path: Path) -> None:
    _, form = search_for("deepspeed", asked_about().question)
    assert form is not None
    loss = SlowerBy(why="deepspeed cannot express mesh.tp 2: it has no slices", times=4.2)
    told = replace(report(), form=replace(form, loss=loss))
    text = drawn(with_files(told, tmp_path, force=True), width=200)
    assert "deepspeed cannot express mesh.tp 2: it has no slices; this one is 4.2 times slower" in text
    assert as_dict(with_files(told, tmp_path, force=True), top=1)["emission"]["loss"]["times_slower"] == 4.2


@pytest.mark.parametrize(
    ("times", "words"), [(4.2, "4.2 times slower"), (1.08, "8% slower"), (1.0, "as fast"), (0.9, "10% faster")]
)
def test_how_much_slower_is_said_in_words(times: float, words: str) -> None:
    assert show_slower(times) == words


def test_a_plan_that_no_tool_takes_is_not_promised() -> None:
    asked = asked_about(str(CASES / "vlm-26b-8xh100.yaml"), cluster="8xH100")
    odd = {"vision": TowerPlan(sharding="none")}
    best = BEST.model_copy(update={"towers": odd, "grad_accum": 16})
    second = BEST.model_copy(update={"grad_accum": 16})
    told = report(asked=asked, ranked=(best, predicted(second, seconds=8.4)))
    assert "cannot express its towers" in told.caution
    assert "4.2 times slower" in told.caution
    assert told.next_command.endswith("--emit accelerate")
    assert as_dict(told, top=1)["caution"] == told.caution
    assert report().caution == ""
    assert "another" in report(asked=asked, ranked=(best,)).caution


def test_a_vision_model_is_asked_about_and_drawn_in_its_positions(tmp_path: Path) -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64,
              "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 224,
              "patch_size": 14, "num_channels": 3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = asked_about(str(tmp_path))
    assert asked.question.recipe.data.seq_len == 257
    assert asked.question.recipe.train.global_batch == 8 * (2**20 // (257 * 8))
    text = drawn(report(asked=asked))
    assert "4,080 samples of 257: 1.0M positions" in " ".join(text.split())
    assert "positions/s" in text
    assert "tokens/s" not in text


def test_a_recipe_finds_its_files_here_and_then_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tmp_path / "recipes"
    beside.mkdir()
    (beside / "mine.yaml").write_text("cluster: machines.yaml\n")
    (beside / "machines.yaml").write_bytes((CASES / "clusters" / "dgx-a100-2.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert ask_about("recipes/mine.yaml", {}, []).question.recipe.cluster == str(beside / "machines.yaml")
    (tmp_path / "machines.yaml").write_bytes((CASES / "clusters" / "dgx-a100-4.yaml").read_bytes())
    question = ask_about("recipes/mine.yaml", {}, []).question
    assert (question.recipe.cluster, question.cluster.world_size) == ("machines.yaml", 4)


def test_more_plans_than_usual_are_asked_for_and_never_fewer() -> None:
    assert with_top(asked_about(), 20).question.most_shown == 20
    assert with_top(asked_about(), 1).question.most_shown == 8


def test_failures_that_leave_no_time_are_told_in_words() -> None:
    question, cluster = asked_about().question, parse_cluster("8xH100")
    account = account_of(BEST, question, cluster, Terms(tokens=1e12, mtbf_hours=0.1))
    assert "the run would never end" in dict(account.words)["goodput"]
    assert account.bill is None


def test_names_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "config.json", "other.json", "lines.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert complete_what("llama-3.2") == ["llama-3.2-1b", "llama-3.2-3b"]
    assert {"tiny", "mine.yaml", "config.json", "folder/"} <= set(complete_what(""))
    assert "other.json" not in complete_what("")
    assert complete_lines("l") == ["lines.jsonl"]
    assert complete_goal("f") == ["fewest-gpus"]
    assert complete_tool("mega") == ["megatron"]
    assert {"4x8xH100", "4x8xH200"} <= set(complete_cluster("4x8xH"))
    assert complete_cluster("au") == ["auto"]


@pytest.mark.parametrize("width", [60, 80, 110, 120, 200])
def test_no_word_about_a_term_takes_the_room_of_its_name_or_its_figure(width: int) -> None:
    cost = {"memory": dict.fromkeys(MEANING, Bytes(17 * GIB)), "time": dict.fromkeys(PHASE_MEANING, Seconds(0.144))}
    drawn = io.StringIO()
    plan = BEST.model_copy(update={"prediction": PREDICTION.model_copy(update=cost)})
    show_terms(plan, Console(file=drawn, width=width, color_system=None))
    lines = drawn.getvalue().splitlines()
    for names, figure in ((MEANING, "17.0 GiB"), (PHASE_MEANING, "144 ms")):
        for name in names:
            assert any(line.startswith(name) and figure in line for line in lines), (name, drawn.getvalue())
