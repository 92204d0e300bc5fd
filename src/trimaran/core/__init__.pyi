"""Public names of `trimaran.core`, and the modules that they come from. They are imported on first use."""

from .autopilot_section import AutopilotSection as AutopilotSection, OTHER_CHANGEABLE_FIELDS as OTHER_CHANGEABLE_FIELDS
from .child_process import ChildProcess as ChildProcess, kill_tree as kill_tree
from .engine_rules import (
    FP8_BLOCK as FP8_BLOCK, FP8_FEATURE_MULTIPLE as FP8_FEATURE_MULTIPLE, MIN_FP8_FEATURES as MIN_FP8_FEATURES,
    MX_BLOCK as MX_BLOCK, check_deepspeed as check_deepspeed, deepspeed_config as deepspeed_config,
    deepspeed_missing as deepspeed_missing, num_units as num_units, refuse_missing_packages as
    refuse_missing_packages, unit_sizes as unit_sizes,
)
from .errors import (
    EXIT_AGAIN as EXIT_AGAIN, EXIT_DONE as EXIT_DONE, EXIT_STUCK as EXIT_STUCK, EXIT_USER as EXIT_USER, ErrorTexts
    as ErrorTexts, GONE_IN as GONE_IN, MESSAGES as MESSAGES, RENAMED as RENAMED, UserError as UserError, closest as
    closest, did_you_mean as did_you_mean, file_error as file_error, messages as messages, warn_of_old_name as
    warn_of_old_name,
)
from .event import (
    Action as Action, Cause as Cause, Decision as Decision, DecisionOutcome as DecisionOutcome, Event as Event,
    EventKind as EventKind, Finding as Finding, Incident as Incident, PHASES as PHASES, Phase as Phase,
    SECONDS_DECIMALS as SECONDS_DECIMALS, SLOW_DETAILS as SLOW_DETAILS, StepMetrics as StepMetrics,
)
from .input_rules import (
    BOX_NUMBERS as BOX_NUMBERS, CAMERA_METRES as CAMERA_METRES, GROUND as GROUND, ImageRules as ImageRules, OBJECTS
    as OBJECTS, RADAR_NUMBERS as RADAR_NUMBERS, RIG_NUMBERS as RIG_NUMBERS, RowCost as RowCost, RowSizes as
    RowSizes, ScenePoints as ScenePoints, SceneRules as SceneRules, Sensor as Sensor, UNKNOWN_GROUND as
    UNKNOWN_GROUND,
)
from .measured_speed import (
    MAD_TO_SIGMA as MAD_TO_SIGMA, RowSeconds as RowSeconds, deal_rows as deal_rows, median_error as median_error,
    relative_error as relative_error, robust_sigma as robust_sigma,
)
from .parse_text import (
    TextError as TextError, load_json as load_json, load_yaml as load_yaml, without_duplicates as
    without_duplicates,
)
from .plan import (
    AXES as AXES, CONTEXTS as CONTEXTS, Comm as Comm, DATA_PAYLOADS as DATA_PAYLOADS, Degree as Degree,
    KindPrediction as KindPrediction, Mesh as Mesh, PAYLOAD_AXES as PAYLOAD_AXES, Pipeline as Pipeline, Plan as
    Plan, Prediction as Prediction, RECOMPUTED_BY_OPERATOR as RECOMPUTED_BY_OPERATOR, Recompute as Recompute,
    SHARDINGS as SHARDINGS, Sharding as Sharding, TowerPlan as TowerPlan, WORLD as WORLD, comm_axes as comm_axes,
    data_axis as data_axis, predicted_comm as predicted_comm, show_rows as show_rows,
)
from .plugins import (
    KINDS as KINDS, SOURCES as SOURCES, find_plugin as find_plugin, installed_plugins as installed_plugins, load as
    load, load_plugin as load_plugin, plugin_errors as plugin_errors, plugin_names as plugin_names,
)
from .recipe import (
    AUTO_PROMPT as AUTO_PROMPT, AdapterSection as AdapterSection, CheckpointSection as CheckpointSection,
    DataSection as DataSection, FaultsSection as FaultsSection, MixtureSource as MixtureSource, MlflowSection as
    MlflowSection, ModelSection as ModelSection, PYTHON_PROMPT as PYTHON_PROMPT, PrometheusSection as
    PrometheusSection, Recipe as Recipe, SamplesSection as SamplesSection, ScenesSection as ScenesSection, Schedule
    as Schedule, TelemetrySection as TelemetrySection, TowerOptimizer as TowerOptimizer, TrainSection as
    TrainSection, WandbSection as WandbSection, plugin_records as plugin_records, used_plugins as used_plugins,
)
from .recipe_parser import (
    FIELD_ALIASES as FIELD_ALIASES, all_fields as all_fields, dump_recipe as dump_recipe, field_for as field_for,
    fixed_field_changes as fixed_field_changes, parse_recipe as parse_recipe,
)
from .regular_files import (
    SpecialFileError as SpecialFileError, append_regular_file as append_regular_file, check_regular_file as
    check_regular_file, expand_user as expand_user, needed_user_cache as needed_user_cache, open_regular_fd as
    open_regular_fd, open_regular_file as open_regular_file, read_regular_bytes as read_regular_bytes,
    read_regular_text as read_regular_text, replace_file as replace_file, user_cache as user_cache, write_atomically
    as write_atomically,
)
from .replica_sync import (
    AsyncSgd as AsyncSgd, Compression as Compression, FP32_BYTES as FP32_BYTES, KIND_FIELDS as KIND_FIELDS,
    LayerKind as LayerKind, LocalSteps as LocalSteps, compressed_bytes as compressed_bytes, exposed_outer_seconds as
    exposed_outer_seconds, synchronisation_bytes as synchronisation_bytes,
)
from .template_text import TemplateText as TemplateText, joined as joined, templated as templated
from .traits import DEVICE_TRAITS as DEVICE_TRAITS, DeviceTraits as DeviceTraits, family_named as family_named
from .units import (
    Bytes as Bytes, Flops as Flops, GIB as GIB, Seconds as Seconds, show_bytes as show_bytes, show_count as
    show_count, show_seconds as show_seconds,
)
from .version import VERSION as VERSION
