"""Messages from rank 0 to all others: the batch of each step, a command, or the end. Each is one flat tensor."""

import json
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Numbers in the first broadcast, enough for a decode step of dozens of sequences. A longer message needs a second one.
FIRST_NUMBERS = 8192
HEAD = 2  # kind and length


class MessageKind(IntEnum):
    """What a message is: the batch of a step, nothing (so that idle ranks do not time out), a command, the end."""

    STEP = 1
    NOTHING = 2
    COMMAND = 3
    STOP = 4


NO_NUMBERS = torch.empty(0, dtype=torch.int64)


class StepChannel:
    """Sends on rank 0 and receives on all others, through the CPU backend of the default process group."""

    def __init__(self) -> None:
        self._first = torch.zeros(FIRST_NUMBERS, dtype=torch.int64)

    def send(self, kind: MessageKind, numbers: Tensor = NO_NUMBERS) -> None:
        """Send i64 numbers to every other rank."""
        room = FIRST_NUMBERS - HEAD
        self._first[0], self._first[1] = int(kind), len(numbers)
        here = numbers[:room]
        self._first[HEAD : HEAD + len(here)] = here
        dist.broadcast(self._first, 0)
        if len(numbers) > room:
            dist.broadcast(numbers[room:].contiguous(), 0)

    def receive(self) -> tuple[MessageKind, Tensor]:
        """Wait for the next message, and return it. The numbers are the receiver's own."""
        dist.broadcast(self._first, 0)
        kind, length = self._first[:HEAD].tolist()
        room = FIRST_NUMBERS - HEAD
        numbers = torch.empty(length, dtype=torch.int64)
        numbers[:room] = self._first[HEAD : HEAD + min(length, room)]
        if length > room:
            dist.broadcast(rest := torch.empty(length - room, dtype=torch.int64), 0)
            numbers[room:] = rest
        return MessageKind(kind), numbers


def command_numbers(command: dict[str, Any]) -> Tensor:
    """Return a command as numbers: the bytes of its JSON text, one each."""
    text = json.dumps(command).encode()
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))


def read_command(numbers: Tensor) -> dict[str, Any]:
    """Return what `command_numbers` has written."""
    return json.loads(numbers.numpy().astype(np.uint8).tobytes())
