"""The script that SkyPilot runs on a node: after a preemption, with an empty disk, it continues from the bucket."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from tests.chaos.nodes import make_run
from tests.fault.harness import ROOT, has_ended, lines, wait_for
from trimaran.launch import BUCKET_PATH, LaunchRequest, SkySection, SkyTarget
from trimaran.machine import parse_cluster

pytestmark = pytest.mark.slow


def test_a_preempted_job_continues_from_its_bucket_bit_for_bit(tmp_path: Path) -> None:
    """The bucket is a folder here; a mounted one was not tried."""
    calm = make_run(tmp_path / "calm", "cluster=2xcpu", "train.steps=60", "checkpoint.every=10")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trimaran.launch", str(calm.path), "--no-check"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    recipe, run, job = calm.read_recipe(), tmp_path / "disk" / "run one", tmp_path / "job"
    site = SkySection(bucket="s3://kept", copy_seconds=1, python=sys.executable)
    cluster = parse_cluster(recipe.cluster)
    request = LaunchRequest(name="one", run_dir=run, recipe=recipe, plan=calm.read_plan(), cluster=cluster, site=site,
                            run_exists=False, check=False)  # fmt: skip
    job.mkdir()
    script = SkyTarget().render(request).files["node.sh"]
    (job / "node.sh").write_text(script.replace(BUCKET_PATH, str(tmp_path / "bucket")))
    for path in (calm.recipe, calm.plan):
        shutil.copy(path, job)
    environment |= {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}
    environment |= {"TRIMARAN_TEST_PLUGIN": "tests.fault.plugin", "TRIMARAN_TEST_PAUSE": "0.15"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "node.sh"], cwd=job, env=environment, start_new_session=True)

    kept = tmp_path / "bucket" / "run one" / "node-0"
    node = start()
    wait_for(lambda: any(kept.glob("checkpoints/step-*/manifest.json")) and len(lines(run / "metrics.jsonl")) > 25, 120)
    processes = psutil.Process(node.pid).children(recursive=True)
    os.killpg(node.pid, signal.SIGKILL)
    node.wait()
    wait_for(lambda: all(map(has_ended, processes)))  # the ranks end when they notice
    assert not (kept / "lease").exists(), "the run's token is not copied"
    shutil.rmtree(tmp_path / "disk")
    assert start().wait(180) == 0
    assert [each["step"] for each in lines(run / "metrics.jsonl")] == [*range(1, 61)]
    ours, theirs = load_file(kept / "model" / "model.safetensors"), load_file(calm.model / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in theirs)
