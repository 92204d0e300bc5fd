"""`trimaran data inspect`: the contents of a recipe's data."""

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from trimaran.app import main


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a recipe with two sources, one with images and a bad line, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    Image.new("RGB", (64, 32)).save("a.png")
    rows = [{"image": "a.png", "question": f"number {number}?", "answer": "yes"} for number in range(19)]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "[broken\n")
    Path("notes.txt").write_text("three hulls, one boat. " * 40)
    mixture = [
        {"name": "talk", "source": "chat", "path": "chat.jsonl", "epochs": 2},
        {"name": "notes", "source": "text", "path": "notes.txt"},
    ]
    data = {"mixture": mixture, "seq_len": 128, "holdout": 0.1, "samples": {"max_bad": 0.1}}
    Path("mixed.yaml").write_text(yaml.safe_dump({"model": {"family": "vlm"}, "data": data}))
    return "mixed.yaml"


def test_the_counts_add_up(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", recipe, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    talk, notes = facts["sources"]
    assert (talk["samples"], talk["pictures"], talk["bad"]) == (19, 19, 1)
    assert (notes["pictures"], notes["bad"]) == (0, 0)
    assert notes["samples"] == 8  # 921 tokens in parts of 128 that overlap by one
    assert talk["pass"] == 2 * (19 - 2)  # a tenth is held out
    assert facts["held_out"] == 3
    assert sum(each["samples"] for each in facts["lengths"]) == facts["samples"] == 27
    assert facts["picture_sides"]["width"] == [64, 64, 64]
    assert 0.8 < facts["rows"]["filled"] <= 1
    assert [entry["source"] for entry in facts["bad"]] == ["talk"]
    assert facts["bad"][0]["where"].endswith("chat.jsonl:20")


def test_the_text_output_shows_sources_lengths_and_bad_samples(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", recipe]) == 0
    shown = capsys.readouterr().out
    for word in ("talk", "notes", "█", "% full", "bad samples", "chat.jsonl:20: this is not JSON"):
        assert word in shown


def test_plain_text_is_shown_like_shards(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [word for field in ("source=text", "path=notes.txt") for word in ("--set", f"data.{field}")]
    assert main(["data", "inspect", *settings, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == 1


def test_too_many_bad_samples_give_a_message_without_a_traceback(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "inspect", recipe, "--set", "data.samples.max_bad=0.01"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("T031: 1 of 20 samples of talk are bad")
    assert "set data.samples.max_bad to 0.05" in error
