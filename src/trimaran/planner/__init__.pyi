"""Public names of `trimaran.planner`, and the modules that they come from. They are imported on first use."""

from .balance_stages import MeasuredStages as MeasuredStages, balanced_cut as balanced_cut, present_cut as present_cut
from .change_plan import (
    apply_patch as apply_patch, change_run as change_run, is_in_place as is_in_place, patch_between as
    patch_between,
)
from .emit import EMITTERS as EMITTERS
from .emit.emission import Emission as Emission, PEFT_FILE as PEFT_FILE
from .hints import (
    INEXACT as INEXACT, adapter_changes as adapter_changes, cluster_sizes as cluster_sizes, first_that_fits as
    first_that_fits, fits_on as fits_on, resized_cluster as resized_cluster, smallest_cluster as smallest_cluster,
    with_frozen_tower as with_frozen_tower,
)
from .measure.fit_rates import fit_rates as fit_rates
from .measure.measured_run import (
    RankStart as RankStart, plans_in_force as plans_in_force, read_measured_run as read_measured_run,
)
from .measure.rank_task import (
    MeasuredRank as MeasuredRank, RankAnswer as RankAnswer, RankTask as RankTask, run_rank as run_rank,
)
from .measure.rate_model import (
    Observation as Observation, Parameter as Parameter, StepModel as StepModel, parameters_of as parameters_of,
)
from .measure.rehearsal import (
    RankCost as RankCost, Rehearsal as Rehearsal, RehearsalRequest as RehearsalRequest, RehearsedRank as
    RehearsedRank, compose_step as compose_step, extrapolated as extrapolated, predicted_rank as predicted_rank,
    refuse_fewer_layers as refuse_fewer_layers, with_layers as with_layers,
)
from .measure.run_index import (
    find_runs as find_runs, index_path as index_path, measured_plans as measured_plans, open_index as open_index,
    pins_of as pins_of, stamp_of as stamp_of,
)
from .measure.step_time_model import (
    ExpectedTime as ExpectedTime, StepTimeModel as StepTimeModel, expected_gain as expected_gain,
)
from .measure.trial_record import (
    MeasuredTrial as MeasuredTrial, TrialLimits as TrialLimits, TrialStore as TrialStore, TriedCandidate as
    TriedCandidate, TuneCandidate as TuneCandidate, combine as combine, locked_folder as locked_folder,
)
from .measure.tuner import (
    TrialCosts as TrialCosts, TuneResult as TuneResult, TuneTask as TuneTask, Tuner as Tuner, best_of as best_of,
    costs_of as costs_of, propose as propose, why_not as why_not,
)
from .memory_ladder import (
    FIXED_TERMS as FIXED_TERMS, MAX_MEMORY_FRACTION as MAX_MEMORY_FRACTION, Patch as Patch, all_changes as
    all_changes, cheapest_first as cheapest_first, describe_change as describe_change, may_expand_segments as
    may_expand_segments, next_rung as next_rung, plan_bytes as plan_bytes, plan_with as plan_with,
)
from .plan_choices import BUCKET_SIZES_MB as BUCKET_SIZES_MB, MEBIBYTE as MEBIBYTE, choose_comm as choose_comm
from .predict_bulk import (
    MAX_LINE_BYTES as MAX_LINE_BYTES, answer_line as answer_line, example_text as example_text, predict_line as
    predict_line,
)
from .predict_request import job_of as job_of
from .question import (
    GOALS as GOALS, Goal as Goal, MEANING as MEANING, NearMiss as NearMiss, PHASE_MEANING as PHASE_MEANING,
    PlanAnswer as PlanAnswer, Question as Question, explain as explain, isolates_documents as isolates_documents,
)
from .read.read_accelerate import read_pins as read_pins
from .read.read_config import ReadConfig as ReadConfig
from .reliability import reliability_of as reliability_of
from .rules.axis_rules import (
    check_axes as check_axes, check_hf_facts as check_hf_facts, check_hf_model as check_hf_model, check_tensor as
    check_tensor, check_towers as check_towers,
)
from .rules.legal import (
    check_disk as check_disk, check_fp8 as check_fp8, check_fp8_recipe as check_fp8_recipe, check_objective as
    check_objective, check_plan as check_plan, check_question as check_question,
)
from .rules.replica_rules import can_measure_rows as can_measure_rows, check_micro_batches as check_micro_batches
from .search.branch_and_bound import (
    FoundPlan as FoundPlan, TIE_RATIO as TIE_RATIO, complexity as complexity, find_plans as find_plans,
)
from .search.evaluator import PlanEvaluator as PlanEvaluator
from .search.goals import (
    best_plans as best_plans, choose as choose, no_fit_error as no_fit_error, nothing_fits as nothing_fits,
    predicted as predicted, search as search,
)
from .search.neighbours import (
    fewer_launches as fewer_launches, keeps_pins as keeps_pins, larger_micro_batch as larger_micro_batch,
    larger_micro_batches as larger_micro_batches, neighbour_patches as neighbour_patches, neighbours as neighbours,
)
from .search.rejections import OFFLOAD_RATIO as OFFLOAD_RATIO, reason_lost as reason_lost, too_big as too_big
from .search.space import Space as Space
