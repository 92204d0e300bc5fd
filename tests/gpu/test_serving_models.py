"""Serving on a GPU: CUDA graphs of other models, steps in flight, and ranks over NCCL."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import vlm_models
from tests.engine_models import answers_of, random_prompts, requests_of, save_model, tokens_of
from tests.environment import environment
from tests.nccl_serving import GROUPS
from tests.unit.test_infer_engine_images import hf_vlm, own_network, request_with_images
from trimaran.core import ModelSection
from trimaran.nets import MoeLayer, Network, PagedCache
from trimaran.serve import (
    BatchingEngine,
    CacheSettings,
    EngineBatch,
    EngineRequest,
    EngineSettings,
    GraphRunner,
    ModelRunner,
    StepLogits,
    compute_in_bf16,
    open_runner,
)
from trimaran.train import Sampling, load_trained

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
SETTINGS = EngineSettings(max_running=8, max_step_tokens=64)
# Log-probabilities of a small network with large weights, between two ways to round the same sums in bf16. On a CPU
# those of the mixture differ from fp32 by at most 0.4, and 0.05 in the median; with other tokens by more than 3.
MAX_BF16_DIFFERENCE, MEDIAN_BF16_DIFFERENCE = 1.0, 0.2
CACHE = CacheSettings(max_bytes=1 << 26, max_tokens=26 * 8, page_size=8)


def greedy_answers(
    network: Network, requests: list[EngineRequest], *, graphs: bool, dtype: torch.dtype = FP32
) -> tuple[dict[str, list[int]], ModelRunner]:
    """Return the tokens of each request, with steps as graphs and in flight, or without both; and the runner."""
    runner = open_runner(network, GPU, dtype, CACHE)
    assert type(runner) is ModelRunner
    assert runner.traits.overlaps
    if graphs:
        runner = GraphRunner(network, GPU, dtype, runner.cache, runner.traits)
    else:
        runner = ModelRunner(network, GPU, dtype, runner.cache, replace(runner.traits, overlaps=False))
    arrivals = [number // 2 for number in range(len(requests))]
    return tokens_of(answers_of(BatchingEngine(runner, SETTINGS), requests, arrivals)), runner


def text_requests(count: int = 9) -> list[EngineRequest]:
    prompts = [each for seed in (1, 2) for each in random_prompts(count, seed)][:count]
    return requests_of(prompts, [7 + number for number in range(count)])


def assert_captured(runner: ModelRunner, caplog: pytest.LogCaptureFixture, *, captured: bool) -> None:
    assert isinstance(runner, GraphRunner)
    assert runner.captures == captured
    told = [each for each in caplog.messages if "without CUDA graphs" in each]
    assert len(told) == (not captured), told


# transformers' keys and values of deepseek-v3 differ in size; a grouped matmul in fp32 copies counts to the host.
@pytest.mark.parametrize(
    ("name", "captured"),
    [("llama", True), ("mistral", True), ("gpt2", True), ("cohere2", True), ("deepseek-v3", False),
     ("mixtral", False), ("gpt-oss", False)],
)  # fmt: skip
def test_graphs_of_transformers_models_answer_as_steps_without_them(
    name: str, captured: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(name, tmp_path)
    network = load_trained(ModelSection(family="hf", path=str(folder)), folder, GPU)
    expected, _ = greedy_answers(network, text_requests(), graphs=False)
    assert len({token for row in expected.values() for token in row}) > 8
    with caplog.at_level(logging.WARNING):
        found, runner = greedy_answers(network, text_requests(), graphs=True)
    assert found == expected
    assert_captured(runner, caplog, captured=captured)


def our_mixture(folder: Path, name: str = "qwen3-moe") -> Network:
    saved = save_model(name, folder)
    network = load_trained(ModelSection(family="decoder", path=str(saved)), saved, GPU)
    with torch.no_grad():  # far from a tie, so that rounding does not choose another expert
        for layer in (each for each in network.module.modules() if isinstance(each, MoeLayer)):
            layer.gate.weight.mul_(8.0)
    return network


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_a_mixture_in_fp32_runs_without_graphs_and_says_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = our_mixture(tmp_path, name)
    expected, _ = greedy_answers(network, text_requests(), graphs=False)
    with caplog.at_level(logging.WARNING):
        found, runner = greedy_answers(network, text_requests(), graphs=True)
    assert found == expected
    assert_captured(runner, caplog, captured=False)


class RecordingRunner(ModelRunner):
    """Runs steps without graphs, and keeps each batch and its log-probabilities."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[tuple[EngineBatch, Tensor]] = []

    def run(self, batch: EngineBatch) -> StepLogits:
        found = super().run(batch)
        self.steps.append((batch, found.logits.log_softmax(-1).clone()))
        return found


def differences(runner: ModelRunner, steps: Sequence[tuple[EngineBatch, Tensor]]) -> list[float]:
    """Return the largest difference of a log-probability after each token, given the same tokens before it."""
    found = [(runner.run(batch).logits.log_softmax(-1) - expected).abs() for batch, expected in steps]
    return [row for each in found if each.numel() for row in each.amax(-1).tolist()]


@pytest.mark.parametrize(("name", "ties"), [("qwen3-moe", 0), ("deepseek-v3", 4)])
def test_graphs_of_a_mixture_in_bf16_compute_every_step_as_without_them(
    name: str, ties: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both compute the same batches, so that no near tie of two tokens leads one of them elsewhere.

    A near tie of two experts may change single rows: on a CPU, 1 or 2 of deepseek-v3's 99, by 1.3 at most.
    """
    network = our_mixture(tmp_path, name)
    compute_in_bf16(network.module)
    opened = open_runner(network, GPU, BF16, CACHE)
    assert isinstance(opened, ModelRunner)
    traits = replace(opened.traits, overlaps=False)
    recording = RecordingRunner(network, GPU, BF16, opened.cache, traits)
    requests = text_requests()
    answers_of(BatchingEngine(recording, SETTINGS), requests, [number // 2 for number in range(len(requests))])
    decodes = [each for each, _ in recording.steps if each.is_decode]
    assert len(decodes) > 8
    assert len({each.num_sequences for each in decodes}) > 3
    own = PagedCache(opened.cache.num_pages, opened.cache.page_size)
    with caplog.at_level(logging.WARNING):
        runner = GraphRunner(network, GPU, BF16, own, traits)
        found = differences(runner, recording.steps)
    assert_captured(runner, caplog, captured=True)
    wrong = [(replace(batch, tokens=(batch.tokens + 1) % 96), logits) for batch, logits in recording.steps]
    others = differences(runner, wrong)
    print(f"log-probabilities differ by at most {max(found):.4f}; with other tokens by {min(others):.4f} or more")
    assert sum(each >= MAX_BF16_DIFFERENCE for each in found) <= ties
    assert median(found) < MEDIAN_BF16_DIFFERENCE
    assert median(others) > 2 * MAX_BF16_DIFFERENCE, "the bounds would hide a wrong step"


@pytest.mark.parametrize("name", ["native", "tiled", "llava", "qwen2-vl", "qwen2.5-vl"])
def test_graphs_of_vision_language_models_answer_as_steps_without_them(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = own_network(name) if name in vlm_models.SPECS else hf_vlm(name, tmp_path)
    network.module.to(GPU)
    orders: list[list[int | None]] = [[None, 0, None], [None] * 3, [None, 0, None, 1, None], [2, None, None]]
    requests = [request_with_images(network.spec, str(number), order, 6 + 3 * number)
                for number, order in enumerate(orders)]  # fmt: skip
    expected, _ = greedy_answers(network, requests, graphs=False)
    with caplog.at_level(logging.WARNING):
        found, runner = greedy_answers(network, requests, graphs=True)
    assert found == expected
    assert_captured(runner, caplog, captured=True)


def test_steps_in_flight_draw_the_same_tokens_by_seed(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path)
    network = load_trained(ModelSection(family="decoder", path=str(folder)), folder, GPU)
    limits = [(0, 1.0), (9, 1.0), (0, 0.8), (20, 0.9), (0, 1.0), (3, 0.5), (0, 1.0)]
    rules = [Sampling(temperature=1.0, top_k=k, top_p=p, seed=seed) for seed, (k, p) in enumerate(limits)]
    rules[-1] = Sampling(temperature=0.0)
    requests = [replace(each, sampling=rule) for each, rule in zip(text_requests(len(rules)), rules, strict=True)]
    expected, _ = greedy_answers(network, requests, graphs=False)
    assert greedy_answers(network, requests, graphs=True)[0] == expected


def ranks_over_nccl(folder: Path, group: str) -> list[dict[str, Any]]:
    """Return what the ranks of each case of a group found; the first of each model has one rank."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.nccl_serving", str(folder), group]
    done = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(GROUPS[group])
    return lines


@pytest.mark.parametrize("group", ["splits", "adapters"])
def test_ranks_over_nccl_answer_as_one_rank(group: str, tmp_path: Path) -> None:
    lines = ranks_over_nccl(tmp_path, group)
    alone = {each["model"]: each["tokens"] for each in lines if each["tp"] == each["pp"] == 1}
    assert all(each["tokens"] == alone[each["model"]] for each in lines)
    if group != "adapters":
        assert all(each["preemptions"] for each in lines)


def test_quantised_ranks_over_nccl_compute_as_one_rank(tmp_path: Path) -> None:
    """The weights are the same numbers, and sums are rounded in another order.

    fp8 also rounds the inputs, with scales of each rank's own part: that may change as much as fp8 itself does.
    """
    lines = ranks_over_nccl(tmp_path, "quantised")
    alone, split = ({each["kind"]: each["likelihoods"] for each in lines if each["tp"] == tp} for tp in (1, 2))
    changes = {kind: mean_difference(alone[kind], alone["bf16"]) for kind in alone}
    found = {kind: mean_difference(split[kind], alone[kind]) for kind in alone}
    print(f"mean difference of log-probabilities, by quantisation: {changes}; by two ranks: {found}")
    assert found["fp8"] < 1.5 * changes["fp8"]
    assert max(found[kind] for kind in ("bf16", "int8", "int4")) < 0.1 < changes["int4"] / 4


def mean_difference(found: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    common = found.keys() & expected.keys()
    assert len(common) >= len(expected) // 2, "only a near tie chooses another first token"
    pairs = [pair for name in common for pair in zip(found[name], expected[name], strict=True)]
    return sum(abs(one - other) for one, other in pairs) / len(pairs)
