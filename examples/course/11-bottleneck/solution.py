"""Other plans for the same eight GPUs: python examples/course/11-bottleneck/solution.py"""

from speedup import explain

if __name__ == "__main__":
    explain("tp 2 x dp 4", mesh={"tp": 2}, micro_batch=4)
    explain("dp 8, shard optimizer", sharding="optimizer", micro_batch=8)
