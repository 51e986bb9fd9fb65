"""A llama-like decoder stack under tensor parallelism, with a static KV cache: what whole steps are measured on.

The layers are Megatron's: query, key, value, gate and up weights are cut by output, output and down weights by input,
with an all-reduce after each half of a layer; embedding and head are cut over the vocabulary. Weights are random, and
the same for every degree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from rlsim.base.refusals import refuse
from rlsim.calibrate.measure.bench import captured
from rlsim.calibrate.measure.ranks import Ranks
from rlsim.errors import CalibrationError
from rlsim.models.layers import FullAttention
from rlsim.models.model import Model

ROTARY_BASE = 10_000.0
EPSILON = 1e-6  # of the norms


class Split(NamedTuple):
    """How a weight is cut over the ranks: along `axis`, each of its fused `parts` on its own; not at all if None."""

    shape: tuple[int, ...]
    axis: int | None
    parts: tuple[int, ...]

    def slice(self, full: torch.Tensor, tp: int, index: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rank `index`'s own copy of its share, in `out` if given."""
        if self.axis is None or tp == 1:
            return full.clone() if out is None else out.copy_(full)
        cuts = [part.chunk(tp, self.axis)[index] for part in torch.split(full, list(self.parts), self.axis)]
        return torch.cat(cuts, self.axis) if out is None else torch.cat(cuts, self.axis, out=out)


def weight_splits(model: Model) -> list[dict[str, Split]]:
    """The weights of every layer and, last, those around the layers; what is added up over ranks is cut along axis 1.

    Raises `CalibrationError` for a model that is more than llama-like blocks.
    """
    layer_attention = model.layer.attention
    whole_norms = isinstance(layer_attention, FullAttention) and layer_attention.whole_norms
    refuse("measured decoder", CalibrationError, model=model, whole_norms=whole_norms)
    attention = model.attention
    hidden, q, kv, width = model.hidden_size, attention.q_dim, attention.kv_dim, model.intermediate_size
    layer = {
        "attention_norm": Split((hidden,), None, ()),
        "qkv": Split((q + 2 * kv, hidden), 0, (q, kv, kv)),
        "o": Split((hidden, q), 1, (q,)),
        "mlp_norm": Split((hidden,), None, ()),
        "gate_up": Split((2 * width, hidden), 0, (width, width)),
        "down": Split((hidden, width), 1, (width,)),
    }
    if attention.qkv_bias:
        layer["qkv_bias"] = Split((q + 2 * kv,), 0, (q, kv, kv))
    if attention.head_norms:
        layer["q_norm"] = layer["k_norm"] = Split((model.head_dim,), None, ())
    table = Split((model.vocab_size, hidden), 0, (model.vocab_size,))
    around = {"embedding": table, "norm": Split((hidden,), None, ())}
    if not model.tie_word_embeddings:
        around["head"] = table
    return [*(dict(layer) for _ in range(model.num_hidden_layers)), around]


def random_weight(split: Split, seed: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """The whole of one weight: norms of one, else normal with variance 1 / inputs, so that activations keep their
    size."""
    if len(split.shape) == 1 and split.axis is None:
        return torch.ones(split.shape, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(split.shape, generator=generator, device=device, dtype=torch.float32)
    return weight.mul_(1.0 / math.sqrt(split.shape[-1])).to(dtype)


def random_weights(model: Model, tp: int, index: int, device: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Rank `index`'s slices of the model's random weights, by layer as in `weight_splits`.

    Raises `CalibrationError` unless every rank of `tp` gets the same whole share of the model.
    """
    check_degree(model, tp)
    return [
        {
            name: split.slice(random_weight(split, number * 100 + place, device, dtype), tp, index)
            for place, (name, split) in enumerate(layer.items())
        }
        for number, layer in enumerate(weight_splits(model))
    ]


def check_degree(model: Model, tp: int) -> None:
    """Raises `CalibrationError` unless every rank of `tp` gets the same whole share of the model."""
    counts = {
        "KV heads": model.num_key_value_heads,
        "heads": model.num_attention_heads,
        "MLP columns": model.intermediate_size,
        "tokens of the vocabulary": model.vocab_size,
    }
    for what, count in counts.items():
        if count % tp:
            raise CalibrationError(f"{model.name} at TP{tp}: {count} {what} do not divide evenly")


class KvCache:
    """A pool of fixed size, read as [layers, slots, tokens, KV heads, head size] for a degree.

    Of `slots` sequences of up to `max_tokens` a rank at TP 1; at a higher degree it has as many more slots as it has
    fewer heads, so a change of layout needs no other memory. It is written once, so that no page is missing later.
    """

    def __init__(self, model: Model, slots: int, max_tokens: int, device: str, dtype: torch.dtype) -> None:
        self.model, self.max_tokens, self._slots = model, max_tokens, slots
        self.on_cpu = device == "cpu"
        size = slots * max_tokens * model.attention.kv_dim
        self._pool = torch.empty((model.num_hidden_layers, 2, size), device=device, dtype=dtype)
        for layer in self._pool:
            layer.normal_()

    def slots(self, tp: int) -> int:
        """Sequences that fit at this degree."""
        return self._slots * tp

    def layer(self, index: int, tp: int) -> torch.Tensor:
        """Keys and values of one layer [2, slots, tokens, KV heads, head size]."""
        heads, dim = self.model.num_key_value_heads // tp, self.model.head_dim
        if self.on_cpu:  # a head's tokens lie together, so that a batched product can read them as they are
            return self._pool[index].view(2, self.slots(tp), heads, self.max_tokens, dim).transpose(2, 3)
        return self._pool[index].view(2, self.slots(tp), self.max_tokens, heads, dim)

    def copy(self, tp: int, from_slot: int, to_slot: int, tokens: int) -> None:
        """The first `tokens` of one slot into another, in all layers."""
        for index in range(self.model.num_hidden_layers):
            layer = self.layer(index, tp)
            layer[:, to_slot, :tokens] = layer[:, from_slot, :tokens]


@dataclass
class Decoder:
    """One rank's share of the stack at degree `tp`; `index` is its place in `ranks`, those that share a replica."""

    model: Model
    tp: int
    index: int
    ranks: Ranks
    device: str
    weights: list[dict[str, torch.Tensor]]
    cache: KvCache

    def __post_init__(self) -> None:
        model = self.model
        self.heads = [count // self.tp for count in (model.num_attention_heads, *(model.num_key_value_heads,) * 2)]
        self.dtype = self.weights[-1]["norm"].dtype
        steps = torch.arange(0, model.head_dim, 2, device=self.device, dtype=torch.float32) / model.head_dim
        angles = torch.outer(torch.arange(self.cache.max_tokens, device=self.device), ROTARY_BASE**-steps)
        self._cos = angles.cos().repeat(1, 2).to(self.dtype)[:, None]  # [tokens, 1, head size]
        self._sin = torch.cat((-angles.sin(), angles.sin()), 1).to(self.dtype)[:, None]
        self._kv = [self.cache.layer(i, self.tp).unbind() for i in range(model.num_hidden_layers)]
        self._rows = torch.arange(self.cache.slots(self.tp), device=self.device)
        self._first = self.index * math.ceil(model.vocab_size / self.tp)  # of this rank's share of the vocabulary
        self.head = self.weights[-1].get("head", self.weights[-1]["embedding"])

    def decode(self, tokens: torch.Tensor, contexts: torch.Tensor, longest: int) -> torch.Tensor:
        """One token for each of the first sequences of the cache.

        `tokens` [batch] are their last ones, not yet in the cache, `contexts` [batch] their lengths with these,
        `longest` the largest of them. Returns the hidden states [batch, hidden]. Attention reads as many tokens of
        every sequence as the longest has.
        """
        batch, on_cpu, room = len(tokens), self.cache.on_cpu, self.cache.max_tokens
        one = torch.arange(batch + 1, device=self.device, dtype=torch.int32)
        starts = one, one * room
        # the flash kernel reads lengths on the device, so that one captured graph serves all
        seen = padding_mask(contexts, longest, self.dtype) if on_cpu else contexts.int()

        def attend(q: torch.Tensor, _: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if on_cpu:
                keys, values = (x[:batch, :longest].transpose(1, 2) for x in (keys, values))
                return attend_padded(q.view(batch, self.heads[1], -1, q.shape[-1]), keys, values, seen)
            keys, values = (x[:batch].reshape(-1, *x.shape[2:]) for x in (keys, values))
            return flash(q.contiguous(), keys, values, starts, (1, room), seen)

        return self._layers(tokens, self._rows[:batch], contexts - 1, attend)

    def prefill(self, tokens: torch.Tensor, lengths: Sequence[int], first_slot: int) -> torch.Tensor:
        """Whole prompts, one after another in `tokens`, into the slots from `first_slot` on.

        Returns the hidden states [sequences, hidden] of their last tokens.
        """
        device = self.device
        counts = torch.tensor(lengths, device=device)
        ends = counts.cumsum(0)
        rows = torch.repeat_interleave(torch.arange(first_slot, first_slot + len(lengths), device=device), counts)
        positions = torch.arange(len(tokens), device=device) - torch.repeat_interleave(ends - counts, counts)
        starts, longest = F.pad(ends, (1, 0)).int(), max(lengths)

        def attend(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], *_: Any) -> torch.Tensor:
            if not self.cache.on_cpu:
                q, k, v = (x.contiguous() for x in (q, *kv))
                return flash(q, k, v, (starts, starts), (longest, longest))
            prompts = zip(*(torch.split(x.transpose(0, 1), list(lengths), 1) for x in (q, *kv)), strict=True)
            return torch.cat([causal_attention(*(x[None] for x in one))[0].transpose(0, 1) for one in prompts])

        return self._layers(tokens, rows, positions, attend)[ends - 1]

    def sample(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest next tokens [sequences]: each rank gives its best, the best of all is taken."""
        best, token = F.linear(hidden, self.head).max(1)
        if self.tp == 1:
            return token
        own = torch.stack((best.double(), (token + self._first).double()))
        found = torch.stack(self.ranks.all_gather(own))
        winner = found[:, 0].argmax(0, keepdim=True)
        return found[:, 1].gather(0, winner)[0].long()

    def _layers(self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """Hidden states of all tokens, whose keys and values go to these rows and positions of the cache.

        `attend` has the queries, the keys and values of these tokens, and the whole cache's.
        """
        cos, sin = self._cos[positions], self._sin[positions]
        x = self._embed(tokens)
        for weights, (keys, values) in zip(self.weights[:-1], self._kv, strict=True):
            q, k, v = self._qkv(weights, x, cos, sin)
            keys[rows, positions] = k
            values[rows, positions] = v
            out = F.linear(attend(q, (k, v), keys, values).reshape(len(x), -1), weights["o"])
            self.ranks.all_reduce(out)
            x = x + out
            gate, up = F.linear(self._norm(x, weights["mlp_norm"]), weights["gate_up"]).chunk(2, 1)
            out = F.linear(F.silu(gate) * up, weights["down"])
            self.ranks.all_reduce(out)
            x = x + out
        return self._norm(x, self.weights[-1]["norm"])

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.weights[-1]["embedding"]
        if self.tp == 1:
            return F.embedding(tokens, table)
        own = tokens - self._first
        elsewhere = (own < 0) | (own >= len(table))
        x = F.embedding(own.masked_fill(elsewhere, 0), table).masked_fill(elsewhere[:, None], 0.0)
        self.ranks.all_reduce(x)
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, EPSILON)

    def _qkv(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [tokens, heads, head size], the first two rotated."""
        fused = F.linear(self._norm(x, weights["attention_norm"]), weights["qkv"], weights.get("qkv_bias"))
        both, v = torch.split(fused.view(len(x), sum(self.heads), -1), [sum(self.heads[:2]), self.heads[2]], 1)
        if "q_norm" in weights:
            parts = zip(torch.split(both, self.heads[:2], 1), ("q_norm", "k_norm"), strict=True)
            both = torch.cat([self._norm(part, weights[name]) for part, name in parts], 1)
        both = both * cos + both.roll(self.model.head_dim // 2, -1) * sin
        return (*torch.split(both, self.heads[:2], 1), v)


class Batch:
    """One rank's side of a running batch, with room for as many sequences as the cache has slots.

    A sequence's context is its prompt and what it has generated; all but the last token of it are in the cache.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        slots = decoder.cache.slots(decoder.tp)
        self.ids: list[int] = []
        self.tokens = torch.zeros(slots, dtype=torch.long, device=decoder.device)  # the last token of each
        self._contexts = torch.zeros(slots, dtype=torch.long, device=decoder.device)
        self._starts: list[int] = []  # context less the steps made so far: steps change no list
        self._steps = 0
        self._longest = self._sum = 0  # of the starts
        self._graphs: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def contexts(self) -> list[int]:
        return [start + self._steps for start in self._starts]

    @property
    def longest(self) -> int:
        return self._longest + self._steps

    @property
    def context_tokens(self) -> int:
        return self._sum + len(self.ids) * self._steps

    def prefill(self, ids: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Sequences join with these prompts; each has generated its first token afterwards."""
        device, first, last = self.decoder.device, len(self), len(self) + len(ids)
        flat = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        lengths = [len(prompt) for prompt in prompts]
        hidden = self.decoder.prefill(flat, lengths, first)
        self.tokens[first:last] = self.decoder.sample(hidden)
        self._enter(ids, [length + 1 for length in lengths])

    def arrive(self, ids: Sequence[int], contexts: Sequence[int], tokens: Sequence[int]) -> None:
        """Sequences join whose KV is in their slots already, with their last tokens."""
        first, last = len(self), len(self) + len(ids)
        self.tokens[first:last] = torch.tensor(tokens, device=self.decoder.device)
        self._enter(ids, contexts)

    def step(self) -> None:
        """One token for every sequence."""
        batch = len(self.ids)
        graph = self._graphs.get(batch)
        if graph is None:
            self._advance(batch)
        else:
            graph.replay()
        self._steps += 1

    def capture(self) -> None:
        """Capture the step of a batch of the present size as a CUDA graph; `step` uses it from now on."""
        batch, state = len(self), (self.tokens.clone(), self._contexts.clone())
        self._graphs[batch] = captured(lambda: self._advance(batch), self.decoder.device)
        self.tokens.copy_(state[0])
        self._contexts.copy_(state[1])

    def rewind(self) -> None:
        """Take the last step back, so that the next one costs exactly the same."""
        self._contexts[: len(self)] -= 1
        self._steps -= 1

    def leave(self, places: Sequence[int]) -> None:
        """Sequences leave; the last ones move into the slots that become free."""
        for place in sorted(places, reverse=True):
            last = len(self) - 1
            if place != last:
                cached = self._starts[last] + self._steps - 1
                self.decoder.cache.copy(self.decoder.tp, last, place, cached)
                self.tokens[place], self._contexts[place] = self.tokens[last], self._contexts[last]
                self.ids[place], self._starts[place] = self.ids[last], self._starts[last]
            self.ids.pop()
            self._starts.pop()
        self._longest, self._sum = max(self._starts, default=0), sum(self._starts)

    def _enter(self, ids: Sequence[int], contexts: Sequence[int]) -> None:
        first, last = len(self), len(self) + len(ids)
        self._contexts[first:last] = torch.tensor(contexts, device=self.decoder.device)
        self.ids += ids
        self._starts += [context - self._steps for context in contexts]
        self._longest, self._sum = max(self._starts, default=0), sum(self._starts)

    def _advance(self, batch: int) -> None:
        tokens, contexts = self.tokens[:batch], self._contexts[:batch]
        hidden = self.decoder.decode(tokens, contexts, self._longest + self._steps)
        tokens.copy_(self.decoder.sample(hidden))
        contexts += 1


# Attention ------------------------------------------------------------------------------------------------------------


def padding_mask(contexts: torch.Tensor, longest: int, dtype: torch.dtype) -> torch.Tensor:
    """What `attend_padded` adds to scores: minus infinity beyond each sequence's context."""
    beyond = torch.arange(longest) >= contexts[:, None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None]


def attend_padded(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Decode attention of (batch, KV heads, query heads of each, head size) over (batch, KV heads, tokens, head size)
    as two batched products, in which the query heads of one KV head are rows."""
    scores = torch.matmul(query * query.shape[-1] ** -0.5, keys.transpose(-1, -2))
    scores += mask
    return torch.matmul(scores.softmax(-1), values)


def flash(
    query: torch.Tensor, keys: Any, values: Any, starts: tuple[Any, Any], longest: tuple[int, int], used: Any = None
) -> torch.Tensor:
    """CUDA's flash kernel over packed (tokens, heads, head size) tensors.

    `starts` and `longest` are the sequences' in queries and keys. With `used`, the tokens filled of each sequence's
    keys, it is a decode step; without, causal.
    """
    forward: Any = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = forward(query, keys, values, *starts, *longest, 0.0, used is None, False, seqused_k=used)[0]
    return out


def causal_attention(query: Any, keys: Any, values: Any, mask: Any = None) -> Any:
    """Torch's causal attention, (batch, heads, tokens, head size) each. KV heads may be fewer than query heads. With
    cached tokens in front, `mask` says what each query sees."""
    group = query.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)
