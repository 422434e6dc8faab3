"""``python -m mlx_anvil report``: what a machine tells about this package, as one Markdown and one JSON file.

An owner of a Mac runs it once and attaches both files to an issue. Every section runs by itself: one that fails is
recorded with its traceback, and the others go on. The files are written anew before each section, so that a crash of the
interpreter leaves what was known until then.
"""
