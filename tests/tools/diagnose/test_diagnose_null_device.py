"""The doctor on the null device, which fails on demand."""

from __future__ import annotations

from support import null_device

null = null_device.null
on_null = null_device.on_null


def test_doctor_finds_devices_that_cannot_be_listed_or_opened(on_null):
    code = """
    from rdmapost.diagnose import diagnose_machine
    for found in diagnose_machine("null0"):
        print(found.name, found.severity, found.evidence, sep=" | ")
    """
    text = on_null(code, NULL_REFUSES="ibv_get_device_list=5")
    assert "devices-not-listed | problem | ibv_get_device_list: EIO" in text
    text = on_null(code, NULL_REFUSES="ibv_open_device=13")
    assert "not-opened | problem | ibv_open_device: EACCES" in text
    text = on_null(code, NULL_PORT_STATE="2")
    assert "port-down | problem | null0 port 1 is INIT (LinkUp): it carries no traffic" in text


def test_a_queue_pair_of_infiniband_is_diagnosed(on_null):
    """On InfiniBand the LID is the address, and no GID is used."""
    text = on_null(
        """
        import os
        context, pd, cq = resources()
        a, b = (rp.QP(pd, rp.QPType.RC, cq) for _ in "ab")
        a.connect(b.endpoint())
        b.connect(a.endpoint())
        names = {found.name: found.severity for found in a.diagnose(b)}
        print(names.get("port-active"), [name for name in names if name.startswith("gid")])
        os.environ["NULL_PORT_STATE"] = "1"
        print([f.evidence for f in a.diagnose() if f.name == "port-down"])
        """
    )
    first, second = text.splitlines()
    assert first == "ok []"
    assert second == "['null0 port 1 is DOWN (LinkUp): it carries no traffic']"
