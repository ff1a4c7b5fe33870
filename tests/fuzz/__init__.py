"""Readers of files that others write, held to hostile input: no traceback, no hang, no gigabyte, no write. `make fuzz` runs them for long."""
