"""The device mesh: ranks with named axes."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimaran.core import Mesh

DATA_AXES = ("dp_replicate", "dp_shard")


def build_mesh(mesh: Mesh, *, device_type: str) -> DeviceMesh:
    """Return a mesh with an axis for every way to split the data. The process group must be up.

    Ranks of one shard group are neighbours, so that sharding stays inside a node and replication goes across.
    """
    return init_device_mesh(device_type, (mesh.dp_replicate, mesh.dp_shard), mesh_dim_names=DATA_AXES)
