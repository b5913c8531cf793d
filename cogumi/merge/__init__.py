"""Merging LoRA adapters into their full-precision base, exactly and checked."""

from cogumi.core.errors import MergeError
from cogumi.merge.merge_manifest import CheckReport, check_merged
from cogumi.merge.merging import MergeReport, merge_adapter

__all__ = ["CheckReport", "MergeError", "MergeReport", "check_merged", "merge_adapter"]
