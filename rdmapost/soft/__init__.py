"""The soft device: RDMA in this process, in Python, by the specification.

A file a concept: ``wire`` is what queue pairs say to each other, ``requester``
and ``responder`` the two sides of it, ``qp`` the state machine, ``memory`` the
keys, ``completion`` the completion queues and events.  Nothing here knows the
C structs of the verbs, or the library's resources: ``providers.soft`` stands
between.
"""
