"""Fits rates to measured steps: bounded least squares of log(predicted / measured), with the present rates as prior.

Parameters are added one by one, as long as the steps determine every one of them and the fit gets better; the others
stay as they are. With three or more different plans, a parameter must also make the left-out ones better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from trimaran.planner.measure.rate_model import (
    PHASE_SIGMA,
    PRIOR_SIGMA,
    Observation,
    Parameter,
    StepModel,
    bounds_of,
    parameters_of,
)

MAX_PARAMETER_SIGMA = 0.1  # of the logarithm: a rate that is less certain is not determined
MIN_GAIN = 4.0  # of the objective, in squared standard deviations: two of them
MIN_CHANGE = 0.01  # of a rate, relative
PREFERRED_GAIN = 0.8  # of the largest: a parameter that explains nearly as much and comes first is taken
MIN_LEFT_OUT = 3  # different plans that a fit without one of them needs
MIN_ROBUST, HUBER = 4, 2.5  # from so many steps on, one that is so many standard deviations off counts less
GRID, GRID_HALVINGS = (-1.2, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.2), 2  # logarithms where a search starts
MAX_ITERATIONS, MAX_SWAP_ITERATIONS, STEP_TOLERANCE, DIFFERENCE, MAX_DAMPING = 20, 4, 5e-4, 0.01, 1e3

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class RateFit:
    """The logarithms of the parameters that are fitted; all others are 0."""

    values: Mapping[Parameter, float] = field(default_factory=dict)

    def plus(self, parameter: Parameter, value: float) -> "RateFit":
        return RateFit({**self.values, parameter: value})

    def without(self, parameter: Parameter) -> "RateFit":
        return RateFit({each: value for each, value in self.values.items() if each != parameter})

    def moved(self, change: Array, bounds: Mapping[Parameter, tuple[float, float]]) -> "RateFit":
        """Return the fit with its values changed, as far as the bounds allow."""
        pairs = zip(self.values.items(), change, strict=True)
        return RateFit({each: float(np.clip(value + step, *bounds[each])) for (each, value), step in pairs})

    @property
    def array(self) -> Array:
        return np.array(list(self.values.values()))

    @property
    def prior(self) -> Array:
        return np.array([PRIOR_SIGMA[each.kind] for each in self.values])


NOTHING_FITTED = RateFit()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The fitted parameters, and their standard deviations."""

    fit: RateFit
    sigmas: Mapping[Parameter, float]
    before: tuple[float, ...]  # relative errors of the predicted steps, in the order of the observations
    after: tuple[float, ...]
    left_out: tuple[float, ...]  # errors without the own plan in the fit; empty with fewer than three plans
    users: Mapping[Parameter, tuple[int, ...]]  # observations whose steps depend on a parameter
    undetermined: tuple[Parameter, ...]  # they stay as they are

    @property
    def is_better(self) -> bool:
        """Whether the median and the mean square of the errors got smaller."""
        before, after = (math.fsum(each * each for each in errors) for errors in (self.before, self.after))
        return bool(self.fit.values) and median_error(self.after) < median_error(self.before) and after < before


def median_error(errors: Sequence[float]) -> float:
    """Return the median of the absolute errors."""
    return median(map(abs, errors))


def fit_rates(observations: Sequence[Observation]) -> FitResult:
    """Return the rates that explain the steps best. `observations` must not be empty."""
    problem = RateProblem(observations)
    fit = problem.with_swaps(problem.with_more(NOTHING_FITTED))
    return problem.result(problem.with_more(fit))


class RateProblem:
    """The residuals of the steps, their phases and the prior, each in standard deviations."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.observations = list(observations)
        self.parameters = parameters_of(observations)
        self.bounds = {each: bounds_of(each, observations) for each in self.parameters}
        self._model = StepModel(observations)
        # The row of each residual: the observation, its phase or '' for the step, and the measured seconds.
        self._rows = [(number, "", each.seconds) for number, each in enumerate(self.observations)]
        self._rows += [(number, name, seconds) for number, each in enumerate(self.observations)
                       for name, seconds in each.phases.items()]  # fmt: skip
        self._measured = np.array([seconds for _, _, seconds in self._rows])
        self._sigmas = np.array([PHASE_SIGMA if name else self.observations[number].sigma
                                 for number, name, _ in self._rows])  # fmt: skip
        plans = [(each.job, each.plan.model_dump_json(), str(each.cluster)) for each in self.observations]
        self._groups = [plans.index(each) for each in plans]

    def with_more(self, fit: RateFit) -> RateFit:
        """Return the fit with every parameter added that is determined and makes it better."""
        refused: set[Parameter] = set()
        while (candidate := self._best_candidate(fit, refused)) is not None:
            found = self.solve(fit.plus(*candidate))
            if self.accepts(fit, found):
                fit = found
            else:
                refused.add(candidate[0])
        return fit

    def with_swaps(self, fit: RateFit) -> RateFit:
        """Return the fit with a parameter left out or exchanged, while fewer or other ones explain more.

        A collective is as fast as the slowest link on its way, so slopes alone may blame another link.
        """
        for _ in self.parameters:
            best = fit
            for old in fit.values:
                for new in self.parameters:
                    rest = fit.without(old).without(new)
                    if new != old and (rest.values or new not in fit.values):
                        found = self.solve(rest.plus(new, self._best_on_grid(rest, new)[1]), MAX_SWAP_ITERATIONS)
                        is_allowed = self.score(found) < self.score(best) and self.accepts(rest, found)
                        best = found if is_allowed else best
            if best is fit:
                break
            fit = self.solve(best)
        return fit

    def _best_candidate(self, fit: RateFit, refused: set[Parameter]) -> tuple[Parameter, float] | None:
        """Return the parameter that alone would explain most of what is left, and its value; None if none would."""
        now = self.objective(fit)
        tried = {each: self._best_on_grid(fit, each) for each in self.parameters
                 if each not in fit.values and each not in refused}  # fmt: skip
        gains = {each: now - least for each, (least, _) in tried.items()}
        enough = max(MIN_GAIN, PREFERRED_GAIN * max(gains.values(), default=0.0))
        return next(((each, tried[each][1]) for each in tried if gains[each] >= enough), None)

    def _best_on_grid(self, fit: RateFit, parameter: Parameter) -> tuple[float, float]:
        """Return the least objective over some values of a parameter, with the others as they are, and that value."""
        low, high = self.bounds[parameter]
        tried = {value: self.objective(fit.plus(parameter, value)) for value in sorted({*np.clip(GRID, low, high)})}
        for _ in range(GRID_HALVINGS):
            values = sorted(tried)
            at = values.index(min(tried, key=tried.__getitem__))
            near = [values[index] for index in (at - 1, at + 1) if 0 <= index < len(values)]
            tried |= {(values[at] + each) / 2: self.objective(fit.plus(parameter, (values[at] + each) / 2))
                      for each in near}  # fmt: skip
        best = min(tried, key=tried.__getitem__)
        return tried[best], float(best)

    def logarithms(self, fit: RateFit) -> Array:
        """Return log(predicted / measured) of every row."""
        predicted = [self._model.seconds(number, name, fit.values) for number, name, _ in self._rows]
        return np.log(np.maximum(predicted, 1e-12) / self._measured)

    def objective(self, fit: RateFit) -> float:
        """Return the sum of squares in standard deviations; a step far off counts less if there are enough others."""
        off = np.abs(self.logarithms(fit)) / self._sigmas
        is_far = (off > HUBER) & (len(self.observations) >= MIN_ROBUST)
        loss = np.where(is_far, 2 * HUBER * off - HUBER**2, off**2)
        return float(loss.sum() + ((fit.array / fit.prior) ** 2).sum())

    def score(self, fit: RateFit) -> float:
        """Return the objective with what each parameter has to be worth."""
        return self.objective(fit) + MIN_GAIN * len(fit.values)

    def _slopes(self, fit: RateFit, here: Array) -> Array:
        columns = []
        for each, value in fit.values.items():
            step = DIFFERENCE if value + DIFFERENCE < self.bounds[each][1] else -DIFFERENCE
            columns.append((self.logarithms(fit.plus(each, value + step)) - here) / step)
        return np.array(columns).reshape(len(fit.values), len(here)).T

    def solve(self, fit: RateFit, max_iterations: int = MAX_ITERATIONS) -> RateFit:
        """Return the best values, by damped Gauss-Newton steps inside the bounds."""
        damping, least = 1e-3, self.objective(fit)
        for _ in range(max_iterations):
            matrix, gradient = self._normal_equations(fit, self.logarithms(fit), keep=None)
            change = 0.0
            while damping < MAX_DAMPING:
                step = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
                tried = fit.moved(step, self.bounds)
                if (found := self.objective(tried)) <= least:
                    change = np.abs(tried.array - fit.array).max()
                    fit, least, damping = tried, found, max(damping / 5, 1e-9)
                    break
                damping *= 5
            if change < STEP_TOLERANCE:
                break
        return fit

    def _normal_equations(self, fit: RateFit, here: Array, *, keep: Array | None) -> tuple[Array, Array]:
        """Return the matrix and the gradient of a Gauss-Newton step, from the rows to `keep`; None: all."""
        is_robust = len(self.observations) >= MIN_ROBUST
        far = np.maximum(1.0, np.abs(here) / self._sigmas / HUBER) if is_robust else 1.0
        slopes, weights = self._slopes(fit, here), 1.0 / self._sigmas**2 / far
        weights = weights if keep is None else weights * keep
        matrix = slopes.T @ (weights[:, None] * slopes) + np.diag(fit.prior**-2)
        return matrix, slopes.T @ (weights * here) + fit.array / fit.prior**2

    def sigmas_of(self, fit: RateFit) -> Array:
        """Return the standard deviation of each value, if all of them are fitted together."""
        slopes = self._slopes(fit, self.logarithms(fit))
        matrix = slopes.T @ (self._sigmas[:, None] ** -2 * slopes) + np.diag(fit.prior**-2)
        return np.sqrt(np.diag(np.linalg.inv(matrix)))

    def accepts(self, old: RateFit, new: RateFit) -> bool:
        """Return whether the new parameter is determined, and makes the fit and the left-out plans better."""
        if self.score(new) >= self.score(old):
            return False
        if any(abs(value) < MIN_CHANGE for each, value in new.values.items() if each not in old.values):
            return False
        if (self.sigmas_of(new) > MAX_PARAMETER_SIGMA).any():
            return False
        errors = self.left_out_errors(new)
        return not errors or median_error(errors) <= median_error(self.left_out_errors(old))

    def left_out_errors(self, fit: RateFit) -> list[float]:
        """Return the error of each step with the rates that the other plans alone would have given.

        A fit without one plan starts at `fit` and takes one Gauss-Newton step; the left-out step is then predicted.
        Empty with fewer than three different plans.
        """
        if len(set(self._groups)) < MIN_LEFT_OUT:
            return []
        here, found = self.logarithms(fit), [0.0] * len(self.observations)
        for group in set(self._groups):
            moved = fit
            if fit.values:
                keep = np.array([self._groups[number] != group for number, _, _ in self._rows])
                matrix, gradient = self._normal_equations(fit, here, keep=keep)
                moved = fit.moved(-np.linalg.solve(matrix, gradient), self.bounds)
            for number, each in enumerate(self.observations):
                if self._groups[number] == group:
                    found[number] = self._model.seconds(number, "", moved.values) / each.seconds - 1
        return found

    def result(self, fit: RateFit) -> FitResult:
        count = len(self.observations)
        before, after = self.logarithms(NOTHING_FITTED), self.logarithms(fit)
        slopes = self._slopes(fit, after)[:count]
        return FitResult(
            fit=fit,
            sigmas=dict(zip(fit.values, map(float, self.sigmas_of(fit)), strict=True)) if fit.values else {},
            before=tuple(map(math.expm1, before[:count])),
            after=tuple(map(math.expm1, after[:count])),
            left_out=tuple(self.left_out_errors(fit)) if fit.values else (),
            users={each: tuple(map(int, np.flatnonzero(np.abs(slopes[:, number]) > DIFFERENCE)))
                   for number, each in enumerate(fit.values)},
            undetermined=tuple(each for each in self.parameters if each not in fit.values),
        )  # fmt: skip
