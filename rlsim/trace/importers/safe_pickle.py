"""Reads files of `torch.save` without torch and without running anything that they name.

A pickle calls what it names while it is read, so a file from elsewhere can run any command. Here only plain values come
through (numbers, text, lists, dictionaries); tensors and arrays become stand-ins that know their size; every other name
is refused. The layout of the archive is that of torch's `torch/serialization.py` (2.x, `_save`): a zip file with
`<name>/data.pkl`.
"""

from __future__ import annotations

import collections
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlsim.errors import TraceError


class Sized:
    """Stands for a tensor or an array: its length is that of the first dimension (1 of a scalar)."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return int(self.shape[0]) if self.shape else 1

    def __setstate__(self, state: Any) -> None:
        """Takes the shape out of an array's state, (version, shape, dtype, fortran order, bytes)."""
        if isinstance(state, tuple) and len(state) == 5 and isinstance(state[1], tuple):
            self.shape = state[1]


class _Dtype:
    """Stands for a NumPy type; `code` is as NumPy spells it, such as f8."""

    def __init__(self, code: str = "", *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like are not needed."""


def _tensor(_storage: Any, _offset: Any, shape: Any, *_: Any) -> Sized:
    return Sized(tuple(int(size) for size in shape))


def _array(*_: Any) -> Sized:
    return Sized()


def _scalar(dtype: Any, data: Any = b"") -> Any:
    """The value of a NumPy number; of anything else a stand-in."""
    if isinstance(dtype, _Dtype) and isinstance(data, bytes) and dtype.code[:1] in tuple("fiub"):
        found = np.frombuffer(data, np.dtype(dtype.code))
        if len(found) == 1:
            return found[0].item()
    return Sized()


#: Module and name -> what is called for it.
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor, ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch", "Size"): tuple, ("numpy", "ndarray"): Sized, ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _array, ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy.core.multiarray", "scalar"): _scalar, ("numpy._core.multiarray", "scalar"): _scalar,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
    ("builtins", "set"): set, ("__builtin__", "set"): set,
}  # fmt: skip


class _RefusedError(Exception):
    """A name that is not on the list."""


class _Plain(pickle.Unpickler):
    """Loads plain values; a name outside `_KNOWN` is refused before anything of it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is not None:
            return found
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name  # the kind of a tensor's storage, only ever named
        raise _RefusedError(f"{module}.{name}")

    def persistent_load(self, _pid: Any) -> None:
        """Storages are not read."""


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote into `path`, as plain values and stand-ins.

    Raises `TraceError` if it is no such file, is damaged, or names anything that is not a plain value, a tensor or an
    array: such a file could run code, and is not read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(inside) != 1:
                raise TraceError(f"{path}: not a file of torch.save: the archive holds no data.pkl")
            with archive.open(inside[0]) as file:
                return _Plain(file).load()
    except zipfile.BadZipFile:
        raise TraceError(
            f"{path}: not a readable file of torch.save (truncated, damaged, or of its form before torch 1.6)"
        ) from None
    except _RefusedError as refused:
        raise TraceError(
            f"{path}: refused: it names {refused}, which is no plain value. A pickle can run any code as it is read; "
            "rlsim reads only numbers, text, lists, dictionaries and tensors"
        ) from None
    except TraceError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise TraceError(f"{path}: cannot be read (truncated or damaged?): {type(error).__name__}: {error}") from None
