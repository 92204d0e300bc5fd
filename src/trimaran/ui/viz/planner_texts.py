"""Texts of the planner, which has plain strings, as texts that know their template: reasons, hints and payloads.

A text that matches no template stays as it is, in English.
"""

import re
from collections.abc import Sequence

from trimaran.ui.language import as_is, say

# As `planner/search/rejections.py`, `planner/search/rejections.py` and `planner/hints.py` write them; the first that
# matches counts.
TEMPLATES = (
    "{what} with --set {setting}, which changes the results: {times} times as fast",
    "{hint}: {times} times as fast",
    "{hint}: a plan fits in {size} a device",
    "{hint}: a plan fits",
    "set {field} to {value}, which changes the results a little",
    "set {field} to {value}",
    "use nodes with {size} of memory",
    "use {cluster}",
    "halve sequences to {count}, with twice as many",
    "freeze {tower}",
    "leave plan.{field} out",
    "train a LoRA adapter, not the whole model, with --set {setting}",
    "{size} of each device stay free",
    "as fast, but {risk}",
    "{gain} faster, but {risk}",
    "{gain} slower, and {risk}",
    "{gain} faster, and plan.{field} is pinned",
    "{gain} faster, within the model's error",
    "pins {size} of host memory a node",
    "offloads {what}",
    "splits the model by {axes} axis instead of {own}",
    "splits the model by {axes} axes instead of {own}",
    "its gradients are summed during backward, so no CUDA graph can launch its kernels: {time} more",
    "no CUDA graph can launch its kernels: {time} more",
    "recompute costs {time} more",
    "loss {loss} costs {time} more",
    "offload costs {time} more",
    "the update takes {time} more",
    "smaller matmuls take {time} longer",
    "{term} takes {time} more",
    "needs {size} more",
    "bubble {share}",
    "{size} over, {host} over on the host",
    "{size} over on the host",
    "{size} over",
    "{payload} exposed {time} on {link}",
    "{payload} for {time}",
    "{payload} on {link}",
)
WORDS = (
    "none", "not simpler", "does not run", "compress gradients", "synchronise less often", "optimizer", "parameters",
    "activations", "gradients", "all-gather of weights", "tensor slices", "gradients of images",
    "parts of the sequence", "experts", "between stages", "weights of replicas", "sums of the step",
    "waiting for the slowest rank", "copies of gathered weights", "computing slowed by collectives",
    "communication", "comm", "allocator",
)  # fmt: skip
NESTED = ("hint", "risk", "what", "own", "payload", "term")  # values that are such texts themselves


PATTERNS: Sequence[tuple[str, re.Pattern[str]]] = [
    (each, re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(each)))) for each in TEMPLATES
]


def planner_text(text: str) -> str:
    """Return the planner's text with the template that it was made of."""
    if text in WORDS:
        return say(text)
    for template, pattern in PATTERNS:
        if (found := pattern.fullmatch(text)) is not None:
            values = found.groupdict()
            return say(template, **{name: planner_text(value) if name in NESTED else value
                                    for name, value in values.items()})  # fmt: skip
    return as_is(text)
