"""Those who run in `benchmarks/throughput.py`: the same work through other trainers, a hand-written loop, and ours."""
