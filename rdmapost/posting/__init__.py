"""Work requests: their classes, the rules from the man pages, and the queues they are posted to."""

from .fields import describe_fields
from .wr import use_fast_init

use_fast_init()
describe_fields()
