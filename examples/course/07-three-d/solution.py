"""What to do with twice the GPUs: python examples/course/07-three-d/solution.py"""

from trimaran.planner.predict_bulk import predict_line

MODEL = {"preset": "llama-3.1-70b", "seq_len": 4096}


def predict(gpus, **mesh):
    plan = {"mesh": mesh, "sharding": "optimizer", "micro_batch": 1, "recompute": "elementwise", "compile": True}
    plan["global_batch"] = 512
    return predict_line({"model": MODEL, "cluster": {"gpu": "H100", "gpus": gpus, "gpus_per_node": 8}, "plan": plan})


if __name__ == "__main__":
    before = predict(64, tp=4, pp=4)["step_seconds"]
    print("128 GPUs            step  times as fast  bubble  tensor slices  memory")
    for tp, pp in [(4, 4), (8, 4), (4, 8)]:
        found = predict(128, tp=tp, pp=pp)
        step = found["step_seconds"]
        slices = sum(value for name, value in found["exposed"].items() if name.startswith("tensor slices"))
        print(f"dp {128 // (tp * pp)} x tp {tp} x pp {pp}  {step:.1f} s  {before / step:.2f}  "
              f"{found['time']['bubble']:.1f} s  {slices:.1f} s  {found['device_bytes'] / 2**30:.1f} GiB")  # fmt: skip
