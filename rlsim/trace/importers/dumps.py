"""Rollout dumps: rows of one response each become columns of rlsim's schema. A `Dump` is a row of data/layouts.yaml."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.refusals import refuse
from rlsim.errors import TraceError
from rlsim.trace.importers.rows import Row, file_rows
from rlsim.trace.turns import Turn, response_tokens

#: Counts what has to be said: sentences with `{n}` for the count.
Tally = Counter[str]
#: A response as a dump states it, by field: `step`; `prompt`, which identifies the prompt (its text, or what stands for
#: it), and `group`, the samples drawn together; `prompt_text` and `response_text` where a dump has texts instead of
#: lengths, `turn_texts` those of a trajectory (generated, observed, seconds in the environment or None); and `_COLUMNS`
#: (tokens, s). What is not known is left out.
Fields = Mapping[str, Any]
_COLUMNS = ("prompt_tokens", "response_tokens", "reward", "correct", "capped", "finish_reason", "task", "arrival_s",
            "reward_time_s", "turns")  # fmt: skip
_READ: dict[str, Callable[[Row, str], Any]] = {
    "step": Row.step, "group": Row.whole, "prompt": Row.text, "prompt_text": Row.text, "response_text": Row.text,
    "reward": Row.number,
}  # fmt: skip
_MOST_ROWS, _MOST_CHARACTERS = 512, 4_000_000  # whose texts are tokenized at a time


@dataclass(frozen=True)
class Dump:
    """A project's dump, with the keys of its row in data/layouts.yaml; `more` returns None to leave a response out."""

    format: str
    of: str
    needs: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Row, Tally], Fields | None] | None = None
    notes: tuple[str, ...] = ()
    rows: Callable[[Path, str], Iterator[Row]] = file_rows
    repeats: bool = False
    refused: str = ""


def read_dump(
    dump: Dump,
    files: Sequence[Path],
    where: Path,
    columns: Mapping[str, str],
    tokenizer: str | Path | None,
    cap_tokens: int | None,
) -> tuple[pd.DataFrame, list[tuple[Path, str]], list[str]]:
    """The responses in `files` as columns of rlsim's schema, the place of every row, and notes.

    `columns` maps columns of the schema to keys of the rows and comes before what the layout says. Raises `TraceError`
    with file and row, and where the dump holds no lengths and no tokenizer is given.
    """
    counted = "response_text" in dump.columns and "response_tokens" not in columns
    notes, counter = [dump.of, *dump.notes], None
    refuse("dump", TraceError, where=where, dump=dump, counted=counted, tokenizer=tokenizer)
    if counted and tokenizer is not None:
        counter = TokenCounter(tokenizer)
        notes.append(
            f"lengths counted by the tokenizer {counter.name} in decoded text without its special tokens: a response "
            "that ended by itself is one token (its end) shorter than generated, and one cut within a word may differ"
        )
    elif tokenizer is not None:
        notes.append("the dump holds lengths: the tokenizer was not used")
    collector = _Collector(columns, counter, cap_tokens, dump.repeats)
    for file in files:
        for row in dump.rows(file, dump.of):
            more = dump.more(row, collector.tally) if dump.more else {}
            if more is not None:
                collector.add({name: _READ[name](row, key) for name, key in dump.columns.items()} | dict(more), row)
    frame, said = collector.frame()
    return frame, collector.places, [*notes, *said]


class _Collector:
    """Takes responses one by one and keeps only numbers, so that a dump of any size passes through.

    `asked` maps a column of rlsim's schema to a key of the dump's rows and comes before what the layout says.
    Responses of no tokens are left out, with `repeats` also those whose texts stood at the same place of the step
    before.
    """

    def __init__(
        self, asked: Mapping[str, str], tokenizer: TokenCounter | None, cap_tokens: int | None, repeats: bool
    ) -> None:
        self._asked, self._tokenizer, self._cap, self._repeats = dict(asked), tokenizer, cap_tokens, repeats
        self.tally: Tally = Counter()
        self.places: list[tuple[Path, str]] = []
        self._values: dict[str, list[Any]] = {name: [] for name in dict.fromkeys((*_COLUMNS, *asked))}
        self._step: list[int] = []
        self._prompt: list[int] = []  # a code of each response's prompt
        self._codes: dict[tuple[str, int], int] = {}
        self._groups: dict[tuple[int, str], dict[str, int]] = {}
        self._texts_of_step: list[list[str]] = [[], []]  # digests of the step before and of this one
        self._step_read: int | None = None
        self._prompt_lengths: dict[int, int] = {}
        self._waiting: list[tuple[dict[str, Any], Row]] = []  # for their texts to be counted
        self._characters = 0

    def add(self, fields: dict[str, Any], row: Row) -> None:
        if self._repeats and self._repeated(fields):
            self.tally["{n} responses are left out that were logged again with a later step"] += 1
            return
        given = {ours: row.get(theirs) for ours, theirs in self._asked.items()}
        if "response_tokens" in given:
            fields |= {"response_text": None, "response_tokens": given["response_tokens"]}
        length, empty = fields.get("response_tokens"), fields.get("response_text") == ""
        if length is None and empty and self._tokenizer is not None:
            self.tally["{n} responses are empty texts: they ended at once, and count as one token"] += 1
            fields["response_tokens"] = 1
        elif length == 0 or (length is None and empty):
            self.tally["{n} responses of no tokens (aborted, or failed) are left out"] += 1
            return
        if "prompt_id" in given:
            fields |= {"prompt": str(given["prompt_id"]), "group": None}
        self._waiting.append((fields | {"given": given}, row))
        self._characters += sum(map(len, _texts(fields)))
        if self._tokenizer is None or len(self._waiting) >= _MOST_ROWS or self._characters >= _MOST_CHARACTERS:
            self._take()

    def _take(self) -> None:
        """The rows that wait, with their texts counted all at once."""
        counts = dict[str, int]()
        if self._tokenizer is not None:
            texts = list(dict.fromkeys(text for fields, _ in self._waiting for text in _texts(fields)))
            counts = dict(zip(texts, self._tokenizer.count(texts), strict=True))
        for fields, row in self._waiting:
            code, given = self._code(fields), fields["given"]
            if self._tokenizer is not None:
                self._count(fields, code, counts)
            for name, values in self._values.items():
                values.append(given[name] if name in given else fields.get(name))
            self._prompt.append(code)
            self._step.append(fields["step"])
            self.places.append((row.file, row.place))
        self._waiting, self._characters = [], 0

    def _count(self, fields: dict[str, Any], code: int, counts: Mapping[str, int]) -> None:
        """Lengths in the place of texts; no response is longer than the cap: it was none when it was sampled."""
        prompt, response, turns = fields.get("prompt_text"), fields.get("response_text"), fields.get("turn_texts")
        if prompt and "prompt_tokens" not in self._asked:
            self._prompt_lengths.setdefault(code, counts[prompt])
        if turns:
            fields["turns"] = [
                Turn(max(1, counts[made]), counts[seen], nan if tool_s is None else tool_s)
                for made, seen, tool_s in turns
            ]
            fields["response_tokens"] = response_tokens(tuple(fields["turns"]))
        elif response:
            fields["response_tokens"] = max(1, counts[response])
        if not turns and self._cap is not None and fields["response_tokens"] > self._cap:
            self.tally[
                f"{{n}} responses are longer than the cap of {self._cap} tokens when tokenized again (decoding "
                "does not always round-trip): taken as cut there"
            ] += 1
            fields["response_tokens"] = self._cap

    def _repeated(self, fields: Fields) -> bool:
        if fields["step"] != self._step_read:
            self._step_read, self._texts_of_step = fields["step"], [self._texts_of_step[1], []]
        before, now = self._texts_of_step
        now.append(_digest(f"{fields['prompt_text']}\0{fields['response_text']}"))
        return len(now) <= len(before) and before[len(now) - 1] == now[-1]

    def _code(self, fields: Fields) -> int:
        """A code of the prompt. Two groups of one step with the same text (images differ, say) are two prompts."""
        turn, step, prompt, group = 0, fields["step"], fields.get("prompt"), fields.get("group")
        if prompt is None:
            name = f"step {step}, {f'response {len(self._step)}' if group is None else group}"
        else:
            name = prompt if "prompt_id" in self._asked else _digest(prompt)
            if group is not None:
                groups = self._groups.setdefault((step, name), {})
                turn = groups.setdefault(str(group), len(groups))
        return self._codes.setdefault((name, turn), len(self._codes))

    def frame(self) -> tuple[pd.DataFrame, list[str]]:
        """The columns of rlsim's schema that something filled, and what has to be said."""
        self._take()
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
        return frame, notes


def _texts(fields: Fields) -> list[str]:
    """The texts of a response that have to be counted: of its prompt, and its own or those of its turns."""
    prompt, response, turns = (fields.get(key) or "" for key in ("prompt_text", "response_text", "turn_texts"))
    return [prompt, *([text for turn in turns for text in turn[:2]] if turns else [response])]


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


class TokenCounter:
    """Counts tokens with a Hugging Face `tokenizer.json`, given as that file or as the local folder of a model.

    Nothing is ever downloaded. Raises `TraceError` if there is no such file, or the package `tokenizers` is missing.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        refuse("tokenizer", TraceError, path=path, file=file)
        try:
            from tokenizers import Tokenizer

            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except ImportError:
            raise TraceError("--tokenizer needs the package tokenizers: pip install 'rlsim[tokenizer]'") from None
        except Exception as error:  # the Rust library raises nothing more special
            raise TraceError(f"--tokenizer {file}: not a readable tokenizer.json: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.name = path.name if path.is_dir() else f"{path.resolve().parent.name}/{path.name}"

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without special tokens added."""
        try:
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # half a surrogate pair: a response cut within a character
            return self.count([text.encode("utf-8", "replace").decode() for text in texts])
        except Exception as error:  # the Rust library raises nothing more special
            raise TraceError(f"--tokenizer {self.name}: cannot count tokens: {error}") from None
        return [len(one) for one in encoded]
