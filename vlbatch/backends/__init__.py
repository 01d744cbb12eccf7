"""Arrays of numpy, Paddle and torch behind one small protocol.

Owns: allocation, views and in-place moves in one library's memory.
Never: leaks a framework type into the core, or gives an array a new address. Importing this
package imports no tensor framework; ``make_backend`` imports the one that is asked for.
"""

from vlbatch.backends.base import Backend
from vlbatch.backends.factory import BACKENDS, make_backend
from vlbatch.backends.host import HostOperations, NumpyBackend

__all__ = ["BACKENDS", "Backend", "HostOperations", "NumpyBackend", "make_backend"]
