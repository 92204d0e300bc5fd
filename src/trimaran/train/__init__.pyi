"""Public names of `trimaran.train`, and the modules that they come from. They are imported on first use."""

from .agreement import (
    FlagAllReduce as FlagAllReduce, LoopExit as LoopExit, StepDecision as StepDecision, StopRequest as StopRequest,
)
from .build import WorkerParts as WorkerParts, build_worker_parts as build_worker_parts
from .change_file import ChangeFile as ChangeFile
from .checkpointing.base_hashing import assigned_files as assigned_files, file_holders as file_holders
from .checkpointing.checkpointer import Checkpointer as Checkpointer
from .checkpointing.save_interval import (
    CopySchedule as CopySchedule, CopyTime as CopyTime, MAX_BOUNDED_COPY_FRACTION as MAX_BOUNDED_COPY_FRACTION,
    SaveCost as SaveCost, SaveSchedule as SaveSchedule, StartFacts as StartFacts, copy_every as copy_every,
    is_review as is_review, max_repeated_steps as max_repeated_steps, save_interval as save_interval, when_to_copy
    as when_to_copy,
)
from .checkpointing.tiers import CheckpointInputs as CheckpointInputs
from .checkpointing.training_state import (
    MAY_BE_UNUSED as MAY_BE_UNUSED, TrainingState as TrainingState, persistent_buffers as persistent_buffers,
)
from .evaluate import (
    HoldoutEvaluator as HoldoutEvaluator, MAX_ANSWER_TOKENS as MAX_ANSWER_TOKENS, SampleAnswer as SampleAnswer,
    decode_answers as decode_answers, generate_answers as generate_answers,
)
from .evaluate_weights import (
    EvaluatedNetwork as EvaluatedNetwork, held_out_loss as held_out_loss, text_loss as text_loss,
)
from .fake_ranks import check_build as check_build, fake_rank as fake_rank
from .features.async_trainer import AsyncStepper as AsyncStepper
from .features.deepspeed_stepper import load_deepspeed as load_deepspeed, regions_of_range as regions_of_range
from .features.elastic.elastic_loop import (
    ElasticLoop as ElasticLoop, ElasticOuter as ElasticOuter, merge_lines as merge_lines,
)
from .features.elastic.replica import (
    Membership as Membership, Replica as Replica, check_replica as check_replica, run_until as run_until,
)
from .features.live_change.rebuild import known_groups as known_groups
from .features.measure_rows import RoundTime as RoundTime, rows_by_speed as rows_by_speed, rows_in as rows_in
from .features.shard_server import Batch as Batch, BatchCounter as BatchCounter, Pause as Pause
from .features.table import FEATURES as FEATURES, features_of as features_of
from .find_hf_facts import find_hf_facts as find_hf_facts
from .generation.generate import (
    CachedLogits as CachedLogits, FEW_TOKENS as FEW_TOKENS, Generation as Generation, NextTokenModel as
    NextTokenModel, PlacedImage as PlacedImage, Sampling as Sampling, TokenSampler as TokenSampler, first_device as
    first_device, load_trained as load_trained, save_tokenizer as save_tokenizer, whole_sequence_logits as
    whole_sequence_logits,
)
from .health.compilations import Compilations as Compilations
from .health.guard import (
    BadSampleCount as BadSampleCount, Guard as Guard, MEAN_LOSS_STEPS as MEAN_LOSS_STEPS, MIN_GOOD_STEPS as
    MIN_GOOD_STEPS, RefusedStep as RefusedStep, StepNumbers as StepNumbers,
)
from .health.memory_check import (
    FIRST_STEPS as FIRST_STEPS, REVIEW_STEPS as REVIEW_STEPS, ReplicaCheck as ReplicaCheck, ReplicaDifference as
    ReplicaDifference, SMALL_BYTES as SMALL_BYTES, ShardCheck as ShardCheck, bit_checksum as bit_checksum,
    find_differing_ranks as find_differing_ranks,
)
from .inputs.training_data import rank_loader_limits as rank_loader_limits
from .loss.cross_entropy import (
    IGNORED as IGNORED, LossHead as LossHead, build_loss_head as build_loss_head, chunk_rows as chunk_rows,
    head_losses as head_losses, row_losses as row_losses, scale_to_dtype as scale_to_dtype, summed_loss as
    summed_loss, token_losses as token_losses,
)
from .loss.objective import LanguageObjective as LanguageObjective, LossSums as LossSums, Objective as Objective
from .loss.perception_objective import PerceptionObjective as PerceptionObjective, box_targets as box_targets
from .metrics.group_norms import (
    GroupMeter as GroupMeter, MAX_SAMPLED_VALUES as MAX_SAMPLED_VALUES, MIN_SAMPLED_VALUES as MIN_SAMPLED_VALUES,
    SampledWeights as SampledWeights, merge_layers as merge_layers, module_of as module_of, sample_values as
    sample_values,
)
from .metrics.meters import (
    MEASURES as MEASURES, MemoryMeter as MemoryMeter, Meters as Meters, RankStats as RankStats, allocator_memory as
    allocator_memory, lr_factors as lr_factors, rank_measures as rank_measures, summarise_ranks as summarise_ranks,
    wait_phases as wait_phases,
)
from .metrics.nvtx_ranges import StepRanges as StepRanges
from .metrics.profiler import TracedPhases as TracedPhases, is_out_of_memory as is_out_of_memory
from .metrics.router_stats import router_details as router_details, routing_counts as routing_counts
from .metrics.step_clock import (
    PhaseEvent as PhaseEvent, PhaseListener as PhaseListener, StepClock as StepClock, StepSeconds as StepSeconds,
    attribute as attribute,
)
from .metrics.step_recorder import (
    NUM_COMPLETE_STEPS as NUM_COMPLETE_STEPS, SlowDetails as SlowDetails, StepRecorder as StepRecorder, loader_wait
    as loader_wait,
)
from .process.heartbeat_thread import HeartbeatThread as HeartbeatThread, read_operations as read_operations
from .process.rank_setup import (
    RankInfo as RankInfo, TIMEOUT as TIMEOUT, bind_near as bind_near, join_process_group as join_process_group,
    read_rank_info as read_rank_info, set_expandable_segments as set_expandable_segments,
)
from .process.supervisor_link import (
    NO_SUPERVISOR as NO_SUPERVISOR, SupervisorLink as SupervisorLink, TokenStore as TokenStore,
)
from .rank_context import read_context as read_context
from .rank_networks import build_networks as build_networks, refuse_unsavable as refuse_unsavable
from .rehearsal.rehearsal_group import (
    BACKEND as BACKEND, MESSAGE_BLOCK as MESSAGE_BLOCK, register_backend as register_backend,
)
from .rehearsal.rehearsed_rank import (
    measure_rank as measure_rank, measured_tensors as measured_tensors, rehearse_rank as rehearse_rank,
    stage_facts_of as stage_facts_of,
)
from .steppers.engine import ENGINES as ENGINES, build_stepper as build_stepper
from .steppers.feature import Feature as Feature, UpdatePart as UpdatePart
from .steppers.step_graphs import (
    EAGER_STEPS as EAGER_STEPS, StepGraphs as StepGraphs, has_known_code as has_known_code, host_random_states as
    host_random_states, signature_of as signature_of,
)
from .steppers.stepper import (
    PlainStepper as PlainStepper, Stepper as Stepper, TorchStepper as TorchStepper, build_loss_function as
    build_loss_function, compute_losses as compute_losses,
)
from .steppers.update import Updater as Updater
from .trainer import StepSaver as StepSaver, Trainer as Trainer
from .worker import run_worker as run_worker
