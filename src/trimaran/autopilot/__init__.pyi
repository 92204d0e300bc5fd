"""Public names of `trimaran.autopilot`, and the modules that they come from. They are imported on first use."""

from .controller import (
    Controller as Controller, DecisionLedger as DecisionLedger, control as control, only_controller as
    only_controller, read_answer as read_answer, read_sample as read_sample,
)
from .decision_loop import (
    ChangeAnswer as ChangeAnswer, DecisionLoop as DecisionLoop, MAX_SHIFTS as MAX_SHIFTS, Output as Output,
    PendingRequest as PendingRequest, RunSettings as RunSettings,
)
from .policy import (
    MemoryTrend as MemoryTrend, Proposal as Proposal, Situation as Situation, advise as advise, changes_course as
    changes_course, decide as decide, describe as describe, is_changeable as is_changeable, is_pinned as is_pinned,
    settings_of as settings_of, undo_of as undo_of, why_not as why_not,
)
from .propose_changes import (
    SLOW_RANKS as SLOW_RANKS, SLOW_RATIO as SLOW_RATIO, best_layout as best_layout, deal_by_speed as deal_by_speed,
    proposals_of as proposals_of, rows_by_speed as rows_by_speed, with_recovered_node as with_recovered_node,
    without_slow_node as without_slow_node,
)
from .trial import (
    AppliedChange as AppliedChange, Move as Move, TimedStep as TimedStep, TrialRecord as TrialRecord, find_shift as
    find_shift, next_move as next_move,
)
from .verdict import (
    Baseline as Baseline, StepWindow as StepWindow, baseline_of as baseline_of, compare as compare,
    smallest_gain_to_show as smallest_gain_to_show, steps_to_show as steps_to_show,
)
