"""`python -m trimaran.autopilot RUN`: the autopilot of a run that no `trimaran train` shows, beside its supervisor."""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

from trimaran.autopilot.controller import control
from trimaran.runs import open_run


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m trimaran.autopilot", description="Run the autopilot of a run.")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--calibrations", type=Path, help="the folder of machine calibrations")
    flags = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    control(open_run(flags.run), stop, calibrations=flags.calibrations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
