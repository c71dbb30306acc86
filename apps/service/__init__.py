"""The object-counting service, over HTTP and on a web page: upload images, train a model and download it.

Imports `common`, `inputs`, `grading`, `rewards` and `training.diagnosis`, but no torch at start-up: jobs run `grpo.py`
and `evaluate.py` as separate processes. Start reading at `app.py` (the endpoints), then `jobs.py` (files and jobs).
`schema.py` defines the request and response bodies, `connections.py` closes connections that stall,
`middleware.py` controls access and room for uploads, `uploads.py` checks ZIPs and decodes images, and `page/` contains
the web page, the form for the token and the description of the data format.
"""
