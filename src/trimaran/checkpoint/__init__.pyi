"""Public names of `trimaran.checkpoint`, and the modules that they come from. They are imported on first use."""

from .batched_copy import (
    BackgroundPinning as BackgroundPinning, Piece as Piece, Run as Run, VALUES_PER_ROW as VALUES_PER_ROW, find_run
    as find_run, gather_rows as gather_rows, split_at_pin_chunks as split_at_pin_chunks, split_into_pieces as
    split_into_pieces,
)
from .checkpoint_list import find_step as find_step, verify_all as verify_all, with_step as with_step
from .convert.convert import (
    dcp_key as dcp_key, export_adapter as export_adapter, export_dcp as export_dcp, export_hf as export_hf,
    export_merged as export_merged, read_full_tensor as read_full_tensor, refuse_occupied as refuse_occupied,
    reporting_errors as reporting_errors, write_dcp as write_dcp,
)
from .convert.dcp_read import DcpSource as DcpSource, PickledDict as PickledDict, read_pickle as read_pickle
from .convert.export_hf import (
    copy_tokenizer_files as copy_tokenizer_files, write_folder as write_folder, write_hf_folder as write_hf_folder,
)
from .convert.export_peft import (
    AdapterFacts as AdapterFacts, whole_modules as whole_modules, write_peft_folder as write_peft_folder,
)
from .convert.import_dcp import (
    find_imported_tensors as find_imported_tensors, write_imported_tensors as write_imported_tensors,
)
from .copier import Copier as Copier
from .device_copier import DeviceCopier as DeviceCopier
from .durable import CHUNK_BYTES as CHUNK_BYTES, DurableDisk as DurableDisk
from .hand_over import HeldState as HeldState, ROUND_BYTES as ROUND_BYTES
from .load_state import (
    DiskSource as DiskSource, PartLoader as PartLoader, fill_matched as fill_matched, fill_shards as fill_shards,
    match_shards as match_shards, refuse_unused_tensors as refuse_unused_tensors,
)
from .manifest import (
    COMPACT_FORMAT as COMPACT_FORMAT, DamagedError as DamagedError, FILE_END as FILE_END, FORMAT as FORMAT,
    FileRecord as FileRecord, MANIFEST as MANIFEST, Manifest as Manifest, STEP_NAME as STEP_NAME, ZERO_DIGEST as
    ZERO_DIGEST, manifest_bytes as manifest_bytes, read_manifest as read_manifest,
)
from .memory_copies import (
    CopyMetadata as CopyMetadata, MemoryBudget as MemoryBudget, MemorySlot as MemorySlot, MemorySource as
    MemorySource, RankMemory as RankMemory, budget_options as budget_options, encode_items as encode_items,
    first_fitting_budget as first_fitting_budget,
)
from .peer_copies import FIRST_INTERVAL_STEPS as FIRST_INTERVAL_STEPS
from .rank_layout import RankLayout as RankLayout, barrier as barrier
from .saver import SaveRequest as SaveRequest, SaveResult as SaveResult, Saver as Saver, TorchStore as TorchStore
from .shard_index import (
    Column as Column, CompactRegions as CompactRegions, ShardLayout as ShardLayout, index_bytes as index_bytes,
    layout_of as layout_of, overlaps as overlaps, parse_index as parse_index, runs_of as runs_of,
)
from .step_dirs import (
    complete_steps as complete_steps, draft_path as draft_path, looks_complete as looks_complete, newest_step as
    newest_step, prune as prune, refuse as refuse, remove_drafts as remove_drafts, step_of as step_of, step_path as
    step_path, steps_to_prune as steps_to_prune, without_manifest as without_manifest,
)
from .step_files import StepFiles as StepFiles
from .store.object_store import (
    NUM_TRANSFERS as NUM_TRANSFERS, ObjectStore as ObjectStore, StoreError as StoreError, StoredStep as StoredStep,
    open_store as open_store, unusable_store as unusable_store,
)
from .store.store_process import StoreClient as StoreClient, StoreRequests as StoreRequests
from .store.store_uploads import (
    StoreUploads as StoreUploads, UploadResult as UploadResult, refuse_ordered as refuse_ordered,
)
from .verify_checkpoint import compare as compare, refuse_damaged_weights as refuse_damaged_weights, verify as verify
from .write_checkpoint import WriteReportParser as WriteReportParser, commit as commit, write_share as write_share
