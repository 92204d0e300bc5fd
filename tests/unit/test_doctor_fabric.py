"""Presets of variables by fabric: which fabric a machine has, the diff, and names that NCCL does not know."""

import json
from pathlib import Path

import pytest

from trimaran.app import main
from trimaran.machine import (
    FABRICS,
    FabricFacts,
    known_names,
    load_presets,
    misspelt,
    preset_changes,
    read_fabric,
    wrong_algorithms,
)

ROOT = Path(__file__).parents[2]
OTHERS = ("GLOO_", "FI_", "RDMAV_")  # variables of gloo, libfabric and rdma-core


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_card(
    sys: Path, name: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand", vendor: str = "0x15b3"
) -> None:
    port = sys / "class/infiniband" / name / "ports/1"
    write(port / "state", state)
    write(port / "link_layer", layer)
    write(port / "rate", "400 Gb/sec (4X NDR)")
    write(sys / "class/infiniband" / name / "device/vendor", vendor)


def facts_of(tmp_path: Path, *, has_gpus: bool = True, several_nodes: bool = True) -> FabricFacts:
    route = "Iface Destination Gateway Flags\neth1 000A 0 0001\neth0 00000000 0101A8C0 0003"
    write(tmp_path / "proc/net/route", route)
    write(tmp_path / "sys/class/net/eth0/speed", "100000")
    folders = {"sys": tmp_path / "sys", "proc": tmp_path / "proc"}
    return read_fabric(has_gpus=has_gpus, several_nodes=several_nodes, **folders)


def test_cards_that_are_up_decide_the_fabric(tmp_path: Path) -> None:
    assert facts_of(tmp_path) == FabricFacts(fabric="tcp", interface="eth0", gigabits=100.0)
    assert facts_of(tmp_path, several_nodes=False).fabric == "pcie"
    assert facts_of(tmp_path, has_gpus=False, several_nodes=False).fabric == "tcp"
    sys = tmp_path / "sys"
    make_card(sys, "mlx5_2", state="1: DOWN")
    assert facts_of(tmp_path).fabric == "tcp"
    make_card(sys, "mlx5_1", layer="Ethernet")
    assert facts_of(tmp_path).fabric == "roce"
    make_card(sys, "mlx5_0")
    found = facts_of(tmp_path)
    assert (found.fabric, found.cards, found.interface, found.gigabits) == ("infiniband", ("mlx5_0",), "eth0", 400.0)


def test_amazons_cards_are_efa(tmp_path: Path) -> None:
    make_card(tmp_path / "sys", "rdmap16s27", layer="Unspecified", vendor="0x1d0f")
    assert facts_of(tmp_path).fabric == "efa"


def test_every_variable_of_a_preset_is_one_that_nccl_reads_and_has_a_reason() -> None:
    presets = load_presets()
    assert presets.keys() == {*FABRICS, "common", "sources"}
    rows = [(name, row) for section in (*FABRICS, "common") for step in ("set", "unset", "try")
            for name, row in presets[section].get(step, {}).items()]  # fmt: skip
    assert len(rows) > 20
    for name, row in rows:
        assert name in known_names("nccl") or name.startswith(OTHERS), name
        assert row["why"]
        assert presets["sources"][row["source"]].startswith("https://")
    sets = {name for section in FABRICS for name in presets[section].get("set", {})}
    assert not sets & {"NCCL_ALGO", "NCCL_PROTO"}  # pinned for experiments only


def test_the_guide_has_every_value_with_its_reason_and_source() -> None:
    presets = load_presets()
    guide = " ".join((ROOT / "docs/guides/bench-comm.md").read_text().split())
    for section in (*FABRICS, "common"):
        for step, mark in (("set", "+"), ("unset", "-"), ("try", "?")):
            for name, row in presets[section].get(step, {}).items():
                value = "" if step == "unset" else f"={row['value']}"
                assert f"`{mark} {name}{value}`" in guide, name
                assert f"{row['why']} [{row['source']}]." in guide, name
    assert all(f"[{name}]: {address}" in guide for name, address in presets["sources"].items())


def test_the_diff_says_what_to_set_to_unset_and_what_is_done() -> None:
    facts = FabricFacts(fabric="infiniband", cards=("mlx5_0", "mlx5_3"), interface="eth0", gigabits=400.0)
    now = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "eth1"}
    changes = {each.name: each for each in preset_changes(facts, now)}
    assert changes["NCCL_NET"].is_done
    assert changes["NCCL_NET"].command == ""
    assert changes["NCCL_IB_HCA"].command == "export NCCL_IB_HCA='=mlx5_0,mlx5_3'"
    assert changes["NCCL_IB_DISABLE"].command == "unset NCCL_IB_DISABLE"
    assert changes["NCCL_SOCKET_IFNAME"].command == "export NCCL_SOCKET_IFNAME='=eth0'"
    assert changes["NCCL_P2P_DISABLE"].is_done  # not set, as it should be
    done = {name: each.value for name, each in changes.items() if each.step == "set" and each.value}
    assert all(each.is_done for each in preset_changes(facts, done) if each.step != "try")


def test_a_value_that_the_machine_does_not_have_is_left_out() -> None:
    names = {each.name for each in preset_changes(FabricFacts(fabric="roce"), {})}
    assert not names & {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    slow = {each.name for each in preset_changes(FabricFacts(fabric="tcp", gigabits=10.0), {})}
    fast = {each.name for each in preset_changes(FabricFacts(fabric="tcp", gigabits=100.0), {})}
    assert fast - slow == {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"}


def test_the_command_shows_the_diff_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("NCCL_SOKET_IFNAME", "eth0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", "--fabric", "infiniband"]) == 0
    shown = capsys.readouterr().out
    assert "- NCCL_IB_DISABLE=1" in shown
    assert "unset NCCL_IB_DISABLE" in shown
    assert "rename it to NCCL_SOCKET_IFNAME" in shown
    assert "nothing was changed" in shown
    assert main(["doctor", "--fabric", "infiniband", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["fabric"] == "infiniband"
    assert {each["name"]: each["command"] for each in tree["variables"]}["NCCL_NET"] == "export NCCL_NET='IB'"
    assert main(["doctor", "--fabric", "ethernet"]) == 2
    assert capsys.readouterr().err.startswith("H021: ")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("NCCL_SOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
        ("NCCL_DEBGU", "NCCL_DEBUG"),
        ("NCCL_SOCKET_NTHREAD", "NCCL_SOCKET_NTHREADS"),
        ("NCCL_NET_GDR_LEVELS", "NCCL_NET_GDR_LEVEL"),
        ("NCCL_GDRCOPY_ENABLE", ""),
        ("NCCL_OFI_RDMA_MIN_POSTED_CONTROL_BUFFERS", ""),
    ],
)
def test_a_misspelt_variable_is_reported_with_the_right_one(name: str, right: str) -> None:
    assert [each.fix for each in misspelt({name: "1"})] == ([f"rename it to {right}"] if right else [])


@pytest.mark.parametrize(
    "value", ["Ring", "tree,ring", "^tree", "allreduce:^tree", "ring,nvls;allreduce:tree;broadcast:ring"]
)
def test_algorithms_that_nccl_knows_pass(value: str) -> None:
    assert wrong_algorithms({"NCCL_ALGO": value}) == []


WRONG = {
    "rings": ("NCCL_ALGO", "'Ring'"),
    "LL256": ("NCCL_PROTO", "'LL128'"),
    "all_reduce:ring": ("NCCL_ALGO", "function"),
}


@pytest.mark.parametrize("value", WRONG)
def test_algorithms_that_nccl_refuses_are_reported(value: str) -> None:
    name, word = WRONG[value]
    (problem,) = wrong_algorithms({name: value})
    assert word in problem.what
