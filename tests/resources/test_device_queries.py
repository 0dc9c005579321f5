"""What can be asked about devices and ports."""

from __future__ import annotations

import os
import pathlib
import re

import pytest
from support import needs, null_device

import rdmapost as rp
from rdmapost import QPType
from rdmapost._binding import ffi
from rdmapost.resources.device_attr import read_device_attr

null = null_device.null
on_null = null_device.on_null

# ---- the device ------------------------------------------------------------------


def test_device_attributes_include_the_extended_ones(context: rp.Context) -> None:
    """Their types are those of the man page, on every device."""
    attr = context.attr
    assert isinstance(attr.odp_caps.general_caps, rp.ODPGeneralCap)
    assert isinstance(attr.odp_caps.rc_odp_caps, rp.ODPTransportCap)
    assert isinstance(attr.raw_packet_caps, rp.RawPacketCap)
    assert isinstance(attr.tm_caps.flags, rp.TMCap)
    assert isinstance(attr.device_cap_flags_ex, rp.DeviceCap)
    # The lower half is the older field.
    assert attr.device_cap_flags_ex & 0xFFFF_FFFF in (0, attr.device_cap_flags)


def test_capability_that_has_no_name_is_kept() -> None:
    raw = ffi.new("struct ibv_device_attr_ex *")
    raw.device_cap_flags_ex = 1 << 63 | rp.DeviceCap.ATOMIC_WRITE | rp.DeviceCap.XRC
    caps = read_device_attr(raw).device_cap_flags_ex
    assert caps == 1 << 63 | 1 << 40 | 1 << 20
    assert rp.DeviceCap.ATOMIC_WRITE in caps
    assert "ATOMIC_WRITE" in str(caps)


def test_on_demand_regions_can_be_registered_where_the_device_says_so(
    context: rp.Context, pd: rp.PD
) -> None:
    odp = context.attr.odp_caps
    flags = rp.Access.LOCAL_WRITE | rp.Access.ON_DEMAND
    if odp.general_caps & rp.ODPGeneralCap.SUPPORT:
        rp.MR(pd, 4096, flags).close()
        assert odp.rc_odp_caps
    else:
        assert (odp.rc_odp_caps, odp.uc_odp_caps, odp.ud_odp_caps, odp.xrc_odp_caps) == (0,) * 4
        words = rf"{context.name} does not support Access\.ON_DEMAND \(see its attr\.odp_caps\)$"
        with pytest.raises(rp.VerbsError, match=words):
            rp.MR(pd, 4096, flags)


@pytest.mark.parametrize(
    ("flag", "cap"),
    [
        (rp.Access.FLUSH_GLOBAL, rp.DeviceCap.FLUSH_GLOBAL),
        (rp.Access.FLUSH_PERSISTENT, rp.DeviceCap.FLUSH_PERSISTENT),
    ],
)
def test_regions_can_be_flushed_where_the_device_says_so(context, pd, flag, cap) -> None:
    flags = rp.Access.LOCAL_WRITE | flag
    if not context.attr.device_cap_flags_ex & cap:
        words = (
            rf"{context.name} does not support Access\.{flag} \(see its attr\.device_cap_flags_ex"
        )
        with pytest.raises(rp.VerbsError, match=words):
            rp.MR(pd, 4096, flags)
        return
    refused = ""
    try:
        rp.MR(pd, 4096, flags).close()
    except rp.VerbsError as error:
        refused = str(error)
    if context.kind == "soft" or flag is rp.Access.FLUSH_GLOBAL:
        assert not refused
    else:
        # Anonymous memory is not persistent, and Soft-RoCE checks that.
        assert refused.endswith("may require persistent memory for Access.FLUSH_PERSISTENT")


def test_tso_caps_say_which_queue_pairs_can_be_made_for_it(
    context: rp.Context, pd: rp.PD, cq: rp.CQ
) -> None:
    tso = context.attr.tso_caps
    assert not tso.supports(QPType.RC)
    needs(tso.supports(QPType.UD), "TSO on UD", context)
    rp.QP(pd, QPType.UD, cq, max_tso_header=64).close()


def test_soft0_has_tag_matching_and_segmentation(soft: str) -> None:
    with rp.open_device(soft) as context:
        attr = context.attr
        assert attr.tm_caps.max_num_tags > 0
        assert attr.tm_caps.flags == rp.TMCap.RC
        assert attr.tso_caps.max_tso > 0
        assert attr.tso_caps.supports(QPType.RAW_PACKET)
        assert attr.raw_packet_caps == rp.RawPacketCap.IP_CSUM
        assert attr.odp_caps.general_caps == 0


def test_library_without_the_extended_query_leaves_its_attributes_zero(on_null) -> None:
    said = on_null("""
        context = rp.open_device("null0")
        attr = context.attr
        print(attr.max_sge, attr.tm_caps.max_num_tags, attr.tso_caps.max_tso, attr.raw_packet_caps)
        print(context.query_gid_ex(1, 0).gid, context.query_gid_ex(1, 0).gid_type)
        try:
            context.query_gid(1, 1)
        except ValueError as error:
            print(error)
    """)
    assert said.splitlines() == [
        "32 0 0 0",
        "fe80::1 None",
        "null0 port 1 has no GID with index 1; the valid ones are: 0",
    ]


def test_transport_type_of_every_listed_device_is_known() -> None:
    assert {info.transport_type for info in rp.list_devices()} == {rp.TransportType.IB}


def test_types_of_every_listed_device_have_names(on_null) -> None:
    said = on_null("""
        for info in rp.list_devices():
            print(info.name, info.node_type.name, info.transport_type.name)
    """)
    assert said.splitlines() == ["null0 CA IB", "soft0 CA IB"]


@pytest.mark.parametrize("node", ["1", "-1", None])
def test_device_info_says_where_the_device_is_plugged(tmp_path: pathlib.Path, node) -> None:
    function = tmp_path / "devices/pci0000:3a/0000:3b:00.1"
    entry = tmp_path / "class/infiniband/mlx5_1"
    for folder in (function, entry):
        folder.mkdir(parents=True)
    (entry / "device").symlink_to(os.path.relpath(function, entry))
    if node is not None:
        (function / "numa_node").write_text(f"{node}\n")
    info = rp.DeviceInfo("mlx5_1", "verbs", 0, rp.NodeType.CA, str(entry))
    assert info.pci_address == "0000:3b:00.1"
    assert info.numa_node == (1 if node == "1" else None)


def test_device_of_no_bus_has_no_pci_address_and_no_node(context: rp.Context) -> None:
    [info] = [info for info in rp.list_devices() if info.name == context.name]
    needs(info.kind == "soft" or info.name.startswith("rxe"), "virtual devices", context)
    assert info.pci_address is None
    assert info.numa_node is None


# ---- the port ----------------------------------------------------------------------


def test_port_attributes_are_those_of_the_man_page(context: rp.Context) -> None:
    port = context.query_port(1)
    assert isinstance(port.port_cap_flags, rp.PortCap)
    assert 0 <= port.lmc <= 7
    assert 0 <= port.sm_sl <= 15
    assert port.bad_pkey_cntr >= 0
    if context.kind == "soft":
        assert port.port_cap_flags == rp.PortCap.IP_BASED_GIDS


@pytest.mark.parametrize("speed", [0, 1 << 8])
def test_speed_beyond_the_older_field_is_read_where_the_library_has_it(on_null, speed: int) -> None:
    said = on_null(
        """
        port = rp.open_device("null0").query_port(1)
        print(port.active_speed, port.active_speed_ex, port.port_cap_flags2)
        """,
        NULL_ACTIVE_SPEED_EX=str(speed),
    )
    assert said == f"32 {speed} 0"


def test_query_gid_returns_the_entry_of_the_gid_table(context: rp.Context) -> None:
    for entry in context.query_gid_table(1):
        assert context.query_gid(1, entry.gid_index) == entry.gid
        assert context.query_gid_ex(1, entry.gid_index) == entry


@pytest.mark.parametrize("index", [-1, 255, 1 << 16, 1 << 40])
def test_missing_gid_is_an_error_that_names_the_valid_ones(context: rp.Context, index: int) -> None:
    last = context.query_gid_table(1)[-1].gid_index
    for query in (context.query_gid, context.query_gid_ex, context.choose_gid):
        with pytest.raises(ValueError, match=f"no GID with index {index}; .* {last}$"):
            query(1, index)


def test_gid_of_a_queue_pair_at_an_empty_entry_is_the_same_error(
    context: rp.Context, pd: rp.PD, cq: rp.CQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that loses its address leaves an entry of the table empty."""
    with rp.QP(pd, QPType.RC, cq, gid_index=0) as qp:
        monkeypatch.setattr(rp.Context, "query_gid_table", lambda *_: [])
        for use in (lambda: qp.gid, qp.endpoint):
            with pytest.raises(ValueError, match="port 1 has no GID with index 0"):
                use()


def test_gid_of_a_missing_port_is_an_error(context: rp.Context) -> None:
    with pytest.raises(ValueError, match="has no port 9"):
        context.query_gid(9, 0)


def test_pkey_index_of_a_pkey_leads_back_to_that_pkey(context: rp.Context) -> None:
    pkey = context.query_pkey(1, 0)
    index = context.get_pkey_index(pkey)
    assert context.query_pkey(1, index) == pkey


@pytest.mark.parametrize("beyond", [-1, 0, 1 << 16, 1 << 40])
def test_pkey_index_outside_the_table_is_an_error_that_names_the_range(
    context: rp.Context, beyond: int
) -> None:
    length = context.query_port(1).pkey_tbl_len
    index = beyond or length
    text = f"pkey_index={index} is not in 0..{length - 1}, the P_Key table of {context.name} port 1"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        context.query_pkey(1, index)
    with pytest.raises(ValueError, match="has no port 9"):
        context.query_pkey(9, 0)


def test_missing_pkey_is_an_error_that_names_the_others(context: rp.Context) -> None:
    with pytest.raises(rp.VerbsError, match=r"ibv_get_pkey_index.*no P_Key 0x1234; it has 0xffff"):
        context.get_pkey_index(0x1234)
    with pytest.raises(ValueError, match=r"pkey=65536 is not in 0\.\.65535"):
        context.get_pkey_index(0x10000)
