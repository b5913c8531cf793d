"""The program in which a completion meets its unit tests: it runs in the sandbox, as `__main__`, and leaves a verdict.

The verdict is a key that only this program was given, and it is written only after the last test. What a completion
prints, registers or exits with is therefore no verdict. The standard library only.
"""

import builtins
import json
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

GIVEN, VERDICT = "given.json", "verdict"


def main() -> None:
    with open(GIVEN) as file:
        given = json.load(file)
    os.unlink(GIVEN)  # the completion reads neither the tests nor the key
    write, leave = write_verdict(given.pop("key")), os._exit
    code, tests = given.pop("code"), given.pop("tests")
    module = sys.modules["program"] = sys.modules["solution"] = types.ModuleType("program")
    namespace = vars(module)
    restore = remember()
    exec(compile(code, "completion.py", "exec", dont_inherit=True), namespace)
    restore()
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), namespace)
    run_tests(namespace)
    write()
    leave(0)  # neither threads nor functions of the completion run after it


def write_verdict(key: str) -> Callable[[], None]:
    """A function that writes the key, by functions as they are now."""
    opened, written, flags = os.open, os.write, os.O_CREAT | os.O_EXCL | os.O_WRONLY
    return lambda: (written(opened(VERDICT, flags), key.encode()), None)[1]


def remember() -> Callable[[], None]:
    """A function that gives the modules imported now, unittest's classes and all of their functions back what they are now.

    A completion may have replaced `unittest.TestCase.assertEqual`, `math.isclose`, `builtins.sum` or this file's functions.
    """
    real = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]  # typing.io is a class
    modules = [(vars(module), dict(vars(module))) for module in (builtins, *real)]
    classes = [(cls, dict(vars(cls))) for cls in vars(unittest).values() if isinstance(cls, type)]
    known = dict(sys.modules)
    held = (value for of in (vars(unittest), globals(), *(each for _, each in classes)) for value in of.values())
    functions = [(each, each.__code__, each.__defaults__) for each in held if isinstance(each, types.FunctionType)]
    update, trace, profile, tests = dict.update, sys.settrace, sys.setprofile, unittest

    def restore() -> None:
        for attributes, before in modules:  # builtins first: what is called below is what it was
            update(attributes, before)
        update(sys.modules, known)
        trace(None)
        profile(None)
        for function, code, defaults in functions:
            function.__code__, function.__defaults__ = code, defaults
        for each, before in classes:
            for name in set(vars(each)) - set(before):
                delattr(each, name)
            for name, value in before.items():
                if vars(each)[name] is not value:
                    setattr(each, name, value)
        tests.main = lambda *_, **__: None  # type: ignore[assignment,misc]  # test classes are run below

    return restore


def run_tests(namespace: dict[str, Any]) -> None:
    """Run the classes and functions that are tests, after the tests' own statements. Raises AssertionError for a failure."""
    loader, suite = unittest.TestLoader(), unittest.TestSuite()
    for name, value in list(namespace.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            suite.addTests(loader.loadTestsFromTestCase(value))
        elif name.startswith("test") and isinstance(value, types.FunctionType):
            value()
    result = unittest.TestResult()
    suite.run(result)
    # A test that is skipped or fails as expected has shown nothing: a completion can raise SkipTest.
    bad = [*result.failures, *result.errors, *result.expectedFailures, *result.skipped]
    assert not bad, bad[0][1]
    assert not result.unexpectedSuccesses


if __name__ == "__main__":
    main()
