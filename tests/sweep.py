"""Every causal language model of transformers, tiny, under every kind of plan, against transformers' own training loop.

`python -m tests.sweep` trains each model for 4 steps with the real worker and compares it with a plain loop: every
loss to 1e-5, gradient norms and weights to 1e-4. `--only NAME` and `--plan KEY` choose cells, `--write FILE` replaces
the table of a page. Cells are kept in `build/sweep.jsonl`, so an interrupted sweep continues where it stopped;
`--again` runs the chosen cells again. It exits with 1 if any cell is different or crashed.
"""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.environment import CACHE
from tests.parity import Trajectory, plan_for
from tests.ranks import free_port
from tests.sweep_models import tiny_config
from trimaran.core import EXIT_DONE, EXIT_USER, Plan, Recipe
from trimaran.data import DataShare, TokenFeed, TokenShards, prepare, split
from trimaran.nets.hf import hf_stages, hf_vlm
from trimaran.runs import RunDirectory, create_run
from trimaran.train import read_rank_info, run_worker
from trimaran.train.features import first_loss

IMPORTED_ONCE = hf_stages, hf_vlm, first_loss  # which ranks import when they need them
STEPS, BATCH, SEQ_LEN, LR, EPS, BETAS = 4, 4, 32, 1e-2, 1e-3, (0.9, 0.95)
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4, 1e-4
LIMITS = LOSS_TOLERANCE, NORM_TOLERANCE
DISTURBANCE = 1e-7
CHAOS = 4.0  # sums over ranks round more than that
WEIGHT_FLOOR = 1e-6  # per element: biases of keys have no effect, and gradients of rounding errors
MAX_PARAMETERS = 8_000_000
RESULTS = Path("build/sweep.jsonl")
HEADER = "| model |"

PLANS: dict[str, dict[str, Any]] = {
    "1 rank": {"grad_accum": 1},
    "dp_shard 2": {"dp_shard": 2, "grad_accum": 1},
    "tp 2": {"tp": 2, "grad_accum": 1},
    "pp 2": {"pp": 2, "grad_accum": 2},
    "cp 2": {"cp": 2, "grad_accum": 1},
    "ep 2": {"dp_shard": 2, "ep": 2, "grad_accum": 1},
    "recompute": {"recompute": "full", "grad_accum": 1},
    "packed": {"grad_accum": 1},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """The outcome of a model under a plan: `equal`, the code of a refusal, `DIFFERENT`, `CRASH`, or `not built`.

    `chaotic`: it equals the plain loop in step 1, and then differs from it by less than CHAOS times what the plain loop
    differs from itself if its first weights change in their last digits.
    """

    model: str
    plan: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0
    versions: str = ""

    @property
    def is_fault(self) -> bool:
        return self.outcome in ("DIFFERENT", "CRASH")


def versions() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"


def recipe_for(folder: Path, *, packed: bool) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"family": "hf", "path": str(folder / "model")},
            "data": {
                "source": "jsonl",
                "path": str(folder.parent / "texts.jsonl"),
                "seq_len": SEQ_LEN,
                "isolate_documents": packed,
                "holdout": 0.0,
                "tokenizer": "bytes",
                "workers": 0,
            },
            "train": {
                "steps": STEPS,
                "global_batch": BATCH,
                "lr": LR,
                "clip_norm": 0,
                "schedule": {"kind": "constant", "warmup_steps": 0},
                "optimizer": {"eps": EPS, "weight_decay": 0.0, "beta1": BETAS[0], "beta2": BETAS[1]},
                "evaluate": {"batches": 0},
                "sample": {"tokens": 0},
            },
            "checkpoint": {"every": "off", "memory": 0},
        }
    )


def write_texts(path: Path) -> None:
    """Write documents of very uneven length, of which most rows hold several."""
    with path.open("w") as file:
        for number in range(120):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 11)}) + "\n")


def batches_of(recipe: Recipe, cache: Path) -> Iterator[Mapping[str, Tensor]]:
    """Yield the rows of each step of the recipe, as the worker reads them."""
    training, _ = split(TokenShards.open(prepare(recipe.data, cache=cache)), recipe.data)
    share = DataShare(rank=0, dp=1, micro_batch=BATCH, grad_accum=1)
    feed = TokenFeed(training, seed=recipe.train.seed, share=share)
    for step in range(STEPS):
        yield {name: torch.from_numpy(each[0]) for name, each in feed.load(step, lambda _: None).arrays.items()}


def build_model(name: str, folder: Path) -> None:
    """Save the tiny model, and the weights and losses of transformers' own loop, plain and with documents alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    if (count := sum(each.numel() for each in model.parameters())) > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    model.save_pretrained(folder / "model")
    for packed in (False, True):
        train_plainly(folder, packed=packed)


def train_plainly(folder: Path, *, packed: bool, disturbed: bool = False) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    if disturbed:
        for each in model.parameters():
            each.data.mul_(1 + DISTURBANCE * torch.randn_like(each))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, betas=BETAS, weight_decay=0.0)
    losses, norms = [], []
    for batch in batches_of(recipe_for(folder, packed=packed), CACHE):
        optimizer.zero_grad()
        num_valid = (batch["labels"] >= 0).sum()
        pieces = documents_of(batch) if packed else [(batch["tokens"], batch["labels"])]
        summed = torch.zeros(())
        for tokens, labels in pieces:
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            summed = summed + cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        loss = summed / num_valid
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        losses.append(float(loss.detach()))
        optimizer.step()
    target = expected_in(folder, packed=packed, disturbed=disturbed)
    model.save_pretrained(target)
    (target / "steps.json").write_text(json.dumps({"losses": losses, "norms": norms}))


def expected_in(folder: Path, *, packed: bool, disturbed: bool = False) -> Path:
    """Return the folder with the result of `train_plainly`."""
    return folder / (("packed" if packed else "plain") + ("-disturbed" if disturbed else ""))


def documents_of(batch: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and labels of each document of a batch of packed rows, [1, T] each."""
    for tokens, labels, documents in zip(batch["tokens"], batch["labels"], batch["documents"], strict=True):
        for number in documents.unique():
            inside = documents == number
            yield tokens[inside][None], labels[inside][None]


def train_rank(run: Path, cache: Path) -> int:
    return run_worker(RunDirectory(run), read_rank_info(os.environ), cache=cache)


def run_processes(world_size: int, timeout: float, log: Path, function: Callable[..., Any], *args: Any) -> list[int]:
    """Return the exit codes of `function(*args)` on forked ranks that ended in time; others are killed."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, log, function, args)) for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return [-1 if rank.exitcode is None else rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _rank(
    rank: int, world_size: int, port: int, log: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(each) for name, each in (here | {"MASTER_PORT": port}).items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    with log.open("a") as file:  # native output of all ranks
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        code = function(*args) or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def run_cell(name: str, plan_name: str, folder: Path, timeout: float) -> Cell:
    """Train the model of `folder` under a plan, and compare it with the plain loop."""
    began, packed = time.monotonic(), plan_name == "packed"
    recipe = recipe_for(folder, packed=packed)
    plan: Plan = plan_for(recipe, **PLANS[plan_name])
    run = create_run(folder / "runs" / plan_name.replace(" ", "-"), recipe, plan)
    log = folder / "log"
    log.write_text("")
    codes = run_processes(plan.mesh.world_size, timeout, log, train_rank, run.path, CACHE)
    outcome, detail = judge(run, codes, expected_in(folder, packed=packed), log)
    if outcome == "DIFFERENT" and is_chaotic(run, folder, timeout, packed=packed):
        outcome = "chaotic"
    return Cell(name, plan_name, outcome, detail, round(time.monotonic() - began, 1), versions())


def judge(run: RunDirectory, codes: list[int], expected: Path, log: Path) -> tuple[str, str]:
    """Return the outcome of a run and a line about it."""
    if set(codes) == {EXIT_DONE}:
        return compare(run, expected)
    errors = [event["data"] for rank in range(len(codes)) for event in _events(run, rank) if event["kind"] == "error"]
    refused = next((each for each in errors if "code" in each), None)
    if refused is not None and EXIT_USER in codes:
        return refused["code"], refused["what"]
    first = next((f"{each.get('type')}: {each.get('message')}" for each in errors), "")
    return "CRASH", f"exit codes {codes}; {first or log.read_text()[-200:]}".replace("\n", " ")[:300]


def _events(run: RunDirectory, rank: int) -> list[dict[str, Any]]:
    path = run.events(rank)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def is_chaotic(run: RunDirectory, folder: Path, timeout: float, *, packed: bool) -> bool:
    """Return whether step 1 equals the plain loop, which differs more from itself when it starts a little elsewhere."""
    ours, theirs = steps_of_run(run), steps_in(expected_in(folder, packed=packed))
    if any(abs(a[0] - b[0]) > limit * abs(b[0]) for a, b, limit in zip(ours, theirs, LIMITS, strict=True)):
        return False
    disturb = partial(train_plainly, packed=packed, disturbed=True)
    if run_processes(1, timeout, folder / "log", disturb, folder) != [0]:
        return False
    disturbed = steps_in(expected_in(folder, packed=packed, disturbed=True))
    return all(_off(a, b) <= CHAOS * _off(c, b) for a, b, c in zip(ours, theirs, disturbed, strict=True))


def steps_of_run(run: RunDirectory) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of a run."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


def steps_in(folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of a plain loop."""
    steps = json.loads((folder / "steps.json").read_text())
    return steps["losses"], steps["norms"]


def compare(run: RunDirectory, expected: Path) -> tuple[str, str]:
    weights, expected_weights = weights_of(run.model), weights_of(expected)
    if weights.keys() != expected_weights.keys():  # a tied weight may have either name
        weights, expected_weights = (AutoModelForCausalLM.from_pretrained(each).state_dict()
                                     for each in (run.model, expected))  # fmt: skip
    theirs = Trajectory(*steps_in(expected), expected_weights)
    ours = Trajectory(*steps_of_run(run), weights)
    loss, norm = (_off(*pair) for pair in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)))
    name, weight = max(
        ((name, weight_off(ours.weights[name], each)) for name, each in theirs.weights.items()),
        key=lambda pair: pair[1],
    )
    detail = f"loss {loss:.1e}, gradient norm {norm:.1e}, weights {weight:.1e}"
    if loss < LOSS_TOLERANCE and norm < NORM_TOLERANCE and weight < WEIGHT_TOLERANCE:
        return "equal", detail
    first = abs(ours.losses[0] - theirs.losses[0]) / theirs.losses[0]
    return "DIFFERENT", f"{detail} ({name}); loss of step 1 {first:.1e}"


def weights_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def weight_off(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative difference of a weight in norm, beyond WEIGHT_FLOOR."""
    if ours.shape != theirs.shape:
        return float("inf")
    difference = float((ours.double() - theirs.double()).norm()) - WEIGHT_FLOOR * theirs.numel() ** 0.5
    return max(0.0, difference) / max(float(theirs.double().norm()), WEIGHT_FLOOR)


def _off(ours: list[float], theirs: list[float]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(abs(a - b) / max(abs(b), 1e-12) if a == a and b == b else float("inf") for a, b in pairs)


def sweep_model(name: str, plans: list[str], workspace: Path, timeout: float) -> Iterator[Cell]:
    folder = workspace / name
    folder.mkdir()
    log = folder / "log"
    try:
        AutoModelForCausalLM._model_mapping[type(tiny_config(name))]  # imported once, before ranks are forked
    except Exception as error:
        yield Cell(
            name, "all", "not built", f"{type(error).__name__}: {error}".replace("\n", " ")[:200], 0.0, versions()
        )
        return
    if run_processes(1, timeout, log, build_model, name, folder) != [0]:
        reason = log.read_text().strip().splitlines()[-1:] or ["no answer in time"]
        yield Cell(name, "all", "not built", reason[0][:200], 0.0, versions())
        return
    for plan in plans:
        yield run_cell(name, plan, folder, timeout)


def read_cells(path: Path) -> dict[tuple[str, str], Cell]:
    """Return the last cell of each model and plan under these versions."""
    lines = path.read_text().splitlines() if path.is_file() else []
    cells = [Cell(**json.loads(line)) for line in lines]
    return {(each.model, each.plan): each for each in cells if each.versions == versions()}


def table(cells: Mapping[tuple[str, str], Cell]) -> list[str]:
    """Return the lines of the page after its introduction."""
    models = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if any(model == name for model, _ in cells)]
    built = [name for name in models if (name, "all") not in cells]
    num_all = len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    day = datetime.now(UTC).date().isoformat()
    lines = [
        HEADER + " " + " | ".join(PLANS) + " |",
        "|---" * (1 + len(PLANS)) + "|",
        *(_row(name, [cells.get((name, plan)) for plan in PLANS]) for name in built),
        "",
        f"Run on {day} with {versions()}: {len(built)} of {num_all} models.",
        "",
        "| plan | equal | chaotic | refused | different | crash | not run |",
        "|---|---|---|---|---|---|---|",
    ]
    for plan in PLANS:
        found = Counter(_kind(cells.get((name, plan))) for name in built)
        lines.append(f"| {plan} | " + " | ".join(str(found[kind]) for kind in KINDS) + " |")
    faults = [each for each in cells.values() if each.is_fault and each.model in built]
    if faults:
        lines += ["", "## Different or crashed", "", "| model | plan | what |", "|---|---|---|"]
        lines += [f"| {each.model} | {each.plan} | {_plain(each.detail)} |" for each in faults]
    unbuilt = [cells[name, "all"] for name in models if (name, "all") in cells]
    if unbuilt:
        lines += ["", "## Not built small, so not compared", "", "| model | why |", "|---|---|"]
        lines += [f"| {each.model} | {_plain(each.detail)} |" for each in unbuilt]
    if missing := [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in models]:
        lines += ["", "## Not run", "", *wrap(", ".join(missing), 116)]
    return lines


KINDS = ("equal", "chaotic", "refused", "DIFFERENT", "CRASH", "not run")


def _kind(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    return cell.outcome if cell.outcome in KINDS else "refused"


def _row(name: str, cells: list[Cell | None]) -> str:
    return f"| {name} | " + " | ".join("" if cell is None else cell.outcome for cell in cells) + " |"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")


def write_page(path: Path, cells: Mapping[tuple[str, str], Cell]) -> None:
    before, _, _ = path.read_text().partition(HEADER)
    path.write_text(before + "\n".join(table(cells)) + "\n")


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page whose table to replace")
    parser.add_argument("--only", action="append", choices=[*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES], metavar="NAME")
    parser.add_argument("--plan", action="append", choices=[*PLANS], metavar="PLAN", help=f"one of {', '.join(PLANS)}")
    parser.add_argument("--again", action="store_true", help="run the chosen cells even if they are known")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one cell")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where cells are kept")
    return parser.parse_args()


def main(flags: argparse.Namespace) -> int:
    known = read_cells(flags.results)
    flags.results.parent.mkdir(parents=True, exist_ok=True)
    names, plans = flags.only or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES], flags.plan or [*PLANS]
    with tempfile.TemporaryDirectory() as folder, flags.results.open("a") as file:
        workspace = Path(folder)
        write_texts(workspace / "texts.jsonl")
        for number, name in enumerate(names, 1):
            wanted = [each for each in plans if flags.again or not {(name, each), (name, "all")} & known.keys()]
            for cell in sweep_model(name, wanted, workspace, flags.timeout) if wanted else ():
                known[cell.model, cell.plan] = cell
                file.write(json.dumps(asdict(cell)) + "\n")
                file.flush()
                print(f"{number}/{len(names)} {name}, {cell.plan}: {cell.outcome} {cell.detail[:150]} "
                      f"({cell.seconds} s)", flush=True)  # fmt: skip
    if flags.write:
        write_page(flags.write, known)
    faults = [each for each in known.values() if each.is_fault and each.model in names and each.plan in plans]
    for each in faults:
        print(f"{each.model}, {each.plan}: {each.outcome}: {each.detail}")
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sys.exit(main(parse_flags()))
