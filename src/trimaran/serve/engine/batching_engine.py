"""The engine: takes requests, computes steps for all of them together, and returns tokens as they come.

If the runner can, the next step is planned and launched while the device computes this one. Then a stop id is seen one
step late: the surplus token is dropped. A request that needs the host in each step makes all steps wait for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from trimaran.core import UserError
from trimaran.serve.engine.engine_batch import ALL, EMBEDDING, LAST, BatchBuilder, part_wants
from trimaran.serve.engine.engine_request import EngineFinish, EngineRequest, TokenConstraint, TokenOutput, TopTokens
from trimaran.serve.engine.model_runner import LaunchingRunner, Runner
from trimaran.serve.engine.scheduler import BlockPool, EngineSequence, ScheduledPart, Scheduler
from trimaran.serve.engine.token_choice import (
    MAX_LAUNCHED,
    NOT_A_TOKEN,
    PendingTokens,
    TokenChooser,
    TokenLogprobs,
    choose_tokens,
    logprobs_of,
)
from trimaran.serve.settings import EngineSettings

NAN_ERROR = "the network computes NaN instead of a next token: its weights have diverged or are damaged"
MakeConstraint = Callable[[EngineRequest], TokenConstraint]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """How busy the engine is now, and what it has done since it started."""

    running: int
    waiting: int
    used_pages: int
    num_pages: int
    prefix_hit_tokens: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int


@dataclass(slots=True, eq=False)
class _Answer:
    """What is known of a request's answer besides its tokens."""

    sequence: EngineSequence
    chooser: TokenChooser
    has_prompt_logprobs: bool  # complete, and reported
    has_left: bool = False  # the scheduler has forgotten it: only its last token is awaited
    embedding: Tensor | None = None
    # Nothing comes before the prompt's first token.
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])
    prompt_top: list[TopTokens] = field(default_factory=lambda: [()])


@dataclass(frozen=True, slots=True, eq=False)
class _LaunchedStep:
    """A step in flight: its tokens, and for each that is wanted the answer and its number in the step."""

    tokens: PendingTokens
    wanted: list[tuple[_Answer, int]]


class BatchingEngine:
    """Continuous batching over one runner. It belongs to one thread; `step` is one forward."""

    def __init__(
        self, runner: Runner, settings: EngineSettings, *, make_constraint: MakeConstraint | None = None
    ) -> None:
        """`make_constraint` makes the constraint of a request with a grammar; without it such requests are refused."""
        if not runner.traits.reuses_prefixes:
            settings = replace(settings, reuse_prefixes=False)
        self.runner, self.settings = runner, settings
        self._make_constraint = make_constraint
        self._answers: dict[str, _Answer] = {}
        self._orders = count()
        self._early: list[TokenOutput] = []  # known before the next step
        overlaps = runner.traits.overlaps and settings.max_running <= MAX_LAUNCHED
        self._launcher = runner if overlaps and isinstance(runner, LaunchingRunner) else None
        self._launched: _LaunchedStep | None = None
        self._on_host: set[str] = set()  # requests that need the host in each step
        self._prompt_tokens = self._generated_tokens = 0
        self.max_length = min(runner.max_length, runner.num_pages * runner.page_size)
        self._scheduler = Scheduler(BlockPool(runner.num_pages), runner.page_size, settings)
        self._builder = BatchBuilder(settings.max_running, runner)

    @property
    def has_work(self) -> bool:
        return bool(self._answers or self._early or self._launched)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises UserError if it can never run on this model and cache."""
        assert request.id not in self._answers, "every request has its own id"
        traits, vocabulary = self.runner.traits, self.runner.vocabulary
        tokens = (*request.prompt, *request.generated)
        if not request.prompt or request.max_tokens < 0 or (request.logprobs or 0) < 0:
            raise UserError("E002.request-needs-least", where="the prompt")
        if len(tokens) > self.max_length:
            raise UserError(
                "E003.prompt-tokens-room", where="the prompt", num_tokens=len(tokens), max_length=self.max_length
            )
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise UserError("E004.model-no-token", where="the prompt", wrong=wrong, vocabulary=vocabulary - 1)
        if request.adapter is not None and request.adapter not in traits.adapters:
            raise UserError(
                "E005.no-adapter-called",
                where="model",
                adapter=request.adapter,
                adapters=", ".join(traits.adapters) or "none",
            )
        sizes = [image.stop - image.first for image in request.images]
        if sizes and max(sizes) > (room := self.settings.max_image_tokens):
            raise UserError("E006.image-tokens-step", where="the image", most=max(sizes), room=room)
        expected = 0 if traits.image_token is None else request.prompt.count(traits.image_token)
        if expected != sum(sizes):
            raise UserError("E006.prompt-image-tokens", where="the prompt", expected=expected, total=sum(sizes))
        if request.embed and not traits.embeds:
            raise UserError("E007.model-returns", where="the request")
        constraint = None
        if request.grammar is not None:
            if self._make_constraint is None:
                raise UserError("E008.answers-follow-schema", where="the request")
            constraint = self._make_constraint(request)
            for token in request.generated:
                constraint.advance(token)
        sequence = EngineSequence(request, next(self._orders))
        if request.generated and (finish := self._finish_of(request, request.generated[-1], len(sequence.tokens))):
            self._early.append(TokenOutput(request=request.id, finish=finish))
            return
        chooser = TokenChooser(request.sampling, constraint, num_drawn=len(request.generated))
        # With tokens generated before, the log-probabilities of the prompt came with the first one.
        self._answers[request.id] = _Answer(sequence, chooser, has_prompt_logprobs=bool(request.generated))
        # The host needs a step's logits, or its token, before the next step can be launched.
        asks = request.logprobs is not None or request.prompt_logprobs or request.embed
        if asks or request.grammar is not None or not request.max_tokens:
            self._on_host.add(request.id)
        self._scheduler.add(sequence)
        self._prompt_tokens += sequence.num_prompt

    def abort(self, request_id: str) -> None:
        """Forget a request, and free its pages now. One that is not known, or has ended, is ignored."""
        if request_id in self._answers:
            self._remove(request_id)

    def step(self) -> list[TokenOutput]:
        """Compute one step, and return what is new; nothing if there was nothing to do, or only parts of prompts.

        With a runner that overlaps steps, this launches a step and returns what the step before it has computed.
        """
        if self._launcher is not None and not self._on_host:
            early, self._early = self._early, []
            before, self._launched = self._launched, self._launch(self._launcher)
            return [*early, *self._read(before)]
        self.finish_launched()
        early, self._early = self._early, []
        return [*early, *self._run()]

    def finish_launched(self) -> None:
        """Wait for the step in flight, if there is one. What it has computed comes with the next `step`."""
        before, self._launched = self._launched, None
        self._early += self._read(before)

    def _run(self) -> list[TokenOutput]:
        parts = self._scheduler.plan()
        if not parts:
            return []
        wants = [part_wants(part, has_prompt_logprobs=self._answer(part).has_prompt_logprobs) for part in parts]
        result = self.runner.run(self._builder.build(parts, self._scheduler.take_ended(), wants))
        starts = [part.sequence.num_computed for part in parts]
        self._scheduler.commit(parts)
        outputs: list[TokenOutput] = []
        if result.embeddings is not None:
            embedded = [part for part, want in zip(parts, wants, strict=True) if want == EMBEDDING]
            for part, summed in zip(embedded, result.embeddings, strict=True):
                answer, sequence = self._answer(part), part.sequence
                is_first = sequence.num_computed == part.num_tokens  # also after it was preempted
                answer.embedding = summed if is_first or answer.embedding is None else answer.embedding + summed
                if sequence.num_left:
                    continue
                values, name = answer.embedding / torch.linalg.vector_norm(answer.embedding), sequence.request.id
                if values.isnan().any():
                    outputs.append(TokenOutput(request=name, finish="error", error=NAN_ERROR))
                else:
                    outputs.append(TokenOutput(request=name, finish="stop", embedding=tuple(values.tolist())))
                self._remove(name)
        # The answers whose next token is chosen now, and their rows of the logits; keep those of prompts.
        rows, row = [], 0
        for part, want, start in zip(parts, wants, starts, strict=True):
            if want == LAST:
                rows.append((self._answer(part), row))
                row += 1
            elif want == ALL:
                answer, sequence = self._answer(part), part.sequence
                logits = result.logits[row : row + part.num_tokens]
                if not start:  # also after it was preempted
                    answer.prompt_logprobs = [None]
                    answer.prompt_top = [()]
                following = sequence.tokens[start + 1 : min(start + 1 + len(logits), sequence.num_prompt)]
                if following:
                    num_top = [sequence.request.logprobs or 0] * len(following)
                    found = logprobs_of(logits[: len(following)], following, num_top)
                    answer.prompt_logprobs += [each.logprob for each in found]
                    answer.prompt_top += [each.top for each in found]
                row += part.num_tokens
                if not sequence.num_left:
                    rows.append((answer, row - 1))
        return [*outputs, *self._token_outputs(rows, result.logits)]

    def _launch(self, launcher: LaunchingRunner) -> _LaunchedStep | None:
        """Plan a step and launch it. Only the device knows its tokens until they are read."""
        parts = self._scheduler.plan()
        if not parts:
            return None
        wants = [part_wants(part, has_prompt_logprobs=True) for part in parts]
        answers = [self._answer(part) if want == LAST else None for part, want in zip(parts, wants, strict=True)]
        batch = self._builder.build(parts, self._scheduler.take_ended(), wants)
        tokens = launcher.launch(batch, [None if each is None else each.chooser for each in answers])
        self._scheduler.commit(parts)
        wanted = [(answer, number) for number, answer in enumerate(answers) if answer is not None]
        for answer, number in wanted:
            sequence = answer.sequence
            sequence.in_flight.append(number)
            if self._finish_of(sequence.request, None, sequence.length):
                # Others may have its pages now: the device computes their steps after this one.
                self._scheduler.remove(sequence)
                answer.has_left = True
        return _LaunchedStep(tokens, wanted)

    def _read(self, step: _LaunchedStep | None) -> list[TokenOutput]:
        """Wait for a step, and return its tokens. Those of answers that have ended meanwhile are dropped."""
        if step is None:
            return []
        tokens = step.tokens.read()
        outputs = [self._with_token(answer, tokens[number]) for answer, number in step.wanted
                   if self._answers.get(answer.sequence.request.id) is answer]  # fmt: skip
        self._generated_tokens += len(outputs)
        return outputs

    def flush_prefixes(self) -> None:
        """Reuse no keys and values computed up to now: the weights have changed. Running requests start again."""
        self.finish_launched()
        self._scheduler.forget_prefixes()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_pages=scheduler.pool.num_used,
            num_pages=scheduler.pool.num_pages,
            prefix_hit_tokens=scheduler.num_reused_tokens,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def _answer(self, part: ScheduledPart) -> _Answer:
        return self._answers[part.sequence.request.id]

    def _remove(self, request_id: str) -> None:
        answer = self._answers.pop(request_id)
        if not answer.has_left:
            self._scheduler.remove(answer.sequence)
        self._on_host.discard(request_id)
        self._builder.forget(request_id)

    def _token_outputs(self, rows: Sequence[tuple[_Answer, int]], logits: Tensor) -> list[TokenOutput]:
        outputs = []
        for answer, _ in rows:
            request = answer.sequence.request
            if not request.max_tokens:  # only its prompt matters
                self._remove(request.id)
                outputs.append(TokenOutput(request=request.id, finish="length", prompt_top=tuple(answer.prompt_top),
                                           prompt_logprobs=tuple(answer.prompt_logprobs)))  # fmt: skip
        rows = [each for each in rows if each[0].sequence.request.max_tokens]
        if not rows:
            return outputs
        answers = [answer for answer, _ in rows]
        if len(rows) != len(logits):
            logits = logits[torch.tensor([row for _, row in rows], device=logits.device)]
        tokens = choose_tokens(logits, [each.chooser for each in answers], excluded=self.runner.traits.image_token)
        numbers = [number for number, (answer, token) in enumerate(zip(answers, tokens, strict=True))
                   if answer.sequence.request.logprobs is not None and token != NOT_A_TOKEN]  # fmt: skip
        logprobs: dict[int, TokenLogprobs] = {}
        if numbers:
            wanted = logits[torch.tensor(numbers, device=logits.device)]
            num_top = [answers[number].sequence.request.logprobs or 0 for number in numbers]
            found = logprobs_of(wanted, [tokens[number] for number in numbers], num_top)
            logprobs = dict(zip(numbers, found, strict=True))
        self._generated_tokens += len(tokens)
        for number, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
            outputs.append(self._with_token(answer, token, logprobs.get(number)))
        return outputs

    def _with_token(self, answer: _Answer, token: int, logprobs: TokenLogprobs | None = None) -> TokenOutput:
        """Take the next token of a sequence, and return the output."""
        sequence, request = answer.sequence, answer.sequence.request
        if token == NOT_A_TOKEN:
            self._remove(request.id)
            return TokenOutput(request=request.id, finish="error", error=NAN_ERROR)
        self._scheduler.put(sequence, token)
        finish = self._finish_of(request, token, len(sequence.tokens))
        if finish is not None:
            self._remove(request.id)
        elif answer.chooser.constraint is not None:
            answer.chooser.constraint.advance(token)
        output = TokenOutput(request=request.id, token=token, finish=finish)
        if logprobs is not None:
            output = output._replace(logprob=logprobs.logprob, top=logprobs.top)
        if request.prompt_logprobs and not answer.has_prompt_logprobs:
            answer.has_prompt_logprobs = True
            of_prompt, top = tuple(answer.prompt_logprobs), tuple(answer.prompt_top)
            output = output._replace(prompt_logprobs=of_prompt, prompt_top=top)
        return output

    def _finish_of(self, request: EngineRequest, token: int | None, length: int) -> EngineFinish | None:
        """Return why a sequence of this length ends after `token` (None: any); None if it goes on."""
        if token in request.stop_ids:
            return "stop"
        if length - len(request.prompt) >= request.max_tokens:
            return "length"
        return "context" if length > self.max_length else None
