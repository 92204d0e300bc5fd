"""What interrupts a job, how often, and what it takes to go on.

The rates are those of Llama 3 405B: 419 unexpected and 47 planned interruptions in 54 days on 16,384 H100s (A. Dubey et
al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4 and table 5). The table's counts add up to 419; its
30.1 % for faulty GPUs does not (148 of 419 is 35.3 %), so the counts are used.
"""

from dataclasses import dataclass

LLAMA_DAYS, LLAMA_DEVICES, LLAMA_PLANNED = 54.0, 16_384, 47
DAY_SECONDS = 86_400.0
# A hang is noticed when a collective times out: PyTorch's default for NCCL. A crash ends the process, which the
# supervisor sees within seconds.
HANG_SECONDS, CRASH_SECONDS = 600.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureClass:
    """A cause of interruptions.

    count: how many there were in LLAMA_DAYS on LLAMA_DEVICES.
    loses_node: the node is set aside and repaired; a spare takes its place.
    detect_seconds: until the job notices.
    """

    name: str
    count: int
    loses_node: bool
    detect_seconds: float = CRASH_SECONDS

    @property
    def per_device_second(self) -> float:
        """Interruptions per second that one device causes."""
        return self.count / (LLAMA_DAYS * DAY_SECONDS * LLAMA_DEVICES)


# Which of them cost a node, and which show as a hang, is our reading: the paper does not say.
LLAMA_FAILURES = (
    FailureClass(name="faulty GPU", count=148, loses_node=True),
    FailureClass(name="GPU HBM3 memory", count=72, loses_node=True),
    FailureClass(name="software bug", count=54, loses_node=False),
    FailureClass(name="network switch or cable", count=35, loses_node=True, detect_seconds=HANG_SECONDS),
    FailureClass(name="host maintenance", count=32, loses_node=True),
    FailureClass(name="GPU SRAM memory", count=19, loses_node=True),
    FailureClass(name="GPU system processor", count=17, loses_node=True),
    FailureClass(name="network card", count=7, loses_node=True, detect_seconds=HANG_SECONDS),
    FailureClass(name="NCCL watchdog timeout", count=7, loses_node=False, detect_seconds=HANG_SECONDS),
    FailureClass(name="silent data corruption", count=6, loses_node=True),
    FailureClass(name="GPU thermal interface or sensor", count=6, loses_node=True),
    FailureClass(name="SSD", count=3, loses_node=True),
    FailureClass(name="power supply", count=3, loses_node=True),
    FailureClass(name="server chassis", count=2, loses_node=True),
    FailureClass(name="IO expansion board", count=2, loses_node=True),
    FailureClass(name="dependency", count=2, loses_node=False),
    FailureClass(name="CPU", count=2, loses_node=True),
    FailureClass(name="system memory", count=2, loses_node=True),
)
