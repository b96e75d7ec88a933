"""The tests of onefold; a package, so that test modules are importable in worker processes too."""
