"""No mutated input of any command ends in a traceback: thousands of damaged recipes, settings, lines and run files.

Every command runs in this process, up to where it would start ranks. The inputs are the same in every run: a mutation
is a function of its command, file and number. `make test` takes one of `EVERY`; `make slow` takes all. Commands that
start a run get `true` for an interpreter: their supervisor ends at once.
"""

import contextlib
import io
import json
import logging
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.cpu_rates import give_cpu_rates
from tests.forked import run
from tests.mutations import PYTHON_VALUES, VALUES, mutate
from trimaran.app import (
    FindingsPoller,
    RunState,
    draw,
    explain_failure,
    find_run,
    follow,
    main,
    open_console,
    show_log,
    status_lines,
    summarise,
)
from trimaran.core import UserError
from trimaran.runs import IncidentLog, RunDirectory

EVERY = 96  # `make test` runs one of so many inputs
LIMIT_SECONDS = 60  # of one command: an input must not make it hang
MAX_ERROR_CHARACTERS = 3000  # of a message about a wrong input: a person reads it

RECIPE = """\
name: mutated
model: {family: decoder, preset: tiny, shape: {layers: 2}}
data:
  source: jsonl
  path: corpus.jsonl
  text_field: text
  seq_len: 64
  holdout: 0.1
train:
  steps: 10
  global_batch: 8
  lr: 1.0e-3
  precision: {lm_head: fp32}
  schedule: {kind: cosine, warmup_steps: 2}
  optimizer: {beta1: 0.9, states: fp32, towers: {}}
  evaluate: {every: 5, batches: 1}
  sample: {prompt: "def ", tokens: 8}
checkpoint: {every: 5, keep: 2}
faults: {ranks: [1, 4], hang_seconds: 6.0}
telemetry: {profile: "2:4", profile_ranks: "0", prometheus: {port: 0}}
cluster: 2xcpu
plan:
  mesh: {dp_replicate: 2}
  micro_batch: 2
"""
CLUSTER = """\
device: H100
num_nodes: 2
devices_per_node: 2
memory_gib: 80
links:
  - {name: nvlink, devices: 2, gb_per_second: 450, latency_us: 2.5}
  - {name: network, gb_per_second: 50, reached: {all_reduce: 40}}
calibration: {bf16_tflops: 600, memory_gb_per_second: 3000, collectives: {devices: 2, latency_us: 9}}
"""
PREDICT_LINE = {
    "id": 1,
    "model": {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 32000, "seq_len": 512},
    "cluster": {"gpu": "H100", "gpus": 8},
    "plan": {"mesh": {"dp": 4, "tp": 2}, "global_batch": 32, "micro_batch": 2, "sharding": "parameters"},
}
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 320,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command, the file that is mutated, and how many mutations there are in all."""

    name: str
    file: str
    command: str
    count: int


RUN_JOURNALS = ("metrics.jsonl", "events/rank-0.jsonl", "incidents.jsonl", "attempts.jsonl")
CASES = (
    Case("plan", "recipe.yaml", "plan recipe.yaml --json", 300),
    Case("plan shown", "recipe.yaml", "plan recipe.yaml", 80),
    Case("train", "recipe.yaml", "train recipe.yaml --run-dir new --no-check --quiet", 300),
    Case("train --dry-run", "recipe.yaml", "train recipe.yaml --dry-run", 100),
    Case("doctor --recipe", "recipe.yaml", "doctor --quick --recipe recipe.yaml", 60),
    Case("emit", "recipe.yaml", "plan recipe.yaml --set plan=auto --set train.precision={} --cluster 2xH100 "
         "--emit torchtitan --output emitted", 60),
    Case("cluster", "cluster.yaml", "plan tiny --cluster cluster.yaml --json", 250),
    Case("calibration", "calibration.json", "plan tiny --cluster measured.yaml --json", 100),
    Case("predict", "plans.jsonl", "predict plans.jsonl --json", 300),
    Case("predict shown", "plans.jsonl", "predict plans.jsonl", 60),
    Case("config.json", "llama/config.json", "plan llama --cluster 8xH100 --json", 300),
    Case("hf model", "llama/config.json",
         "train --set model.family=hf --set model.path=llama --set data.seq_len=32 --dry-run", 60),
    Case("jsonl data", "corpus.jsonl", "data inspect recipe.yaml --json", 120),
    Case("tokenizer", "tokenizer.json", "data inspect recipe.yaml --set data.tokenizer=tokenizer.json", 60),
    Case("chat data", "chat.jsonl", "data inspect chat.yaml --json", 120),
    Case("parquet data", "rows.parquet", "data inspect parquet.yaml --json", 60),
    Case("shards", "shards/meta.json", "data info shards --verify --json", 80),
    Case("shards in a run", "shards/meta.json", "train shards.yaml --run-dir new --no-check --quiet", 40),
    Case("tokens", "shards/*.tokens", "data info shards --verify", 20),
    *(Case(f"watch {file}", f"run/{file}", "watch run --json", 50) for file in RUN_JOURNALS),
    *(Case(f"watch shown {file}", f"run/{file}", "watch run", 40) for file in RUN_JOURNALS),
    *(Case(f"incidents {file}", f"run/{file}", "incidents run", 40) for file in RUN_JOURNALS),
    Case("incidents --json", "run/incidents.jsonl", "incidents run --json", 60),
    *(Case(f"report {file}", f"run/{file}", "report run --out page.html", 40) for file in RUN_JOURNALS),
    *(Case(f"report --json {file}", f"run/{file}", "report run --json", 20) for file in RUN_JOURNALS),
    *(Case(f"doctor {file}", f"run/{file}", "doctor run --json", 50) for file in RUN_JOURNALS),
    *(Case(f"doctor shown {file}", f"run/{file}", "doctor run", 20) for file in RUN_JOURNALS),
    *(Case(f"{verb} samples", "run/telemetry/node-0.jsonl", f"{verb} run --json", 30)
      for verb in ("doctor", "report", "watch")),
    *(Case(f"{verb} {file}", f"run/{file}", f"{verb} run --json", 35) for file in ("recipe.yaml", "plan.json")
      for verb in ("watch", "report", "doctor", "generate --tokens 2", "export --out exported", "profile")),
    *(Case(f"resume {file}", f"run/{file}", "resume run --no-check --quiet --set train.steps=9", 60)
      for file in ("recipe.yaml", "plan.json", "attempts.jsonl", "events/rank-0.jsonl", "lease/term-*.json",
                   "checkpoints/step-*4/manifest.json", "checkpoints/step-*4/index.json")),
    Case("checkpoints list", "run/checkpoints/step-*4/manifest.json", "checkpoints run --json", 60),
    Case("checkpoints shown", "run/checkpoints/step-*4/manifest.json", "checkpoints run", 60),
    *(Case(f"checkpoints verify {file}", f"run/checkpoints/step-*4/{file}", "checkpoints verify run 4", 40)
      for file in ("manifest.json", "index.json", "rank-00000.safetensors")),
    *(Case(f"checkpoints {verb} {file}", f"run/checkpoints/step-*4/{file}", f"checkpoints {verb}", 30)
      for file in ("manifest.json", "index.json")
      for verb in ("compare run 2 4", "prune run --keep 1 --dry-run")),
    *(Case(f"export {file}", f"run/{file}", "export run --out exported", 30)
      for file in ("checkpoints/step-*4/manifest.json", "checkpoints/step-*4/index.json",
                   "model/trimaran-tokenizer.json")),
    *(Case(f"generate {file}", f"run/model/{file}", "generate run --tokens 2 --json", 30)
      for file in ("config.json", "trimaran-tokenizer.json", "model.safetensors")),
    Case("import", "dcp/.metadata", "checkpoints import dcp --run-dir imported --recipe run/recipe.yaml", 40),
    Case("profile", "run/profiles/*", "profile run --json", 60),
    Case("profile --merge", "run/profiles/*", "profile run --merge", 40),
    Case("doctor profiles", "run/profiles/*", "doctor run --json", 20),
    Case("quarantine", "run/quarantine.jsonl", "report run --json", 30),
    *(Case(f"{verb} marker", "run/trimaran-run.json", f"{verb} run", 10) for verb in ("watch", "report", "incidents")),
)  # fmt: skip


SETTINGS, ENVIRONMENTS, ARGUMENTS = 400, 100, 400
FIELDS = (
    "train.steps", "train.global_batch", "train.lr", "train.seed", "model.shape.layers", "model.shape", "plan",
    "plan.mesh.tp", "plan.pipeline.stages", "plan.micro_batch", "plan.recompute", "data.seq_len", "data.path", "name",
    "model.preset", "model.path", "data.mixture", "faults.ranks", "telemetry.profile", "cluster", "checkpoint.every",
    "train.optimizer.towers", "data.epochs", "data.timeout_seconds", "model.family", "train.sample.prompt", "", ".",
    "a.b", "plan.micro_batches",
)  # fmt: skip
VARIABLES = (
    "OMP_NUM_THREADS", "TRIMARAN_CACHE", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "GLOO_SOCKET_IFNAME",
    "COLUMNS", "NO_COLOR", "TMPDIR", "HOME", "XDG_CACHE_HOME", "WORLD_SIZE+RANK", "LOCAL_WORLD_SIZE", "TERM",
    "PYTORCH_ALLOC_CONF",
)  # fmt: skip


ODD_ARGUMENTS = (
    "a" * 300, "a/" * 3000, "", "-", "/dev/null", "/dev/zero", "/proc/self/mem", "/proc/1/root", "~nobody-there/x", "~",
    "\udcff", "🙂", "..", "/", "*", "run/plan.json", "run/recipe.yaml/x", "a\nb", "--", "1e999", "nan", "-1", "9" * 400,
)  # fmt: skip
COMMANDS_WITH_ARGUMENT = (
    "watch @", "report @ --json", "incidents @", "checkpoints @", "checkpoints verify run @", "resume @", "generate @",
    "generate run --tokens @", "generate run --temperature @ --tokens 1", "generate run --tokens 2 --prompt @",
    "export @", "export run --out @", "export run --step @", "profile @", "profile run --ranks @", "plan @",
    "plan --cluster @", "plan tiny --cluster 8xH100 --tokens @", "plan tiny --cluster 8xH100 --price @ --tokens 1B",
    "plan tiny --emit @", "plan tiny --cluster 8xH100 --emit deepspeed --output @", "plan --seq-len @", "plan --top @",
    "plan --global-batch @", "train @ --dry-run", "train --dry-run --run-dir @", "train --dry-run --profile @",
    "predict @", "data info @", "data inspect @", "data pack --source jsonl --path @ --out packed",
    "data pack --source text --path corpus.jsonl --out packed/@", "checkpoints import @ --run-dir imported --recipe x",
    "data pack --source text --path corpus.jsonl --tokenizer @ --out packed", "checkpoints import dcp --run-dir @",
    "doctor --quick --recipe @", "doctor run --against @", "--@", "@", "schema @", "checkpoints compare run 2 @",
    "checkpoints prune run --keep @ --dry-run", "drill run --kill @", "doctor --quick --nodes 2 --node @",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one intact file of every kind, and a finished run of two ranks."""
    path = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("TRIMARAN_CACHE", str(path / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1,1")  # OpenMP's form for nested parallel regions
        give_cpu_rates(path / "cache")
        _write_inputs(path)
        _train(path)
        _write_run_files(RunDirectory(path / "run"))
        assert main(["export", "run", "--to", "dcp", "--out", "dcp"]) == 0
        assert main(["data", "pack", "--source", "jsonl", "--path", "corpus.jsonl", "--out", "shards"]) == 0
        patch.setattr(sys, "executable", shutil.which("true"))
        yield path


def watch_once() -> int:
    """Show both forms of what `watch run` shows, once: a mutation may make a finished run look alive."""
    run = find_run("run")
    state, console, poller = RunState(run), open_console(), FindingsPoller(run, at_once=True)
    show_log(state.refresh(), console)
    follow(state, console, has_ended=lambda: True, poller=poller)
    console.print(draw(state, width=100, height=40, extra=status_lines(state, poller)))
    if state.status in ("failed", "vanished"):
        return explain_failure(state, console, state.attempts.over or 1)
    summarise(state, console)
    return 0


def _write_inputs(path: Path) -> None:
    words = [f"def f_{number}(x): return x + {number}" for number in range(60)]
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "cluster.yaml").write_text(CLUSTER)
    (path / "measured.yaml").write_text("device: H100\ndevices_per_node: 2\ncalibration: calibration.json\n")
    (path / "calibration.json").write_text(json.dumps({"device": "H100", "bf16_tflops": 600.0, "shapes": {"a": 1.0}}))
    lines = [PREDICT_LINE | {"id": number} for number in range(3)]
    (path / "plans.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "llama").mkdir()
    (path / "llama/config.json").write_text(json.dumps(HF_CONFIG, indent=1))
    (path / "corpus.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    chats = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]} for word in words
    ]
    (path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (path / "chat.yaml").write_text("data: {source: chat, path: chat.jsonl, seq_len: 256}\n")
    (path / "parquet.yaml").write_text("data: {source: parquet, path: rows.parquet, seq_len: 256}\n")
    (path / "shards.yaml").write_text("data: {source: shards, path: shards, seq_len: 16}\ncluster: 2xcpu\n")
    _write_parquet(path / "rows.parquet", words)
    _write_tokenizer(path / "tokenizer.json", words)


def _write_parquet(path: Path, words: Sequence[str]) -> None:
    pq.write_table(pa.table({"text": list(words)}), path)


def _write_tokenizer(path: Path, words: Sequence[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.save(str(path))


def _train(path: Path) -> None:
    """Train a tiny model for four steps, for real: its run directory is what the commands read."""
    settings = ("model.preset=tiny", "model.shape={layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 32}",
                "train.steps=4", "checkpoint.every=2", "train.evaluate={every: 2, batches: 1}", "train.sample.tokens=2",
                "telemetry.profile=2:3", "telemetry.sample_seconds=0.2", "telemetry.details_every=1",
                "data={source: jsonl, path: corpus.jsonl, seq_len: 16, holdout: 0.2}", "cluster=2xcpu")  # fmt: skip
    words = [word for each in settings for word in ("--set", each)]
    run("trimaran", "train", "--no-check", "--quiet", "--run-dir", "run", *words, cwd=path, timeout=300, check=True)


def _write_run_files(run: RunDirectory) -> None:
    """Add the files that only an eventful run has."""
    log = IncidentLog(run)
    known = {
        "step": 2,
        "suspects": (1,),
        "victims": (0,),
        "evidence": {"signal": "SIGKILL", "log": ["x"], "section": "step"},
    }
    incident = log.notice("crash", "rank 1 was killed", **known)
    log.amend(
        incident, action="restarted", cost={"seconds_to_detect": 0.1, "seconds_to_recover": 2.0, "lost_steps": 1.0}
    )
    log.notice("straggler", "rank 1 is slow", step=3, suspects=(1,), action="continued", evidence={"ratio": 1.5})
    log.notice("numeric", "the loss was not finite", step=3, action="skipped")
    run.quarantine.write_text(json.dumps({"sample": 3, "reason": "bad", "step": 2}) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({case.command for case in CASES}))
def test_every_command_works_on_the_intact_files(command: str, folder: Path) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run_here(command.split())
    _remove_written(folder)
    assert code == 0, output.getvalue()


def _remove_written(folder: Path) -> None:
    for written in ("new", "exported", "imported", "emitted", "packed", "runs"):
        shutil.rmtree(folder / written, ignore_errors=True)


def _numbers(case: Case, every: int) -> range:
    return range(sum(case.name.encode()) % every, case.count, every)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_damaged_file_gives_no_traceback(case: Case, folder: Path) -> None:
    failures = [failure for number in _numbers(case, EVERY) if (failure := _try_file(case, number, folder))]
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_damaged_file_gives_a_traceback(case: Case, folder: Path) -> None:
    failures = [failure for number in range(case.count) if (failure := _try_file(case, number, folder))]
    assert not failures, "\n\n".join(failures)


def test_a_wrong_setting_gives_no_traceback(folder: Path) -> None:
    _try_settings(folder, range(0, SETTINGS, EVERY))


@pytest.mark.slow
def test_no_wrong_setting_gives_a_traceback(folder: Path) -> None:
    _try_settings(folder, range(SETTINGS))


def test_an_odd_argument_gives_no_traceback(folder: Path) -> None:
    _try_arguments(folder, range(0, ARGUMENTS, EVERY))


@pytest.mark.slow
def test_no_odd_argument_gives_a_traceback(folder: Path) -> None:
    _try_arguments(folder, range(ARGUMENTS))


def test_a_wrong_environment_variable_gives_no_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _try_environments(monkeypatch, folder, range(0, ENVIRONMENTS, EVERY))


@pytest.mark.slow
def test_no_wrong_environment_variable_gives_a_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _try_environments(monkeypatch, folder, range(ENVIRONMENTS))


def _try_file(case: Case, number: int, folder: Path) -> str:
    """Run the command of `case` with mutation `number` of its file; return what is wrong with the outcome, or ''."""
    file = sorted(folder.glob(case.file))[0]
    original, seed = file.read_bytes(), f"{case.name} {number}"
    name, data = mutate(original, seed)
    chance = random.Random(seed)
    if chance.random() < 0.04:
        name = chance.choice(("directory", "missing"))
    file.unlink()
    if name == "directory":
        file.mkdir()
    elif name != "missing":
        file.write_bytes(data)
    try:
        wrong = run_command(case.command.split())
    finally:
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        file.write_bytes(original)
        _remove_written(folder)
    return f"{case.name} {number} ({name}): `trimaran {case.command}`\n{wrong}" if wrong else ""


def _try_settings(folder: Path, numbers: range) -> None:
    failures = []
    for number in numbers:
        chance = random.Random(f"setting {number}")
        value = chance.choice((*VALUES, *(str(each) for each in PYTHON_VALUES)))
        setting = f"{chance.choice(FIELDS)}{'=' if chance.random() < 0.97 else ''}{value}"
        verb = chance.choice(("plan", "train --dry-run", "data inspect", "resume run --no-check --quiet"))
        if wrong := run_command([*verb.split(), "--set", setting]):
            failures.append(f"trimaran {verb} --set {setting[:200]!r}\n{wrong}")
    assert not failures, "\n\n".join(failures)


def _try_arguments(folder: Path, numbers: range) -> None:
    failures = []
    for number in numbers:
        chance = random.Random(f"argument {number}")
        command, argument = COMMANDS_WITH_ARGUMENT[number % len(COMMANDS_WITH_ARGUMENT)], chance.choice(ODD_ARGUMENTS)
        if wrong := run_command([word.replace("@", argument) for word in command.split()]):
            failures.append(f"trimaran {command} with {argument[:200]!a}\n{wrong}")
        _remove_written(folder)
    assert not failures, "\n\n".join(failures)


def _try_environments(monkeypatch: pytest.MonkeyPatch, folder: Path, numbers: range) -> None:
    failures = []
    for number in numbers:
        chance = random.Random(f"environment {number}")
        value = chance.choice(
            ("", "0", "-1", "abc", "2,1", "9" * 400, "/dev/null", "/nowhere/x", "/proc/x", "a" * 300, "1.5", "🙂")
        )
        names = VARIABLES[number % len(VARIABLES)].split("+")
        command = chance.choice(("plan --cluster auto", "train recipe.yaml --dry-run", "watch run --json",
                                 "train recipe.yaml --run-dir new --quiet", "doctor --quick"))  # fmt: skip
        with monkeypatch.context() as patch:
            for name in names:
                patch.setenv(name, value)
            if wrong := run_command(command.split()):
                failures.append(f"{'='.join([*names, value])} trimaran {command}\n{wrong}")
        _remove_written(folder)
    assert not failures, "\n\n".join(failures)


def run_here(arguments: Sequence[str]) -> int:
    return watch_once() if arguments == ["watch", "run"] else main(arguments)


def run_command(arguments: Sequence[str]) -> str:
    """Run one command in this process; return what is wrong with how it ended, or ''."""
    output, logged = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("trimaran").addHandler(handler)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT_SECONDS)
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO())
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = run_here(arguments)
    except UserError as error:
        output.write(str(error))
        code = 2
    except BaseException:
        return traceback.format_exc(limit=-6)
    finally:
        sys.stdin = stdin
        signal.alarm(0)
        logging.getLogger("trimaran").removeHandler(handler)
    text = output.getvalue() + logged.getvalue()
    if "Traceback" in text or "the doctor failed" in text:
        return f"exit code {code}\n{text[-3000:]}"
    if code not in (0, 1, 2):
        return f"exit code {code}\n{text[-3000:]}"
    if code == 2 and "--json" not in arguments and len(text) > MAX_ERROR_CHARACTERS and "predict" not in arguments:
        return f"a message of {len(text):,} characters: {text[:300]}"
    return ""


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"the command took more than {LIMIT_SECONDS} s")
