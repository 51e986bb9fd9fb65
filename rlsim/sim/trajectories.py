"""The trajectories of a rollout that are at their tool calls: unfinished, and at no replica."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from operator import attrgetter
from typing import Any
from weakref import proxy

import simpy

from rlsim.sim.control import RolloutControl, asked
from rlsim.sim.environment import Environments
from rlsim.sim.moment import DEAL, at
from rlsim.sim.replica import Replica
from rlsim.sim.request import AGENT, Request
from rlsim.sim.view import RolloutState, ToolCallView, view_of


class Trajectories(Container[int]):
    """Sends trajectories that leave a replica to their tools, and hands them back; it contains the ids of those away.

    `control` may say for how long the KV cache is pinned meanwhile.
    """

    def __init__(self, rollout: RolloutState, environments: Environments, control: RolloutControl) -> None:
        self._rollout: Any = proxy(rollout)  # the `Rollout`, which holds this one: a cycle would keep its requests
        self._env, self._environments = rollout.env, environments
        self._control = control if asked(control, "keep_kv_s") else None
        self._away: dict[int, Request] = {}  # at tool calls, or waiting for the others' to end
        self._over: list[Request] = []  # of these, those that wait for the others'
        #: At work, by the one that waits for them, with the seconds until that is told.
        self._agents: dict[Request, dict[Request, float]] = {}
        self._waits: dict[Request, float] = {}  # for these alone: since when
        self.sticky = environments.config.returns == "same_replica"

    def __contains__(self, id_: object) -> bool:
        return id_ in self._away

    def leave(self, replica: Replica, left: Sequence[Request]) -> list[Request]:
        """Of those that leave a replica the ones that call a tool; the others give their sandboxes back."""
        acting = [request for request in left if request.acts]
        for request in acting:
            request.end_run(replica.version, request.generated)
            self._away[request.id] = request
            self._pin(replica, request)
        self._environments.leave(request for request in left if not request.acts)
        for agent in [one for one in left if one.parent and one.finished]:
            told_s = self._agents.get(agent.parent, {}).get(agent, 0.0)  # type: ignore[arg-type]
            at(self._env, self._env.now + told_s, lambda _, a=agent: self._told(a))  # type: ignore[misc]
        return acting

    def _pin(self, replica: Replica, request: Request) -> None:
        """Keep the KV cache of a trajectory at its tool call, for as long as is wanted."""
        seconds, number = self._environments.config.keep_kv_s, request.called
        if self._control:
            mean_s = (request.tool_s + request.tool_wait_s) / number if number else 0.0
            view = view_of(request, request.context, running=False)
            wanted = self._control.keep_kv_s(
                ToolCallView(view, number, mean_s, self._environments.mean_s, *replica.room)
            )
            seconds = seconds if wanted is None else wanted

        def over(_: simpy.Event) -> None:
            if request.id in self._away and request.called == number:
                replica.unpin(request)

        if seconds:
            replica.pin(request)
            if seconds < math.inf:
                at(self._env, self._env.now + seconds, over)

    def resume(self, requests: Sequence[Request]) -> list[Request]:
        """Requests of an earlier step go on: those that were at a tool call begin it again; returns the others."""
        acting = [request for request in requests if request.acts]
        self._away |= {request.id: request for request in acting}
        self.call(acting)
        return [request for request in requests if request.id not in self._away]

    def call(self, acting: Sequence[Request], replica: Replica | None = None) -> None:
        """They begin their tool calls, at a boundary of the replica that they have left."""
        for request in acting:
            sticks = replica and self.sticky and not request.tool_calls[request.called].agents
            soon = replica.at_boundary if replica and sticks else None
            self._environments.call(request, self._begin_agents, self._observed, soon)
        self.end_turn()

    def _begin_agents(self, request: Request) -> None:
        """Its tool call has begun, and with it the work of sub-agents."""
        for number, called in enumerate(request.tool_calls[request.called].agents, 1):
            prompt, response, calls, delay_s, told_s = called
            id_ = request.root.id + next(self._environments.agents) * AGENT
            draws = request.acceptance and request.acceptance.of_sub_agent()
            path = (*request.path, request.called + 1, number)
            agent = Request(id_, id_, prompt, response, acceptance=draws, tool_calls=calls, parent=request, path=path)
            self._agents.setdefault(request, {})[agent] = told_s
            at(self._env, self._env.now + delay_s, lambda _, a=agent: self._begin(a))  # type: ignore[misc]

    def _begin(self, agent: Request) -> None:
        if agent in self._agents.get(agent.parent, ()):  # type: ignore[arg-type]
            self._rollout.begin(agent)

    def _told(self, agent: Request) -> None:
        """The one that waits for this sub-agent is told that it is done."""
        parent = agent.parent
        if parent is None or agent not in (agents := self._agents.get(parent, {})):
            return
        del agents[agent]
        if not agents:
            del self._agents[parent]
            if parent in self._waits:
                parent.tool_s += self._env.now - self._waits.pop(parent)
                self._go_on(parent)

    def _observed(self, request: Request, lost: bool) -> None:
        """A tool call is over, or its sandbox is lost."""
        if lost:
            self._lose(request)
        elif request in self._agents:
            self._waits[request] = self._env.now
            self.end_turn()
        else:
            self._go_on(request)

    def _lose(self, request: Request) -> None:
        config = self._environments.config
        if config.on_failure == "drop" or request.restarts == config.retries:
            self._rollout.drop([request.id])
            self._rollout.ask()
        else:
            self._rollout.drop([agent.id for agent in self._agents.pop(request, ())])
            self._environments.leave([request])
            self._go_on(request, again=True)

    def _go_on(self, request: Request, *, again: bool = False) -> None:
        """With what it has observed, or `again` from its first turn on."""
        if again:
            request.restart()
        else:
            request.observe()
        if self._environments.config.turns == "together":
            self._over.append(request)
            self.end_turn()
        else:
            self._hand_back([request])

    def end_turn(self, last: simpy.Event | None = None) -> None:
        """Where trajectories take turns together: the last one has perhaps ended its own.

        Those that wait for sub-agents may be told of them at this very moment: with them it is looked at when that is
        over (`last`).
        """
        if not self._over or len(self._over) + len(self._waits) < self._rollout.unfinished:
            return
        if self._waits and last is None:
            at(self._env, self._env.now, self.end_turn, DEAL)
        else:
            over, self._over = sorted(self._over, key=attrgetter("id")), []
            self._hand_back(over)

    def _hand_back(self, requests: Sequence[Request]) -> None:
        """They go on, but for those whose budget is used up."""
        for request in requests:
            del self._away[request.id]
        self._environments.leave(request for request in requests if request.at_limit)
        self._rollout.come_back(requests)

    def with_agents(self, ids: Iterable[int]) -> dict[int, None]:
        """These, and the sub-agents that work for them."""
        found = dict.fromkeys(ids)
        for request, agents in self._agents.items():  # of a sub-agent after those of the one that waits for it
            if request.id in found:
                found |= dict.fromkeys(agent.id for agent in agents)
        return found

    def drop(self, ids: Iterable[int]) -> list[Request]:
        """Those of these that are away do not come back; they still hold their sandboxes."""
        dropped = [self._away.pop(id_) for id_ in ids if id_ in self._away]
        for request in dropped:
            self._agents.pop(request, None)
            self._waits.pop(request, None)
        self._over = [request for request in self._over if request.id in self._away]
        return dropped

    def forget(self, requests: Iterable[Request]) -> None:
        """Generation is over: all its requests give their sandboxes back."""
        self._environments.leave(requests)
        self._away, self._over, self._agents, self._waits = {}, [], {}, {}
