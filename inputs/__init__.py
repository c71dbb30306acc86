"""Rows and images: data sets in every format that people have them in, and images decoded and resized once.

Imports `common` and `config`. Start reading at `rows.py`: it turns a row of any shape into a `Sample`. `images.py`
checks an image when its row is loaded and decodes it when the row is used.
"""
