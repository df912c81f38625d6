"""What people look at: pictures, pages, doctor, watch, explorer.

`capi.report(run)` writes the report of a run. Once this package is imported it stands where that function stood, so it
can be called too.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("capi.report.run_report").report(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
