"""Checkpoints of a run with an adapter: what is in them, resume under other plans, another base, and what is saved."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import assert_same_trajectory, plan_for, train_trajectory, trajectory_of
from tests.ranks import run_ranks
from trimaran.app import main
from trimaran.checkpoint import DiskSource, read_manifest, step_path, write_hf_folder
from trimaran.core import AdapterSection, ModelSection, Plan, Recipe, UserError
from trimaran.models import spec_of
from trimaran.nets import initialise, local_part, network_of
from trimaran.runs import RunDirectory, create_run, replace_plan, replace_recipe
from trimaran.serve import fill_from_peft, load_adapted
from trimaran.train import TrainingState, Updater, read_rank_info, run_worker

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "tied": False}
STEPS, GLOBAL_BATCH = 4, 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small decoder."""
    spec = spec_of(ModelSection(preset="tiny", shape=SHAPE))
    assert spec is not None
    network, folder = network_of(spec), tmp_path_factory.mktemp("models") / "base"
    initialise(network.module, seed=5, spec=spec)
    write_hf_folder(folder, network.disk_config(), network.disk_tensors(), origin=None, add_files=lambda draft: None)
    return folder


@pytest.fixture(scope="module")
def saved_adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PEFT folder of a run."""
    return start(tmp_path_factory.mktemp("adapter"), recipe_for(base, steps=1), ONE).model


def recipe_for(base: Path, steps: int = STEPS, **adapter: Any) -> Recipe:
    return Recipe.model_validate({
        "model": {"path": str(base), "adapter": {"rank": 4, "alpha": 6.0} | adapter},
        "data": {"seq_len": 32, "tokenizer": "bytes"},
        "train": {"steps": steps, "global_batch": GLOBAL_BATCH, "lr": 1e-2, "sample": {"tokens": 0}},
    })  # fmt: skip


def events(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events(0).read_text().splitlines()]


def work(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def resume(run: RunDirectory, recipe: Recipe, plan: Plan, cache: Path) -> list[int]:
    replace_recipe(run, recipe)
    replace_plan(run, plan)
    return run_ranks(plan.mesh.world_size, work, run.path, cache)


def start(folder: Path, recipe: Recipe, plan: Plan) -> RunDirectory:
    run = create_run(folder / "run", recipe, plan)
    assert run_ranks(plan.mesh.world_size, work, run.path, CACHE) == [0] * plan.mesh.world_size
    return run


ONE = Plan(micro_batch=GLOBAL_BATCH)


def test_checkpoints_hold_the_adapter_and_a_digest_of_the_base(base: Path, tmp_path: Path) -> None:
    run = start(tmp_path, recipe_for(base, steps=2, train=["lm_head"]), ONE)
    path = step_path(run.checkpoints, 2)
    keys = DiskSource(path).index
    weights = {key.removeprefix("model/") for key in keys if key.startswith("model/")}
    assert weights == {"lm_head.weight"} | {
        f"layers.{layer}.{part}.lora_{side}"
        for layer in range(2)
        for part in (
            *(f"self_attn.{each}_proj" for each in "qkvo"),
            *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
        )
        for side in "AB"
    }
    assert {key.split("/")[1] for key in keys if key.startswith("optimizer/")} == {"exp_avg", "exp_avg_sq", "step"}
    assert {key.split("/", 2)[2] for key in keys if key.startswith("optimizer/")} == weights
    saved = read_manifest(path).progress["base"]
    for name, digest in saved["files"].items():
        assert digest == hashlib.sha256((base / name).read_bytes()).hexdigest()
    assert set(saved["files"]) == {"config.json", "model.safetensors"}
    assert json.loads((run.model / "trimaran-base.json").read_text()) == saved


def assert_peft_agrees(run: RunDirectory, recipe: Recipe) -> None:
    """Fail unless PEFT computes with the saved adapter what our network does, and more than the base."""
    tokens = torch.arange(64).view(2, 32)
    network = load_adapted(recipe.model, torch.device("cpu"), fill_from_peft(run.model))
    base = AutoModelForCausalLM.from_pretrained(recipe.model.path)
    with torch.no_grad():
        untrained = base(input_ids=tokens).logits
        theirs = PeftModel.from_pretrained(base, run.model).eval()(input_ids=tokens).logits
        ours, _ = network.forward({"tokens": tokens})
    assert (ours - untrained).abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)


PLANS: list[Any] = [
    ({"dp_replicate": 2}, {"dp_shard": 2}),
    slow(({"dp_replicate": 2}, {"dp_shard": 2, "tp": 2})),
    slow(({"dp_shard": 2, "tp": 2}, {"pp": 2, "grad_accum": 2})),
    slow(({"pp": 2, "grad_accum": 2}, {"dp_replicate": 2, "sharding": "optimizer"})),
    slow(({"dp_shard": 2, "sharding": "gradients"}, {"cp": 2})),
]


@pytest.mark.parametrize(("first", "second"), PLANS)
@pytest.mark.parametrize("kind", ["lora", slow("dora")])
def test_a_run_resumes_under_another_plan(
    base: Path, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], kind: str
) -> None:
    """The trajectory is that of one process, and PEFT computes the same logits with what was saved."""
    recipe = recipe_for(base, kind=kind)
    (tmp_path / "alone").mkdir()
    reference = train_trajectory(recipe, ONE, tmp_path / "alone")
    before, after = (plan_for(recipe, **{"grad_accum": 1} | fields) for fields in (first, second))
    run = start(tmp_path, recipe_for(base, steps=2, kind=kind), before)
    assert resume(run, recipe, after, CACHE) == [0] * after.mesh.world_size
    assert events(run)[-1]["kind"] == "done"
    resumed = [each["step"] for each in events(run) if each["kind"] == "resume"]
    assert resumed == [2]
    assert_same_trajectory(trajectory_of(run), reference)
    assert_peft_agrees(run, recipe)


def test_a_run_does_not_resume_on_another_base(base: Path, tmp_path: Path) -> None:
    """Not even if the file was edited in place and has its old size and time."""
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    run = start(tmp_path, recipe_for(copy, steps=2), ONE)
    file = copy / "model.safetensors"
    original, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    os.utime(file, ns=times)
    assert resume(run, recipe_for(copy), ONE, CACHE) == [2]
    error = events(run)[-1]["data"]
    assert (error["code"], error["where"]) == ("K048", f"model.path ({copy})")
    assert "model.safetensors has other contents (SHA-256" in error["what"]
    file.write_bytes(original)
    assert resume(run, recipe_for(copy), ONE, CACHE) == [0]


@pytest.mark.slow
def test_the_recipe_of_a_checkpoint_must_have_the_same_adapter(base: Path, tmp_path: Path) -> None:
    run = start(tmp_path, recipe_for(base, steps=2), ONE)
    assert resume(run, recipe_for(base, alpha=8.0), ONE, CACHE) == [2]
    error = events(run)[-1]["data"]
    assert (error["code"], "model.adapter.alpha=6.0" in error["what"]) == ("K041", True)


def flip_a_bit_of_the_base(path: Path, cache: Path) -> int:
    """Train; on rank 1 a bit of a frozen weight flips after the third update."""
    rank_info, update, calls = read_rank_info(os.environ), Updater.update, []
    modules: list[torch.nn.Module] = []
    build = TrainingState.__init__

    def build_and_keep(self: TrainingState, found: Any, *args: Any, **rest: Any) -> None:
        modules.extend(found)
        build(self, found, *args, **rest)

    def update_and_flip(self: Updater, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result = update(self, *args)
        calls.append(args)
        if len(calls) == 3 and rank_info.rank == 1:
            frozen = [each for each in modules[0].parameters() if not each.requires_grad and local_part(each).numel()]
            local_part(frozen[-1]).view(-1).view(torch.int32)[-1] ^= 1 << 30
        return result

    TrainingState.__init__ = build_and_keep  # pyrefly: ignore[bad-assignment]
    Updater.update = update_and_flip  # pyrefly: ignore[bad-assignment]
    return run_worker(RunDirectory(path), rank_info, cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"dp_shard": 2}, {"dp_replicate": 2}, {"pp": 2, "grad_accum": 2}])
def test_a_flipped_bit_of_the_base_is_found_and_the_base_read_again(
    base: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    tree = recipe_for(base, steps=7).model_dump(mode="json")
    recipe = Recipe.model_validate(tree | {"faults": {"not_finite": "rewind", "shard_check": 1.0}})
    plan = plan_for(recipe, **{"grad_accum": 1} | fields)
    (tmp_path / "calm").mkdir()
    calm = train_trajectory(recipe, plan, tmp_path / "calm")
    run = create_run(tmp_path / "run", recipe, plan)
    assert run_ranks(2, flip_a_bit_of_the_base, run.path, CACHE) == [0, 0]
    (found,) = (each["data"] for each in events(run) if each["kind"] == "differ")
    assert (found["type"], found["ranks"], found["action"]) == ("MemoryChanged", [1], "rewind")
    assert all("lora" not in key for key in found["keys"])
    saved = load_file(run.model / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], each) for name, each in calm.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"pp": 2, "grad_accum": 2}, {"dp_shard": 2, "tp": 2}])
def test_a_run_continues_from_a_peft_folder(base: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Training goes on from the adapter that another run has saved, and not from the first values."""
    first = start(tmp_path, recipe_for(base, steps=2, train=["norm"]), ONE)
    recipe = recipe_for(base, steps=2, train=["norm"], path=str(first.model))
    (tmp_path / "second").mkdir()
    reference = train_trajectory(recipe, ONE, tmp_path / "second")
    assert reference.losses[0] < json.loads(first.metrics.read_text().splitlines()[0])["loss"]
    plan = plan_for(recipe, **{"grad_accum": 1} | fields)
    assert_same_trajectory(train_trajectory(recipe, plan, tmp_path / "second"), reference)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"rank": 2}, "K052", "rank 4, and the recipe 2"),
        ({"alpha": 3.0}, "K052", "alpha 6, and the recipe 3.0"),
        ({"kind": "dora"}, "K052", "kind lora, and the recipe dora"),
        ({"targets": ["q_proj"]}, "K052", "unexpected: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"),
        ({"train": ["lm_head"]}, "K052", "missing: base_model.model.lm_head.weight"),
        ({"path": "nowhere"}, "K051", "adapter_config.json or adapter_model.safetensors is missing"),
    ],
)
def test_a_peft_folder_must_fit_the_recipe(
    base: Path, saved_adapter: Path, change: dict[str, Any], code: str, words: str
) -> None:
    adapter = AdapterSection.model_validate({"rank": 4, "alpha": 6.0, "path": str(saved_adapter)} | change)
    section = ModelSection(path=str(base), adapter=adapter)
    with pytest.raises(UserError) as caught:
        load_adapted(section, torch.device("cpu"), fill_from_peft(Path(str(adapter.path))))
    assert caught.value.code == code
    assert words in caught.value.what


@pytest.mark.slow
def test_the_commands_work_on_a_run_with_an_adapter(base: Path, tmp_path: Path, capsys: Any) -> None:
    run = start(tmp_path, recipe_for(base, steps=2), ONE)
    name = str(run.path)

    def answer(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    adapter, merged = answer("export", name), answer("export", name, "--merge")
    assert [each["form"] for each in (adapter, merged)] == ["adapter", "merged"]
    assert merged["path"].endswith("exports/step-00000002-merged")
    saved, exported = (load_file(Path(each) / "adapter_model.safetensors") for each in (run.model, adapter["path"]))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[each], exported[each]) for each in saved)
    asked = ("--prompt", "def ", "--max-tokens", "12", "--temperature", "0")
    weights = ([name], [name, "--step", "2"], [adapter["path"]], [merged["path"]])
    texts = {answer("generate", *each, *asked)["text"] for each in weights}
    assert len(texts) == 1
    assert answer("checkpoints", "verify", name)
    assert main(["export", name, "--merge", "--to", "dcp"]) == 2
    assert "A001: --merge is for --to hf" in capsys.readouterr().err
    file = base / "model.safetensors"
    original = file.read_bytes()
    try:
        file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        for command in (("export", name, "--merge", "--out", str(tmp_path / "x")), ("generate", name, *asked)):
            assert main([*command]) == 2
            assert "K048: the base of this adapter" in capsys.readouterr().err
    finally:
        file.write_bytes(original)
