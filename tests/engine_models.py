"""Models and requests for tests of the batching engine."""

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.random_weights import perturb
from trimaran.nets import Network
from trimaran.serve import (
    ALL,
    EMBEDDING,
    LAST,
    NOTHING,
    BatchingEngine,
    CacheSettings,
    EngineBatch,
    EngineRequest,
    EngineSettings,
    ModelRunner,
    PendingTokens,
    Runner,
    RunnerTraits,
    StepLogits,
    TokenChooser,
    TokenOutput,
    choose_on_device,
    open_runner,
    section_of_folder,
)
from trimaran.train import Sampling, load_trained

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
VOCABULARY = 64
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
# As those of `tests.hf_models`, which imports transformers.
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
LATENT: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
# The class of the config in transformers, and its values.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", SMALL | {"tie_word_embeddings": False, "head_dim": 8, "sliding_window": 6,
               "layer_types": LAYERS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", SMALL | {"tie_word_embeddings": False, "head_dim": 8, "sliding_window": 6,
               "layer_types": LAYERS}),
    "gpt-oss": ("GptOssConfig", SMALL | {"head_dim": 8, "sliding_window": 6, "layer_types": LAYERS,
                "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2Config", SMALL),
    "cohere": ("CohereConfig", SMALL),
    "cohere2": ("Cohere2Config", SMALL | {"sliding_window": 6, "layer_types": LAYERS}),
    "starcoder2": ("Starcoder2Config", SMALL | {"sliding_window": 7}),
    "bloom": ("BloomConfig", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "longrope": ("Phi3Config", SMALL | LONGROPE),
    "deepseek-v2": ("DeepseekV2Config", LATENT | {"q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
}  # fmt: skip


def config_of(name: str) -> Any:
    """Return the config of one of CONFIGS, or of a model of `tests.hf_models`."""
    import transformers  # noqa: PLC0415 - of all tests that import this module, only some need it

    from tests import hf_models  # noqa: PLC0415

    if name not in CONFIGS:
        return deepcopy(hf_models.CONFIGS[name])
    kind, values = CONFIGS[name]
    return getattr(transformers, kind)(**values)


def save_model(name: str, folder: Path) -> Path:
    """Save a model of this name with random weights, none of them neutral, and return the folder."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = config_of(name)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, None, 0
    model = AutoModelForCausalLM.from_config(config)
    perturb(model)
    model.save_pretrained(folder)
    return folder


def open_network(folder: Path) -> Network:
    """Return the network of a folder as the product opens it: ours if it supports the model, else transformers'."""
    return load_trained(section_of_folder(folder), folder, CPU)


def new_engine(
    network: Network, *, num_pages: int = 64, page_size: int = 4, overlap: bool = False, **settings: Any
) -> BatchingEngine:
    cache = CacheSettings(max_bytes=1 << 30, max_tokens=num_pages * page_size, page_size=page_size)
    runner = open_runner(network, CPU, torch.float32, cache)
    if overlap:
        assert isinstance(runner, ModelRunner)
        runner = ModelRunner(network, CPU, torch.float32, runner.cache, replace(runner.traits, overlaps=True))
    chosen: dict[str, Any] = {"max_running": 8, "max_step_tokens": 32} | settings
    return BatchingEngine(runner, EngineSettings(**chosen))


def random_prompts(count: int, seed: int, *, vocabulary: int = 96, most: int = 20) -> list[tuple[int, ...]]:
    """Return prompts of which some begin alike."""
    chosen = random.Random(seed)
    shared = [chosen.randrange(1, vocabulary) for _ in range(most)]
    prompts = []
    for _ in range(count):
        own = [chosen.randrange(1, vocabulary) for _ in range(chosen.randint(1, most // 2))]
        prompts.append(tuple(shared[: chosen.choice((0, 0, most // 2, most))] + own))
    return prompts


def requests_of(prompts: Sequence[tuple[int, ...]], max_tokens: Sequence[int], **fields: Any) -> list[EngineRequest]:
    chosen: dict[str, Any] = {"sampling": GREEDY} | fields
    return [
        EngineRequest(id=str(number), prompt=prompt, max_tokens=tokens, **chosen)
        for number, (prompt, tokens) in enumerate(zip(prompts, max_tokens, strict=True))
    ]


def answers_of(
    engine: BatchingEngine, requests: Sequence[EngineRequest], arrivals: Sequence[int] | None = None
) -> dict[str, list[TokenOutput]]:
    """Return the outputs of all requests. `arrivals` are the steps before which each is added; all at once if None."""
    outputs: dict[str, list[TokenOutput]] = {each.id: [] for each in requests}
    arrivals = [0] * len(requests) if arrivals is None else arrivals
    step = 0
    while engine.has_work or step <= max(arrivals):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                engine.add(request)
        for output in engine.step():
            outputs[output.request].append(output)
        step += 1
        assert step < 5000, "every request ends"
    assert engine.stats().used_pages == 0
    return outputs


def tokens_of(outputs: dict[str, list[TokenOutput]]) -> dict[str, list[int]]:
    return {name: [each.token for each in row if each.token is not None] for name, row in outputs.items()}


class PrefixRunner:
    """A runner whose next token depends on every token before, and which reads them from its pages only.

    What it stores for a token is a number made of the number stored for the token before it. A page that is lost,
    shared by mistake or written twice changes every token after it. No network is needed.
    """

    def __init__(self, num_pages: int, page_size: int, *, max_length: int = 1 << 20, traits: Any = None) -> None:
        self.num_pages, self.page_size, self.max_length = num_pages, page_size, max_length
        self.vocabulary = VOCABULARY
        self.traits: RunnerTraits = traits or RunnerTraits()
        self.memory = np.full(num_pages * page_size, -1)
        self.batches: list[EngineBatch] = []

    def run(self, batch: EngineBatch) -> StepLogits:
        batch = EngineBatch.from_tensor(batch.to_tensor())  # as on another rank
        self.batches.append(batch)
        rows: list[int] = []
        for number, want in enumerate(batch.wants.tolist()):
            table, size = batch.page_tables[number], self.page_size
            for index in range(int(batch.query_starts[number]), int(batch.query_starts[number + 1])):
                position, slot = int(batch.positions[index]), int(batch.slots[index])
                assert slot == table[position // size] * size + position % size
                before = int(batch.adapters[number])
                if position:
                    before = int(self.memory[table[(position - 1) // size] * size + (position - 1) % size])
                self.memory[slot] = mixed(before, int(batch.tokens[index]))
                is_last = index + 1 == batch.query_starts[number + 1]
                if want == ALL or (want not in (NOTHING, EMBEDDING) and is_last):
                    rows.append(int(self.memory[slot]) // 7 % VOCABULARY)
        return StepLogits(torch.nn.functional.one_hot(torch.tensor(rows, dtype=torch.long), VOCABULARY).float())


class LateRunner(PrefixRunner):
    """A runner whose steps are in flight: each is computed when the next one is launched, or its tokens are read."""

    def __init__(self, *args: Any, traits: RunnerTraits | None = None, **fields: Any) -> None:
        super().__init__(*args, traits=replace(traits or RunnerTraits(), overlaps=True), **fields)
        self.last: LateTokens | None = None
        self.num_named = 0  # tokens that a batch has named before they were read

    def launch(self, batch: EngineBatch, choosers: Sequence[TokenChooser | None]) -> PendingTokens:
        assert [want == LAST for want in batch.wants] == [each is not None for each in choosers]
        chosen = self.last.compute() if self.last is not None else []
        self.num_named += int((batch.tokens < 0).sum())
        tokens = np.array([chosen[-1 - each] if each < 0 else each for each in batch.tokens.tolist()])
        assert (tokens >= 0).all(), "a sequence without a token of its own was named"
        self.last = LateTokens(self, replace(batch, tokens=tokens), [each for each in choosers if each])
        return self.last


class LateTokens(PendingTokens):
    """The tokens of a step of `LateRunner`."""

    def __init__(self, runner: LateRunner, batch: EngineBatch, choosers: Sequence[TokenChooser]) -> None:
        super().__init__(torch.full((batch.num_sequences,), -99), None)
        self._left: tuple[Any, ...] | None = (runner, batch, choosers)

    def compute(self) -> list[int]:
        if self._left is not None:
            runner, batch, choosers = self._left
            self._host[torch.from_numpy(batch.wants == LAST)] = choose_on_device(runner.run(batch).logits, choosers)
            self._left = None
        return super().read()

    def read(self) -> list[int]:
        return self.compute()


def mixed(before: int, token: int) -> int:
    return (before * 1_103_515_245 + token * 12_345 + 777) % 2_147_483_647


def expected_tokens(request: EngineRequest, count: int, adapter: int = 0) -> list[int]:
    """Return the tokens that `PrefixRunner` computes for a request alone."""
    state, found = adapter, []
    for token in request.prompt:
        state = mixed(state, token)
    for _ in range(count):
        found.append(state // 7 % VOCABULARY)
        state = mixed(state, found[-1])
    return found


def check_runner(runner: Runner) -> Runner:
    """Return the runner: it satisfies the protocol, which the type checker sees here."""
    return runner
