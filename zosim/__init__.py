"""Plan, simulate and run zeroth-order fine-tuning of large language models.

The public face of the five packages. Importing it costs no torch: planning and simulating never need one.
"""

from importlib.metadata import version

__version__ = version("zosim")

__all__ = ["__version__"]
