"""soft0, the software device: its provider, and the engine that executes what is posted."""

from ..._binding import native, once
from .state import parts

once(native.soft_device, "soft0", *parts)
