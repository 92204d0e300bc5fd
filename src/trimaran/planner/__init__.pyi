"""Public names of `trimaran.planner`, and the modules that they come from. They are imported on first use."""

from .axis_rules import check_axes as check_axes, check_hf_model as check_hf_model, check_tensor as check_tensor
from .balance_stages import MeasuredStages as MeasuredStages, balanced_cut as balanced_cut, present_cut as present_cut
from .branch_and_bound import TIE_RATIO as TIE_RATIO, find_plans as find_plans
from .change_plan import (
    apply_patch as apply_patch, change_run as change_run, is_in_place as is_in_place, patch_between as patch_between,
)
from .choose import choose as choose, no_fit_error as no_fit_error
from .comm_choices import choose_comm as choose_comm
from .emit.emission import Emission as Emission
from .emit.peft import PEFT_FILE as PEFT_FILE
from .evaluator import PlanEvaluator as PlanEvaluator
from .example_lines import example_text as example_text
from .explain import MEANING as MEANING, PHASE_MEANING as PHASE_MEANING, explain as explain
from .hf_rules import check_hf_facts as check_hf_facts
from .hints import with_frozen_tower as with_frozen_tower
from .least_memory import fits_on as fits_on, resized_cluster as resized_cluster, smallest_cluster as smallest_cluster
from .legal import (
    check_disk as check_disk, check_fp8 as check_fp8, check_fp8_recipe as check_fp8_recipe,
    check_objective as check_objective, check_plan as check_plan,
)
from .memory_ladder import (
    Patch as Patch, all_changes as all_changes, cheapest_first as cheapest_first, describe_change as describe_change,
    may_expand_segments as may_expand_segments, next_rung as next_rung, plan_bytes as plan_bytes,
    plan_with as plan_with,
)
from .neighbours import (
    CHANGES as CHANGES, keeps_pins as keeps_pins, neighbour_patches as neighbour_patches, neighbours as neighbours,
)
from .predict_bulk import MAX_LINE_BYTES as MAX_LINE_BYTES, answer_line as answer_line, predict_line as predict_line
from .predict_request import job_of as job_of
from .question import GOALS as GOALS, Goal as Goal, NearMiss as NearMiss, PlanAnswer as PlanAnswer, Question as Question
from .read_config import ReadConfig as ReadConfig
from .read_pins import read_pins as read_pins
from .reliability import reliability_of as reliability_of
from .risk import OFFLOAD_RATIO as OFFLOAD_RATIO
from .search import best_plans as best_plans, predicted as predicted, search as search
from .serving_plans import (
    ServingQuestion as ServingQuestion, plan_serving as plan_serving, tensor_degrees as tensor_degrees,
)
from .space import Space as Space
from .tower_rules import check_towers as check_towers
from .unequal_rules import check_micro_batches as check_micro_batches
from .rank_environment import (
    DEBUG_VARIABLES as DEBUG_VARIABLES, allocator_settings as allocator_settings, worker_environment as worker_environment,
)
