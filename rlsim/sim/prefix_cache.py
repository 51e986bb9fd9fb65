"""KV pages that requests share, and that outlive them: prefix caching.

docs/engine.md has the rules, and which engine has them.
"""

from __future__ import annotations

from collections import OrderedDict

from rlsim.sim.request import Request


class Prompt:
    """The full pages of a prompt in the KV cache of one replica, but for the page with its last token."""

    __slots__ = ("computed", "holders", "key", "most_pages", "pages", "writer")

    def __init__(self, key: tuple[int, int], most_pages: int) -> None:
        self.key = key  # its position, and its tokens
        self.most_pages = most_pages
        self.pages = 0  # from its start, that are found
        self.computed = 0  # of these; the others are in the iteration that is about to begin
        self.writer: Request | None = None  # that computes those
        self.holders = 0  # requests that run or are being prefilled


class PrefixCache:
    """What is in a replica's KV cache beyond what each request holds for itself, in pages of `page_tokens` tokens.

    A request that is admitted holds the pages of its prompt together with others of that prompt. Pages that nobody
    holds stay until `evict` takes them, the least recently used first and of a context the last ones first.
    """

    __slots__ = ("_idle", "_left", "_page_tokens", "_prompts", "_prompts_left", "idle_pages", "shared_pages")

    def __init__(self, page_tokens: int) -> None:
        self.shared_pages = 0  # pages that requests hold together, counted for each but the first
        self.idle_pages = 0  # pages that nobody holds
        self._page_tokens = page_tokens
        self._prompts: dict[tuple[int, int], Prompt] = {}
        #: Pages that nobody holds, the least recently used first: of a prompt, or by request those that follow it.
        self._idle: OrderedDict[Prompt | int, int] = OrderedDict()
        self._left: list[tuple[int, int, int]] = []  # at this boundary: admission number, request, pages of its own
        self._prompts_left: list[Prompt] = []  # at this boundary, by their last holder

    def find(self, request: Request) -> tuple[int, int]:
        """Pages of a waiting request's context that are here, and how many of them others hold now."""
        prompt = self._prompts.get((request.position, request.prompt_tokens))
        if prompt is None:  # or too short for a page
            return self._idle.get(request.id, 0) if request.prompt_tokens <= self._page_tokens else 0, 0
        found = prompt.pages
        if found == prompt.most_pages:
            found += self._idle.get(request.id, 0)
        return found, prompt.pages if prompt.holders else 0

    def hold(self, request: Request) -> None:
        """A request is admitted, and holds the pages that are here of its context."""
        key = request.position, request.prompt_tokens
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = Prompt(key, (request.prompt_tokens - 1) // self._page_tokens)
        if prompt.holders:
            self.shared_pages += prompt.pages
        elif prompt.pages:
            self.idle_pages -= self._idle.pop(prompt)
        prompt.holders += 1
        if prompt.pages == prompt.most_pages:
            self.idle_pages -= self._idle.pop(request.id, 0)
        request.shared_pages = prompt.pages

    def fill(self, request: Request, computed: bool) -> None:
        """All pages of its prompt are in the cache by its hand, or will be with the next iteration."""
        prompt = self._prompts[request.position, request.prompt_tokens]
        most = prompt.most_pages
        if prompt.pages < most:
            self.shared_pages -= most - prompt.pages
            prompt.pages, prompt.writer = most, request
        self.shared_pages += most - request.shared_pages
        request.shared_pages = most
        if computed:
            prompt.computed, prompt.writer = most, None

    def release(self, request: Request, computed_tokens: int) -> None:
        """A request lets go of its pages; the KV of so many tokens of its context is there."""
        prompt = self._prompts[request.position, request.prompt_tokens]
        if prompt.writer is request:  # it leaves before the iteration that was to compute them
            self.shared_pages += prompt.pages - prompt.computed
            prompt.pages, prompt.writer = prompt.computed, None
        prompt.holders -= 1
        self.shared_pages -= request.shared_pages
        own_pages = computed_tokens // self._page_tokens - prompt.most_pages
        if own_pages > 0:
            self._left.append((request.order, request.id, own_pages))
        if not prompt.holders:
            self.shared_pages += prompt.pages
            self._prompts_left.append(prompt)

    def settle(self) -> None:
        """The boundary is over at which requests have left: what they held is what was used last.

        First what follows the prompts, in the order in which its requests were admitted, then the prompts by position.
        """
        if self._left:
            self._left.sort()
            for _, request, pages in self._left:
                self._idle[request] = pages
                self.idle_pages += pages
            self._left.clear()
        if self._prompts_left:
            self._prompts_left.sort(key=_key)
            for prompt in self._prompts_left:
                if prompt.pages:
                    self._idle[prompt] = prompt.pages
                    self.idle_pages += prompt.pages
                else:
                    del self._prompts[prompt.key]
            self._prompts_left.clear()

    def evict(self, free_pages: int) -> None:
        """Keep no more than so many pages that nobody holds."""
        excess = self.idle_pages - max(free_pages, 0)
        while excess > 0:
            of, pages = next(iter(self._idle.items()))
            gone = min(pages, excess)
            excess -= gone
            self.idle_pages -= gone
            if isinstance(of, Prompt):
                of.pages = of.computed = pages - gone
            if gone < pages:
                self._idle[of] = pages - gone
                continue
            del self._idle[of]
            if isinstance(of, Prompt):
                del self._prompts[of.key]

    def flush(self) -> None:
        """Forget everything; nobody holds any of it."""
        self._prompts.clear()
        self._idle.clear()
        self._left.clear()
        self._prompts_left.clear()
        self.shared_pages = self.idle_pages = 0


def _key(prompt: Prompt) -> tuple[int, int]:
    return prompt.key
