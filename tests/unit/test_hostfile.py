"""Hosts of the ssh target: hostfiles and lists, and what is refused."""

import shlex
import subprocess
from pathlib import Path

import pytest

from trimaran.core import UserError
from trimaran.launch import parse_host, parse_hosts, read_hostfile

HOSTFILE = """\
# a comment
gpu-1 slots=8
gpu-2\tslots = 8 max_slots=16   # Open MPI

admin@gpu-3:2222 slots=4
[2001:db8::1]:2222
10.0.0.5
"""


def test_a_hostfile_is_read_as_open_mpi_and_deepspeed_write_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(HOSTFILE)
    specs = read_hostfile(path)
    assert specs == ["gpu-1=8", "gpu-2=8", "admin@gpu-3:2222=4", "[2001:db8::1]:2222", "10.0.0.5"]
    hosts = parse_hosts(specs)
    assert [host.slots for host in hosts] == [8, 8, 4, 0, 0]
    assert hosts[2].arguments == ["-p", "2222", "-l", "admin", "--", "gpu-3"]
    assert hosts[3].arguments == ["-p", "2222", "--", "2001:db8::1"]
    assert [host.label for host in hosts] == ["gpu-1", "gpu-2", "gpu-3-2222", "2001-db8-1-2222", "10.0.0.5"]


@pytest.mark.parametrize("text", ["-oProxyCommand=touch x", "a@-b", "-a@b", "$(touch x)", "a b", "a;b", "a\nb", "`x`",
                                  "", "@", "a@", "a:b", "日本", "a/b", "a'", "[::1", "a:99999", "*"])  # fmt: skip
def test_what_is_not_a_host_is_refused(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_host(text)
    assert refusal.value.code == "L010"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu-1 gpu-2", "'gpu-2' is not known in a hostfile"),
        ("gpu-1:4", "port 4"),
        ("# none", "names no host"),
        ("a\0b", "not a hostfile"),
        ("-x slots=2", "not a host"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"good slots=2\n{text}\n" if "none" not in text else text)
    with pytest.raises(UserError, match=words) as refusal:
        read_hostfile(path)
    assert str(path) in refusal.value.where
    assert ("line 2" in refusal.value.where) == (words not in ("names no host", "not a hostfile"))


def test_a_missing_hostfile_and_a_host_named_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(UserError, match="named twice"):
        parse_hosts(["a", "b", "a"])
    assert [host.label for host in parse_hosts(["a:2201", "a:2202"])] == ["a-2201", "a-2202"]


@pytest.mark.parametrize("spec", ["gpu-1", "admin@gpu-3:2222", "[2001:db8::1]:2222", "::1", "a_b.c=4"])
def test_a_host_is_one_word_for_a_shell_and_survives_a_round_trip(spec: str) -> None:
    host = parse_host(spec)
    assert parse_host(host.spec) == host
    assert shlex.quote(host.label) == host.label
    words = subprocess.run(["bash", "-c", f'printf "%s\\n" {shlex.join(host.arguments)}'], capture_output=True,
                           text=True, check=True).stdout.splitlines()  # fmt: skip
    assert words == host.arguments
