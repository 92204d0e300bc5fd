# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Tests start hundreds of interpreters, which must find compiled modules even where the shell forbids to write them: to
# compile ours takes each `trimaran train` two seconds.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PARALLEL := --numprocesses=$(or $(JOBS),3) --dist=worksteal
# Unit tests of more than 1.5 seconds a file: left out of the inner loop.
LONGER := accuracy app_eval app_init app_plan app_report app_run_view app_session app_status_lines \
	autopilot_controller autopilot_propose_changes autopilot_simulated calibrate_cpu case_studies checkpoint_crash \
	checkpoint_dcp checkpoint_disk checkpoint_export checkpoint_parts checkpoint_pinned connection_guard \
	core_parse_text data_loader data_loader_faults data_messy data_model_template data_model_tokenizer \
	data_row_estimate data_sample_formats data_samples data_vision detached doctor_health doctor_speed error_language \
	export_formats fp8 head_loss held_directory hf_facts hf_folders history_fit history_runs hub infer_engine_adapters \
	infer_engine_choice infer_engine_images infer_engine_parity k8s_client k8s_manifest launch_channel \
	launch_ray_and_sky launch_store_relay long_lines long_run models_from_module models_outline_hf models_vlm \
	mutated_inputs native_families nets_hf_build nets_hf_probe nets_hf_stages nets_hf_vlm nets_initialise \
	nets_key_value_cache nets_mixtures nets_prediction nets_vlm_model nets_vlm_weights nuscenes object_store \
	parallel_memory peer_watch peft_format planner_adapter planner_captured_replicas planner_choose planner_emit_plans \
	planner_loss_choices planner_memory_ladder planner_neighbours planner_predict_bulk planner_read_pins planner_risk \
	planner_search radar recipes report_layout run_feed run_lease sidecar simulate_command simulate_job ssh_target \
	start_imports towers train_optimizer tune_order viz viz_texts web_workshop
# Runs through every launch target, on machines that are namespaces and loopback addresses of this one.
TARGETS := e2e/test_launch_ssh.py slurm fault/test_pods.py fault/test_launch_ray.py fault/test_launch_sky.py \
	fault/test_preflight_nodes.py fault/test_elastic_nodes.py chaos/test_own_disks.py

.PHONY: demo test test-fast twice slow mutants targets chaos soak site zh check types rules format matrix sweep nccl bench accuracy wheel release report clean help

help:
	@echo "make demo       environment, then plan and train the default recipe on this machine"
	@echo "make test       environment, then all tests that guard a change, in three processes; JOBS=4 for more"
	@echo "make test-fast  the inner loop: the shorter unit tests (two minutes)"
	@echo "make twice      what compares printed numbers, beside another build's standard library; runs in CI"
	@echo "make slow       before a release: grids and long cases"
	@echo "make mutants    random mutants of src/ against the unit tests: the share that they notice (20 minutes)"
	@echo "make targets    runs on every launch target: local, ssh, Slurm, Kubernetes, Ray (needs root; 45 minutes)"
	@echo "make chaos      before a release: every fault of docs/guides/fault-tolerance.md, caused for real (30 minutes)"
	@echo "make soak       a fault a minute for 30 minutes; MINUTES=5 for less"
	@echo "make check      format, lint, types, layer map, names and docs; runs before make test in CI"
	@echo "make site       the documentation as a web site, in site/; runs in CI"
	@echo "make zh         the Chinese pages that are missing or older than the English ones; runs in make site"
	@echo "make matrix     every axis and product of axes against one process; writes docs/parity.md (10 minutes)"
	@echo "make sweep      every language model of transformers, tiny, on every axis; writes docs/hf-sweep.md (1 hour)"
	@echo "make nccl       parity, faults and resumes over NCCL, ranks sharing a GPU; writes docs/parity-nccl.md"
	@echo "make bench      the benchmarks that run on a CPU"
	@echo "make accuracy   the planner's errors beside other estimators'; WRITE=1 writes docs/accuracy.md"
	@echo "make wheel      build the wheel, install it into an empty environment and train there"
	@echo "make release    wheel, sdist and SBOM in dist/, tried on Python 3.11 to 3.13; PYTHONS=3.11 for one (20 minutes)"
	@echo "make report     docs/benchmarks.md from the results in benchmarks/"

demo: .venv/demo
	$(BIN)/trimaran train recipes/stdlib-tiny.yaml

test: .venv/dev
	$(PYTEST) $(PARALLEL)

# Tests that compare printed numbers, beside another standard library: the default text has files of the architecture.
twice: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.other_library tests/e2e/test_course_1_to_6.py \
		tests/e2e/test_course_7_to_12.py tests/e2e/test_case_studies.py

test-fast: .venv/dev
	$(PYTEST) $(PARALLEL) tests/unit $(addprefix --ignore=tests/unit/test_,$(addsuffix .py,$(LONGER)))

slow: .venv/dev
	$(PYTEST) -m slow

targets: .venv/dev
	$(PYTEST) -m '' $(addprefix tests/,$(TARGETS))

chaos: .venv/dev
	$(PYTEST) -m chaos

mutants: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

soak: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),30)

# All pages, with every link checked; no page may fetch anything from elsewhere.
site: .venv/dev
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python ops/site/check_assets.py site
	$(BIN)/python ops/site/check_zh.py

# Lists stale and missing Chinese pages; fails on one without a source or with a broken link.
zh: .venv/dev
	$(BIN)/python ops/site/check_zh.py

check: .venv/dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	@$(MAKE) --no-print-directory --jobs=2 types rules

types: .venv/dev
	$(BIN)/pyrefly check --summary=none

# The rules of the house. What the pages show of refused commands is run by `make test`: it takes longer.
rules: .venv/dev
	$(PYTEST) --noconftest -k 'not answered_as_the_page_shows' \
		tests/test_layers.py tests/test_names.py tests/test_docs.py

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

matrix: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.matrix --write docs/parity.md

# Goes on where it was interrupted; fails if any model trains silently wrong or crashes.
sweep: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.sweep --write docs/hf-sweep.md

nccl: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.nccl --write docs/parity-nccl.md

bench: .venv/dev
	$(BIN)/python benchmarks/overhead.py

accuracy: .venv/dev
	$(BIN)/python -W ignore -m benchmarks.accuracy $(if $(WRITE),--write)

wheel: .venv/dev
	$(BIN)/python -m tests.wheel

release: .venv/dev
	$(BIN)/python -m tests.release $(if $(PYTHONS),--pythons $(PYTHONS))

report: .venv/dev
	$(BIN)/python -m benchmarks.report

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trimaran needs Python 3.11 or newer: make demo PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/demo

clean:
	rm -rf .venv runs build dist site
