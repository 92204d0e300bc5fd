"""All ranks load the same plug-ins of the same versions, or fail alike."""

from typing import Any

from trimaran.core import Recipe, UserError
from trimaran.core.recipe import USED_BY_RANKS, load_used_plugins, plugin_records, used_plugins
from trimaran.parallel.comm.json_exchange import all_gather_json


def agree_on_plugins(recipe: Recipe) -> None:
    """Load the recipe's plug-ins that ranks use.

    If a rank lacks one, cannot load it or has another version, all ranks raise the same UserError. Every rank must call
    it, after joining the process group.
    """
    if not used_plugins(recipe):
        return
    error: dict[str, Any] | None = None
    try:
        load_used_plugins(recipe, USED_BY_RANKS)
    except UserError as found:
        error = found.as_dict()
    on_ranks = [each for each in plugin_records(recipe) if each["kind"] in USED_BY_RANKS]
    answers = all_gather_json([error, on_ranks])
    for rank, (error, _) in enumerate(answers):
        if error is not None:
            raise UserError(error["code"], error["what"], where=f"{error['where']}, on rank {rank}", fix=error["fix"])
    for rank, (_, others) in enumerate(answers):
        for first, other in zip(answers[0][1], others, strict=True):
            if first != other:
                raise UserError("K078", f"rank 0 has {_describe(first)}, and rank {rank} has {_describe(other)}",
                                where=f"the {first['kind']} '{first['name']}'",
                                fix="install the same version on every machine of the run")  # fmt: skip


def _describe(record: dict[str, str]) -> str:
    return f"{record.get('distribution')} {record.get('version')}"
