"""Public names of `trimaran.launch`, and the modules that they come from. They are imported on first use."""

from .supervise.attempt_watch import AttemptWatch as AttemptWatch
from .supervise.attribution import (
    Attribution as Attribution, attribute_fault as attribute_fault, read_exit as read_exit,
)
from .supervise.channel import (
    Channel as Channel, EXCHANGE_SECONDS as EXCHANGE_SECONDS, SILENT_SECONDS as SILENT_SECONDS,
)
from .supervise.connection_server import MAX_UNAUTHENTICATED as MAX_UNAUTHENTICATED
from .supervise.detached import DetachedProcess as DetachedProcess, read_secrets as read_secrets
from .supervise.early_supervisor import (
    EarlySupervisor as EarlySupervisor, HANDLED_SIGNALS as HANDLED_SIGNALS, SIGNAL_TEXTS as SIGNAL_TEXTS, Signals as
    Signals, WARM as WARM, cancel_early as cancel_early, early_processes as early_processes, resume_early as
    resume_early, start_early as start_early, take_early as take_early, wait_for_arguments as wait_for_arguments,
)
from .supervise.elastic_watch import (
    KEPT_ROUNDS as KEPT_ROUNDS, MAX_FAILED_ROUNDS as MAX_FAILED_ROUNDS, ReplicaRounds as ReplicaRounds,
)
from .supervise.follower import Follower as Follower, FollowerEnd as FollowerEnd, NodeAgent as NodeAgent
from .supervise.fork_server_process import (
    ANSWER_SECONDS as ANSWER_SECONDS, IDLE_MINUTES as IDLE_MINUTES, SHARE_GPUS as SHARE_GPUS, ask_warm as ask_warm,
    connect_warm as connect_warm, shared_gpu_environment as shared_gpu_environment, start_warm as start_warm,
)
from .supervise.head_client import (
    FileReceiver as FileReceiver, FileSender as FileSender, HeadClient as HeadClient, RUN_FILES as RUN_FILES,
    answer_nodes as answer_nodes, answer_not_ready as answer_not_ready, create_as_head_has_it as
    create_as_head_has_it, read_received as read_received, write_run_files as write_run_files,
)
from .supervise.incident_watch import (
    NUM_STEPS as NUM_STEPS, RankEventIncidents as RankEventIncidents, StrangerCheck as StrangerCheck, is_below_plan
    as is_below_plan,
)
from .supervise.intent import (
    AllStopped as AllStopped, Continue as Continue, HandOver as HandOver, Intent as Intent, IntentFacts as
    IntentFacts, LeaveOut as LeaveOut, NodeChanges as NodeChanges, Resize as Resize, Restart as Restart, Stop as
    Stop, StopRequests as StopRequests, next_intent as next_intent,
)
from .supervise.investigate import (
    incident_text as incident_text, note_lost_nodes as note_lost_nodes, note_unfit_node as note_unfit_node,
)
from .supervise.key_store import (
    MAX_KEYS as MAX_KEYS, MAX_SET_BYTES as MAX_SET_BYTES, RelayAnswers as RelayAnswers, StoreRelay as StoreRelay,
)
from .supervise.local import LocalRun as LocalRun, start_local as start_local
from .supervise.local_node import Deadlines as Deadlines, LocalNode as LocalNode
from .supervise.measure_links import (
    group_nodes as group_nodes, list_groups as list_groups, measure_link as measure_link, order_nodes as
    order_nodes, read_switches as read_switches, tournament as tournament,
)
from .supervise.next_attempt import (
    GrowthPlanner as GrowthPlanner, fit_plan as fit_plan, larger_size as larger_size, less_memory as less_memory,
    read_resize_request as read_resize_request, resized as resized, smaller_sizes as smaller_sizes, with_prediction
    as with_prediction,
)
from .supervise.node import (
    AttemptSpec as AttemptSpec, Node as Node, NodeEvent as NodeEvent, NodeLost as NodeLost, RankEnded as RankEnded,
    RankSilent as RankSilent,
)
from .supervise.node_options import (
    NodeOptions as NodeOptions, add_node_flags as add_node_flags, default_address as default_address,
    find_own_address as find_own_address, given_token as given_token, interface_addresses as interface_addresses,
    keep_token as keep_token, needed_token as needed_token, parse_node_options as parse_node_options, source_towards
    as source_towards, split_head as split_head, with_own_address as with_own_address,
)
from .supervise.rank_report import (
    LocalRank as LocalRank, MAX_HEARTBEAT_AGE_SECONDS as MAX_HEARTBEAT_AGE_SECONDS, Operation as Operation,
    RankReport as RankReport, ReportMoment as ReportMoment, collect_reports as collect_reports, describe_ranks as
    describe_ranks, process_state as process_state, read_rank_reports as read_rank_reports,
)
from .supervise.recovery_policy import (
    Cycle as Cycle, EXIT_FAULT as EXIT_FAULT, PolicyDecision as PolicyDecision, RecoveryOptions as RecoveryOptions,
    decide as decide,
)
from .supervise.remote_node import (
    RemoteNode as RemoteNode, event_of_record as event_of_record, record_of_event as record_of_event,
)
from .supervise.remote_node_group import (
    FencedError as FencedError, LeftOutWatch as LeftOutWatch, RemoteNodeGroup as RemoteNodeGroup,
)
from .supervise.side_processes import (
    PreflightProcess as PreflightProcess, SidecarProcess as SidecarProcess, autopilot_process as autopilot_process,
)
from .supervise.slow_rank_check import (
    Straggler as Straggler, find_stragglers as find_stragglers, is_starved as is_starved,
)
from .targets.k8s_manifest import (
    CONTAINER as CONTAINER, INSTANCE as INSTANCE, KubernetesSite as KubernetesSite, grace_seconds as grace_seconds,
)
from .targets.k8s_target import KINDS as KINDS, KubernetesTarget as KubernetesTarget, describe as describe
from .targets.ray_target import RaySection as RaySection, RayTarget as RayTarget
from .targets.site_file import read_site_file as read_site_file, site_path as site_path, site_section as site_section
from .targets.sky_target import BUCKET_PATH as BUCKET_PATH, SkySection as SkySection, SkyTarget as SkyTarget
from .targets.slurm_end import find_end as find_end, record_end as record_end
from .targets.slurm_script import (
    SlurmSite as SlurmSite, batch_options as batch_options, measured_stop_time as measured_stop_time, script_lines
    as script_lines, time_seconds as time_seconds,
)
from .targets.slurm_target import (
    SlurmTarget as SlurmTarget, parse_fields as parse_fields, stands_for_chain as stands_for_chain,
)
from .targets.ssh_session import (
    SshHost as SshHost, connection_error as connection_error, parse_host as parse_host, parse_hosts as parse_hosts,
    read_hostfile as read_hostfile,
)
from .targets.ssh_target import (
    SshSite as SshSite, SshTarget as SshTarget, choose_code as choose_code, detached_command as detached_command,
    ssh_script as ssh_script,
)
from .targets.target import (
    JobRecord as JobRecord, JobState as JobState, LaunchRequest as LaunchRequest, SHARED_FUNCTIONS as
    SHARED_FUNCTIONS, State as State, TARGET_CLASSES as TARGET_CLASSES, Target as Target, find_record as
    find_record, job_id as job_id, job_name as job_name, new_record as new_record, node_command as node_command,
    open_target as open_target, read_records as read_records, state_folder as state_folder, write_record as
    write_record,
)
