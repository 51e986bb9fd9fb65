"""Records that rlsim keeps as JSON and reads back, sealed with their own SHA-256: what is read is what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlsim.base.refusals import refuse
from rlsim.errors import ConfigError

#: The key that holds the SHA-256 of everything else in the record.
SEAL = "sha256"
#: The key of the version of a record's form, and that version: it rises when readers need what older records lack.
FORM, VERSION = "format", 2


class Record(BaseModel):
    """Part of a record. Values have just these types; keys that a later version adds are let through."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def sealed(data: Mapping[str, Any], indent: int | None = 1) -> bytes:
    """The record as a JSON file that ends with the SHA-256 of its content."""
    content = {FORM: VERSION, **json.loads(json.dumps(data))}
    text = json.dumps({**content, SEAL: _digest(content)}, indent=indent, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its JSON escape


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file (see `unsealed`); raises `FileNotFoundError` if there is none."""
    try:
        return unsealed(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def unsealed(text: bytes, path: Path) -> dict[str, Any]:
    """The record that `sealed` wrote, without its seal and `FORM`.

    Raises `ConfigError`, naming the file that it is from, if it is not of this version, or was changed since.
    """
    try:
        record = json.loads(text)
        whole = isinstance(record, dict) and record.pop(SEAL, None) == _digest(record)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged: not valid JSON: {error}") from None
    refuse("record of rlsim", path=path, record=record, whole=whole, form=FORM, version=VERSION)
    return {key: value for key, value in record.items() if key != FORM}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
