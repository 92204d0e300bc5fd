"""An engine over several ranks: rank 0 has the engine, the others compute their part of each step."""

import torch

from trimaran.core import UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Network
from trimaran.parallel.precision import DTYPES
from trimaran.serve.engine.engine_config import EngineConfig
from trimaran.serve.engine.open_engine import (
    OpenEngine,
    adapter_folders,
    cache_settings,
    new_engine,
    refuse_other_bases,
    section_and_folder,
)
from trimaran.serve.engine.open_runner import bytes_of_page
from trimaran.serve.engine.serving_rank import RankPlace, ServedModel, open_ranked_runner, serve_rank
from trimaran.serve.engine.sharded_weights import PartSettings
from trimaran.serve.open_weights import usual_dtype
from trimaran.serve.weight_quantisation import refuse_device


def open_ranked_engine(config: EngineConfig, address: str) -> OpenEngine:
    """Return the engine of rank 0. The other ranks must have been started, too."""
    runner = open_ranked_runner(*_place_and_model(config, 0, address))
    return OpenEngine(
        new_engine(runner, config), lambda weights: runner.load(weights.path, weights.step), close=runner.close
    )


def serve_other_rank(config: EngineConfig, rank: int, address: str) -> int:
    """Compute this rank's part of the steps until rank 0 stops. Returns the exit code."""
    return serve_rank(*_place_and_model(config, rank, address))


def _place_and_model(config: EngineConfig, rank: int, address: str) -> tuple[RankPlace, ServedModel]:
    """Return where a rank is, and what it loads, as `infer/ranks` takes them."""
    num_ranks, num_gpus = config.tp * config.pp, torch.cuda.device_count()
    if 0 < num_gpus < num_ranks:
        raise UserError("U014", f"{num_ranks} ranks need as many GPUs, and this machine has {num_gpus}",
                        where="--tp, --pp", fix=f"split the model over at most {num_gpus}")  # fmt: skip
    section, folder = section_and_folder(config.weights)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    name = config.dtype
    if name == "auto":
        name = usual_dtype(config.weights, section) if DEVICE_TRAITS[device.type].prefers_16_bits else "fp32"
    dtype = DTYPES[name]

    def num_pages(network: Network, on: torch.device) -> int:
        settings = cache_settings(network, on, config)
        pages = settings.max_bytes // bytes_of_page(network, on, dtype, settings.page_size)
        return min(pages, -(-(settings.max_tokens or pages) // settings.page_size))

    if config.quantise is not None:
        refuse_device(config.quantise, device)
    settings = PartSettings(dtype=dtype, quantise=config.quantise, adapters=adapter_folders(config),
                            check_adapters=lambda: refuse_other_bases(config))  # fmt: skip
    place = RankPlace(rank=rank, tp=config.tp, pp=config.pp, address=address, device=device)
    model = ServedModel(section=section, folder=folder, step=config.weights.step, settings=settings,
                        page_size=config.sizes.page_size, num_pages=num_pages)  # fmt: skip
    return place, model
