"""soft0's engine: RDMA in this process, in Python, by the specification.

One file per concept: ``packets`` has the messages between queue pairs, ``requester`` and
``responder`` the two sides, ``qp`` the state machine, ``memory`` the keys, ``completion`` the
completion queues and events. Nothing here uses the verbs' C structs or the library's resources:
``provider``, ``queues`` and ``state`` of ``providers.soft0`` translate.

A signal handler may raise between any two bytecodes, so a control verb, and the execution of each
work request, is a transaction: C commits its changes when it returns, and rolls them back if it
raises (``_c/soft0/journal.c``). That covers the attributes of a ``Record`` or a ``DeviceQueue``, a
``JournaledDict``, and deques changed by ``put`` and ``take``. Other objects do not change once they
are reachable from these. What a journal cannot undo, such as a write to a descriptor, goes through
``on_commit``.
"""
