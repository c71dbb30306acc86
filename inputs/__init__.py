"""Rows, images and the environment of a run: reading data sets in every supported format, and checking, decoding and
resizing images.

Imports `common`, `config` and `grading`. Start reading at `rows.py`, which turns a row of any format into a `Sample`.
`images.py` checks an image when its row is loaded and decodes it when the row is used. `environment.py` finds the
environment of a run, and describes its tools.
"""
