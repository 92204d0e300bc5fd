"""The recipe: model, data, training, cluster and plan of a run. The defaults alone are a valid recipe."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from trimaran.core.autopilot_section import AutopilotMode, AutopilotSection, section_of_mode
from trimaran.core.errors import UserError
from trimaran.core.input_rules import Sensor
from trimaran.core.plan import BatchSize, Plan
from trimaran.core.plugins import KINDS, FamilyName, ObjectiveName, SinkName, SourceName, find_plugin, load_plugin
from trimaran.core.traits import ModelFamily, family_named

MAX_COUNT = 10**12  # of steps and the like: far above what a run can reach, and exact in JSON and in a float
MAX_SECONDS = 10**9  # of a time limit: 31 years, which is none
MAX_POLL_SECONDS = 10**6  # of a timeout that the operating system keeps: poll(2) takes at most 24 days
MAX_REAL = 1e30  # far below the largest fp32 number

Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=10)]
Real = Annotated[float, Field(ge=0, le=MAX_REAL)]
Wait = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
FilePath = Annotated[str, Field(max_length=4096)]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
HubRevision = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]
HubPart = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]

STRICT = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class AdapterSection(BaseModel):
    """An adapter: small trained matrices beside frozen linear layers, as in PEFT.

    The adapter's output is multiplied by alpha / rank, or by alpha / sqrt(rank) if it is rank-stabilised.
    """

    model_config = STRICT

    kind: Annotated[Literal["lora", "dora"], Field(description="dora also trains the norm of each output")] = "lora"
    rank: Annotated[int, Field(ge=1, le=65536)] = 16
    alpha: Annotated[float, Field(gt=0, le=MAX_REAL)] = 32.0
    rank_stabilised: Annotated[bool, Field(description="multiply by alpha / sqrt(rank)")] = False
    dropout: Annotated[Fraction, Field(description="of the adapter's input")] = 0.0
    targets: Annotated[
        Literal["all-linear"] | tuple[str, ...],
        Field(description="linear layers that get an adapter, such as [q_proj, v_proj]"),
    ] = "all-linear"
    towers: Annotated[tuple[str, ...], Field(description="towers with adapters; empty: the language model")] = ()
    train: Annotated[tuple[str, ...], Field(description="other modules to train in full, such as [lm_head]")] = ()
    base: Annotated[
        Literal["auto", "4bit"], Field(description="format of frozen weights; auto: the plan's compute precision")
    ] = "auto"
    path: Annotated[FilePath | None, Field(description="a PEFT adapter folder to continue from")] = None


class PredictionSection(BaseModel):
    """Multi-token prediction: layers after the last one that predict later tokens, as in DeepSeek-V3."""

    model_config = STRICT

    layers: Annotated[int, Field(ge=1, le=16, description="how many; the k-th predicts k + 1 tokens ahead")] = 1
    weight: Annotated[float, Field(gt=0, le=1000, description="of the mean of their losses in the loss")] = 0.3


class ModelSection(BaseModel):
    """The network. `decoder`, `vlm` and `perception` are ours; `hf` is any local Hugging Face causal LM.

    Any other family is a plug-in's.
    """

    model_config = STRICT

    family: FamilyName = "decoder"
    preset: Annotated[FilePath | None, Field(description="a named model shape, such as tiny or llama-3.2-1b")] = None
    path: Annotated[
        FilePath | None, Field(description="a Hugging Face model folder, or a name on the Hub: its shape and weights")
    ] = None
    revision: Annotated[
        HubRevision | None, Field(description="branch, tag or commit of a name on the Hub; a run records the commit")
    ] = None
    shape: Annotated[dict[str, Any], Field(description="fields of the shape to change, such as {layers: 2}")] = {}
    freeze: Annotated[tuple[str, ...], Field(description="towers that are not trained, such as [vision]")] = ()
    adapter: Annotated[
        AdapterSection | None, Field(description="train an adapter such as {kind: lora, rank: 16}, not the whole model")
    ] = None
    multi_token_prediction: Annotated[
        PredictionSection | None,
        Field(description="train layers that predict later tokens, such as {layers: 1, weight: 0.3}; not by default"),
    ] = None
    trust_remote_code: Annotated[bool, Field(description="run the Python code that comes with the hf model")] = False

    @property
    def kind(self) -> ModelFamily:
        """What all networks of the family have in common."""
        return family_named(self.family)


class MixtureSource(BaseModel):
    """One source of a mixture. `name` labels its loss in the metrics.

    `weight` is its relative share of the samples; `epochs` is how often each of its samples occurs in one pass over
    the mixture. With neither, each sample occurs once.
    """

    model_config = STRICT

    name: Slug
    source: SourceName
    path: FilePath | None = None
    revision: HubRevision | None = None
    subset: HubPart | None = None
    split: HubPart = "train"
    text_field: Annotated[str, Field(description="the field or column that holds the text")] = "text"
    images: Annotated[FilePath | None, Field(description="the folder that image paths are relative to")] = None
    weight: Annotated[float | None, Field(gt=0, le=MAX_REAL)] = None
    epochs: Annotated[float | None, Field(gt=0, le=1000)] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.weight is not None and self.epochs is not None:
            raise ValueError("a source has a weight or epochs, not both")
        return self


class SamplesSection(BaseModel):
    """How samples of different lengths, with or without images, become rows of `seq_len` tokens.

    `pack` fills a row with several samples, which do not attend to each other; `bucket` groups samples of similar
    length and pads them; `pad` puts one sample in a row. `balance` assigns the rows of a step to ranks by their cost.
    """

    model_config = STRICT

    batching: Literal["pack", "bucket", "pad"] = "pack"
    balance: bool = True
    template: Annotated[
        Literal["auto", "model", "chatml", "llama3", "vicuna", "plain"],
        Field(description="how a conversation becomes text; model: the chat template of the tokenizer"),
    ] = "auto"
    images: Annotated[FilePath | None, Field(description="the folder that image paths are relative to")] = None
    min_pixels: Annotated[Count, Field(description="smaller images are enlarged; 0: the model's default")] = 0
    max_pixels: Annotated[Count, Field(description="larger images are shrunk; 0: the model's default")] = 0
    frames_per_second: Annotated[float, Field(gt=0, le=1000, description="frames of a video that become images")] = 1.0
    max_frames: Annotated[int, Field(ge=1, le=10_000, description="frames of a video at most, evenly spaced")] = 16
    temporal_patches: Annotated[
        bool, Field(description="two frames of a video share their patches, as Qwen-VL's own processors do it")
    ] = False
    max_bad: Annotated[Fraction, Field(description="fraction of bad samples or lines above which the run stops")] = 0.01
    cache_features: Annotated[
        bool, Field(description="compute the features of a frozen tower once, and cache them")
    ] = False


class ScenesSection(BaseModel):
    """How recorded scenes of a perception model are read."""

    model_config = STRICT

    optional: Annotated[
        tuple[Sensor, ...],
        Field(description="sensors whose files may be missing: a scene then has no such points, or a black image"),
    ] = ()
    radar_sweeps: Annotated[int, Field(ge=1, le=100, description="newest sweeps of each radar in a scene")] = 6
    version: Annotated[
        Slug | None, Field(description="folder of nuScenes' tables, such as v1.0-mini; default: the only one")
    ] = None


class DataSection(BaseModel):
    """The data, and how it becomes sequences."""

    model_config = STRICT

    source: SourceName = "python-stdlib"
    path: Annotated[
        FilePath | None, Field(description="file, folder or a dataset on the Hub; most sources need it")
    ] = None
    revision: Annotated[
        HubRevision | None, Field(description="branch, tag or commit of a dataset on the Hub; a run records the commit")
    ] = None
    subset: Annotated[HubPart | None, Field(description="the configuration of a dataset on the Hub")] = None
    split: Annotated[HubPart, Field(description="the split of a dataset on the Hub")] = "train"
    tokenizer: Annotated[
        FilePath | None,
        Field(description="a model folder, a tokenizers JSON file, or bytes; default: that of model.path, else bytes"),
    ] = None
    text_field: Annotated[str, Field(description="the field of a JSONL line or dataset row that holds the text")] = (
        "text"
    )
    seq_len: Annotated[int, Field(ge=2, le=2**24)] = 256
    images_per_sample: Annotated[
        int | None, Field(ge=1, le=4096, description="for vision-language models; the default is 1")
    ] = None
    image_size: Annotated[int | None, Field(ge=1, le=65536, description="pixels a side; default: the model's")] = None
    isolate_documents: Annotated[bool, Field(description="attention never crosses a document boundary")] = False
    holdout: Annotated[Fraction, Field(description="fraction of the sequences held out for evaluation")] = 0.01
    workers: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=0, le=256)],
        Field(description="loader processes per rank; 0: a thread; auto: tuned while the run waits for data"),
    ] = "auto"
    timeout_seconds: Annotated[
        Wait, Field(le=MAX_POLL_SECONDS, description="a loader without an answer for this long hangs")
    ] = 60.0
    epochs: Annotated[
        float, Field(ge=0, le=10**6, description="passes over the data that end the run; 0: train.steps alone")
    ] = 0
    mixture: Annotated[tuple[MixtureSource, ...], Field(description="several sources instead of one")] = ()
    samples: SamplesSection = SamplesSection()
    scenes: ScenesSection = ScenesSection()


class Schedule(BaseModel):
    """The learning rate schedule: linear warm-up, then `kind` down to `floor` times the peak.

    `decay_steps` is for wsd (warm-up, stable, decay) only: the steps of the final decay; 0 means a fifth of the run.
    """

    model_config = STRICT

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: Count = 10
    decay_steps: Count = 0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1


class TowerOptimizer(BaseModel):
    """Optimizer settings of one tower; None means as in the rest. The schedule is the same for all."""

    model_config = STRICT

    lr: Rate | None = None
    weight_decay: Real | None = None


class Optimizer(BaseModel):
    """AdamW's constants, and the format of its moments. Norms, biases and other vectors are never decayed."""

    model_config = STRICT

    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0, le=MAX_REAL)] = 1e-8
    weight_decay: Real = 0.1
    states: Annotated[
        Literal["fp32", "bf16", "8bit"], Field(description="format of the moments: 8, 4 or 2 bytes a parameter")
    ] = "fp32"
    towers: Annotated[dict[str, TowerOptimizer], Field(description="such as {vision: {lr: 1.0e-5}}")] = {}


class Evaluate(BaseModel):
    """When and on how much held-out data the loss is evaluated. `every` 0: only at the end."""

    model_config = STRICT

    every: Count = 0
    batches: Count = 4


AUTO_PROMPT = "auto"
PYTHON_PROMPT = "def "  # what `auto` is for the text of Python's standard library
DEFAULT_SAMPLE_TOKENS = 240
MIN_SAMPLED_STEPS = 50  # the text after fewer steps is noise


class SampleSection(BaseModel):
    """The text that the model generates at the end, for at most `seconds`. `tokens` 0 switches it off.

    A recipe that sets any of these fields gets a sample after any number of steps.
    """

    model_config = STRICT

    prompt: Annotated[str, Field(description="auto: the beginning of a held-out text")] = AUTO_PROMPT
    tokens: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=0, le=65536)],
        Field(description="auto: 240, and none in a run of fewer than 50 steps"),
    ] = "auto"
    temperature: Real = 0.9
    seconds: Annotated[Wait, Field(description="the sample ends after this time, with fewer tokens")] = 10.0

    @model_validator(mode="before")
    @classmethod
    def _sample_if_asked(cls, fields: Any) -> Any:
        is_asked = isinstance(fields, dict) and fields and "tokens" not in fields
        return fields | {"tokens": DEFAULT_SAMPLE_TOKENS} if is_asked else fields


class TrainSection(BaseModel):
    """Steps, batch and optimization. `global_batch` is sequences per optimizer step, independent of the plan."""

    model_config = STRICT

    steps: Positive = 100
    global_batch: BatchSize = 32
    lr: Rate = 1e-3
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    clip_norm: Annotated[Real, Field(description="0 switches clipping off")] = 1.0
    deterministic: bool = False
    precision: Annotated[
        dict[str, Literal["fp32", "bf16", "fp16"]],
        Field(description="precision of single modules, independent of the plan, such as {lm_head: fp32}"),
    ] = {}
    save: Annotated[bool, Field(description="write the trained weights to the run directory")] = True
    check_first_loss: Annotated[
        bool, Field(description="family hf: compare the first loss with transformers' own forward")
    ] = True
    schedule: Schedule = Schedule()
    optimizer: Optimizer = Optimizer()
    evaluate: Evaluate = Evaluate()
    sample: SampleSection = SampleSection()

    @property
    def sample_tokens(self) -> int:
        """How many tokens are generated at the end; 0 for none."""
        if self.sample.tokens != "auto":
            return self.sample.tokens
        return DEFAULT_SAMPLE_TOKENS if self.steps >= MIN_SAMPLED_STEPS else 0


class ObjectiveSection(BaseModel):
    """What is trained for. `auto` is next-token prediction, or the losses of a perception model; others are plug-ins.

    Label smoothing replaces the one-hot target by (1 - s) of it and s spread evenly over the vocabulary, as torch's
    `cross_entropy` does. It applies to training, not to the held-out loss.
    """

    model_config = STRICT

    name: ObjectiveName = "auto"
    label_smoothing: Annotated[Fraction, Field(description="of next-token prediction; 0 switches it off")] = 0.0
    options: Annotated[dict[str, Any], Field(description="settings of a plug-in's objective")] = {}

    @model_validator(mode="after")
    def _only_of_language(self) -> Self:
        if self.label_smoothing and self.name not in ("auto", "language"):
            raise ValueError(f"label_smoothing is of next-token prediction, and the objective is {self.name}")
        if self.options and self.name in ("auto", "language", "perception"):
            raise ValueError(f"the objective {self.name} has no options")
        return self


class CheckpointSection(BaseModel):
    """When checkpoints are saved, where, and for how long.

    `every` and `memory` are steps: between checkpoints on disk, and between copies in host memory, which survive a
    killed rank. `auto` saves as often as costs at most 0.5 % of the time, and copies to memory as often as costs at
    most 1 % if a fault would otherwise cost more than `lost_seconds` of training. `every: off` writes none at all, not
    even at the end: such a run cannot be resumed, it starts again.
    """

    model_config = STRICT

    every: Annotated[
        Literal["auto", "off"] | Count,
        Field(description="steps; auto: Young/Daly; 0: only at the end; off: never, for experiments"),
    ] = "auto"
    memory: Annotated[Literal["auto"] | Count, Field(description="steps; 0 keeps no copy in memory")] = "auto"
    lost_seconds: Annotated[
        float, Field(gt=0, le=MAX_COUNT, description="training to repeat after a fault of a rank; for memory: auto")
    ] = 5.0
    keep: Annotated[Positive, Field(description="how many of the newest checkpoints to keep")] = 2
    keep_every: Annotated[Count, Field(description="multiples of this step are never deleted; 0: none")] = 0
    asynchronous: Annotated[bool, Field(description="write while training continues")] = True
    incremental: Annotated[bool, Field(description="do not write unchanged data again")] = True
    read_back: Annotated[
        Literal["sample", "all"],
        Field(description="of files over 64 MiB: both ends of each 8 MiB, or every byte, which the disk reads again"),
    ] = "sample"
    device_hours: Annotated[
        float, Field(gt=0, le=MAX_COUNT, description="mean time between failures of one device")
    ] = 8000.0
    store: Annotated[
        str, Field(max_length=1024, description="also upload checkpoints to this URL, such as s3://bucket/my-run")
    ] = ""

    @field_validator("store")
    @classmethod
    def _url_without_secrets(cls, url: str) -> str:
        if url and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s?#]+", url):
            raise ValueError("a store is a URL of fsspec, such as s3://bucket/my-run or file:///shared/my-run")
        if re.match(r"[^/]*://[^/@]*:[^/@]*@", url):
            raise ValueError("a password or key does not belong in a recipe: set it in the environment")
        if url.startswith(("file://", "local://")) and not url.partition("://")[2].startswith("/"):
            raise ValueError("the path of a file URL begins with a slash: file:///shared/my-run")
        return url.rstrip("/")

    @field_validator("every", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: object) -> object:
        return "off" if value is False else value

    @property
    def is_off(self) -> bool:
        """Whether no checkpoint is written to disk."""
        return self.every == "off"


class FaultsSection(BaseModel):
    """What happens when something goes wrong.

    `not_finite` applies to a loss or gradient that is NaN or Inf, or a loss above `spike` times the recent mean. The
    update is never applied. Then the run continues, rewinds to the last checkpoint without these samples, or stops.
    """

    model_config = STRICT

    restart: Annotated[bool, Field(description="restart from the newest state")] = True
    cycles: Annotated[Positive, Field(description="restarts without a new step before the run gives up")] = 3
    ranks: Annotated[tuple[Positive, Positive] | None, Field(description="fewest and most ranks to run with")] = None
    debug: Annotated[bool, Field(description="check every collective and wait for every kernel; slow")] = False
    not_finite: Literal["skip", "rewind", "stop"] = "skip"
    spike: Annotated[Real, Field(description="times the recent mean loss; 0 switches it off")] = 10.0
    max_skips: Annotated[Positive, Field(description="skipped steps in a row before the run stops")] = 10
    max_quarantined: Annotated[Count, Field(description="samples that may be quarantined")] = 100
    shard_check: Annotated[
        float,
        Field(ge=0, le=1, description="fraction of the time for finding memory that changes between updates; 0: none"),
    ] = 0.01
    hang_seconds: Annotated[
        Wait, Field(description="a step hangs after this many seconds and five median steps; compiling does not count")
    ] = 6.0
    start_seconds: Annotated[Wait, Field(description="limit for building, compiling and loading")] = 900.0
    expandable_segments: Annotated[
        Literal["auto"] | bool, Field(description="of the CUDA allocator; auto: for plans that fragment memory")
    ] = "auto"

    @field_validator("ranks")
    @classmethod
    def _fewest_first(cls, ranks: tuple[int, int] | None) -> tuple[int, int] | None:
        if ranks is not None and ranks[0] > ranks[1]:
            raise ValueError(f"the fewest ranks come first, then the most: [{ranks[1]}, {ranks[0]}]")
        return ranks


class NodesSection(BaseModel):
    """How the nodes of a run on several machines are numbered: neighbours are to have fast links between them."""

    model_config = STRICT

    order: Annotated[
        Literal["switches", "measured"],
        Field(description="by the switches that are known, then by name; measured: by a short test if none is known"),
    ] = "switches"


class PrometheusSection(BaseModel):
    """The Prometheus endpoint. It listens on this machine only, unless `host` says otherwise."""

    model_config = STRICT

    port: Annotated[int, Field(ge=0, le=65535, description="0 switches it off")] = 0
    host: str = "127.0.0.1"


class WandbSection(BaseModel):
    """Weights & Biases. wandb finds its API key by itself."""

    model_config = STRICT

    mode: Literal["off", "online", "offline"] = "off"
    project: str = "trimaran"
    entity: str = ""


class MlflowSection(BaseModel):
    """MLflow. It finds its credentials by itself."""

    model_config = STRICT

    uri: Annotated[str, Field(description="the tracking server, such as http://localhost:5000; empty: none")] = ""
    experiment: str = "trimaran"

    @field_validator("uri")
    @classmethod
    def _server_without_credentials(cls, uri: str) -> str:
        if uri and not uri.startswith(("http://", "https://", "databricks")):
            raise ValueError("this is not a tracking server: write http://HOST:PORT, https://HOST or databricks")
        if "@" in uri.partition("://")[2].partition("/")[0]:
            raise ValueError("the recipe is logged: put the password into MLFLOW_TRACKING_PASSWORD, and the name into "
                             "MLFLOW_TRACKING_USERNAME")  # fmt: skip
        return uri


class TargetsSection(BaseModel):
    """What a run should reach; `doctor` and `report` say whether it does."""

    model_config = STRICT

    gpu_busy: Annotated[float, Field(ge=0, le=1, description="least fraction of time with a running kernel")] = 0.85
    exposed_comm: Annotated[float, Field(ge=0, le=1, description="largest fraction of a step")] = 0.2
    scaling: Annotated[float, Field(ge=0, le=1, description="least work of a rank, as a fraction of one alone")] = 0.8
    recovery_seconds: Annotated[
        float, Field(ge=0, le=MAX_SECONDS, description="longest time from a failure to the next step")
    ] = 300.0


class TelemetrySection(BaseModel):
    """What is measured, and where it is sent. `metrics.jsonl` and the events are always written.

    `details_every` applies to what costs a little: norms and update ratios by module group.
    """

    model_config = STRICT

    details_every: Annotated[Count, Field(description="steps between norms and updates by module; 0: never")] = 10
    sample_seconds: Annotated[
        float, Field(ge=0, le=MAX_SECONDS, description="interval of GPU and host samples; 0: never")
    ] = 5.0
    profile: Annotated[str, Field(description="steps FIRST:END to trace, without END")] = ""
    profile_every: Annotated[Count, Field(description="steps from one such trace to the next; 0: only one")] = 0
    profile_ranks: Annotated[str, Field(description="all, or ranks such as 0,3")] = "0"
    nvtx: Annotated[bool, Field(description="NVTX ranges of phases, layers and collectives, for Nsight Systems")] = (
        False
    )
    memory_snapshots: Annotated[bool, Field(description="record the history of allocations, for OOM reports")] = False
    targets: TargetsSection = TargetsSection()
    prometheus: PrometheusSection = PrometheusSection()
    tensorboard: bool = False
    wandb: WandbSection = WandbSection()
    mlflow: MlflowSection = MlflowSection()
    ecs: Annotated[bool, Field(description="logs and events in ECS form, for Elasticsearch")] = False
    otel: Annotated[str, Field(description="an OpenTelemetry collector, such as http://localhost:4318")] = ""
    sinks: Annotated[
        dict[SinkName, dict[str, Any]], Field(description="plug-ins with their options, such as {csv: {}}")
    ] = {}

    @field_validator("profile")
    @classmethod
    def _first_before_end(cls, profile: str) -> str:
        if not profile:
            return profile
        if not re.fullmatch(r"[0-9]{1,15}:[0-9]{1,15}", profile):
            raise ValueError("write the first step and the end, such as 10:13 for the steps 10, 11 and 12")
        first, end = map(int, profile.split(":"))
        if not 1 <= first < end:
            raise ValueError("steps count from 1, and the first is below the end: 10:13 are the steps 10, 11 and 12")
        return profile

    @field_validator("profile_ranks")
    @classmethod
    def _ranks_or_all(cls, ranks: str) -> str:
        if not re.fullmatch(r"all|[0-9]{1,6}(,[0-9]{1,6})*", ranks):
            raise ValueError("write all, or the numbers of ranks, such as 0,3")
        return ranks


class Recipe(BaseModel):
    """Everything that defines a run."""

    model_config = STRICT

    name: Slug = "stdlib-tiny"
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    objective: ObjectiveSection = ObjectiveSection()
    checkpoint: CheckpointSection = CheckpointSection()
    faults: FaultsSection = FaultsSection()
    telemetry: TelemetrySection = TelemetrySection()
    nodes: NodesSection = NodesSection()
    cluster: Annotated[FilePath, Field(description="auto, 8xH100, 4x8xA100-80GB, 2xcpu or a YAML file")] = "auto"
    plan: Literal["auto"] | Plan = "auto"
    autopilot: Annotated[
        AutopilotSection, BeforeValidator(section_of_mode, json_schema_input_type=AutopilotMode | AutopilotSection)
    ] = AutopilotSection()


USED_BY_RANKS = ("objective", "data source", "network family")


def used_plugins(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the kind and the name of each plug-in that the recipe names."""
    named = [
        ("objective", recipe.objective.name),
        ("data source", recipe.data.source),
        ("network family", recipe.model.family),
        *(("sink", name) for name in recipe.telemetry.sinks),
        ("autopilot policy", recipe.autopilot.policy),
    ]
    return [(kind, name) for kind, name in named if name not in KINDS[kind].reserved]


def plugin_records(recipe: Recipe) -> list[dict[str, str]]:
    """Return kind, name, distribution and version of each plug-in; of one that is not installed only the first two."""
    records = []
    for kind, name in used_plugins(recipe):
        try:
            records.append(find_plugin(kind, name).as_dict())
        except UserError:
            records.append({"kind": kind, "name": name})
    return records


def load_used_plugins(recipe: Recipe, kinds: tuple[str, ...]) -> None:
    """Load the recipe's plug-ins of these kinds; raise UserError for the first that cannot be used here."""
    for kind, name in used_plugins(recipe):
        if kind in kinds:
            load_plugin(kind, name)
