"""More than one process: what MLX's distributed engine (``mx.distributed``) lacks.

Every function takes the group that ``mx.distributed.init()`` returns, of any backend of MLX.
"""
