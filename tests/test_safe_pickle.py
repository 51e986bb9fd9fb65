"""Files of `torch.save` are read without running anything that they name."""

import builtins
import collections
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dump_samples import pt_file, slime_sample

from rlsim.errors import TraceError
from rlsim.trace.importers import import_trace
from rlsim.trace.importers.safe_pickle import load_torch


class Evil:
    """Calls a function as it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (os.system, ("touch {mark}",), "system"),
        (subprocess.check_output, (["touch", "{mark}"],), "check_output"),
        (builtins.eval, ("open('{mark}', 'w').close()",), "eval"),
        (builtins.exec, ("open('{mark}', 'w').close()",), "exec"),
        (getattr, (os, "system"), "getattr"),
        (collections.Counter, (["a"],), "collections.Counter"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_malicious_sample_is_refused_and_not_run(
    tmp_path: Path, call: Any, arguments: tuple[Any, ...], name: str, protocol: int
) -> None:
    mark = tmp_path / "ran"

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(one) for one in value]
        return value.replace("{mark}", str(mark)) if isinstance(value, str) else value

    if call is getattr:  # a module cannot be pickled; its name is all that is needed
        pickled = b"cbuiltins\ngetattr\n(S'x'\nS'system'\ntR."
    else:
        sample = slime_sample(0, "q", 3, 4, metadata=Evil(call, *map(filled, arguments)))
        pickled = pickle.dumps({"rollout_id": 0, "samples": [sample]}, protocol=protocol)
    with pytest.raises(TraceError, match=rf"refused: it names \S*{name}, which is no plain value.*can run any code"):
        import_trace(pt_file(tmp_path / "0.pt", pickled))
    assert not mark.exists()


def test_a_list_in_the_place_of_a_class_runs_nothing(tmp_path: Path) -> None:
    """The opcodes that call without REDUCE: INST, OBJ and NEWOBJ look names up in the same way."""
    for pickled in (b"(S'true'\nios\nsystem\n.", b"(cos\nsystem\nS'true'\no.", b"\x80\x02cos\nsystem\n)\x81."):
        with pytest.raises(TraceError, match=r"refused: it names os\.system"):
            load_torch(pt_file(tmp_path / "0.pt", pickled))


def test_plain_values_come_through(tmp_path: Path) -> None:
    plain = {"a": [1, 2.5, None, True, "ü", b"bytes"], "b": {"c": (1, {2})}, "d": collections.OrderedDict(x=1)}
    for protocol in (2, 4, 5):
        assert load_torch(pt_file(tmp_path / "0.pt", pickle.dumps(plain, protocol=protocol))) == plain
    pickled = pickle.dumps({"rollout_id": 0, "samples": []}, protocol=2)
    with pytest.raises(TraceError, match="cannot be read"):
        load_torch(pt_file(tmp_path / "0.pt", pickled[:-5]))
    with pytest.raises(TraceError, match="samples should be a list of samples, at least one"):
        import_trace(pt_file(tmp_path / "0.pt", pickled))
    import zipfile

    with zipfile.ZipFile(tmp_path / "z.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(TraceError, match=r"holds no data\.pkl"):
        load_torch(tmp_path / "z.pt")
