"""Token counts of texts by a local tokenizer, for dumps that hold texts and no lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsim.errors import TraceError


class TokenCounter:
    """Counts tokens with a Hugging Face `tokenizer.json`, given as that file or as the local folder of a model.

    Nothing is ever downloaded. Raises `TraceError` if there is no such file, or the package `tokenizers` is missing.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self._tokenizer: Any = _load(path)
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


def _load(path: Path) -> Any:
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise TraceError(
            f"--tokenizer {path}: the folder holds no tokenizer.json; "
            "AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER) writes one"
        )
    if not file.is_file():
        raise TraceError(
            f"--tokenizer {path}: no such file or folder; give the model's tokenizer.json or the local folder it lies "
            "in (rlsim downloads nothing)"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TraceError("--tokenizer needs the package tokenizers: pip install 'rlsim[tokenizer]'") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises nothing more special
        raise TraceError(f"--tokenizer {file}: not a readable tokenizer.json: {error}") from None
