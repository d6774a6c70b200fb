"""Interpreted kernels are slow: the first case of every test runs each of them. The others are among the slow tests, and rotate."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow and rotating what interprets a kernel that an earlier case of the same test has interpreted."""
    seen = set()
    for item in items:
        if "kernels" not in item.path.parts or not isinstance(item, pytest.Function):
            continue
        params = getattr(item, "callspec", None)
        bodies = {"tpu", "gpu"} & {
            value for value in (params.params.values() if params else ()) if isinstance(value, str)
        }
        test = item.path, item.cls, item.originalname, *bodies
        if bodies and test in seen and item.cls is not None:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.rotating)
        seen.add(test)
