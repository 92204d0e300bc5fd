"""`python -m tests.other_library ARGUMENTS`: runs pytest beside a standard library with one more file.

The default text is the running Python's standard library, which has files named and filled by architecture and build. A
test that compares numbers must not depend on them.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "_sysconfigdata__other_build.py"
TEXT = (
    "build_time_vars = {\n"
    + "".join(f"    'OTHER_{number}': '{number * number}',\n" for number in range(20_000))
    + "}\n"
)


def main() -> int:
    path = Path(sysconfig.get_paths()["stdlib"]) / NAME
    try:
        path.write_text(TEXT)
    except PermissionError:
        print(f"skipped: {path.parent} cannot be written to")
        return 0
    try:
        return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]]).returncode
    finally:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
