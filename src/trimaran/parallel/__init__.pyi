"""Public names of `trimaran.parallel`, and the modules that they come from. They are imported on first use."""

from .apply import (
    apply_compile as apply_compile, apply_plan as apply_plan, gradient_sync as gradient_sync, sharding_steps as
    sharding_steps, steps_of as steps_of,
)
from .axes.cp import AllGatherContext as AllGatherContext, CONTEXTS as CONTEXTS, apply_cp as apply_cp
from .axes.ep import TokenDispatcher as TokenDispatcher, apply_ep as apply_ep
from .axes.fsdp import (
    own_parameter_groups as own_parameter_groups, parameter_groups as parameter_groups, time_gathers as
    time_gathers,
)
from .axes.image_split import assign_images as assign_images
from .axes.ring_layout import (
    Rectangle as Rectangle, RingChunks as RingChunks, RingLayout as RingLayout, TILE as TILE, ring_layout as
    ring_layout, tiles as tiles,
)
from .axes.tp import apply_tp as apply_tp
from .comm.axis_waits import AXIS_WAITS as AXIS_WAITS, AxisWaits as AxisWaits, NO_SPAN as NO_SPAN
from .comm.compression import Compressor as Compressor, compressor_of as compressor_of
from .comm.gradient_buckets import BUCKET_BYTES as BUCKET_BYTES, GradientBuckets as GradientBuckets
from .comm.json_exchange import (
    all_gather_int64 as all_gather_int64, all_gather_json as all_gather_json, broadcast_json as broadcast_json,
    recv_json as recv_json, send_json as send_json,
)
from .comm.outer_step import (
    BucketExchange as BucketExchange, OuterBucket as OuterBucket, OuterState as OuterState, OuterStep as OuterStep,
    OuterTensor as OuterTensor, build_outer_step as build_outer_step, exchange_of as exchange_of, split_fragments as
    split_fragments, start_over as start_over,
)
from .comm.tensor_collectives import (
    await_rows as await_rows, gather_dim as gather_dim, gather_sequence as gather_sequence, reduce_gradient as
    reduce_gradient, reduce_sum as reduce_sum, reduce_to_sequence as reduce_to_sequence, start_exchange as
    start_exchange,
)
from .disk_store import DiskStore as DiskStore, DiskWeights as DiskWeights, aligned_buffer as aligned_buffer
from .fp8_blocks import (
    cast_rows as cast_rows, cast_weight as cast_weight, dequantized as dequantized, in_mx_blocks as in_mx_blocks,
    in_row_blocks as in_row_blocks, in_square_blocks as in_square_blocks, in_tiles as in_tiles,
)
from .fp8_linear import (
    Fp8Linear as Fp8Linear, Fp8Parameter as Fp8Parameter, MIN_CAPABILITY as MIN_CAPABILITY, RECIPE_MAJOR as
    RECIPE_MAJOR, apply_fp8 as apply_fp8, as_fp8 as as_fp8, convert_linears as convert_linears, linear as linear,
    require_fp8_device as require_fp8_device,
)
from .joint_layers import apply_joint_projections as apply_joint_projections
from .kernels.vocab_rows import row_gradients as row_gradients, row_sums as row_sums
from .memory.activation_offload import (
    ActivationOffload as ActivationOffload, MIN_OFFLOAD_BYTES as MIN_OFFLOAD_BYTES, StreamCopies as StreamCopies,
    SynchronousCopies as SynchronousCopies, apply_activation_offload as apply_activation_offload, offload_blocks as
    offload_blocks,
)
from .memory.recompute import (
    RECOMPUTED_ATTRIBUTE as RECOMPUTED_ATTRIBUTE, apply_recompute as apply_recompute, matrix_rank as matrix_rank,
    selective_policy as selective_policy,
)
from .mesh import (
    RankMesh as RankMesh, StageMap as StageMap, TrainedParameters as TrainedParameters, build_mesh as build_mesh,
    forget_meshes as forget_meshes, freeze_towers as freeze_towers, map_stages as map_stages, tower_of_blocks as
    tower_of_blocks, trained_parameters as trained_parameters,
)
from .optimizer.adamw import LowMemoryAdamW as LowMemoryAdamW
from .optimizer.build_optimizer import (
    INITIAL_SCALE as INITIAL_SCALE, LR_FACTOR as LR_FACTOR, LossScale as LossScale, MAX_SCALE as MAX_SCALE,
    ShardAdamW as ShardAdamW, build_loss_scale as build_loss_scale, build_optimizer as build_optimizer, decay_groups
    as decay_groups, learning_rate as learning_rate, split_weights_of as split_weights_of,
)
from .optimizer.moments import (
    AdamWConstants as AdamWConstants, FORMATS as FORMATS, NOISE_OFFSET as NOISE_OFFSET, StateChunk as StateChunk,
    hash_int32 as hash_int32, hash_text as hash_text, index_runs as index_runs, step_constants as step_constants,
    to_bf16 as to_bf16, update_chunk as update_chunk,
)
from .optimizer.optimizer_state import (
    BlockLayout as BlockLayout, BlockReshard as BlockReshard, MOMENTS as MOMENTS, OptimizerState as OptimizerState,
    check_moment_format as check_moment_format, codebook as codebook, dequantize as dequantize, lower_bounds as
    lower_bounds, num_blocks as num_blocks, quantize as quantize,
)
from .optimizer.split_weights import (
    NO_SPLIT_WEIGHTS as NO_SPLIT_WEIGHTS, SplitWeights as SplitWeights, split_weights as split_weights,
)
from .optimizer.state_streaming import (
    DiskStream as DiskStream, NUM_STAGING_BUFFERS as NUM_STAGING_BUFFERS, StateStream as StateStream,
)
from .precision import (
    DTYPES as DTYPES, autocast as autocast, fsdp_modules as fsdp_modules, kept_weight_casts as kept_weight_casts,
    override_precision as override_precision, own_dtype as own_dtype, store_frozen_weights as store_frozen_weights,
)
from .tensor_regions import (
    IndexEntry as IndexEntry, TensorIndex as TensorIndex, TensorMeta as TensorMeta, TensorRegion as TensorRegion,
    VALUE_BYTES as VALUE_BYTES, overlap as overlap,
)
from .tensor_shards import (
    ALIGNMENT as ALIGNMENT, CHUNK_VALUES as CHUNK_VALUES, CheckpointSource as CheckpointSource, CheckpointState as
    CheckpointState, DTYPE_NAMES as DTYPE_NAMES, Gather as Gather, RankShare as RankShare, ShareItem as ShareItem,
    SplitWeight as SplitWeight, TORCH_DTYPES as TORCH_DTYPES, TensorShard as TensorShard, assign_rows as
    assign_rows, build_share as build_share, copy_to_memory as copy_to_memory, copy_values as copy_values,
    item_values as item_values, item_view as item_view, join_fp32 as join_fp32, meta_of as meta_of, release_pages as
    release_pages, split_fp32 as split_fp32, store_of as store_of,
)
from .tensor_sums import (
    DeviceNumbers as DeviceNumbers, GradientSquares as GradientSquares, ProgramMap as ProgramMap, TensorChecksums as
    TensorChecksums, TensorSquares as TensorSquares, addresses_of as addresses_of, can_sum as can_sum, gradient_norm
    as gradient_norm, is_aligned as is_aligned,
)
from .vocab_parallel_loss import vocab_parallel_token_losses as vocab_parallel_token_losses
