"""A stand-in for NVIDIA's TensorRT-LLM on a machine without a GPU: for tests only.

It has the surface that a serving worker uses (names, signatures, defaults, classes of errors) and behaves as the real
one is documented to: results are one mutable object with cumulative lists, the sampling parameters that are passed get
changed, KV events drop the oldest when nobody reads them, statistics and events are polled by calls that block, an
abort takes effect at a later iteration, ``shutdown`` may hang. Its model is a hash. What it plays beside (which
release, how fast, which faults) is set by ``TRTLLM_STANDIN``, see ``_engine.py``.
"""

from .disaggregated_params import DisaggregatedParams
from .llmapi import LLM
from .sampling_params import GuidedDecodingParams, SamplingParams
from .version import __version__

__all__ = ["LLM", "DisaggregatedParams", "GuidedDecodingParams", "SamplingParams", "__version__"]
