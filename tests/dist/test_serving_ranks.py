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
from tests.ranks import _free_port, run_ranks
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
from trimaran.checkpoint.export_hf import write_hf_folder
from trimaran.core import UserError
from trimaran.infer.engine.batching_engine import BatchingEngine
from trimaran.infer.engine.model_runner import ModelRunner
from trimaran.infer.engine.open_runner import traits_of
from trimaran.infer.engine.scheduler import EngineSettings
from trimaran.infer.generate import load_trained
from trimaran.infer.ranks.peer_watch import RANK_LOST_EXIT
from trimaran.infer.ranks.serving_rank import RankedRunner, ServedModel, open_ranked_runner, serve_rank
from trimaran.infer.sampling import Sampling
from trimaran.models import PRESETS
from trimaran.nets import initialise, network_of
from trimaran.nets.paged_cache import PagedCache

DENSE = replace(PRESETS["tiny"], layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=97, max_seq_len=64)
SPECS = {
    "tied-odd-vocabulary": DENSE,
    "qkv-bias": replace(DENSE, tied=False, block=PRESETS["qwen2.5-7b"].block),
    "qk-norm": replace(DENSE, tied=False, block=PRESETS["qwen3-8b"].block),
    "experts": replace(PRESETS["tiny-moe"], layers=2, hidden=32, head_dim=8, vocab=97, max_seq_len=64),
}
# The first two share a prefix of two pages. Longer prompts than a step of 16 tokens are computed in parts.
PREFIX = [(7 * number + 3) % 97 for number in range(2 * PAGE_SIZE)]
PROMPTS = [
    [*PREFIX, 5, 11, 17],
    [*PREFIX, 60],
    [1, 2, 3],
    [(5 * number + 1) % 97 for number in range(21)],
    [42],
]
TOKENS = 9


def save_spec(spec: Any, folder: Path) -> Path:
    """Save our network of this shape with random weights as a Hugging Face folder."""
    network = network_of(spec)
    torch.manual_seed(1)
    initialise(network.module, seed=5, spec=spec)
    vlm_models.perturb(network.module)
    write_hf_folder(folder, network.disk_config(), network.disk_tensors(), origin=None, add_files=lambda _: None)
    return folder


def alone(model: ServedModel) -> ModelRunner:
    """Return the runner of one process."""
    network = load_trained(model.section, model.folder, torch.device("cpu"))
    assert isinstance(model.num_pages, int)
    assert not network.paged_difference(torch.device("cpu"))
    cache = PagedCache(model.num_pages, model.page_size)
    return ModelRunner(network, torch.device("cpu"), torch.float32, cache, traits_of(network))


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


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_every_split_answers_as_one_process_and_as_transformers(tp: int, pp: int, tmp_path: Path) -> None:
    """16 pages of 4 are too few for all requests, so some are preempted; two share a prefix."""
    model = served(save_spec(SPECS["tied-odd-vocabulary"], tmp_path / "model"))
    requests = requests_for(PROMPTS, TOKENS)
    found, stats = run_ranks(tp * pp, on_ranks, model, tp, pp, answers, requests)[0]
    expected, same_stats = answers(alone(model), requests)
    assert found == expected == by_transformers(model.folder)
    assert stats == same_stats
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(("name", "tp", "pp"), [("qkv-bias", 2, 1), ("qk-norm", 1, 2), ("experts", 2, 2)])
def test_other_networks_answer_alike(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    model = served(save_spec(SPECS[name], tmp_path / "model"), num_pages=64)
    requests = requests_for(PROMPTS[:3], TOKENS)
    found, _ = run_ranks(tp * pp, on_ranks, model, tp, pp, answers, requests)[0]
    assert found == answers(alone(model), requests)[0]


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_transformers_model_is_split_by_its_own_plan(name: str, tmp_path: Path) -> None:
    model = served(hf_models.save_model(name, tmp_path), "hf", num_pages=64)
    prompts = [[each % 96 for each in prompt] for prompt in PROMPTS]
    found, _ = run_ranks(2, on_ranks, model, 2, 1, answers, requests_for(prompts, TOKENS))[0]
    assert found == by_transformers(model.folder, prompts)


def sampled_and_embedded(runner: RankedRunner, prompts: list[list[int]]) -> Any:
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


def test_ranks_load_other_weights_between_two_steps(tmp_path: Path) -> None:
    first = save_spec(DENSE, tmp_path / "first")
    other = replace(DENSE, block=replace(DENSE.block, norm_eps=1e-6))
    torch.manual_seed(2)
    network = network_of(other)
    initialise(network.module, seed=6, spec=other)
    vlm_models.perturb(network.module)
    second = tmp_path / "second"
    write_hf_folder(second, network.disk_config(), network.disk_tensors(), origin=None, add_files=lambda _: None)
    requests = requests_for(PROMPTS[:2], 5)
    found = run_ranks(2, on_ranks, served(first), 2, 1, reload_and_answer, second, requests)[0]
    assert found == [answers(alone(served(folder)), requests)[0] for folder in (first, second)]
    assert found[0] != found[1]


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


@pytest.mark.parametrize(("tp", "pp", "killed", "busy"), [(2, 2, 3, True), (1, 2, 1, False), (2, 1, 0, False)])
def test_a_killed_rank_ends_all_others(tp: int, pp: int, killed: int, busy: bool, tmp_path: Path) -> None:
    model = served(save_spec(DENSE, tmp_path / "model"))
    context = get_context("fork")
    ready, port = context.Event(), _free_port()
    processes = []
    for rank in range(tp * pp):
        environment = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        processes.append(context.Process(target=serve_and_wait, args=(environment, model, tp, pp, ready, busy)))
        processes[-1].start()
    try:
        assert ready.wait(120)
        os.kill(processes[killed].pid, signal.SIGKILL)
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
