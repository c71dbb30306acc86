"""The Hugging Face hub: use only its cache if it cannot be reached."""

import functools
import os

import requests
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError


@functools.cache
def go_offline_if_unreachable() -> bool:
    """Turn the hub off (HF_HUB_OFFLINE) if it cannot be reached, and return whether it is off.

    Otherwise, each request would be repeated for half a minute.
    """
    if not constants.HF_HUB_OFFLINE:
        try:
            requests.head(constants.ENDPOINT, timeout=5)
        except requests.RequestException:
            constants.HF_HUB_OFFLINE = True
            os.environ["HF_HUB_OFFLINE"] = "1"  # for `datasets`, which is imported later, and for other processes
    return constants.HF_HUB_OFFLINE


def cached_dataset(name: str) -> str | None:
    """Return the folder of a data set in the hub's cache, or None. `datasets` itself looks only in its own cache."""
    try:
        return snapshot_download(name, repo_type="dataset", local_files_only=True)
    except LocalEntryNotFoundError:
        return None
