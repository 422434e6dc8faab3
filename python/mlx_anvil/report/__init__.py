"""``python -m mlx_anvil report``: tests this machine and writes a Markdown and a JSON file.

The owner of a Mac runs it once and attaches both files to an issue. A section that fails is recorded with its
traceback, and the others still run. The files are rewritten before each section, so that a crash of the interpreter
keeps the results so far.
"""
