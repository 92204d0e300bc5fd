"""Folders of many kinds of Hugging Face models: trained as transformers computes them, or refused with a code."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BigBirdConfig,
    CamembertConfig,
    CLIPConfig,
    Data2VecTextConfig,
    DistilBertConfig,
    ElectraConfig,
    FalconConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlavaNextConfig,
    MambaConfig,
    MixtralConfig,
    ModernBertConfig,
    OpenAIGPTConfig,
    Qwen2AudioConfig,
    RobertaConfig,
    RobertaPreLayerNormConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
    XLMConfig,
    XLMRobertaConfig,
    XLMRobertaXLConfig,
    XLNetConfig,
    XmodConfig,
)

from tests.hf_models import CONFIGS, NARROW, SMALL
from tests.model_folders import write_model_tokenizer
from trimaran.app import main
from trimaran.core import ModelSection, UserError
from trimaran.models import ModelSpec, facts_file, spec_of
from trimaran.nets import (
    HfNetwork,
    WeightsNeededError,
    decoder_network,
    hf_network,
    load_hf_weights,
    open_hf_model,
    pipeline_layers,
    takes_scope,
)

CPU = torch.device("cpu")
WINDOWS: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
AFMOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
# These build their masks without the positions of documents, or read the masks for a balance loss.
PACKED = {
    "gpt_oss": GptOssConfig(**SMALL, **EXPERTS, **WINDOWS),
    "afmoe": AfmoeConfig(**SMALL, **AFMOE, **WINDOWS),
    "mixtral-balanced": MixtralConfig(**SMALL, **EXPERTS, output_router_logits=True),
}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER: dict[str, Any] = NARROW | NO_DROPOUT | {"is_decoder": True, "pad_token_id": 1}
POSITIONS_AFTER_PADDING = {
    "roberta": RobertaConfig(**DECODER),
    "roberta-prelayernorm": RobertaPreLayerNormConfig(**DECODER),
    "camembert": CamembertConfig(**DECODER),
    "xlm-roberta": XLMRobertaConfig(**DECODER),
    "xlm-roberta-xl": XLMRobertaXLConfig(**DECODER),
    "data2vec-text": Data2VecTextConfig(**DECODER),
    "xmod": XmodConfig(**DECODER, default_language="en_XX"),
}
PADDING = 1
LLAMA4: dict[str, Any] = {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "pad_token_id": 0}
XLM: dict[str, Any] = {"vocab_size": 96, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1, "causal": True}
GPT: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TOKENS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9, [0] * 4 + [1] * 12])
STARTS = (7, 4)


def network_of(config: Any, folder: Path) -> HfNetwork:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    module, fill = open_hf_model(folder, trust_remote_code=False, seed=0)
    network = hf_network(module.train(), None)
    fill(module, CPU)
    return network


@torch.no_grad()
def logits_alone(network: HfNetwork) -> list[Tensor]:
    """Return the logits of the second document of each row, computed by the model alone."""
    pairs = zip(TOKENS, STARTS, strict=True)
    return [network.module(input_ids=row[None, start:], use_cache=False).logits[0] for row, start in pairs]


@torch.no_grad()
def logits_packed(network: HfNetwork) -> list[Tensor]:
    """Return the logits of the second document of each row, computed in the packed row."""
    logits = network.forward({"tokens": TOKENS, "documents": DOCUMENTS})[0]
    return [row[start:] for row, start in zip(logits, STARTS, strict=True)]


@pytest.mark.parametrize("name", [*PACKED, "mistral", "gemma3"])
def test_a_packed_document_has_the_logits_that_it_has_alone(name: str, tmp_path: Path) -> None:
    network = network_of((PACKED | CONFIGS)[name], tmp_path)
    for packed, alone in zip(logits_packed(network), logits_alone(network), strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)


def test_a_balance_loss_that_is_not_added_costs_neither_our_attention_nor_stages(tmp_path: Path) -> None:
    network = network_of(PACKED["mixtral-balanced"], tmp_path)
    assert takes_scope(network.module)
    assert pipeline_layers(network).count == 2
    assert network.disk_config()["output_router_logits"], "for transformers"


@pytest.mark.parametrize("name", POSITIONS_AFTER_PADDING)
def test_positions_of_the_roberta_family_count_from_the_number_after_padding(name: str, tmp_path: Path) -> None:
    network = network_of(POSITIONS_AFTER_PADDING[name], tmp_path)
    network.module.eval()
    tokens = TOKENS.clone()
    tokens[0, 3] = PADDING  # it has a position of its own, and does not count
    with torch.no_grad():
        plain = network.module(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(network.forward({"tokens": tokens})[0], plain)
    for packed, alone in zip(logits_packed(network), logits_alone(network), strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
    assert network.max_seq_len == SMALL["max_position_embeddings"] - PADDING - 1


def test_a_cached_model_of_the_roberta_family_has_the_positions_of_one_forward(tmp_path: Path) -> None:
    network = network_of(POSITIONS_AFTER_PADDING["roberta"], tmp_path)
    network.module.eval()
    with torch.no_grad():
        whole, cache = network.forward({"tokens": TOKENS[:1]})[0], network.new_cache()
        network.extend(cache, {"tokens": TOKENS[:1, :-1]})
        last = network.extend(cache, {"tokens": TOKENS[:1, -1:]})
    torch.testing.assert_close(last, whole[:, -1:], atol=1e-5, rtol=1e-4)


def test_a_negative_limit_of_positions_is_no_limit(tmp_path: Path) -> None:
    assert network_of(MambaConfig(**NARROW | {"max_position_embeddings": -1}), tmp_path).max_seq_len == sys.maxsize


def test_documents_that_a_model_cannot_keep_apart_are_refused(tmp_path: Path) -> None:
    llama4 = Llama4TextConfig(**SMALL, **LLAMA4, attention_chunk_size=8, layer_types=["chunked_attention"] * 2)
    falcon = FalconConfig(**NARROW, alibi=True, multi_query=False)
    for config in (llama4, XLMConfig(**XLM), OpenAIGPTConfig(**GPT), falcon):
        with pytest.raises(UserError, match="M058"):
            network_of(config, tmp_path / config.model_type).forward({"tokens": TOKENS, "documents": DOCUMENTS})


def refusal(folder: Path, config: Any, *, saved_as: str = "") -> UserError:
    """Return the mistake of a folder that holds only this config. `saved_as` is the class that it names."""
    if saved_as:
        config.architectures = [saved_as]
    config.save_pretrained(folder)
    with pytest.raises(UserError) as caught:
        hf_network(open_hf_model(folder, trust_remote_code=False, seed=0)[0], None)
    return caught.value


@pytest.mark.parametrize(
    ("config", "saved_as", "kind"),
    [
        (BertConfig(**NARROW), "BertForMaskedLM", "a masked language model"),
        (DistilBertConfig(), "DistilBertForMaskedLM", "a masked language model"),
        (ModernBertConfig(), "ModernBertModel", "a masked language model"),
        (LlamaConfig(**SMALL), "LlamaForSequenceClassification", "a classifier of sequences"),
        (BertConfig(**NARROW), "BertForTokenClassification", "a classifier of tokens"),
        (WhisperConfig(), "WhisperForConditionalGeneration", "a speech-to-text model"),
        (BartConfig(), "BartForConditionalGeneration", "an encoder-decoder model"),
        (BartConfig(is_encoder_decoder=True), "", "an encoder-decoder model"),
        (T5Config(), "T5ForConditionalGeneration", "an encoder-decoder model"),
        (ViTConfig(), "ViTForImageClassification", "an image classifier"),
        (CLIPConfig(), "CLIPModel", "a model that compares images with texts"),
        (LlavaNextConfig(), "LlavaNextForConditionalGeneration", "a vision-language model"),
        (Qwen2AudioConfig(), "Qwen2AudioForConditionalGeneration", "an audio-language model"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_model_of_another_kind_is_named(config: Any, saved_as: str, kind: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, config, saved_as=saved_as)
    assert error.code == "M091"
    assert f" is {kind}, not a causal language model" in error.what
    assert "trimaran.prepare" in error.fix
    assert ("its decoder alone" in error.fix) == isinstance(config, BartConfig | WhisperConfig)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (BertConfig(**NARROW), "is_decoder: true"),
        (ElectraConfig(**NARROW, embedding_size=32), "is_decoder: true"),
        (BigBirdConfig(**NARROW, attention_type="original_full"), "is_decoder: true"),
        (XLMConfig(**XLM | {"causal": False}), "causal: true"),
        (XLNetConfig(vocab_size=96, d_model=32, n_layer=2, n_head=4, d_inner=48), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_attention_to_later_tokens_is_refused(config: Any, setting: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, config)
    assert error.code == "M092"
    assert "attend to later tokens" in error.what
    assert (f"set {setting} in config.json" in error.fix) == bool(setting)


def test_a_bert_that_is_a_decoder_is_trained_whatever_it_was_saved_as(tmp_path: Path) -> None:
    config = BertConfig(**DECODER)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    network = hf_network(open_hf_model(tmp_path, trust_remote_code=False, seed=0)[0], None)
    assert network.architecture == "BertLMHeadModel"


@pytest.mark.parametrize("without_weights", [False, True], ids=["train", "dry-run"])
def test_an_embedding_model_without_a_head_is_named(without_weights: bool, tmp_path: Path) -> None:
    LlamaModel(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"M093.*without the head of a language model: lm_head\.weight"):
        open_hf_model(tmp_path, trust_remote_code=False, seed=0, without_weights=without_weights)


def test_an_encoder_without_a_head_is_named(tmp_path: Path) -> None:
    BertModel(BertConfig(**NARROW)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"M093.*without the head of a language model: cls\.predictions\.bias"):
        open_hf_model(tmp_path, trust_remote_code=False, seed=0, without_weights=True)


def test_a_layer_that_is_not_on_disk_is_no_missing_head(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)).save_pretrained(tmp_path)
    LlamaConfig(**SMALL | {"num_hidden_layers": 3}, tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(WeightsNeededError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight is not on disk"):
        open_hf_model(tmp_path, trust_remote_code=False, seed=0, without_weights=True)


@pytest.mark.parametrize(
    ("model", "is_tied", "refusal"),
    [
        (LlamaModel, False, r"M093.*lm_head\.weight is not on disk"),
        (LlamaForSequenceClassification, False, r"M093.*lm_head\.weight is not on disk"),
        (LlamaModel, True, r"M021.*lack the prefix model\.[^$]*set model\.family to hf"),
    ],
)
def test_the_decoder_names_a_model_without_a_head(model: Any, is_tied: bool, refusal: str, tmp_path: Path) -> None:
    model(LlamaConfig(**SMALL, tie_word_embeddings=is_tied)).save_pretrained(tmp_path)
    spec = spec_of(ModelSection(path=str(tmp_path)))
    assert isinstance(spec, ModelSpec)
    with pytest.raises(UserError, match=refusal):
        load_hf_weights(decoder_network(spec).module, tmp_path)


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of conversations in the working directory, which also caches the facts about models."""
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "question?"}, {"role": "assistant", "content": "answer"}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join([json.dumps({"messages": turns})] * 60))
    return file


def init(model: Path, chats: Path) -> int:
    options = ["--data", str(chats), "--cluster", "1xH100", "--yes", "--out", "recipe.yaml"]
    return main(["init", "--model", str(write_model_tokenizer(model, "qwen2.5")), *options])


@pytest.mark.parametrize("without_head", [False, True], ids=["another kind", "without a head"])
def test_init_refuses_the_models_that_train_refuses(
    without_head: bool, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = chats.with_name("model")
    if without_head:
        LlamaModel(LlamaConfig(**SMALL | {"vocab_size": 512})).save_pretrained(folder)
    else:
        BertForMaskedLM(BertConfig(**NARROW | {"vocab_size": 512})).save_pretrained(folder)
    assert init(folder, chats) == 2
    assert f"M09{3 if without_head else 1}: " in capsys.readouterr().err
    assert not Path("recipe.yaml").exists()


def test_init_pads_samples_of_a_model_that_cannot_keep_them_apart(chats: Path) -> None:
    folder = chats.with_name("model")
    AutoModelForCausalLM.from_config(
        MambaConfig(**NARROW | {"vocab_size": 512, "max_position_embeddings": 512})
    ).save_pretrained(folder)
    assert init(folder, chats) == 0
    text = Path("recipe.yaml").read_text()
    assert "batching: pad" in text
    assert main(["train", "recipe.yaml", "--dry-run"]) == 0
    Path("recipe.yaml").write_text(text.replace("batching: pad", "batching: pack"))
    assert main(["train", "recipe.yaml", "--dry-run"]) == 2


def test_facts_of_a_folder_without_a_head_are_not_those_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    folder, config = tmp_path / "model", LlamaConfig(**SMALL)
    section = ModelSection(family="hf", path=str(folder))
    LlamaModel(config).save_pretrained(folder)
    without_head = facts_file(section, os.environ)
    LlamaForCausalLM(config).save_pretrained(folder)
    config.architectures = ["LlamaModel"]
    config.save_pretrained(folder)
    assert facts_file(section, os.environ) != without_head


@pytest.mark.parametrize("row", [0, 95])
def test_the_decoder_refuses_a_tied_head_with_values_of_its_own(row: int, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    spec = spec_of(ModelSection(path=str(tmp_path)))
    assert isinstance(spec, ModelSpec)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    load_hf_weights(decoder_network(spec).module, tmp_path)  # a copy of the embedding is no other head
    head[row, 0] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    for device in ("cpu", "meta"):  # a run, and its dry run
        with torch.device(device), pytest.raises(UserError, match="M075"):
            load_hf_weights(decoder_network(spec).module, tmp_path)
