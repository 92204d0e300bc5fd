"""Public names of `trimaran.app`, and the modules that they come from. They are imported on first use."""

from .assistant.docs_search import DocsIndex as DocsIndex, docs_folder as docs_folder
from .commands.bench import (
    complete_collectives as complete_collectives, complete_comm_groups as complete_comm_groups,
)
from .commands.drill import Drills as Drills, complete_target as complete_target
from .commands.jobs import JOB_TARGETS as JOB_TARGETS
from .commands.resume import refuse_other_run as refuse_other_run
from .commands.simulate import complete_plan as complete_plan
from .commands.train import profile_settings as profile_settings
from .main import COMMANDS as COMMANDS, build_app as build_app, main as main
from .messages.error_language import (
    PLACE as PLACE, catalogue as catalogue, chosen_language as chosen_language, first_codes as first_codes,
    shown_errors as shown_errors,
)
from .new_recipe.choices import choose_values as choose_values, learning_rate as learning_rate
from .new_recipe.data_facts import DataFacts as DataFacts, look_at_data as look_at_data
from .new_recipe.model_facts import ModelFacts as ModelFacts, look_at_model as look_at_model
from .report.axis_scale import Scale as Scale, round_scale as round_scale, tick_labels as tick_labels
from .report.compare_facts import at_step as at_step, compare_runs as compare_runs, differences as differences
from .report.compare_sections import (
    AXES as AXES, PLOTS as PLOTS, compare_page as compare_page, curve_plots as curve_plots,
)
from .report.detailed_steps import MAX_STEPS as MAX_STEPS, detailed_steps as detailed_steps
from .report.details_feed import DetailsFeed as DetailsFeed
from .report.downsample import MAX_POINTS as MAX_POINTS, curve as curve, spread as spread
from .report.event_sections import OUTCOMES as OUTCOMES
from .report.figure_axes import FigureAxis as FigureAxis, axis_for as axis_for, tick_label as tick_label
from .report.goodput_waterfall import GROUPS as GROUPS
from .report.layout_picture import HELD as HELD, MEANINGS as MEANINGS, rank_layout as rank_layout
from .report.machines import MachinesFeed as MachinesFeed
from .report.markup import Html as Html, tag as tag
from .report.page import page_of as page_of
from .report.plot import (
    Curve as Curve, LABEL_GAP as LABEL_GAP, MAX_LABEL as MAX_LABEL, Plot as Plot, end_labels as end_labels,
    spread_apart as spread_apart,
)
from .report.plots import MACHINE_TITLES as MACHINE_TITLES, SPREAD_TITLES as SPREAD_TITLES
from .report.rank_matrix import (
    LEVELS as LEVELS, STATES as STATES, grid_columns as grid_columns, level_of as level_of, rank_matrix as rank_matrix,
)
from .report.report_facts import facts_of as facts_of
from .report.run_commands import ALWAYS as ALWAYS, LIVE as LIVE
from .report.run_feed import PARTS as PARTS, RunFeed as RunFeed, read_range as read_range
from .report.sections import NAMES as NAMES, split_verdict as split_verdict
from .report.step_pyramid import MAX_SINGLE_STEPS as MAX_SINGLE_STEPS, StepPyramid as StepPyramid
from .report.time_sections import LEDGER_KINDS as LEDGER_KINDS, WATERFALL as WATERFALL
from .report.view_page import draw_figure as draw_figure, view_page as view_page
from .report.words import say as say
from .request.ask_hf_facts import ask_hf_facts as ask_hf_facts
from .request.calibrate_cpu import cluster_of_text as cluster_of_text
from .request.calibration_file import write_calibration as write_calibration
from .request.comm_groups import (
    axis_groups as axis_groups, default_groups as default_groups, parse_collectives as parse_collectives,
    parse_groups as parse_groups, parse_sizes as parse_sizes,
)
from .request.comm_links import calibrated as calibrated, find_outliers as find_outliers
from .request.comm_request import CommOptions as CommOptions, find_places as find_places
from .request.emit_files import SlowerBy as SlowerBy, search_for_tool as search_for_tool, show_slower as show_slower
from .request.machine_check import interface_to as interface_to, refuse_unfit_machine as refuse_unfit_machine
from .request.measured_plans import runs_in as runs_in
from .request.options import (
    complete_cluster as complete_cluster, complete_goal as complete_goal, complete_lines as complete_lines,
    complete_model_or_recipe as complete_model_or_recipe, complete_recipe as complete_recipe,
    complete_run as complete_run, complete_run_or_recipe as complete_run_or_recipe,
    complete_setting as complete_setting, complete_tool as complete_tool, find_run as find_run,
)
from .request.plan_answer import (
    PlanReport as PlanReport, all_plans as all_plans, as_dict as as_dict, build_plan_report as build_plan_report,
    pareto_set as pareto_set, with_files as with_files, with_goal as with_goal, with_top as with_top,
)
from .request.plan_request import (
    PlanRequest as PlanRequest, adapter_setting as adapter_setting, read_plan_request as read_plan_request,
)
from .request.recipe_tokenizer import with_model_tokenizer as with_model_tokenizer
from .request.rehearse_request import chosen_ranks as chosen_ranks, read_rehearse_request as read_rehearse_request
from .request.request import Request as Request, read_question as read_question, resolve as resolve
from .request.run_cost import CostTerms as CostTerms, read_cost_terms as read_cost_terms, run_cost_of as run_cost_of
from .request.run_life_facts import life_of as life_of
from .request.trained_weights import find_weights as find_weights
from .request.trainer_plan import trainer_plan as trainer_plan
from .request.tuned_recipe import (
    HEADER as HEADER, refuse_other_file as refuse_other_file, tuned_recipe_text as tuned_recipe_text,
    write_tuned_recipe as write_tuned_recipe,
)
from .request.viz_request import read_subject as read_subject
from .request.vllm_command import (
    OPTIONS as OPTIONS, VllmRequest as VllmRequest, check_folder as check_folder, config_text as config_text,
    vllm_options as vllm_options,
)
from .session.comm_session import tree_of as tree_of
from .session.launch_session import write_files as write_files
from .session.launched_job import exit_code as exit_code
from .session.open_trained import open_trained as open_trained
from .session.prepare_data import check_all_data as check_all_data
from .session.schedule_change import learning_rate_change as learning_rate_change
from .session.session import run_and_show as run_and_show
from .session.stop_signals import (
    PAUSED_NOTICE_SECONDS as PAUSED_NOTICE_SECONDS, PausedSupervisorNotice as PausedSupervisorNotice,
    StopSignals as StopSignals,
)
from .session.torchrun_rank import as_recorded as as_recorded
from .session.tune_session import refit_rates as refit_rates
from .terminal import PrintableStream as PrintableStream, printable as printable
from .views.clean_console import CleanConsole as CleanConsole, open_console as open_console
from .views.data_notices import text_notices as text_notices
from .views.decisions_view import command_of_decision as command_of_decision
from .views.diagnosis import command_of as command_of, diagnose_run as diagnose_run
from .views.generated_text import show_generation as show_generation
from .views.live import follow as follow, show_log as show_log
from .views.loss_bound import loss_bound_text as loss_bound_text
from .views.plan_answer_view import show_report as show_report
from .views.plan_view import show_plan as show_plan, show_terms as show_terms
from .views.profile_view import show_profile as show_profile
from .views.run_findings import FindingsPoller as FindingsPoller, RunDiagnosis as RunDiagnosis, RunFinding as RunFinding
from .views.run_prompt import generate_command as generate_command
from .views.run_state import DETAILS as DETAILS, RunState as RunState, Status as Status
from .views.run_view import difference as difference, draw as draw, line as line
from .views.status_lines import status_lines as status_lines
from .views.step_history import StepHistory as StepHistory
from .views.summary import (
    explain_failure as explain_failure, next_commands as next_commands, readable_sample as readable_sample,
    summarise as summarise,
)
from .views.text_chart import stacked_bar as stacked_bar
from .views.tune_view import describe as describe
from .web.chat_page import costs_markup as costs_markup, talk_markup as talk_markup
from .web.frame import PAGES as PAGES
from .web.home_page import COLUMNS as COLUMNS, FILTERS as FILTERS
from .web.language import chinese as chinese, language_of as language_of, say_in as say_in, speaking as speaking
from .web.model_server import (
    Answer as Answer, ChatSettings as ChatSettings, checked_address as checked_address, parse_metrics as parse_metrics,
    take_part as take_part,
)
from .web.runs_root import RunsRoot as RunsRoot, SLUG as SLUG, check_runs_root as check_runs_root
from .web.security import (
    Credentials as Credentials, SecurityMiddleware as SecurityMiddleware, content_policy as content_policy,
)
from .web.start_run import FOLDER as FOLDER, start_run as start_run
from .web.view_controls import slider_values as slider_values
from .web.view_subjects import SubjectCache as SubjectCache, SubjectName as SubjectName
from .web.workshop import (
    PIN_VALUES as PIN_VALUES, PlanDesk as PlanDesk, PlanInputs as PlanInputs, TOP as TOP, first_answer as first_answer,
    launch_text as launch_text, launch_words as launch_words, pin_values as pin_values, recipe_text as recipe_text,
    search_plans as search_plans,
)
from .web.workshop_markup import (
    OUTSIDE as OUTSIDE, POINT_KINDS as POINT_KINDS, answer_markup as answer_markup, memory_stack as memory_stack,
    pareto_figure as pareto_figure, time_stack as time_stack,
)
from .web.workshop_page import TEXTS as TEXTS
from .wrong_arguments import COMMAND_ALIASES as COMMAND_ALIASES
