"""Paged attention as array code: rows, blocks and tiles. Start reading at `ops.py`."""
