"""Tests, one folder for each op and each part of the package.

Helper modules that folders share are here, and imported by their names: ``import support``. Those of one folder are
imported by their path: ``from tests.flash_attention.cases import draw``.
"""
