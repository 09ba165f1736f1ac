# SPDX-License-Identifier: Apache-2.0
"""Packages that a test compares with, where they are installed."""

import importlib
import os
import sys


def require(name, hint):
    """Imports a package, by Debian's own interpreter where this one lacks it; else skips the test (exit code 77)."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        system_python = "/usr/bin/python3"  # Debian's packages are for Debian's interpreter, whichever comes first in PATH
        if os.path.realpath(sys.executable) != os.path.realpath(system_python) and os.access(system_python, os.X_OK):
            os.execv(system_python, [system_python] + sys.argv)
        print(f"skipped: {name} is not installed ({error}); {hint}")
        sys.exit(77)
