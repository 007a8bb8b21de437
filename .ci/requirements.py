"""Prints the requirements of tierstore in pyproject.toml, and those of the extras that the arguments name."""

import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in extras[extra]))
