"""Public names of `trimaran.runs`, and the modules that they come from. They are imported on first use."""

from .compile_cache import (
    INDUCTOR as INDUCTOR, TRITON as TRITON, compile_cache as compile_cache, compile_folder as compile_folder,
    refuse_unusable as refuse_unusable, use_bytecode_cache as use_bytecode_cache,
)
from .disk_folder import check_disk_folder as check_disk_folder, filesystem_of as filesystem_of, no_room as no_room
from .fault_texts import (
    CONNECTION_LOST as CONNECTION_LOST, GLOO_NOISE as GLOO_NOISE, HOST_RAN_OUT as HOST_RAN_OUT, OUT_OF_MEMORY as
    OUT_OF_MEMORY, find_refusal as find_refusal, memory_holes as memory_holes, says_connection_lost as
    says_connection_lost, says_out_of_memory as says_out_of_memory,
)
from .gloo_listeners import closed_listeners as closed_listeners, count_refused_packets as count_refused_packets
from .heartbeat import (
    HEADER_WORDS as HEADER_WORDS, Heartbeat as Heartbeat, HeartbeatBoard as HeartbeatBoard, STEP as STEP, Section as
    Section, VERSION as VERSION,
)
from .held_directory import (
    CONFIRM_SECONDS as CONFIRM_SECONDS, HeldDirectory as HeldDirectory, descriptor_of as descriptor_of,
    lock_directory as lock_directory,
)
from .journal import (
    Journal as Journal, LineFollower as LineFollower, forget_steps_after as forget_steps_after, last_step as
    last_step, parse_lines as parse_lines, read_json_lines as read_json_lines,
)
from .lease import (
    EXPIRY_SECONDS as EXPIRY_SECONDS, FENCED_SECONDS as FENCED_SECONDS, Lease as Lease, LeaseHolder as LeaseHolder,
    LeaseWatch as LeaseWatch, RENEW_SECONDS as RENEW_SECONDS, claim_term as claim_term, is_running as is_running,
    new_token as new_token, read_holder as read_holder, run_token as run_token, take_lease as take_lease, write_once
    as write_once,
)
from .line_files import (
    BLOCK_BYTES as BLOCK_BYTES, LineWriter as LineWriter, MAX_LINE_BYTES as MAX_LINE_BYTES, append_line as
    append_line, last_lines as last_lines, lines_from_end as lines_from_end, next_line as next_line,
)
from .node_records import (
    Kind as Kind, LEFT_OUT_FIELD as LEFT_OUT_FIELD, LinkSpeed as LinkSpeed, MAX_KEPT as MAX_KEPT, MIN_LOSSES as
    MIN_LOSSES, MeasuredLinks as MeasuredLinks, VARIABLE as VARIABLE, add_observation as add_observation, add_speed
    as add_speed, bad_nodes_file as bad_nodes_file, has_recovered as has_recovered, observe as observe,
    read_bad_nodes as read_bad_nodes, read_left_out as read_left_out, read_measured_links as read_measured_links,
    read_node_speeds as read_node_speeds, write_left_out as write_left_out, write_measured_links as
    write_measured_links, write_node_speeds as write_node_speeds,
)
from .process_control import (
    adopt_orphans as adopt_orphans, die_with_parent as die_with_parent, drop_unread_output as drop_unread_output,
    handled_signals as handled_signals, machine_id as machine_id, open_closed_output as open_closed_output,
    raise_soft_limits as raise_soft_limits, set_process_name as set_process_name, start_ticks as start_ticks,
)
from .rank_environment import (
    DEBUG_VARIABLES as DEBUG_VARIABLES, allocator_settings as allocator_settings, uses_expandable_segments as
    uses_expandable_segments, worker_environment as worker_environment,
)
from .read.ledger import (
    CATEGORIES as CATEGORIES, Ledger as Ledger, LedgerReader as LedgerReader, read_ledger as read_ledger,
)
from .read.memory_holders import (
    MemoryOwner as MemoryOwner, by_kind as by_kind, by_module as by_module, downsample as downsample, read_snapshot
    as read_snapshot,
)
from .read.rank_table import RankTableWriter as RankTableWriter, read_rank_table as read_rank_table
from .read.run_reader import RunReader as RunReader, RunTail as RunTail
from .read.steady_steps import (
    SteadyMarks as SteadyMarks, StepPlace as StepPlace, WARM_UP_STEPS as WARM_UP_STEPS, median_step as median_step,
    steady_steps as steady_steps,
)
from .read.step_index import (
    BLOCK_LINES as BLOCK_LINES, Extent as Extent, IndexFollower as IndexFollower, IndexedBlock as IndexedBlock,
    MAX_NOT_FINITE as MAX_NOT_FINITE, ReadLimits as ReadLimits, SCALARS as SCALARS, STEP_CATEGORIES as
    STEP_CATEGORIES, StepBlock as StepBlock, StepIndexer as StepIndexer, block_of as block_of, join_extents as
    join_extents, not_finite as not_finite, read_index as read_index, split_step as split_step,
)
from .read.step_lines import StepLine as StepLine, read_details as read_details, read_step as read_step
from .read.traces import (
    Trace as Trace, clock_shifts as clock_shifts, device_phases as device_phases, load_trace as load_trace, merge as
    merge, overlap as overlap, read_nsys_stats as read_nsys_stats, self_times as self_times, summarise as summarise,
    total as total, union as union, write_merged as write_merged,
)
from .record_types import finite_values as finite_values, is_number as is_number
from .replica_records import (
    Round as Round, RoundResult as RoundResult, Statement as Statement, group_prefix as group_prefix, lost_key as
    lost_key, result_key as result_key, round_key as round_key,
)
from .reserve import (
    DISK_REASONS as DISK_REASONS, PIECE_BYTES as PIECE_BYTES, RESERVE_BYTES as RESERVE_BYTES, fill_reserve as
    fill_reserve, remove_reserve as remove_reserve,
)
from .run_directory import (
    DESCRIPTORS as DESCRIPTORS, MARKER as MARKER, RunDirectory as RunDirectory, create_run as create_run, dump_plan
    as dump_plan, free_run_path as free_run_path, holds_run as holds_run, newest_term as newest_term, open_run as
    open_run, plan_tree as plan_tree, refuse_full_disk as refuse_full_disk, refuse_occupied as refuse_occupied,
    writing as writing,
)
from .run_records import (
    AttemptLog as AttemptLog, AttemptOutcome as AttemptOutcome, IncidentLog as IncidentLog, parse_decision as
    parse_decision, read_attempts as read_attempts, read_decisions as read_decisions, read_evaluations as
    read_evaluations, read_incidents as read_incidents,
)
from .run_requests import (
    CHANGE_PHASES as CHANGE_PHASES, ChangePhase as ChangePhase, ChangeRequest as ChangeRequest, ChangeStatus as
    ChangeStatus, ProfileRequest as ProfileRequest, RECIPE_ID as RECIPE_ID, change_answers as change_answers,
    find_traces as find_traces, reach_phase as reach_phase, read_change_request as read_change_request, read_request
    as read_request, recipe_request as recipe_request, replace_plan as replace_plan, replace_recipe as
    replace_recipe, request_file as request_file, request_kill as request_kill, snapshot_file as snapshot_file,
    trace_file as trace_file, withdraw_request as withdraw_request, write_change_request as write_change_request,
    write_request as write_request,
)
from .sinks.metric_catalogue import (
    CATALOGUE as CATALOGUE, MAX_INDIVIDUAL_SERIES as MAX_INDIVIDUAL_SERIES, MAX_SERIES_PER_METRIC as
    MAX_SERIES_PER_METRIC,
)
from .sinks.open_sinks import (
    SINKS as SINKS, has_sinks as has_sinks, open_sinks as open_sinks, refuse_missing_sinks as refuse_missing_sinks,
)
from .sinks.prometheus import PrometheusSink as PrometheusSink
from .sinks.sampler import (
    CounterRates as CounterRates, HostSampler as HostSampler, Sampler as Sampler, add_heartbeats as add_heartbeats,
)
from .sinks.sidecar import open_feeds as open_feeds
from .sinks.sink import Line as Line, Sink as Sink, SinkFeed as SinkFeed
from .stored_settings import create_run_from as create_run_from
from .warm_protocol import (
    LOG as LOG, SOCKET as SOCKET, difference as difference, runtime_folder as runtime_folder, take_lock as
    take_lock,
)
from .wire import (
    ChannelClient as ChannelClient, FrameAuthenticator as FrameAuthenticator, FrameReader as FrameReader,
    MAX_FRAME_BYTES as MAX_FRAME_BYTES, Record as Record, RefusedError as RefusedError, WRITTEN_ONCE as
    WRITTEN_ONCE, WireError as WireError, fingerprint as fingerprint, frame as frame, matches as matches, new_nonce
    as new_nonce, pack as pack, proof as proof, split_address as split_address, unpack as unpack,
)
