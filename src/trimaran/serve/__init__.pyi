"""Public names of `trimaran.serve`, and the modules that they come from. They are imported on first use."""

from .app.serve import listen as listen
from .app.talk import show_generation as show_generation
from .app.trained_weights import find_weights as find_weights
from .app.vllm import (
    OPTIONS as OPTIONS, VllmRequest as VllmRequest, check_folder as check_folder, plan_vllm as plan_vllm,
    vllm_options as vllm_options,
)
from .conversation import (
    Conversation as Conversation, MAX_WAITING as MAX_WAITING, PromptBuilder as PromptBuilder, PromptImage as
    PromptImage, TextStream as TextStream, UNDECODABLE as UNDECODABLE, continuation as continuation, place_images as
    place_images,
)
from .engine.batching_engine import BatchingEngine as BatchingEngine, EngineStats as EngineStats
from .engine.decode_graphs import GraphRunner as GraphRunner
from .engine.engine_batch import (
    ALL as ALL, EMBEDDING as EMBEDDING, EngineBatch as EngineBatch, LAST as LAST, NOTHING as NOTHING,
)
from .engine.engine_loop import EngineLoop as EngineLoop, EngineSocket as EngineSocket
from .engine.engine_request import (
    EngineLimits as EngineLimits, EngineRequest as EngineRequest, TokenOutput as TokenOutput, dump_message as
    dump_message, output_from_json as output_from_json, output_to_json as output_to_json, request_from_json as
    request_from_json, request_to_json as request_to_json,
)
from .engine.model_runner import (
    CacheSettings as CacheSettings, ModelRunner as ModelRunner, Runner as Runner, RunnerTraits as RunnerTraits,
    SequenceRunner as SequenceRunner, StepLogits as StepLogits, bytes_of_page as bytes_of_page, open_runner as
    open_runner, traits_of as traits_of,
)
from .engine.open_engine import load_adapter as load_adapter, load_peft_folder as load_peft_folder
from .engine.peer_watch import (
    ADDRESS_KEY as ADDRESS_KEY, GOODBYE as GOODBYE, PeerWatch as PeerWatch, RANK_LOST_EXIT as RANK_LOST_EXIT,
    watch_peers as watch_peers,
)
from .engine.scheduler import BlockPool as BlockPool, page_digest as page_digest
from .engine.serving_rank import (
    RankPlace as RankPlace, RankedRunner as RankedRunner, join_ranks as join_ranks, open_ranked_runner as
    open_ranked_runner, serve_rank as serve_rank,
)
from .engine.sharded_weights import ServedModel as ServedModel, open_part as open_part
from .engine.token_choice import (
    NOT_A_TOKEN as NOT_A_TOKEN, PendingTokens as PendingTokens, TokenChooser as TokenChooser, choose_on_device as
    choose_on_device, choose_tokens as choose_tokens, logprobs_of as logprobs_of,
)
from .exports.compare_logits import (
    BOUNDS as BOUNDS, compare_logits as compare_logits, network_logits as network_logits, refuse_difference as
    refuse_difference, sample_tokens as sample_tokens,
)
from .exports.gguf import gguf_tokenizer as gguf_tokenizer, write_gguf as write_gguf
from .exports.graph_exports import (
    graph_module as graph_module, portable_module as portable_module, read_onnx as read_onnx, read_program as
    read_program, write_onnx as write_onnx, write_program as write_program,
)
from .exports.torchao_weights import quantise_linears as quantise_linears
from .harness_model import HarnessModel as HarnessModel
from .planning.serving import (
    Layout as Layout, StepWork as StepWork, Traffic as Traffic, captures_steps as captures_steps, serving_memory as
    serving_memory, serving_step as serving_step,
)
from .planning.serving_plans import (
    ServingQuestion as ServingQuestion, load_table as load_table, loads_to_show as loads_to_show, max_running as
    max_running, plan_serving as plan_serving, tensor_degrees as tensor_degrees,
)
from .server.access import (
    AccessMiddleware as AccessMiddleware, Application as Application, LOCAL_NAMES as LOCAL_NAMES, Message as
    Message, RawHeaders as RawHeaders, Receive as Receive, Send as Send, allowed_host as allowed_host, is_own_origin
    as is_own_origin, read_body as read_body,
)
from .server.answers import (
    AnswerChoice as AnswerChoice, AnswerHead as AnswerHead, AnswerText as AnswerText, CompletionFormat as
    CompletionFormat,
)
from .server.api_error import error_response as error_response, status_of as status_of, stopping as stopping
from .server.calls import (
    ChatCall as ChatCall, CompletionCall as CompletionCall, PreparedPrompt as PreparedPrompt, PromptReader as
    PromptReader, may_have_many_values as may_have_many_values, parse_call as parse_call, refuse_many_values as
    refuse_many_values,
)
from .server.connection_guard import (
    ConnectionGuard as ConnectionGuard, ConnectionLimits as ConnectionLimits, guarded_http as guarded_http,
    limits_of_process as limits_of_process,
)
from .server.request_queue import RequestQueue as RequestQueue
from .server.run_server import damage_of as damage_of, http_config as http_config, newest_weights as newest_weights
from .server.serving_metrics import (
    NEXT_SECONDS as NEXT_SECONDS, ServingMetrics as ServingMetrics, TokenTimes as TokenTimes,
)
from .serving_layers import (
    GROUP as GROUP, Quantisation as Quantisation, QuantisedLinear as QuantisedLinear, is_supported as is_supported,
    join_projections as join_projections, joined_linear as joined_linear, quantise as quantise, quantise_linear as
    quantise_linear, quantised_weight as quantised_weight, restored_weight as restored_weight,
)
from .settings import EngineSettings as EngineSettings, TrainedWeights as TrainedWeights
from .trained_model import (
    ModelTexts as ModelTexts, TrainedModel as TrainedModel, base_of_peft as base_of_peft, compute_in_bf16 as
    compute_in_bf16, fill_from_peft as fill_from_peft, load_adapted as load_adapted, open_trained as open_trained,
    section_of_folder as section_of_folder, stored_dtype as stored_dtype,
)
