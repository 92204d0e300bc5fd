"""Flips one bit of the newest checkpoint: python examples/course/10-faults/damage.py RUN"""

import sys
from pathlib import Path

folder = max((Path(sys.argv[1]) / "checkpoints").glob("step-*"))
file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
data = bytearray(file.read_bytes())
data[len(data) // 2] ^= 1
file.write_bytes(data)
print(f"flipped a bit of byte {len(data) // 2:,} in {folder.name}/{file.name}")
