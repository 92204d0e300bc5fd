"""Our plans, faults and resumes over NCCL, with several ranks on one GPU: `python -m tests.nccl`, `make nccl`.

Each rank calls itself another host (`trimaran/launch/shared_gpu.py`), so that NCCL accepts the shared device. With
`--backend gloo` the same code runs on CPU ranks.
"""
