"""The peers of `benchmarks/throughput.py`: the same work in other trainers, in a hand-written loop, and in ours."""
