"""A speed-up, factor by factor: python examples/course/11-bottleneck/speedup.py"""

from trimaran.planner.predict_bulk import predict_line

GPUS = 8
MODEL = {"preset": "llama-3.2-1b", "seq_len": 2048}


def predict(gpus, **plan):
    """Return the prediction for a batch of 8 sequences a GPU."""
    return predict_line({"model": MODEL, "cluster": f"{gpus}xH100", "plan": {"global_batch": 8 * gpus} | plan})


def explain(title, **plan):
    """Print what each term leaves of the ideal speed-up, and return the speed-up."""
    one, many = predict(1, micro_batch=4), predict(GPUS, **plan)
    seconds, speedup = one["step_seconds"], float(GPUS)
    print(f"{title}: a step takes {1e3 * seconds:.0f} ms on 1 GPU, {1e3 * many['step_seconds']:.0f} ms on {GPUS}")
    compute = sum(many["time"][name] for name in ("forward", "backward", "optimizer"))
    terms = {"compute": compute - seconds, **many["exposed"], "bubble": many["time"].get("bubble", 0.0)}
    for name, more in terms.items():
        if more:
            factor = seconds / (seconds + more)  # what a step would be without this term, by what it is with it
            seconds, speedup = seconds + more, speedup * factor
            print(f"  {name:32} {1e3 * more:+6.1f} ms  x {factor:.3f}  leaves {speedup:.2f}")
    print(f"  speed-up {speedup:.1f}, efficiency {speedup / GPUS:.0%}")
    return speedup


if __name__ == "__main__":
    explain("tp 2 x pp 4", mesh={"tp": 2, "pp": 4}, micro_batch=4)
