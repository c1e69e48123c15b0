"""More planted faults, as in `faults`: in loop, islands, waiting ranks, graphs, loss scale, exchange, evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigstep.check import Own, Trial
from bigstep.config import ExchangeConfig
from bigstep.data.sampler import Position, Step
from bigstep.engine.build import Run
from bigstep.engine.evaluate import Evaluation
from bigstep.engine.methods import build as methods
from bigstep.engine.methods import islands
from bigstep.engine.methods.crews import Crews
from bigstep.engine.methods.graphed import Graphed
from bigstep.engine.methods.islands import Islands
from bigstep.engine.methods.outer import Outer
from bigstep.engine.methods.parallel import make_exchange
from bigstep.engine.methods.rounds import Rounds
from bigstep.engine.ranks import Ranks
from bigstep.exchange import Exchange
from bigstep.gpu.loss_scale import LossScale
from faults import LOOP, instead, method_of, with_rate

# ---- loop


def rate_set_behind_the_step(run: Run, save_at: int, folder: Path | None) -> Any:
    """Every step is taken with the rate of the one before."""
    method, group = method_of(run), run.learner.optimizer.param_groups[0]
    step, before = method.step, [float(group["lr"])]

    def late(one: Step, batches: Any) -> Any:
        right = float(group["lr"])
        group["lr"], before[0] = before[0], right
        return step(one, batches)

    method.step = late  # type: ignore[method-assign]
    return LOOP.train(run, save_at, folder)  # type: ignore[misc]


def loop_that_stays_in_evaluation_mode(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    method = method_of(run)

    @contextlib.contextmanager
    def evaluation() -> Iterator[nn.Module]:
        method.learner.statistics.synchronize(ranks.sum_)
        method.learner.model.eval()
        yield method.learner.model

    method.evaluation = evaluation  # type: ignore[method-assign]
    return run


def loop_that_forgets_the_last_step(run: Run, save_at: int, folder: Path | None) -> Any:
    short = dataclasses.replace(run.config, epochs=run.config.epochs - 0.2)
    return LOOP.train(dataclasses.replace(run, config=short), save_at, folder)  # type: ignore[misc]


# ---- islands


class WrongSign(Outer):
    """Takes where an island went for the gradient, instead of where it came from less where it went."""

    def apply(self, number: int, mean: Tensor) -> None:
        super().apply(number, mean if self._takes_mean else -mean)


def outer_gradient_with_the_wrong_sign(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(islands, "Outer", WrongSign):
        return LOOP.start(own, trial, ranks)


class StaleStart(Outer):
    """Measures what islands have moved from where the run began, not from what was agreed on last."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first = [fragment.agreed.clone() for fragment in self.fragments]

    def start(self, number: int, *arguments: Any) -> Any:
        fragment = self.fragments[number]
        with instead(fragment, "agreed", self._first[number]):
            return super().start(number, *arguments)


def outer_gradient_from_a_stale_start(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(islands, "Outer", StaleStart):
        return LOOP.start(own, trial, ranks)


class EqualShares(Rounds):
    """Counts every island alike, though in a short batch some have seen less."""

    def _samples_of_all(self, number: int) -> list[int]:
        return [1] * self.config.count


def meeting_that_counts_islands_alike(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(islands, "Rounds", EqualShares):
        return LOOP.start(own, trial, ranks)


class AveragedState(Rounds):
    """Averages momentum with the weights, though it belongs to an island."""

    def _arrive(self, number: int, keep: float = 0.0) -> None:
        super()._arrive(number, keep)
        for each in zip(*(island.optimizer_state.values() for island in self.islands), strict=True):
            for name in [name for name, value in each[0].items() if isinstance(value, Tensor) and value.dim()]:
                mean = torch.stack([state[name] for state in each]).mean(0)
                for state in each:
                    state[name].copy_(mean)


def meeting_that_averages_optimizer_state(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(islands, "Rounds", AveragedState):
        return LOOP.start(own, trial, ranks)


class ForgottenMomentum(Islands):
    """Islands that begin later start from the weights of the synchronous run alone."""

    def fill(self, island: Any, carried: Any) -> None:
        super().fill(island, {name: state for name, state in carried.items() if name != "optimizer"})


def islands_that_part_without_momentum(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(methods, "Islands", ForgottenMomentum):
        return LOOP.start(own, trial, ranks)


# ---- ranks that wait


class WeightsAlone(Crews):
    """Whoever joins gets the weights, and begins with an optimizer of its own."""

    def _from_first(self, value: Any) -> Any:
        given = super()._from_first(value)
        if "optimizer" in given:
            given["optimizer"] = self.method.learner.optimizer.state_dict()
        return given


def crew_that_keeps_its_optimizer_state(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(methods, "Crews", WeightsAlone):
        return LOOP.start(own, trial, ranks)


class NothingShared(Crews):
    """The ranks that wait evaluate the weights of when they last trained."""

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        with self.method.evaluation() if self.size == self.ranks.size else self._alone() as model:
            yield model

    @contextlib.contextmanager
    def _alone(self) -> Iterator[nn.Module]:
        model = self.method.learner.model
        self.method.learner.statistics.synchronize(self.ranks.sum_)
        model.eval()
        yield model
        model.train()


def crew_that_evaluates_what_it_has(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(methods, "Crews", NothingShared):
        return LOOP.start(own, trial, ranks)


# ---- graphs and loss scale


def graph_with_the_rate_of_its_capture(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    if trial.graphs:
        passes = method_of(run).passes
        assert isinstance(passes, Graphed)
        settings = passes.graphs._settings
        write, done = settings.write, []

        def once() -> None:
            if not done:
                write()
                done.append(True)

        settings.write = once  # type: ignore[method-assign]
    return run


def graph_that_adds_parts_to_the_step_before(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    if trial.graphs:
        passes = method_of(run).passes
        assert isinstance(passes, Graphed)
        add, graphs = passes.graphs.add, passes.graphs

        def wrong(inputs: Tensor, target: Tensor, weight: float) -> Tensor:
            before = [gradient.clone() for gradient in graphs.gathered] if graphs._parts == 0 else []
            loss = add(inputs, target, weight)
            for gradient, old in zip(graphs.gathered, before, strict=False):
                gradient += old
            return loss

        graphs.add = wrong  # type: ignore[method-assign]
    return run


def graph_that_counts_every_batch_alike(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """The last batch of an epoch moves the weights as a full one does."""
    run = LOOP.start(own, trial, ranks)
    if trial.graphs:
        passes = method_of(run).passes
        update = passes.update

        def wrong() -> None:
            passes.counts = 1.0
            update()

        passes.update = wrong  # type: ignore[method-assign]
    return run


def scale_that_is_not_taken_out(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    if trial.loss_scale:
        _scale_of(run).unscale_ = lambda optimizer: None  # type: ignore[method-assign]
    return run


def scale_that_skips_good_steps(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    if trial.loss_scale:
        scale = _scale_of(run)
        step, count = scale.step, []

        def wrong(optimizer: torch.optim.Optimizer) -> None:
            count.append(1)
            if len(count) % 5:
                step(optimizer)

        scale.step = wrong  # type: ignore[method-assign]
    return run


def _scale_of(run: Run) -> LossScale:
    scale = run.state.parts["scaler"]
    assert isinstance(scale, LossScale)
    return scale


# ---- rate, exchange, evaluation, resumption


def rate_without_numbers_on_several_ranks(own: Own, trial: Trial, ranks: Ranks) -> Run:
    def rate(run: Run, step: Step) -> float:
        return run.rates.set(step) if ranks.size == 1 else float("nan")

    return with_rate(LOOP.start(own, trial, ranks), rate)


def _receiving(config: ExchangeConfig, change: Callable[[Tensor], Tensor], *, last_rank_only: bool) -> Exchange:
    """An exchange whose results are changed before DDP has them."""
    exchange = make_exchange(config)
    if last_rank_only and dist.get_rank() < dist.get_world_size() - 1:
        return exchange
    on_bucket = exchange._on_bucket
    exchange._on_bucket = lambda bucket: on_bucket(bucket).then(  # type: ignore[method-assign]
        lambda done: change(done.value())
    )
    return exchange


def exchange_whose_last_rank_gets_another_mean(config: ExchangeConfig) -> Exchange:
    return _receiving(config, lambda mean: 1.5 * mean, last_rank_only=True)


def exchange_that_gives_no_numbers(config: ExchangeConfig) -> Exchange:
    return _receiving(config, lambda mean: mean * float("nan"), last_rank_only=False)


def evaluation_without_numbers(run: Run) -> Evaluation:
    """A mean over this rank's samples where a rank has none, or over ranks of which one had none."""
    seen = LOOP.evaluate(run)  # type: ignore[misc]  # the loop has one
    return dataclasses.replace(seen, loss=float("nan")) if run.ranks.size > 1 else seen


def accuracy_of_each_rank(run: Run) -> Evaluation:
    """The loss is added up over ranks, and the accuracy forgotten."""
    seen = LOOP.evaluate(run)  # type: ignore[misc]
    return dataclasses.replace(seen, accuracy=(seen.accuracy or 0.5) / (1 + run.ranks.rank))


def load_that_finds_no_checkpoint(run: Run, folder: Path) -> Position:
    """It looks in another folder and begins anew without a word."""
    return Position()
