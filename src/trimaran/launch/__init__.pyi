"""Public names of `trimaran.launch`, and the modules that they come from. They are imported on first use."""

from .supervise.attempt_watch import AttemptWatch as AttemptWatch
from .supervise.attribution import Attribution as Attribution, attribute_fault as attribute_fault
from .supervise.autopilot_process import autopilot_process as autopilot_process
from .supervise.channel import (
    Channel as Channel, EXCHANGE_SECONDS as EXCHANGE_SECONDS, SILENT_SECONDS as SILENT_SECONDS,
)
from .supervise.collect_reports import (
    MAX_HEARTBEAT_AGE_SECONDS as MAX_HEARTBEAT_AGE_SECONDS, ReportTarget as ReportTarget,
    collect_reports as collect_reports, process_state as process_state,
)
from .supervise.connection_server import MAX_UNAUTHENTICATED as MAX_UNAUTHENTICATED
from .supervise.deadline import Deadlines as Deadlines
from .supervise.detached import DetachedProcess as DetachedProcess, read_secrets as read_secrets
from .supervise.early_supervisor import (
    EarlySupervisor as EarlySupervisor, WARM as WARM, cancel_early as cancel_early, early_processes as early_processes,
    resume_early as resume_early, start_early as start_early, take_early as take_early,
    wait_for_arguments as wait_for_arguments,
)
from .supervise.exit_cause import read_exit as read_exit
from .supervise.file_stream import (
    FileReceiver as FileReceiver, FileSender as FileSender, read_received as read_received,
)
from .supervise.find_stragglers import (
    Straggler as Straggler, find_stragglers as find_stragglers, is_starved as is_starved,
)
from .supervise.follower import Follower as Follower, FollowerEnd as FollowerEnd
from .supervise.head_client import (
    HeadClient as HeadClient, OPERATION as OPERATION, answer_nodes as answer_nodes,
    answer_not_ready as answer_not_ready, create_as_head_has_it as create_as_head_has_it,
    write_run_files as write_run_files,
)
from .supervise.incident_text import incident_text as incident_text
from .supervise.intent import (
    AllStopped as AllStopped, Continue as Continue, HandOver as HandOver, Intent as Intent, IntentFacts as IntentFacts,
    LeaveOut as LeaveOut, NodeChanges as NodeChanges, Resize as Resize, Restart as Restart, Stop as Stop,
    StopRequests as StopRequests, next_intent as next_intent,
)
from .supervise.left_out_watch import LeftOutWatch as LeftOutWatch
from .supervise.link_probe import measure_link as measure_link
from .supervise.local import LocalRun as LocalRun, start_local as start_local
from .supervise.local_node import LocalNode as LocalNode
from .supervise.measure_links import list_groups as list_groups, tournament as tournament
from .supervise.network_check import NUM_STEPS as NUM_STEPS, is_below_plan as is_below_plan
from .supervise.next_attempt import (
    GrowthPlanner as GrowthPlanner, fit_plan as fit_plan, larger_size as larger_size,
    read_resize_request as read_resize_request,
)
from .supervise.node import (
    AttemptSpec as AttemptSpec, Node as Node, NodeEvent as NodeEvent, NodeLost as NodeLost, RankEnded as RankEnded,
    RankSilent as RankSilent,
)
from .supervise.node_agent import NodeAgent as NodeAgent
from .supervise.node_groups import group_nodes as group_nodes
from .supervise.node_options import (
    NodeOptions as NodeOptions, add_node_flags as add_node_flags, parse_node_options as parse_node_options,
    split_head as split_head, with_own_address as with_own_address,
)
from .supervise.node_order import order_nodes as order_nodes, read_switches as read_switches
from .supervise.note_bad_nodes import note_lost_nodes as note_lost_nodes, note_unfit_node as note_unfit_node
from .supervise.own_address import (
    default_address as default_address, find_own_address as find_own_address,
    interface_addresses as interface_addresses, source_towards as source_towards,
)
from .supervise.preflight_process import PreflightProcess as PreflightProcess
from .supervise.rank_events import RankEventIncidents as RankEventIncidents
from .supervise.rank_report import (
    Operation as Operation, RankReport as RankReport, ReportMoment as ReportMoment,
    read_rank_reports as read_rank_reports,
)
from .supervise.recovery_policy import (
    Cycle as Cycle, EXIT_FAULT as EXIT_FAULT, PolicyDecision as PolicyDecision, RecoveryOptions as RecoveryOptions,
    decide as decide,
)
from .supervise.remote_node import (
    RemoteNode as RemoteNode, event_of_record as event_of_record, record_of_event as record_of_event,
)
from .supervise.remote_node_group import FencedError as FencedError, RemoteNodeGroup as RemoteNodeGroup
from .supervise.replan import (
    less_memory as less_memory, resized as resized, smaller_sizes as smaller_sizes, with_prediction as with_prediction,
)
from .supervise.replica_rounds import (
    KEPT_ROUNDS as KEPT_ROUNDS, MAX_FAILED_ROUNDS as MAX_FAILED_ROUNDS, ReplicaRounds as ReplicaRounds,
)
from .supervise.run_token import given_token as given_token, keep_token as keep_token, needed_token as needed_token
from .supervise.shared_gpu import SHARE_GPUS as SHARE_GPUS, shared_gpu_environment as shared_gpu_environment
from .supervise.show_ranks import describe_ranks as describe_ranks
from .supervise.sidecar_process import SidecarProcess as SidecarProcess
from .supervise.signals import HANDLED_SIGNALS as HANDLED_SIGNALS, SIGNAL_TEXTS as SIGNAL_TEXTS, Signals as Signals
from .supervise.store_relay import (
    MAX_KEYS as MAX_KEYS, MAX_SET_BYTES as MAX_SET_BYTES, RelayAnswers as RelayAnswers, StoreRelay as StoreRelay,
)
from .supervise.stranger_check import StrangerCheck as StrangerCheck
from .supervise.warm_connection import ask_warm as ask_warm, connect_warm as connect_warm
from .targets.hostfile import (
    SshHost as SshHost, parse_host as parse_host, parse_hosts as parse_hosts, read_hostfile as read_hostfile,
)
from .targets.job_records import (
    find_record as find_record, new_record as new_record, read_records as read_records, state_folder as state_folder,
    write_record as write_record,
)
from .targets.k8s_target import KubernetesTarget as KubernetesTarget
from .targets.kubernetes_files.k8s_client import KINDS as KINDS, describe as describe, read_logs as read_logs
from .targets.kubernetes_files.k8s_lint import lint_manifest as lint_manifest
from .targets.kubernetes_files.k8s_pod import (
    CONTAINER as CONTAINER, INSTANCE as INSTANCE, grace_seconds as grace_seconds,
)
from .targets.kubernetes_files.k8s_site import KubernetesSite as KubernetesSite
from .targets.kubernetes_files.k8s_workloads import find_workloads as find_workloads, name_of as name_of
from .targets.node_command import node_command as node_command
from .targets.ray_target import RaySection as RaySection, RayTarget as RayTarget
from .targets.save_time import measured_stop_time as measured_stop_time
from .targets.script_text import SHARED_FUNCTIONS as SHARED_FUNCTIONS
from .targets.site_file import read_site_file as read_site_file, site_path as site_path, site_section as site_section
from .targets.sky_target import BUCKET_PATH as BUCKET_PATH, SkySection as SkySection, SkyTarget as SkyTarget
from .targets.slurm_end import find_end as find_end, record_end as record_end
from .targets.slurm_queries import parse_fields as parse_fields
from .targets.slurm_script import batch_options as batch_options, script_lines as script_lines
from .targets.slurm_site import SlurmSite as SlurmSite, time_seconds as time_seconds
from .targets.slurm_target import SlurmTarget as SlurmTarget, stands_for_chain as stands_for_chain
from .targets.ssh_script import SshScript as SshScript, detached_command as detached_command
from .targets.ssh_session import connection_error as connection_error
from .targets.ssh_target import SshSite as SshSite, SshTarget as SshTarget, choose_code as choose_code
from .targets.target import (
    JobRecord as JobRecord, JobState as JobState, LaunchRequest as LaunchRequest, State as State,
    TARGET_CLASSES as TARGET_CLASSES, Target as Target, job_name as job_name, open_target as open_target,
)
