"""175B parameters on 64 GPUs as DP 8 x PP 4 x TP 2: `python examples/course/01-memory/solution.py`."""

from lesson import GB, zero

PARAMETERS, DP, PP, TP = 175e9, 8, 4, 2


def main():
    part = PARAMETERS / (PP * TP)  # stages and slices divide the weights; data-parallel ranks repeat them
    print(f"{part / 1e9:.3f}B parameters on each of {DP * PP * TP} GPUs")
    for stage, each in enumerate(zero(part, DP)):
        print(f"ZeRO-{stage} over {DP} data ranks: {each / GB:6.2f} GB")


if __name__ == "__main__":
    main()
