"""Public names of `trimaran.nets`, and the modules that they come from. They are imported on first use."""

from .absent_modules import (
    AbsentLayer as AbsentLayer, LayerCall as LayerCall, StageStream as StageStream, read_parameters as
    read_parameters, record_layer as record_layer, tensors_in as tensors_in,
)
from .adapters.adapter_bank import AdapterBank as AdapterBank
from .adapters.attach import attach_adapter as attach_adapter, linears_to_pack as linears_to_pack
from .adapters.lora_linear import (
    LoraLinear as LoraLinear, adapter_parameters as adapter_parameters, add_adapter as add_adapter,
    is_adapter_parameter as is_adapter_parameter, merge_in_place as merge_in_place, merged_weight as merged_weight,
)
from .adapters.peft_format import (
    PEFT_CONFIG as PEFT_CONFIG, PEFT_WEIGHTS as PEFT_WEIGHTS, hf_modules as hf_modules, load_peft_adapter as
    load_peft_adapter, peft_config as peft_config, peft_tensors as peft_tensors, refuse_inexpressible as
    refuse_inexpressible,
)
from .base_weights import open_base_weights as open_base_weights
from .decoder.attention import Attention as Attention, RMSNorm as RMSNorm, rotation_at as rotation_at
from .decoder.attention_context import AttentionScope as AttentionScope, Context as Context, attend as attend
from .decoder.decoder import (
    Decoder as Decoder, DecoderLayer as DecoderLayer, PredictionLayer as PredictionLayer, labels_ahead as
    labels_ahead, tokens_ahead as tokens_ahead,
)
from .decoder.joint_projections import separate_modules as separate_modules
from .decoder.key_value_cache import KeyValueCache as KeyValueCache, MIN_CAPACITY as MIN_CAPACITY
from .decoder.latent_attention import LatentAttention as LatentAttention
from .decoder.moe import (
    ExpertWeights as ExpertWeights, FeedForward as FeedForward, MoeLayer as MoeLayer, NUM_EXTRA_STATS as
    NUM_EXTRA_STATS, capacity_of as capacity_of, choose_experts as choose_experts, route as route,
)
from .decoder.scattered_rows import (
    gather_rows as gather_rows, scatter_rows as scatter_rows, sorted_places as sorted_places,
)
from .dtensor_shards import LocalShard as LocalShard
from .hf.hf import (
    HfNetwork as HfNetwork, hf_model as hf_model, hf_network as hf_network, load_hf_model as load_hf_model,
)
from .hf.hf_attention import takes_scope as takes_scope, uses_eager_attention as uses_eager_attention
from .hf.hf_build import open_hf_model as open_hf_model
from .hf.hf_probe import HfCache as HfCache, cache_difference as cache_difference
from .hf.hf_sharding import (
    count_experts as count_experts, is_spread as is_spread, spreadable_experts as spreadable_experts,
)
from .hf.hf_stages import cut_stage as cut_stage, pipeline_layers as pipeline_layers
from .hf.hf_vlm import HfVlmNetwork as HfVlmNetwork, insert_rows as insert_rows, network_of_hf as network_of_hf
from .hf_weights import hf_tensors as hf_tensors, load_hf_weights as load_hf_weights
from .initial_weights import initialise as initialise, initialise_adapter as initialise_adapter
from .kernels.latent_pages import attend_latent_pages as attend_latent_pages
from .kernels.paged_attention import attend_one_query as attend_one_query, store_and_attend as store_and_attend
from .local_shards import (
    DTYPE_ATTRIBUTE as DTYPE_ATTRIBUTE, ReadTensor as ReadTensor, full_tensor as full_tensor, gathered as gathered,
    is_dtensor as is_dtensor, is_fsdp_module as is_fsdp_module, is_on_meta as is_on_meta, kept_shard_casts as
    kept_shard_casts, local_bias as local_bias, local_for_compute as local_for_compute, local_matmul_weight as
    local_matmul_weight, local_part as local_part, local_slices as local_slices, own_dtype as own_dtype, to_empty as
    to_empty, with_local_parameters as with_local_parameters,
)
from .network import (
    Network as Network, WeightsNeededError as WeightsNeededError, decoder_network as decoder_network, network_of as
    network_of, open_network as open_network, output_head as output_head, refuse_unknown_tower as
    refuse_unknown_tower, tower_of as tower_of,
)
from .nf4_linear import (
    Nf4Linear as Nf4Linear, Nf4LoraLinear as Nf4LoraLinear, loadable_weights as loadable_weights,
    pack_frozen_weights as pack_frozen_weights, packed_parameters as packed_parameters, weight_to_fill as
    weight_to_fill,
)
from .operators import define_operator as define_operator
from .paged_cache import (
    HostLengthsNeededError as HostLengthsNeededError, PagedCache as PagedCache, PagedExtension as PagedExtension,
    attend_gathered_pages as attend_gathered_pages, has_paged_kernel as has_paged_kernel,
)
from .perception import (
    PerceptionNetwork as PerceptionNetwork, camera_bias as camera_bias, perception_network as perception_network,
)
from .plugin_network import PluginNetwork as PluginNetwork
from .varlen_attention import (
    AttentionOptions as AttentionOptions, BLOCK as BLOCK, HALF_PRECISION as HALF_PRECISION, Segments as Segments,
    block_mask as block_mask, causal_window as causal_window, document_mask as document_mask, flexible_attention as
    flexible_attention, has_flash as has_flash, has_flex_kernel as has_flex_kernel, masked_attention as
    masked_attention, run_lengths as run_lengths, segment_attention as segment_attention,
)
from .vlm.patch_layout import (
    ImageAssignment as ImageAssignment, ImagePatches as ImagePatches, black_image as black_image, layout_patches as
    layout_patches,
)
from .vlm.vision import VisionTower as VisionTower, normalise_patches as normalise_patches
from .vlm.vlm_model import Vlm as Vlm
from .vlm.vlm_network import VlmNetwork as VlmNetwork, load_vlm_weights as load_vlm_weights, vlm_tensors as vlm_tensors
