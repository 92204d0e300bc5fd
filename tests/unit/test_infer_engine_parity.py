"""The engine generates, token by token, what `transformers.generate` does, for each architecture, alone and batched."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import slow
from tests.engine_models import (
    CPU,
    answers_of,
    new_engine,
    open_network,
    random_prompts,
    requests_of,
    save_model,
    tokens_of,
)
from trimaran.core import UserError
from trimaran.nets import Decoder, Network
from trimaran.serve import (
    BatchingEngine,
    CacheSettings,
    EngineSettings,
    ModelRunner,
    SequenceRunner,
    compute_in_bf16,
    open_runner,
)
from trimaran.train import CachedLogits, Generation, NextTokenModel, Sampling, TokenSampler

NATIVE = {"llama", "qwen2", "qwen3", "qwen3-moe", "mistral", "gemma2", "gemma3", "phi3", "olmo2",
          "cohere", "cohere2", "mixtral", "deepseek-v2", "deepseek-v3", "gpt-oss"}  # fmt: skip
FAST = ["llama", "gemma2", "gpt-oss", "deepseek-v3"]
SLOW = ["mistral", "qwen3-moe", "llama-tied", "qwen2", "qwen3", "gemma3", "gpt2", "gpt-neox", "phi3", "mixtral",
        "olmo2", "cohere", "cohere2", "starcoder2", "deepseek-v2"]  # fmt: skip
ARCHITECTURES = [*FAST, *map(slow, SLOW)]
LENGTHS = [3, 14, 9, 20, 1, 12, 17]


@torch.no_grad()
def generated(folder: Path, prompts: list[tuple[int, ...]], lengths: list[int]) -> dict[str, list[int]]:
    """Return what transformers generates for each prompt, one after another."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = {}
    for number, (prompt, count) in enumerate(zip(prompts, lengths, strict=True)):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        found[str(number)] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, prompts = save_model(name, tmp_path), random_prompts(len(LENGTHS), seed=7)
    expected = generated(folder, prompts, LENGTHS)
    assert len({token for row in expected.values() for token in row}) > 8  # a model that repeats itself proves little
    network = open_network(folder)
    assert isinstance(network.module, Decoder) == (name in NATIVE)
    requests = requests_of(prompts, LENGTHS)
    alone = new_engine(network)
    assert isinstance(alone.runner, ModelRunner)
    for request in requests[:3]:
        assert tokens_of(answers_of(alone, [request])) == {request.id: expected[request.id]}
    # Few pages, short steps, arrivals in between: prompts in parts, preemption and shared prefixes.
    arrivals = [random.Random(3).randint(0, 8) for _ in requests]
    for overlap in (False, True) if name == "llama" else (True,):
        crowded = new_engine(network, num_pages=13, max_step_tokens=11, overlap=overlap)
        assert tokens_of(answers_of(crowded, requests, arrivals)) == expected
        stats = crowded.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens > 0
    together = new_engine(network, max_step_tokens=256, reuse_prefixes=False)
    assert tokens_of(answers_of(together, requests)) == expected


def test_a_model_of_transformers_is_paged_in_half_precision(tmp_path: Path) -> None:
    network = open_network(save_model("mistral", tmp_path))
    compute_in_bf16(network.module)
    cache = CacheSettings(max_bytes=1 << 20, page_size=4)
    engine = BatchingEngine(open_runner(network, CPU, torch.bfloat16, cache), EngineSettings(max_running=8))
    assert isinstance(engine.runner, ModelRunner)
    found = tokens_of(answers_of(engine, requests_of(random_prompts(5, seed=1), [9] * 5), [0, 0, 1, 2, 5]))
    assert [len(row) for row in found.values()] == [9] * 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "longrope"])
def test_a_model_that_cannot_be_paged_generates_one_sequence_after_another(name: str, tmp_path: Path) -> None:
    folder, prompts = save_model(name, tmp_path), random_prompts(4, seed=7)
    network = open_network(folder)
    engine = new_engine(network, num_pages=20, max_step_tokens=11)
    assert isinstance(engine.runner, SequenceRunner)
    expected = generated(folder, prompts, LENGTHS[:4])
    assert tokens_of(answers_of(engine, requests_of(prompts, LENGTHS[:4]), [0, 0, 3, 5])) == expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return open_network(save_model("llama", tmp_path_factory.mktemp("llama")))


def sampled_alone(network: Network, prompt: tuple[int, ...], sampling: Sampling, count: int) -> list[int]:
    """Return what `trimaran generate` draws."""
    model = NextTokenModel(CachedLogits(network, CPU), network.max_seq_len)
    return list(Generation(model, prompt, TokenSampler(sampling), max_tokens=count))


@pytest.mark.parametrize("overlap", [slow(False), True])
def test_a_seed_gives_the_same_tokens_alone_batched_and_after_a_restart(llama: Network, overlap: bool) -> None:
    limits = [(0, 1.0), (9, 1.0), (0, 0.8), (20, 0.9), (0, 1.0), (3, 0.5)]
    rules = [Sampling(temperature=1.0, top_k=k, top_p=p, seed=seed) for seed, (k, p) in enumerate(limits)]
    prompts = random_prompts(len(rules), seed=2)
    expected = {str(number): sampled_alone(llama, prompt, rule, 18)
                for number, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))}  # fmt: skip
    requests = [replace(each, sampling=rule) for each, rule in zip(requests_of(prompts, [18] * len(rules)), rules,
                                                                    strict=True)]  # fmt: skip
    engine = new_engine(llama, num_pages=14, max_step_tokens=12, overlap=overlap)
    assert tokens_of(answers_of(engine, requests, [0, 0, 1, 4, 4, 6])) == expected
    assert engine.stats().preemptions > 0
    resumed = [replace(each, generated=tuple(expected[each.id][:7])) for each in requests]
    found = tokens_of(answers_of(new_engine(llama), resumed))
    assert found == {name: row[7:] for name, row in expected.items()}


@torch.no_grad()
def logprobs_alone(network: Network, tokens: list[int]) -> Tensor:
    return network.forward({"tokens": torch.tensor([tokens])})[0][0].log_softmax(-1)


def test_log_probabilities_of_answer_and_prompt(llama: Network) -> None:
    prompts = random_prompts(3, seed=5)
    requests = [replace(each, logprobs=3, prompt_logprobs=True) for each in requests_of(prompts, [6, 0, 4])]
    outputs = answers_of(new_engine(llama, num_pages=16, max_step_tokens=9), requests)
    for request in requests:
        rows = outputs[request.id]
        tokens = [each.token for each in rows if each.token is not None]
        assert len(tokens) == request.max_tokens
        expected = logprobs_alone(llama, [*request.prompt, *tokens])
        first = rows[0]
        assert first.prompt_logprobs[0] is None
        wanted = [float(expected[at, token]) for at, token in enumerate(request.prompt[1:])]
        assert list(first.prompt_logprobs[1:]) == pytest.approx(wanted, abs=1e-4)
        assert [len(each) for each in first.prompt_top] == [0, *[3] * (len(request.prompt) - 1)]
        assert all(not each.prompt_logprobs for each in rows[1:])
        for number, output in enumerate(each for each in rows if each.token is not None):
            row = expected[len(request.prompt) - 1 + number]
            assert output.logprob == pytest.approx(float(row[output.token]), abs=1e-4)
            assert output.top[0][0] == int(row.argmax())
            assert len(output.top) == 3


@torch.no_grad()
def test_embeddings_are_the_mean_of_the_last_layers_outputs(llama: Network) -> None:
    prompts = random_prompts(4, seed=6)
    requests = requests_of(prompts, [5] * 4)
    requests = [replace(each, embed=int(each.id) < 3) for each in requests]
    outputs = answers_of(new_engine(llama, num_pages=20, max_step_tokens=9), requests)
    assert len(tokens_of(outputs)["3"]) == 5
    found: list[Tensor] = []
    norm: Any = llama.module.norm
    hook = norm.register_forward_hook(lambda _, __, out: found.append(out))
    for request in requests[:3]:
        (output,) = outputs[request.id]
        assert output.finish == "stop"
        llama.forward({"tokens": torch.tensor([request.prompt])})
        mean = found.pop()[0].mean(0)
        assert output.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)
    hook.remove()


@pytest.mark.parametrize("overlap", [slow(False), True])
def test_nan_ends_its_own_request_and_no_other(overlap: bool, tmp_path: Path) -> None:
    network = open_network(save_model("llama", tmp_path))
    requests = requests_of([(9, 8, 7, 6, 5), (9, 7, 3), (4, 3, 2, 1), (1, 2, 3)], [12] * 4)
    expected = tokens_of(answers_of(new_engine(network), requests))
    damaged = min(set(range(10, 96)) - {token for row in expected.values() for token in row})
    requests[1] = replace(requests[1], prompt=(9, 7, damaged, 3))
    module: Any = network.module
    with torch.no_grad():
        module.embed_tokens.weight[damaged] = float("nan")
    # All pages are used again after the damaged request has ended.
    engine = new_engine(network, num_pages=10, overlap=overlap)
    outputs = answers_of(engine, requests, [0, 0, 0, 4])
    assert [each.finish for each in outputs["1"]] == ["error"]
    assert "NaN" in outputs["1"][0].error
    later = [replace(each, id=f"later {each.id}") for each in requests if each.id != "1"]
    found = tokens_of(outputs) | tokens_of(answers_of(engine, later))
    for name in "023":
        assert found[name] == found[f"later {name}"] == expected[name]


class Countdown:
    """A constraint that allows one token at each step: one less than the last."""

    def __init__(self, start: int) -> None:
        self.next = start

    def allowed(self) -> np.ndarray:
        mask = np.zeros(96, dtype=bool)
        mask[self.next] = True
        return mask

    def advance(self, token: int) -> None:
        assert token == self.next
        self.next -= 1


def test_a_constraint_guides_its_own_request_also_after_preemption_and_restart(llama: Network) -> None:
    runner = new_engine(llama, num_pages=9).runner
    engine = BatchingEngine(runner, EngineSettings(max_running=4, max_step_tokens=16),
                            make_constraint=lambda request: Countdown(int(request.grammar or "")))  # fmt: skip
    requests = requests_of(random_prompts(3, seed=8, most=10), [14] * 3)
    free = tokens_of(answers_of(new_engine(llama), requests))
    requests[1] = replace(requests[1], grammar="50", sampling=Sampling(temperature=1.0, seed=1))
    requests[2] = replace(requests[2], grammar="40", generated=(40, 39, 38))
    found = tokens_of(answers_of(engine, requests))
    assert found == {"0": free["0"], "1": list(range(50, 36, -1)), "2": list(range(37, 26, -1))}
    assert engine.stats().preemptions > 0


def test_a_cache_too_small_for_a_page_is_refused(llama: Network) -> None:
    with pytest.raises(UserError, match="E010"):
        open_runner(llama, CPU, torch.float32, CacheSettings(max_bytes=100))


def test_the_cache_has_as_many_pages_as_its_memory_allows(llama: Network) -> None:
    runner = open_runner(llama, CPU, torch.float32, CacheSettings(max_bytes=1 << 16, page_size=8))
    spec: Any = llama.spec
    page = 8 * 2 * spec.layers * spec.kv_heads * spec.head_dim * 4
    assert runner.num_pages == (1 << 16) // page
    assert isinstance(BatchingEngine(runner, new_engine(llama).settings), BatchingEngine)
