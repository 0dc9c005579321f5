"""The soft device: RDMA in this process, in Python, by the specification.

A file a concept: ``wire`` is what queue pairs say to each other, ``requester``
and ``responder`` the two sides of it, ``qp`` the state machine, ``memory`` the
keys, ``completion`` the completion queues and events.  Nothing here knows the
C structs of the verbs, or the library's resources: ``providers.soft`` stands
between.

A signal handler may raise between any two bytecodes, so nothing that is done here
lasts until the verb or the step of which it is a part has returned: then C commits
it, and otherwise takes it back (``_c/soft_journal.c``).  That holds for the attributes
of a ``Record`` or a ``DeviceQueue``, for a ``Table``, and for deques that are changed by
``put`` and ``take``.  Other objects are not changed once they can be reached from these;
and what a journal cannot take back, such as a write to a descriptor, is left to
``on_commit``.
"""
