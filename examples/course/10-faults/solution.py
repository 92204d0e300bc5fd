"""Verifies a checkpoint without Trimaran: python examples/course/10-faults/solution.py FOLDER"""

import hashlib
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
for name, facts in sorted(manifest["files"].items()):
    data = (folder / name).read_bytes()
    is_right = len(data) == facts["bytes"] and hashlib.sha256(data).hexdigest() == facts["sha256"]
    print(f"{name}: {len(data):,} bytes, {'right' if is_right else 'DAMAGED'}")
