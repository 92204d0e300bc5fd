"""Rates of this CPU for new cache folders: a command that finds none measures them, which takes seconds."""

from pathlib import Path

from trimaran.machine import CpuRates, cpu_rates_file, write_cpu_rates

RATES = CpuRates(
    matmul_gflops=30.0,
    extra_rows=40.0,
    attention_gflops=8.0,
    attention_backward_gflops=9.0,
    elementwise_gb_per_second=8.0,
    update_gb_per_second=10.0,
    layer_us=2000.0,
    scatter=0.02,
    all_reduce_us=250.0,
    all_reduce_gb_per_second=2.0,
)


def give_cpu_rates(cache: Path) -> None:
    """Write the rates of one, two and four ranks with one thread each into a cache folder, that of TRIMARAN_CACHE."""
    for num_ranks in (1, 2, 4):
        path = cpu_rates_file(cache / "calibration", num_ranks, 1)
        assert path is not None
        write_cpu_rates(path, RATES)
