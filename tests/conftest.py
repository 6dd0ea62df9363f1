"""What every test gets. The guards are a plugin of their own, so that tests/test_guards.py can load them into a fresh run."""

pytest_plugins = ["tests.guards"]
