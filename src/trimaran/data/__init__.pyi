"""Public names of `trimaran.data`, and the modules that they come from. They are imported on first use."""

from .data_kind import data_kind_of as data_kind_of
from .feature_cache import BF16 as BF16, FeatureCache as FeatureCache, refuse_trained_tower as refuse_trained_tower
from .feed import (
    BadSample as BadSample, BatchFeed as BatchFeed, DataShare as DataShare, LoadedArrays as LoadedArrays, position
    as position, positions as positions, share_of as share_of,
)
from .loader import Loader as Loader, LoaderFault as LoaderFault
from .loader_tuner import (
    EXTRA_BATCHES_AHEAD as EXTRA_BATCHES_AHEAD, LoaderLimits as LoaderLimits, LoaderSetting as LoaderSetting,
    LoaderTuner as LoaderTuner, LoaderWindow as LoaderWindow, MIN_WAIT_FRACTION as MIN_WAIT_FRACTION,
    MIN_WAIT_SECONDS_PER_BATCH as MIN_WAIT_SECONDS_PER_BATCH,
)
from .quarantine import (
    BadSampleError as BadSampleError, Quarantine as Quarantine, SampleReader as SampleReader, read_quarantine as
    read_quarantine,
)
from .row_arrays import (
    ImageArrays as ImageArrays, PackedSample as PackedSample, SamplePacker as SamplePacker, token_positions as
    token_positions,
)
from .row_fields import CONVERSATIONS as CONVERSATIONS, QUESTIONS as QUESTIONS
from .row_ledger import Deal as Deal, RowLedger as RowLedger, spans_of as spans_of
from .row_packing import (
    Batching as Batching, PackingRules as PackingRules, RowPacking as RowPacking, open_row_packing as
    open_row_packing, pack_samples as pack_samples, slots_per_row as slots_per_row,
)
from .sample_costs import SampleRecord as SampleRecord, SampleTable as SampleTable, measure_samples as measure_samples
from .sample_feed import (
    NO_ROW as NO_ROW, SampleFeed as SampleFeed, SampleFeedOptions as SampleFeedOptions, SampleRows as SampleRows,
    balance_rows as balance_rows, sample_feeds as sample_feeds, sequential_rows as sequential_rows,
    slowest_rank_cost as slowest_rank_cost,
)
from .samples.parse_chat import (
    CAPTIONS as CAPTIONS, IMAGES as IMAGES, ImageFinder as ImageFinder, MARKER as MARKER, read_row as read_row,
)
from .samples.prepare_samples import estimate_rows as estimate_rows, prepare_samples as prepare_samples
from .samples.raw_sample import (
    FrameChoice as FrameChoice, ImageLocation as ImageLocation, RawSample as RawSample, Role as Role, SourceFiles as
    SourceFiles, Turn as Turn,
)
from .samples.readers import (
    json_rows as json_rows, read_samples as read_samples, read_tar as read_tar, sample_of as sample_of, text_of as
    text_of,
)
from .samples.sample_index import (
    SampleIndex as SampleIndex, repeat_ids as repeat_ids, repeats_per_epoch as repeats_per_epoch,
)
from .samples.source_part import ImageFiles as ImageFiles
from .samples.tokenize_chat import ChatTokenizer as ChatTokenizer, TEMPLATES as TEMPLATES
from .samples.videos import block_positions as block_positions, choose_frames as choose_frames
from .scenes.nuscenes_tables import read_lidar as read_lidar, read_radar as read_radar
from .scenes.recorded_scenes import (
    INDEX as INDEX, SceneOptions as SceneOptions, flat_pose as flat_pose, swept_points as swept_points, write_scenes
    as write_scenes,
)
from .scenes.scene_feed import (
    measure_points as measure_points, open_scenes as open_scenes, scene_feeds as scene_feeds, scenes_digest as
    scenes_digest,
)
from .scenes.simulated_scenes import (
    GROUND_HIT as GROUND_HIT, LIDAR_METRES as LIDAR_METRES, SWEEPS as SWEEPS, SWEEP_SECONDS as SWEEP_SECONDS,
    SensorRays as SensorRays, camera_rays as camera_rays, cast as cast, make_scene as make_scene,
)
from .step_batch import Inputs as Inputs, StepBatch as StepBatch, text_batch as text_batch
from .text.bad_lines import BadLines as BadLines
from .text.model_tokenizer import JsonTokenizer as JsonTokenizer
from .text.pack_text import Progress as Progress, pack as pack, pack_files as pack_files
from .text.prepare_text import cache_folder as cache_folder, check as check, prepare as prepare
from .text.source_files import find_files as find_files, named_path as named_path
from .text.text_sources import read_chunks as read_chunks
from .text.token_feed import TokenFeed as TokenFeed
from .text.token_files import count_tokens as count_tokens
from .text.token_shards import (
    IGNORED as IGNORED, Sequences as Sequences, ShardWriter as ShardWriter, TokenSample as TokenSample, TokenShards
    as TokenShards, split as split,
)
from .text.tokenizer import (
    ByteTokenizer as ByteTokenizer, TOKENIZER_FILE as TOKENIZER_FILE, Tokenizer as Tokenizer, byte_alphabet as
    byte_alphabet, check_vocabulary as check_vocabulary, is_same_tokenizer as is_same_tokenizer, load_tokenizer as
    load_tokenizer, open_tokenizer as open_tokenizer, token_byte_lengths as token_byte_lengths,
)
from .vision.decode import (
    BadImageError as BadImageError, MAX_PIXELS as MAX_PIXELS, join_frames as join_frames, pixels_of as pixels_of,
    split_frames as split_frames, upright_size as upright_size,
)
from .vision.image_grid import (
    ALONE as ALONE, cut_patches as cut_patches, fill_patches as fill_patches, grid_positions as grid_positions,
    grids_of as grids_of, measure_images as measure_images,
)
