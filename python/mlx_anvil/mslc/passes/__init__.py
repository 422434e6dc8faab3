"""Rewriting passes, one construct of Metal each. Each takes the token stream and edits it."""
