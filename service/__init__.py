"""The object-counting service: upload images, train, watch, download, over HTTP and on a page.

Imports `common`, `config`, `inputs`, `grading` and `rewards`, and no torch: jobs run `grpo.py` and `evaluate.py` as
processes. Start reading at `app.py` (the endpoints), then `jobs.py` (files and jobs). `schema.py` has the request and
response bodies, `middleware.py` access control, `uploads.py` the check of a ZIP, `page/` the page.
"""
