"""Gathers the responses of a rollout dump into rlsim's columns: groups, epochs, lengths, what has to be said."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.trace.importers.rows import Row
from rlsim.trace.importers.tokens import TokenCounter

_MOST_TEXTS, _MOST_CHARACTERS = 512, 4_000_000  # tokenized at a time


@dataclass
class Response:
    """One response as a dump states it; lengths are in tokens, times in seconds.

    `prompt` identifies the prompt (its text, or anything that stands for it), `group` the samples drawn together.
    Where a dump has texts instead of lengths they stand in `prompt_text` and `response_text`.
    """

    step: int
    prompt: str | None = None
    group: object = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    prompt_text: str | None = None
    response_text: str | None = None
    reward: float | None = None
    correct: Any = None
    capped: bool | None = None
    finish_reason: str | None = None
    task: str | None = None
    arrival_s: float | None = None
    reward_time_s: float | None = None


_COLUMNS = ("prompt_tokens", "response_tokens", "reward", "correct", "capped", "finish_reason", "task", "arrival_s",
            "reward_time_s")  # fmt: skip


class Collector:
    """Takes responses one by one and keeps only numbers, so that a dump of any size passes through.

    `asked` maps a column of rlsim's schema to a key of the dump's rows and comes before what the layout says.
    `tally` counts what has to be said: a sentence with `{n}` for the count. Responses of no tokens are left out, with
    `repeats` also those whose texts stood at the same place of the step before.
    """

    def __init__(
        self,
        asked: Mapping[str, str],
        tokenizer: TokenCounter | None,
        cap_tokens: int | None,
        *,
        repeats: bool = False,
    ) -> None:
        self.tally: Counter[str] = Counter()
        self._repeats = repeats
        self._texts_of_step: list[list[str]] = [[], []]  # digests of the step before and of this one
        self._step_read: int | None = None
        self._asked, self._tokenizer, self._cap = dict(asked), tokenizer, cap_tokens
        self._values: dict[str, list[Any]] = {name: [] for name in dict.fromkeys((*_COLUMNS, *asked))}
        self._step: list[int] = []
        self._places: list[tuple[Path, str]] = []
        self._prompt: list[int] = []
        self._codes: dict[tuple[str, int], int] = {}
        self._groups: dict[tuple[int, str], dict[str, int]] = {}
        self._prompt_lengths: dict[int, int] = {}
        self._texts: list[tuple[bool, int, str]] = []  # of a response?, its row or the prompt's code, the text
        self._characters = 0

    def add(self, response: Response, row: Row) -> None:
        if self._repeats and self._repeated(response):
            self.tally["{n} responses are left out that were logged again with a later step"] += 1
            return
        given = {ours: row.get(theirs) for ours, theirs in self._asked.items()}
        if "response_tokens" in given:
            response.response_text, response.response_tokens = None, given["response_tokens"]
        if response.response_tokens is None and response.response_text == "" and self._tokenizer is not None:
            self.tally["{n} responses are empty texts: they ended at once, and count as one token"] += 1
            response.response_tokens = 1
        if response.response_tokens == 0 or (response.response_tokens is None and response.response_text == ""):
            self.tally["{n} responses of no tokens (aborted, or failed) are left out"] += 1
            return
        if "prompt_id" in given:
            response.prompt, response.group = str(given["prompt_id"]), None
        index, code = len(self._step), self._code(response)
        for name, values in self._values.items():
            values.append(given[name] if name in given else getattr(response, name))
        self._prompt.append(code)
        self._step.append(response.step)
        self._places.append((row.file, row.place))
        if self._tokenizer is not None:
            self._wait(index, code, response)

    def _repeated(self, response: Response) -> bool:
        if response.step != self._step_read:
            self._step_read, self._texts_of_step = response.step, [self._texts_of_step[1], []]
        before, now = self._texts_of_step
        now.append(_digest(f"{response.prompt_text}\0{response.response_text}"))
        return len(now) <= len(before) and before[len(now) - 1] == now[-1]

    def _code(self, response: Response) -> int:
        """A code of the prompt. Two groups of one step with the same text (images differ, say) are two prompts."""
        turn = 0
        if response.prompt is None:
            group = str(response.group) if response.group is not None else f"response {len(self._step)}"
            name = f"step {response.step}, {group}"
        else:
            name = response.prompt if "prompt_id" in self._asked else _digest(response.prompt)
            if response.group is not None:
                groups = self._groups.setdefault((response.step, name), {})
                turn = groups.setdefault(str(response.group), len(groups))
        return self._codes.setdefault((name, turn), len(self._codes))

    def _wait(self, index: int, code: int, response: Response) -> None:
        if response.prompt_text and "prompt_tokens" not in self._asked and code not in self._prompt_lengths:
            self._prompt_lengths[code] = 0
            self._texts.append((False, code, response.prompt_text))
        if response.response_text:
            self._texts.append((True, index, response.response_text))
        self._characters += len(response.prompt_text or "") + len(response.response_text or "")
        if len(self._texts) >= _MOST_TEXTS or self._characters >= _MOST_CHARACTERS:
            self._tokenize()

    def _tokenize(self) -> None:
        if self._tokenizer is None or not self._texts:
            return
        counts = self._tokenizer.count([text for *_, text in self._texts])
        for (of_response, index, _), count in zip(self._texts, counts, strict=True):
            if not of_response:
                self._prompt_lengths[index] = count
                continue
            if self._cap is not None and count > self._cap:
                self.tally[
                    f"{{n}} responses are longer than the cap of {self._cap} tokens when tokenized again (decoding "
                    "does not always round-trip): taken as cut there"
                ] += 1
            self._values["response_tokens"][index] = max(1, min(count, self._cap or count))
        self._texts, self._characters = [], 0

    def frame(self) -> tuple[pd.DataFrame, list[tuple[Path, str]], list[str]]:
        """The columns of rlsim's schema that something filled, the place of every row, and what has to be said."""
        self._tokenize()
        prompt = np.array(self._prompt, np.int64)
        if any(self._prompt_lengths.values()):
            self._values["prompt_tokens"] = [self._prompt_lengths.get(code) or None for code in self._prompt]
        columns: dict[str, Any] = {
            name: pd.Series(values, dtype=object)
            for name, values in self._values.items()
            if any(value is not None for value in values)
        }
        notes = [text.format(n=f"{count:,}") for text, count in self.tally.items()]
        judged = columns.get("correct", ()) if "correct" not in self._asked else ()
        if any(v is not None and not (isinstance(v, bool | int | float) and v in (0, 1)) for v in judged):
            notes.append("the dump's correctness is not 0 or 1 in every row: left out")
            del columns["correct"]
        names = [name if turn == 0 else f"{name}-{turn}" for name, turn in self._codes]
        columns["prompt_id"] = np.array(names, dtype=object)[prompt] if len(prompt) else []
        epoch = epochs(self._step, prompt)
        columns.setdefault("epoch", epoch)
        frame = pd.DataFrame(columns)
        if "sample_id" not in frame:
            frame["sample_id"] = pd.DataFrame({"p": prompt, "e": epoch}).groupby(["p", "e"]).cumcount()
        steps, passes = len(set(self._step)), int(epoch.max(initial=0)) + 1
        if passes > 1:
            notes.append(f"{steps:,} steps in {passes} epochs: one begins where most prompts of a step come again")
        elif steps > 1:
            notes.append(f"{steps:,} steps, one epoch: in no step do most prompts come again")
        if 1 < len(self._step) == len(self._codes):
            notes.append("no two responses share a prompt: how alike those of one prompt are is not known")
        return frame, self._places, notes


def epochs(step: Sequence[int], prompt: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The epoch (from 0) of every response, of shape (responses,) like `step` and `prompt`.

    Dumps name steps, not epochs: in the order of steps a new one begins where more than half of a step's prompts have
    been seen in the current epoch. Single prompts that a data set holds twice therefore begin none.
    """
    steps = np.asarray(step, np.int64)
    result = np.zeros(len(steps), np.int64)
    order = np.argsort(steps, kind="stable")
    seen: set[int] = set()
    epoch = 0
    for part in np.split(order, np.flatnonzero(np.diff(steps[order])) + 1):
        prompts = set(prompt[part].tolist())
        if 2 * len(prompts & seen) > len(prompts):
            epoch, seen = epoch + 1, set()
        seen |= prompts
        result[part] = epoch
    return result


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
