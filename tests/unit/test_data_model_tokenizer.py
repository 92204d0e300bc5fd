"""A model's own tokenizer is the default, fits or is refused, and is what an export ships."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.model_folders import STYLES, hf_tokenizer, write_model_tokenizer
from trimaran.app import as_recorded, main, with_model_tokenizer
from trimaran.checkpoint import copy_tokenizer_files
from trimaran.core import DataSection, Plan, Recipe, UserError
from trimaran.data import ByteTokenizer, TokenShards, load_tokenizer, open_tokenizer, pack, prepare
from trimaran.runs import create_run

TEXTS = ["Who is there? Nobody, but thé cat.", " Be  brief.\n\n三体船", "a<|im_end|>b </s> c"]


def save_weights(folder: Path, vocabulary: int = 512) -> Path:
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, intermediate_size=16, max_position_embeddings=256)  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with weights, a tokenizer and a chat template."""
    return save_weights(write_model_tokenizer(tmp_path_factory.mktemp("models") / "qwen", "qwen2.5"))


def recipe(model: Path | None = None, **data: object) -> Recipe:
    section = {"path": str(model)} if model else {}
    return Recipe.model_validate({"model": section, "data": data})


@pytest.mark.parametrize("style", ["qwen2.5", "llama3.1", "mistral", "gemma", "phi3"])
def test_documents_begin_and_end_as_the_models_configuration_says(style: str, tmp_path: Path) -> None:
    folder = write_model_tokenizer(tmp_path / "model", style)
    theirs, ours = hf_tokenizer(folder), load_tokenizer(str(folder))
    for text, ids in zip(TEXTS, ours.encode_many(TEXTS), strict=True):
        assert [*ours.begin_ids, *ids.tolist()] == theirs(text)["input_ids"]
    assert ours.end_id == theirs.eos_token_id
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Who is there?")
    (tmp_path / "texts" / "b.txt").write_text("Nobody.")
    section = {"source": "text", "path": str(tmp_path / "texts"), "tokenizer": str(folder), "seq_len": 2}
    shards = TokenShards.open(prepare(DataSection.model_validate(section), cache=tmp_path / "cache"))
    expected = [*theirs("Who is there?")["input_ids"], ours.end_id, *theirs("Nobody.")["input_ids"], ours.end_id]
    assert shards.tokens(0, shards.num_tokens).tolist() == expected


def test_the_models_own_tokenizer_and_template_are_the_default(model: Path) -> None:
    data = with_model_tokenizer(recipe(model, source="chat", path="x.jsonl")).data
    assert (data.tokenizer, data.samples.template) == (str(model), "model")
    named = with_model_tokenizer(recipe(model, tokenizer=str(model / "tokenizer.json"))).data
    assert (named.tokenizer, named.samples.template) == (str(model), "model")
    chosen = with_model_tokenizer(recipe(model, samples={"template": "chatml"})).data
    assert chosen.samples.template == "chatml"
    for unchanged in (recipe(), recipe(model, tokenizer="bytes")):
        assert with_model_tokenizer(unchanged) == unchanged
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


def test_a_model_with_weights_and_no_tokenizer_is_not_trained_on_bytes_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = save_weights(tmp_path / "bare")
    assert main(["train", "--set", f"model.path={bare}", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "T022: " in error
    assert "512 ids" in error
    assert "257 ids" in error
    assert main(["train", "--set", f"model.path={bare}", "--set", "data.tokenizer=bytes", "--dry-run"]) == 0
    (bare / "trimaran-tokenizer.json").write_text('{"kind": "bytes"}')  # a run trained it on bytes
    assert with_model_tokenizer(recipe(bare)) == recipe(bare)
    (bare / "trimaran-tokenizer.json").unlink()
    (bare / "model.safetensors").unlink()  # random weights have nothing to lose
    assert with_model_tokenizer(recipe(bare)) == recipe(bare)


def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = save_weights(write_model_tokenizer(tmp_path / "small", "qwen2.5"), vocabulary=300)
    for family in ("decoder", "hf"):
        settings = [f"model.path={small}", f"model.family={family}"]
        assert main(["train", *(word for each in settings for word in ("--set", each)), "--dry-run"]) == 2
        assert "T020: the data has 322 token ids, the model has 300" in capsys.readouterr().err


def test_a_vocabulary_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    full = write_model_tokenizer(tmp_path / "full", "qwen2.5")
    parts = json.loads((full / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "slow"
    folder.mkdir()
    vocabulary = parts["vocab"] | {"<|endoftext|>": len(parts["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in parts["merges"]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    ours, theirs = load_tokenizer(str(folder)), hf_tokenizer(folder)
    for text in TEXTS:
        assert [*ours.begin_ids, *ours.encode(text).tolist()] == theirs(text)["input_ids"]
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "merges.txt").read_bytes() == (folder / "merges.txt").read_bytes()
    again = open_tokenizer(ours.describe(), tmp_path / "saved")  # the converted tokenizer.json is saved with them
    assert again.encode(TEXTS[0]).tolist() == ours.encode(TEXTS[0]).tolist()
    (folder / "vocab.json").write_text("[]")
    with pytest.raises(UserError, match="cannot convert it") as refused:
        load_tokenizer(str(folder))
    assert refused.value.code == "T023"


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    folder = write_model_tokenizer(tmp_path / "model", "qwen2.5")
    size = load_tokenizer(str(folder)).vocab_size
    config = json.loads((folder / "tokenizer_config.json").read_text())
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {str(size): {"content": "<|extra|>", "special": True, **flags}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    ours, theirs = load_tokenizer(str(folder)), hf_tokenizer(folder)
    assert ours.vocab_size == size + 1
    assert ours.encode("a <|extra|>b").tolist() == theirs("a <|extra|>b")["input_ids"]


def test_shards_of_another_tokenizer_are_refused_for_a_model_with_its_own(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Who is there? " * 50)
    section = DataSection.model_validate({"source": "text", "path": str(tmp_path / "a.txt")})
    shards = pack(section, tmp_path / "bytes")
    with pytest.raises(UserError, match=r"of 257 ids; the model's own has 322") as refused:
        with_model_tokenizer(recipe(model, source="shards", path=str(shards)))
    assert refused.value.code == "T019"
    explicit = recipe(model, source="shards", path=str(shards), tokenizer="bytes", seq_len=8)
    assert with_model_tokenizer(explicit) == explicit
    prepare(explicit.data, cache=tmp_path / "cache")
    for name, tokenizer in (("own", model), ("file", model / "tokenizer.json")):  # the same ids from one file
        fitting = pack(section.model_copy(update={"tokenizer": str(tokenizer)}), tmp_path / name,
                       end_token="<|im_end|>")  # fmt: skip
        with_model_tokenizer(recipe(model, source="shards", path=str(fitting)))


def test_an_export_has_the_tokenizer_that_was_used_and_no_other(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    copy_tokenizer_files(model, tmp_path / "bytes")
    assert not [file.name for file in (tmp_path / "bytes").iterdir() if "tokenizer" in file.name]
    other = load_tokenizer(str(write_model_tokenizer(tmp_path / "other", "gemma") / "tokenizer.json"))
    (tmp_path / "foreign").mkdir()
    other.save(tmp_path / "foreign")
    copy_tokenizer_files(model, tmp_path / "foreign")
    assert not (tmp_path / "foreign" / "tokenizer_config.json").exists()
    for name, path in (("folder", model), ("file", model / "tokenizer.json")):
        folder = tmp_path / name
        folder.mkdir()
        load_tokenizer(str(path), end_token="<|im_end|>").save(folder)
        copy_tokenizer_files(model, folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / file).read_bytes() == (model / file).read_bytes()
        assert hf_tokenizer(folder).chat_template == STYLES["qwen2.5"][0]


def test_an_old_recipe_without_a_tokenizer_still_means_bytes(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Who is there? " * 50)
    old = recipe(model, source="text", path=str(tmp_path / "a.txt"), seq_len=8)
    shards = TokenShards.open(prepare(old.data, cache=tmp_path / "cache"))
    assert shards.meta.tokenizer == {"kind": "bytes"}


def test_an_old_run_that_torchrun_restarts_keeps_its_bytes(model: Path, tmp_path: Path) -> None:
    old = recipe(model, source="text", path="a.txt")
    create_run(tmp_path / "run", old, Plan())
    assert as_recorded(with_model_tokenizer(old), tmp_path / "run") == old
    for asked, path in (
        (with_model_tokenizer(old), tmp_path / "new"),
        (recipe(model, tokenizer="x"), tmp_path / "run"),
    ):
        assert as_recorded(asked, path) == asked


def test_another_tokenizer_is_other_data_even_if_it_gives_the_same_tokens(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Who is there? " * 50)
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    section = {"source": "text", "path": str(tmp_path / "a.txt"), "tokenizer": str(folder), "seq_len": 8}
    before = TokenShards.open(prepare(DataSection.model_validate(section), cache=tmp_path / "cache"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    after = TokenShards.open(prepare(DataSection.model_validate(section), cache=tmp_path / "cache"))
    assert before.path != after.path
    assert before.meta.shards == after.meta.shards
    assert before.digest != after.digest


def test_inspect_shows_one_sample_with_what_is_learnt(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(row) + "\n") * 5)
    data = {"source": "chat", "path": str(tmp_path / "chat.jsonl"), "seq_len": 128}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": {"path": str(model)}, "data": data}))
    assert main(["data", "inspect", str(tmp_path / "mine.yaml"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    sample, learnt = facts["sample"], [each for each in facts["sample"]["spans"] if each["learnt"]]
    assert [sample["text"][each["start"] : each["stop"]] for each in learnt] == ["Nobody.<|im_end|>"]
    assert sample["text"].endswith("<|im_start|>assistant\nNobody.<|im_end|>\n")
    assert (sample["template"], facts["notices"]) == ("model", [])
    assert main(["data", "inspect", str(tmp_path / "mine.yaml")]) == 0
    assert "assistant\n⟦Nobody.<|im_end|>⟧\n" in capsys.readouterr().out
    assert main(["data", "inspect", str(tmp_path / "mine.yaml"), "--set", "data.tokenizer=bytes", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["notices"] == ["the tokenizer has no chat template: conversations are written as plain; "
                                "data.samples.template names another"]  # fmt: skip
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["data", "inspect", str(tmp_path / "mine.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[1;30;42mNobody.<|im_end|>\x1b[0m" in shown
