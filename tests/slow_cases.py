"""Cases that `make test` leaves to `make slow`, because it has others of the same code.

A grid of settings is run in full by `make slow`; `make test` has each axis, setting and error at least once. A test may
also say so itself with `tests.cases.slow`; what is listed here was chosen by the time that it takes. Every line is a
test or one case of it, under what `make test` has instead.
"""

from typing import NamedTuple


class LeftOut(NamedTuple):
    """Cases of one file that are slow, and where `make test` executes what they execute."""

    file: str
    instead: str
    names: tuple[str, ...]


VIEWS = "test_every_mode_of_a_run_shows_the_numbers_of_the_command"

LEFT_OUT = (
    LeftOut(
        "dist/test_adapters.py",
        "the same with a decoder; adapters of Hugging Face models and towers, each against one process",
        (
            "test_an_adapter_trains_as_with_peft_and_plain_pytorch[hf]",
            "test_an_adapter_of_a_vision_language_model_trains_as_in_one_process[both-{'mesh': {'tp': 2}}]",
        ),
    ),
    LeftOut(
        "dist/test_course.py",
        "tests/dist/test_compression.py bounds the error of each kind",
        ("test_a_short_run_with_compression_is_within_its_bound",),
    ),
    LeftOut(
        "dist/test_hf_eager.py",
        "the gradients of the same model against transformers",
        ("test_an_eager_model_trains_the_same_trajectory[gptj-mesh0-True]",),
    ),
    LeftOut(
        "dist/test_matrix.py",
        "every pair of axes against one process; runs under the other axes",
        ("test_a_run_under_an_axis_trains_as_one_process_does[cp2-gather-accumulate-2-mixture-untied]",),
    ),
    LeftOut(
        "dist/test_unequal.py",
        "the same with DDP, and measured rows with FSDP",
        ("test_unequal_rows_train_the_same_trajectory_as_one_process[fsdp-2]",),
    ),
    LeftOut(
        "e2e/test_serve_faults.py",
        "a request that runs in two deaths of the engine; tests/chaos/test_serve_follow.py follows a run under load",
        (
            "test_answers_go_on_when_the_engine_is_killed_in_the_middle",
            "test_new_checkpoints_answer_without_a_dropped_request",
        ),
    ),
    LeftOut(
        "e2e/test_sinks.py",
        "the other sinks get the same lines",
        ("test_wandb_logs_every_step_offline_and_nothing_about_the_machine",),
    ),
    LeftOut(
        "unit/test_export_formats.py",
        "an archive of torch.export, which ONNX files are made from",
        ("test_onnx_runtime_computes_the_same_logits_for_any_batch_and_length[qwen3]",),
    ),
    LeftOut(
        "unit/test_nets_decoder.py",
        "tests/unit/test_parallel_memory.py compiles blocks",
        ("test_compiled_blocks_compute_the_same[mixed-fp32]",),
    ),
    LeftOut(
        "unit/test_nets_joint_projections.py",
        "the same without a compiler",
        ("test_a_joint_layer_equals_separate_projections[qwen2.5-0.5b-True]",),
    ),
    LeftOut(
        "unit/test_nets_prediction.py",
        "the same with DeepSeek-V3",
        ("test_loss_and_gradients_equal_a_plain_implementation[glm-4.5-1-chunked]",),
    ),
    LeftOut(
        "unit/test_parallel_memory.py",
        "the same with elementwise recompute",
        ("test_a_compiled_block_saves_what_the_mode_says_and_the_cost_model_predicts[selective-3]",),
    ),
    LeftOut(
        "dist/test_fp8_gather.py",
        "the same without replicas",
        (
            "test_a_gather_in_fp8_changes_no_bit[tensor-hsdp]",
            "test_a_gather_in_fp8_changes_no_bit[block-hsdp]",
        ),
    ),
    LeftOut(
        "dist/test_odd_vocabulary.py",
        "the same with six ranks in place of eight",
        ("test_a_rank_knows_which_rows_it_holds[{'dp_replicate': 2, 'dp_shard': 2, 'tp': 2}]",),
    ),
    LeftOut(
        "e2e/test_own_loop.py",
        "the same with other numbers of ranks",
        ("test_dcgan_trains_as_before_on_any_number_of_ranks[7-2-none]",),
    ),
    LeftOut(
        "e2e/test_train.py",
        "tests/fault/test_supervisor.py kills ranks in every way, tests/web/test_run_page.py shows the incident, and "
        "tests/unit/test_launch_attribution.py has its text",
        ("test_a_killed_rank_is_replaced_and_the_incident_is_shown",),
    ),
    LeftOut(
        "web/test_views_page.py",
        "the modes of the other views; those of all views in tests/dist/test_viz_truth.py, without a browser; the "
        "controls of collectives",
        (
            *(f"{VIEWS}[{name}]" for name in ("collectives", "ddp", "life", "offload", "strategies", "tensor", "zero")),
            "test_every_control_changes_the_view_and_its_command[life]",
            "test_every_control_changes_the_view_and_its_command[zero]",
        ),
    ),
    LeftOut(
        "web/test_run_page.py",
        "each page at one of the two widths",
        ("test_runs_are_compared[360]", "test_every_tab_of_a_finished_run_is_drawn_and_fits[1440]"),
    ),
    LeftOut(
        "unit/test_planner_risk.py",
        "the same with a dense model of 70B",
        ("test_a_235b_mixture_on_64_h100_is_split_and_not_offloaded",),
    ),
)  # fmt: skip
SLOW_CASES = frozenset(f"tests/{each.file}::{name}" for each in LEFT_OUT for name in each.names)
