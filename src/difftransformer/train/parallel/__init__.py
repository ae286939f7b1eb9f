"""Training on several processes: which process does what, on PyTorch's own engine. One process is a mesh of one."""

from .deferred import DeferredModel
from .mesh import Mesh
from .processes import ALONE, Processes, joined
