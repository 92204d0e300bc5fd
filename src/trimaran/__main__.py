"""`python -m trimaran` runs the command line."""

import sys

from trimaran.app.main import main

if __name__ == "__main__":
    sys.exit(main())
