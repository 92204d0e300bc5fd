"""The device mesh: ranks with named axes, and the views of it that parameters are split over."""

import logging
from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimaran.core import Mesh


@dataclass(frozen=True, slots=True)
class RankMesh:
    """Who works with whom. All views share one root, so that a parameter can be split over axes of several.

    Tensor-parallel ranks are neighbours, then come the parts of a sequence, then shards, replicas and stages: what
    talks most sits closest. Experts take the inner `ep` of the ranks that see different tokens and shard over the rest.
    """

    degrees: Mesh
    axes: DeviceMesh  # pp, dp_replicate, dp_shard, cp, tp
    shards: DeviceMesh  # dp_replicate, shard: the shards of a parameter lie on all parts of a sequence as well
    data: DeviceMesh  # all ranks that see different tokens: gradients are summed over them
    experts: DeviceMesh  # expert_replicate, expert_shard, ep, tp

    def rank(self, axis: str) -> int:
        """Return this rank's place along an axis of `axes`."""
        return self.axes.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes.get_group(axis)

    @property
    def device(self) -> torch.device:
        """Where this rank computes. Its weights may be elsewhere: on the CPU, when they are offloaded."""
        kind = self.axes.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @property
    def data_rank(self) -> int:
        """This rank's place among those that see different samples."""
        return self.rank("dp_replicate") * self.degrees.dp_shard + self.rank("dp_shard")

    def dropout_seed(self, seed: int, step: int = 0) -> int:
        """Return the seed of this rank's random numbers in a step: the same on ranks that drop the same (tp).

        It depends on nothing that came before, so that a run that goes on from any step drops what it would have.
        """
        place = self.rank("pp") * self.degrees.data + self.data.get_local_rank()
        return int.from_bytes(blake2b(f"{seed}/{step}/{place}".encode(), digest_size=8).digest()) >> 1

    def reseed(self, seed: int, step: int) -> None:
        """Let this rank draw the random numbers of a step from here on."""
        number = self.dropout_seed(seed, step)
        # `torch.manual_seed` would write down where it was called, for a GPU that may never be used: 180 us.
        torch.default_generator.manual_seed(number)
        if self.axes.device_type == "cuda":
            torch.cuda.manual_seed(number)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank is the one that counts its samples; the others of its tp, cp and pp see the same."""
        return self.rank("tp") == self.rank("cp") == self.rank("pp") == 0


def build_mesh(mesh: Mesh, *, device_type: str) -> RankMesh:
    """Return the mesh of all ranks. The process group must be up."""
    # It says so whenever a tensor is gathered over two axes. We do that once, to save it.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    world = init_device_mesh(device_type, (mesh.world_size,), mesh_dim_names=("world",))

    def view(**degrees: int) -> DeviceMesh:
        named = {"pp": mesh.pp, **degrees, "tp": mesh.tp}
        return world._unflatten(0, tuple(named.values()), tuple(named))

    # Sharded experts stay inside the shards; replicated ones may lie on any rank that sees different tokens.
    outer, inner = (mesh.dp_replicate, mesh.dp_shard * mesh.cp) if mesh.dp_shard > 1 else (1, mesh.data)
    return RankMesh(
        degrees=mesh,
        axes=view(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp),
        shards=view(dp_replicate=mesh.dp_replicate, shard=mesh.dp_shard * mesh.cp)["dp_replicate", "shard"],
        data=view(data=mesh.data)["data"],
        experts=view(expert_replicate=outer, expert_shard=inner // mesh.ep, ep=mesh.ep),
    )
