"""The plans that an experiment could run: options of every call with their costs, as arrays for the search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import compress, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlsim.base.refusals import refuse
from rlsim.cost.layout import PLAIN, Layout, PairTimes
from rlsim.cost.memory import RESERVED_BYTES, kv_shape, stage_bytes
from rlsim.cost.rollout import RolloutCostModel, powers_of_two
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.engines import rollout_costs
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.times import ExperimentTimes, handed_on_bytes
from rlsim.models.hardware import one_kind
from rlsim.sim.request import Request
from rlsim.sim.rollout import run_rollout
from rlsim.sim.stage import GenerationStage, evenly
from rlsim.trace.turns import ToolCall
from rlsim.workflow import Call, Placement, Plan
from rlsim.workflow.plan import with_transfers
from rlsim.workflow.search import Budget, Dependency, Found, Improvement, Options, Problem, Reallocation, find_best

#: Shares of a GPU's memory that are tried for a rollout engine, up to what lets all its sequences run at once: the
#: less it has, the more others may keep there.
ENGINE_SHARES = (0.3, 0.5, 0.7)

#: A layout of generation that takes so many times as long as the fastest is not tried with less memory.
SLOW = 1.5

#: Most micro-batches of a rank that are tried, for each pipeline stage.
MICRO_BATCHES_PER_STAGE = 8


@dataclass(frozen=True)
class Candidate:
    """One way to run a call on meshes of one size: seconds, and bytes on each of their GPUs."""

    strategy: TrainStrategy
    time_s: float
    resident_bytes: float
    active_bytes: float
    memory_share: float | None = None  # of a GPU, for a rollout engine


class Drawn(NamedTuple):
    """A response as the trace has it: its prompt's place, tokens of prompt and response, its row and tool calls."""

    position: int
    prompt: int
    response: int
    row: int
    tool_calls: tuple[ToolCall, ...]

    def request(self, number: int, *, whole: bool = False) -> Request:
        """The request for it, or the same when it is over."""
        generated, called = (self.response, len(self.tool_calls)) if whole else (0, 0)
        return Request(
            *(number, self.position, self.prompt, self.response, generated, self.row),
            tool_calls=self.tool_calls,
            called=called,
        )


class PlanSpace:
    """All plans of an experiment's workflow on its GPUs, costed on the lengths of its first step.

    Meshes are aligned power-of-two slices of a node and runs of whole nodes. TP stays inside an NVLink domain, every
    GPU of a mesh is used, DP is no larger than a mini-batch; experts are cut as all else is, or as `training` says;
    generation has PP 1 unless `pipelined`. With `context_parallel` training and inference may split sequences over GPUs
    too (CP, a power of two, in a domain with TP). Micro-batches are the experiment's own, or powers of two of them. Of
    strategies that differ in micro-batches or offload only, those worse in both time and memory are left out, and of
    each call all but its fastest where there are more than `most_plans` (REAL's pruning). Raises `CapacityError` if a
    call fits nowhere.

    Where generation runs ahead of its weights it has the first GPUs for itself, all of their memory included, and the
    other calls have the rest: as meshes above, or all of it. `splits` has one space for each number of GPUs.
    """

    def __init__(
        self,
        placed: PlacedExperiment,
        pipelined: bool = True,
        context_parallel: bool = False,
        most_plans: float = math.inf,
    ) -> None:
        self._pipelined, self._context_parallel = pipelined, context_parallel
        self._loaded = loaded = placed.loaded
        self._placed, self._cluster = placed, placed.left_of(one_kind(loaded.cluster, "a search for a plan"))
        self.workflow, self.gpu, self._calls = placed.workflow, self._cluster.gpu, placed.calls_on(placed.gpus)
        self._times = ExperimentTimes(placed)
        self.calls = [call for call in placed.workflow.calls if call.kind not in ("sync", "reward")]
        # One sync of two engines is estimated as if each began with its own weights; they come one after the other.
        sampler = loaded.sampler(loaded.experiment.seed_list[0])
        batch, called = sampler.step(0), sampler.tool_calls
        columns = (batch.position, batch.prompt_tokens, batch.response_tokens, batch.row)
        calls = [called[row] if called else () for row in batch.row]
        self._drawn = [Drawn(*one) for one in zip(*(column.tolist() for column in columns), calls, strict=True)]
        self._lengths = cache(self._tokens)
        self._ahead = max((lag - 1 for *_, lag in self._moves()), default=0)
        self._borders = borders(self._cluster.gpus) if self._ahead else ()
        self._trained = {call.model for call in self.calls if call.kind == "train"}
        self.options: dict[str, list[tuple[int, Candidate]]] = {}  # first GPU and candidate of each option
        made: dict[tuple[str, int, int], list[Candidate]] = {}
        self._least_bytes: dict[str, float] = {}  # of the strategies of a call that did not fit
        for call in self.calls:
            shape = repr(
                (call.kind, loaded.models[call.model], call.model in self._trained, self._works_on(call).tobytes())
            )
            found: list[tuple[int, Candidate]] = []
            for first, gpus in self._meshes(call):
                place, domain = first % self._cluster.domain_gpus, self._cluster.domain_gpus
                key = (shape, place if place + gpus > domain else 0, gpus)  # in a domain GPUs are alike
                if key not in made:
                    made[key] = list(self._candidates(call, *key[1:]))
                found += [(first, candidate) for candidate in made[key]]
            if not found:
                least = self._least_bytes.get(call.name)
                why = f": it needs {least / 1e9:.2f} GB of a GPU's {self.gpu.memory_bytes / 1e9:.2f}" if least else ""
                raise CapacityError(f"call {call.name} fits on no mesh of {self._cluster.name}{why}")
            self.options[call.name] = found
        self._keep_fastest(most_plans)

    def _keep_fastest(self, most_plans: float) -> None:
        """Of every call as many of its fastest options as make no more plans; all calls as many, if they have them."""
        sizes = [len(found) for found in self.options.values()]
        if math.prod(sizes) > most_plans:
            kept = max(n for n in range(1, max(sizes)) if n == 1 or math.prod(min(n, s) for s in sizes) <= most_plans)
            for found in self.options.values():
                found[:] = sorted(found, key=lambda option: option[1].time_s)[:kept]

    def _works_on(self, call: Call) -> npt.NDArray[np.bool_]:
        """Which of the drawn responses a call makes, or works on: what others are compared with only a reward model."""
        number = np.arange(len(self._drawn)) % self._loaded.launched_responses
        mine = np.zeros(len(number), np.bool_)
        for name in {call.name} if call.kind == "generate" else self.workflow.takes(call.name):
            own = self.workflow.samples(name, self._loaded.experiment.workflow.responses)
            with_baselines = call.kind == "generate" or call.model == "reward"
            last = own.stop - (0 if with_baselines else self.workflow.call(name).baselines)
            mine |= (own.start <= number) & (number < last)
        return mine if mine.any() else ~mine  # of given responses all

    def _tokens(self, call: Call) -> npt.NDArray[np.int64]:
        """Tokens of the sequences that a call works on, as the engine has them at its end."""
        return self._times.lengths([one.request(0, whole=True) for one in self._of(call)])

    def _of(self, call: Call) -> list[Drawn]:
        return list(compress(self._drawn, self._works_on(call)))

    @cached_property
    def problem(self) -> Problem:
        workflow, names = self.workflow, {call.name for call in self.calls}
        dependencies, reallocations = [], []
        for edge in workflow.edges:
            if edge.source in names and edge.target in names:
                seconds = None if edge.lag or edge.barrier else self._data_s(edge.source, edge.target)
                dependencies.append(Dependency(edge.source, edge.target, edge.lag, seconds))
        beside = tuple(call.name for call in self.calls if call.kind != "generate")
        for source, target, lag in self._moves():
            pair = self._layouts(source), self._layouts(target)
            anywhere = Placement(self._placed.gpus)
            time_s = self._placed.moving(workflow.call(target).model, anywhere, target, anywhere)
            seconds = PairTimes(time_s, self._cluster, *pair)
            copies = self._copy_bytes(target, pair)
            reallocations.append(Reallocation(source, target, seconds, copies, lag, self._asleep_s(target), beside))
        return Problem(
            options=[self._columns(call.name) for call in self.calls],
            dependencies=dependencies,
            reallocations=reallocations,
            gpus=self._cluster.gpus,
            memory_bytes=self._cluster.gpu.memory_bytes - RESERVED_BYTES,
            iterations=1 + 2 * self._ahead + 2 * max(self._ahead, 1),
            order=[name for name in workflow.order() if name in names],
        )

    def _asleep_s(self, target: str) -> npt.NDArray[np.float64]:
        gpu = self._placed.gpus[0]
        return np.array([self._placed.remapped_s(target, c.memory_share, gpu) for _, c in self.options[target]])

    def _moves(self) -> Iterator[tuple[str, str, int]]:
        """From which call new weights go to which other one, and how many steps later they are used."""
        for edge in self.workflow.edges:
            if self.workflow.call(edge.source).kind == "sync":
                yield self.workflow.beside(edge.source)[0][0], edge.target, edge.lag

    def splits(self) -> list[PlanSpace]:
        """The plans of each split of the GPUs that leaves every call some; where there are no splits, all plans."""
        if not self._ahead:
            return [self]
        found = []
        for border in self._borders:  # generation has the GPUs before it, the other calls those from it on
            space = copy(self)
            space.options = {
                call.name: [
                    (first, candidate)
                    for first, candidate in self.options[call.name]
                    if (candidate.strategy.gpus == border if call.kind == "generate" else first >= border)
                ]
                for call in self.calls
            }
            found += [space] if all(space.options.values()) else []
        refuse("splits", CapacityError, found=found, cluster=self._cluster)
        return found

    def search(
        self,
        method: str,
        budget: Budget,
        *,
        seed: int = 0,
        on_improvement: Callable[[Improvement], None] | None = None,
    ) -> tuple[PlanSpace, Found]:
        """The best plan that a method finds, and the split that it belongs to; raises `RlsimError` as `find_best`."""
        spaces = self.splits()
        problems = [space.problem for space in spaces]
        at, found = find_best(problems, method, budget, seed=seed, on_improvement=on_improvement)
        return spaces[at], found

    def plan(self, chosen: Sequence[int]) -> Plan:
        placements = {}
        for call, index in zip(self.calls, chosen, strict=True):
            first, candidate = self.options[call.name][index]
            strategy = candidate.strategy
            gpus = tuple(range(first, first + strategy.gpus))
            placements[call.name] = Placement(gpus, strategy, memory_share=candidate.memory_share)
        return with_transfers(self.workflow, placements, self._placed.reward_placement)

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def _columns(self, name: str) -> Options:
        rows = [(first, c.strategy.gpus, c.time_s, c.resident_bytes, c.active_bytes) for first, c in self.options[name]]
        return Options(name, *(np.array(column) for column in zip(*rows, strict=True)))

    def _layouts(self, name: str) -> list[Layout]:
        return [Layout.of(first, c.strategy) for first, c in self.options[name]]

    def _copy_bytes(self, target: str, pair: tuple[list[Layout], list[Layout]]) -> PairTimes | None:
        """What a trained model's inference keeps of its own; nothing where training has just these weights."""
        call = self.workflow.call(target)
        if call.kind != "inference" or (style := self._placed.style_of(call)).offload:
            return None
        model = self._loaded.models[call.model]

        def size(source: Layout, to: Layout) -> float:
            if source == to:
                return 0.0
            zero = 3 if to.zero3 else 0
            strategy = replace(style, dp=to.dp, tp=to.tp, pp=to.pp, cp=to.cp, zero_stage=zero)
            if to.expert_cut is not None:
                strategy = replace(strategy, ep=to.expert_cut, expert_tp=1)
            return max(stage["parameters"] for stage in stage_bytes(model, strategy, backward=False))

        return PairTimes(size, self._cluster, *pair)

    def _data_s(self, source: str, target: str) -> PairTimes:
        kind = self._loaded.algorithm.call(source).kind
        size = handed_on_bytes(kind, float(self._lengths(self.workflow.call(target)).sum()))
        time_s = partial(self._calls.data(self._calls).time_s, size)
        return PairTimes(time_s, self._cluster, self._layouts(source), self._layouts(target))

    # ---- one call on a mesh -----------------------------------------------------------------------------------------

    def _meshes(self, call: Call) -> list[tuple[int, int]]:
        """First GPU and size of every mesh that the call may have."""
        if self._ahead and call.kind == "generate":
            return [(0, border) for border in self._borders]
        gpus = self._cluster.gpus
        rests = [(border, gpus - border) for border in self._borders]
        return list(dict.fromkeys([*meshes(gpus, self._cluster.gpus_per_node), *rests]))

    def _candidates(self, call: Call, place: int, gpus: int) -> Iterator[Candidate]:
        """The ways to run a call on so many GPUs from the one at this place of a node on."""
        mini = self._loaded.experiment.training.mini_batches if call.kind == "train" else 1
        share, domain = len(self._lengths(call)) // mini, self._cluster.domain_gpus
        inside = place + gpus <= domain  # else every TP group is to lie in one NVLink domain
        spread = [
            (gpus // tp // pp, tp, pp)
            for tp, pp in degrees(gpus, min(domain, gpus))
            if self._suits(call, tp, pp) and gpus // tp // pp <= share and (inside or place % tp == domain % tp == 0)
        ]
        if call.kind == "generate":
            kept = [TrainStrategy(dp=dp, tp=tp, pp=pp) for dp, tp, pp in spread if self._pipelined or pp == 1]
            yield from self._generation(call, kept)
            return
        style = self._placed.style_of(call)
        for dp, tp, pp in spread:
            zero = style.zero_stage if pp == 1 else min(style.zero_stage, 1)
            most = math.gcd(dp, domain // tp) if self._context_parallel else 1
            for cp, experts in product(powers_of_two(most), self._expert_degrees(call, dp * tp)):
                cut = style.sequence_parallel and tp > 1
                shape = replace(
                    style, dp=dp // cp, tp=tp, pp=pp, cp=cp, zero_stage=zero, sequence_parallel=cut, **experts
                )  # fmt: skip
                yield from undominated(self._variants(call, shape, place, share // shape.dp))

    def _expert_degrees(self, call: Call, stage_gpus: int) -> Iterator[dict[str, Any]]:
        """Experts cut as all else, and as `training` says where a stage of so many GPUs allows that."""
        yield {}
        training, experts = self._loaded.experiment.training, self._loaded.models[call.model].num_experts
        divides = experts % training.ep == 0 and stage_gpus % (training.ep * (training.expert_tp or 1)) == 0
        if training.ep > 1 and experts and divides:
            yield {"ep": training.ep, "expert_tp": training.expert_tp}

    def _suits(self, call: Call, tp: int, pp: int) -> bool:
        model = (self._loaded.served if call.kind == "generate" else self._loaded.models)[call.model]
        try:
            (self._loaded.replica if call.kind == "generate" else PLAIN).check(model, tp)
        except ConfigError:
            return False
        return pp <= model.num_hidden_layers

    def _variants(self, call: Call, shape: TrainStrategy, place: int, share: int) -> Iterator[Candidate]:
        """The experiment's own micro-batches, and every power of two of them that a rank's `share` allows; a model that
        is not trained may also wait in host memory."""
        offloads = (shape.offload,) if call.model in self._trained else (False, True)
        most = min(share, MICRO_BATCHES_PER_STAGE * shape.pp)
        for count in (None, *(1 << power for power in range(most.bit_length()))):
            for offload in offloads:
                strategy = replace(shape, offload=offload, micro_batches=count)
                copied = call.model in self._trained and not offload  # whose bytes depend on where training is
                stages = self._placed.memory.of(call, strategy, holds_weights=copied)
                kept = max(sum(states.values()) for states, _ in stages)
                working = max(sum((states | parts).values()) for states, parts in stages) - kept
                needed = kept + working + RESERVED_BYTES
                if needed > self._cluster.gpu.memory_bytes:
                    self._least_bytes[call.name] = min(needed, self._least_bytes.get(call.name, needed))
                    continue
                mesh = Placement(tuple(range(place, place + strategy.gpus)), strategy)
                time, driver_s = self._times.alone(call, mesh, self._lengths(call))
                yield Candidate(strategy, time.total_s + driver_s, kept, working)

    def _generation(self, call: Call, strategies: Sequence[TrainStrategy]) -> Iterator[Candidate]:
        """Generation alone on its GPUs: with memory for all sequences at once and, unless it is slow, with less.

        On GPUs of its own it has all that the experiment allows.
        """
        if self._ahead:
            yield from (candidate for strategy in strategies for candidate in self._generated(call, strategy))
            return
        limits = {strategy: self._share_for_all(call, strategy) for strategy in strategies}
        alone = [c for strategy, share in limits.items() for c in self._generated(call, strategy, share)]
        fastest_s = min((candidate.time_s for candidate in alone), default=0.0)
        for candidate in alone:
            yield candidate
            if candidate.time_s <= SLOW * fastest_s:
                for share in ENGINE_SHARES:
                    if share < limits[candidate.strategy]:
                        yield from self._generated(call, candidate.strategy, share)
                yield from self._in_micro_batches(call, candidate.strategy)

    def _in_micro_batches(self, call: Call, strategy: TrainStrategy) -> Iterator[Candidate]:
        """With memory for one micro-batch at once, as long as that beats all sequences in as much memory."""
        for power in range(1, MICRO_BATCHES_PER_STAGE.bit_length()):
            cut = replace(strategy, micro_batches=1 << power)
            share = self._share_for_all(call, cut)
            both = [*self._generated(call, cut, share), *self._generated(call, strategy, share)]
            if len(both) < 2 or both[0].time_s >= both[1].time_s:
                return
            yield both[0]

    def _share_for_all(self, call: Call, strategy: TrainStrategy) -> float:
        """Share of a GPU's memory that lets a micro-batch run at once; not more than the experiment allows."""
        loaded, engine, layout = self._loaded, self._loaded.experiment.engine, self._loaded.replica
        shape = kv_shape(loaded.served[call.model], layout.attention_tp(strategy.tp))
        parts = [
            part
            for dealt in self._dealt(call, strategy)
            for part in evenly(dealt, strategy.micro_batches or 1, "contiguous")
        ]
        units = max(sum(shape.units(one.prompt + one.response, engine.page_tokens) for one in part) for part in parts)
        pages = (math.ceil(units / shape.page_units / layout.attention_dp) + 1) / (1 - engine.watermark)
        costs = rollout_costs(loaded, range(strategy.gpus), strategy=strategy, role=call.model)
        needed = costs.share_for(strategy.tp * strategy.pp, pages)
        return min(math.ceil(1000 * needed) / 1000, loaded.experiment.memory_utilization)

    def _dealt(self, call: Call, strategy: TrainStrategy) -> set[tuple[Drawn, ...]]:
        """The replicas' responses; where nothing tells them apart but tokens, of replicas with the same ones once."""
        shares = evenly(self._of(call), strategy.dp, self._loaded.experiment.routing)
        if self._loaded.environment:
            return {tuple(share) for share in shares}
        alike = ([one._replace(position=one.position - share[0].position, row=-1) for one in share] for share in shares)
        return {tuple(share) for share in alike if share}

    def _generated(self, call: Call, strategy: TrainStrategy, memory_share: float | None = None) -> Iterator[Candidate]:
        """Generation with the seconds that the engine takes; nothing if a whole response does not fit."""
        costs = rollout_costs(
            self._loaded, range(strategy.gpus), memory_share=memory_share, strategy=strategy, role=call.model
        )
        replica = strategy.tp * strategy.pp
        if costs.feasible_tps(self._loaded.longest_sequence, (replica,))[0]:
            if self._loaded.environment:  # replicas wait for the same sandboxes and workers
                time_s = self._rollout_s(self._of(call), costs, strategy, strategy.dp)
            else:
                time_s = max(self._rollout_s(dealt, costs, strategy) for dealt in self._dealt(call, strategy))
            yield Candidate(strategy, time_s, 0.0, costs.memory(replica).engine_bytes, memory_share)

    def _rollout_s(
        self, dealt: Sequence[Drawn], costs: RolloutCostModel, strategy: TrainStrategy, replicas: int = 1
    ) -> float:
        loaded, replica = self._loaded, strategy.tp * strategy.pp
        stage = GenerationStage(
            requests=[one.request(i) for i, one in enumerate(dealt)],
            mesh=[tuple(range(replicas * replica))],
            tp=replica,
            costs=costs,
            config=loaded.engine,
            cap_tokens=loaded.longest_response,
            routing=loaded.experiment.routing,
            micro_batches=strategy.micro_batches or 1,
        )
        return run_rollout(stage, environment=loaded.environment, seed=loaded.experiment.seed_list[0]).env.now


#: By workflow, and what `PlanContext.search` is given.
FoundPlans = Mapping[tuple[Any, ...], Plan]


def undominated(candidates: Iterator[Candidate]) -> list[Candidate]:
    """Those that no other beats, or equals, in time and both kinds of memory."""
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.time_s, c.resident_bytes, c.active_bytes)):
        if not any(o.resident_bytes <= one.resident_bytes and o.active_bytes <= one.active_bytes for o in kept):
            kept.append(one)
    return kept


# ---- the GPUs that a search may give to a call, and the degrees that use all of them --------------------------------


#: Whole nodes: any run of neighbouring ones up to so many nodes in the cluster, aligned powers of two beyond.
ANY_RUN_NODES = 8

#: At most so many splits of the GPUs are tried where generation has some of its own.
SPLITS = 16


def meshes(gpus: int, per_node: int) -> Iterator[tuple[int, int]]:
    """First GPU and size of every mesh: aligned power-of-two slices of a node, and runs of whole nodes."""
    size = 1
    while size < per_node:
        yield from ((first, size) for first in range(0, gpus, size) if per_node % size == 0)
        size *= 2
    nodes = gpus // per_node
    for count in range(1, nodes + 1):
        power = count & (count - 1) == 0
        if nodes <= ANY_RUN_NODES or power or count == nodes:
            step = 1 if nodes <= ANY_RUN_NODES else count
            yield from ((first * per_node, count * per_node) for first in range(0, nodes - count + 1, step))


def borders(gpus: int) -> range:
    """The numbers of GPUs, out of so many, that are tried for generation: multiples of the same power of two."""
    refuse("one GPU", gpus=gpus)
    step = 1 << (-(-gpus // SPLITS) - 1).bit_length()
    return range(step, gpus, step)


def degrees(gpus: int, domain_gpus: int) -> Iterator[tuple[int, int]]:
    """TP and PP that leave no GPU of a mesh unused: TP a power of two in an NVLink domain, PP what divides the rest."""
    tp = 1
    while tp <= domain_gpus:
        if gpus % tp == 0:
            yield from ((tp, pp) for pp in range(1, gpus // tp + 1) if gpus // tp % pp == 0)
        tp *= 2
