"""Several ranks on one GPU, for tests of NCCL on a machine with fewer GPUs than ranks."""

from collections.abc import Mapping

SHARE_GPUS = "TRIMARAN_SHARE_GPUS"  # set to 1: ranks use GPU number LOCAL_RANK modulo the number of GPUs


def shared_gpu_environment(outer: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the variables of `rank` that let NCCL connect ranks of one GPU; empty unless SHARE_GPUS is 1 in `outer`.

    NCCL refuses two ranks with the same device on one host. So each rank gets the name of another host, and NCCL uses
    its socket transport. This is slow, and neither shared memory, peer access nor RDMA is used.
    """
    if outer.get(SHARE_GPUS) != "1":
        return {}
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
