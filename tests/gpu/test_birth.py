"""A NaN that is born on a GPU is traced to its module, also where blocks are compiled and weights are in halves."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_birth import skip_of
from tests.dist.test_guards import recipe_with
from tests.environment import environment
from trimaran.core import Plan
from trimaran.run import create_run

pytestmark = pytest.mark.gpu

SAIL = """
import sys
from pathlib import Path
from tests.dist.test_birth import Fault, sail
sys.exit(sail(Path(sys.argv[1]), Fault(sys.argv[2], rank=0, gradient=sys.argv[3] == "gradient")))
"""


@pytest.mark.parametrize("what", ["output", "gradient"])
@pytest.mark.parametrize("fields", [{}, {"precision": "bf16"}, {"precision": "bf16", "compile": True}], ids=str)
def test_the_module_is_told_on_a_gpu(tmp_path: Path, fields: dict[str, Any], what: str) -> None:
    module = "norm" if "compile" in fields else "layers.1.mlp"  # what is compiled does not ask the plant every time
    run = create_run(tmp_path / "run", recipe_with(train={"steps": 5}), Plan(micro_batch=4, **fields))
    command = [sys.executable, "-c", SAIL, str(run.path), module, what]
    done = subprocess.run(command, env=environment(RANK="0", WORLD_SIZE="1"), timeout=300)
    assert done.returncode == 0
    born = skip_of(run)["born"]
    assert (born["module"], born["what"], born["rank"]) == (module, what, 0)
