"""One step in two micro-batches, right and wrong: `python examples/course/03-accumulation/lesson.py`."""

import torch
from torch import nn
from torch.nn import functional as F

import trimaran

VOCAB, WIDTH, STEPS = 32, 48, 40
VALID = (2, 3, 30, 32)  # valid tokens of each row; the rest are prompt or padding


class NextToken(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


def build():
    torch.manual_seed(0)
    model = NextToken()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def get_batch(step):
    """Return four rows of 32 tokens and their labels. Short rows, such as brief answers, follow another rule."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (4, 32), generator=random)
    labels = (tokens + 1) % VOCAB
    labels[:2] = (tokens[:2] + 7) % VOCAB
    for row, valid in enumerate(VALID):
        labels[row, valid:] = -100
    return tokens, labels


def loss_of(model, rows, reduction):
    tokens, labels = rows
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=reduction)


def gradient_of(model):
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def one_step(micro_batches, divide):
    """Return loss and gradient of the first step. `divide` weighs the loss of a micro-batch."""
    model, _ = build()
    total = 0.0
    for rows in micro_batches:
        loss = divide(model, rows)
        loss.backward()
        total += loss.item()
    return total, gradient_of(model)


def train(divide):
    """Return the mean loss of all valid tokens at the end of training in micro-batches of two rows."""
    model, optimizer = build()
    for step in range(STEPS):
        batch = get_batch(step)
        for start in (0, 2):
            divide(model, [each[start : start + 2] for each in batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss_of(model, get_batch(STEPS), "mean").item()


def train_with_trimaran():
    model, optimizer = build()
    loop = trimaran.prepare(model, optimizer)
    for step in range(STEPS):
        for rows in loop.micro_batches(get_batch(step), size=2):
            loop.backward(loss_of(model, rows, "sum"), num_tokens=(rows[1] != -100).sum())
        loop.step()
    return loss_of(model, get_batch(STEPS), "mean").item()


def mean_of_means(model, rows):
    return loss_of(model, rows, "mean") / 2  # the usual `loss / accumulation_steps`


def token_exact(model, rows):
    return loss_of(model, rows, "sum") / sum(VALID)


def main():
    torch.set_num_threads(1)
    batch = get_batch(0)
    halves = [[each[start : start + 2] for each in batch] for start in (0, 2)]
    whole, right = one_step([batch], lambda model, rows: loss_of(model, rows, "mean"))
    print(f"valid tokens {VALID}, two micro-batches with {sum(VALID[:2])} and {sum(VALID[2:])}")
    print(f"first step            loss   error of the gradient\nwhole batch         {whole:.4f}")
    for name, divide in (("mean of means", mean_of_means), ("sum / all tokens", token_exact)):
        loss, gradient = one_step(halves, divide)
        print(f"{name:<18}  {loss:.4f}   {(gradient - right).norm() / right.norm():.1%}")
    print(f"after {STEPS} steps, on new rows")
    print(f"mean of means       {train(mean_of_means):.4f}")
    print(f"sum / all tokens    {train(token_exact):.4f}")
    print(f"trimaran            {train_with_trimaran():.4f}")


if __name__ == "__main__":
    main()
