"""KV pages that requests share, and that outlive them: prefix caching.

docs/engine.md has the rules, and which engine has them.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import groupby
from operator import itemgetter

from rlsim.sim.request import Request

#: A prompt: its position, and its tokens.
PromptKey = tuple[int, int]


class PrefixCache:
    """What is in a replica's KV cache beyond what each request holds for itself, in pages of `page_tokens` tokens.

    A request that is admitted holds the full pages of its prompt together with others of that prompt, but for the page
    with the prompt's last token. Pages that nobody holds stay until `evict` takes them, the least recently used first
    and of a context the last ones first.
    """

    __slots__ = ("_holders", "_idle", "_left", "_page_tokens", "_pages", "boundary", "idle_pages", "shared_pages")

    def __init__(self, page_tokens: int) -> None:
        self.shared_pages = 0  # pages that requests hold together, counted for each but the first
        self.idle_pages = 0  # pages that nobody holds
        self._page_tokens = page_tokens
        self._pages: dict[PromptKey, int] = {}  # of a prompt, from its start, that are here or in the next iteration
        self._holders: dict[PromptKey, int] = {}  # requests of the prompt that run or are being prefilled
        #: Pages that nobody holds, the least recently used first: of a prompt, or by request those that follow it.
        self._idle: OrderedDict[PromptKey | int, int] = OrderedDict()
        self.boundary = 0  # number of the iteration boundary
        #: Who has left: boundary, admission number, request, pages after its prompt, and the prompt if it was the last.
        self._left: list[tuple[int, int, int, int, PromptKey | None]] = []

    def find(self, request: Request) -> tuple[int, int]:
        """Pages of a waiting request's context that are here, and how many of them others hold now."""
        key = request.position, request.prompt_tokens
        pages = self._pages.get(key, 0)
        found = pages
        if request.generated and pages == (request.prompt_tokens - 1) // self._page_tokens:
            found += self._idle.get(request.id, 0)
        return found, pages if pages and self._holders[key] else 0

    def hold(self, request: Request, fills: bool) -> None:
        """A request is admitted, and holds the pages that are here of its context.

        It fills the others of its prompt with the next iteration, or `fills` none for now.
        """
        key = request.position, request.prompt_tokens
        pages = self._pages.get(key)
        if pages is None:
            self._pages[key] = request.shared_pages = (request.prompt_tokens - 1) // self._page_tokens if fills else 0
            self._holders[key] = 1
        else:
            if self._holders[key]:
                self.shared_pages += pages
            elif pages:
                self.idle_pages -= self._idle.pop(key)
            self._holders[key] += 1
            request.shared_pages = pages
            if fills:
                self.fill(request)
        if request.generated:
            self.idle_pages -= self._idle.pop(request.id, 0)

    def fill(self, request: Request) -> None:
        """All pages of its prompt are in the cache by its hand, or will be with the next iteration."""
        key = request.position, request.prompt_tokens
        most = (request.prompt_tokens - 1) // self._page_tokens
        self.shared_pages += most - request.shared_pages - (most - self._pages[key])
        self._pages[key] = request.shared_pages = most

    def release(self, request: Request, computed_tokens: int) -> None:
        """A request lets go of its pages; the KV of so many tokens of its context is there."""
        key = request.position, request.prompt_tokens
        page, shared = self._page_tokens, request.shared_pages
        computed = computed_tokens // page
        own_pages = max(computed - (request.prompt_tokens - 1) // page, 0)
        self._holders[key] = holders = self._holders[key] - 1
        if holders:
            self.shared_pages -= shared
        else:
            self.shared_pages += self._pages[key] - shared
            if computed < shared:  # it leaves before the iteration in which it was to fill them
                self._pages[key] = computed
            self.idle_pages += self._pages[key]
        self.idle_pages += own_pages
        self._left.append((self.boundary, request.order, request.id, own_pages, None if holders else key))

    def settle(self) -> None:
        """Requests have left at boundaries that are over: what they held last is what was used last.

        Of a boundary first what follows the prompts, in the order in which its requests were admitted, then the
        prompts by position.
        """
        self._left.sort()
        for _, at_boundary in groupby(self._left, itemgetter(0)):
            prompts = []
            for _, _, request, pages, prompt in at_boundary:
                if pages:
                    self._idle[request] = pages
                if prompt:
                    prompts.append(prompt)
            for prompt in sorted(prompts):
                if pages := self._pages[prompt]:
                    self._idle[prompt] = pages
                else:
                    del self._pages[prompt], self._holders[prompt]
        self._left.clear()

    def evict(self, free_pages: int) -> None:
        """Keep no more than so many pages that nobody holds."""
        if self._left:
            self.settle()
        excess = self.idle_pages - max(free_pages, 0)
        while excess > 0:
            of, pages = next(iter(self._idle.items()))
            left = max(pages - excess, 0)
            excess -= pages - left
            self.idle_pages -= pages - left
            if left:
                self._idle[of] = left
            else:
                del self._idle[of]
            if isinstance(of, tuple):
                self._pages[of] = left
                if not left:
                    del self._pages[of], self._holders[of]

    def flush(self) -> None:
        """Forget everything; nobody holds any of it."""
        for kept in (self._pages, self._holders, self._idle, self._left):
            kept.clear()
        self.shared_pages = self.idle_pages = 0
