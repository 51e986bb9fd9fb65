"""KV pages that requests share, and that outlive them: prefix caching, and KV offloading to host memory.

docs/engine.md has the rules, and which engine has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from operator import attrgetter

from rlsim.sim.request import Cached, Request

#: A prompt: its position, and its tokens.
PromptKey = tuple[int, int]


_NOTHING = Cached(0, 0, -1)
#: Entry of a heap of what nobody holds: since which boundary, and of a boundary first what follows the prompts, in the
#: order in which its requests were admitted (what was pinned first, by request), then the prompts by position.
_Idle = tuple[int, int, int, int, PromptKey | int, Cached]


class PrefixCache:
    """What is in a replica's KV cache beyond what each request holds for itself, in pages of `page_tokens` tokens.

    A request that is admitted holds the full pages of its prompt together with others of that prompt, but for the page
    with the prompt's last token. Pages that nobody holds stay until `evict` takes them, the least recently held first
    and of a context the last ones first. Then `host_pages` pages stay in host memory, which lets go by the same order.
    """

    def __init__(self, page_tokens: int, host_pages: int = 0) -> None:
        self.shared_pages = 0  # pages that requests hold together, counted for each but the first
        self.idle_pages = 0  # pages that nobody holds
        self.offloaded_pages = 0  # pages that are in host memory only
        self.boundary = 0  # number of the iteration boundary
        self._page_tokens = page_tokens
        self._host_pages = host_pages
        self._cached: dict[PromptKey | int, Cached] = {}  # of a prompt, or by request those that follow its prompt
        self._idle: list[_Idle] = []  # entries of what is held again are stale and skipped
        self._offloaded: list[_Idle] = []  # the same of what is in host memory

    def find(self, request: Request) -> tuple[int, int, int]:
        """Pages of a waiting request's context that are here, how many of them others hold now, and those that follow
        them and are in host memory only."""
        prompt = self._cached.get((request.position, request.prompt_tokens), _NOTHING)
        found, offloaded = prompt.pages, prompt.offloaded
        if request.generated and found + offloaded == (request.prompt_tokens - 1) // self._page_tokens:
            own = self._cached.get(request.kv_id, _NOTHING)
            offloaded += own.offloaded
            found += 0 if prompt.offloaded else own.pages
        return found, prompt.pages if prompt.holders else 0, offloaded

    def hold(self, request: Request, fills: bool) -> None:
        """A request is admitted, and holds the pages that are here of its context, or come from host memory.

        It fills the others of its prompt with the next iteration, or `fills` none for now.
        """
        key = request.position, request.prompt_tokens
        prompt = self._cached.get(key)
        if prompt is None:
            request.shared_pages = (request.prompt_tokens - 1) // self._page_tokens if fills else 0
            request.prefix = self._cached[key] = Cached(request.shared_pages, 1, 0)
        else:
            request.prefix = prompt
            if prompt.holders:
                self.shared_pages += prompt.pages
            else:
                self.idle_pages -= prompt.pages
                if prompt.offloaded:
                    self.offloaded_pages -= prompt.offloaded
                    prompt.pages += prompt.offloaded
                    prompt.offloaded = 0
            request.shared_pages = prompt.pages
            prompt.holders += 1
            if fills:
                self.fill(request)
        if request.generated:
            own = self._cached.pop(request.kv_id, None)
            if own:
                own.holders = 1
                self.idle_pages -= own.pages
                self.offloaded_pages -= own.offloaded

    def fill(self, request: Request) -> None:
        """All pages of its prompt are in the cache by its hand, or will be with the next iteration."""
        prompt = request.prefix
        self.shared_pages += prompt.pages - request.shared_pages  # its copy of what others have filled meanwhile
        prompt.pages = request.shared_pages = (request.prompt_tokens - 1) // self._page_tokens

    def forgo(self, request: Request) -> Cached:
        """A request lets go of the pages of its prompt, which are returned."""
        prompt = request.prefix
        prompt.holders -= 1
        self.shared_pages -= request.shared_pages if prompt.holders else request.shared_pages - prompt.pages
        return prompt

    def release(self, request: Request, computed_tokens: int) -> None:
        """A request lets go of its pages; the KV of so many tokens of its context is there."""
        prompt, pages, now = self.forgo(request), computed_tokens // self._page_tokens, self.boundary
        if not prompt.holders:
            if pages < request.shared_pages:  # it leaves before the iteration in which it was to fill them
                prompt.pages = pages
            prompt.idle_since = now
            self.idle_pages += prompt.pages
            heappush(self._idle, (now, 1, request.position, 0, (request.position, request.prompt_tokens), prompt))
        own_pages = pages - (request.prompt_tokens - 1) // self._page_tokens
        if own_pages > 0:
            self.idle_pages += own_pages
            own = self._cached[request.kv_id] = Cached(own_pages, 0, now)
            heappush(self._idle, (now, 0, request.order, request.id, request.kv_id, own))

    def evict(self, free_pages: int) -> None:
        """Keep no more than so many pages that nobody holds; the others go to host memory."""
        excess = self.idle_pages - max(free_pages, 0)
        if excess <= 0:
            return
        self.idle_pages -= excess
        for entry, pages in _oldest(self._idle, attrgetter("pages"), excess):
            *_, key, cached = entry
            cached.pages -= pages
            if self._host_pages:
                cached.offloaded += pages
                heappush(self._offloaded, entry)
            elif not cached.pages:
                self._forget(key, cached)
        if self._host_pages:
            self._offload(excess)

    def _offload(self, pages: int) -> None:
        """So many pages have gone to host memory, which lets go of what it has no room for."""
        self.offloaded_pages += pages
        excess = self.offloaded_pages - self._host_pages
        self.offloaded_pages -= max(excess, 0)
        for (*_, key, cached), gone in _oldest(self._offloaded, attrgetter("offloaded"), excess):
            cached.offloaded -= gone
            if not (cached.pages or cached.offloaded):
                self._forget(key, cached)

    def _forget(self, key: PromptKey | int, cached: Cached) -> None:
        del self._cached[key]
        cached.idle_since = -1

    def flush(self) -> None:
        self._cached.clear()
        self._idle.clear()
        self._offloaded.clear()
        self.shared_pages = self.idle_pages = self.offloaded_pages = 0


def _oldest(idle: list[_Idle], pages_of: Callable[[Cached], int], excess: int) -> Iterator[tuple[_Idle, int]]:
    """The first pages of a heap, so many: their entries, and how many of each. Those that go whole leave the heap."""
    while excess > 0:
        since, *_, cached = entry = idle[0]
        pages = pages_of(cached)
        if cached.holders or cached.idle_since != since:
            heappop(idle)
            continue
        if pages <= excess:
            heappop(idle)
        yield entry, min(pages, excess)
        excess -= pages
