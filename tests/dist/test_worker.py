"""The worker: its exit codes, events and files, after success and after failures."""

import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.cases import slow
from tests.disks import mounted
from tests.environment import CACHE
from tests.parity import assert_same_trajectory, plan_for, train_run, train_trajectory, trajectory_of
from tests.ranks import run_ranks
from trimaran.checkpoint import DurableDisk
from trimaran.core import Bytes, Plan, Recipe, UserError
from trimaran.data import Sequences, TokenSample, position
from trimaran.nets import initialise
from trimaran.runs import HeartbeatBoard, RunDirectory, Section, create_run, refuse_full_disk
from trimaran.train import HoldoutEvaluator, SupervisorLink, rank_networks, read_rank_info, run_worker

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}


def recipe_with(**sections: dict[str, Any]) -> Recipe:
    tree: dict[str, dict[str, Any]] = {
        "model": {"preset": "tiny", "shape": SHAPE},
        "data": {"seq_len": 16},
        "train": {"steps": 4, "global_batch": 8, "sample": {"tokens": 0}},
    }
    for name, fields in sections.items():
        tree[name] |= fields
    return Recipe.model_validate(tree)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def events(run: RunDirectory, rank: int = 0) -> list[dict]:
    return [json.loads(line) for line in run.events(rank).read_text().splitlines()]


def run_rank(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def test_a_deterministic_run_is_bitwise_repeatable(folder: Path) -> None:
    recipe = recipe_with(train={"deterministic": True})
    plan = plan_for(recipe, grad_accum=2, dp_replicate=2)
    first, second = (train_trajectory(recipe, plan, folder) for _ in range(2))
    assert first.losses == second.losses
    assert first.norms == second.norms
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_loader_processes_do_not_change_the_trajectory(folder: Path) -> None:
    threads = recipe_with()
    processes = recipe_with(data={"workers": 2})
    plan = plan_for(threads, grad_accum=2)
    assert_same_trajectory(
        train_trajectory(processes, plan, folder), train_trajectory(threads, plan, folder), tolerance=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"dp_replicate": 2}, {"dp_shard": 2}])
def test_bf16_matches_fp32_within_its_precision(folder: Path, degrees: dict[str, int]) -> None:
    recipe = recipe_with(model={"shape": SHAPE | {"layers": 1}}, train={"global_batch": 4})
    fp32 = train_trajectory(recipe, plan_for(recipe, grad_accum=1), folder)
    plan = plan_for(recipe, grad_accum=1, **degrees).model_copy(update={"precision": "bf16"})
    trajectory = train_trajectory(recipe, plan, folder)
    assert trajectory.losses == pytest.approx(fp32.losses, rel=5e-3)
    assert trajectory.losses != fp32.losses


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 2},
        slow({"dp_shard": 2, "sharding": "optimizer"}),
        slow({"dp_shard": 2, "pp": 2}),
        slow({"pp": 2, "pipeline": {"schedule": "zero-bubble", "stages": (1, 1, 1, 1)}}),
        slow({"cp": 2, "sharding": "parameters", "offload": "parameters"}),
    ],
    ids=str,
)
def test_evaluation_and_samples_do_not_change_the_trajectory(folder: Path, fields: dict[str, object]) -> None:
    shape: dict[str, Any] = {"model": {"shape": SHAPE | {"layers": 4 if "pp" in fields else 2}}}
    plain = recipe_with(**shape)
    evaluated = recipe_with(train={"evaluate": {"every": 2, "batches": 2}, "sample": {"tokens": 5}}, **shape)
    plan = plan_for(plain, grad_accum=2, **fields)
    assert_same_trajectory(
        train_trajectory(evaluated, plan, folder), train_trajectory(plain, plan, folder), tolerance=0
    )


@pytest.mark.parametrize(("precision", "prompt"), [slow(("fp32", "def f")), ("bf16", "")])
@pytest.mark.parametrize("degrees", [slow({"dp_replicate": 2}), {"dp_shard": 2}])
def test_all_ranks_generate_the_sample_together(
    folder: Path, degrees: dict[str, int], precision: str, prompt: str
) -> None:
    recipe = recipe_with(train={"steps": 2, "global_batch": 2, "sample": {"prompt": prompt, "tokens": 4}})
    plan = plan_for(recipe, grad_accum=1, **degrees).model_copy(update={"precision": precision})
    (sample,) = [each["data"] for each in events(train_run(recipe, plan, folder)) if each["kind"] == "sample"]
    assert sample["text"].startswith(prompt)


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, slow({"dp_replicate": 2}), slow({"tp": 2})], ids=str)
def test_the_sample_is_the_same_with_a_cache_and_under_plans_without_one(folder: Path, degrees: dict[str, int]) -> None:
    """One process and FSDP use the key-value cache; with tp the whole sequence runs for each token."""
    recipe = recipe_with(train={"steps": 2, "sample": {"prompt": "def f", "tokens": 12, "temperature": 0.0}})
    texts = []
    for each in ({}, degrees):
        run = train_run(recipe, plan_for(recipe, grad_accum=1, **each), folder)
        (sample,) = [event["data"] for event in events(run) if event["kind"] == "sample"]
        texts.append(sample["text"])
    assert texts[0] == texts[1]


def test_the_default_prompt_is_the_beginning_of_a_held_out_text(folder: Path) -> None:
    words = [f"w{number:03d}" for number in range(500)]
    (folder / "corpus.txt").write_text("\n".join(" ".join(words[start : start + 50]) for start in range(450)))
    data = {"source": "text", "path": str(folder / "corpus.txt"), "holdout": 0.2}
    recipe = recipe_with(data=data, train={"steps": 1, "sample": {"tokens": 2}})
    run = train_run(recipe, plan_for(recipe, grad_accum=1, dp_replicate=2), folder)
    (sample,) = [event["data"] for event in events(run) if event["kind"] == "sample"]
    assert sample["text"].startswith(sample["prompt"])
    assert len(sample["prompt"].split()) >= 2
    assert set(sample["prompt"].split()) <= set(words)


def test_a_model_with_few_positions_generates_with_a_sliding_window_and_refuses_longer_sequences(folder: Path) -> None:
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder.parent / "gpt2")
    model: dict[str, Any] = {"family": "hf", "preset": None, "shape": {}, "path": str(folder.parent / "gpt2")}
    recipe = recipe_with(model=model, train={"steps": 1, "sample": {"prompt": "x", "tokens": 40}})
    run = train_run(recipe, plan_for(recipe, grad_accum=1), folder)
    assert "sample" in [each["kind"] for each in events(run)]
    recipe = recipe_with(model=model, data={"seq_len": 64})
    run = create_run(folder / "long", recipe, Plan(micro_batch=8))
    assert run_ranks(1, run_rank, run.path, CACHE) == [2]
    assert events(run)[-1]["data"]["code"] == "P005"


def test_the_held_out_loss_does_not_depend_on_the_plan(folder: Path) -> None:
    recipe = recipe_with(train={"evaluate": {"every": 3, "batches": 2}})
    found = []
    for degrees in ({}, {"dp_shard": 2}):
        run = train_run(recipe, plan_for(recipe, grad_accum=2, **degrees), folder)
        found.append([each["data"]["loss"] for each in events(run) if each["kind"] == "evaluation"])
    assert len(found[0]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_user_error_found_by_a_rank_is_an_event_with_a_fix(folder: Path) -> None:
    recipe = recipe_with(model={"shape": SHAPE | {"vocab": 100}})
    run = create_run(folder / "small", recipe, plan_for(recipe, grad_accum=1))
    assert run_ranks(1, run_rank, run.path, CACHE) == [2]
    assert events(run)[-1]["kind"] == "error"
    assert events(run)[-1]["data"]["code"] == "T020"
    assert events(run)[-1]["data"]["fix"]


def run_rank_with_deadly_sample(path: Path, cache: Path, deaths: int) -> int:
    """Train with a sample, the first of the third step, that kills the process that loads it `deaths` times."""
    load, marks = Sequences.__getitem__, path / "deaths"
    marks.mkdir()

    def deadly(sequences: Sequences, index: int) -> TokenSample:
        if index == position(0, 16, len(sequences)) and len(list(marks.iterdir())) < deaths:
            (marks / f"{index}-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return load(sequences, index)

    Sequences.__getitem__ = deadly  # pyrefly: ignore[bad-assignment]
    return run_rank(path, cache)


@pytest.mark.parametrize("deaths", [2, 100])
def test_a_dead_loader_process_is_replaced_until_its_sample_is_the_cause(folder: Path, deaths: int) -> None:
    recipe = recipe_with(data={"workers": 2}, train={"evaluate": {"batches": 0}})
    run = create_run(folder / "dead", recipe, plan_for(recipe, grad_accum=1))
    (code,) = run_ranks(1, run_rank_with_deadly_sample, run.path, CACHE, deaths)
    marks = [each.name.partition("-")[0] for each in (run.path / "deaths").iterdir()]
    if deaths == 2:
        assert code == 0
        assert_same_trajectory(
            trajectory_of(run), train_trajectory(recipe_with(), plan_for(recipe, grad_accum=1), folder), tolerance=0
        )
        return
    assert code == 1
    fault = events(run)[-1]["data"]
    assert fault["type"] == "LoaderFault"
    assert "crashed (killed by SIGKILL) at step 3" in fault["message"]
    assert (fault["cause"], [str(each) for each in fault["sample_ids"]]) == ("data", marks[:1])
    assert len(marks) == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        yield disk


def test_weights_that_do_not_fit_on_the_disk_leave_an_error_and_no_temporary_files(
    small_disk: Path, folder: Path
) -> None:
    # 285 kB of weights: a checkpoint, with two moments, fits in 1 MiB, but not together with the saved model.
    shape = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 200}
    recipe = recipe_with(model={"shape": shape}, train={"steps": 1})
    run = create_run(small_disk / "run", recipe, Plan(micro_batch=8))
    assert run_ranks(1, run_rank, run.path, CACHE) == [2]
    assert events(run)[-1]["data"]["code"] == "D006"
    assert not run.model.exists()
    assert not list(run.path.glob(".model*"))


def run_rank_without_checkpoint_space(path: Path, cache: Path) -> int:
    write = DurableDisk.write

    def refusing(disk: DurableDisk, fd: int, data: memoryview) -> None:
        if "step-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        write(disk, fd, data)

    DurableDisk.write = refusing  # pyrefly: ignore[bad-assignment]
    return run_rank(path, cache)


def test_the_model_is_saved_even_if_the_last_checkpoint_cannot_be_written(folder: Path) -> None:
    recipe = recipe_with(train={"steps": 2})
    run = create_run(folder / "run", recipe, Plan(micro_batch=8))
    assert run_ranks(1, run_rank_without_checkpoint_space, run.path, CACHE) == [75]
    assert [each["kind"] for each in events(run)][-3:] == ["checkpoint", "saved", "error"]
    assert (events(run)[-1]["data"]["code"], events(run)[-1]["data"]["cause"]) == ("K043", "storage")
    assert (run.model / "model.safetensors").exists()


def run_rank_with_nan_weight(path: Path, cache: Path) -> int:
    def initialise_with_nan(module: torch.nn.Module, **rest: Any) -> None:
        initialise(module, **rest)
        with torch.no_grad():
            next(module.parameters()).fill_(float("nan"))

    rank_networks.initialise = initialise_with_nan
    return run_rank(path, cache)


def test_a_nan_from_the_start_is_reported_even_if_no_checkpoint_can_be_written(folder: Path) -> None:
    recipe = recipe_with(train={"steps": 20})
    run = create_run(folder / "run", recipe, Plan(micro_batch=8))
    assert run_ranks(1, run_rank_with_nan_weight, run.path, CACHE) == [93]
    error = events(run)[-1]["data"]
    assert error["cause"] == "numeric"
    assert "the last checkpoint could not be written" in error["message"]


def test_a_run_whose_data_has_changed_does_not_resume(folder: Path) -> None:
    file = folder / "data.txt"
    file.write_text("red green blue " * 400)
    recipe = recipe_with(data={"source": "text", "path": str(file)}, train={"steps": 2, "save": False})
    run = create_run(folder / "run", recipe, Plan(micro_batch=8))
    assert run_ranks(1, run_rank, run.path, CACHE) == [0]
    os.utime(file, (1, 1))  # prepared again, to the same tokens
    assert run_ranks(1, run_rank, run.path, CACHE) == [0]
    file.write_text("red green grey " * 400)
    assert run_ranks(1, run_rank, run.path, CACHE) == [2]
    error = events(run)[-1]["data"]
    assert (error["code"], error["what"].partition(":")[0]) == ("K041", "the data has changed")


def test_a_disk_too_small_for_the_weights_is_refused_before_the_start(small_disk: Path) -> None:
    with pytest.raises(UserError) as caught:
        refuse_full_disk(small_disk / "deep" / "run", Bytes(2 << 20))
    assert caught.value.code == "D005"
    refuse_full_disk(small_disk / "deep" / "run", Bytes(1 << 10))


class SectionRecorder:
    """Records every report of a rank to its supervisor: the section and the step."""

    def __init__(self) -> None:
        self.board = HeartbeatBoard.make(1)
        self.board.clear()
        self.reports: list[tuple[str, int]] = []
        enter = self.board.enter

        def record(local_rank: int, section: Section, step: int) -> None:
            self.reports.append((section, step))
            enter(local_rank, section, step)

        self.board.enter = record  # type: ignore[method-assign]


def sections_of_a_run(path: Path, cache: Path) -> tuple[int, list[tuple[str, int]], bool]:
    recorder = SectionRecorder()
    link = SupervisorLink(board=recorder.board, rank_memories=(os.memfd_create("rank-memory"),))
    code = run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache, link=link)
    return code, recorder.reports, recorder.board.read(0).saved


def test_a_rank_reports_the_right_section_and_every_unit_of_progress(folder: Path) -> None:
    train = {"steps": 3, "evaluate": {"every": 2, "batches": 3}, "sample": {"tokens": 7}}
    recipe = recipe_with(train=train)
    run = create_run(folder / "run", recipe, plan_for(recipe, grad_accum=1))
    [(code, reports, saved)] = run_ranks(1, sections_of_a_run, run.path, CACHE)
    assert (code, saved) == (0, True)
    after = reports[max(number for number, (section, _) in enumerate(reports) if section == "step") :]
    last = [section for section, step in after if step == 3]
    assert [name for name, _ in groupby(name for name in last if name not in ("finish", "data", "copy"))] == [
        "save", "export", "evaluation", "sampling", "close"
    ]  # fmt: skip
    assert last.count("sampling") == 7, "one for each token"
    assert last.count("data") == 1 + 3, "the end of the loader, and one for each batch"
    assert last.count("export") > 20, "one for each tensor and file"
    assert "finish" in last[last.index("sampling") :], "a section that ended is left"


def fail_in_the_last_evaluation(path: Path, cache: Path) -> int:
    def run(self: HoldoutEvaluator, *, step: int) -> bool:
        raise ValueError("a planted error")

    HoldoutEvaluator.run = run  # type: ignore[method-assign]
    return run_rank(path, cache)


def test_an_error_after_training_does_not_fail_the_run_and_is_recorded(folder: Path) -> None:
    recipe = recipe_with(train={"steps": 2, "evaluate": {"batches": 2}, "sample": {"tokens": 5}})
    run = create_run(folder / "run", recipe, plan_for(recipe, grad_accum=1))
    assert run_ranks(1, fail_in_the_last_evaluation, run.path, CACHE) == [0]
    kinds = [each["kind"] for each in events(run)]
    assert kinds[kinds.index("trained") :] == ["trained", "unfinished", "unfinished", "done"]
    evaluation, sample = (each["data"] for each in events(run) if each["kind"] == "unfinished")
    assert evaluation == {"what": "evaluation", "why": "ValueError: a planted error"}
    assert sample["what"] == "sample"
    assert (run.model / "model.safetensors").exists()


def test_a_sample_ends_after_its_time_on_all_ranks_and_says_so(folder: Path) -> None:
    recipe = recipe_with(train={"steps": 1, "sample": {"tokens": 60000, "seconds": 0.1}})
    run = train_run(recipe, plan_for(recipe, grad_accum=1, dp_replicate=2), folder)
    (sample,) = [each["data"] for each in events(run) if each["kind"] == "sample"]
    assert re.fullmatch(r"[0-9]+ of 60000 tokens: after 0\.1 s \(train.sample.seconds\)", sample["cut_short"])


@pytest.mark.parametrize(("steps", "section", "tokens"), [(49, {}, 0), (50, {}, 240), (2, {"prompt": "x"}, 240)])
def test_a_sample_is_generated_after_enough_steps_or_on_request(
    steps: int, section: dict[str, Any], tokens: int
) -> None:
    recipe = Recipe.model_validate({"train": {"steps": steps} | ({"sample": section} if section else {})})
    assert recipe.train.sample_tokens == tokens
    assert Recipe.model_validate(recipe.model_dump()).train.sample_tokens == tokens
