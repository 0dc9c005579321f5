"""Post RDMA work requests from Python.

Everything public is here::

    import rdmapost as rp

    with rp.open_device() as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        ...
"""

__version__ = "0.1.0"

# As typing's, without the time that importing typing takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from .enums import *  # noqa: F403
    from .errors import *  # noqa: F403
    from .wr import *  # noqa: F403
else:

    def __getattr__(name):
        """Load everything at the first use of anything, so that the import costs nothing."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            # "from . import _public" would ask here for it.
            from ._public import __dict__ as public
        except AttributeError as error:
            # It would read as if the name were missing here.
            raise ImportError(
                f"{__name__} cannot be loaded: {error}; in a checkout, is the compiled module of "
                "these sources? (pip install -e .)"
            ) from error

        names = public["__all__"]
        globals().update({each: public[each] for each in names}, __all__=names)
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
