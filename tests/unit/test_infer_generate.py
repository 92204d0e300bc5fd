"""Generation: why it ends, what the cache saves, and that prompts are the tokens that the training data has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests import vlm_models
from tests.unit.test_data_tokenizer import train_bpe
from trimaran.core import ImageRules, UserError
from trimaran.data import (
    ByteTokenizer,
    ChatTokenizer,
    RawSample,
    SamplePacker,
    Tokenizer,
    Turn,
    fill_patches,
    load_tokenizer,
    token_positions,
)
from trimaran.models import PRESETS, Spec
from trimaran.nets import Network, initialise, network_of
from trimaran.serve import Conversation, PromptBuilder, TrainedModel, continuation, stored_dtype
from trimaran.train import CachedLogits, Generation, NextTokenModel, Sampling, TokenSampler, whole_sequence_logits

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)
TINY = replace(PRESETS["tiny"], layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, max_seq_len=64)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def network_for(spec: Spec) -> Network:
    network = network_of(spec)
    initialise(network.module, seed=5, spec=spec)
    vlm_models.perturb(network.module)
    network.module.eval()
    return network


def trained(spec: Any = TINY, tokenizer: Tokenizer | None = None, **fields: Any) -> TrainedModel:
    tokenizer = tokenizer or ByteTokenizer()
    fields = {"stop_ids": frozenset(), **fields}
    return TrainedModel(network=network_for(spec), tokenizer=tokenizer, device=CPU, dtype=torch.float32, **fields)


class CountedNetwork:
    """A network that counts the tokens which run through it."""

    def __init__(self, network: Network) -> None:
        self._network, self.num_tokens = network, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def extend(self, cache: Any, inputs: dict[str, Tensor]) -> Tensor:
        self.num_tokens += inputs["tokens"].shape[1]
        return self._network.extend(cache, inputs)


def scripted(*ids: int) -> NextTokenModel:
    """Return a model with four positions that generates these tokens in turn."""
    rest = iter(ids)
    return NextTokenModel(lambda _: torch.nn.functional.one_hot(torch.tensor(next(rest)), 9).float(), 4)


def test_generation_ends_at_an_end_token_which_is_not_text() -> None:
    generation = Generation(scripted(3, 4, 7, 5), [1], TokenSampler(GREEDY), max_tokens=9)
    generation.stop_ids = frozenset([7])
    assert list(generation) == [3, 4]
    assert (generation.finish_reason, generation.ids, generation.new_ids) == ("end", [1, 3, 4], [3, 4])


def test_generation_ends_after_its_tokens_or_when_it_is_stopped() -> None:
    generation = Generation(scripted(3, 4, 5), [1], TokenSampler(GREEDY), max_tokens=2)
    assert (list(generation), generation.finish_reason) == ([3, 4], "length")
    generation = Generation(scripted(3, 4, 5), [1], TokenSampler(GREEDY), max_tokens=3, allows_next=lambda: False)
    assert (list(generation), generation.finish_reason) == ([3], "stopped")


def test_a_conversation_ends_when_the_positions_are_full_and_a_text_goes_on_without_its_beginning() -> None:
    generation = Generation(scripted(3, 4, 5), [1, 2, 3], TokenSampler(GREEDY), max_tokens=3)
    generation.slides = False
    assert (list(generation), generation.finish_reason) == ([3, 4], "context")
    network = network_for(replace(TINY, max_seq_len=8))
    texts = []
    for logits in (CachedLogits(network, CPU), whole_sequence_logits(network, CPU)):
        generation = Generation(NextTokenModel(logits, 8), range(5), TokenSampler(GREEDY), max_tokens=12)
        texts.append(list(generation))
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12


@torch.no_grad()
def test_only_what_differs_from_the_last_sequence_runs_through_the_network() -> None:
    network = CountedNetwork(network_for(TINY))
    cached, whole = CachedLogits(network, CPU), whole_sequence_logits(network, CPU)  # pyrefly: ignore[bad-argument-type]
    for ids, expected in (("first", 5), ("first question", 9), ("first answer", 6), ("first answer", 1), ("fi", 1)):
        network.num_tokens, tokens = 0, torch.tensor(list(ids.encode()))
        torch.testing.assert_close(cached(tokens), whole(tokens), atol=1e-4, rtol=1e-5)
        assert network.num_tokens == expected


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Tokenizer:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
    return load_tokenizer(str(train_bpe(tmp_path / "tokenizer.json", special=special)))


TURNS = [Turn("system", ("be brief",)), Turn("user", ("the boat",)), Turn("assistant", ("and the sea",)),
         Turn("user", ("and?",))]  # fmt: skip


@pytest.mark.parametrize("template", ["chatml", "vicuna", "plain", "bytes"])
@pytest.mark.parametrize("num_turns", [2, 4])
def test_a_chat_prompt_is_what_comes_before_the_answer_in_training(
    template: str, num_turns: int, chat_tokenizer: Tokenizer
) -> None:
    tokenizer = ByteTokenizer() if template == "bytes" else chat_tokenizer
    chat = ChatTokenizer(tokenizer, "plain" if template == "bytes" else template, None, 10**6)
    turns = TURNS[:num_turns]
    raw = RawSample(file="x", row=1, turns=(*turns, Turn("assistant", ("the boat",))))
    (outcome,) = chat.tokenize([raw])
    assert isinstance(outcome, list)
    (sample,) = outcome
    prompt = chat.prompt(turns).tolist()
    tokens, targets = sample.tokens.tolist(), sample.targets.tolist()
    assert tokens[: len(prompt)] == prompt
    assert all(targets[len(prompt) : -1]), "everything after the prompt is learnt, but for what follows the answer"
    assert not targets[len(prompt) - 1]
    assert chat.end_of_turn == {tokens[max(index for index, each in enumerate(targets) if each)]}


def save_chat_model(folder: Path, tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return load_tokenizer(str(folder))


def test_the_models_own_template_writes_the_prompt_and_names_the_end(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    own = ChatTokenizer(save_chat_model(folder, chat_tokenizer), "model", None, 10**6)
    named = ChatTokenizer(chat_tokenizer, "chatml", None, 10**6)
    assert own.prompt(TURNS).tolist() == named.prompt(TURNS).tolist()
    assert own.end_of_turn == named.end_of_turn == {chat_tokenizer.special("<|im_end|>")}


def test_a_conversation_keeps_its_history_and_computes_only_the_new_turn(chat_tokenizer: Tokenizer) -> None:
    model = trained(replace(TINY, max_seq_len=512), chat_tokenizer, template="chatml")
    network = CountedNetwork(model.network)
    model = replace(model, network=network)  # pyrefly: ignore[bad-argument-type]
    conversation = Conversation(model, system="be brief")
    first = conversation.ask("the boat", [], TokenSampler(GREEDY), max_tokens=5)
    list(first)
    conversation.add_answer("and the sea")
    network.num_tokens = 0
    second = conversation.ask("and?", [], TokenSampler(GREEDY), max_tokens=1)
    list(second)
    assert second.ids[: second.num_prompt_ids] == PromptBuilder(model).chat_ids(TURNS).tolist()
    assert second.ids[: first.num_prompt_ids] == first.ids[: first.num_prompt_ids]
    assert 0 < network.num_tokens <= second.num_prompt_ids - first.num_prompt_ids
    assert chat_tokenizer.special("<|im_end|>") in second.stop_ids
    fresh = Generation(NextTokenModel(whole_sequence_logits(model.network, CPU), 512),
                       second.ids[: second.num_prompt_ids], TokenSampler(GREEDY), max_tokens=1)  # fmt: skip
    assert list(fresh) == second.new_ids


def test_a_conversation_that_is_too_long_is_refused_and_stays_as_it_was() -> None:
    conversation = Conversation(trained())
    with pytest.raises(UserError, match="A032"):
        conversation.ask("a" * 64, [], TokenSampler(GREEDY), max_tokens=5)
    answer = conversation.ask("a", [], TokenSampler(GREEDY), max_tokens=2)
    assert answer.num_prompt_ids == 2


def draw(file: Path, size: tuple[int, int], seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


@pytest.mark.parametrize("name", ["native", "tiled"])
@torch.no_grad()
def test_images_of_a_prompt_are_what_the_training_data_makes_of_them(name: str, tmp_path: Path) -> None:
    spec = vlm_models.SPECS[name]
    rules: ImageRules = replace(spec.images(), min_pixels=64)
    model = trained(spec, rules=rules)
    files = [draw(tmp_path / "one.png", (40, 24), 1), draw(tmp_path / "two.png", (16, 48), 2)]
    generation = continuation(model, "<image>the <image>boat", files, TokenSampler(GREEDY), max_tokens=3)
    list(generation)
    # The same sample, as the data pipeline packs it.
    chat = ChatTokenizer(ByteTokenizer(), "plain", rules, 10**6)
    raw = RawSample(file="x", row=1, turns=(Turn("text", (None, "the ", None, "boat")),),
                    images=tuple(each.read_bytes() for each in files))  # fmt: skip
    (outcome,) = chat.tokenize([raw])
    assert isinstance(outcome, list)
    sizes = np.array([(40, 24), (16, 48)])
    packed = SamplePacker(rules, 10**6).pack(outcome[0], sizes)  # pyrefly: ignore[bad-argument-type]
    tokens = packed.tokens[:-1].tolist()  # without the end of the document
    assert generation.ids[: generation.num_prompt_ids] == tokens
    patches = [np.empty((int(each.prod(1).sum()), 3 * rules.patch**2), dtype=np.uint8) for each in packed.grids]
    for file, size, out in zip(files, sizes.tolist(), patches, strict=True):
        fill_patches(file.read_bytes(), tuple(size), rules, out)
    inputs = {"patches": np.concatenate(patches), "grids": np.concatenate(packed.grids)}
    for _ in range(3):
        whole = {each: torch.from_numpy(array) for each, array in inputs.items()} | {"tokens": torch.tensor([tokens])}
        if rules.positions == "grid":
            whole["positions"] = torch.from_numpy(token_positions(packed, rules, len(tokens))[:, None])
        tokens = [*tokens, int(model.network.forward(whole)[0][0, -1].argmax())]
    assert generation.ids == tokens


def test_images_are_refused_by_models_that_do_not_see_and_if_they_are_not_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="A031"):
        continuation(trained(), "x", [draw(tmp_path / "one.png", (8, 8), 1)], TokenSampler(GREEDY), max_tokens=1)
    sees = trained(vlm_models.SPECS["native"], rules=vlm_models.SPECS["native"].images())
    (tmp_path / "text.png").write_text("no image")
    for file in ("text.png", "missing.png"):
        with pytest.raises(UserError, match="A030"):
            continuation(sees, "x", [tmp_path / file], TokenSampler(GREEDY), max_tokens=1)
    with pytest.raises(UserError, match="2 times <image>, and there are 1 images"):
        continuation(
            sees, "<image><image>", [draw(tmp_path / "one.png", (8, 8), 1)], TokenSampler(GREEDY), max_tokens=1
        )


@pytest.mark.parametrize(
    ("config", "weights", "expected"),
    [
        ("{}", torch.bfloat16, "bf16"),
        ("{}", torch.float32, "fp32"),
        ('{"dtype": "float32"}', torch.bfloat16, "fp32"),
        ('{"torch_dtype": "bfloat16"}', torch.float32, "bf16"),
    ],
)
def test_a_config_says_the_dtype_of_a_folder_or_else_its_weights_do(
    tmp_path: Path, config: str, weights: torch.dtype, expected: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    save_file({"a": torch.zeros(2, dtype=torch.float32), "b": torch.zeros(2, 2, dtype=weights)},
              tmp_path / "model.safetensors")  # fmt: skip
    assert stored_dtype(tmp_path) == expected
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert stored_dtype(tmp_path) in (expected, "fp32"), "who loads the weights reports it"
