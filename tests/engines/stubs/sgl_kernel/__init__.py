"""Stands in for SGLang's CUDA kernels, which it imports everywhere and never calls on a plain CPU.

Any name can be imported from here or from a module below; calling one raises.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import typing


class _Members(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(metaclass=_Members):
    """A kernel, a type or an enumeration that is not here."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} is a stub")


def _absent(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Members(name, (_Absent,), {})


class _Module(types.ModuleType):
    __path__: typing.ClassVar = []

    def __getattr__(self, name):
        return _absent(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
__version__ = "0.28.0"


def __getattr__(name):
    return _absent(name)
