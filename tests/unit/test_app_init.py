"""`trimaran init`: for every kind of data it writes a recipe that passes `train --dry-run`."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests import forked
from tests.cases import quick_or_slow
from trimaran.app import (
    DataFacts,
    ModelFacts,
    check_all_data,
    choose_values,
    learning_rate,
    look_at_data,
    look_at_model,
    main,
)
from trimaran.core import UserError, parse_recipe
from trimaran.machine import parse_cluster
from trimaran.models import VLM_PRESETS, vlm_to_disk

WORDS = "the quick brown fox jumps over the lazy dog "
CLUSTER = ["--cluster", "1xH100"]  # planned, not used: a CPU would be measured


def language_model(folder: Path) -> Path:
    from transformers import LlamaConfig  # noqa: PLC0415

    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024)  # fmt: skip
    config.save_pretrained(folder)
    from tests.model_folders import write_model_tokenizer  # noqa: PLC0415

    return write_model_tokenizer(folder, "qwen2.5")


def vision_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(vlm_to_disk(VLM_PRESETS["tiny"])))
    return folder


def chats(count: int = 60) -> list[dict[str, Any]]:
    turns = ({"role": "user", "content": "question?"}, {"role": "assistant", "content": WORDS})
    return [{"messages": list(turns)} for _ in range(count)]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    return written(path, "\n".join(map(json.dumps, rows)))


def picture(number: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (56, 56), (number * 5, 9, 9)).save(data, "PNG")
    return data.getvalue()


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets  # noqa: PLC0415 - one kind of data needs it

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def image_folder(path: Path) -> Path:
    path.mkdir()
    for number in range(12):
        (path / f"{number}.png").write_bytes(picture(number))
        (path / f"{number}.txt").write_text(f"a square, number {number}")
    return path


def tar_file(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for number in range(12):
            for name, data in ((f"{number}.png", picture(number)), (f"{number}.txt", b"a square")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def notes(path: Path) -> Path:
    path.mkdir()
    for number in range(8):
        (path / f"{number}.md").write_text(WORDS * 60)
    return path


TEXTS = [{"id": number, "text": WORDS * 4} for number in range(60)]
KINDS: dict[str, tuple[Callable[[Path], Path], str, bool]] = {
    "chat lines": (lambda p: lines(p / "chat.jsonl", chats()), "chat", False),
    "instructions in one list": (
        lambda p: written(p / "a.json", json.dumps([{"instruction": "do", "output": WORDS}] * 60)),
        "chat",
        False,
    ),
    "instructions with a context": (
        lambda p: lines(p / "dolly.jsonl", [{"instruction": "do", "context": "here", "response": WORDS}] * 60),
        "chat",
        False,
    ),
    "a table of instructions": (
        lambda p: written(p / "a.csv", "instruction,output\n" + f'"do, it","{WORDS}"\n' * 60),
        "chat",
        False,
    ),
    "a table of texts": (
        lambda p: written(p / "a.tsv", "id\tstory\n" + f"7\t{WORDS}\n" * 60),
        "datasets",
        False,
    ),
    "lines with a text in an object": (
        lambda p: lines(p / "n.jsonl", [{"id": "7", "data": {"text": WORDS}}] * 60),
        "jsonl",
        False,
    ),
    "tokens in a raw file, with ends": (
        lambda p: written(p / "train.bin", ("\1\0" * 49 + "\x3f\1") * 40),
        "nanogpt",
        False,
    ),
    "text lines": (lambda p: lines(p / "text.jsonl", TEXTS), "jsonl", False),
    "lines with another field": (lambda p: lines(p / "s.jsonl", [{"id": "7", "story": WORDS}] * 60), "jsonl", False),
    "a text file": (lambda p: written(p / "book.txt", WORDS * 400), "text", False),
    "a folder of text": (lambda p: notes(p / "notes"), "text", False),
    "parquet with text": (lambda p: parquet(p / "t.parquet", TEXTS), "datasets", False),
    "parquet with chats": (lambda p: parquet(p / "c.parquet", chats()), "parquet", False),
    "a saved dataset": (lambda p: saved(p / "saved", TEXTS), "datasets", False),
    "a saved dataset with chats": (lambda p: saved(p / "saved", chats()), "chat", False),
    "images with captions": (lambda p: image_folder(p / "images"), "image-folder", True),
    "a tar file of images": (lambda p: tar_file(p / "shard.tar"), "webdataset", True),
}


QUICK_KINDS = ("chat lines", "tokens in a raw file, with ends", "a folder of text", "parquet with chats",
               "images with captions")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_recognised(kind: str, tmp_path: Path) -> None:
    write, source, images = KINDS[kind]
    data = write(tmp_path)
    facts = look_at_data(data.name, data, None)
    assert (facts.source, facts.has_images) == (source, images)


@pytest.mark.parametrize("kind", quick_or_slow(KINDS, lambda kind: kind in QUICK_KINDS))
def test_the_recipe_for_every_kind_of_data_passes_the_dry_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, source, images = KINDS[kind]
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path).name
    model = (vision_model if images else language_model)(tmp_path / "model").name
    assert main(["init", "--model", model, "--data", data, "--out", "new.yaml", "--yes", "--json", *CLUSTER]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["data"]["source"] == source
    assert answer["data"]["is_exact"] is (source != "nanogpt")
    assert answer["prediction"]["fits"]
    text = Path("new.yaml").read_text()
    recipe = parse_recipe(text, name="new.yaml")
    assert recipe.data.seq_len <= answer["model"]["max_seq_len"]
    assert text.count("# ") > 10
    assert all(len(line) <= 120 for line in text.splitlines()[3:])
    assert main(["train", "new.yaml", "--dry-run", "--json"]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted({model, data, "new.yaml"})


def test_nothing_is_overwritten_or_asked_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    language_model(tmp_path / "model")
    lines(tmp_path / "chat.jsonl", chats())
    monkeypatch.setattr("sys.stdin", io.StringIO())
    arguments = ["init", "--model", "model", "--data", "chat.jsonl", *CLUSTER]
    assert main(arguments) == 2
    assert "A025: there is no terminal" in capsys.readouterr().err
    assert main(["init", "--model", "model", "--yes"]) == 2
    assert "A025: --data is missing" in capsys.readouterr().err
    Path("mine.yaml").write_text("name: precious\n")
    assert main([*arguments, "--yes", "--out", "mine.yaml"]) == 2
    assert "A026" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "name: precious\n"
    assert main(["init", "--model", "modle", "--data", "chat.jsonl", "--yes"]) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err
    assert main(["init", "--model", "model", "--data", "chats.jsonl", "--yes"]) == 2
    assert "did you mean 'chat.jsonl'?" in capsys.readouterr().err


REJECTED, CHOSEN = [{"role": "assistant", "content": each} for each in ("rude", "polite")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "polite", "rejected": "a longer and ruder answer"},
        {"prompt": chats(1)[0]["messages"][:1], "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"chosen": chats(1)[0]["messages"], "rejected": chats(1)[0]["messages"]},
        {"conversations": chats(1)[0]["messages"][:1], "chosen": CHOSEN, "rejected": REJECTED},
        {"messages": chats(1)[0]["messages"], "rejected_response": "rude"},
        {"instruction": "hi", "input": "", "chosen": "polite", "rejected": "rude"},
        {"question": "hi", "response_chosen": "polite", "response_rejected": "rude"},
        {"prompt": "hi", "completion": "rude", "label": False},
        {"prompt": "hi", "completion": "rude", "label": "False"},
        {"prompt": "hi", "completion": "rude", "label": 0},
        {"messages": chats(1)[0]["messages"], "label": True},
    ],
    ids=lambda row: ", ".join(row),
)
def test_preference_data_is_never_learnt_as_text(tmp_path: Path, row: dict[str, Any]) -> None:
    for data in (lines(tmp_path / "dpo.jsonl", [row] * 3), parquet(tmp_path / "dpo.parquet", [row] * 3)):
        with pytest.raises(UserError, match="preference data") as refused:
            look_at_data(data.name, data, None)
        assert refused.value.code == "T077"
        assert "data.text_field to chosen" in refused.value.fix


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "What is two plus two?", "solution": "Two and two are four."}, "solution looks like"),
        ({"inputs": "What is two plus two?", "targets": "four"}, "targets looks like"),
        ({"a": "What is two plus two?", "b": "Two and two are four."}, "the text is not in one field: there are a, b"),
        ({"user": "Who is there?", "assistant": "Nobody but the cat."}, "assistant looks like"),
        ({"translation": {"en": "Hello there", "de": "Hallo du"}}, "there are translation.en, translation.de"),
        ({"data": {"prompt": "Who is it?", "chosen": "Me.", "rejected": "Nobody, go away."}}, "data.prompt looks like"),
        ({"id": "a7", "segments": [{"text": "Who is there?", "label": False}]}, "there are segments"),
        ({"id": "a7", "score": 3}, "no field holds text"),
        ({"id": "a7", "a": chats(1)[0]["messages"], "b": chats(1)[0]["messages"]}, "hold conversations: a, b"),
    ],
    ids=lambda each: ", ".join(each) if isinstance(each, dict) else "",
)
def test_a_part_of_a_row_is_not_taken_for_its_text(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    data = lines(tmp_path / "a.jsonl", [row] * 3)
    with pytest.raises(UserError, match=reason) as refused:
        look_at_data(data.name, data, None)
    assert refused.value.code == "T065"


@pytest.mark.parametrize(
    ("row", "field", "is_chat"),
    [
        ({"id": "a7", "url": "http://example.org/a/long/address/of/it", "story": "A fox came."}, "story", False),
        ({"title": "The fox and the cat", "story": WORDS}, "story", False),
        ({"id": "a7", "正文": "很久以前有一只狐狸"}, "正文", False),
        ({"id": "a7", "sequence": "ACGTACGT"}, "sequence", False),
        ({"id": "a7", "tags": ["animals"], "story": WORDS}, "story", False),
        ({"id": "a7", "dialog": chats(1)[0]["messages"]}, "dialog", True),
        ({"id": "a7", "data": chats(1)[0]}, "data.messages", True),
    ],
    ids=lambda each: ", ".join(each) if isinstance(each, dict) else None,
)
def test_the_field_with_the_text_is_found_and_named(
    tmp_path: Path, row: dict[str, Any], field: str, is_chat: bool
) -> None:
    data = lines(tmp_path / "a.jsonl", [row] * 3)
    facts = look_at_data(data.name, data, None)
    assert (facts.text_field, facts.is_chat) == (field, is_chat)
    assert f"field {field})" in facts.describe()


def test_the_length_of_a_conversation_counts_its_tools(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": WORDS * 20, "parameters": {}}}
    without, with_tools = (
        look_at_data(data.name, data, None).longest_tokens
        for data in (
            lines(tmp_path / "a.jsonl", chats(3)),
            lines(tmp_path / "b.jsonl", [{**row, "tools": [tool]} for row in chats(3)]),
        )
    )
    assert with_tools > without + len(WORDS) * 20


def test_half_of_a_question_and_its_answer_is_no_text(tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", [{"instruction": "do it at once, and do it well", "reply": "no"}])
    with pytest.raises(UserError, match="instruction looks like a part of a question") as refused:
        look_at_data(data.name, data, None)
    assert refused.value.code == "T065"


def test_images_need_a_model_that_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    language_model(tmp_path / "model")
    image_folder(tmp_path / "images")
    assert main(["init", "--model", "model", "--data", "images", "--yes", *CLUSTER]) == 2
    assert "T051" in capsys.readouterr().err


def test_the_first_method_that_fits_the_cluster_is_taken(tmp_path: Path) -> None:
    from transformers import LlamaConfig  # noqa: PLC0415

    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)  # fmt: skip
    config.save_pretrained(tmp_path / "big")
    found = look_at_model(str(tmp_path / "big"))
    model = ModelFacts(**{name: getattr(found, name) for name in found.__slots__} | {"has_weights": True})
    data = DataFacts(named="chat.jsonl", source="chat", is_chat=True, num_samples=5000, is_exact=True,
                     median_tokens=400, longest_tokens=1800)  # fmt: skip
    chosen = {
        name: choose_values(model, data, parse_cluster(name), method=None, cluster_name=name)
        for name in ("8xH100", "1xA100-40GB")
    }
    assert chosen["8xH100"].method == "full"
    assert chosen["1xA100-40GB"].method in ("lora", "qlora")
    assert chosen["1xA100-40GB"].lr == 10 * 2 * chosen["8xH100"].lr
    assert chosen["8xH100"].global_batch % 8 == 0
    assert chosen["8xH100"].seq_len == 2048


def test_learning_rates_fall_with_size_and_rise_for_adapters() -> None:
    full = [learning_rate("full", size, has_weights=True) for size in (10**9, 8 * 10**9, 70 * 10**9)]
    assert full == sorted(full, reverse=True)
    assert learning_rate("lora", 8 * 10**9, has_weights=True) > full[0]


def test_many_samples_are_estimated_and_bad_ones_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "chat.jsonl", chats(4000))
    facts = look_at_data("chat.jsonl", path, None)
    assert not facts.is_exact
    assert facts.num_samples == pytest.approx(4000, rel=0.02)
    path.write_text("\n".join([*map(json.dumps, chats(20)), '{"messages": []}']))
    assert look_at_data("chat.jsonl", path, None).num_bad == 1


@pytest.mark.slow
def test_a_written_recipe_trains(tmp_path: Path) -> None:
    language_model(tmp_path / "model")
    lines(tmp_path / "chat.jsonl", chats())
    for arguments in (
        ["init", "--model", "model", "--data", "chat.jsonl", "--cluster", "1xcpu", "--out", "new.yaml", "--yes"],
        ["train", "new.yaml", "--warm", "--set", "train.steps=2", "--json", "--quiet"],
    ):
        done = forked.run("trimaran", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 2


def test_init_and_the_dry_run_refuse_the_data_that_train_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    rows = [json.dumps(row) for row in chats(43)]
    language_model(tmp_path / "model")
    written(tmp_path / "chat.jsonl", "\n".join(rows))
    init = ["init", "--model", "model", "--data", "chat.jsonl", "--yes", "--cluster", "2xcpu", "--out"]
    assert main([*init, "good.yaml"]) == 0
    assert "data.epochs 1: " in capsys.readouterr().err
    assert main(["train", "good.yaml", "--dry-run"]) == 0
    assert "data.epochs 1: " in capsys.readouterr().err
    for number in (7, 31):
        rows[number] = rows[number][:-9]
    written(tmp_path / "chat.jsonl", "\n".join(rows))
    refused = [main([*init, "bad.yaml"]), main(["train", "good.yaml", "--dry-run"]), main(["train", "good.yaml"])]
    assert refused == [2, 2, 2]
    assert capsys.readouterr().err.count("T031: 2 of 43 samples of chat are bad") == 3
    assert not Path("bad.yaml").exists()
    recipe, shown = parse_recipe(Path("good.yaml").read_text(), name="good.yaml"), list[str]()
    check_all_data(recipe, shown.append, max_bytes=1000)
    assert "KiB: only the first lines of its files are checked" in "".join(shown)
