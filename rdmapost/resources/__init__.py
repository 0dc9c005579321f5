"""The verbs objects, one type per file: devices, regions, completion queues, queue pairs."""

import functools

from .._binding import native, once
from ..enums import WCFlags, WCOpcode, WCStatus, reported
from ..posting.columns import Blocks, Ranges
from ..posting.wr import SGE, RecvWR
from .ah import AH
from .buffers import check_rows
from .cq import WC
from .mr import MR
from .mw import MW

for _class in (SGE, MR, MW, AH, Blocks, Ranges, RecvWR):
    _name = _class.__name__
    once(native.describe_resource, _name, _name, _class)
once(
    native.describe_wc,
    "WC",
    WC,
    {int(status): status for status in WCStatus},
    functools.partial(reported, WCStatus),
    {int(opcode): opcode for opcode in WCOpcode},
    functools.partial(reported, WCOpcode),
    {flags: WCFlags(flags) for flags in range(128)},
    WCFlags,
    check_rows,
)
