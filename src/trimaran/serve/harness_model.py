"""Our network as a model of lm-eval, the LM Evaluation Harness."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lm_eval.api.model import TemplateLM  # pyrefly: ignore[missing-import]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyrefly: ignore[missing-import]

from trimaran.serve.trained_model import TrainedModel
from trimaran.train import Generation, Sampling, TokenSampler

ROWS = 8  # sequences of a forward
DEFAULT_MAX_TOKENS = 256


class HarnessModel(TemplateLM):
    """Scores and continues texts for lm-eval's tasks, with the tokenizer of the model."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self._trained = trained
        self._max_length = trained.network.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return self._trained.tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the one that begins documents, or else the one that ends them."""
        begin = self._trained.tokenizer.begin_ids
        return begin[0] if begin else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._trained.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would generate it."""
        order = sorted(range(len(requests)), key=lambda each: -len(requests[each][1]) - len(requests[each][2]))
        answers: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), ROWS):
            numbers = order[start : start + ROWS]
            pairs = []
            for each in numbers:  # the ids that fit the model's positions, and how many of them are the continuation's
                _, context, continuation = requests[each]
                ids = [*context, *continuation][-(self._max_length + 1) :]
                pairs.append((ids, min(len(continuation), len(ids) - 1)))
            answers |= dict(zip(numbers, self._scores(pairs), strict=True))
        return [answers[number] for number in range(len(requests))]

    @torch.no_grad()
    def _scores(self, pairs: list[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """Yield the scores of one forward. Padding at the end changes nothing: attention is causal."""
        length = max(len(ids) for ids, _ in pairs) - 1
        tokens = torch.zeros(len(pairs), length, dtype=torch.int64)
        for row, (ids, _) in enumerate(pairs):
            tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        trained = self._trained
        with nullcontext() if trained.dtype == torch.float32 else torch.autocast(trained.device.type, trained.dtype):
            logits = trained.network.forward({"tokens": tokens.to(trained.device)})[0]
        for row, (ids, count) in enumerate(pairs):
            last = len(ids) - 1
            losses = logits[row, last - count : last].float().log_softmax(-1)
            targets = torch.tensor(ids[-count:], device=losses.device)
            total = losses.gather(-1, targets[:, None]).double().sum().item()
            yield total, bool((losses.argmax(-1) == targets).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of the model's length that do not overlap."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=min(self._max_length, 4096),
                context_len=1,
            )
            pairs = [("", *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens([(None, *each[1:]) for each in pairs])))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for context, options in (request.args for request in requests):
            until = options.get("until") or []
            ends = [until] if isinstance(until, str) else list(until)
            count = int(options.get("max_gen_toks") or options.get("max_tokens") or DEFAULT_MAX_TOKENS)
            temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
            room = max(1, self._max_length - count)
            ids = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
            sampler = TokenSampler(Sampling(temperature=temperature))
            generation = Generation(self._trained.new_sequence().next_token, ids, sampler, max_tokens=count)
            generation.stop_ids = self._trained.stop_ids
            text = ""
            for _ in generation:
                text = self._trained.tokenizer.decode(generation.new_ids)
                if any(end and end in text for end in ends):
                    break
            cut = min((text.index(end) for end in ends if end and end in text), default=len(text))
            texts.append(text[:cut])
        return texts
