"""Public names of `trimaran.viz`, and the modules that they come from. They are imported on first use."""

from .catalogue import SHORT_NAMES as SHORT_NAMES, VIEWS as VIEWS, build_view as build_view, find_view as find_view
from .collectives import OPERATIONS as OPERATIONS, collective_steps as collective_steps
from .ddp_buckets import (
    backward_blocks as backward_blocks, exposed_seconds as exposed_seconds, reduce_in_buckets as reduce_in_buckets,
    reduced_at as reduced_at, slowed as slowed,
)
from .figures import (
    Bars as Bars, Control as Control, Figure as Figure, FileText as FileText, Formula as Formula,
    GraphArrow as GraphArrow, GraphNode as GraphNode, Lines as Lines, Matrix as Matrix, Mode as Mode,
    NodeGraph as NodeGraph, PlanView as PlanView, Point as Point, Scatter as Scatter, Span as Span, Table as Table,
    Timeline as Timeline, Unit as Unit, ValueSeries as ValueSeries, view_as_dict as view_as_dict,
)
from .pipeline import (
    SCHEDULES as SCHEDULES, equal_stages as equal_stages, most_held as most_held, with_slow_rank as with_slow_rank,
)
from .planner_texts import TEMPLATES as TEMPLATES, WORDS as WORDS, planner_text as planner_text
from .rank_grid import ORDER as ORDER, groups_of as groups_of
from .shard_timeline import (
    gathered_blocks as gathered_blocks, gathered_bytes as gathered_bytes, shard_step as shard_step,
    waited_seconds as waited_seconds,
)
from .show_values import show_value as show_value
from .subject import LaunchText as LaunchText, RunLife as RunLife, RunMedians as RunMedians, Subject as Subject
from .tensor_split import layers_of as layers_of
from .texts import (
    as_is as as_is, say as say, texts_of as texts_of, translate as translate, translate_view as translate_view,
)
from .zero_stages import bytes_of as bytes_of, least_ranks as least_ranks, sent_bytes as sent_bytes
