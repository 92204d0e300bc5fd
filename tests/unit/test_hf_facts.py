"""What training can do with a Hugging Face model is found once, kept, and obeyed by the planner."""

import json
import os
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig, MixtralConfig

from tests.hf_models import SMALL
from trimaran.app import ask_hf_facts, main, read_plan_request, trainer_plan
from trimaran.core import Mesh, ModelSection, Plan, Recipe, UserError
from trimaran.launch import resized
from trimaran.machine import parse_cluster
from trimaran.models import (
    HfFacts,
    cached_facts,
    facts_file,
    facts_from_dict,
    missing_package,
    outline_for,
    spec_of,
    write_facts,
)
from trimaran.planner import PlanAnswer, check_plan, choose, predicted

REFUSED = UserError("M026", "it has no plan", where="plan.mesh.tp", fix="use dp_shard")
FACTS = HfFacts(tp_sizes={"num_attention_heads": 4, "width": 48}, num_experts=4, max_seq_len=64)


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSection:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    LlamaConfig(**SMALL).save_pretrained(tmp_path / "llama")
    return ModelSection(family="hf", path=str(tmp_path / "llama"))


def plan_of(**fields: Any) -> Plan:
    return Plan.model_validate({"mesh": {"dp_replicate": 8}, "precision": "bf16"} | fields)


def check(plan: Plan, facts: HfFacts, seq_len: int = 32) -> None:
    section = {"family": "hf", "path": "x"}
    tree = {"model": section, "data": {"seq_len": seq_len}, "train": {"global_batch": plan.global_batch}}
    check_plan(plan, Recipe.model_validate(tree), None, parse_cluster("8xH100"), None, facts)


def test_facts_are_the_same_after_a_file() -> None:
    untrainable = UserError("M024", "what", where="model.path", fix="fix")
    facts = HfFacts(untrainable=untrainable, without_tp=REFUSED, tp_sizes={"a": 4}, max_seq_len=3, has_fp8_layers=True)
    again = facts_from_dict(json.loads(json.dumps(facts.as_dict())))
    assert again.as_dict() == facts.as_dict()
    assert str(again.without_tp) == str(REFUSED)


def test_the_planner_refuses_what_the_facts_refuse() -> None:
    two = Mesh(dp_replicate=4, tp=2)
    check(plan_of(mesh=two), FACTS)
    with pytest.raises(UserError, match="it has no plan"):
        check(plan_of(mesh=two), HfFacts(without_tp=REFUSED))
    with pytest.raises(UserError, match=r"M027.*does not divide num_attention_heads \(4\)"):
        check(plan_of(mesh=Mesh(tp=8)), FACTS)
    with pytest.raises(UserError, match="it has no plan"):
        check(plan_of(mesh=Mesh(dp_replicate=4, cp=2)), HfFacts(without_cp=REFUSED))
    with pytest.raises(UserError, match="P005"):
        check(plan_of(), FACTS, seq_len=65)
    with pytest.raises(UserError, match="P034"):
        check(plan_of(precision="fp8"), FACTS)
    with pytest.raises(UserError, match="it has no plan"):
        check(plan_of(), HfFacts(untrainable=REFUSED))


def test_a_plan_with_an_axis_that_the_model_does_not_support_is_not_chosen(llama: ModelSection) -> None:
    tree = {"model": llama, "data": {"seq_len": 64}, "train": {"global_batch": 4}, "cluster": "8xH100"}
    recipe, cluster = Recipe.model_validate(tree), parse_cluster("8xH100")
    spec, outline = spec_of(recipe.model), outline_for(recipe.model, recipe.data)
    with pytest.raises(UserError, match="P006"):  # 4 sequences for 8 ranks need tp or cp
        choose(recipe, spec, cluster, outline, HfFacts(without_tp=REFUSED, without_cp=REFUSED))
    plan = choose(recipe, spec, cluster, outline, HfFacts(without_cp=REFUSED))
    assert plan.mesh.tp == 2


def test_the_file_depends_on_the_config_and_the_versions(
    llama: ModelSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = facts_file(llama, os.environ)
    assert first == facts_file(llama, os.environ)
    assert first is not None
    config = Path(str(llama.path)) / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 96', '"vocab_size": 97'))
    second = facts_file(llama, os.environ)
    assert second != first
    other = tmp_path / "site" / "torch-0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Name: torch\nVersion: 0.0\n")
    monkeypatch.syspath_prepend(other.parent)
    assert facts_file(llama, os.environ) not in (first, second)


def test_a_damaged_file_is_as_good_as_none(llama: ModelSection) -> None:
    path = facts_file(llama, os.environ)
    assert path is not None
    write_facts(path, FACTS)
    assert cached_facts(llama, os.environ) == FACTS
    for text in ("", "[]", "{}", '{"untrainable": 3}'):
        path.write_text(text)
        assert cached_facts(llama, os.environ) is None


def test_a_kept_mistake_names_the_folder_of_this_model(llama: ModelSection) -> None:
    path = facts_file(llama, os.environ)
    assert path is not None
    write_facts(path, HfFacts(untrainable=UserError("M024", "what", where="/elsewhere", fix="fix")))
    found = cached_facts(llama, os.environ)
    assert found is not None
    assert found.untrainable is not None
    assert found.untrainable.where == llama.path


def test_the_first_package_that_is_not_installed_is_named() -> None:
    assert missing_package() == ""
    assert missing_package(("torch", "no-such-package", "nor-this")) == "no-such-package"


def test_plan_says_that_train_refuses_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path / "bert")
    assert main(["plan", str(tmp_path / "bert"), "--cluster", "H100", "--seq-len", "32", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "refuses this with any plan: M091: BertForMaskedLM is a masked language model" in answer["warnings"][-1]


def test_our_own_models_have_no_facts() -> None:
    assert ask_hf_facts(ModelSection(preset="tiny"), {}) == (None, "")


def test_an_elastic_run_keeps_the_axes_that_work(llama: ModelSection) -> None:
    tree = {"model": llama, "data": {"seq_len": 64}, "train": {"global_batch": 2}, "cluster": "4xH100"}
    recipe = Recipe.model_validate(tree)  # 2 sequences for 4 ranks need tp or cp
    larger = resized(Plan(mesh=Mesh(tp=2)), recipe, 4)
    assert larger is not None
    assert (larger.mesh.dp, larger.mesh.tp, larger.mesh.cp) == (2, 2, 1)
    assert resized(Plan(mesh=Mesh(dp_replicate=2)), recipe, 4) is None, "whether tp or cp works is not known"
    path = facts_file(llama, os.environ)
    assert path is not None
    write_facts(path, HfFacts(without_cp=REFUSED))
    larger = resized(Plan(mesh=Mesh(dp_replicate=2)), recipe, 4)
    assert larger is not None
    assert (larger.mesh.dp, larger.mesh.tp) == (2, 2)


@pytest.fixture
def mixtral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of Mixtral-8x22B. Its fused experts have a style of tensor parallelism that training does not have."""
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    large = {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48,
             "vocab_size": 32000, "num_key_value_heads": 8, "max_position_embeddings": 65536}  # fmt: skip
    MixtralConfig(**large, num_local_experts=8).save_pretrained("mixtral")
    return tmp_path / "mixtral"


def test_beside_a_plan_that_training_refuses_is_the_one_that_it_runs(mixtral: Path) -> None:
    asked = read_plan_request("./mixtral", {"cluster": "8x8xH100"}, []).question
    best = predicted(Plan(mesh=Mesh(dp_shard=32, tp=2), sharding="parameters", micro_batch=8, precision="bf16"), asked)
    answer = PlanAnswer(question=replace(asked, facts=HfFacts(without_tp=REFUSED)), ranked=(best,))
    found = trainer_plan(best, answer, ["--set", "x=1"])
    assert found is not None
    assert found.plan.mesh.tp == found.plan.mesh.cp == 1
    assert found.refusal is REFUSED
    assert found.command.startswith("torchrun --nnodes=8")
    assert found.command.endswith("train --set x=1")
    assert f"does not run the plan above (M026: {REFUSED.what})" in str(found)
    assert found.as_dict()["refusal"] == REFUSED.as_dict()
    assert trainer_plan(found.plan, answer, []) is None, "training runs its own plan"
    unknown = PlanAnswer(question=asked, ranked=(best,))
    assert trainer_plan(best, unknown, []) is None


@pytest.mark.slow
def test_plan_prints_only_a_train_command_that_train_accepts(mixtral: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "./mixtral", "--cluster", "8x8xH100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trainer"]["refusal"]["code"] == "M026"
    assert "--emit" in answer["next"]
    words = shlex.split(answer["trainer"]["next"])
    command = [*words[words.index("train") :], "--set", "data.tokenizer=bytes", "--dry-run", "--json"]
    assert main(command) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["plan"] == answer["trainer"]["plan"]
    assert planned["build"]["ranks"] == [0]
    assert main([*command, "--set", "plan.mesh.tp=2"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "M026"


@pytest.mark.slow
def test_the_facts_of_mixtral_come_from_a_process_of_their_own(mixtral: Path) -> None:
    facts, unknown = ask_hf_facts(ModelSection(family="hf", path=str(mixtral)), os.environ)
    assert not unknown
    assert facts is not None
    assert (facts.without_tp, facts.without_cp, facts.without_pp, facts.without_ep) == (None,) * 4
    assert facts.num_layers > 1
    assert facts.max_seq_len == 65536
    assert facts.has_fp8_layers


def test_the_planner_refuses_documents_that_the_model_mixes() -> None:
    cluster, mixing = parse_cluster("8xH100"), UserError("M058", "it mixes them", where="data", fix="pad")
    tree = {"model": {"family": "hf", "path": "x"}, "train": {"global_batch": 8}}
    for facts, data, is_refused in (
        (HfFacts(without_documents=mixing), {"seq_len": 32}, False),
        (HfFacts(without_documents=mixing), {"seq_len": 32, "isolate_documents": True}, True),
        (HfFacts(without_documents=mixing), {"seq_len": 32, "source": "chat", "path": "x.jsonl"}, True),
        (HfFacts(without_documents=mixing, longest_packed_row=32), {"seq_len": 32, "isolate_documents": True}, False),
        (HfFacts(without_documents=mixing, longest_packed_row=16), {"seq_len": 32, "isolate_documents": True}, True),
    ):
        recipe = Recipe.model_validate(tree | {"data": data})
        with pytest.raises(UserError, match="M058") if is_refused else nullcontext():
            check_plan(plan_of(), recipe, None, cluster, None, facts)
