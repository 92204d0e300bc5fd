"""What the processes of a run import: nothing that a plain decoder run does not use, and torch in one process only."""

import json
import subprocess
import sys

import pytest

# Packages that only other runs use: foreign models, other data formats, sinks, engines, views. A run that uses one
# imports it where it is used. Pillow (30 ms) is not among them: every loader process would import it again.
UNUSED = {
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "httpx", "huggingface_hub", "jinja2", "lightning",
    "matplotlib", "mlflow", "pandas", "peft", "pyarrow", "requests", "rich", "scipy", "tensorboard", "tokenizers",
    "torchvision", "transformers", "triton", "typer", "wandb",
}  # fmt: skip
# Parts of torch that only ranks with sharded tensors, pipelines, DDP or compiled blocks use: half of its import time.
UNUSED_BY_PLAIN_RANKS = {"sympy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"}
UNUSED_BY_RANKS = UNUSED | UNUSED_BY_PLAIN_RANKS | {
    "torch._inductor.compile_fx", "trimaran.app", "trimaran.launch", "trimaran.doctor", "trimaran.planner",
    "trimaran.loop",
}  # fmt: skip
UNUSED_BY_SUPERVISORS = UNUSED | {"torch", "numpy", "trimaran.app", "trimaran.train", "trimaran.nets",
                                  "trimaran.models.spec", "trimaran.planner"}  # fmt: skip
UNUSED_BY_COMMANDS = (UNUSED - {"rich", "typer"}) | {
    "torch",
    "trimaran.train",
    "trimaran.nets",
    "trimaran.machine.probe",
}
# What the fork server and a rank of the default recipe import, up to the first update.
PLAIN_RANK = """
import torch
from trimaran.core import Plan, parse_recipe
from trimaran.models import spec_of
from trimaran.nets import network_of
from trimaran.nets.local_shards import to_empty
from trimaran.parallel import build_optimizer
from trimaran.train.process.fork_server import freeze_imports

freeze_imports()
recipe = parse_recipe("model: {preset: tiny}", name="test")
with torch.device("meta"):
    network = network_of(spec_of(recipe.model))
to_empty(network.module, torch.device("cpu"))
optimizer = build_optimizer([network.module], recipe.train, Plan())
network.forward({"tokens": torch.zeros(1, 8, dtype=torch.int64)})[0].sum().backward()
optimizer.step()
optimizer.zero_grad()
"""


def imported_by(statement: str) -> set[str]:
    """Return every module that a new process has imported after `statement`."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "unused"),
    [
        (PLAIN_RANK, UNUSED_BY_RANKS),
        ("import trimaran.launch.__main__", UNUSED_BY_SUPERVISORS),
        ("import trimaran.app.train.train, trimaran.app.train.session", UNUSED_BY_COMMANDS),
    ],
    ids=["ranks", "supervisor", "command"],
)
def test_a_process_of_a_plain_run_imports_nothing_that_it_does_not_use(statement: str, unused: set[str]) -> None:
    modules = imported_by(statement)
    assert {name for name in unused if name in modules} == set()


def test_the_supervisor_is_started_by_a_process_that_has_imported_almost_nothing() -> None:
    modules = imported_by(
        "import trimaran.launch.supervise.early_supervisor, trimaran.launch.supervise.fork_server_process"
    )
    heavy = {
        "pydantic",
        "yaml",
        "numpy",
        "psutil",
        "typing_extensions",
        "trimaran.core.plan",
        "trimaran.runs.run_directory",
    }
    assert modules & heavy == set()
