"""Serving over gloo ranks: every split answers token by token as one process and as transformers does."""

import os
import signal
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import hf_models, vlm_models
from tests.ranks import free_port, run_ranks
from tests.serving_models import DENSE, PROMPTS, SHAPE, SPECS, TOKENS, random_network, save_spec
from tests.serving_ranks import (
    PAGE_SIZE,
    answers,
    on_ranks,
    outputs_of,
    place_of,
    reload_and_answer,
    requests_for,
    served,
)
from tests.unit.test_checkpoint_export import save
from tests.unit.test_infer_engine_images import request_with_images
from trimaran.checkpoint import step_path
from trimaran.core import ModelSection, UserError
from trimaran.nets import Network, PagedCache, local_part
from trimaran.serve import (
    RANK_LOST_EXIT,
    BatchingEngine,
    EngineSettings,
    ModelRunner,
    RankedRunner,
    Runner,
    ServedModel,
    bytes_of_page,
    compute_in_bf16,
    join_ranks,
    open_part,
    open_ranked_runner,
    serve_rank,
    traits_of,
)
from trimaran.train import Sampling, load_trained

ORDERS: list[list[int | None]] = [[None, 0, None], [None] * 3, [None, 0, None, 1, None]]  # images by number, and texts


def alone(model: ServedModel) -> ModelRunner:
    """Return the runner of one process."""
    network = load_trained(model.section, model.folder, torch.device("cpu"))
    assert isinstance(model.num_pages, int)
    assert not network.paged_difference(torch.device("cpu"))
    cache = PagedCache(model.num_pages, model.page_size)
    if model.dtype == torch.bfloat16:
        compute_in_bf16(network.module)
    return ModelRunner(network, torch.device("cpu"), model.dtype, cache, traits_of(network))


def by_transformers(folder: Path, prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS) -> dict[str, list[int]]:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        found[str(number)] = out[0, len(prompt) :].tolist()
    return found


SPLITS = [("tied-odd-vocabulary", 2, 2), ("latent", 2, 2)]


@pytest.mark.parametrize(("name", "tp", "pp"), SPLITS)
def test_every_split_answers_as_one_process_and_as_transformers(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    """16 pages of 4 are too few for all requests, so some are preempted; two share a prefix."""
    model = served(save_spec(SPECS[name], tmp_path / "model"))
    requests = requests_for(PROMPTS, TOKENS)
    found, stats = run_ranks(tp * pp, on_ranks, model, tp, pp, answers, requests)[0]
    expected, same_stats = answers(alone(model), requests)
    assert found == expected == by_transformers(model.folder)
    assert stats == same_stats
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(("name", "tp", "pp"), [("qkv-bias", 2, 1), ("qk-norm", 1, 2), ("experts", 2, 1)])
def test_other_networks_answer_alike(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    model = served(save_spec(SPECS[name], tmp_path / "model"), num_pages=64)
    requests = requests_for(PROMPTS[:3], TOKENS)
    found, _ = run_ranks(tp * pp, on_ranks, model, tp, pp, answers, requests)[0]
    assert found == answers(alone(model), requests)[0]


@pytest.mark.parametrize("name", ["llama-tied"])
def test_a_transformers_model_is_split_by_its_own_plan(name: str, tmp_path: Path) -> None:
    model = served(hf_models.save_model(name, tmp_path), "hf", num_pages=64)
    prompts = [[each % 96 for each in prompt] for prompt in PROMPTS]
    found, _ = run_ranks(2, on_ranks, model, 2, 1, answers, requests_for(prompts, TOKENS))[0]
    assert found == by_transformers(model.folder, prompts)


def sampled_and_embedded(runner: Runner, prompts: list[list[int]]) -> Any:
    drawn, _ = answers(runner, requests_for(prompts, TOKENS, sampling=Sampling(temperature=1.0, seed=3), logprobs=2))
    engine = BatchingEngine(runner, EngineSettings(max_running=4, max_step_tokens=16))
    (request,) = requests_for(prompts[:1], 1, embed=True)
    engine.add(request)
    (output,) = outputs_of(engine)
    return drawn, output.embedding


def test_draws_and_embeddings_do_not_depend_on_the_split(tmp_path: Path) -> None:
    model = served(save_spec(SPECS["tied-odd-vocabulary"], tmp_path / "model"), num_pages=64)
    drawn, embedding = run_ranks(2, on_ranks, model, 2, 1, sampled_and_embedded, PROMPTS)[0]
    expected, whole = sampled_and_embedded(alone(model), PROMPTS)
    assert drawn == expected
    assert embedding == pytest.approx(whole, abs=1e-5)


def test_ranks_load_the_checkpoints_of_a_run_between_two_steps(tmp_path: Path) -> None:
    """As `--follow` does. A checkpoint that is gone changes nothing."""
    first, last = (save_spec(DENSE, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    folder = tmp_path / "checkpoints"
    state = {f"model/{name}": each.detach() for name, each in random_network(DENSE, 2).module.named_parameters()}
    save(folder, state, step=7)
    section = ModelSection(preset="tiny", shape=SHAPE)
    model = served(first, section=section)
    requests = requests_for(PROMPTS[:2], 5)
    places = [(step_path(folder, 7), 7), (step_path(folder, 8), 8)]
    found = run_ranks(4, on_ranks, model, 2, 2, reload_and_answer, places, requests)[0]
    expected = [answers(alone(served(each)), requests)[0] for each in (first, last)]
    assert expected[0] != expected[1]
    assert [found[0], found[1], found[3]] == [*expected, expected[1]]
    assert isinstance(found[2], str)  # the code of the refusal


def part_of(model: ServedModel, tp: int, pp: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of this rank's own tensors."""
    ranks, watch = join_ranks(place_of(tp, pp))
    network, _ = open_part(model, ranks)
    shapes = {name: tuple(local_part(each).shape) for name, each in network.module.named_parameters()}
    watch.close()
    return shapes


def test_a_rank_holds_only_its_own_slices(tmp_path: Path) -> None:
    model = served(save_spec(replace(DENSE, tied=False), tmp_path / "model"))
    parts = run_ranks(4, part_of, model, 2, 2)
    for rank, shapes in enumerate(parts):
        assert ("embed_tokens.weight" in shapes) == (rank < 2)
        assert ("lm_head.weight" in shapes) == (rank >= 2)
        layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
        assert layers == ({"0", "1"} if rank < 2 else {"2"})
        number = min(layers)
        assert shapes[f"layers.{number}.self_attn.q_proj.weight"] == (16, 32)
        assert shapes[f"layers.{number}.self_attn.k_proj.weight"] == (8, 32)
        assert shapes[f"layers.{number}.mlp.down_proj.weight"] == (32, 24)
    assert [parts[0]["embed_tokens.weight"], parts[1]["embed_tokens.weight"]] == [(49, 32), (48, 32)]  # of 97


def pages_of(runner: RankedRunner) -> int:
    return runner.num_pages


def own_pages(network: Network, device: torch.device) -> int:
    """Return how many pages a rank has room for: here another number on each. It computes a step, with all ranks."""
    assert bytes_of_page(network, device, torch.float32, PAGE_SIZE) > 0
    return 30 + torch.distributed.get_rank()


def test_all_ranks_have_as_many_pages_as_the_one_with_the_fewest(tmp_path: Path) -> None:
    model = served(save_spec(DENSE, tmp_path / "model"), num_pages=own_pages)
    assert run_ranks(2, on_ranks, model, 1, 2, pages_of)[0] == 30


def test_a_model_in_bf16_is_split_by_layers(tmp_path: Path) -> None:
    """Sums over ranks are rounded in another order, so only stages answer alike in bf16."""
    model = served(save_spec(DENSE, tmp_path / "model"), dtype=torch.bfloat16, num_pages=64)
    requests = requests_for(PROMPTS[:3], 5)
    found, _ = run_ranks(2, on_ranks, model, 1, 2, answers, requests)[0]
    assert found == answers(alone(model), requests)[0]


def test_a_model_with_images_is_split_by_heads(tmp_path: Path) -> None:
    spec = vlm_models.SPECS["native"]
    model = served(save_spec(spec, tmp_path / "model"), "vlm", num_pages=64)
    requests = [request_with_images(spec, str(number), order, 6) for number, order in enumerate(ORDERS)]
    settings = EngineSettings(max_running=4, max_step_tokens=64)
    found, _ = run_ranks(2, on_ranks, model, 2, 1, answers, requests, settings)[0]
    assert found == answers(alone(model), requests, settings)[0]


def fail_on_one(model: ServedModel, tp: int, pp: int) -> str:
    """Let only rank 1 fail to read its weights."""
    if place_of(tp, pp).rank:
        model = replace(
            model, folder=model.folder / "missing", section=ModelSection(preset="tiny", shape=SHAPE), step=3
        )
    return refused(model, tp, pp)


def test_all_ranks_end_if_one_cannot_load(tmp_path: Path) -> None:
    model = served(save_spec(DENSE, tmp_path / "model"))
    codes = run_ranks(2, fail_on_one, model, 2, 1)
    assert codes[0] == "S053"
    assert codes[1] not in ("", "S053")


def refused(model: ServedModel, tp: int, pp: int) -> str:
    try:
        on_ranks(model, tp, pp, lambda runner: None)
    except UserError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    ("family", "name", "tp", "pp", "code"),
    [("decoder", "", 3, 1, "S050"), ("decoder", "", 1, 4, "S050"), ("hf", "llama", 1, 2, "S051"),
     ("hf", "gpt2", 2, 1, "M026")],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_on_every_rank(
    family: str, name: str, tp: int, pp: int, code: str, tmp_path: Path
) -> None:
    folder = save_spec(DENSE, tmp_path) if family == "decoder" else hf_models.save_model(name, tmp_path)
    assert run_ranks(tp * pp, refused, served(folder, family), tp, pp) == [code] * (tp * pp)


def serve_and_wait(environment: dict[str, str], model: ServedModel, tp: int, pp: int, ready: Any, busy: bool) -> None:
    """Serve as one rank. Rank 0 says when the first steps are done; then it goes on with more, or waits."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    place = place_of(tp, pp)
    if place.rank:
        os._exit(serve_rank(place, model))
    runner = open_ranked_runner(place, model)
    answers(runner, requests_for(PROMPTS[:1], 2))
    ready.set()
    while True:
        if busy:
            answers(runner, requests_for(PROMPTS, TOKENS))
        else:
            time.sleep(0.05)


@pytest.mark.parametrize(("tp", "pp", "killed", "busy"), [(2, 2, 3, True), (2, 1, 0, False)])
def test_a_killed_rank_ends_all_others(tp: int, pp: int, killed: int, busy: bool, tmp_path: Path) -> None:
    model = served(save_spec(DENSE, tmp_path / "model"))
    context = get_context("fork")
    ready, port = context.Event(), free_port()
    processes = []
    for rank in range(tp * pp):
        environment = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        processes.append(context.Process(target=serve_and_wait, args=(environment, model, tp, pp, ready, busy)))
        processes[-1].start()
    try:
        assert ready.wait(120)
        processes[killed].kill()
        for process in processes:
            process.join(60)  # a collective would wait for ten minutes
        codes = [process.exitcode for process in processes]
        assert codes[killed] == -signal.SIGKILL
        others = {code for rank, code in enumerate(codes) if rank != killed}
        assert others <= {RANK_LOST_EXIT, 1}
    finally:
        for process in processes:
            process.kill()
            process.join()
