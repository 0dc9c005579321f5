"""What users see of the package: its names, and where these say they are from."""

from __future__ import annotations

import copy
import importlib
import inspect
import pathlib
import pickle
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from support import prints

import rdmapost as rp

MODULES = ("check", "connect", "diagnose", "explain", "frames", "loopback", "pingpong")
PUBLIC = ["rdmapost", *(f"rdmapost.{name}" for name in MODULES)]
NAMES = """
AH AHAttr Access AdviseMRAdvice AdviseMRFlags AsyncEvent AtomicCap AtomicCmpAndSwp AtomicFetchAndAdd
AtomicWrite Batch BindMW Blocks CQ Capture CloseError ClosedError CompChannel CompletionError
Context Counters Datagram DeviceAttr DeviceCap DeviceInfo Endpoint EventType FaultPlan Flush
FlushLevel FlushType GID GIDChoice GIDTableEntry GIDType GRH InUseError LinkLayer LocalInv MR MTU
MULTICAST_QPN MW MWType MigState NoDeviceError NoRdmaError NodeType ODPCaps ODPGeneralCap
ODPTransportCap Opcode OpsFlags OpsOpcode OpsWR Outstanding PD PortAttr PortCap PortState PostError
PreparedWR QP QPAttr QPAttrMask QPInitAttr QPState QPType QueryQPDataInOrderCaps
QueryQPDataInOrderFlags RawPacketCap RdmaError RdmaRead RdmaWrite RdmaWriteWithImm RecvWR
RoceInterface SGE SRQ SRQAttr SRQAttrMask SRQType Send SendFlags SendOps SendWR SendWithImm
SendWithInv TMCap TMCaps TSO TSOCaps TagAdd TagDel TagHandle TagSync TransportType UnsupportedError
VerbsError WC WCExFlags WCFlags WCOpcode WCStatus WC_DTYPE WaitCancelled WaitTimeout XRCD
__version__ list_devices list_roce_interfaces max_inline open_device
"""


def test_dir_is_the_public_names_and_the_version() -> None:
    """No module, helper or name of Python's own, whatever has been imported before."""
    names = NAMES.split()
    assert dir(rp) == names
    assert prints("import rdmapost, rdmapost.connect; print(*dir(rdmapost))").split() == names


@pytest.mark.parametrize("name", MODULES)
def test_public_module_is_one_object_however_it_is_imported(name: str) -> None:
    """Then what replaces a function in one replaces it in the other."""
    module = importlib.import_module(f"rdmapost.{name}")
    assert module is getattr(rp, name)
    assert module is importlib.import_module(module.__name__)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_say_which_public_module_they_are_from(module: str) -> None:
    """That of every class and function is the one that users import it from."""
    public = importlib.import_module(module)
    things = [getattr(public, name) for name in public.__all__]
    modules = {
        thing.__name__: thing.__module__
        for thing in things
        if inspect.isclass(thing) or inspect.isfunction(thing)
    }
    assert modules
    assert modules == dict.fromkeys(modules, module)


def test_private_modules_have_an_underscore_or_are_in_a_subpackage() -> None:
    """Beside the rooms, only what users import has no underscore."""
    (place,) = map(pathlib.Path, rp.__path__)
    modules = {file.stem for file in place.glob("[!_]*.py")}
    assert modules == {*MODULES, "enums", "errors"}
    rooms = {file.parent.name for file in place.glob("*/__init__.py")} - {"cli"}
    assert rooms == {"posting", "providers", "resources", "standard", "tools"}
    assert not [*place.glob("*/**/_[!_]*.py")]


@pytest.mark.parametrize("module", PUBLIC)
def test_classes_can_be_pickled_by_their_public_name(module: str) -> None:
    """And what is found under that name is the class itself."""
    public = importlib.import_module(module)
    for name in public.__all__:
        thing = getattr(public, name)
        if not inspect.isclass(thing):
            continue
        assert pickle.loads(pickle.dumps(thing)) is thing, name
        assert copy.deepcopy(thing) is thing, name


def test_a_new_interpreter_reads_what_was_pickled() -> None:
    """Nothing of the package is imported there before."""
    address = rp.AHAttr(dgid=rp.GID("fe80::1"))
    posted = [rp.SendFlags.INLINE | rp.SendFlags.SIGNALED, rp.QPState.RTS, address]
    for given in posted:
        assert copy.deepcopy(given) == given
    text = pickle.dumps(posted).hex()
    read = f"import pickle; print(pickle.loads(bytes.fromhex({text!r})))"
    assert prints(read).strip() == repr(posted)


NAMED_ONLY = {
    # What defines the type imports the module that names it.
    "rdmapost.CQ.__aiter__",
    "rdmapost.CompChannel.cq_event",
    "rdmapost.CompChannel.get_cq_event",
    "rdmapost.CompletionError.__init__",
    "rdmapost.QP.diagnose",
    "rdmapost.Send",
    "rdmapost.SendWithImm",
    "rdmapost.WaitTimeout.__init__",
    # It names array[int], which only type checkers know before Python 3.12.
    "rdmapost.pingpong.Latency.of",
}
"""What has a hint that only type checkers can resolve, besides a NamedTuple's __new__ on 3.14."""


def annotated(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield a class or function, and the methods and properties of a class, with their names."""
    yield name, thing
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isfunction(function) and (member[0] != "_" or member.endswith("__")):
            yield f"{name}.{member}", inspect.unwrap(function)


@pytest.mark.parametrize("module", PUBLIC)
def test_type_hints_of_public_names_can_be_resolved(module: str) -> None:
    """As frameworks do that read them at run time."""
    public = importlib.import_module(module)
    wrong = {}
    for name in public.__all__:
        thing = getattr(public, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        for full_name, each in annotated(f"{module}.{name}", thing):
            try:
                typing.get_type_hints(each)
            except (NameError, TypeError) as error:
                wrong[full_name] = str(error)
    left = {name for name in wrong if name not in NAMED_ONLY and not name.endswith(".__new__")}
    assert {name: wrong[name] for name in left} == {}
