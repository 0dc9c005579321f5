"""Protection domains (PD): closing them."""

from __future__ import annotations

import pytest

import rdmapost as rp

# ---- regions ----------------------------------------------------------------------


def test_closed_pd_is_refused(context):
    pd = rp.PD(context)
    pd.close()
    for make in (lambda: rp.MR(pd, 64), lambda: rp.SRQ(pd), lambda: rp.MW(pd)):
        with pytest.raises(rp.ClosedError, match="PD is closed"):
            make()


# ---- closing what is in flight ----------------------------------------------------


def test_pd_with_open_resources_names_them(rc):
    with pytest.raises(rp.InUseError, match="PD cannot be closed: MR of 8192 bytes"):
        rc.pd.close()
    with pytest.raises(
        rp.InUseError, match=r"device .* cannot be closed: .* or call close_all\(\)"
    ):
        rc.pd.context.close()
    rc.works()
