"""Applies a plan to a network, in the order of `steps_of`. Parameter names never change."""

from collections.abc import Callable, Iterator

from torch import nn

from trimaran.core import Plan
from trimaran.nets import Network, is_fsdp_module
from trimaran.parallel.mesh import RankMesh, sharding_of_module

Apply = Callable[[Network, Plan, RankMesh], None]


def apply_plan(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Change the network's module in place so that it follows the plan."""
    for apply in steps_of(plan):
        apply(network, plan, ranks)


def steps_of(plan: Plan) -> Iterator[Apply]:
    """Yield what the plan needs, in order. Most steps are imported here: they import large parts of torch."""
    towers = plan.towers.values()
    if plan.precision == "fp8":
        from trimaran.parallel.fp8_linear import apply_fp8  # noqa: PLC0415

        yield apply_fp8
    if plan.mesh.tp > 1:
        from trimaran.parallel.axes.tp import apply_tp  # noqa: PLC0415

        yield apply_tp
    if plan.mesh.tp > 1 or plan.mesh.ep > 1:
        from trimaran.parallel.axes.ep import apply_ep  # noqa: PLC0415

        yield apply_ep
    if plan.mesh.cp > 1:
        from trimaran.parallel.axes.cp import apply_cp  # noqa: PLC0415

        yield apply_cp
    if plan.mesh.tp > 1 or plan.mesh.cp > 1:
        from trimaran.parallel.axes.image_split import apply_image_split  # noqa: PLC0415

        yield apply_image_split
    if plan.recompute != "none" or any(each.recompute not in (None, "none") for each in towers):
        from trimaran.parallel.memory.recompute import apply_recompute  # noqa: PLC0415

        yield apply_recompute
    if plan.comm.regather:
        from trimaran.parallel.memory.regather import apply_regather  # noqa: PLC0415

        yield apply_regather
    if plan.offload == "activations":
        from trimaran.parallel.memory.activation_offload import apply_activation_offload  # noqa: PLC0415

        yield apply_activation_offload
    if plan.compile:
        yield apply_compile
    if plan.engine_traits.uses_fsdp:  # DeepSpeed shards the module itself, later
        yield from sharding_steps(plan)
    if plan.comm.compression_settings.kind != "none":
        from trimaran.parallel.comm.compression import apply_compression  # noqa: PLC0415

        yield apply_compression


def apply_compile(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Compile each block separately: equal blocks share one compilation. Parameter names do not change.

    Runs after recompute, whose policy becomes part of the graph, and before FSDP, whose hooks stay outside. Activation
    offload wraps the compiled block, in either order.
    """
    if plan.compile:
        import torch._dynamo  # noqa: F401, PLC0415  torch imports it when the first block is compiled

        others = network.compiled_outside_blocks if ranks.degrees.tp == 1 else ()
        for block in (*network.blocks, *others):
            block.compile()


def sharding_steps(plan: Plan) -> Iterator[Apply]:
    """Yield what shards or replicates parameters, gradients and optimizer state over the data-parallel ranks."""
    if plan.sharding != "none" or any(each.sharding not in (None, "none") for each in plan.towers.values()):
        from trimaran.parallel.axes.fsdp import apply_fsdp  # noqa: PLC0415

        yield apply_fsdp
    elif plan.mesh.data > 1 and not plan.reduces_after_backward:
        from trimaran.parallel.axes.ddp import apply_ddp  # noqa: PLC0415

        yield apply_ddp


def gradient_sync(module: nn.Module, plan: Plan) -> Callable[[bool], None]:
    """Return a function to call before each backward; its argument says whether it is the last of the step.

    Unsharded gradients are reduced once, in the last backward. Sharded gradients are reduce-scattered in each, so no
    rank holds them unsharded. Weights that stay unsharded between forward and backward are resharded in the last one.
    """
    if not hasattr(module, "set_requires_gradient_sync"):
        return lambda _: None
    units = [each for each in module.modules() if is_fsdp_module(each)]

    def switch_each(last: bool) -> None:
        for each in units:
            assert isinstance(each, nn.Module)
            sharding = sharding_of_module(each, plan)
            if sharding in ("none", "optimizer"):
                each.set_requires_gradient_sync(last, recurse=False)
            if sharding in ("optimizer", "gradients"):
                each.set_reshard_after_backward(last, recurse=False)

    def switch(last: bool) -> None:
        if plan.sharding in ("none", "optimizer"):
            module.set_requires_gradient_sync(last)  # pyrefly: ignore[not-callable]
        if is_fsdp_module(module) and plan.sharding in ("optimizer", "gradients"):
            module.set_reshard_after_backward(last)

    return switch_each if len({sharding_of_module(each, plan) for each in units}) > 1 else switch
