"""The commands of the guides about launching, and how each of them is tried.

`HERE` run on a machine without anything, in the default tests; `REAL` on the real thing, in the slow ones.
"""

import re
from pathlib import Path

GUIDES = ("launch", "several-machines", "slurm", "kubernetes", "ray", "skypilot")
FOLDER = Path(__file__).parents[1] / "docs" / "guides"
BLOCK = re.compile(r"^```(console|bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPE = "recipes/stdlib-tiny.yaml"

HERE = (
    f"trimaran launch {RECIPE} --on slurm --set cluster=4x8xH100 --dry-run",
    f"trimaran launch {RECIPE} --on k8s --set cluster=2x8xH100 --site image=registry/trimaran:1.0 --dry-run",
    f"trimaran launch {RECIPE} --on sky --set cluster=2x8xH100 --site bucket=s3://runs "
    "--site image_id=docker:REGISTRY/trimaran:1.0 --dry-run --out job",
    "trimaran plan --set cluster=2x4xA100-80GB",
    "trimaran jobs",
    "trimaran doctor --bad-nodes",
)
# By target, in the order in which they are run. The names in them are replaced by those of the target.
REAL = {
    "local": (
        "trimaran launch --on local --set cluster=2x2xcpu --set train.steps=20 --run-dir runs/two-nodes --wait",
        "trimaran train my.yaml --set cluster=2x8xH100 --run-dir /shared/runs/my-run",
        "python -m trimaran.launch /shared/runs/my-run --nodes=2 --address=auto",
    ),
    "ssh": (
        "trimaran launch my.yaml --on ssh --hosts 10.81.0.1,10.81.0.2 --set cluster=2x2xcpu "
        "--run-dir /shared/runs/my-run --check",
        "trimaran launch my.yaml --on ssh --hosts gpu-1,gpu-2 --set cluster=2x8xH100 "
        "--run-dir /shared/runs/my-run --wait",
        f"trimaran launch {RECIPE} --on ssh --hosts a,b --set cluster=2x2xcpu --wait",
    ),
    "slurm": (
        f"trimaran launch {RECIPE} --on slurm --set cluster=4x8xH100 --run-dir /shared/runs/first",
        "trimaran jobs",
        "trimaran jobs slurm-4711",
        "trimaran jobs slurm-4711 --stop",
        "trimaran jobs slurm-4711 --resume --wait",
    ),
    "k8s": (
        f"trimaran launch {RECIPE} --on k8s --set cluster=2x8xH100 --site image=registry/trimaran:1.0 "
        "--run-dir /runs/first",
        "trimaran jobs",
        "trimaran jobs k8s-llm-first",
        "trimaran jobs k8s-llm-first --stop",
        "trimaran jobs k8s-llm-first --resume",
    ),
    "ray": (
        f"trimaran launch {RECIPE} --on ray --site address=http://head:8265 --set cluster=4x8xH100",
        "trimaran jobs",
        "ray job submit --address=http://head:8265 --working-dir=. --no-wait -- python ray_job.py job.json",
        f"trimaran launch {RECIPE} --on ray --site address=local --set cluster=2x1xcpu --wait",
    ),
}
# Each with the reason, or the test that runs it in another form.
UNTRIED = {
    "cd RUN/launch && sbatch --nodes=1 job.sbatch": "tests/slurm/test_jobs.py adds nodes to an elastic run with it",
    "export TRIMARAN_TOPOLOGY=spine1.leaf3": "tests/fault/test_network.py numbers nodes by it",
    "cd job && sky jobs launch --yes --detach-run job.yaml": "it rents machines; test_launch_sky.py runs its script",
}


def guide_commands(guide: str) -> list[str]:
    """Return the commands of a guide's shell blocks, without what they print; continued lines are joined."""
    found = []
    for kind, body in BLOCK.findall((FOLDER / f"{guide}.md").read_text()):
        lines = re.sub(r" *\\\n *", " ", body).splitlines()
        if kind == "console":
            found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        else:
            found += [line for line in lines if line and not line.startswith("#")]
    return found
