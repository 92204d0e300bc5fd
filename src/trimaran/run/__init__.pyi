"""Public names of `trimaran.run`, and the modules that they come from. They are imported on first use."""

from .attempts import AttemptLog as AttemptLog, AttemptOutcome as AttemptOutcome, read_attempts as read_attempts
from .bad_nodes import (
    MIN_LOSSES as MIN_LOSSES, VARIABLE as VARIABLE, add_observation as add_observation,
    bad_nodes_file as bad_nodes_file, observe as observe, read_bad_nodes as read_bad_nodes,
)
from .change_phases import (
    CHANGE_PHASES as CHANGE_PHASES, ChangePhase as ChangePhase, reach_phase as reach_phase,
    request_kill as request_kill,
)
from .change_request import (
    change_answers as change_answers, read_change_request as read_change_request, replace_plan as replace_plan,
    replace_recipe as replace_recipe, write_change_request as write_change_request,
)
from .compile_cache import (
    INDUCTOR as INDUCTOR, TRITON as TRITON, compile_cache as compile_cache, compile_folder as compile_folder,
    refuse_unusable as refuse_unusable,
)
from .connection_lost import find_refusal as find_refusal, says_connection_lost as says_connection_lost
from .create_from import create_run_from as create_run_from
from .decision_records import (
    DecisionReader as DecisionReader, parse_decision as parse_decision, read_decisions as read_decisions,
)
from .disk_folder import check_disk_folder as check_disk_folder, filesystem_of as filesystem_of
from .evaluation_records import read_evaluations as read_evaluations
from .gloo_listeners import closed_listeners as closed_listeners, count_refused_packets as count_refused_packets
from .heartbeat import (
    HEADER_WORDS as HEADER_WORDS, Heartbeat as Heartbeat, HeartbeatBoard as HeartbeatBoard, STEP as STEP,
    Section as Section, VERSION as VERSION,
)
from .held_directory import (
    CONFIRM_SECONDS as CONFIRM_SECONDS, HeldDirectory as HeldDirectory, lock_directory as lock_directory,
)
from .incidents import IncidentLog as IncidentLog, read_incidents as read_incidents
from .journal import (
    Journal as Journal, JsonlFollower as JsonlFollower, LineFollower as LineFollower,
    forget_steps_after as forget_steps_after, last_step as last_step,
)
from .lease import (
    EXPIRY_SECONDS as EXPIRY_SECONDS, FENCED_SECONDS as FENCED_SECONDS, LeaseHolder as LeaseHolder,
    LeaseWatch as LeaseWatch, RENEW_SECONDS as RENEW_SECONDS, claim_term as claim_term, new_token as new_token,
    read_holder as read_holder, run_token as run_token, take_lease as take_lease,
)
from .left_out_nodes import (
    LEFT_OUT_FIELD as LEFT_OUT_FIELD, read_left_out as read_left_out, write_left_out as write_left_out,
)
from .line_files import (
    BLOCK_BYTES as BLOCK_BYTES, LineWriter as LineWriter, MAX_LINE_BYTES as MAX_LINE_BYTES, append_line as append_line,
    last_lines as last_lines, lines_from_end as lines_from_end,
)
from .measured_links import (
    LinkSpeed as LinkSpeed, MeasuredLinks as MeasuredLinks, read_measured_links as read_measured_links,
    write_measured_links as write_measured_links,
)
from .node_speeds import (
    MAX_KEPT as MAX_KEPT, add_speed as add_speed, has_recovered as has_recovered, read_node_speeds as read_node_speeds,
    write_node_speeds as write_node_speeds,
)
from .out_of_memory import memory_holes as memory_holes, says_out_of_memory as says_out_of_memory
from .process_control import die_with_parent as die_with_parent, set_process_name as set_process_name
from .profile_request import (
    ProfileRequest as ProfileRequest, find_traces as find_traces, read_request as read_request,
    recipe_request as recipe_request, request_file as request_file, snapshot_file as snapshot_file,
    trace_file as trace_file, withdraw_request as withdraw_request, write_request as write_request,
)
from .replica_records import (
    Round as Round, RoundResult as RoundResult, Statement as Statement, lost_key as lost_key, result_key as result_key,
    round_key as round_key,
)
from .reserve import (
    PIECE_BYTES as PIECE_BYTES, RESERVE_BYTES as RESERVE_BYTES, fill_reserve as fill_reserve,
    remove_reserve as remove_reserve,
)
from .run_directory import (
    MARKER as MARKER, RunDirectory as RunDirectory, create_run as create_run, dump_plan as dump_plan,
    free_run_path as free_run_path, holds_run as holds_run, newest_term as newest_term, open_run as open_run,
    refuse_full_disk as refuse_full_disk, refuse_occupied as refuse_occupied, writing as writing,
)
from .warm_protocol import difference as difference, runtime_folder as runtime_folder, take_lock as take_lock
from .wire import (
    ChannelClient as ChannelClient, FrameAuthenticator as FrameAuthenticator, FrameReader as FrameReader,
    MAX_FRAME_BYTES as MAX_FRAME_BYTES, Record as Record, RefusedError as RefusedError, WireError as WireError,
    fingerprint as fingerprint, frame as frame, pack as pack, proof as proof, split_address as split_address,
)
