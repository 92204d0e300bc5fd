"""Public names of `trimaran.serve`, and the modules that they come from. They are imported on first use."""

from .adapted_network import (
    base_of_peft as base_of_peft, fill_from_peft as fill_from_peft, load_adapted as load_adapted,
)
from .app.generated_text import show_generation as show_generation
from .app.trained_weights import find_weights as find_weights
from .app.vllm_command import (
    OPTIONS as OPTIONS, VllmRequest as VllmRequest, check_folder as check_folder, config_text as config_text,
    vllm_options as vllm_options,
)
from .conversation import Conversation as Conversation, PromptBuilder as PromptBuilder, continuation as continuation
from .engine.adapter_loading import load_adapter as load_adapter, load_peft_folder as load_peft_folder
from .engine.batching_engine import BatchingEngine as BatchingEngine, EngineStats as EngineStats
from .engine.block_pool import BlockPool as BlockPool, page_digest as page_digest
from .engine.chosen_tokens import PendingTokens as PendingTokens
from .engine.decode_graphs import GraphRunner as GraphRunner
from .engine.engine_batch import (
    ALL as ALL, EMBEDDING as EMBEDDING, EngineBatch as EngineBatch, LAST as LAST, NOTHING as NOTHING,
)
from .engine.engine_loop import EngineLoop as EngineLoop, EngineSocket as EngineSocket
from .engine.engine_messages import (
    EngineLimits as EngineLimits, dump_message as dump_message, output_from_json as output_from_json,
    output_to_json as output_to_json, request_from_json as request_from_json, request_to_json as request_to_json,
)
from .engine.engine_request import EngineRequest as EngineRequest, TokenOutput as TokenOutput
from .engine.model_runner import (
    ModelRunner as ModelRunner, Runner as Runner, RunnerTraits as RunnerTraits, StepLogits as StepLogits,
    output_head as output_head,
)
from .engine.open_runner import (
    CacheSettings as CacheSettings, bytes_of_page as bytes_of_page, open_runner as open_runner, traits_of as traits_of,
)
from .engine.peer_watch import (
    ADDRESS_KEY as ADDRESS_KEY, GOODBYE as GOODBYE, PeerWatch as PeerWatch, RANK_LOST_EXIT as RANK_LOST_EXIT,
    watch_peers as watch_peers,
)
from .engine.scheduler import EngineSettings as EngineSettings
from .engine.sequence_runner import SequenceRunner as SequenceRunner
from .engine.serving_rank import (
    RankPlace as RankPlace, RankedRunner as RankedRunner, ServedModel as ServedModel, join_ranks as join_ranks,
    open_ranked_runner as open_ranked_runner, serve_rank as serve_rank,
)
from .engine.sharded_weights import PartSettings as PartSettings, open_part as open_part
from .engine.token_choice import (
    NOT_A_TOKEN as NOT_A_TOKEN, TokenChooser as TokenChooser, choose_on_device as choose_on_device,
    choose_tokens as choose_tokens, logprobs_of as logprobs_of,
)
from .exports.compare_logits import (
    BOUNDS as BOUNDS, compare_logits as compare_logits, network_logits as network_logits,
    refuse_difference as refuse_difference, sample_tokens as sample_tokens,
)
from .exports.gguf_export import write_gguf as write_gguf
from .exports.gguf_tokenizer import gguf_tokenizer as gguf_tokenizer
from .exports.graph_exports import (
    graph_module as graph_module, read_onnx as read_onnx, read_program as read_program, write_onnx as write_onnx,
    write_program as write_program,
)
from .exports.portable_network import portable_module as portable_module
from .exports.torchao_weights import quantise_linears as quantise_linears
from .harness_model import HarnessModel as HarnessModel
from .image_prompt import PromptImage as PromptImage, place_images as place_images
from .open_weights import ModelTexts as ModelTexts, open_trained as open_trained
from .planning.serving import (
    Layout as Layout, Traffic as Traffic, captures_steps as captures_steps, serving_memory as serving_memory,
)
from .planning.serving_load import load_table as load_table, loads_to_show as loads_to_show, max_running as max_running
from .planning.serving_plans import (
    ServingQuestion as ServingQuestion, plan_serving as plan_serving, tensor_degrees as tensor_degrees,
)
from .planning.serving_time import StepWork as StepWork, serving_step as serving_step
from .server.access import AccessMiddleware as AccessMiddleware
from .server.answer_bodies import AnswerHead as AnswerHead, CompletionFormat as CompletionFormat
from .server.answer_choice import AnswerChoice as AnswerChoice
from .server.answer_text import AnswerText as AnswerText
from .server.api_error import error_response as error_response, stopping as stopping
from .server.call_fields import (
    ChatCall as ChatCall, CompletionCall as CompletionCall, may_have_many_values as may_have_many_values,
    parse_call as parse_call, refuse_many_values as refuse_many_values,
)
from .server.connection_guard import (
    ConnectionGuard as ConnectionGuard, ConnectionLimits as ConnectionLimits, guarded_http as guarded_http,
)
from .server.follow_run import damage_of as damage_of, newest_weights as newest_weights
from .server.prompt_reader import PreparedPrompt as PreparedPrompt, PromptReader as PromptReader
from .server.request_queue import RequestQueue as RequestQueue
from .server.run_server import http_config as http_config
from .server.serving_metrics import (
    NEXT_SECONDS as NEXT_SECONDS, ServingMetrics as ServingMetrics, TokenTimes as TokenTimes,
)
from .serving_layers import join_projections as join_projections, joined_linear as joined_linear
from .text_stream import MAX_WAITING as MAX_WAITING, TextStream as TextStream, UNDECODABLE as UNDECODABLE
from .trained_model import (
    TrainedModel as TrainedModel, compute_in_bf16 as compute_in_bf16, section_of_folder as section_of_folder,
    stored_dtype as stored_dtype,
)
from .weight_quantisation import (
    GROUP as GROUP, Quantisation as Quantisation, QuantisedLinear as QuantisedLinear, is_supported as is_supported,
    quantise as quantise, quantise_linear as quantise_linear, quantised_weight as quantised_weight,
    restored_weight as restored_weight,
)
from .weights_location import TrainedWeights as TrainedWeights
