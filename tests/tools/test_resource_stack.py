"""Resources that a tool creates and closes as a unit."""

from __future__ import annotations

import rdmapost as rp
from rdmapost.tools.resource_stack import ResourceStack


class Adds:
    """Adds a resource to the stack that is closing it, as another thread may."""

    def __init__(self, stack: ResourceStack, pd: rp.PD) -> None:
        self.stack, self.pd, self.closed = stack, pd, False

    def close(self) -> None:
        self.closed = True
        self.stack.add(self.pd)


def test_resource_stack_closes_resources_that_are_added_while_it_closes() -> None:
    with rp.open_device("soft0") as context:
        stack = ResourceStack()
        held = [stack.add(rp.PD(context)) for _ in range(9)]
        stack.add(Adds(stack, rp.PD(context)))
        for pd in held[:3]:
            pd.close()
        stack.close()
        assert [pd.closed for pd in held] == [True] * 9
        stack.close()
