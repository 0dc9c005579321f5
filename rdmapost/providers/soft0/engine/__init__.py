"""The soft device: RDMA in this process, in Python, by the specification.

One file per concept: ``packets`` has the messages between queue pairs, ``requester`` and
``responder`` the two sides, ``qp`` the state machine, ``memory`` the keys, ``completion`` the
completion queues and events. Nothing here uses the verbs' C structs or the library's resources:
``provider``, ``queues`` and ``state`` of ``providers.soft0`` translate.

A signal handler may raise between any two bytecodes, so no change here is final until its verb or
step has returned: then C commits it; if it raised, C rolls it back (``_c/soft0/journal.c``). That
covers the attributes of a ``Record`` or a ``DeviceQueue``, a ``Table``, and deques changed by
``put`` and ``take``. Other objects do not change once they are reachable from these. What a journal
cannot undo, such as a write to a descriptor, goes through ``on_commit``.
"""
