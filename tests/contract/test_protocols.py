"""SGLang's batch and requests have what sgl/scheduler_types.py says that they have."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import sglang_parse
from sglang_parse.plugin.rounds import QUEUE
from sglang_parse.sgl import scheduler_types as protocols
from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")

PACKAGE = Path(sglang_parse.__file__).parent


def members(protocol) -> set[str]:
    """Attributes and methods of a protocol and of those that it extends."""
    found: set[str] = set()
    for one in protocol.__mro__:
        if one.__module__ == protocols.__name__:
            found |= set(inspect.get_annotations(one))
            found |= {n for n, v in vars(one).items() if inspect.isfunction(v)}
    return {
        n for n in found if not n.startswith("__") and n != "_no_init_or_replace_init"
    }


def assigned(cls) -> set[str]:
    """Attributes that the methods of a class assign to `self`."""
    tree = ast.parse(inspect.getsource(cls))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_batch_has_what_we_read():
    """Red if ScheduleBatch loses or renames a field that PARSE reads."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    fields = {f.name for f in dataclasses.fields(ScheduleBatch)}
    wanted = members(protocols.SchedulerBatch)
    assert len(wanted) >= 17
    assert wanted <= fields, wanted - fields


def test_request_has_what_we_read():
    """Red if Req loses or renames an attribute that PARSE reads."""
    from sglang.srt.managers.schedule_batch import Req

    has = assigned(Req) | set(dir(Req))
    wanted = members(protocols.SchedulerRequest)
    assert len(wanted) >= 20
    assert wanted <= has, wanted - has


def test_parameters_of_a_request_have_what_we_read():
    """Red if SamplingParams, or the record of a request's slots, loses an attribute."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = SamplingParams()
    made.normalize(None)
    for name in members(protocols.RequestParameters):
        assert hasattr(made, name), name
    for name in members(protocols.RequestKV):
        assert hasattr(schedule_batch.ReqKvInfo(), name), name


def test_methods_of_a_request_take_our_arguments():
    """Red if a method that PARSE calls takes other arguments."""
    from sglang.srt.managers.schedule_batch import Req

    methods = inspect.getmembers(protocols.SchedulerRequest, inspect.isfunction)
    ours = {
        n: parameters(f) for n, f in methods if n in members(protocols.SchedulerRequest)
    }
    assert set(ours) == {"finished"}
    for name, names in ours.items():
        assert parameters(inspect.unwrap(getattr(Req, name))) == names, name


# Modules whose `batch` is a ForwardBatch of ours.
FORWARD_BATCHES = {"sgl/forward_batches.py", "sgl/graphs.py", "drafting/runner.py"}


def read(names: set[str], skip: set[str]) -> dict[str, str]:
    """Attribute -> a module of the package that reads or writes it on one of `names`,
    alone or as an attribute (`req`, `r.req`)."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if where in skip or where.split("/")[0] in ("bench", "cli", "frontend"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            owner, name = None, None
            if isinstance(node, ast.Attribute):
                owner, name = node.value, node.attr
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "getattr"
                and isinstance(node.args[1], ast.Constant)
            ):
                owner, name = node.args[0], node.args[1].value
            if getattr(owner, "id", getattr(owner, "attr", None)) in names:
                found[name] = where
    return found


def test_we_read_of_a_request_what_its_protocol_lists():
    """Red if somebody reads an attribute of SGLang's request that nobody checks, or the
    protocol lists one that nobody reads any more."""
    found = read({"req"}, set())
    wanted = members(protocols.SchedulerRequest)
    assert set(found) <= wanted, {n: found[n] for n in set(found) - wanted}
    assert wanted <= set(found), wanted - set(found)


def test_we_read_of_a_batch_what_its_protocol_lists():
    """Red if somebody reads an attribute of SGLang's batch that nobody checks, or the
    protocol lists one that nobody reads any more."""
    found = read({"batch", "view"}, FORWARD_BATCHES)
    found.pop(QUEUE, None)  # ours
    wanted = members(protocols.SchedulerBatch)
    assert set(found) <= wanted, {n: found[n] for n in set(found) - wanted}
    assert wanted <= set(found), wanted - set(found)
