"""Rows and images: reading plain data sets, and checking, decoding and resizing images.

Imports `common`, `config` and `grading`. Start reading at `rows.py`, which turns a row into a `Sample`; rows of other
shapes and other files are read by parts/formats.
`images.py` checks an image when its row is loaded and decodes it when the row is used.
"""
