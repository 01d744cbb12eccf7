"""CUDA kernels of a batch, compiled at run time: moves, features, positions.

Owns: ``kernels.cu``, its compilation, what the kernels are given to read, and their launches.
Never: uses an array library. Memory comes as addresses and streams as handles, so that Paddle,
torch and CuPy are served alike; whoever owns the memory keeps it alive.

Importing this package needs no CUDA. Making ``Kernels`` needs the packages ``cuda-core`` and
``cuda-bindings`` (``is_available``) and a device; its context must be current then and at every
launch, as array libraries see to.
"""

from vlbatch.backends.cuda.features import FeatureGather
from vlbatch.backends.cuda.mover import CudaMover
from vlbatch.backends.cuda.positions import DecodePositions
from vlbatch.backends.cuda.program import Kernels, is_available

__all__ = ["CudaMover", "DecodePositions", "FeatureGather", "Kernels", "is_available"]
