"""The tower that a parameter or module belongs to, by its name."""

from collections.abc import Iterable, Mapping

from trimaran.core import UserError, did_you_mean


def tower_of(name: str, towers: Mapping[str, str]) -> str:
    """Return the tower of a parameter or module: the one with the longest matching prefix, else the last tower.

    `towers` maps each tower to its prefix, like `Network.towers`. Names without a tower belong to the root module;
    they count to the last tower, which computes the loss.
    """
    matching = [tower for tower, prefix in towers.items() if f"{name}.".startswith(prefix)]
    return max(matching, key=lambda tower: len(towers[tower]), default=[*towers][-1])


def refuse_unknown_tower(name: str, towers: Iterable[str], *, code: str, where: str) -> None:
    """Raise unless the tower exists."""
    known = list(towers)
    if name not in known:
        raise UserError(code, f"the network has no tower '{name}'{did_you_mean(name, known)}", where=where,
                        fix=f"its towers are {', '.join(known)}")  # fmt: skip
