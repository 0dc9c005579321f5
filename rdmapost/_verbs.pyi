# The compiled module, made by build_ffi.py from rdmapost/_c/.  cffi's own stubs
# know nothing of C structs, so what comes out of it is Any.
from typing import Any

ffi: Any
lib: Any
