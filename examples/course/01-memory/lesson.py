"""What training keeps in memory, counted on a small network: `python examples/course/01-memory/lesson.py`."""

import torch
from torch import nn

GB = 1e9


def num_bytes(tensors):
    return sum(each.numel() * each.element_size() for each in tensors)


def measure(batch):
    """Train one step in fp32 with Adam and return the bytes of each part."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    optimizer = torch.optim.Adam(network.parameters())
    saved = {}  # what the forward keeps for the backward, by address: parameters are kept anyway
    parameters = {each.data_ptr() for each in network.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = network(torch.randn(batch, 256)).square().mean()
    activations = num_bytes(saved.values())
    loss.backward()
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values() if each.dim() > 0]
    weights = list(network.parameters())
    return {
        "parameters": sum(each.numel() for each in weights),
        "weights": num_bytes(weights),
        "gradients": num_bytes(each.grad for each in weights),
        "optimizer": num_bytes(states),
        "activations": activations,
    }


def zero(parameters, ranks):
    """Return the bytes a rank holds under ZeRO stages 0 to 3: bf16 weights and gradients, fp32 copy and Adam states."""
    weights, gradients, states = 2 * parameters, 2 * parameters, 12 * parameters
    return (
        weights + gradients + states,
        weights + gradients + states / ranks,
        weights + (gradients + states) / ranks,
        (weights + gradients + states) / ranks,
    )


def main():
    torch.set_num_threads(1)
    for batch in (64, 256):
        counted = measure(batch)
        print(f"measured with a batch of {batch}, {counted['parameters']:,} parameters")
        for name in ("weights", "gradients", "optimizer", "activations"):
            each = counted[name] / counted["parameters"]
            print(f"  {name:<12} {counted[name]:>10,} bytes, {each:5.2f} a parameter")
    print("7B parameters, GB a GPU under ZeRO 0, 1, 2 and 3")
    for ranks in (1, 4, 64):
        stages = "".join(f"{each / GB:8.2f}" for each in zero(7e9, ranks))
        print(f"  on {ranks:>2} GPUs {stages}")


if __name__ == "__main__":
    main()
