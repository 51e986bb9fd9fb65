"""Records that rlsim keeps as JSON and reads back: checked against a model, and sealed with their own SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlsim.errors import ConfigError
from rlsim.schema import validate

#: The key that holds the SHA-256 of everything else in the record.
SEAL = "sha256"
#: The key of the version of the record's form: from the first one on, records are sealed.
FORM = "format"
#: Mappings and lists within each other, at most: nothing that rlsim writes comes near.
_MOST_LEVELS = 50


class Record(BaseModel):
    """Part of a record. Values have just these types; keys that a later version adds are let through."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def sealed(data: Mapping[str, Any]) -> bytes:
    """The record as a JSON file that ends with the SHA-256 of its content."""
    content = {FORM: 1, **json.loads(json.dumps(data))}
    text = json.dumps({**content, SEAL: _digest(content)}, indent=1, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its JSON escape


def read_record(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    """The record in a file, without its seal and `FORM`.

    Raises `ConfigError`, naming file and key, if it cannot be read, does not fit the model, or was changed after it
    was sealed; `FileNotFoundError` if there is none. Records of the first versions of rlsim have no seal.
    """
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged: not valid JSON: {error}") from None
    record = check_record(data, model, str(path))
    seal = record.pop(SEAL, None)
    if (seal is not None or FORM in record) and seal != _digest(record):
        raise ConfigError(f"{path}: damaged, or changed after rlsim wrote it: its content does not have its {SEAL}")
    record.pop(FORM, None)
    return record


def check_record(data: Any, model: type[BaseModel], where: str) -> dict[str, Any]:
    """`data` once it is known to fit the model; raises `ConfigError`, naming `where` and the key, if it does not."""
    if not isinstance(data, dict):
        kind = {list: "a list", str: "text", type(None): "null", bool: "true or false"}.get(type(data), "a number")
        raise ConfigError(f"{where}: not written by rlsim: expected a JSON object, got {kind}")
    if _deeper(data, _MOST_LEVELS):
        raise ConfigError(f"{where}: not written by rlsim: nested deeper than {_MOST_LEVELS} levels")
    validate(data, model, where)
    return dict(data)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _deeper(value: Any, levels: int) -> bool:
    inner = list(value.values()) if isinstance(value, dict) else value
    return isinstance(inner, list) and (levels == 0 or any(_deeper(item, levels - 1) for item in inner))
