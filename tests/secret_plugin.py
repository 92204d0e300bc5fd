"""Slows a rank down, and writes which secrets it has, as digests.

TRIMARAN_TEST_SECRETS is the folder of those files, one for each rank that was started. From the fourth step on, a step
takes TRIMARAN_TEST_PAUSE seconds longer, until there is a file `no-pause` in the run directory.
"""

import json
import os
import sys
import time
from pathlib import Path

from tests.launched import SECRETS, digest
from trimaran.runs import Section
from trimaran.train import SupervisorLink

FREE_STEPS = 3
released, pause = Path(sys.argv[1]) / "no-pause", float(os.environ["TRIMARAN_TEST_PAUSE"])
values = {name: digest(os.environ[name]) for name in SECRETS if name in os.environ}
folder = Path(os.environ["TRIMARAN_TEST_SECRETS"])
folder.mkdir(exist_ok=True)
(folder / f"{os.uname().nodename}-{os.getpid()}.json").write_text(json.dumps(values))
report_section = SupervisorLink.report_section


def report_section_slowly(self: SupervisorLink, section: Section, at: int = 0) -> None:
    report_section(self, section, at)
    until = time.monotonic() + (pause if section in ("first", "step") and at >= FREE_STEPS else 0.0)
    while time.monotonic() < until and not released.exists():
        time.sleep(0.05)


SupervisorLink.report_section = report_section_slowly  # type: ignore[method-assign]
