"""`trimaran eval`: its loss is the trainer's own, for a run, a checkpoint and a Hugging Face folder."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity import plan_for, train_run
from trimaran.app import main
from trimaran.core import parse_recipe
from trimaran.data import ByteTokenizer, load_tokenizer, token_byte_lengths
from trimaran.runs import RunDirectory, read_evaluations
from trimaran.serve import find_weights, open_trained

RECIPE = """
name: small
model: {preset: tiny, shape: {layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 48}}
data: {source: text, path: PATH, seq_len: 32, holdout: 0.2}
train: {steps: 4, global_batch: 4, evaluate: {every: 2, batches: 3}, sample: {tokens: 0}}
checkpoint: {every: 2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of two ranks that the real worker has trained, with checkpoints at its second and fourth step."""
    folder = tmp_path_factory.mktemp("eval")
    text = " ".join(f"{number} is {'even' if number % 2 == 0 else 'odd'}." for number in range(2000))
    (folder / "numbers.txt").write_text(text)
    recipe = parse_recipe(RECIPE.replace("PATH", str(folder / "numbers.txt")), name="test")
    (folder / "runs").mkdir()
    return train_run(recipe, plan_for(recipe, grad_accum=1, dp_shard=2), folder / "runs")


def evaluate(capsys: Any, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def reported(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """Return what the trainer has reported, by step."""
    lines = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines if line["kind"] == "evaluation"}


@pytest.fixture(autouse=True)
def _own_cache(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMARAN_CACHE", str(run.path.parents[1] / "cache"))


def test_the_loss_is_that_of_the_trainer(run: RunDirectory, capsys: Any) -> None:
    events = reported(run)
    assert sorted(events) == [2, 4]
    for step in sorted(events):
        found = evaluate(capsys, str(run.path), "--step", str(step))
        assert found["loss"] == pytest.approx(events[step]["loss"], rel=1e-6)
        assert found["tokens"] == events[step]["tokens"]
        assert found["step"] == step
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=0.02)
    assert evaluate(capsys, str(run.path))["loss"] == pytest.approx(events[4]["loss"], rel=1e-6)
    assert evaluate(capsys, str(run.path / "checkpoints" / "step-00000002"))["step"] == 2
    more = evaluate(capsys, str(run.path), "--batches", "5")
    assert more["tokens"] > events[4]["tokens"]


OTHERS = {
    "bf16": ("model: {preset: tiny, shape: {layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 48}}\n"
             "data: {source: text, path: PATH, seq_len: 32, holdout: 0.2, isolate_documents: true}\n",
             {"precision": "bf16", "tp": 2}),
    "experts": ("model: {preset: tiny-moe, shape: {layers: 1, hidden: 32, heads: 2, kv_heads: 2}}\n"
                "data: {source: text, path: PATH, seq_len: 32, holdout: 0.2}\n", {"ep": 2, "dp_shard": 2}),
    "scenes": ("model: {family: perception}\ndata: {source: scenes, holdout: 0.2}\n", {"dp_replicate": 2}),
    "images": ("model: {family: vlm}\ndata: {source: shapes, seq_len: 128, holdout: 0.2}\n", {"dp_replicate": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_loss_is_that_of_the_trainer_for_other_plans_and_models(
    name: str, run: RunDirectory, tmp_path: Path, capsys: Any
) -> None:
    text, fields = OTHERS[name]
    path = str(run.path.parents[1] / "numbers.txt")
    train = "train: {steps: 2, global_batch: 4, evaluate: {batches: 3}, sample: {tokens: 0}}\ncheckpoint: {every: 2}\n"
    recipe = parse_recipe(text.replace("PATH", path) + train, name="test")
    (tmp_path / "runs").mkdir()
    other = train_run(recipe, plan_for(recipe, grad_accum=1, **fields), tmp_path / "runs")
    found, expected = evaluate(capsys, str(other.path), "--step", "2"), reported(other)[2]
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-3 if name == "bf16" else 1e-6)
    assert found["tokens"] == expected["tokens"]
    assert found.get("accuracy") == expected.get("accuracy")
    assert found.get("accuracy_counts") == expected.get("accuracy_counts")


def test_an_accuracy_is_of_the_samples_that_are_held_out_and_not_of_their_repetitions(
    run: RunDirectory, tmp_path: Path, capsys: Any
) -> None:
    pairs = [{"prompt": f"{number} + 1 is", "completion": f"{number + 1}"} for number in range(10, 50)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe = parse_recipe(RECIPE.replace("source: text, path: PATH", f"source: chat, path: {tmp_path}/pairs.jsonl")
                          .replace("holdout: 0.2", "holdout: 0.05").replace("seq_len: 32", "seq_len: 256"),
                          name="test")  # fmt: skip
    (tmp_path / "runs").mkdir()
    other = train_run(recipe, plan_for(recipe, grad_accum=1, dp_replicate=2), tmp_path / "runs")
    counts = reported(other)[4]["accuracy_counts"]
    assert counts["answers"] == 2  # of 40 samples; 12 rows are evaluated
    assert evaluate(capsys, str(other.path))["accuracy_counts"] == counts


def test_results_are_kept_in_the_run_and_shown_in_the_model_card(
    run: RunDirectory, tmp_path: Path, capsys: Any
) -> None:
    found = evaluate(capsys, str(run.path), "--step", "2")
    kept = read_evaluations(run)[-1]
    assert (kept["step"], kept["loss"], kept["data"]) == (2, found["loss"], "held-out")
    with run.evaluations.open("a") as file:
        file.write("{torn\n[]\n")
    assert read_evaluations(run)[-1] == kept
    assert main(["export", str(run.path), "--step", "2", "--out", str(tmp_path / "hf"), "--no-check"]) == 0
    capsys.readouterr()
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"loss {found['loss']:.4f}" in card
    assert "SHA-256 of the data" in card
    assert "model-index" in card


def test_a_hugging_face_folder_is_evaluated_on_a_text(run: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "more.txt").write_text("2002 is even. 2003 is odd. " * 20)
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "2002 is even. 2003 is odd. " * 20}) + "\n")
    found = evaluate(capsys, str(run.model), "--data", str(tmp_path / "more.txt"), "--seq-len", "32")
    of_run = evaluate(capsys, str(run.path), "--data", str(tmp_path / "more.txt"))
    lines = evaluate(capsys, str(run.model), "--data", str(tmp_path / "more.jsonl"), "--seq-len", "32")
    assert found["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    assert found["loss"] == pytest.approx(lines["loss"], rel=1e-6)
    assert found["tokens"] == 540 // 32 * 32
    assert found["run_dir"] is None
    assert (
        evaluate(capsys, str(run.model), "--data", str(tmp_path / "more.txt"), "--seq-len", "32", "--batches", "1")[
            "tokens"
        ]
        == 128
    )


def test_mistakes_are_explained(run: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    assert evaluate(capsys, str(run.model), code=2)["error"]["code"] == "A045"
    assert evaluate(capsys, str(run.path), "--data", str(tmp_path / "none.txt"), code=2)["error"]["code"] == "A046"
    assert evaluate(capsys, str(run.path), "--limit", "3", code=2)["error"]["code"] == "A001"
    assert evaluate(capsys, str(run.path), "--tasks", "x", "--data", "y", code=2)["error"]["code"] == "A001"


def test_people_read_one_line(run: RunDirectory, capsys: Any) -> None:
    assert main(["eval", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step 4 of ")
    assert "bits per byte" in shown


def test_the_bytes_of_tokens_are_known(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    lengths = token_byte_lengths(ByteTokenizer(), 300)
    assert lengths is not None
    assert (lengths[:256].sum(), lengths[256:].sum()) == (256, 0)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["</s>"], show_progress=False, initial_alphabet=alphabet
    )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(["über den Dächern ist es schön"] * 4, trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "schöne Dächer, 数据"
    lengths = token_byte_lengths(tokenizer, tokenizer.vocab_size)
    assert lengths is not None
    assert lengths[np.array(tokenizer.encode(text))].sum() == len(text.encode())
    assert lengths[tokenizer.end_id] == 0
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "ein Wort": 1}, unk_token="</s>"))
    words.save(str(tmp_path / "words.json"))
    assert token_byte_lengths(load_tokenizer(str(tmp_path / "words.json")), 2) is None


def test_tasks_need_lm_eval(run: RunDirectory, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    error = evaluate(capsys, str(run.path), "--tasks", "numbers", code=2)["error"]
    assert (error["code"], "trimaran[eval]" in error["fix"]) == ("K071", True)


TASK = """
task: numbers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
doc_to_choice: ["even.", "odd."]
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@pytest.mark.slow
def test_a_task_of_ones_own_is_run(
    run: RunDirectory, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"question": f"{number} is", "label": number % 2} for number in range(40, 52)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "numbers.yaml").write_text(TASK.replace("DATA", str(tmp_path / "rows.jsonl")))
    found = evaluate(capsys, str(run.path), "--tasks", "numbers", "--task-folder", str(tmp_path / "tasks"))
    assert found["samples"] == len(rows)
    trained = open_trained(find_weights(str(run.path), None), "fp32", cache=None)
    chosen = [max((0, 1), key=lambda each: log_probability(trained, row["question"], CHOICES[each])) for row in rows]
    right = sum(choice == row["label"] for choice, row in zip(chosen, rows, strict=True))
    assert found["tasks"]["numbers"]["acc"] == pytest.approx(right / len(rows))
    error = evaluate(capsys, str(run.path), "--tasks", "no_such", "--task-folder", str(tmp_path / "tasks"), code=2)
    assert error["error"]["code"] == "A046"


CHOICES = (" even.", " odd.")


@torch.no_grad()
def log_probability(trained: Any, context: str, continuation: str) -> float:
    """Return the log-probability of the bytes of `continuation`, each from its own forward."""
    ids, total = list(context.encode()), 0.0
    for byte in continuation.encode():
        logits = trained.network.forward({"tokens": torch.tensor([ids])})[0][0, -1]
        total += logits.log_softmax(-1)[byte].item()
        ids.append(byte)
    return total


@pytest.mark.slow
def test_lm_eval_gets_whole_texts_and_continuations(run: RunDirectory, capsys: Any) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance  # noqa: PLC0415  # pyrefly: ignore[missing-import]

    from trimaran.serve import HarnessModel  # noqa: PLC0415

    trained = open_trained(find_weights(str(run.path), None), "fp32", cache=None)
    model = HarnessModel(trained)

    def request(kind: str, *arguments: Any) -> Any:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    text = "12 is even. 13 is odd."
    (rolling,) = model.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    expected = log_probability_after_end(trained, text)
    assert rolling == pytest.approx(expected, rel=1e-5)
    (continued,) = model.generate_until([request("generate_until", "12 is", {"until": ["\n\n"], "max_gen_toks": 12})])
    assert main(["generate", str(run.path), "--prompt", "12 is", "--greedy", "--tokens", "12", "--json"]) == 0
    assert continued == json.loads(capsys.readouterr().out)["completion"]
    (cut,) = model.generate_until([request("generate_until", "12 is", {"until": [continued[3]], "max_gen_toks": 12})])
    assert cut == continued[: continued.index(continued[3])]


@torch.no_grad()
def log_probability_after_end(trained: Any, text: str) -> float:
    """Return the log-probability of a whole text after the end of another document."""
    ids = torch.tensor([[256, *text.encode()]])
    losses = trained.network.forward({"tokens": ids[:, :-1]})[0].log_softmax(-1)
    return losses.gather(-1, ids[:, 1:, None]).double().sum().item()
