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


EXPERTS = "test_expert_parallel_gradients_equal_those_of_one_process"
VIEWS = "test_every_mode_of_a_run_shows_the_numbers_of_the_command"

LEFT_OUT = (
    LeftOut(
        "dist/test_pipeline.py",
        "zero-bubble in test_experts_of_every_stage_get_their_balance_gradient; sharded stages with 1f1b; given stages "
        "with 1f1b; several stages a rank with interleaved",
        (
            "test_every_schedule_trains_evaluates_and_generates_as_one_process_does[zero-bubble-False]",
            "test_stages_are_sharded_and_replicated[zero-bubble-dp_replicate]",
            "test_stages_may_be_given_and_micro_batches_may_be_few_or_many[zero-bubble-stages4-fields4]",
            "test_many_stages_per_rank_of_different_sizes_are_sharded",
        ),
    ),
    LeftOut(
        "dist/test_mixtures.py",
        "gpt-oss under pp-cp; deepseek-v3 under both plans in test_prediction.py, with more layers",
        (
            "test_every_plan_trains_the_same_trajectory[gpt-oss-fsdp-tp-ep]",
            "test_every_plan_trains_the_same_trajectory[deepseek-v3-fsdp-tp-ep]",
            "test_every_plan_trains_the_same_trajectory[deepseek-v3-pp-cp]",
        ),
    ),
    LeftOut(
        "dist/test_native_families.py",
        "cohere2 has windows and context parallelism, too",
        ("test_an_architecture_trains_the_same_trajectory_under_every_plan[mistral-cp2-gather]",),
    ),
    LeftOut(
        "dist/test_resume.py",
        "bf16 moments in the case fsdp-bf16, other plans in the chains of fp32 and 8-bit moments; replicas in ddp-fp16",
        (
            "test_a_run_that_changes_its_plan_several_times_has_the_same_losses[bf16-states]",
            "test_a_resume_under_the_same_plan_is_exact[ddp-four]",
        ),
    ),
    LeftOut(
        "dist/test_deepspeed.py",
        "ZeRO 2 with the optimizer offloaded, ZeRO 3 with the parameters offloaded; experts under ZeRO 1 in "
        "test_the_metrics_are_those_of_the_torch_engine; the weights of every precision, evaluation and samples by "
        "the policy of docs/decisions/0083",
        (
            "test_every_precision_starts_from_the_same_weights",
            "test_the_network_evaluates_and_generates_as_without_deepspeed",
            "test_every_stage_trains_the_same_trajectory[none-none-none]",
            "test_every_stage_trains_the_same_trajectory[gradients-none-none]",
            "test_experts_train_the_same_trajectory_with_parameters_sharded",
        ),
    ),
    LeftOut(
        "dist/test_worker.py",
        "the same with dp_shard; pipelines that evaluate and generate in test_pipeline.py",
        (
            "test_evaluation_and_samples_do_not_change_the_trajectory"
            "[{'pp': 2, 'pipeline': {'schedule': 'zero-bubble', 'stages': (1, 1, 1, 1)}}]",
        ),
    ),
    LeftOut(
        "dist/test_experts.py",
        "ep with replicas, shards, tp and cp once each; each kind of router on two ranks",
        (
            f"{EXPERTS}[ep-tp-capacity]",
            f"{EXPERTS}[ep-2-of-4-capacity]",
            f"{EXPERTS}[ep-2-hsdp-capacity]",
            f"{EXPERTS}[cp-ep-sharded-dropless]",
            "test_tokens_are_sent_to_their_experts_and_back[one-choice-4]",
            "test_tokens_are_sent_to_their_experts_and_back[few-experts-4]",
        ),
    ),
    LeftOut(
        "dist/test_precision.py",
        "the same with fsdp-2",
        (
            "test_a_network_with_fp32_modules_evaluates_and_generates_in_bf16[tp-2]",
            "test_a_network_with_fp32_modules_evaluates_and_generates_in_bf16[pp-2]",
        ),
    ),
    LeftOut(
        "dist/test_optimizer.py",
        "the same with 8-bit states",
        ("test_states_on_the_host_give_bitwise_equal_weights[bf16]",),
    ),
    LeftOut(
        "dist/test_sharded_compression.py",
        "ZeRO 3 in the case hsdp",
        ("test_sharded_gradients_can_be_compressed_and_a_resume_is_exact[zero-3]",),
    ),
    LeftOut(
        "dist/test_unequal.py",
        "unequal replicas in the case ddp-3, tp in test_matrix.py",
        ("test_unequal_rows_train_the_same_trajectory_as_one_process[ddp-2-tp-2]",),
    ),
    LeftOut(
        "dist/test_fp8_gather.py",
        "each recipe under one of the two meshes",
        (
            "test_a_gather_in_fp8_changes_no_bit[tensor-hsdp]",
            "test_a_gather_in_fp8_changes_no_bit[block-fsdp]",
        ),
    ),
    LeftOut(
        "dist/test_local_steps.py",
        "resumes in the case streaming; replicas of several ranks in the case shards of the second test",
        (
            "test_a_resume_is_exact[shards]",
            "test_replicas_that_are_split_inside_train_as_whole_ones[pipeline]",
        ),
    ),
    LeftOut(
        "dist/test_shard_check.py",
        "the same with ZeRO 3",
        ("test_a_flipped_bit_of_a_shard_names_its_rank_and_is_undone[zero-1]",),
    ),
    LeftOut(
        "dist/test_perception.py",
        "the case pp-in-the-camera",
        ("test_every_plan_trains_like_one_process[pp]",),
    ),
    LeftOut(
        "dist/test_memory.py",
        "tp and sharded-mixed, one process in tests/unit/test_parallel_memory.py; interleaved",
        (
            "test_no_mode_changes_a_bit_of_a_sharded_network[replicated]",
            "test_no_mode_changes_a_bit_of_a_sharded_network[cp]",
            "test_no_mode_changes_a_bit_of_a_sharded_network[sharded]",
            "test_no_mode_changes_a_bit_of_a_pipeline[1f1b]",
        ),
    ),
    LeftOut(
        "dist/test_serving_ranks.py",
        "both splits at once, and each alone in test_other_networks_answer_alike; killed ranks of the other splits",
        (
            "test_every_split_answers_as_one_process_and_as_transformers[2-1]",
            "test_every_split_answers_as_one_process_and_as_transformers[1-2]",
            "test_a_transformers_model_is_split_by_its_own_plan[llama]",
            "test_a_killed_rank_ends_all_others[1-2-1-False]",
        ),
    ),
    LeftOut(
        "dist/test_parity.py",
        "trajectories with tp, and gradients with dp_shard, in test_hf.py",
        ("test_a_hugging_face_model_trains_the_same_trajectory[fsdp-2]",),
    ),
    LeftOut(
        "dist/test_nonfinite_search.py",
        "the same with replicas",
        (
            "test_the_module_and_the_rank_that_first_produced_a_nan_are_reported[shards]",
            "test_the_same_batch_on_another_rank_tells_data_from_device[shards-data]",
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
    LeftOut(
        "unit/test_planner_search.py",
        "the search for 70B; the smallest cluster in test_if_nothing_fits_the_smallest_plan_and_cluster_are_named",
        (
            "test_a_search_takes_at_most_seconds[llama-3.1-405b-2048x8xH100-2048-8192-12]",
            "test_a_search_takes_at_most_seconds[qwen3-30b-a3b-8x8xH100-512-4096-10]",
            "test_the_smallest_cluster_may_have_any_number_of_nodes",
        ),
    ),
    LeftOut(
        "unit/test_parallel_memory.py",
        "the mode selective; full in test_a_compiled_block_recomputes_joint_projections, the others in "
        "test_a_compiled_block_is_offloaded and test_a_compiled_block_saves_the_predicted_bytes",
        (
            "test_a_compiled_block_saves_what_the_mode_says[full-6]",
            "test_a_compiled_block_saves_what_the_mode_says[none-0]",
            "test_a_compiled_block_saves_what_the_mode_says[elementwise-0]",
            "test_a_compiled_block_is_offloaded[full]",
        ),
    ),
)  # fmt: skip
SLOW_CASES = frozenset(f"tests/{each.file}::{name}" for each in LEFT_OUT for name in each.names)
