"""Public names of `trimaran.app`, and the modules that they come from. They are imported on first use."""

from .drill.drill import Drills as Drills, complete_target as complete_target
from .drill.drill_run import (
    DrillResult as DrillResult, Observed as Observed, RunObserver as RunObserver, drills_file as drills_file,
    is_complete as is_complete, is_own as is_own, judge as judge, mark_as_own as mark_as_own,
)
from .drill.inject import (
    DrillFault as DrillFault, FaultName as FaultName, INJECTIONS as INJECTIONS, KINDS as KINDS, MAX_FILL_BYTES as
    MAX_FILL_BYTES, damage_checkpoint as damage_checkpoint, filled_disk as filled_disk, find_processes as
    find_processes, inject as inject, parse_kill_in_change as parse_kill_in_change, parse_slow as parse_slow,
    refuse_shared_disk as refuse_shared_disk,
)
from .machine.bench import (
    complete_collectives as complete_collectives, complete_comm_groups as complete_comm_groups, write_calibration as
    write_calibration,
)
from .machine.comm_answer import (
    calibrated as calibrated, describe_group as describe_group, find_outliers as find_outliers, fit_cells as
    fit_cells, headline as headline, notes as notes, rate_unit as rate_unit, show_rate as show_rate, show_time as
    show_time, tree_of as tree_of,
)
from .machine.comm_request import (
    CommOptions as CommOptions, axis_groups as axis_groups, default_groups as default_groups, find_places as
    find_places, parse_collectives as parse_collectives, parse_groups as parse_groups, parse_sizes as parse_sizes,
)
from .machine.machine_check import interface_to as interface_to, refuse_unfit_machine as refuse_unfit_machine
from .main import COMMANDS as COMMANDS, build_app as build_app, main as main
from .plan.history import runs_in as runs_in
from .plan.new_recipe import choose_values as choose_values, learning_rate as learning_rate
from .plan.other_tools import SlowerBy as SlowerBy, search_for_tool as search_for_tool
from .plan.plan_answer import (
    CostTerms as CostTerms, PlanReport as PlanReport, all_plans as all_plans, as_dict as as_dict, build_plan_report
    as build_plan_report, pareto_set as pareto_set, pinned_recipe_text as pinned_recipe_text, read_cost_terms as
    read_cost_terms, run_cost_of as run_cost_of, run_settings as run_settings, show_slower as show_slower,
    trainer_plan as trainer_plan, with_files as with_files, with_goal as with_goal, with_top as with_top,
)
from .plan.plan_view import (
    add_model as add_model, facts_table as facts_table, occupancy as occupancy, show_plan as show_plan, show_report
    as show_report, show_terms as show_terms, unit_of as unit_of,
)
from .plan.rehearse_answer import chosen_ranks as chosen_ranks, read_rehearse_request as read_rehearse_request
from .plan.run_trial import MAX_STEADY_STEPS as MAX_STEADY_STEPS, TrialWatch as TrialWatch, trial_recipe as trial_recipe
from .plan.simulate import complete_plan as complete_plan
from .plan.tune_answer import (
    HEADER as HEADER, describe as describe, refit_rates as refit_rates, refuse_other_file as refuse_other_file,
    tuned_recipe_text as tuned_recipe_text, write_tuned_recipe as write_tuned_recipe,
)
from .recipe.ask_torch import ask_hf_facts as ask_hf_facts, cluster_of_text as cluster_of_text
from .recipe.facts import (
    DataFacts as DataFacts, ModelFacts as ModelFacts, look_at_data as look_at_data, look_at_model as look_at_model,
)
from .recipe.options import (
    Json as Json, RUNS as RUNS, RunName as RunName, Settings as Settings, TrainedModelName as TrainedModelName,
    complete_cluster as complete_cluster, complete_data as complete_data, complete_goal as complete_goal,
    complete_lines as complete_lines, complete_model_or_recipe as complete_model_or_recipe, complete_recipe as
    complete_recipe, complete_run as complete_run, complete_run_or_recipe as complete_run_or_recipe,
    complete_setting as complete_setting, complete_tool as complete_tool, find_run as find_run, path_argument as
    path_argument, program_name as program_name, starting as starting,
)
from .recipe.plan_request import (
    PlanRequest as PlanRequest, adapter_setting as adapter_setting, read_plan_request as read_plan_request,
    say_reference as say_reference,
)
from .recipe.prepare_data import check_all_data as check_all_data, text_notices as text_notices
from .recipe.recipe_files import with_model_tokenizer as with_model_tokenizer
from .recipe.request import (
    Request as Request, read_question as read_question, read_recipe as read_recipe, refuse_other_machine as
    refuse_other_machine, resolve as resolve,
)
from .runs.decisions_view import command_of_decision as command_of_decision
from .runs.live import follow as follow, show_log as show_log
from .runs.run_findings import (
    FindingsPoller as FindingsPoller, RunDiagnosis as RunDiagnosis, RunFinding as RunFinding, command_of as
    command_of, diagnose_run as diagnose_run,
)
from .runs.run_prompt import generate_command as generate_command
from .runs.run_state import (
    ACTIVE_STATUSES as ACTIVE_STATUSES, DETAILS as DETAILS, RunState as RunState, Status as Status, finite as
    finite,
)
from .runs.run_view import difference as difference, draw as draw, line as line
from .runs.status_lines import loss_bound_text as loss_bound_text, status_lines as status_lines
from .runs.step_history import StepHistory as StepHistory
from .runs.summary import (
    explain_failure as explain_failure, next_commands as next_commands, readable_sample as readable_sample,
    summarise as summarise,
)
from .show.clean_console import CleanConsole as CleanConsole, open_console as open_console
from .show.error_language import (
    Language as Language, chinese_texts as chinese_texts, chosen_language as chosen_language, shown_errors as
    shown_errors,
)
from .show.terminal import (
    PrintableStream as PrintableStream, printable as printable, raw_stream as raw_stream, tail as tail,
)
from .show.text_chart import (
    BLUE as BLUE, GREEN as GREEN, ORANGE as ORANGE, PURPLE as PURPLE, RED as RED, SKY as SKY, curve as curve,
    intervals as intervals, stacked_bar as stacked_bar,
)
from .train.jobs import JOB_TARGETS as JOB_TARGETS
from .train.launch_answer import exit_code as exit_code, preview_options as preview_options, write_files as write_files
from .train.profile import show_profile as show_profile
from .train.resume import refuse_other_run as refuse_other_run
from .train.session import (
    PAUSED_NOTICE_SECONDS as PAUSED_NOTICE_SECONDS, PausedSupervisorNotice as PausedSupervisorNotice, StopSignals as
    StopSignals, learning_rate_change as learning_rate_change, run_and_show as run_and_show,
)
from .train.torchrun_rank import as_recorded as as_recorded
from .train.train import profile_settings as profile_settings
from .wrong_arguments import COMMAND_ALIASES as COMMAND_ALIASES
