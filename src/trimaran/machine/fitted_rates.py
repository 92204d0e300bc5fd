"""Rates that were fitted to whole runs: factors on what was assumed or measured before, and a cluster with them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core import Flops, Seconds
from trimaran.machine.cluster import Cluster, Link, network_link
from trimaran.machine.device_catalogue import Device

MIN_FACTOR, MAX_FACTOR = 0.1, 10.0
MIN_GLOO_LATENCY_SECONDS = Seconds(1.1e-4)  # the cost model takes links with less for NCCL's
MAX_NCCL_LATENCY_SECONDS = Seconds(1e-4)
MAX_SOURCES = 256

Factor = Annotated[float, Field(ge=MIN_FACTOR, le=MAX_FACTOR, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=4096)]


class LinkFactors(BaseModel):
    """Factors on the bandwidth and on the latency of all links of one kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth: Factor = 1.0
    latency: Factor = 1.0


class SourceRun(BaseModel):
    """A run that rates were fitted to. `before` and `after` are the relative errors of its predicted step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Text
    date: Text = ""
    host: Text = ""
    version: Text = ""
    plan: Text = ""
    steps: Annotated[int, Field(ge=0)] = 0
    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    before: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    after: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class FittedRates(BaseModel):
    """What full steps reach, relative to the rates that were assumed or measured in single operators.

    matmul: of matmuls and attention, by precision. memory: bytes a second. host: the host's time, so more is slower.
    links: by the name of the link: NVLink, PCIe, InfiniBand, loopback.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: Text = ""
    matmul: Annotated[dict[str, Factor], Field(max_length=8)] = {}
    memory: Factor = 1.0
    host: Factor = 1.0
    links: Annotated[dict[str, LinkFactors], Field(max_length=16)] = {}
    runs: Annotated[tuple[SourceRun, ...], Field(max_length=MAX_SOURCES)] = ()

    @property
    def note(self) -> str:
        """Where the rates come from, for the source of a prediction."""
        runs = len({each.run for each in self.runs})
        return f"fitted to {runs} run{'' if runs == 1 else 's'}{f' on {self.date}' if self.date else ''}"


def with_fitted(cluster: Cluster, fitted: FittedRates | None) -> Cluster:
    """Return the cluster with the fitted factors on its rates. It is the last step: measured rates come before."""
    if fitted is None:
        return cluster
    links = tuple(_scaled_link(link, fitted) for link in cluster.levels) if fitted.links else cluster.links
    return replace(cluster, device=_scaled_device(cluster, fitted), links=links)


def combined(first: FittedRates | None, second: FittedRates) -> FittedRates:
    """Return the factors of both after each other, with the date and the runs of the second."""
    if first is None:
        return second
    names = dict.fromkeys([*first.links, *second.links])
    none = LinkFactors()
    return FittedRates(
        date=second.date,
        matmul={each: _bounded(first.matmul.get(each, 1.0) * second.matmul.get(each, 1.0))
                for each in dict.fromkeys([*first.matmul, *second.matmul])},
        memory=_bounded(first.memory * second.memory),
        host=_bounded(first.host * second.host),
        links={name: _both(first.links.get(name, none), second.links.get(name, none)) for name in names},
        runs=_known_runs(first.runs, second.runs),
    )  # fmt: skip


def _both(first: LinkFactors, second: LinkFactors) -> LinkFactors:
    return LinkFactors(
        bandwidth=_bounded(first.bandwidth * second.bandwidth), latency=_bounded(first.latency * second.latency)
    )


def _known_runs(first: Iterable[SourceRun], second: tuple[SourceRun, ...]) -> tuple[SourceRun, ...]:
    """Return the runs of both, each once, the latest last; of very many, the latest."""
    names = {(each.run, each.plan) for each in second}
    return (*(each for each in first if (each.run, each.plan) not in names), *second)[-MAX_SOURCES:]


def _bounded(factor: float) -> float:
    return min(MAX_FACTOR, max(MIN_FACTOR, factor))


def _scaled_device(cluster: Cluster, fitted: FittedRates) -> Device:
    device, memory = cluster.device, fitted.memory
    device = replace(
        device,
        memory_bandwidth=device.memory_bandwidth * memory,
        link_bandwidth=device.link_bandwidth * _bandwidth(cluster.levels[0].name, fitted),
        network_bandwidth=device.network_bandwidth
        * _bandwidth(network_link(device, cluster.world_size).name, fitted),
        note=f"{device.note}; {fitted.note}" if device.note else fitted.note,
    )  # fmt: skip
    reached = {name: rate * memory if name == "memory" else rate for name, rate in device.reached.items()}
    if device.traits.has_data_sheet:
        factors = {**fitted.matmul, "host": fitted.host}
        names = dict.fromkeys([*dict(device.fitted), *factors])
        pairs = tuple((name, device.factor(name) * factors.get(name, 1.0)) for name in names)
        return replace(device, fitted=pairs, reached=reached)
    return _scaled_cpu(device, reached, fitted)


def _scaled_cpu(device: Device, reached: dict[str, float], fitted: FittedRates) -> Device:
    """Return a CPU's rank with the factors: in the rates that were measured for it, or else in its estimated rate."""
    compute, rates = fitted.matmul.get("fp32", 1.0), device.cpu_rates
    if "fp32" in reached:
        reached["fp32"] *= compute
    peak = {name: Flops(rate * compute) for name, rate in device.peak_flops.items()}
    if rates is not None:
        rates = rates._replace(
            matmul_gflops=rates.matmul_gflops * compute,
            attention_gflops=rates.attention_gflops * compute,
            attention_backward_gflops=rates.attention_backward_gflops * compute,
            elementwise_gb_per_second=rates.elementwise_gb_per_second * fitted.memory,
            update_gb_per_second=rates.update_gb_per_second * fitted.memory,
            layer_us=rates.layer_us * fitted.host,
        )
    return replace(device, peak_flops=peak, reached=reached, cpu_rates=rates)


def _scaled_link(link: Link, fitted: FittedRates) -> Link:
    factors = fitted.links.get(link.name)
    if factors is None:
        return link
    latency = link.latency * factors.latency
    # The cost model tells Gloo from NCCL by the latency: a link stays what it is.
    is_gloo = link.latency > MAX_NCCL_LATENCY_SECONDS
    latency = max(latency, MIN_GLOO_LATENCY_SECONDS) if is_gloo else min(latency, MAX_NCCL_LATENCY_SECONDS)
    reached = {name: rate * factors.bandwidth for name, rate in link.reached.items()}
    return replace(link, bandwidth=link.bandwidth * factors.bandwidth, latency=Seconds(latency), reached=reached)


def _bandwidth(name: str, fitted: FittedRates) -> float:
    return fitted.links[name].bandwidth if name in fitted.links else 1.0
