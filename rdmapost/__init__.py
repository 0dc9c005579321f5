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
    from ._public import __all__ as __all__
else:
    import atexit
    import sys

    _exited = False

    @atexit.register
    def _close_all():
        """Close open resources; atexit handlers registered after the import have run by then."""
        global _exited
        resource = sys.modules.get(f"{__name__}.resources.resource")
        _exited = resource is None
        if resource:
            resource.close_all()

    def __getattr__(name):
        """Load everything when a name is first used: importing the package costs nothing."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if _exited:
            raise ImportError(f"{__name__} cannot be loaded: the interpreter is exiting")
        try:
            # "from . import _public" would first call this function with "_public".
            from ._public import __dict__ as public
        except AttributeError as error:
            # An AttributeError would suggest that this module lacks the name.
            raise ImportError(
                f"{__name__} cannot be loaded: {error}; in a checkout, was the compiled module "
                "built from these sources? (pip install -e .)"
            ) from error

        names = public["__all__"]
        globals().update(public["ANNOTATIONS"], __all__=names)
        globals().update({each: public[each] for each in names})
        try:
            return globals()[name]
        except KeyError:
            text = f"module {__name__!r} has no attribute {name!r}"
            if near := [each for each in names if _folded(each) == _folded(name)]:
                # Without ``obj``, Python does not add a second suggestion.
                error = AttributeError(f"{text}; did you mean {' or '.join(near)}?", name=name)
            else:
                error = AttributeError(text)
            raise error from None

    def _folded(name):
        return name.replace("_", "").lower()

    def __dir__():
        return sorted([*__getattr__("__all__"), "__version__"])
