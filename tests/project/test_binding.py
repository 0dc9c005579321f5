"""The compiled module: what it exports, how it finds libibverbs, and that it fits the header."""

from __future__ import annotations

import ctypes
import enum
import itertools
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import LOSES_MEMORY, ROOT, prints, run_python

import rdmapost
from rdmapost import _verbs, enums
from rdmapost._binding import ffi, lib

EXPORTED = {
    "PyInit__verbs",
    "ibv_post_send",
    "ibv_post_recv",
    "ibv_post_srq_recv",
    "ibv_post_srq_ops",
    "ibv_poll_cq",
    "ibv_req_notify_cq",
}


ORDER = "<" if sys.byteorder == "little" else ">"
"""The byte order of the ELF files of this machine, for struct."""


def sections(data: bytes, wanted: int) -> Iterator[tuple[bytes, int]]:
    """Yield the content of an ELF file's sections of one type, and where their strings start."""
    assert data[:5] == b"\x7fELF\x02", "a 64-bit ELF file"
    # e_shoff, e_shentsize and e_shnum.
    start, size, count = struct.unpack_from(f"{ORDER}40xQ10xHH", data)
    # sh_type, sh_offset, sh_size and sh_link of every section.
    found = [
        struct.unpack_from(f"{ORDER}4xI16xQQI", data, start + index * size)
        for index in range(count)
    ]
    for section_type, offset, length, link in found:
        if section_type == wanted:
            yield data[offset : offset + length], found[link][1]


def string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def exported_symbols(path: str) -> set[str]:
    """Return what `nm -D --defined-only` lists: the global symbols that an ELF file defines."""
    data = pathlib.Path(path).read_bytes()
    return {
        string(data, strings + name)
        for symbols, strings in sections(data, 11)  # SHT_DYNSYM
        for name, info, _, section in struct.iter_unpack(f"{ORDER}IBBH16x", symbols)
        if section and info >> 4 in (1, 2)  # defined; global or weak
    }


def needed_libraries(path: str) -> set[str]:
    """Return the libraries that the loader brings in with an ELF file."""
    data = pathlib.Path(path).read_bytes()
    return {
        string(data, strings + value)
        for entries, strings in sections(data, 6)  # SHT_DYNAMIC
        for tag, value in struct.iter_unpack(f"{ORDER}QQ", entries)
        if tag == 1  # DT_NEEDED
    }


def test_compiled_module_exports_the_posting_calls_and_nothing_else():
    assert exported_symbols(_verbs.__file__) == EXPORTED


def test_compiled_module_links_libc_and_nothing_else():
    """That is, the parts of libc; under .ci/sanitize also the sanitizers' runtime."""
    needed = needed_libraries(_verbs.__file__)
    libc = ("libc.", "libdl.", "libpthread.", "ld-linux", "ld-musl", "ld64.")
    watching = ("libasan.", "libubsan.", "libclang_rt.")
    if any(name.startswith(watching) for name in needed):
        # clang's runtime comes with the compiler's own.
        libc += (*watching, "libgcc_s.")
    assert any(name.startswith("libc.") for name in needed)
    assert not [name for name in needed if not name.startswith(libc)]


@pytest.mark.parametrize("name", sorted(EXPORTED - {"PyInit__verbs"}))
def test_exported_call_can_be_found_by_ctypes(name):
    """They are inline in the header, so that no library has them."""
    symbol = getattr(ctypes.CDLL(_verbs.__file__), name)
    assert callable(symbol)
    assert ctypes.cast(symbol, ctypes.c_void_p).value


def test_exported_post_send_is_callable_from_ctypes():
    """Calling it through ctypes reaches the driver's function in the context's ops."""
    calls = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)
    def post_send(qp, wr, bad):
        calls.append((qp, wr, bad))
        return 95

    post = ctypes.CDLL(_verbs.__file__).ibv_post_send
    post.argtypes = [ctypes.c_void_p] * 3
    # struct ibv_context: device, then the ops; every slot is ours, so no layout is assumed.
    context = (ctypes.c_void_p * 64)(*[ctypes.cast(post_send, ctypes.c_void_p).value] * 64)
    qp = (ctypes.c_void_p * 32)(ctypes.addressof(context))
    assert post(ctypes.addressof(qp), 16, 32) == 95
    assert calls == [(ctypes.addressof(qp), 16, 32)]


# ---- libibverbs -------------------------------------------------------------------


def test_import_does_not_load_libibverbs():
    maps = prints(
        "import pathlib, rdmapost; rdmapost.QP; print(pathlib.Path('/proc/self/maps').read_text())"
    )
    assert _verbs.__file__ in maps
    assert "libibverbs" not in maps


def test_missing_libibverbs_is_an_error_when_a_device_is_opened():
    said = prints(
        "import rdmapost as rp\n"
        "for name in (None, 'mlx5_0'):\n"
        "    try: rp.open_device(name)\n"
        "    except rp.NoRdmaError as error: print(error, flush=True)\n",
        RDMAPOST_LIBIBVERBS="/nonexistent/libibverbs.so.1",
        RDMAPOST_DEVICE="",
    )
    lines = said.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "/nonexistent/libibverbs.so.1" in line
        assert "RDMAPOST_LIBIBVERBS" in line


def test_missing_libibverbs_says_which_package_to_install():
    """The loader finds nothing, as on a machine without rdma-core."""
    said = prints(
        "import rdmapost.providers.verbs as v, rdmapost as rp\n"
        "v._LIBRARY = 'libibverbs-that-is-not-there.so.1'\n"
        "try: rp.open_device('mlx5_0')\n"
        "except rp.NoRdmaError as error: print(error, flush=True)\n",
        RDMAPOST_LIBIBVERBS="",
    )
    assert "apt install libibverbs1" in said
    assert "dnf install" in said


def test_library_that_is_not_libibverbs_is_refused():
    said = prints(
        "import rdmapost as rp\n"
        "try: rp.open_device('mlx5_0')\n"
        "except rp.NoRdmaError as error: print(error, flush=True)\n",
        RDMAPOST_LIBIBVERBS=_verbs.__file__,
    )
    assert f"{_verbs.__file__} is not libibverbs" in said


def test_loading_of_libibverbs_can_be_tried_again_after_a_failure():
    """A failure is not remembered: the next call tries again, and each gives its own reason."""
    said = prints(
        "import sys\n"
        "from rdmapost._binding import ffi, lib\n"
        "why = [ffi.new('char[512]') for _ in range(3)]\n"
        "print(lib.rp_load(b'/nonexistent', why[0], 512))\n"
        "print(lib.rp_load(sys.argv[1].encode(), why[1], 512))\n"
        "print(lib.rp_has_symbol(b'ibv_open_device'))\n"
        "print(lib.rp_load(ffi.NULL, why[2], 512))\n"
        "print(*(ffi.string(text).decode() for text in why), sep='\\n')\n",
        _verbs.__file__,
    ).splitlines()
    assert said[:4] == ["-1", "-1", "0", "-1"]
    assert "/nonexistent" in said[4]
    assert f"{_verbs.__file__} is not libibverbs" in said[5]
    assert said[6] == "no library was named"


def test_calls_before_libibverbs_is_loaded_fail_and_do_not_crash():
    """Every forwarder has its own answer while the function table is empty."""
    said = prints(
        "import errno\n"
        "from rdmapost._binding import ffi, lib\n"
        "NULL = ffi.NULL\n"
        "print(lib.ibv_open_device(NULL) == NULL, ffi.errno == errno.EOPNOTSUPP)\n"
        "print(lib.ibv_close_device(NULL) == errno.EOPNOTSUPP)\n"
        "print(lib.ibv_query_gid(NULL, 1, 0, NULL) == -1)\n"
        "lib.ibv_free_device_list(NULL)\n"
        "print(lib.rp_reg_mr(NULL, NULL, 1, 0) == NULL, ffi.errno == errno.EINVAL)\n"
        "print(lib.ibv_rereg_mr(NULL, 0, NULL, NULL, 0, 0) == -1)\n"
        "print(lib.ibv_reg_dmabuf_mr(NULL, 0, 1, 0, 0, 0) == NULL, ffi.errno == errno.EOPNOTSUPP)\n"
        "print(lib.rp_query_port(NULL, 1, NULL, NULL) == errno.EINVAL)\n"
        "print(lib.ibv_resize_cq(NULL, 1) == errno.EOPNOTSUPP)\n"
        "print(lib.rp_query_rt_values(NULL, NULL) == errno.EINVAL)\n"
    )
    assert set(said.split()) == {"True"}


def test_poll_of_no_entries_is_refused_by_the_shim():
    raw = ffi.new("struct ibv_wc[1]")
    assert lib.rp_poll_cq(ffi.NULL, raw, ffi.NULL, 1, 0, 0) == -1
    assert ffi.errno == 22


PARTS = """
import rdmapost as rp
from rdmapost._binding import native

def give(*parts):
    try:
        native.soft_device(*parts)
    except TypeError as error:
        print(error)

give(1, 2)
with rp.open_device("soft0") as context:
    give(*range(12))
    rp.PD(context).close()
"""


def test_soft_device_takes_its_parts_once_and_all_of_them():
    assert prints(PARTS).splitlines() == ["not the parts, or the device already has them"] * 2


# ---- layout and values ------------------------------------------------------------


def declared(keyword: str) -> list[str]:
    text = (ROOT / "rdmapost" / "_c" / "libibverbs" / "verbs.cdef.h").read_text()
    return re.findall(rf"^{keyword} (\w+) \{{", text, re.MULTILINE)


@pytest.mark.parametrize(
    "name", [f"{keyword} {name}" for keyword in ("struct", "union") for name in declared(keyword)]
)
def test_declared_struct_has_the_layout_of_the_header(name):
    """cffi compares size and offsets with the compiled header when the type is completed."""
    assert ffi.sizeof(name) > 0


MEMBERS = {
    "ibv_wr_opcode": (enums.Opcode, "IBV_WR_"),
    "ibv_send_flags": (enums.SendFlags, "IBV_SEND_"),
    "ibv_ops_wr_opcode": (enums.OpsOpcode, "IBV_WR_"),
    "ibv_ops_flags": (enums.OpsFlags, "IBV_OPS_"),
    "ibv_qp_type": (enums.QPType, "IBV_QPT_"),
    "ibv_qp_state": (enums.QPState, "IBV_QPS_"),
    "ibv_qp_attr_mask": (enums.QPAttrMask, "IBV_QP_"),
    "ibv_mig_state": (enums.MigState, "IBV_MIG_"),
    "ibv_access_flags": (enums.Access, "IBV_ACCESS_"),
    "ib_uverbs_advise_mr_advice": (enums.AdviseMRAdvice, "IB_UVERBS_ADVISE_MR_ADVICE_"),
    "ib_uverbs_advise_mr_flag": (enums.AdviseMRFlags, "IB_UVERBS_ADVISE_MR_FLAG_"),
    "ibv_mw_type": (enums.MWType, "IBV_MW_"),
    "ibv_srq_type": (enums.SRQType, "IBV_SRQT_"),
    "ibv_srq_attr_mask": (enums.SRQAttrMask, "IBV_SRQ_"),
    "ibv_wc_status": (enums.WCStatus, "IBV_WC_"),
    "ibv_wc_opcode": (enums.WCOpcode, "IBV_WC_"),
    "ibv_wc_flags": (enums.WCFlags, "IBV_WC_"),
    "ibv_create_cq_wc_flags": (enums.WCExFlags, "IBV_WC_EX_"),
    "ibv_mtu": (enums.MTU, "IBV_"),
    "ibv_port_state": (enums.PortState, "IBV_PORT_"),
    "ibv_node_type": (enums.NodeType, "IBV_NODE_"),
    "ibv_atomic_cap": (enums.AtomicCap, "IBV_ATOMIC_"),
    "ibv_transport_type": (enums.TransportType, "IBV_TRANSPORT_"),
    "ibv_port_cap_flags": (enums.PortCap, "IBV_PORT_"),
    "ibv_odp_general_caps": (enums.ODPGeneralCap, "IBV_ODP_"),
    "ibv_odp_transport_cap_bits": (enums.ODPTransportCap, "IBV_ODP_"),
    "ibv_raw_packet_caps": (enums.RawPacketCap, "IBV_RAW_PACKET_CAP_"),
    "ibv_tm_cap_flags": (enums.TMCap, "IBV_TM_CAP_"),
    "ibv_event_type": (enums.EventType, "IBV_EVENT_"),
}


NEWER = {
    "IBV_ACCESS_FLUSH_GLOBAL",
    "IBV_ACCESS_FLUSH_PERSISTENT",
    "IBV_EVENT_DEVICE_SPEED_CHANGE",
    "IBV_ODP_SUPPORT_ATOMIC_WRITE",
    "IBV_ODP_SUPPORT_FLUSH",
    "IBV_WC_FLUSH",
    "IBV_WR_FLUSH",
}
"""Members that the header of rdma-core 44 lacks."""


@pytest.fixture(scope="session")
def header(tmp_path_factory):
    """The enumerations of the installed header, with their members' values."""
    cc = os.environ.get("CC", "cc").split()
    include = ["-x", "c", "-include", "infiniband/verbs.h", "-include", "stdio.h"]
    # Ignore the compiler's own leaks under .ci/sanitize.
    env = {**os.environ, **LOSES_MEMORY}
    if shutil.which(cc[0]) is None:
        pytest.skip("there is no C compiler here")
    text = subprocess.run(
        [*cc, "-E", "-P", *include, "/dev/null"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    found = {
        name: re.findall(r"(?:^|,)\s*(\w+)", body)
        for name, body in re.findall(r"\benum (\w+) \{([^}]*)\}", text)
        if name in MEMBERS
    }
    if not found:
        pytest.skip("there are no headers of libibverbs here")
    lines = [f'printf("%lld\\n", (long long){each});' for each in itertools.chain(*found.values())]
    program = tmp_path_factory.mktemp("header") / "values"
    subprocess.run(
        [*cc, *include, "-o", program, "-"],
        input=f"int main(void) {{ {' '.join(lines)} }}",
        env=env,
        text=True,
        check=True,
        timeout=120,
    )
    values = subprocess.run([program], capture_output=True, text=True, timeout=60).stdout.split()
    numbers = map(int, values)
    return {name: {each: next(numbers) for each in names} for name, names in found.items()}


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_declared_enumeration_agrees_with_the_header(name, header):
    enumeration, prefix = MEMBERS[name]
    ours = {prefix + member.name: member.value for member in enumeration}
    both = ours.keys() & header[name].keys()
    assert ours.keys() - both <= NEWER
    assert {key: ours[key] for key in both} == {key: header[name][key] for key in both}


INTERNAL = {"ibv_qp_init_attr_mask", "ibv_srq_init_attr_mask", "ibv_xrcd_init_attr_mask"}
"""Enumerations that only the library itself uses: they have no Python class."""


def test_every_declared_enumeration_is_compared():
    assert set(declared("enum")) - INTERNAL <= MEMBERS.keys()


@pytest.mark.parametrize("name", enums.__all__)
def test_every_member_of_an_enumeration_has_a_docstring(name):
    source = (ROOT / "rdmapost" / "enums.py").read_text()
    body = source.split(f"class {name}(", 1)[1].split("\nclass ", 1)[0]
    members = re.findall(r"^    (\w+) = [^\n]+\n    (\"\"\")?", body, re.MULTILINE)
    assert members
    assert [member for member, quotes in members if not quotes] == []
    assert issubclass(getattr(enums, name), enum.IntEnum | enum.IntFlag)


def test_everything_public_can_be_imported():
    missing = [name for name in rdmapost.__all__ if not hasattr(rdmapost, name)]
    assert missing == []
    assert len(set(rdmapost.__all__)) == len(rdmapost.__all__)


def test_only_the_main_interpreter_can_import_the_package():
    """Elsewhere a poll would wait for a lock that its own thread holds."""
    said = prints(
        "try:\n"
        "    import _interpreters as interpreters\n"
        "    options = ('legacy',)\n"
        "except ImportError:\n"
        "    import _xxsubinterpreters as interpreters\n"
        "    options = ()\n"
        "import rdmapost as rp\n"
        "code = ('import rdmapost as rp\\n'\n"
        "        'try: rp.open_device(\"soft0\")\\n'\n"
        "        'except ImportError as error: print(error, flush=True)')\n"
        "interpreter = interpreters.create(*options)\n"
        "interpreters.run_string(interpreter, code)\n"
        "interpreters.destroy(interpreter)\n"
        "rp.open_device('soft0').close()\n",
        **LOSES_MEMORY,  # cffi's modules outlive a subinterpreter
    )
    assert said == "rdmapost works only in the main interpreter of a process"


def test_importing_the_package_again_after_its_modules_were_forgotten_is_refused_by_name():
    said = prints(
        "import sys, rdmapost as rp\n"
        "rp.open_device('soft0').close()\n"
        "for name in [name for name in sys.modules if name.startswith('rdmapost')]:\n"
        "    del sys.modules[name]\n"
        "import rdmapost as again\n"
        "try: again.open_device('soft0')\n"
        "except ImportError as error: print(error)\n"
    )
    assert said.startswith("rdmapost can be imported only once in a process")


def test_import_of_the_bare_sources_says_what_to_do(tmp_path):
    """A user starts Python in a checkout, whose package is not the installed one."""
    shutil.copytree(ROOT / "rdmapost", tmp_path / "rdmapost", ignore=shutil.ignore_patterns("*.so"))
    # Without the finder of an editable installation.
    program = (
        "import sys\n"
        "sys.meta_path = [each for each in sys.meta_path if 'ditable' not in repr(each)]\n"
        "import rdmapost; rdmapost.QP"
    )
    done = run_python(program, PYTHONPATH=str(tmp_path))
    assert "run 'pip install -e .' there, or start Python in another directory." in done.stderr


def test_interpreter_ends_quietly_after_a_bare_import():
    assert run_python("import rdmapost").stderr == ""
    assert run_python("import rdmapost; rdmapost.QP").stderr == ""
