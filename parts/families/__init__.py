"""Families of models beyond Qwen2.5-VL, Qwen3-VL and Qwen's text models, each one record.

Imports `common`, `packing` and `policy`; `policy.families.find_family` asks for it. Start reading at `records.py`.
`delta_net.py` packs linear attention (Qwen3.5), `experts.py` prepares mixtures of experts.
"""

from parts.families.records import FAMILIES

__all__ = ["FAMILIES"]
