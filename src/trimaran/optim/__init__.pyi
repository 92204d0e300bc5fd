"""Public names of `trimaran.optim`, and the modules that they come from. They are imported on first use."""

from .adamw import LowMemoryAdamW as LowMemoryAdamW
from .block_quantization import (
    BlockLayout as BlockLayout, BlockReshard as BlockReshard, codebook as codebook, dequantize as dequantize,
    lower_bounds as lower_bounds, num_blocks as num_blocks, quantize as quantize,
)
from .build_optimizer import (
    LR_FACTOR as LR_FACTOR, ShardAdamW as ShardAdamW, build_optimizer as build_optimizer, decay_groups as decay_groups,
)
from .disk_streaming import DiskStream as DiskStream
from .eager_optimizer import split_weights_of as split_weights_of
from .loss_scale import (
    INITIAL_SCALE as INITIAL_SCALE, LossScale as LossScale, MAX_SCALE as MAX_SCALE,
    build_loss_scale as build_loss_scale,
)
from .moments import (
    AdamWConstants as AdamWConstants, FORMATS as FORMATS, NOISE_OFFSET as NOISE_OFFSET, StateChunk as StateChunk,
    step_constants as step_constants, update_chunk as update_chunk,
)
from .schedule import learning_rate as learning_rate
from .split_weights import (
    CHUNK_VALUES as CHUNK_VALUES, NO_SPLIT_WEIGHTS as NO_SPLIT_WEIGHTS, SplitWeight as SplitWeight,
    SplitWeights as SplitWeights, join_fp32 as join_fp32, split_fp32 as split_fp32, split_weights as split_weights,
)
from .state_streaming import NUM_STAGING_BUFFERS as NUM_STAGING_BUFFERS, StateStream as StateStream
from .stochastic_rounding import (
    hash_int32 as hash_int32, hash_text as hash_text, index_runs as index_runs, to_bf16 as to_bf16,
)
