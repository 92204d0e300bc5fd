"""Environment variables by fabric: which fabric this machine has, and how its environment differs from the preset."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from trimaran.core import UserError, did_you_mean
from trimaran.machine.host_limits import read_text

FABRICS = ("infiniband", "roce", "efa", "tcp", "pcie")
AMAZON = "0x1d0f"  # PCI vendor of EFA
ROUTE_UP = 0x1  # RTF_UP of Linux's route.h
Step = Literal["set", "unset", "try"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFacts:
    """The fabric of a machine, its active RDMA cards, the interface of the default route, and the fastest card."""

    fabric: str
    cards: tuple[str, ...] = ()
    interface: str = ""
    gigabits: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableChange:
    """One variable of a preset: what it is now (None: not set), what it should be, why, and where that is written."""

    name: str
    step: Step
    now: str | None
    value: str | None
    why: str
    source: str

    @property
    def is_done(self) -> bool:
        return self.now == self.value if self.step == "set" else self.now is None if self.step == "unset" else False

    @property
    def command(self) -> str:
        """The shell command that makes the change; empty if there is nothing to do or no value is known."""
        if self.is_done or not (self.step == "unset" or self.value):
            return ""
        return f"unset {self.name}" if self.step == "unset" else f"export {self.name}='{self.value}'"


def read_fabric(
    *, has_gpus: bool, several_nodes: bool, sys: Path = Path("/sys"), proc: Path = Path("/proc")
) -> FabricFacts:
    """Return what connects this machine: RDMA cards that are up, else TCP; for GPUs of one node, PCIe."""
    cards: dict[str, list[str]] = {"infiniband": [], "roce": [], "efa": []}
    rates: list[float] = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        if "ACTIVE" not in read_text(port / "state"):
            continue
        card = port.parents[1]
        kind = "roce" if read_text(port / "link_layer") == "Ethernet" else "infiniband"
        kind = "efa" if read_text(card / "device" / "vendor") == AMAZON else kind
        cards[kind].append(card.name)
        rates.append(_leading_number(read_text(port / "rate")))
    routes = [line.split() for line in read_text(proc / "net/route").splitlines()[1:]]
    default = [row[0] for row in routes if len(row) > 3 and row[1] == "00000000" and int(row[3], 16) & ROUTE_UP]
    interface = default[0] if default else ""
    for kind, names in cards.items():
        if names:
            return FabricFacts(fabric=kind, cards=tuple(dict.fromkeys(names)), interface=interface, gigabits=max(rates))
    speed = _leading_number(read_text(sys / "class/net" / interface / "speed")) / 1000 if interface else 0.0
    alone = has_gpus and not several_nodes
    return FabricFacts(fabric="pcie" if alone else "tcp", interface=interface, gigabits=max(speed, 0.0))


def preset_changes(facts: FabricFacts, environment: Mapping[str, str]) -> list[VariableChange]:
    """Return every variable of the fabric's preset, those of the fabric itself first."""
    presets = load_presets()
    changes: dict[str, VariableChange] = {}
    for section in (presets[facts.fabric], presets["common"]):
        for step in ("set", "unset", "try"):
            for name, row in section.get(step, {}).items():
                value = _value(row, facts) if step != "unset" else None
                if name in changes or (step == "set" and not value) or facts.gigabits < row.get("min_gigabits", 0):
                    continue
                changes[name] = VariableChange(name=name, step=step, now=environment.get(name), value=value,
                                               why=row["why"], source=presets["sources"][row["source"]])  # fmt: skip
    return list(changes.values())


def check_fabric(name: str) -> None:
    """Raise unless `name` is a fabric or `auto`."""
    if name not in (*FABRICS, "auto"):
        raise UserError(
            "H021.not-fabric",
            where="--fabric",
            name=name,
            guess=did_you_mean(name, FABRICS),
            fabrics=", ".join(FABRICS),
        )


@cache
def load_presets() -> dict[str, Any]:
    return yaml.safe_load((files("trimaran.machine.checks") / "fabric_presets.yaml").read_text())


def _value(row: Mapping[str, Any], facts: FabricFacts) -> str:
    """Return the row's value for this machine; empty if the machine does not have what it names."""
    value = str(row["value"])
    if ("{cards}" in value and not facts.cards) or ("{interface}" in value and not facts.interface):
        return ""
    return value.replace("{cards}", ",".join(facts.cards)).replace("{interface}", facts.interface)


def _leading_number(text: str) -> float:
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return 0.0
