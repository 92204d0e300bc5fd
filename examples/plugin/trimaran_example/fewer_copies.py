"""An autopilot policy: no copies of the state in host memory while steps are short, whatever else could be changed.

A fault then costs the steps since the last checkpoint on disk.
"""

from trimaran.autopilot import Proposal, Situation

FIELD, SHORT_SECONDS = "checkpoint.memory", 5.0


class FewerCopies:
    contract = 1

    def choose(self, situation: Situation) -> Proposal | None:
        now = situation.settings[FIELD]
        if now == 0 or situation.baseline.step_seconds > SHORT_SECONDS:
            return None
        return Proposal(
            patch={FIELD: 0},
            undo={FIELD: now},
            gain=0.02,
            uncertainty=0.01,
            reason=f"steps take {situation.baseline.step_seconds:.2g} s: copies in memory save little",
            is_in_place=True,
        )
