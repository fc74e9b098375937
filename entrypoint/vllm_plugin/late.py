"""Do something right after a module has been imported, without importing it now.

vLLM's loaders cost a second to import, and only its workers do so: its server and engine core
would each pay that second for nothing, one after the other.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, do: Callable[[], None]) -> None:
    """Call `do` once: now if the module `name` is imported already, else right after it is."""
    if name in sys.modules:
        do()
    elif not any(isinstance(f, _Watch) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, do))


class _Watch(MetaPathFinder):
    """Finds one module by asking all other finders, then takes itself away."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self.name, self.do = name, do

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.do)
        return spec


class _Then(Loader):
    """Another loader, and something to do after it."""

    def __init__(self, loader: Loader, do: Callable[[], None]) -> None:
        self.loader, self.do = loader, do

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader, for its resources and for reloading.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.do()
