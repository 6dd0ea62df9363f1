"""Which members of a class the API reference has, and what the source says of them behind the line."""

import inspect
import re
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType

from sphinx.pycode import ModuleAnalyzer

_FIELD = re.compile(r"^(    [A-Za-z]\w*(?:: | = )[^#\n]*)  # (?!noqa|type:)(?=.)", re.MULTILINE)


def read_comments(package: Path) -> None:
    """Let Sphinx take the comment behind a field, or a member of an enum, for its documentation, as it does with `#:`."""
    for path in package.rglob("*.py"):
        source = path.read_text()
        marked = _FIELD.sub(r"\1  #: ", source)
        if marked != source:
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            ModuleAnalyzer.cache["module", name] = ModuleAnalyzer.for_string(marked, name, str(path))


def skip(app: object, what: str, name: str, obj: object, skipped: bool, options: object) -> bool | None:
    """For Sphinx's event `autodoc-skip-member`; None leaves it to Sphinx, which skips what has no docstring.

    Methods, properties, classes and members of enums are shown without one, too, unless it is that of a base class. Fields are not: the
    signature and the list in the docstring of the class have them.
    """
    if name.startswith("_") or not isinstance(obj, FunctionType | MethodType | property | type | Enum):
        return None
    return _only_implements(obj)


def _only_implements(obj: object) -> bool:
    if not isinstance(obj, FunctionType) or obj.__doc__ or "." not in obj.__qualname__:
        return False
    owner = getattr(inspect.getmodule(obj), obj.__qualname__.partition(".")[0], None)
    return inspect.isclass(owner) and any(hasattr(base, obj.__name__) for base in owner.__mro__[1:])
