"""Work requests: their classes, the man pages' rules, and the queues that they are posted to."""

from .fields import describe_fields
from .wr import use_fast_init

use_fast_init()
describe_fields()
