"""What every room may use and no room owns: errors, command lines, processes, records, files and figures.

Imports nothing of the project. Start reading at `records.py`: it defines what travels between the rooms (`Sample`,
`Prompt`, `Rollout`, `Group`). `distributed.py` wraps the few collectives; `errors.py` has the exceptions that end a
script in one line.
"""

import logging

import transformers.utils

# transformers would import scikit-learn, pandas and SciPy for features that nothing here uses, which takes more than a
# second at every start. This package is imported before any model class is.
transformers.utils.is_sklearn_available = transformers.utils.is_scipy_available = lambda: False
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its warnings on a CPU concern speed alone
