"""The module that first produced a NaN on a GPU is found, also with compiled blocks and split weights."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_guard import recipe_with
from tests.dist.test_nonfinite_search import skip_event
from tests.environment import environment
from trimaran.core import Plan
from trimaran.runs import create_run

pytestmark = pytest.mark.gpu

TRAIN = """
import sys
from pathlib import Path
from tests.dist.test_nonfinite_search import NanFault, train_with_fault
sys.exit(train_with_fault(Path(sys.argv[1]), NanFault(sys.argv[2], rank=0, gradient=sys.argv[3] == "gradient")))
"""


@pytest.mark.parametrize("what", ["output", "gradient"])
@pytest.mark.parametrize("fields", [{}, {"precision": "bf16"}, {"precision": "bf16", "compile": True}], ids=str)
def test_the_module_is_reported_on_a_gpu(tmp_path: Path, fields: dict[str, Any], what: str) -> None:
    module = "norm" if "compile" in fields else "layers.1.mlp"  # a compiled block would bake the fault's condition in
    run = create_run(tmp_path / "run", recipe_with(train={"steps": 5}), Plan(micro_batch=4, **fields))
    command = [sys.executable, "-c", TRAIN, str(run.path), module, what]
    done = subprocess.run(command, env=environment(RANK="0", WORLD_SIZE="1"), timeout=300)
    assert done.returncode == 0
    origin = skip_event(run)["born"]
    assert (origin["module"], origin["what"], origin["rank"]) == (module, what, 0)
