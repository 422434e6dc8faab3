"""Rewriting passes. Each handles one construct of Metal by editing the token stream."""
