"""The suites need the installed plugin alone; the project's own tests run pytest inside pytest."""

pytest_plugins = ["pytester"]
