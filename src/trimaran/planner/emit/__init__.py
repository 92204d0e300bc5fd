"""Emitters: a plan as the configuration of other training tools. Nothing is written to disk here."""

from collections.abc import Callable, Mapping

from trimaran.core import Plan, UserError, did_you_mean
from trimaran.planner.emit.accelerate import emit_accelerate
from trimaran.planner.emit.deepspeed import emit_deepspeed
from trimaran.planner.emit.emission import Emission, refusal
from trimaran.planner.emit.hf_trainer import emit_hf_trainer
from trimaran.planner.emit.megatron import emit_megatron
from trimaran.planner.emit.torchtitan import emit_torchtitan
from trimaran.planner.question import Question

EMITTERS: Mapping[str, Callable[[Plan, Question], Emission]] = {
    "accelerate": emit_accelerate,
    "deepspeed": emit_deepspeed,
    "hf-trainer": emit_hf_trainer,
    "torchtitan": emit_torchtitan,
    "megatron": emit_megatron,
}


def emit(tool: str, plan: Plan, question: Question) -> Emission:
    """Return the tool's configuration and launch command for `plan`, a legal plan of the question.

    Degrees, batch, sharding, precision, recompute, offload and schedule are exactly the plan's, or the plan is refused.
    What only changes the speed, such as compiled blocks in a tool without them, becomes a note.
    """
    if tool not in EMITTERS:
        raise UserError(
            "P060.no-emitter",
            where="--emit",
            tool=tool,
            guess=did_you_mean(tool, EMITTERS),
            emitters=", ".join(EMITTERS),
        )
    if plan.micro_batches:
        raise refusal(tool, "data ranks with different numbers of rows", "it gives every rank the same",
                      where="plan.micro_batches", fix="leave it out, and name equal devices")  # fmt: skip
    return EMITTERS[tool](plan, question)


__all__ = ["EMITTERS", "Emission", "emit"]
