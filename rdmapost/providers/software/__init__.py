"""What all software devices share: RDMA as specified, in Python, in this process.

``provider`` has the control verbs, whose queues ``create_queues`` makes; ``state`` has the object
behind each C struct. Below them is one file per concept, without C structs: ``device``; ``qp`` (the
state machine); ``transport_messages`` (the messages between queue pairs); ``responder`` (the
effects of a request); ``memory`` (the keys); ``completion`` (completion queues and events). Each
device moves messages in its own way: ``providers.soft0``, ``providers.roce``.

A signal handler may raise between any two bytecodes, so a control verb, and the execution of each
work request, is a transaction: C commits its changes when it returns, and rolls them back if it
raises (``_c/software/journal.c``). That covers the attributes of a ``Record`` or a ``DeviceQueue``,
a ``JournaledDict``, and deques changed by ``put`` and ``take``. Other objects do not change once
they are reachable from these. What a journal cannot undo, such as a write to a descriptor, goes
through ``on_commit``.
"""

from ..._binding import native, once
from .state import parts

once(native.soft_device, "software", *parts)
