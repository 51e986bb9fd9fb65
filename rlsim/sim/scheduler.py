"""What a replica runs next: admission (pinned, by priority, first come first served), chunks of prompts, preemption.

docs/engine.md has the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain
from math import isnan

from rlsim.cost.step import Chunk
from rlsim.sim.batch import RunningBatch
from rlsim.sim.prefix_cache import PrefixCache
from rlsim.sim.recorder import Stays
from rlsim.sim.request import NAN, EngineConfig, Request

#: Admissions that are remembered in any case; beyond, those of requests that have left are dropped now and then.
FEW = 1024


class Scheduler:
    """The requests of a replica that do not decode: those waiting, and those being prefilled.

    It admits into `batch`, whose requests share `capacity_pages` KV pages with what is being prefilled (counted in its
    units); `host_pages` more pages stay in host memory. `numbers` are those of admissions, unique over all replicas
    that a request may move between; `stays` notes down preemptions. With `once` all requests arrive together, and where
    each has a prompt of its own, none can find anything in the KV cache before the first one is preempted: until then
    there is no prefix cache to keep.
    """

    def __init__(
        self,
        batch: RunningBatch,
        config: EngineConfig,
        capacity_pages: int,
        numbers: Iterator[int],
        stays: Stays,
        replica: int,
        tp: int,
        once: bool = False,
        host_pages: int = 0,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []  # in admission order
        #: Trajectories that keep their KV cache here during a tool call: who holds it for them, and its pages.
        self.pinned: dict[Request, tuple[Request, int]] = {}
        self._unpinned: set[Request] = set()  # of these, those just admitted
        self.preemptions = 0
        self.hit_tokens = 0  # that prefills found in the prefix cache
        self.loading_pages = 0  # from host memory, with the coming prefill iteration
        self.loaded_tokens = 0
        self._host_pages = host_pages
        self._batch, self._config = batch, config
        self._numbers, self._stays, self._replica, self._tps = numbers, stays, replica, (tp,)
        self._watermark_pages = config.watermark_pages(capacity_pages) * batch.page_units
        self._prefill_pages = 0
        self._caches = config.enable_prefix_caching and batch.plain  # once there may be something to find
        self._hits_scheduled = config.prefix_hits != "prefilled"
        self._kv_arrived = self._by_priority = False
        self._admitted: list[tuple[int, Request]] = []  # a stack by admission number, stale entries and all
        self._most_admitted = FEW  # entries before the stale ones are dropped
        if not once:
            self._begin_to_cache()

    @property
    def size(self) -> int:
        return len(self.waiting) + len(self.prefilling)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the contexts that are decoded, what they share counted once."""
        batch = self._batch
        if not batch.cache:
            return batch.tokens
        shared = batch.cache.shared_pages - sum([r.shared_pages for r in self.prefilling])
        return batch.tokens - shared * self._config.page_tokens

    def arrive(self, requests: Sequence[Request]) -> None:
        self._kv_arrived |= any(r.kv_arrived for r in requests)
        self.waiting.extend(requests)
        self._by_priority |= any(r.priority for r in requests)
        if self.pinned or self._by_priority:  # the pinned first: what they keep is of use to nobody else
            self.waiting = deque(sorted(self.waiting, key=lambda r: (r not in self.pinned, r.priority)))
        if self._caches and len({(r.position, r.prompt_tokens) for r in requests}) < len(requests):
            self._begin_to_cache()

    def _begin_to_cache(self) -> None:
        """From now on a request may find something in the KV cache: what is there now are prompts of one each."""
        if self._caches:
            self._caches = False
            self._batch.cache = PrefixCache(self._config.page_tokens, self._host_pages)
            for request in chain(self._batch, self.prefilling):
                self._batch.cache.hold(request, fills=True)

    def schedule(self, now: float) -> list[Chunk]:
        """Preempt and admit at a boundary: a chunk of each of the first prefilling, none if the batch decodes alone."""
        batch = self._batch
        if batch.pages + self._prefill_pages > batch.room_pages:
            self._preempt(now)
        if batch.size or self.size:  # else what more is let go at this moment leaves with what has just left
            self.next_boundary()
        self.trim()  # what runs has its pages, also of pins that gave way, before who waits looks for some
        if not (self.waiting or self.prefilling):
            return []
        chunks = self._admit(now)
        self.next_boundary()  # pins that gave way were let go before what leaves next
        return chunks

    def next_boundary(self) -> None:
        """What is let go from now on leaves after what was let go before."""
        if self._batch.cache:
            self._batch.cache.boundary += 1

    def pin(self, request: Request) -> None:
        """A trajectory that has just left for a tool call keeps the full pages of its context."""
        cache = self._batch.cache
        if cache and (pages := cache.find(request)[0]):
            holder = copy(request)  # it may be elsewhere when these are let go
            cache.hold(holder, fills=False)
            self.pinned[request] = holder, pages
            self._batch.pinned_pages += pages

    def unpin(self, request: Request) -> None:
        """Others may have its pages."""
        if request in self.pinned:
            holder, pages = self.pinned.pop(request)
            self._batch.pinned_pages -= pages
            self._batch.cache.release(holder, pages * self._config.page_tokens)  # type: ignore[union-attr]

    def trim(self) -> None:
        batch, cache = self._batch, self._batch.cache
        if cache and cache.idle_pages + batch.pages + self._prefill_pages > batch.room_pages:
            cache.evict(self.free_pages)

    @property
    def free_pages(self) -> int:
        return self._batch.room_pages - self._batch.pages - self._prefill_pages

    def prefilled(self, work: Sequence[Chunk], now: float) -> list[Request]:
        """An iteration with these chunks is over: those whose prompts are complete, each with one token more."""
        complete, cache = [], self._batch.cache
        if self.loading_pages:
            self.loaded_tokens += self.loading_pages * self._config.page_tokens
            self.loading_pages = 0
        for request, chunk in zip(self.prefilling, work, strict=False):
            request.prefill_left -= chunk.new_tokens
            if request.prefill_left:
                continue
            if cache:
                self.hit_tokens += request.hit_tokens
                if not self._hits_scheduled:
                    cache.fill(request)
            request.generated += 1
            request.decoding_at = now
            if isnan(request.first_token_at):
                request.first_token_at = now
            complete.append(request)
        self.prefilling = [request for request in self.prefilling if request.prefill_left]
        self._prefill_pages = sum(self._batch.pages_of(request.context) for request in self.prefilling)
        return complete

    def unadmit(self) -> None:
        """Undo the admission of those whose prefill was cancelled before it began."""
        fresh = [r for r in self.prefilling if r.prefill_left == r.context - r.hit_tokens]
        for request in reversed(fresh):
            self._stop_prefill(request)
            if request.started_at == request.admitted_at:
                request.started_at = NAN
            request.admitted_at = NAN
            self.waiting.appendleft(request)
        for request in fresh:
            if request in self._unpinned:
                self.pin(request)

    def remove(self, ids: frozenset[int]) -> list[Request]:
        """Take these requests out: those that were being prefilled, then those that were waiting."""
        others = [r for r in chain(self.prefilling, self.waiting) if r.id in ids]
        for request in others:
            if request.order:
                self._stop_prefill(request)
        self.waiting = deque(r for r in self.waiting if r.id not in ids)
        return others

    def lose_kv(self) -> None:
        """Let go of the requests that were being prefilled, and of all that the KV cache holds."""
        self.prefilling, self._prefill_pages = [], 0
        self.pinned, self._batch.pinned_pages = {}, 0
        if self._batch.cache:
            self._batch.cache.flush()
        self.clear()

    def clear(self) -> None:
        self._admitted = []

    def _stop_prefill(self, request: Request) -> None:
        self.prefilling.remove(request)
        if self._batch.cache:
            self._batch.cache.release(request, request.hit_tokens)
        self._prefill_pages -= self._batch.pages_of(request.context)
        request.order = request.prefill_left = 0

    def _preempt(self, now: float) -> None:
        """Unpin, then preempt, the most recent until the pages suffice."""
        self._begin_to_cache()
        if self._batch.cache:
            self._batch.cache.boundary += 1  # what has just left on its own was let go before
        while self._batch.pages + self._prefill_pages > self._batch.room_pages:
            if self.pinned:
                self.unpin(next(reversed(self.pinned)))
                continue
            order, request = self._admitted.pop()
            if request.order != order:
                continue
            if request.prefill_left:
                self._stop_prefill(request)
            else:
                self._batch.leave([request])
            request.preemptions += 1
            self.preemptions += 1
            self._stays.add([request], now, "preempted")
            request.arrived_at = now
            self.waiting.appendleft(request)

    def _admit(self, now: float) -> list[Chunk]:
        """Admit from the waiting queue and return this iteration's work: a chunk of each of the first prefilling."""
        config, chunked = self._config, self._config.chunked_prefill
        self._unpinned.clear()
        budget = config.max_num_batched_tokens
        if chunked:
            budget = max(budget - self._batch.size, 1)
        left = budget - sum([r.prefill_left for r in self.prefilling])
        batch, cache = self._batch, self._batch.cache
        if cache and self._hits_scheduled and left >= 0:
            for request in self.prefilling:
                cache.fill(request)
        free = self.free_pages
        places = config.max_num_seqs - batch.size - len(self.prefilling)
        page, plain, waiting, watermark = config.page_tokens, batch.plain, self.waiting, self._watermark_pages
        found = held = offloaded = 0
        earliest = waiting[0].micro_batch if waiting else 0
        if earliest:
            earliest = min((r.micro_batch for r in chain(batch, self.prefilling)), default=earliest)
        while waiting and places > 0:
            request = waiting[0]
            if request.micro_batch > earliest:
                break
            context = request.prompt_tokens + request.generated
            pages = -(-context // page) if plain else batch.pages_of(context)
            if request in self.pinned:
                found = held = self.pinned[request][1]
                offloaded = 0
            elif cache:
                found, held, offloaded = cache.find(request)
                found += offloaded
            if pages - held > (free - watermark if batch.size or self.prefilling else free):
                if batch.size or self.prefilling or not self.pinned:
                    break
                self.unpin(next(reversed(self.pinned)))  # else nothing would run, perhaps for ever
                free = self.free_pages
                continue
            needed = context - found * page
            if not request.kv_arrived and (left <= 0 if chunked else left < needed and left < budget):
                break
            waiting.popleft()
            if request in self.pinned:
                self.unpin(request)
                self._unpinned.add(request)
            places, earliest = places - 1, request.micro_batch
            request.order = order = next(self._numbers)
            self._admitted.append((order, request))
            if len(self._admitted) > self._most_admitted:
                # Let go of requests that have left; in a rollout that never ends there would be more and more.
                self._admitted = [entry for entry in self._admitted if entry[1].order == entry[0]]
                self._most_admitted = 2 * len(self._admitted) + FEW
            request.admitted_at, request.start_tokens = now, context
            if isnan(request.started_at):
                request.started_at = now
            request.replica = self._replica
            if request.tps[-1:] != self._tps:
                request.tps += self._tps
            free -= pages - held
            if cache:
                cache.hold(request, request.kv_arrived or (self._hits_scheduled and not (chunked and needed > left)))
                request.hit_tokens = found * page
                if cache.idle_pages > free:
                    cache.evict(free)
            if request.kv_arrived:
                request.kv_arrived = False
                request.decoding_at = now
                batch.join([request])
                continue
            if offloaded:
                self.loading_pages += offloaded
            request.prefill_left = needed
            self.prefilling.append(request)
            self._prefill_pages += pages
            left -= needed
        if self._kv_arrived:  # KV that found no place on arrival is dropped
            self._kv_arrived = False
            for request in waiting:
                request.kv_arrived = False
        if not self.prefilling:
            return []
        return self._work(budget) if chunked else [Chunk(r.prefill_left, r.hit_tokens) for r in self.prefilling]

    def _work(self, budget: int) -> list[Chunk]:
        """A chunk of each of the first prefilling, so many tokens together."""
        work, left = [], budget
        for request in self.prefilling:
            tokens = min(request.prefill_left, left)
            if tokens <= 0:
                break
            work.append(Chunk(tokens, request.context - request.prefill_left))
            left -= tokens
        return work
