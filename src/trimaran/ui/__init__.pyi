"""Public names of `trimaran.ui`, and the modules that they come from. They are imported on first use."""

from .assistant.docs_search import DocsIndex as DocsIndex, docs_folder as docs_folder
from .language import (
    as_is as as_is, chinese as chinese, language_of as language_of, say as say, speaking as speaking, translate as
    translate, translate_view as translate_view,
)
from .report.curves import MAX_POINTS as MAX_POINTS, curve as curve, spread as spread
from .report.draw_figure import (
    LABEL_GAP as LABEL_GAP, MAX_LABEL as MAX_LABEL, draw_figure as draw_figure, end_labels as end_labels,
    spread_apart as spread_apart,
)
from .report.figure_axis import (
    FigureAxis as FigureAxis, axis_for as axis_for, even_axis as even_axis, even_labels as even_labels, tick_label
    as tick_label,
)
from .report.markup import Html as Html, tag as tag
from .report.part_facts import ALWAYS as ALWAYS, GROUPS as GROUPS, LIVE as LIVE
from .report.plots import MACHINE_TITLES as MACHINE_TITLES, SPREAD_TITLES as SPREAD_TITLES
from .report.rank_pictures import (
    HELD as HELD, LEVELS as LEVELS, MEANINGS as MEANINGS, STATES as STATES, grid_columns as grid_columns, level_of
    as level_of, rank_layout as rank_layout, rank_matrix as rank_matrix,
)
from .report.run_comparison import (
    AXES as AXES, PLOTS as PLOTS, at_step as at_step, compare_page as compare_page, compare_runs as compare_runs,
    curve_plots as curve_plots, differences as differences,
)
from .report.run_feed import PARTS as PARTS, RunFeed as RunFeed, read_range as read_range
from .report.run_sections import (
    LEDGER_KINDS as LEDGER_KINDS, WATERFALL as WATERFALL, facts_of as facts_of, page_of as page_of,
)
from .report.sections import NAMES as NAMES, OUTCOMES as OUTCOMES, split_verdict as split_verdict
from .report.sparse_feeds import (
    DetailsFeed as DetailsFeed, MAX_STEPS as MAX_STEPS, MachinesFeed as MachinesFeed, detailed_steps as
    detailed_steps,
)
from .report.step_pyramid import MAX_SINGLE_STEPS as MAX_SINGLE_STEPS, StepPyramid as StepPyramid
from .report.view_page import view_page as view_page
from .viz.catalogue import SHORT_NAMES as SHORT_NAMES, VIEWS as VIEWS, build_view as build_view
from .viz.collectives import OPERATIONS as OPERATIONS, collective_steps as collective_steps
from .viz.ddp_buckets import (
    backward_blocks as backward_blocks, exposed_seconds as exposed_seconds, reduce_in_buckets as reduce_in_buckets,
    reduced_at as reduced_at, slowed as slowed,
)
from .viz.figures import (
    Bars as Bars, Control as Control, FileText as FileText, GraphArrow as GraphArrow, GraphNode as GraphNode, Lines
    as Lines, Matrix as Matrix, NodeGraph as NodeGraph, PlanView as PlanView, Point as Point, Scatter as Scatter,
    Span as Span, Table as Table, Timeline as Timeline, Unit as Unit, ValueSeries as ValueSeries, show_value as
    show_value, view_as_dict as view_as_dict,
)
from .viz.pipeline import (
    SCHEDULES as SCHEDULES, equal_stages as equal_stages, most_held as most_held, with_slow_rank as with_slow_rank,
)
from .viz.rank_grid import ORDER as ORDER, groups_of as groups_of
from .viz.shard_timeline import (
    gathered_blocks as gathered_blocks, gathered_bytes as gathered_bytes, shard_step as shard_step, waited_seconds
    as waited_seconds,
)
from .viz.subject import RunMedians as RunMedians, Subject as Subject
from .viz.tensor_split import layers_of as layers_of
from .viz.viz_request import life_of as life_of, read_subject as read_subject
from .viz.zero_stages import bytes_of as bytes_of, least_ranks as least_ranks, sent_bytes as sent_bytes
from .web.controls import slider_values as slider_values
from .web.frame import PAGES as PAGES
from .web.home_page import COLUMNS as COLUMNS, FILTERS as FILTERS
from .web.runs_root import (
    FOLDER as FOLDER, RunsRoot as RunsRoot, SLUG as SLUG, check_runs_root as check_runs_root, start_run as
    start_run,
)
from .web.security import (
    Credentials as Credentials, SecurityMiddleware as SecurityMiddleware, content_policy as content_policy,
)
from .web.views_page import SubjectCache as SubjectCache, SubjectName as SubjectName
from .web.workshop import (
    PIN_VALUES as PIN_VALUES, PlanDesk as PlanDesk, PlanInputs as PlanInputs, TOP as TOP, first_answer as
    first_answer, launch_text as launch_text, launch_words as launch_words, pin_values as pin_values, recipe_text as
    recipe_text, search_plans as search_plans,
)
from .web.workshop_page import (
    OUTSIDE as OUTSIDE, POINT_KINDS as POINT_KINDS, TEXTS as TEXTS, answer_markup as answer_markup, memory_stack as
    memory_stack, pareto_figure as pareto_figure, time_stack as time_stack,
)
