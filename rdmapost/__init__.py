"""Post RDMA work requests from Python.

Everything public is here::

    import rdmapost as rp

    with rp.open_device() as context, rp.PD(context) as pd, rp.CQ(context) as cq:
        ...
"""

__version__ = "0.1.0"

# Like typing.TYPE_CHECKING, but importing typing takes time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from .enums import *  # noqa: F403
    from .errors import *  # noqa: F403
    from .wr import *  # noqa: F403
else:

    def __getattr__(name):
        """Load everything on the first use of anything, so that importing this costs nothing."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            # "from . import _public" would look it up here.
            from ._public import __dict__ as public
        except AttributeError as error:
            # Otherwise it would look as if the name were missing here.
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
