"""The verbs objects, one type per file: devices, regions, completion queues, queue pairs."""

from .._binding import native, once
from ..enums import WCFlags, WCOpcode, WCStatus
from ..errors import VerbsError
from ..posting.wr import SGE
from .address import AH
from .cq import WC
from .memory import MR, MW

# MR.__getitem__ is C's (_c/posting/region.c).
once(native.make_sges, "MR", MR, SGE)
for _name, _class in (("SGE", SGE), ("MR", MR), ("MW", MW), ("AH", AH)):
    once(native.describe_resource, _name, _name, _class)
once(
    native.make_completions_of,
    "WC",
    WC,
    {int(status): status for status in WCStatus},
    WCStatus.GENERAL_ERR,
    {int(opcode): opcode for opcode in WCOpcode},
    {flags: WCFlags(flags) for flags in range(128)},
    WCFlags,
    VerbsError,
)
