"""The soft device: RDMA in this process, in Python, by the specification.

One file per concept: ``wire`` is what queue pairs say to each other, ``requester`` and
``responder`` the two sides, ``qp`` the state machine, ``memory`` the keys, ``completion`` the
completion queues and events. Nothing here knows the verbs' C structs or the library's resources:
``providers.soft`` stands between.

A signal handler may raise between any two bytecodes, so nothing done here is final until its verb
or step has returned: then C commits it, and otherwise rolls it back (``_c/soft0/journal.c``). That
covers the attributes of a ``Record`` or a ``DeviceQueue``, a ``Table``, and deques changed by
``put`` and ``take``. Other objects do not change once they can be reached from these; and what a
journal cannot undo, such as a write to a descriptor, is left to ``on_commit``.
"""
