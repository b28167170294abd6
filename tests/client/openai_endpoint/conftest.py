"""A host that only runs tests on a GPU need not have the endpoint's packages."""

import importlib.util

NEEDED = ("openai", "pydantic", "starlette", "tritonclient", "uvicorn")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]
