"""What each way to save memory saves and costs: peak bytes and speed of the same steps, beside what was predicted.

usage: python benchmarks/memory.py [PRESET SEQ_LEN MICRO_BATCH [SETTING,SETTING]]   (one GPU; the default fits an H200)
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = {
    "none": [],
    "recompute selective": ["plan.recompute=selective"],
    "recompute every 2nd": ["plan.recompute=2"],
    "recompute full": ["plan.recompute=full"],
    "offload activations": ["plan.offload=activations"],
    "recompute full, offload activations": ["plan.recompute=full", "plan.offload=activations"],
    "offload optimizer": ["plan.offload=optimizer"],
    "offload parameters": ["plan.offload=parameters", "plan.sharding=parameters"],
    "optimizer states bf16": ["train.optimizer.states=bf16"],
    "optimizer states 8bit": ["train.optimizer.states=8bit"],
    "fp8": ["plan.precision=fp8"],
}
STEPS, WARM = 10, 4


def measure(settings: list[str], folder: Path) -> dict[str, float] | str:
    """Return the run's numbers, or why there are none."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(folder), "--json", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["?"])[0]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM:]
    prediction = json.loads((folder / "plan.json").read_text())["prediction"]
    return {
        "peak": max(step["peak_bytes"] for step in steps) / 2**30,
        "predicted": prediction["peak_bytes"] / 2**30,
        "speed": statistics.median(step["tokens_per_second"] for step in steps),
        "predicted_speed": prediction["tokens_per_second"],
        "loss": steps[-1]["loss"],
    }


def main(preset: str = "llama-3.2-1b", seq_len: str = "4096", micro_batch: str = "4", only: str = "") -> None:
    print(f"{preset}, {micro_batch} x {seq_len} tokens, bf16, compiled")
    print("| setting | peak GiB | predicted | tokens/s | predicted | of none | loss |\n|---|---|---|---|---|---|---|")
    shared = [
        f"model.preset={preset}",
        f"data.seq_len={seq_len}",
        f"train.global_batch={micro_batch}",
        f"train.steps={STEPS}",
        f"plan.micro_batch={micro_batch}",
        "train.save=false",
        "train.sample.tokens=0",
        "train.evaluate.batches=0",
    ]
    first = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, settings) in enumerate(SETTINGS.items()):
            if only and name not in only.split(","):
                continue
            told = measure([*shared, *settings], Path(folder) / str(number))
            if isinstance(told, str):
                print(f"| {name} | {told} |", flush=True)
                continue
            first = first or told["speed"]
            print(
                f"| {name} | {told['peak']:.1f} | {told['predicted']:.1f} | {told['speed']:,.0f} | "
                f"{told['predicted_speed']:,.0f} | {told['speed'] / first:.2f} | {told['loss']:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
