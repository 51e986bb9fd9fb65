"""A workflow: calls on named models, and edges that carry data or a parameter version from one call to another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from rlsim.base.refusals import refuse
from rlsim.errors import ConfigError

CallKind = Literal["generate", "inference", "train", "reward", "sync"]
Grain = Literal["stage", "sample", "chunk"]


@dataclass(frozen=True, slots=True)
class Call:
    """One model function call of a training step.

    `kind`: `generate` decodes responses, `inference` is a forward pass over them, `train` updates the model, `sync`
    brings updated weights to the rollout engine, `reward` scores responses outside the models (CPU) and needs no GPU.

    A `generate` call makes `responses` to each prompt that are trained on (None: what the others leave of a step's) and
    `baselines` that are scored to compare these with (ReMax).
    """

    name: str
    kind: CallKind
    model: str
    responses: int | None = None
    baselines: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` needs what `source` produces: of the same step (`lag` 0), or of the one `lag` steps before.

    Of weights on their way from a sync to generation, `lag` is the most: generation takes newer ones that are there.
    With `exact` it never does: the sync after waits for the generation that is to have the older weights. Calls that
    take all of that generation's responses at once begin after that sync.

    `grain`: `stage` is all of it, then go; `sample` is each response as soon as it is done; `chunk` is every
    `chunk_tokens` tokens of each response while it is generated, and what is left of it at its end.

    A `barrier` says only in which order a framework runs its calls: `target` starts when all of `source` is done, and
    takes nothing from it. Systems that overlap the two take it out (`Workflow.without_barriers`).
    """

    source: str
    target: str
    lag: int = 0
    grain: Grain = "stage"
    chunk_tokens: int = 0  # of the grain `chunk`
    barrier: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Workflow:
    """The calls of one training step and their edges. Raises `ConfigError` if they do not form a runnable graph.

    `group_advantage`: a response can be trained on once all responses to its prompt are scored (GRPO's baseline is
    their mean). With `windows` inference and training that take samples as they come take a step's batch in so many
    equal parts: each is worked on whole, on all GPUs of the call, once it is there and the one before is trained on.
    Without, they work in pieces.
    `elastic`: training that takes samples as they come, or a window's, works in pieces, also on GPUs that generation
    leaves idle: as further data-parallel replicas. `hybrid`: the other way round, generation may have replicas on GPUs
    of training, while that waits. With `fetch_once` calls that take samples as they come take what is there when
    generation first gives GPUs up, and the rest when it is over. Calls in pieces are side by side on their GPUs; with
    `swaps` a GPU has the weights of one model at a time, with `host_gradients` gradients between pieces in host memory.
    """

    name: str
    calls: tuple[Call, ...]
    edges: tuple[Edge, ...]
    group_advantage: bool = False
    windows: int = 0
    elastic: bool = False
    hybrid: bool = False
    fetch_once: bool = False
    swaps: bool = False
    host_gradients: bool = False

    def __post_init__(self) -> None:
        names, open_ = [call.name for call in self.calls], [c.name for c in self.generating if c.responses is None]
        made = [c.name for c in self.calls if c.kind != "generate" and (c.responses is not None or c.baselines)]
        refuse("workflow", workflow=self.name, names=names, open=open_, made=made)
        kinds = {call.name: call.kind for call in self.calls}
        for edge in self.edges:
            chunks = {e.chunk_tokens for e in self.edges if e.grain == "chunk" and e.source == edge.source}
            grains = {e.grain for e in self.into(edge.target)}
            ends = {"source": kinds.get(edge.source), "target": kinds.get(edge.target)}
            refuse("edge", workflow=self.name, edge=edge, chunks=chunks, grains=grains, **ends)
        for call in self.calls:
            before, after = self.beside(call.name)
            shown = {"before": ", ".join(before) or "nothing", "after": ", ".join(after) or "nothing"}
            models = {self.call(name).model for name in (call.name, *before, *after)}
            trained = [kinds[name] for name in before] == ["train"] and bool(after) and len(models) == 1
            refuse("call", workflow=self.name, call=call, trained=trained, **shown)
        self.order()

    def streaming(self, sources: Sequence[CallKind], targets: Sequence[CallKind]) -> Self:
        """The workflow with grain `sample` on every edge of the step from calls of one kind to calls of another.

        A call that takes responses as they come waits at no barrier.
        """

        def streams(edge: Edge) -> bool:
            ends = self.call(edge.source).kind in sources and self.call(edge.target).kind in targets
            return ends and edge.lag == 0 and not edge.barrier

        return self._streamed(streams, grain="sample")

    def without_barriers(self) -> Self:
        """The workflow with the edges that carry something: no call waits for one whose results it does not use."""
        return replace(self, edges=tuple(edge for edge in self.edges if not edge.barrier))

    def in_windows(self, windows: int) -> Self:
        """The workflow that trains on its batch in so many equal parts, the first while the last is generated."""
        prepared: tuple[CallKind, ...] = ("inference", "train")
        early = self.streaming(["generate"], ["reward", *prepared]).streaming(["reward", "inference"], prepared)
        return replace(early.without_barriers(), windows=windows)

    def without(self, names: Collection[str]) -> Self:
        """The workflow without these calls, and the weight syncs that bring them weights alone."""
        idle = {c.name for c in self.calls if c.kind == "sync" and set(self.beside(c.name)[1]) <= set(names)}
        gone = {*names, *idle}
        edges = tuple(e for e in self.edges if e.source not in gone and e.target not in gone)
        return replace(self, calls=tuple(call for call in self.calls if call.name not in gone), edges=edges)

    def in_chunks(self, models: Sequence[str], chunk_tokens: int) -> Self:
        """The workflow with grain `chunk` on every edge of the step from a generate to an inference call of `models`.

        Raises `ConfigError` if there is none.
        """

        def streams(edge: Edge) -> bool:
            source, target = self.call(edge.source), self.call(edge.target)
            return edge.lag == 0 and (source.kind, target.kind) == ("generate", "inference") and target.model in models

        if not any(streams(edge) for edge in self.edges):
            known = sorted({call.model for call in self.calls if call.kind == "inference"})
            raise ConfigError(
                f"workflow {self.name}: no inference call of {' or '.join(models)} takes responses from generation "
                f"(its inference calls are of {', '.join(known) or 'no model'})"
            )
        return self._streamed(streams, grain="chunk", chunk_tokens=chunk_tokens)

    def _streamed(self, streams: Callable[[Edge], bool], **changes: Any) -> Self:
        """The workflow with these changes of the edges that `streams` picks, and no barrier before their targets."""
        early = {edge.target for edge in self.edges if streams(edge)}
        kept = (edge for edge in self.edges if not (edge.barrier and edge.target in early))
        return replace(self, edges=tuple(replace(edge, **changes) if streams(edge) else edge for edge in kept))

    @property
    def overlap(self) -> int:
        """Steps that may run beside another: 0 if each needs the result of the step before."""
        return max((edge.lag - 1 for edge in self.edges if edge.lag), default=0)

    @property
    def generating(self) -> tuple[Call, ...]:
        """The calls that generate."""
        return tuple(call for call in self.calls if call.kind == "generate")

    @property
    def baseline_responses(self) -> int:
        """To each prompt, beside those that are trained on."""
        return sum(call.baselines for call in self.generating)

    def samples(self, name: str, responses: int) -> range:
        """Which of a prompt's responses, by number, a generate call makes, where `responses` are trained on."""
        rest = responses - sum(call.responses or 0 for call in self.generating)
        first = 0
        for call in self.generating:
            made = (rest if call.responses is None else call.responses) + call.baselines
            if call.name == name:
                return range(first, first + made)
            first += made
        raise ConfigError(f"workflow {self.name}: {name} generates nothing")

    def takes(self, name: str) -> frozenset[str]:
        """The generate calls whose responses the call `name` works on, from them or by way of others."""
        before = (e.source for e in self.into(name) if e.lag == 0 and not e.barrier)
        return frozenset().union(*({b} if self.call(b).kind == "generate" else self.takes(b) for b in before))

    def call(self, name: str) -> Call:
        """The call of that name; raises `ConfigError` if there is none."""
        for call in self.calls:
            if call.name == name:
                return call
        raise ConfigError(f"workflow {self.name} has no call {name!r}")

    def in_pieces(self, name: str) -> bool:
        """Whether a call takes responses as they come, and works on them piece by piece."""
        pieces = self.call(name).kind in ("inference", "train") and not self.windows
        return pieces and any(edge.grain == "sample" for edge in self.into(name))

    def into(self, name: str) -> tuple[Edge, ...]:
        """The edges that end in the call `name`."""
        return tuple(edge for edge in self.edges if edge.target == name)

    def beside(self, name: str) -> tuple[list[str], list[str]]:
        """The calls before and after the call `name`, in any step."""
        before = [edge.source for edge in self.edges if edge.target == name]
        return before, [edge.target for edge in self.edges if edge.source == name]

    def order(self) -> tuple[str, ...]:
        """Call names, each after those it needs within a step; raises `ConfigError` if they wait for each other."""
        needs = {c.name: {e.source for e in self.into(c.name) if e.lag == 0} for c in self.calls}
        ordered: list[str] = []
        while needs:
            ready = [name for name, sources in needs.items() if sources <= set(ordered)]
            if not ready:
                raise ConfigError(f"workflow {self.name}: {', '.join(sorted(needs))} wait for each other")
            ordered += ready
            for name in ready:
                del needs[name]
        return tuple(ordered)
