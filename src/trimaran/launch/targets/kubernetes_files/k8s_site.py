"""The section `k8s` of the site file: a site's defaults for Kubernetes."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from trimaran.launch.targets.site_variables import Variables

SITE = ConfigDict(frozen=True, extra="forbid", validate_default=True)
LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123, as Kubernetes names most objects
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

Label = Annotated[str, Field(pattern=LABEL)]
Subdomain = Annotated[str, Field(pattern=SUBDOMAIN)]
OptionalSubdomain = Annotated[str, Field(pattern=rf"{SUBDOMAIN}|^$")]
Quantity = Annotated[str, Field(pattern=rf"{QUANTITY}|^$")]


class KubernetesStorage(BaseModel):
    """Where run directories are: a volume claim that all pods mount, so its access mode is ReadWriteMany."""

    model_config = SITE

    runs: Annotated[
        str,
        Field(pattern=r"^/[^\x00-\x1f:]+$", description="folder of the runs in the pods, where the claim is mounted"),
    ] = "/runs"
    volume_claim: Annotated[Subdomain, Field(description="volume claim (PVC) that holds the runs")] = "trimaran-runs"
    storage_class: Annotated[
        OptionalSubdomain, Field(description="create the claim in this class, in storage.yaml; empty: it exists")
    ] = ""
    storage_size: Annotated[Quantity, Field(description="size of a claim that is created")] = "500Gi"


class KubernetesQueue(BaseModel):
    """Who decides when all pods of a job start together, and on which nodes."""

    model_config = SITE

    gang: Annotated[
        Literal["auto", "none", "kueue", "volcano"],
        Field(description="what starts all pods or none; auto: Kueue if a queue is named"),
    ] = "auto"
    queue: Annotated[OptionalSubdomain, Field(description="queue of Kueue or Volcano")] = ""
    topology: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9./_-]*$", description="Kueue: node label within which pods are placed")
    ] = ""
    priority_class: Annotated[OptionalSubdomain, Field(description="priorityClassName of the pods")] = ""
    node_selector: Annotated[dict[str, str], Field(description="labels of the nodes to use")] = {}
    tolerations: Annotated[tuple[dict[str, Any], ...], Field(description="taints of nodes to tolerate")] = ()

    @field_validator("queue")
    @classmethod
    def _queue_is_used(cls, queue: str, known: ValidationInfo) -> str:
        if known.data.get("gang") == "none" and queue:
            raise ValueError(f"nothing uses the queue {queue}: gang is none")
        if known.data.get("gang") == "kueue" and not queue:
            raise ValueError("Kueue never starts a job without a queue")
        return queue

    @field_validator("topology")
    @classmethod
    def _topology_is_used(cls, topology: str, known: ValidationInfo) -> str:
        if topology and (known.data.get("gang") not in ("auto", "kueue") or not known.data.get("queue")):
            raise ValueError("only Kueue uses it, and needs a queue")
        return topology

    @property
    def uses_kueue(self) -> bool:
        """Whether Kueue decides when the job starts."""
        return self.gang == "kueue" or (self.gang == "auto" and self.queue != "")


class KubernetesPod(BaseModel):
    """What each pod asks for and may do."""

    model_config = SITE

    gpu: Annotated[str, Field(description="resource name of a GPU")] = "nvidia.com/gpu"
    rdma: Annotated[str, Field(description="RDMA resource per pod, such as rdma/hca; adds IPC_LOCK; empty: none")] = ""
    cpu: Annotated[Quantity, Field(description="CPU cores per pod (4 for each GPU, 1 for each CPU rank)")] = ""
    memory: Annotated[Quantity, Field(description="host memory per pod, request and limit; empty: none")] = ""
    shm: Annotated[Quantity, Field(description="size of /dev/shm")] = "16Gi"
    user: Annotated[int, Field(ge=1, description="user and group id of the processes, not root")] = 1000
    env: Annotated[Variables, Field(description="environment variables, such as NCCL_SOCKET_IFNAME")] = {}
    secret: Annotated[
        OptionalSubdomain, Field(description="Secret with keys such as HF_TOKEN; pods get them by reference")
    ] = "trimaran-secrets"
    pull_secret: Annotated[OptionalSubdomain, Field(description="Secret to pull the image with")] = ""
    service_account: Annotated[OptionalSubdomain, Field(description="service account; its token is not mounted")] = ""
    runtime_class: Annotated[OptionalSubdomain, Field(description="runtimeClassName, such as nvidia")] = ""
    python: Annotated[str, Field(min_length=1, description="the Python of the image")] = "python"


class KubernetesSite(KubernetesStorage, KubernetesQueue, KubernetesPod):
    """A site's defaults for Kubernetes."""

    kind: Annotated[
        Literal["trainjob", "jobset", "job"],
        Field(description="TrainJob (Kubeflow Trainer v2), JobSet, or Indexed Job with a headless Service"),
    ] = "trainjob"
    image: Annotated[str, Field(max_length=512, description="container image, with a tag or digest")] = ""
    namespace: Annotated[Literal[""] | Label, Field(description="namespace; empty: that of the context")] = ""
    context: Annotated[str, Field(description="context of the kubeconfig; empty: the current one")] = ""
    runtime: Annotated[
        OptionalSubdomain, Field(description="existing ClusterTrainingRuntime of a TrainJob; empty: write our own")
    ] = ""
    restarts: Annotated[int, Field(ge=0, le=100, description="how often each pod may fail; disruptions count not")] = 3
    disruption_budget: Annotated[bool, Field(description="let no drained node take a pod (PDB)")] = True
    network_policy: Annotated[bool, Field(description="let only pods of the job connect to each other")] = True
    pod_monitor: Annotated[bool, Field(description="PodMonitor of the Prometheus operator, if the run has a port")] = (
        True
    )
